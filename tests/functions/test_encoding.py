"""State encoded as floats keeps every bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.extras.functions.trained_weights import decode, encode, select_floats, with_floats

DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "int4"]


def extremes(dtype: Any) -> np.ndarray:
    """Return the smallest, the largest and some other values of a dtype; every value of a one-byte dtype."""
    if dtype == "bool":
        return np.array([False, True])
    info = jnp.iinfo(dtype)
    low, high = int(info.min), int(info.max)
    values = {low, high, 0, 1, low + 1, high - 1, high // 3, low // 3, high // 2 + 1}
    values |= set(range(low, high + 1)) if high - low < 1000 else set()
    return np.array(sorted(values), jnp.dtype(dtype))


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_jitted", [False, True])
def test_integers_are_exact(dtype: str, is_jitted: bool) -> None:
    with jax.enable_x64(True):
        values = jnp.asarray(extremes(dtype))
        there = jax.jit(encode) if is_jitted else encode
        back = jax.jit(decode) if is_jitted else decode
        held = there({"count": values, "scalar": values[-1]})
        assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(held))
        result = back(held)
        assert result["count"].dtype == values.dtype
        np.testing.assert_array_equal(np.asarray(result["count"]), np.asarray(values))
        assert result["scalar"].shape == ()
        assert result["scalar"] == values[-1]


@pytest.mark.pairs
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_are_exact(impl: str) -> None:
    keys = jax.random.split(jax.random.key(7, impl=impl), 3)
    result = decode(jax.jit(encode)(keys))
    assert result.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(result), jax.random.key_data(keys))


def test_floats_round_trip_and_functions_are_static() -> None:
    tree = {"low": jnp.ones(2, jnp.bfloat16), "count": jnp.int32(3), "activation": jnp.tanh, "none": None}
    held = encode(tree)
    assert held["low"] is tree["low"]
    assert len(jax.tree.leaves(held)) == 2
    assert select_floats(held) == {"low": tree["low"], "count": None, "activation": None, "none": None}
    replaced = decode(with_floats(held, {"low": jnp.zeros(2), "count": None, "activation": None, "none": None}))
    assert replaced["activation"] is jnp.tanh
    assert replaced["count"] == 3
    np.testing.assert_array_equal(replaced["low"], 0)
