"""Flash attention for GPUs, interpreted on CPU, and, if JAX's CUDA plugin is installed, compiled without a GPU."""

import dataclasses
import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.families.decoders import llama_model
from plimsoll.framework.layers import kernels_cudnn, kernels_triton
from plimsoll.framework.layers.attention_kernels import choose_implementation, dot_product_attention
from plimsoll.framework.layers.flash_attention_gpu import FlashBlocks
from plimsoll.framework.layers.flash_kernels import NUM_PRODUCTS
from plimsoll.framework.layers.kernels_call import AttentionCall, BlockMask, Ids, describe_call
from plimsoll.framework.layers.kernels_triton import TritonKernel
from plimsoll.framework.layers.kernels_xla import XlaKernel
from plimsoll.framework.plan import targets
from plimsoll.framework.program.program import Program
from tests.support import small

NO_CUDA = "no CUDA plugin of JAX: pip install 'plimsoll-train[plan-gpu]'"
AXES = ("data", "fsdp", "expert", "seq", "model")
ALL_KEYS = BlockMask()


# --- one kernel, interpreted ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """S queries of K * G heads and T keys of K heads."""

    sizes: tuple[int, int]
    mask: BlockMask = ALL_KEYS
    heads: tuple[int, int] = (1, 1)
    channels: tuple[int, int] = (16, 16)
    softcap: float | None = None
    has_ids: bool = False
    blocks: tuple[int, int] = (16, 32)


# Blocks have 16 queries and 32 keys, or the reverse. Masks begin and end at, before and after the ends of blocks.
CASES = {
    "causal": Case((64, 64), BlockMask(0), heads=(2, 1)),
    "window, heads that share keys, ids, cap, rest": Case(
        (45, 70), BlockMask(25, 19), heads=(2, 3), channels=(48, 24), softcap=2.0, has_ids=True
    ),
    "all keys, cap": Case((32, 64), softcap=1.5, heads=(2, 2)),
    "all keys, ids, rest": Case((20, 33), has_ids=True, channels=(24, 40)),
    "causal, more keys": Case((32, 96), BlockMask(64), blocks=(32, 16), heads=(1, 2)),
    "causal, queries that see nothing": Case((64, 40), BlockMask(-17), blocks=(32, 16)),
    "causal, more keys, rest": Case((50, 81), BlockMask(31), blocks=(16, 16)),
    "window of one key": Case((64, 64), BlockMask(0, 1), blocks=(32, 16)),
    "window of a block": Case((64, 96), BlockMask(32, 32), heads=(1, 2)),
    "window that ends before the last keys": Case((33, 96), BlockMask(17, 16)),
    "window that begins with the last key of a block": Case((33, 96), BlockMask(46, 32)),
    "window after the keys": Case((80, 32), BlockMask(0, 20)),
}


def make_call(q, k, v, case: Case) -> AttentionCall:
    sizes = (q.shape[0], q.shape[2], q.shape[1], q.shape[3], k.shape[1])
    return AttentionCall(
        *sizes, np.dtype(q.dtype), case.has_ids, None, case.softcap, None, "cpu", scale=0.4, value_dim=v.shape[3]
    )


def make_arrays(case: Case):
    rng = np.random.default_rng(0)
    (S, T), (K, G), (H, V) = case.sizes, case.heads, case.channels
    shapes = ((2, K * G, S, H), (2, K, T, H), (2, K, T, V), (2, K * G, S, V), (2, K * G, S, V))
    q, k, v, out, grad = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    ids = None
    if case.has_ids:
        ids = Ids(*(np.sort(rng.integers(1, 4, size=(2, size)), axis=1).astype(np.int32) for size in (S, T)))
    return q, k, v, ids, out, grad


