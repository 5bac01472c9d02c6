"""Data types of an update: parameter groups with their weights, gradients and state, and layers of stacks.

A "layer" of a stack is one period of its pattern. An "update unit" is a layer, or a stage outside the stacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.tree_util import tree_map_with_path

from plimsoll.framework.layers.layer_range import LayerRange
from plimsoll.framework.layout import Nested, flatten, path_name
from plimsoll.framework.optimizers.rounding import BlockOrigin

# The stage name of a group that spans all stages.
ALL_STAGES = "model"


class Decision(NamedTuple):
    """The decision that depends on all gradients, and the position of a layer, which random rounding depends on.

    All fields except `origin` are scalars on the device.

    Attributes:
        norm: norm of all gradients together.
        factor: factor that clips the gradients.
        ok: whether the step counts.
        count: number of updates before this one.
        seed: uint32, the run's seed.
        layer: index of the first layer to update.
        origin: a block's position in its tensor; None for the whole tensor.
    """

    norm: jax.Array
    factor: jax.Array
    ok: jax.Array
    count: jax.Array
    seed: jax.Array
    layer: jax.Array
    origin: BlockOrigin | None = None


@dataclass(frozen=True)
class ParamGroup:
    """The parameters of one stage that one optimizer updates.

    Attributes:
        stage: the stage. With learner.scope = model it is ALL_STAGES, and the group has the parameters of all stages.
        label: label of the optimizer.
        paths: paths of the parameters within the stage.
        length: number of stacked layers, or None if the parameters are not stacked.
        layer_range: the range of layers that the stage holds, if it holds only part of a stack.
    """

    stage: str
    label: str
    paths: tuple[str, ...]
    length: int | None
    layer_range: LayerRange | None = None

    @property
    def home(self) -> str:
        """Return the stage of the whole stack that contains these parameters; without a stack, the stage itself."""
        return self.stage if self.layer_range is None else self.layer_range.home

    @property
    def first_layer(self) -> int:
        """Return the index of the first layer in the whole stack."""
        return 0 if self.layer_range is None else self.layer_range.first

    @property
    def spans_stages(self) -> bool:
        """Return whether the group has the parameters of all stages, with separate layers (learner.scope = model)."""
        return self.stage == ALL_STAGES

    @property
    def path_prefix(self) -> str:
        """Return the prefix that turns the group's paths into paths in the model."""
        return "" if self.spans_stages else f"{self.stage}/"


# (weights, gradients, entry of the optimizer state, averages) of one layer, or of all layers of a group, stacked.
LayerTrainState = tuple[Nested, Nested, Nested, Nested]
# (new weights, optimizer state, averages).
LayerUpdate = tuple[Nested, Nested, Nested]


class LayerUpdateFn(Protocol):
    """The update of one layer, or of a stage that is not stacked."""

    @property
    def counters(self) -> frozenset[str]:
        """Return the paths of update counters in the entry of the optimizer state, which are the same in all layers."""
        ...

    def __call__(
        self, weights: Nested, grads: Nested, entry: Nested, average: Nested, decision: Decision
    ) -> LayerUpdate:
        """Return the new weights, entry of the optimizer state and averages; gradients have no new value."""
        ...


def update_all_layers(
    group: ParamGroup, update: LayerUpdateFn, train_state: LayerTrainState, decision: Decision
) -> LayerUpdate:
    """Update a whole group at once: the update of one layer, vmapped over the layers if there are several.

    Args:
        group: the parameter group.
        update: the update of one layer.
        train_state: weights, gradients, optimizer state and averages, stacked like the group.
        decision: see `Learner.decide`.
    """
    if group.length is None:
        return update(*train_state, decision)
    train_state, axes = _share_counters(train_state, update.counters)
    # `train_state` may hold only some layers of the stage, so the leaves' shape gives their number.
    num_layers = jax.tree.leaves(train_state[0])[0].shape[0]
    layers = decision.layer + jnp.arange(num_layers)
    # Only the field `layer` of the decision differs between layers.
    decision_axes = Decision(None, None, None, None, None, 0)  # type: ignore[arg-type]
    update_layers = jax.vmap(update, in_axes=(*axes, decision_axes))
    return update_layers(*train_state, decision._replace(layer=layers))


def _share_counters(train_state: LayerTrainState, counters: frozenset[str]) -> tuple[LayerTrainState, tuple[Any, ...]]:
    """Replace the layers' update counters, which are equal, by one number.

    If vmap mapped over them, the learning rate and Adam's bias corrections would become vectors over the layers, and
    XLA for TPU would transpose whole stacks of weights to multiply by them: 24 copies, 2.9% of Llama-2-7B's peak on
    16 chips.

    Args:
        train_state: weights, gradients, state and averages of a group, stacked.
        counters: paths of the update counters in the entry of the optimizer state.

    Returns:
        (train state, the axes of its leaves that vmap maps over).
    """
    weights, grads, entry, average = train_state

    def unstack_counter(keypath: Any, leaf: jax.Array) -> jax.Array:
        return leaf[0] if path_name(keypath) in counters else leaf

    def get_vmap_axis(keypath: Any, leaf: jax.Array) -> int | None:
        return None if path_name(keypath) in counters else 0

    entry_axes = tree_map_with_path(get_vmap_axis, entry)
    entry = tree_map_with_path(unstack_counter, entry)
    return (weights, grads, entry, average), (0, 0, entry_axes, 0)


def slice_layer(stacks: Any, index: Any) -> Any:
    """Return one layer of stacked leaves: [N, ...] -> [...]; `index` may be traced."""
    return jax.tree.map(lambda stack: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False), stacks)


def write_layer(stacks: Any, layer_leaves: Any, index: Any) -> Any:
    """Write a layer's leaves [...] into stacked leaves [N, ...] at `index`, which may be traced."""
    return jax.tree.map(lambda stack, x: jax.lax.dynamic_update_index_in_dim(stack, x, index, 0), stacks, layer_leaves)


def select_updated(ok: jax.Array, new: Any, old: Any) -> Any:
    """Select the new leaves if the step counts, else the old ones."""
    return jax.tree.map(lambda new_leaf, old_leaf: jnp.where(ok, new_leaf, old_leaf), new, old)


def unflatten_like(like: Nested, flat: dict[str, Any]) -> Nested:
    """Arrange leaves, given by path in any order, in the structure of the tree `like`."""
    paths = flatten(like)
    assert paths.keys() == flat.keys(), sorted(paths.keys() ^ flat.keys())
    leaves = [flat[path] for path in paths]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
