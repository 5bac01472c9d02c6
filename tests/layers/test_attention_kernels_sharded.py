"""XLA attention on eight devices: with inputs sharded over data, fsdp, seq and model, it equals one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.layers.attention_kernels import dot_product_attention

AXES = ("data", "fsdp", "expert", "seq", "model")
B, S, N, K, H = 4, 256, 4, 2, 8
OPTIONS = {False: {}, True: {"window": 50, "softcap": 3.0}}


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    q, k, v, cotangent = (rng.normal(size=(B, S, n, H)).astype(np.float32) for n in (N, K, K, N))
    segments = np.sort(rng.integers(1, 4, size=(B, S)), axis=1).astype(np.int32)
    segments[:, -9:] = 0
    return q, k, v, segments, cotangent


def value_and_gradients(mesh, options):
    def loss(q, k, v, segments, cotangent):
        out = dot_product_attention(q, k, v, segments_BS=segments, mesh=mesh, **options)
        return jnp.vdot(out, cotangent), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


@pytest.fixture(scope="module")
def one_device(arrays):
    """Return a cached function from `narrow` (with a window and a cap or not) to the results without a mesh."""
    return functools.cache(lambda narrow: value_and_gradients(None, OPTIONS[narrow])(*arrays))


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("sizes", "narrow"),
    [((1, 2, 1, 2, 2), False), ((1, 2, 1, 2, 2), True), ((2, 2, 1, 1, 2), True), ((1, 1, 2, 4, 1), False)],
    ids=str,
)
def test_eight_devices_equal_one(arrays, one_device, sizes, narrow):
    mesh = Mesh(np.asarray(jax.devices()).reshape(sizes), AXES)
    heads = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "seq", "model", None))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "seq"))
    spread = [jax.device_put(x, heads if x.ndim == 4 else rows) for x in arrays]
    (_, out), gradients = value_and_gradients(mesh, OPTIONS[narrow])(*spread)
    (_, expected_out), expected_gradients = one_device(narrow)
    for ours, theirs in zip((out, *gradients), (expected_out, *expected_gradients), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_positions_spread_over_devices_spread_the_logits():
    mesh = Mesh(np.asarray(jax.devices()).reshape(1, 1, 1, 8, 1), AXES)
    sharding = NamedSharding(mesh, PartitionSpec(None, "seq"))
    q, k = (jax.ShapeDtypeStruct((1, 512, n, H), jnp.float32, sharding=sharding) for n in (N, K))
    attend = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, mesh=mesh), out_shardings=sharding)
    program = attend.lower(q, k, k).compile().as_text()
    assert f"[1,{N},64,512]" in program
    assert "512,512]" not in program
