"""Codes of 8 bits, four to a word of 32, so that a TPU can take a layer of them out of host memory.

XLA for TPU (libtpu 0.0.42) stores single bytes in tiles of 32 rows, but computes with them in tiles of 8. Of a stack in
host memory it changes the tiles before it takes one layer: all of the stack comes to the device and goes back, for each
layer. Words have the same tiles everywhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Codes in a word.
_CODES = 4
# The rows of a tile of 32-bit numbers. A word holds the codes of rows that lie so far apart, so that packing moves no
# row into another tile.
_TILE_ROWS = 8


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the words of codes [..., rows, columns]: [..., rows / 4, columns], rounded up to whole tiles."""
    *stack, rows, columns = shape
    groups, tile_rows = _groups(rows)
    return (*stack, groups * tile_rows, columns)


def pack(codes: jax.Array) -> jax.Array:
    """The words of codes; O(size) time, elementwise.

    Args:
        codes: uint8[..., rows, columns].

    Returns:
        uint32[*packed_shape(codes.shape)].
    """
    *stack, rows, columns = codes.shape
    groups, tile_rows = _groups(rows)
    padding = groups * _CODES * tile_rows - rows
    padded = jnp.pad(codes, [*[(0, 0)] * len(stack), (0, padding), (0, 0)])
    parts = padded.reshape(*stack, groups, _CODES, tile_rows, columns).astype(jnp.uint32)
    # No two codes of a word share a bit.
    words = jnp.sum(parts << _shifts(), axis=-3, dtype=jnp.uint32)
    return words.reshape(packed_shape(codes.shape))


def unpack(words: jax.Array, rows: int) -> jax.Array:
    """The inverse of `pack`.

    Args:
        words: uint32[..., words, columns].
        rows: of the codes.

    Returns:
        uint8[..., rows, columns].
    """
    *stack, num_words, columns = words.shape
    groups, tile_rows = _groups(rows)
    tiles = words.reshape(*stack, groups, 1, tile_rows, columns)
    parts = (tiles >> _shifts()).astype(jnp.uint8)
    codes = parts.reshape(*stack, _CODES * num_words, columns)
    return jax.lax.slice_in_dim(codes, 0, rows, axis=codes.ndim - 2)


def _groups(rows: int) -> tuple[int, int]:
    """How many groups of four tiles the rows fill, and the rows of a tile."""
    tile_rows = min(_TILE_ROWS, -(-rows // _CODES))
    groups = -(-rows // (_CODES * tile_rows))
    return groups, tile_rows


def _shifts() -> jax.Array:
    """The lowest bits of a word's codes, uint32[4, 1, 1]."""
    return jnp.arange(0, 32, 8, dtype=jnp.uint32).reshape(_CODES, 1, 1)
