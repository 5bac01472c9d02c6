"""Splash attention: its results, with the kernel interpreted on CPU, and its programs, from the real TPU compiler."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.layers import kernels_splash
from plimsoll.framework.layers.attention_kernels import choose_implementation, dot_product_attention
from plimsoll.framework.layers.kernels_call import SplashBlocks, describe_call

AXES = ("data", "fsdp", "expert", "seq", "model")


def make_mesh(devices, sizes):
    count = int(np.prod(sizes))
    return Mesh(np.asarray(devices[:count]).reshape(sizes), AXES)


def run_interpreted(q, k, v, segments, mesh, options):
    call_options = (options.get("window"), options.get("softcap"), mesh, options.get("scale"))
    splash = options.get("splash", SplashBlocks())
    context_parallel = options.get("context_parallel", "auto")
    call = describe_call(q, k, v, segments, *call_options, splash, context_parallel=context_parallel)
    return kernels_splash.attend(call, q, k, v, segments, interpret=True)


CASES = {
    # 640 positions make five blocks of 128. Some are empty because of the mask, some only because of the documents.
    "documents, grouped": ((1, 640, 2, 1, 64), True, {}, None),
    "window and cap": ((2, 640, 1, 1, 128), False, {"window": 200, "softcap": 3.0, "scale": 0.11}, None),
    "eight devices": ((2, 512, 4, 2, 64), True, {}, (1, 2, 1, 2, 2)),
    "one backward kernel": ((1, 512, 2, 1, 64), True, {"splash": SplashBlocks(256, 128, fused_backward=True)}, None),
    "window over seq": ((1, 512, 1, 1, 64), True, {"window": 200}, (1, 1, 1, 4, 1)),
    "ring": ((1, 512, 2, 1, 64), True, {"context_parallel": "ring", "scale": 0.11}, (1, 1, 1, 2, 1)),
    "ring, one backward kernel": (
        (1, 1024, 1, 1, 64),
        False,
        {"context_parallel": "ring", "softcap": 3.0, "splash": SplashBlocks(fused_backward=True)},
        (1, 1, 1, 4, 1),
    ),
}


@pytest.mark.pairs
@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernel_equals_xla(case):
    (B, S, N, K, H), with_segments, options, sizes = CASES[case]
    rng = np.random.default_rng(0)
    q, k, v, cotangent = (jnp.asarray(rng.normal(size=(B, S, n, H)), jnp.float32) for n in (N, K, K, N))
    segments = None
    if with_segments:
        segments = np.sort(rng.integers(1, 4, size=(B, S)), axis=1).astype(np.int32)
        segments[:, -20:] = 0
    mesh = None if sizes is None else make_mesh(jax.devices(), sizes)

    def splash(q, k, v):
        out = run_interpreted(q, k, v, segments, mesh, options)
        return jnp.vdot(out, cotangent), out

    def xla(q, k, v):
        out = dot_product_attention(q, k, v, segments_BS=segments, implementation="xla", **options)
        return jnp.vdot(out, cotangent), out

    results = [jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))(q, k, v) for f in (splash, xla)]
    ((_, ours), our_gradients), ((_, theirs), their_gradients) = results
    for a, b in zip((ours, *our_gradients), (theirs, *their_gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def topology():
    """Return a function from a topology name to the devices of an absent TPU slice; libtpu contains the compiler."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'plimsoll-train[plan-tpu]'")
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    from jax.experimental import topologies

    return lambda name: topologies.get_topology_desc(platform="tpu", topology_name=name).devices


