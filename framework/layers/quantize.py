"""Quantized storage of frozen weights: int8, and the 4-bit NormalFloat of QLoRA (arXiv 2305.14314).

A weight [..., in, out] is stored as codes and scales. The scales [..., in / block, out] are the largest magnitudes of
the blocks, in float32. The weight's mesh axes apply to both.
    int8   uint32 [..., in / 4, out], four codes round(127 w / scale) per word; a block is a column, one output channel
    nf4    uint32 [..., in / 8, out], eight codes of the nearest of 16 values per word; a block is 64 rows, which are
           stored in eight rows of words; scales are not quantized again
`framework.layout.bit_packing` explains which rows share a word, and why the codes are packed into words.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from plimsoll.framework.layout import Nested, ParameterSpec, bit_packing

Storage = Literal["int8", "nf4"]
# The number of weights that share a scale in nf4.
BLOCK = 64
_BITS = {"int8": 8, "nf4": 4}
_CODES_IN_WORD = {"int8": 4, "nf4": 8}
# Appendix E of the paper: quantiles of a normal distribution, divided by the largest one.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def make_quantized_specs(weight: ParameterSpec, storage: Storage, path: str) -> dict[str, ParameterSpec]:
    """Return the specs {"codes", "scales"} of the weight [..., in, out] at `path`, both using its own initializer.

    Raise ValueError if `in` is not a multiple of 64 for nf4, or of 4 for int8. The layout rejects a mesh that would
    split a block or a word.
    """
    *stack, inputs, outputs = weight.shape
    *stack_axes, in_axes, out_axes = weight.mesh_axes
    *stack_roles, _, _ = weight.roles
    if storage == "nf4" and inputs % BLOCK:
        raise ValueError(f"nf4 has blocks of {BLOCK}, which do not divide {inputs}, the inputs of {path}; try int8")
    if storage == "int8" and inputs % _CODES_IN_WORD["int8"]:
        raise ValueError(f"int8 has four codes in a word, and 4 does not divide {inputs}, the inputs of {path}")

    def make_spec(name: str, dtype: str, rows: int, run: int) -> ParameterSpec:
        def initialize(key: jax.Array, *_: object) -> jax.Array:
            # Codes and scales get the same key (see `layout.initialize`), so both belong to the same random weight.
            initial_weight = weight.initializer(key, weight.shape, jnp.float32)
            return quantize(initial_weight, storage)[name]

        # A single row of scales, or a single run of words, cannot be sharded.
        row_axes = in_axes if rows > run else None
        return ParameterSpec(
            (*stack, rows, outputs),
            dtype,
            (*stack_axes, row_axes, out_axes),
            initializer=initialize,
            roles=(*stack_roles, f"rows of {inputs * run // rows} inputs", "out"),
            keeps_dtype=True,
            quantized=True,
            indivisible=(*[1] * len(stack), run, 1),
        )

    num_words = inputs // _CODES_IN_WORD[storage]
    codes = make_spec("codes", "uint32", num_words, _tile_rows(num_words))
    scales = make_spec("scales", "float32", 1 if storage == "int8" else inputs // BLOCK, 1)
    return {"codes": codes, "scales": scales}


def _tile_rows(num_words: int) -> int:
    """Return the number of rows of words that share their rows of the weight.

    A shard that consists of whole such groups has the same number.
    """
    return math.gcd(num_words, bit_packing.TILE_ROWS)


def quantize(weight: jax.Array, storage: Storage) -> dict[str, jax.Array]:
    """Quantize a weight [..., in, out] of any float dtype to {"codes", "scales"}.

    `in` is a multiple of 64 (for int8: of 4).
    """
    *stack, inputs, outputs = weight.shape
    block = BLOCK if storage == "nf4" else inputs
    blocks = weight.astype(jnp.float32).reshape(*stack, inputs // block, block, outputs)
    scales = jnp.max(jnp.abs(blocks), axis=-2)
    # The scale of a block of zeros is 0.
    divisors = jnp.where(scales == 0, 1, scales)
    normalized = blocks / divisors[..., None, :]
    if storage == "int8":
        signed = jnp.round(127 * normalized).astype(jnp.int8)
        codes = jax.lax.bitcast_convert_type(signed, jnp.uint8)
    else:
        # The index of the nearest value is the number of midpoints below.
        codes = jnp.uint8(0)
        for low, high in pairwise(NF4):
            codes = codes + (normalized > (low + high) / 2).astype(jnp.uint8)
    num_words = inputs // _CODES_IN_WORD[storage]
    packed = bit_packing.pack(codes.reshape(weight.shape), _BITS[storage], _tile_rows(num_words))
    return {"codes": packed, "scales": scales}


def unpack_codes(packed: jax.Array, storage: Storage) -> jax.Array:
    """Unpack the codes [..., in, out] from words [..., in / 4 or in / 8, out]: int8, or for nf4 uint8 from 0 to 15."""
    num_words = packed.shape[-2]
    inputs = num_words * _CODES_IN_WORD[storage]
    codes = bit_packing.unpack(packed, inputs, _BITS[storage], _tile_rows(num_words))
    return jax.lax.bitcast_convert_type(codes, jnp.int8) if storage == "int8" else codes


def dequantize(stored: Nested, storage: Storage, dtype: DTypeLike) -> jax.Array:
    """Inverse of `quantize`: returns [..., in, out], computed in float32 and cast to `dtype`."""
    codes = unpack_codes(stored["codes"], storage)
    scales = stored["scales"]
    *stack, rows, outputs = codes.shape
    num_blocks = scales.shape[-2]
    codes = codes.reshape(*stack, num_blocks, rows // num_blocks, outputs)
    normalized = codes.astype(jnp.float32) / 127 if storage == "int8" else _look_up(codes, NF4)
    weight = normalized * scales[..., None, :]
    return weight.reshape(*stack, -1, outputs).astype(dtype)


def _look_up(codes: jax.Array, values: tuple[float, ...]) -> jax.Array:
    """Return values[codes], by selecting between halves of the values, one bit of the codes at a time."""
    # Lookups are slow on TPUs.
    if len(values) == 2:
        # A sum instead of a selection between constants: XLA may store arrays filled with such constants.
        odd = (codes & 1).astype(jnp.float32)
        return odd * values[1] + (1 - odd) * values[0]
    half = len(values) // 2
    is_upper = codes & half
    upper = _look_up(codes, values[half:])
    lower = _look_up(codes, values[:half])
    return jnp.where(is_upper, upper, lower)


def _matmul(storage: Storage, x: jax.Array, stored: Nested) -> jax.Array:
    """Multiply x [..., in] by the weight [in, out] that is stored in `stored`, in x's dtype."""
    # The backward pass dequantizes again, so nothing else is saved, regardless of memory.remat.
    return x @ dequantize(stored, storage, x.dtype)


matmul = jax.custom_vjp(_matmul, nondiff_argnums=(0,))
matmul.defvjp(
    lambda storage, x, stored: (matmul(storage, x, stored), stored),
    lambda storage, stored, y_grad: (y_grad @ dequantize(stored, storage, y_grad.dtype).mT, None),
)
