"""Functions of which the backward pass keeps the inputs, and makes the intermediates again.

Differentiating GELU keeps six arrays of the hidden width, differentiating a norm six float32 arrays of the model's
width: reading those costs more time than computing them again from one input. `jax.checkpoint` around them would not
do: where the unit around is under `jax.checkpoint` too, its policy decides for all that is inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def keeping_inputs(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function`, with the same values and gradients. Reverse mode only: it has no forward-mode derivative.

    Args:
        function: of arrays, to an array; it closes over no traced array. Cheap: no products of matrices.
    """

    def forward(*inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return function(*inputs), inputs

    def backward(inputs: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[Any, ...]:
        _, pull = jax.vjp(function, *inputs)
        return pull(cotangent)

    cheap = jax.custom_vjp(function)
    cheap.defvjp(forward, backward)
    return cheap