def compile_step(mesh, *, S=1024, N=4, K=4, H=128, segments=False, sinks=False, dtype=jnp.bfloat16, **options):
    """Compile a forward and a backward pass with inputs sharded over the mesh."""
    by_head = NamedSharding(mesh, PartitionSpec("model"))
    sinks_N = jax.ShapeDtypeStruct((N,), dtype, sharding=by_head) if sinks else None
    B = 2 * mesh.shape["data"] * mesh.shape["fsdp"]
    heads = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "seq", "model", None))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "seq"))
    q, k = (jax.ShapeDtypeStruct((B, S, n, H), dtype, sharding=heads) for n in (N, K))
    ids = jax.ShapeDtypeStruct((B, S), jnp.int32, sharding=rows) if segments else None
    call = describe_call(q, k, k, ids, options.get("window"), options.get("softcap"), mesh, options.get("scale"))
    assert choose_implementation(call) == "splash"

    def loss(q, k, v, sinks_N, ids):
        out = dot_product_attention(q, k, v, segments_BS=ids, sinks_N=sinks_N, mesh=mesh, **options)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    shardings = (heads, heads, heads, by_head if sinks else None)
    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)), out_shardings=shardings)
    return step.lower(q, k, k, sinks_N, ids).compile()


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("v5e:2x4", (2, 2, 1, 1, 2), {"segments": True, "K": 2}),
        ("v5e:2x4", (1, 2, 1, 4, 1), {"window": 300}),
        ("v5e:2x4", (1, 2, 1, 2, 2), {"window": 300, "sinks": True, "segments": True}),
        ("v5p:2x2x1", (1, 1, 1, 2, 2), {"segments": True, "softcap": 50.0}),
        ("v5p:2x2x1", (1, 1, 1, 2, 2), {"segments": True, "softcap": 50.0, "context_parallel": "ring"}),
        ("v5p:2x2x1", (1, 1, 1, 4, 1), {"sinks": True, "K": 2, "context_parallel": "ring"}),
        ("v5p:2x2x1", (1, 4, 1, 1, 1), {"H": 64, "dtype": jnp.float32}),
    ],
)
def test_compiles_for_tpu_without_saving_logits(topology, name, sizes, options):
    mesh = make_mesh(topology(name), sizes)
    compiled = compile_step(mesh, **options)
    program = compiled.as_text()
    for kernel in ("fwd", "dkv", "dq"):
        assert f"splash_mha_{kernel}" in program
    assert f"{1024 // mesh.shape['seq']},1024]" not in program
    is_split = mesh.shape["seq"] > 1
    travels = "window" in options or "context_parallel" in options
    assert ("all-gather" in program) == (is_split and not travels)
    assert ("collective-permute" in program) == (is_split and travels)


def test_blocks_are_bounds_and_the_backward_pass_may_be_one_kernel(topology):
    program = compile_step(
        make_mesh(topology("v6e:2x2"), (1, 4, 1, 1, 1)), splash=SplashBlocks(1024, 1024, fused_backward=True)
    ).as_text()
    assert "splash_mha_dkv" in program
    assert "splash_mha_dq" not in program
    with pytest.raises(ValueError, match="block_kv: expected a multiple of 128, given 200"):
        SplashBlocks(block_kv=200)


def test_remat_saving_attention_runs_the_forward_kernel_once(topology):
    mesh = make_mesh(topology("v5e:2x4"), (1, 1, 1, 1, 1))
    q = jax.ShapeDtypeStruct((1, 128, 1, 128), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))

    def forward_kernels(name):
        def layer(q):
            return jnp.sin(dot_product_attention(q, q, q, implementation="splash", mesh=mesh))

        policy = jax.checkpoint_policies.save_only_these_names(name)
        step = jax.jit(jax.value_and_grad(lambda q: jax.checkpoint(layer, policy=policy)(q).astype(jnp.float32).sum()))
        program = step.lower(q).compile().as_text()
        return len(re.findall(r"%splash_mha_fwd\S* = .* custom-call\(", program))

    assert forward_kernels("attention") == 1
    assert forward_kernels("something else") == 2


def test_a_mesh_that_does_not_divide_the_arrays_is_named(topology):
    devices = topology("v5e:2x4")

    def reason(sizes, B=8, S=1024, N=8, K=8, **options):
        q, k = (jax.ShapeDtypeStruct((B, S, n, 128), jnp.bfloat16) for n in (N, K))
        return kernels_splash.why_not(describe_call(q, k, k, None, None, None, make_mesh(devices, sizes), **options))

    assert reason((2, 2, 1, 1, 2)) is None
    assert "mesh data x fsdp = 8 does not divide the 4 sequences" in reason((4, 2, 1, 1, 1), B=4)
    assert "mesh model = 4 does not divide the 2 key/value heads" in reason((1, 2, 1, 1, 4), K=2)
    assert "multiple of 128 positions on each device, not 768 / 4; pad to 1024" in reason((1, 1, 1, 4, 2), S=768)
    ring = {"context_parallel": "ring"}
    assert reason((2, 1, 1, 4, 1), **ring) is None
    assert "a ring takes a multiple of 1024 positions, not 1536; pad to 2048" in reason((2, 1, 1, 4, 1), S=1536, **ring)
