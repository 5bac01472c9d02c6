"""Gradient checkpointing of cheap functions: the inputs are kept, and the backward pass recomputes everything else.

Differentiating GELU keeps six arrays of the hidden width, and differentiating a norm six float32 arrays of the model's
width: reading them costs more time than computing them again from one input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def keeping_inputs(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Wraps `function`, with the same values and gradients. Reverse mode only: there is no forward-mode derivative.

    Args:
        function: of arrays, to an array; it closes over no traced array. Cheap: no products of matrices.
    """

    def forward(*inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return function(*inputs), inputs

    def backward(inputs: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[Any, ...]:
        _, pull = jax.vjp(function, *inputs)
        return pull(cotangent)

    # Not `jax.checkpoint`: inside a unit that is under it too, the unit's policy would decide.
    cheap = jax.custom_vjp(function)
    cheap.defvjp(forward, backward)
    return cheap