@dataclasses.dataclass(frozen=True)
class Reference:
    """Attention in float64. The arrays are those of one call, and `seen` tells which keys a query sees."""

    case: Case
    q: Any
    k: Any
    v: Any
    seen: Any

    @staticmethod
    def make(case: Case, q, k, v, ids) -> "Reference":
        G = case.heads[1]
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        rows, columns = np.indices(case.sizes)
        seen = np.ones((2, 1, *case.sizes), bool)
        offset, window = case.mask.offset, case.mask.window
        if offset is not None:
            seen &= columns <= rows + offset
            seen &= window is None or columns > rows + offset - window
        if ids is not None:
            seen &= (ids.queries[:, :, None] == ids.keys[:, None, :])[:, None]
        return Reference(case, q, k.repeat(G, axis=1), v.repeat(G, axis=1), seen)

    def logits(self):
        """Return (logits, their derivatives by the products)."""
        products = 0.4 * np.einsum("bnsh,bnth->bnst", self.q, self.k)
        if self.case.softcap is None:
            return products, 1.0
        tanh = np.tanh(products / self.case.softcap)
        return self.case.softcap * tanh, 1 - tanh**2

    def forward(self):
        weights = np.exp(self.logits()[0]) * self.seen
        sums = weights.sum(axis=-1)
        out = np.einsum("bnst,bntv->bnsv", weights, self.v) / np.where(sums, sums, 1.0)[..., None]
        return out, sums

    def backward(self, out, log_sums, grad):
        """Return the gradients, given the result and the sums over all keys."""
        logits, derivatives = self.logits()
        weights = np.exp(logits - log_sums[..., None]) * self.seen
        weight_grads = np.einsum("bnsv,bntv->bnst", grad, self.v)
        logit_grads = weights * (weight_grads - np.sum(out * grad, axis=-1)[..., None]) * derivatives * 0.4
        dq = np.einsum("bnst,bnth->bnsh", logit_grads, self.k)
        dk = np.einsum("bnst,bnsh->bnth", logit_grads, self.q)
        dv = np.einsum("bnst,bnsv->bntv", weights, grad)
        K, G = self.case.heads
        return dq, *(x.reshape(2, K, G, *x.shape[2:]).sum(axis=2) for x in (dk, dv))


@pytest.mark.first(2)
@pytest.mark.parametrize("name", CASES)
def test_equals_a_softmax_in_float64(name):
    case = CASES[name]
    q, k, v, ids, all_out, grad = make_arrays(case)
    kernel = TritonKernel(make_call(q, k, v, case), interpret=True, blocks=FlashBlocks(*case.blocks, 4, 2))
    reference = Reference.make(case, q, k, v, ids)
    expected_out, sums = reference.forward()
    # Other keys have added to the sums. Queries that see no key here see some of those.
    all_log_sums = np.where(sums, np.log(np.where(sums, sums, 1.0)) + 0.3, 0.7)

    @jax.jit
    def run(q, k, v, ids):
        log_sums = jnp.asarray(all_log_sums, jnp.float32)
        return kernel.forward(q, k, v, ids, case.mask), kernel.backward(
            q, k, v, ids, case.mask, all_out, log_sums, grad
        )

    (out, log_sums), gradients = run(q, k, v, ids)
    np.testing.assert_allclose(out, expected_out, rtol=2e-5, atol=2e-6)
    sees_any = sums > 0
    np.testing.assert_allclose(log_sums[sees_any], np.log(sums[sees_any]), rtol=2e-5, atol=2e-6)
    assert np.all(np.isfinite(log_sums))
    assert np.all(log_sums[~sees_any] < -1e20)
    expected_gradients = reference.backward(all_out, all_log_sums, grad)
    for ours, expected in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_exact_as_the_xla_kernel(dtype):
    case = Case((48, 64), BlockMask(16), heads=(1, 2), softcap=3.0)
    q, k, v, _, _, grad = (None if x is None else jnp.asarray(x, dtype) for x in make_arrays(case))
    call = make_call(q, k, v, case)
    results = []
    for kernel in (TritonKernel(call, interpret=True, blocks=FlashBlocks(16, 16, 4, 2)), XlaKernel(call)):
        out, log_sums = kernel.forward(q, k, v, None, case.mask)
        gradients = kernel.backward(q, k, v, None, case.mask, out, log_sums, grad)
        results.append([np.asarray(x, np.float32) for x in (out, log_sums, *gradients)])
    exact = Reference.make(case, *(np.asarray(x, np.float64) for x in (q, k, v)), None)
    expected_out, sums = exact.forward()
    expected = [expected_out, np.log(sums), *exact.backward(expected_out, np.log(sums), np.asarray(grad, np.float64))]
    for ours, theirs, true in zip(*results, expected, strict=True):
        # The results of ours are rounded to 16 bits once more.
        rounding = float(jnp.finfo(dtype).eps) * np.abs(true).max()
        assert np.abs(ours - true).max() <= 1.5 * np.abs(theirs - true).max() + rounding


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        (16, [(0, 16)]),
        (80, [(0, 64), (64, 16)]),
        (192, [(0, 128), (128, 64)]),
        (256, [(0, 256)]),
        (112, [(0, 64), (64, 32), (96, 16)]),
    ],
)
def test_channels_are_split_into_powers_of_two(size, parts):
    from plimsoll.framework.layers.flash_attention_gpu import _split_channels

    assert _split_channels(size) == parts


# --- calls over a mesh, interpreted -----------------------------------------------------------------------------------

MESHES = {
    "ring, cap, sinks": ((1, 1, 1, 2, 1), {"softcap": 2.0}, True, False),
    "window over seq, documents, shards of heads": ((1, 1, 1, 2, 2), {"window": 20}, False, True),
    "ring of 4, documents": ((1, 2, 1, 4, 1), {}, False, True),
    "one device, sinks, documents": ((1, 1, 1, 1, 1), {}, True, True),
    "shards of batch and heads, sinks, window": ((2, 1, 1, 1, 2), {"window": 9, "scale": 0.3}, True, False),
}


