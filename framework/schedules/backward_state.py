"""The state that a layer-by-layer pass carries, and the hooks that a schedule runs during the pass.

The gradient hook receives the gradients of each stage and layer, and stores them or updates by them. The other hooks
run before and after the loop over a stack's layers, and before each layer. Each hook takes the `BackwardState` that the
pass carries from stage to stage, and returns a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import jax

from plimsoll.framework.layout import Nested
from plimsoll.framework.learner.update import GroupLeaves


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    """Parameters of one stage, of one stack (stacked), or of one layer.

    Attributes:
        frozen: the parameters that are not differentiated.
        trainable: the parameters that have gradients.
    """

    frozen: Nested = field(default_factory=dict)
    trainable: Nested = field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StagedLayer:
    """One layer's weights and state that are on the device between two transfers; see `optimizer_prefetch.py`.

    Attributes:
        groups: the leaves that are moved, by the label of their parameter group; there are no gradients among them.
        index: int32 scalar, index of the layer.
    """

    groups: dict[str, GroupLeaves[jax.Array]]
    index: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BackwardState:
    """State that a backward pass carries from layer to layer.

    It is part of the carry of the compiled loops, whose order is the order of these fields. Fields that a schedule does
    not use stay empty. The groups of arrays are keyed by stage, like those of the training state.

    Attributes:
        ema: moving averages of the parameters.
        frozen: frozen parameters.
        gradient: buffers of all gradients, on the device or the host.
        ok: bool scalar, whether the step counts and all gradients so far were finite.
        optimizer: optimizer state, by stage and group.
        parameter: trainable parameters.
        spare, spare_ema: second copies of optimizer state and averages in host memory, which an update writes.
        squares: f32 scalar or wider, sum of the squares of the gradients so far.
        staged_layer: within the loop over a stack's layers, the state that is prefetched for the next update, or left
            by the last one.
        updated: int32 scalar, number of stages and layers that were updated.
    """

    ema: Nested = field(default_factory=dict)
    frozen: Nested = field(default_factory=dict)
    gradient: Nested = field(default_factory=dict)
    ok: jax.Array | None = None
    optimizer: Nested = field(default_factory=dict)
    parameter: Nested = field(default_factory=dict)
    spare: Nested = field(default_factory=dict)
    spare_ema: Nested = field(default_factory=dict)
    squares: jax.Array | None = None
    staged_layer: StagedLayer | None = None
    updated: jax.Array | None = None

    def select_weights(self, stage: str) -> Weights:
        """Return the parameters that belong to a stage, or to a stack, all layers stacked."""
        return Weights(self.frozen.get(stage, {}), self.parameter.get(stage, {}))


def _keep_state(backward_state: BackwardState, *position: object) -> BackwardState:
    """Return the state unchanged: a hook that does nothing."""
    return backward_state


@dataclass(frozen=True)
class BackwardHooks:
    """All hooks of one backward pass. With memory.remat = sqrt, each group of layers has its own loop.

    Attributes:
        on_grads: (backward state, stage, gradients, layer index or None) -> backward state, called once for each layer
            of a stack and once for each stage outside a stack. The gradients have the structure of the stage's
            trainable parameters; a layer's gradients have no leading axis.
        begin_loop: (backward state, stack, index of the layer that runs first) -> backward state, called before the
            loop.
        begin_layer: (backward state, stack, index of the layer) -> backward state, called before a layer runs backward.
            The layer's `on_grads` sees what this hook adds.
        end_loop: (backward state, stack) -> backward state, called after the loop.
    """

    on_grads: Callable[[BackwardState, str, Nested, jax.Array | None], BackwardState]
    begin_loop: Callable[[BackwardState, str, jax.Array], BackwardState] = _keep_state
    begin_layer: Callable[[BackwardState, str, jax.Array], BackwardState] = _keep_state
    end_loop: Callable[[BackwardState, str], BackwardState] = _keep_state


@dataclass(frozen=True)
class ForwardHooks:
    """Hooks of a forward pass that changes weights before they are read.

    Attributes:
        stacks: names of the stacks that have hooks.
        begin_loop: (state, stack, index of the layer that runs first) -> state, called before the loop over a stack's
            layers.
        begin_layer: (state, stack, index of the layer, index of the layer that runs next) -> state, called before a
            layer's weights are read. The last layer is its own next one.
        end_loop: (state, stack) -> state, called after the loop.
    """

    stacks: Collection[str] = ()
    begin_loop: Callable[[BackwardState, str, jax.Array], BackwardState] = _keep_state
    begin_layer: Callable[[BackwardState, str, jax.Array, jax.Array], BackwardState] = _keep_state
    end_loop: Callable[[BackwardState, str], BackwardState] = _keep_state
