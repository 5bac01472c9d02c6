"""Packing of 8-bit or 4-bit codes into 32-bit words, so that a TPU can slice one layer out of a stack in host memory.

XLA for TPU (libtpu 0.0.42) stores single bytes in tiles of 32 rows, but computes with them in tiles of 8. It retiles
a stack in host memory before it slices out a layer: the whole stack moves to the device and back, once per layer.
Words have the same tiles everywhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_WORD_BITS = 32
# Number of rows in a tile of 32-bit numbers. A word holds the codes of rows that are this far apart, so that packing
# moves no row into another tile.
TILE_ROWS = 8


class _Groups:
    """The mapping from rows of codes to rows of words.

    There are `count` groups. In each, `tile_rows` rows of words hold `codes * tile_rows` rows of codes.

    Args:
        rows, bits, tile_rows: as for `unpack`.

    Attributes:
        count: number of groups.
        tile_rows: rows of words per group.
        codes: codes per word.
    """

    def __init__(self, rows: int, bits: int, tile_rows: int | None):
        self.codes = _WORD_BITS // bits
        self.tile_rows = min(TILE_ROWS, -(-rows // self.codes)) if tile_rows is None else tile_rows
        self.count = -(-rows // (self.codes * self.tile_rows))


def compute_packed_shape(shape: tuple[int, ...], bits: int = 8, tile_rows: int | None = None) -> tuple[int, ...]:
    """Return the shape of the packed words of codes [..., rows, columns].

    It is [..., rows * bits / 32, columns], rounded up to whole groups.

    Args:
        shape: shape of the codes.
        bits, tile_rows: as for `pack`.
    """
    *stack, rows, columns = shape
    groups = _Groups(rows, bits, tile_rows)
    return (*stack, groups.count * groups.tile_rows, columns)


def pack(codes: jax.Array, bits: int = 8, tile_rows: int | None = None) -> jax.Array:
    """Pack codes into words; O(size) time, elementwise.

    Args:
        codes: uint8[..., rows, columns], each less than 2^bits.
        bits: bits per code, 4 or 8.
        tile_rows: distance between rows whose codes share a word; None means 8, or less if there are few rows.

    Returns:
        uint32[*compute_packed_shape(codes.shape, bits, tile_rows)].
    """
    *stack, rows, columns = codes.shape
    groups = _Groups(rows, bits, tile_rows)
    padding = groups.count * groups.codes * groups.tile_rows - rows
    padded = jnp.pad(codes, [*[(0, 0)] * len(stack), (0, padding), (0, 0)])
    parts = padded.reshape(*stack, groups.count, groups.codes, groups.tile_rows, columns).astype(jnp.uint32)
    # The sum is a bitwise or, because no two codes of a word share a bit.
    words = jnp.sum(parts << _shifts(bits), axis=-3, dtype=jnp.uint32)
    return words.reshape(compute_packed_shape(codes.shape, bits, tile_rows))


def unpack(words: jax.Array, rows: int, bits: int = 8, tile_rows: int | None = None) -> jax.Array:
    """Unpack words into codes; the inverse of `pack`.

    Args:
        words: uint32[..., words, columns].
        rows: number of rows of the codes.
        bits, tile_rows: as for `pack`.

    Returns:
        uint8[..., rows, columns].
    """
    *stack, num_words, columns = words.shape
    groups = _Groups(rows, bits, tile_rows)
    tiles = words.reshape(*stack, groups.count, 1, groups.tile_rows, columns)
    parts = (tiles >> _shifts(bits)).astype(jnp.uint8)
    if bits < 8:
        # The cast leaves 8 of the 32 bits; the lower ones are this code's.
        parts = parts & (2**bits - 1)
    codes = parts.reshape(*stack, groups.codes * num_words, columns)
    return jax.lax.slice_in_dim(codes, 0, rows, axis=codes.ndim - 2)


def _shifts(bits: int) -> jax.Array:
    """Return the lowest bit position of each of a word's codes, uint32[32 / bits, 1, 1]."""
    return jnp.arange(0, _WORD_BITS, bits, dtype=jnp.uint32).reshape(-1, 1, 1)
