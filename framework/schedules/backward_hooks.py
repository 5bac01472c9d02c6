"""Hooks that a schedule runs during a layer-by-layer backward pass: for gradients, and for the layer loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from plimsoll.framework.layout import Nested

BackwardState = dict[str, Any]  # backward state: "parameter", "frozen", and whatever the hooks change
# The gradient hook: (backward state, stage, gradients, layer index or None) -> backward state. The gradients have the
# structure of the stage's trainable parameters; a layer's gradients have no leading axis. It is called once for each
# layer of a stack and once for each stage outside a stack.
GradientHook = Callable[[BackwardState, str, Nested, jax.Array | None], BackwardState]


class LayerHooks(NamedTuple):
    """Hooks that the backward loop over a stack's layers calls in addition to `on_grads`.

    They may add keys to the backward state. With memory.remat = sqrt, each group of layers has its own loop.

    Attributes:
        begin_loop: (work, stack, index of the first layer) -> work, called before the loop.
        begin_layer: (work, stack, index of the layer) -> work, called before a layer runs backward. The layer's
            `on_grads` sees what this hook adds.
        end_loop: (work, stack) -> work, called after the loop.
    """

    begin_loop: Callable[[BackwardState, str, jax.Array], BackwardState] = lambda backward_state, stack, index: (
        backward_state
    )
    begin_layer: Callable[[BackwardState, str, jax.Array], BackwardState] = lambda backward_state, stack, index: (
        backward_state
    )
    end_loop: Callable[[BackwardState, str], BackwardState] = lambda backward_state, stack: backward_state


class BackwardHooks(NamedTuple):
    """All hooks of one backward pass."""

    on_grads: GradientHook
    layer_hooks: LayerHooks = LayerHooks()
