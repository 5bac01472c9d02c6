"""Attention over sharded positions, by a ring and by windows: on eight devices, it equals one device's."""

import re
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.layers import ring_attention
from plimsoll.framework.layers.attention_kernels import dot_product_attention
from plimsoll.framework.layers.kernels_call import BlockMask, describe_call
from tests.support import small

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


def compile_gradients(mesh, length, **options):
    """Compile the gradients of q, k and v [1, length, ...], sharded over seq."""
    sharding = NamedSharding(mesh, PartitionSpec(None, "seq"))
    q, k = (jax.ShapeDtypeStruct((1, length, n, 32), jnp.bfloat16, sharding=sharding) for n in (NUM_HEADS, KV_HEADS))

    def loss(q, k, v):
        return jnp.sum(dot_product_attention(q, k, v, mesh=mesh, **options).astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)), out_shardings=sharding).lower(q, k, k).compile()


@pytest.mark.parametrize("options", [{"context_parallel": "ring"}, {"window": 100}], ids=["ring", "window"])
def test_keys_are_not_gathered(options):
    program = compile_gradients(make_mesh((1, 1, 1, 8, 1)), 1024, **options).as_text()
    assert "collective-permute" in program
    assert "all-gather" not in program
    # No array has all positions.
    assert "1024" not in re.sub(r"metadata=\{[^}]*\}|//.*", "", program)


def test_memory_does_not_grow_with_rows_whose_shards_stay_as_long():
    def temp_bytes(num_devices, context_parallel):
        compiled = compile_gradients(
            make_mesh((1, 1, 1, num_devices, 1)), 256 * num_devices, context_parallel=context_parallel
        )
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp_bytes(8, "ring") == pytest.approx(temp_bytes(4, "ring"), rel=0.02)
    assert temp_bytes(8, "gather") > 1.5 * temp_bytes(4, "gather")


def test_rings_begin_where_computing_takes_longer_than_exchanging():
    def chooses_ring(length, **options):
        q, k = (jax.ShapeDtypeStruct((1, length, n, 8), jnp.float32) for n in (NUM_HEADS, KV_HEADS))
        call = describe_call(q, k, k, None, options.pop("window", None), None, make_mesh((1, 1, 1, 4, 1)), **options)
        return ring_attention.uses_ring(call, multiple=1)

    assert chooses_ring(8 * 1024)
    assert not chooses_ring(8 * 1023)
    assert not chooses_ring(8 * 1024 + 4)
    assert chooses_ring(64, window=2)
    assert chooses_ring(64, context_parallel="ring")
    assert not chooses_ring(8 * 1024, context_parallel="gather")
    with pytest.raises(ValueError, match="takes a multiple of 8 positions on 4 devices, not 68"):
        chooses_ring(68, context_parallel="ring")


@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("mask", [BlockMask(), BlockMask(0), BlockMask(7), BlockMask(7, 3), BlockMask(2, 9)], ids=str)
def test_seen_share_counts_pairs(mask, num_queries):
    rows, columns = np.mgrid[:num_queries, :12]
    sees = np.ones_like(rows, bool)
    if mask.offset is not None:
        sees &= columns <= rows + mask.offset
        sees &= columns > rows + mask.offset - (mask.window or 99)
    assert mask.seen_share(num_queries, 12) == pytest.approx(sees.mean())


def test_a_length_that_a_ring_cannot_divide_is_refused_before_tracing():
    model = small.llama()
    small.block(model).attention.context_parallel = "ring"
    config = small.experiment(model, mesh={"seq": 4, "fsdp": 2})
    config.data.seq_len = 12
    with pytest.raises(ValueError, match=r"context_parallel = 'ring' with mesh.seq = 4 .* multiple of 8, given 12"):
        small.program(config)