@pytest.mark.first(2)
@pytest.mark.parametrize("name", MESHES)
def test_sharded_calls_equal_one_device(name):
    sizes, options, has_sinks, has_documents = MESHES[name]
    rng = np.random.default_rng(0)
    q, k, v, cotangent = (rng.normal(size=(2, 64, heads, 16)).astype(np.float32) for heads in (4, 2, 2, 4))
    sinks = rng.normal(size=4).astype(np.float32) if has_sinks else None
    segments = None
    if has_documents:
        segments = np.sort(rng.integers(1, 4, size=(2, 64)), axis=1).astype(np.int32)
        segments[:, -5:] = 0
    mesh = Mesh(np.asarray(jax.devices()[: np.prod(sizes)]).reshape(sizes), AXES)
    settings = {"window": None, "softcap": None, "scale": None} | options

    def attend_interpreted(q, k, v, sinks, segments):
        call = describe_call(q, k, v, segments, mesh=mesh, sinks=sinks, context_parallel="ring", **settings)
        return kernels_triton.attend(call, q, k, v, segments, sinks, interpret=True)

    def attend_plainly(q, k, v, sinks, segments):
        return dot_product_attention(q, k, v, segments_BS=segments, sinks_N=sinks, **settings)

    def differentiate(attend, *arrays):
        def loss(*arrays):
            out = attend(*arrays)
            return jnp.vdot(out, cotangent), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*arrays)

    def place(x):
        axes = {1: ("model",), 2: (("data", "fsdp", "expert"), "seq")}.get(x.ndim)
        spec = PartitionSpec(*(axes or (("data", "fsdp", "expert"), "seq", "model")))
        return jax.device_put(x, NamedSharding(mesh, spec))

    arrays = (q, k, v, sinks, segments)
    (_, out), gradients = differentiate(attend_interpreted, *jax.tree.map(place, arrays))
    (_, expected_out), expected_gradients = differentiate(attend_plainly, *arrays)
    ours, expected = jax.tree.leaves((out, gradients)), jax.tree.leaves((expected_out, expected_gradients))
    for x, y in zip(ours, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5)


# --- which calls use it -----------------------------------------------------------------------------------------------


def gpu_call(shape=(2, 256, 8, 64), dtype=jnp.bfloat16, value_dim=None, seq=1, window=None, softcap=None, **options):
    q = jax.ShapeDtypeStruct(shape, dtype)
    v = jax.ShapeDtypeStruct((*shape[:3], value_dim or shape[3]), dtype)
    mesh = Mesh(np.asarray(jax.devices()).reshape(1, 1, 1, seq, 8 // seq), AXES)
    return dataclasses.replace(describe_call(q, q, v, None, window, softcap, mesh, **options), platform="gpu")


LONG = (2, 8 * 2048, 8, 64)


@pytest.mark.parametrize(
    ("options", "implementation"),
    [
        ({}, "cudnn"),
        ({"softcap": 50.0}, "triton"),
        ({"sinks": jax.ShapeDtypeStruct((8,), jnp.bfloat16)}, "triton"),
        ({"dtype": jnp.float32}, "triton"),
        ({"shape": (2, 256, 8, 192), "value_dim": 128}, "triton"),
        ({"dtype": jnp.float64}, "xla"),
        ({"shape": (2, 256, 8, 264)}, "xla"),
        ({"shape": LONG, "seq": 8}, "triton"),
        ({"shape": LONG, "seq": 8, "context_parallel": "gather"}, "cudnn"),
        ({"shape": LONG, "seq": 8, "context_parallel": "gather", "softcap": 50.0}, "xla"),
        ({"seq": 8}, "cudnn"),
        ({"seq": 8, "window": 30}, "triton"),
        ({"seq": 8, "context_parallel": "ring"}, "triton"),
    ],
    ids=str,
)
def test_auto_chooses_cudnn_for_the_calls_it_supports_without_gathering(monkeypatch, options, implementation):
    monkeypatch.setattr(kernels_cudnn, "_PLUGINS", ("jax",))  # as if JAX were installed with CUDA
    with jax.enable_x64(True):
        assert choose_implementation(gpu_call(**options)) == implementation


@pytest.mark.parametrize(
    ("implementation", "options", "message"),
    [
        ("triton", {"shape": (2, 256, 8, 320)}, "up to 256 channels per head, not 320; use xla"),
        ("triton", {"dtype": jnp.float64}, "bfloat16, float16 or float32, not float64"),
        ("triton", {"seq": 8, "context_parallel": "gather"}, "does not gather keys over mesh.seq"),
        ("triton", {"shape": (2, 252, 8, 64), "seq": 8}, "mesh seq = 8 does not divide the 252 positions"),
        ("cudnn", {"seq": 8, "context_parallel": "ring"}, "cannot be given the sums over all keys.*; use triton"),
    ],
)
def test_calls_that_are_refused(monkeypatch, implementation, options, message):
    monkeypatch.setattr(kernels_cudnn, "_PLUGINS", ("jax",))
    with jax.enable_x64(True), pytest.raises(ValueError, match=message):
        choose_implementation(gpu_call(**options), implementation)


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "b200", "rtx4090", "rtx5090"])
@pytest.mark.parametrize(
    ("dtype", "channels"),
    [
        ("bfloat16", (64, 64)),
        ("bfloat16", (80, 80)),
        ("bfloat16", (128, 128)),
        ("bfloat16", (192, 128)),
        ("float16", (256, 256)),
        ("float32", (128, 128)),
        ("float32", (256, 256)),
    ],
    ids=str,
)
def test_blocks_fit_into_shared_memory(target: str, dtype: str, channels: tuple[int, int]):
    pytest.importorskip("jax_cuda12_plugin", reason=NO_CUDA)
    targets.set_environment(target)
    device = targets.resolve(target).devices()[0]
    mesh = Mesh(np.asarray([device]).reshape((1,) * 5), AXES)
    H, V = channels

    def array(*shape: int, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, PartitionSpec()))

    def loss(q, k, v, segments):
        options = {"segments_BS": segments, "window": 200, "softcap": 30.0, "mesh": mesh}
        return dot_product_attention(q, k, v, implementation="triton", **options).astype(jnp.float32).sum()

    arrays = array(1, 500, 4, H), array(1, 500, 2, H), array(1, 500, 2, V), array(1, 500, dtype="int32")
    # The compiler refuses programs with too much of it.
    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile().as_text()
    names = set(re.findall(r"[/(](flash_attention_\w+)[/)]", text))
    assert names == {f"flash_attention_{name}_window_200" for name in NUM_PRODUCTS}


