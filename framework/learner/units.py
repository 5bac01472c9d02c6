"""The data of an update: groups of parameters, bundles of their weights, gradients and state, units and layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import tree_map_with_path

from framework.layout import (
    Nested,
    ParameterSpec,
    flatten,
    key_name,
)
from framework.optimizers.rounding import Origin


class Decision(NamedTuple):
    """The decision that all gradients take together, and the place of a unit, which random rounding depends on.

    All but `origin` are scalars on the device. `norm` is that of all gradients, `factor` clips them, `ok` says whether
    the step counts. `count` is the number of updates before this one, `seed` (uint32) the run's. `layer` is the first
    layer that is to be updated, `origin` a block's place in its tensor (None: all of it).
    """

    norm: jax.Array
    factor: jax.Array
    ok: jax.Array
    count: jax.Array
    seed: jax.Array
    layer: jax.Array
    origin: Origin | None = None


@dataclass(frozen=True)
class Group:
    """The parameters of one stage that one optimizer updates.

    `paths` are those within the stage, `length` is the number of layers that they are stacked for, or None. With
    learner.scope = model the stage is "model", and holds the parameters of all stages.
    """

    stage: str
    label: str
    paths: tuple[str, ...]
    length: int | None


# (weights, gradients, entry of the optimizer state, averages) of one unit, or of all units of a group, stacked.
Bundle = tuple[Nested, Nested, Nested, Nested]
# (new weights, optimizer state, averages).
Update = tuple[Nested, Nested, Nested]
UnitUpdate = Callable[..., Update]


def all_units(
    group: Group,
    update: UnitUpdate,
    bundle: Bundle,
    decision: Decision,
) -> Update:
    """A group's update in one piece: the unit's, mapped over the layers where there are several."""
    if group.length is None:
        return update(*bundle, decision)
    bundle, axes = _share_counters(bundle)
    # The bundle may hold some layers of the stage only, so its leaves tell their number.
    num_layers = jax.tree.leaves(bundle[0])[0].shape[0]
    layers = decision.layer + jnp.arange(num_layers)
    # Of the decision only the layer differs between units.
    decision_axes = Decision(None, None, None, None, None, 0)  # type: ignore[arg-type]
    update_layers = jax.vmap(update, in_axes=(*axes, decision_axes))
    return update_layers(*bundle, decision._replace(layer=layers))


def _share_counters(bundle: Bundle) -> tuple[Bundle, tuple[Any, ...]]:
    """Replaces the layers' numbers of updates, which are equal, by one number.

    Mapped over, they would turn the learning rate and Adam's corrections into vectors over the layers, and XLA for TPU
    then transposes whole stacks of weights to multiply by those: 24 copies, 2.9% of Llama-2-7B's peak on 16 chips.

    Returns:
        (bundle, the axes of its leaves that vmap maps over).
    """
    weights, grads, entry, average = bundle

    def shared(keypath: Any, leaf: jax.Array) -> bool:
        # optax calls the number of updates `count` in all its states.
        if key_name(keypath[-1]) != "count":
            return False
        return leaf.ndim == 1 and jnp.issubdtype(leaf.dtype, jnp.integer)

    def first_of_shared(keypath: Any, leaf: jax.Array) -> jax.Array:
        return leaf[0] if shared(keypath, leaf) else leaf

    def mapped_axis(keypath: Any, leaf: jax.Array) -> int | None:
        return None if shared(keypath, leaf) else 0

    entry_axes = tree_map_with_path(mapped_axis, entry)
    entry = tree_map_with_path(first_of_shared, entry)
    return (weights, grads, entry, average), (0, 0, entry_axes, 0)


def unit_at(stacks: Any, index: Any) -> Any:
    """One unit of stacked leaves [N, ...]: its leaves [...]; `index` may be traced."""
    return jax.tree.map(lambda stack: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False), stacks)


def with_unit(stacks: Any, unit: Any, index: Any) -> Any:
    """Stacked leaves [N, ...] with a unit's leaves [...] at `index`, which may be traced."""
    return jax.tree.map(
        lambda stack, x: jax.lax.dynamic_update_index_in_dim(
            stack,
            x,
            index,
            0,
        ),
        stacks,
        unit,
    )


def chosen(ok: jax.Array, new: Any, old: Any) -> Any:
    """The new leaves where a step counts, else the old ones."""
    return jax.tree.map(lambda new_leaf, old_leaf: jnp.where(ok, new_leaf, old_leaf), new, old)


def unstack(spec: ParameterSpec, length: int | None) -> ParameterSpec:
    """The spec of one layer of a parameter that is stacked for `length` layers; a single one's (None) as it is."""
    if length is None:
        return spec
    return replace(
        spec,
        shape=spec.shape[1:],
        mesh_axes=spec.mesh_axes[1:],
        roles=spec.roles[1:],
    )


def apart(spec: ParameterSpec, leaf: Any) -> Any:
    """The layers of a stacked leaf, an array or a spec, by their numbers; a leaf that is not stacked as it is."""
    length = spec.num_layers
    if length is None:
        return leaf
    layers = {}
    for index in range(length):
        if isinstance(leaf, ParameterSpec):
            layers[str(index)] = unstack(leaf, length)
        else:
            layers[str(index)] = leaf[index]
    return layers


def in_structure(like: Nested, flat: dict[str, Any]) -> Nested:
    """Leaves by path, in any order, in the structure of the tree `like`."""
    paths = flatten(like)
    assert paths.keys() == flat.keys(), sorted(paths.keys() ^ flat.keys())
    leaves = [flat[path] for path in paths]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
