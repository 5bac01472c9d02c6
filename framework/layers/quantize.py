"""Quantized storage of weights that do not learn: int8, and the 4-bit NormalFloat of QLoRA (arXiv 2305.14314).

A weight [..., in, out] becomes codes, and scales [..., in / block, out], the largest magnitudes of blocks, in float32.
The weight's mesh axes apply to both.
    int8   int8 [..., in, out], round(127 w / scale); a block is a column, one output channel
    nf4    uint8 [..., in / 2, out], half a byte for the nearest of 16 values; a block is 64 rows; scales are not
           quantized again. A byte holds rows i and i + 32 of its block, so halves are joined as whole tiles.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp

from framework.layout import Nested, ParameterSpec

Storage = Literal["int8", "nf4"]
# The weights that share a scale in nf4.
BLOCK = 64
# Appendix E of the paper: quantiles of a normal distribution, divided by the largest.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def quantized_specs(weight: ParameterSpec, storage: Storage, path: str) -> dict[str, ParameterSpec]:
    """The specs {"codes", "scales"} of the weight [in, out] at `path`, both drawn by its own initializer.

    Raises ValueError when 64 does not divide nf4's `in`. A mesh that would cut a block is refused by the layout.
    """
    inputs, outputs = weight.shape
    if storage == "nf4" and inputs % BLOCK:
        raise ValueError(f"nf4 has blocks of {BLOCK}, which do not divide {inputs}, the inputs of {path}; try int8")

    def part(name: str, dtype: str, rows: int) -> ParameterSpec:
        def initialize(key: jax.Array, *_: Any) -> jax.Array:
            # Codes and scales get the same key (see layout.initial): both belong to one draw.
            drawn = weight.initializer(key, weight.shape, jnp.float32)
            return quantize(drawn, storage)[name]

        # A single row of scales cannot be cut.
        mesh_axes = weight.mesh_axes if rows > 1 else (None, weight.mesh_axes[1])
        return ParameterSpec(
            (rows, outputs),
            dtype,
            mesh_axes,
            initializer=initialize,
            roles=(f"rows of {inputs // rows} inputs", "out"),
            own_dtype=True,
            quantized=True,
        )

    if storage == "int8":
        codes = part("codes", "int8", inputs)
        scales = part("scales", "float32", 1)
    else:
        codes = part("codes", "uint8", inputs // 2)
        scales = part("scales", "float32", inputs // BLOCK)
    return {"codes": codes, "scales": scales}


def quantize(weight: jax.Array, storage: Storage) -> dict[str, jax.Array]:
    """A weight [..., in, out] of any float dtype as {"codes", "scales"}; nf4: `in` is a multiple of 64."""
    *stack, inputs, outputs = weight.shape
    block = BLOCK if storage == "nf4" else inputs
    blocks = weight.astype(jnp.float32).reshape(*stack, inputs // block, block, outputs)
    scales = jnp.max(jnp.abs(blocks), axis=-2)
    # A block of zeros has the scale 0.
    divisors = jnp.where(scales == 0, 1, scales)
    units = blocks / divisors[..., None, :]
    if storage == "int8":
        codes = jnp.round(127 * units).astype(jnp.int8)
        return {"codes": codes.reshape(weight.shape), "scales": scales}
    # The index of the nearest value is the number of midpoints below.
    nearest = jnp.uint8(0)
    for low, high in pairwise(NF4):
        nearest = nearest + (units > (low + high) / 2).astype(jnp.uint8)
    low_half, high_half = jnp.split(nearest, 2, axis=-2)
    codes = low_half | high_half << 4
    return {"codes": codes.reshape(*stack, inputs // 2, outputs), "scales": scales}


def dequantize(parts: Nested, storage: Storage, dtype: Any) -> jax.Array:
    """The inverse of `quantize`: [..., in, out], computed in float32 and cast to `dtype`."""
    codes = parts["codes"]
    scales = parts["scales"]
    *stack, rows, outputs = codes.shape
    num_blocks = scales.shape[-2]
    codes = codes.reshape(*stack, num_blocks, rows // num_blocks, outputs)
    if storage == "int8":
        units = codes.astype(jnp.float32) / 127
    else:
        nibbles = jnp.concatenate([codes & 15, codes >> 4], axis=-2)
        units = _look_up(nibbles, NF4)
    weight = units * scales[..., None, :]
    return weight.reshape(*stack, -1, outputs).astype(dtype)


def _look_up(codes: jax.Array, values: tuple[float, ...]) -> jax.Array:
    """values[codes], by selecting between halves of the values, one bit of the codes at a time."""
    # TPUs are slow at looking up.
    if len(values) == 2:
        # A sum rather than a choice between constants: XLA may hold arrays full of them.
        odd = (codes & 1).astype(jnp.float32)
        return odd * values[1] + (1 - odd) * values[0]
    half = len(values) // 2
    is_upper = codes & half
    upper = _look_up(codes, values[half:])
    lower = _look_up(codes, values[:half])
    return jnp.where(is_upper, upper, lower)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(storage: Storage, x: jax.Array, parts: Nested) -> jax.Array:
    """x [..., in] @ the weight [in, out] that `parts` store, in x's dtype."""
    # The backward pass dequantizes again, and so keeps nothing else, under any memory.remat.
    return x @ dequantize(parts, storage, x.dtype)


matmul.defvjp(
    lambda storage, x, parts: (matmul(storage, x, parts), parts),
    lambda storage, parts, y_grad: (y_grad @ dequantize(parts, storage, y_grad.dtype).mT, None),
)
