"""framework.checkpoint.replicas names copies that differ, on eight devices of one process."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.checkpoint.replicas import ReplicaMismatchError, check


def place_on_mesh(value: np.ndarray, *spec: str | None, change: Mapping[int, np.ndarray] = {}) -> jax.Array:
    """Place a value on a mesh with data 4, fsdp 2; `change` maps device ids to what those devices hold instead."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "fsdp"))
    x = jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))
    pieces = [
        jax.device_put(change.get(shard.device.id, np.asarray(shard.data)), shard.device)
        for shard in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces)


def flip_bit(x: np.ndarray, bit: int) -> np.ndarray:
    bytes_ = bytearray(np.ascontiguousarray(x).tobytes())
    bytes_[bit // 8] ^= 1 << bit % 8
    return np.frombuffer(bytes(bytes_), x.dtype).reshape(x.shape)


X = np.arange(24, dtype=np.float32).reshape(6, 4) / 7


def test_equal_copies_pass() -> None:
    check(
        {
            "a": place_on_mesh(X),
            "b": {"c": place_on_mesh(X, "fsdp"), "d": place_on_mesh(X.astype(jnp.bfloat16), None, "data")},
        },
        1,
    )
    check(
        {
            "alone": place_on_mesh(np.zeros((8, 8), np.float32), "data", "fsdp"),
            "nothing": place_on_mesh(np.zeros((0,), np.float32)),
        },
        1,
    )


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [np.float32, np.int8, jnp.bfloat16, np.uint32])
def test_one_bit_names_leaf_device_and_process(dtype) -> None:
    x = X.astype(dtype)
    for bit in (0, 7, 8 * x.nbytes - 1):
        with pytest.raises(ReplicaMismatchError) as error:
            check({"good": place_on_mesh(x), "layer": {"bad": place_on_mesh(x, change={5: flip_bit(x, bit)})}}, 12)
        assert str(error.value) == ("replicas disagree after step 12: layer/bad: process 0 (device 5) of 8 copies")


def test_only_replicas_with_the_same_index_are_compared() -> None:
    half = X[:3]
    with pytest.raises(ReplicaMismatchError, match=r"w: process 0 \(device 2\) of 4 copies$"):
        check({"w": place_on_mesh(X, "fsdp", change={2: flip_bit(half, 33)})}, 1)


def test_swapped_values_are_detected() -> None:
    with pytest.raises(ReplicaMismatchError, match="device 1"):
        check({"w": place_on_mesh(X, change={1: X[::-1].copy()})}, 1)


def test_without_a_majority_all_are_named() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec())
    pieces = [jax.device_put(X, jax.devices()[0]), jax.device_put(flip_bit(X, 3), jax.devices()[1])]
    x = jax.make_array_from_single_device_arrays(X.shape, sharding, pieces)
    with pytest.raises(ReplicaMismatchError, match=r"process 0 \(device 0\), process 0 \(device 1\) of 2 copies"):
        check({"w": x}, 1)


def test_many_leaves_are_a_short_message() -> None:
    bad = place_on_mesh(X, change={5: flip_bit(X, 9)})
    with pytest.raises(ReplicaMismatchError, match=r"and 4 more$"):
        check({f"w{i}": bad for i in range(9)}, 1)
