"""Gradient checkpointing of cheap functions: only the inputs are saved, and the backward pass recomputes the rest.

Differentiating GELU saves six arrays of the hidden width, and differentiating a norm saves six float32 arrays of the
model's width. Reading them takes more time than recomputing them from one input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def save_inputs(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Wrap `function` so that only its inputs are saved; values and gradients stay the same.

    Reverse mode only: the result has no forward-mode derivative.

    Args:
        function: maps arrays to an array; it closes over no traced array. It should be cheap: no matrix products.
    """

    def forward(*inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return function(*inputs), inputs

    def backward(inputs: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[Any, ...]:
        _, pull = jax.vjp(function, *inputs)
        return pull(cotangent)

    # Not `jax.checkpoint`: inside a layer that is itself under `jax.checkpoint`, the layer's policy would decide.
    cheap = jax.custom_vjp(function)
    cheap.defvjp(forward, backward)
    return cheap
