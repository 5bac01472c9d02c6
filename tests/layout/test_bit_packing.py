"""8-bit or 4-bit codes packed in words: every code is restored, and NumPy finds it in the documented bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.layout.bit_packing import compute_packed_shape, pack, unpack


@pytest.mark.parametrize("rows", [1, 3, 8, 20, 32, 33, 64, 600])
def test_codes_round_trip(rows):
    codes = np.random.default_rng(rows).integers(0, 256, (2, rows, 5), np.uint8)
    words = jax.jit(pack)(codes)
    assert words.dtype == jnp.uint32
    assert words.shape == compute_packed_shape(codes.shape)
    np.testing.assert_array_equal(jax.jit(unpack, static_argnames="rows")(words, rows=rows), codes)


def test_word_holds_the_codes_from_four_tiles():
    """Row 8 t + r of each 32 rows is byte t of word r, lowest byte first."""
    codes = np.random.default_rng(0).integers(0, 256, (64, 7), np.uint8)
    words = np.asarray(pack(jnp.asarray(codes))).reshape(2, 8, 7)
    theirs = codes.reshape(2, 4, 8, 7).transpose(0, 2, 3, 1).copy().view("<u4")[..., 0]
    np.testing.assert_array_equal(words, theirs)


def test_packed_codes_use_no_more_bytes_in_full_tiles():
    assert compute_packed_shape((3, 4096, 11)) == (3, 1024, 11)
    # 1600 rows are 50 groups of 32; 50257 rows fill less than half of the last of 1571 groups.
    assert compute_packed_shape((1600, 6400)) == (400, 6400)
    assert compute_packed_shape((50257, 8)) == (12568, 8)


@pytest.mark.pairs
@pytest.mark.parametrize(("rows", "tile_rows"), [(64, None), (64, 2), (24, 3), (320, 8)])
def test_nibbles_round_trip(rows, tile_rows):
    codes = np.random.default_rng(rows).integers(0, 16, (2, rows, 5), np.uint8)
    words = pack(jnp.asarray(codes), 4, tile_rows)
    assert words.shape == compute_packed_shape(codes.shape, 4, tile_rows)
    np.testing.assert_array_equal(unpack(words, rows, 4, tile_rows), codes)


def test_word_packs_eight_nibbles_lowest_first():
    codes = np.random.default_rng(0).integers(0, 16, (128, 7), np.uint8)
    words = np.asarray(pack(jnp.asarray(codes), 4)).reshape(2, 8, 7)
    tiles = codes.reshape(2, 8, 8, 7).astype(np.uint32)
    expected = sum(tiles[:, number] << np.uint32(4 * number) for number in range(8))
    np.testing.assert_array_equal(words, expected)
