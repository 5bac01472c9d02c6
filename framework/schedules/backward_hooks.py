"""Hooks that a schedule runs during a layer-by-layer backward pass.

The gradient hook receives the gradients of each stage and layer, and stores them or updates by them. The layer hooks
run before and after the loop over a stack's layers, and before each layer. Each hook takes the `BackwardState` that the
pass carries from stage to stage, and returns a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from plimsoll.framework.layout import Nested

# State that a backward pass carries: "parameter", "frozen", and everything else that the hooks read or change.
BackwardState = dict[str, Any]
# The gradient hook: (backward state, stage, gradients, layer index or None) -> backward state. The gradients have the
# structure of the stage's trainable parameters; a layer's gradients have no leading axis. It is called once for each
# layer of a stack and once for each stage outside a stack.
GradientHook = Callable[[BackwardState, str, Nested, jax.Array | None], BackwardState]


class LayerHooks(NamedTuple):
    """Hooks that the backward loop over a stack's layers calls in addition to `on_grads`.

    They may add keys to the backward state. With memory.remat = sqrt, each group of layers has its own loop.

    Attributes:
        begin_loop: (backward state, stack, index of the layer that runs first) -> backward state, called before the
            loop.
        begin_layer: (backward state, stack, index of the layer) -> backward state, called before a layer runs backward.
            The layer's `on_grads` sees what this hook adds.
        end_loop: (backward state, stack) -> backward state, called after the loop.
    """

    begin_loop: Callable[[BackwardState, str, jax.Array], BackwardState] = lambda backward_state, stack, index: (
        backward_state
    )
    begin_layer: Callable[[BackwardState, str, jax.Array], BackwardState] = lambda backward_state, stack, index: (
        backward_state
    )
    end_loop: Callable[[BackwardState, str], BackwardState] = lambda backward_state, stack: backward_state


class BackwardHooks(NamedTuple):
    """All hooks of one backward pass.

    Attributes:
        on_grads: the gradient hook.
        layer_hooks: the hooks of the loop over layers; by default they do nothing.
    """

    on_grads: GradientHook
    layer_hooks: LayerHooks = LayerHooks()