@cache
def compile_step(window: int | None = None) -> str:
    """Return the program of a step of two Llama layers on 8 H100 GPUs, which share a row of 32768 tokens."""
    targets.set_environment("h100x8")
    model = llama_model(layers=2, heads=8, kv_heads=2, dim=1024, hidden=768, vocab_size=64)
    model.param_dtype = model.compute_dtype = "bfloat16"
    model.stack.pattern[0].attention.window = window
    options: dict[str, Any] = {"batch": 1, "mesh": {"seq": 8}}
    experiment = small.experiment(model, seq_len=32768, memory={"remat": "none"}, **options).instantiate()
    return Program(experiment, targets.resolve("h100x8").devices()).backend.compiled_step.as_text()


def find_loops(text: str) -> list[str]:
    """Return the bodies of a program's loops."""
    bodies = set(re.findall(r" while\(.*body=%([\w.\-]+)", text))
    computations = re.findall(r"^%(\S+) \(.*\n((?:  .*\n)*)}", text, re.MULTILINE)
    return [lines for name, lines in computations if name in bodies]


def find_gathered(text: str) -> list[int]:
    """Return the sizes of the results of all-gathers."""
    results = re.findall(r"= (.*?) all-gather(?:-start)?\(", text)
    shapes = [shape for result in results for shape in re.findall(r"\w\[([\d,]+)\]", result)]
    return [int(np.prod(list(map(int, shape.split(","))))) for shape in shapes]


# Of a row, 2 key heads of 128 channels.
KEYS_SIZE = 2 * 32768 * 128


@pytest.mark.slow
def test_keys_travel_between_gpus():
    pytest.importorskip("jax_cuda12_plugin", reason=NO_CUDA)
    text = compile_step()
    rings = [body for body in find_loops(text) if "/flash_attention_" in body and "collective-permute" in body]
    assert any("/flash_attention_forward/" in body for body in rings)
    assert any("/flash_attention_backward_keys/" in body for body in rings)
    assert "/flash_attention_forward_causal/" in text
    assert "__cudnn$fmha" not in text
    assert max(find_gathered(text), default=0) < KEYS_SIZE
    # No mask of queries and keys.
    assert not re.search(r"\[(?:\d+,)*(?:4096|2048),(?:32768|4096|2048)\]", text)


@pytest.mark.slow
def test_gpus_receive_the_keys_of_a_window():
    pytest.importorskip("jax_cuda12_plugin", reason=NO_CUDA)
    text = compile_step(window=1024)
    assert "/flash_attention_forward_window_1024/" in text
    assert "__cudnn$fmha" not in text
    assert max(find_gathered(text), default=0) < KEYS_SIZE
    # The last 1024 keys of the previous device come before 4096 of its own.
    assert "bf16[1,2,5120,128]" in text
