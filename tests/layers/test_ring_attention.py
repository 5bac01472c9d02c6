"""Attention over sharded positions, by a ring and by windows: on eight devices, it equals one device's."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.layers.attention_kernels import dot_product_attention

AXES = ("data", "fsdp", "expert", "seq", "model")
BATCH, NUM_HEADS, KV_HEADS, HEAD_DIM = 4, 4, 2, 8


@dataclass(frozen=True)
class Case:
    """A mesh of eight devices, (data, fsdp, expert, seq, model), and a call of attention."""

    mesh: tuple[int, ...]
    length: int = 96
    documents: bool = False
    sinks: bool = False
    value_dim: int = HEAD_DIM
    options: dict = field(default_factory=dict)


CASES = {
    "ring of 2": Case((1, 2, 1, 2, 2)),
    "ring of 3": Case((1, 1, 1, 3, 1)),
    "ring of 4, documents": Case((1, 1, 2, 4, 1), documents=True),
    "ring of 8": Case((1, 1, 1, 8, 1)),
    "ring of 8, sinks, cap, documents": Case((1, 1, 1, 8, 1), documents=True, sinks=True, options={"softcap": 3.0}),
    "ring of 4, sinks, two shards of heads": Case((1, 1, 1, 4, 2), sinks=True),
    "ring of 4, narrow values, scale": Case((2, 1, 1, 4, 1), value_dim=5, options={"scale": 0.7}),
    "window within the previous shard": Case((1, 1, 1, 8, 1), documents=True, options={"window": 9}),
    "window over three shards": Case((1, 1, 1, 8, 1), sinks=True, options={"window": 32}),
    "window of half the row, cap": Case((2, 1, 1, 4, 1), options={"window": 48, "softcap": 2.0}),
    "window of one position": Case((2, 1, 1, 4, 1), options={"window": 1}),
    "window that sees nearly all": Case((2, 1, 1, 4, 1), options={"window": 90}),
    "window of the whole row": Case((2, 1, 1, 4, 1), options={"window": 96}),
}


def make_arrays(case):
    rng = np.random.default_rng(0)
    heads = [(NUM_HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, case.value_dim), (NUM_HEADS, case.value_dim)]
    q, k, v, cotangent = (rng.normal(size=(BATCH, case.length, *shape)).astype(np.float32) for shape in heads)
    segments = None
    if case.documents:
        segments = np.sort(rng.integers(1, 6, size=(BATCH, case.length)), axis=1).astype(np.int32)
        segments[:, -9:] = 0
    sinks = rng.normal(size=NUM_HEADS).astype(np.float32) if case.sinks else None
    return q, k, v, segments, sinks, cotangent


def value_and_gradients(mesh, **options):
    def loss(q, k, v, segments, sinks, cotangent):
        out = dot_product_attention(q, k, v, segments_BS=segments, sinks_N=sinks, mesh=mesh, **options)
        return jnp.vdot(out, cotangent), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 4), has_aux=True))


def make_mesh(sizes):
    return Mesh(np.asarray(jax.devices()[: np.prod(sizes)]).reshape(sizes), AXES)


@pytest.mark.parametrize("name", CASES)
def test_eight_devices_equal_one(name):
    case = CASES[name]
    mesh = make_mesh(case.mesh)
    arrays = make_arrays(case)

    def place(x):
        axes = {1: ("model",), 2: (("data", "fsdp", "expert"), "seq")}.get(x.ndim)
        return jax.device_put(
            x, NamedSharding(mesh, PartitionSpec(*(axes or (("data", "fsdp", "expert"), "seq", "model"))))
        )

    options = {"context_parallel": "ring"} | case.options
    (_, out), gradients = value_and_gradients(mesh, **options)(*jax.tree.map(place, arrays))
    (_, expected_out), expected_gradients = value_and_gradients(None, **options)(*arrays)
    ours, theirs = jax.tree.leaves((out, gradients)), jax.tree.leaves((expected_out, expected_gradients))
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
