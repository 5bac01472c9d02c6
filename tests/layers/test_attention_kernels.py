"""XLA attention compared to a float64 reference in numpy: values, gradients, masks, dtypes, and argument checks."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.layers.attention_kernels import choose_implementation, dot_product_attention
from plimsoll.framework.layers.kernels_call import describe_call

# This compiles once per case instead of once per operation.
attend = jax.jit(dot_product_attention, static_argnames=("window", "softcap", "implementation"))


def reference(q, k, v, *, segments=None, window=None, softcap=None):
    """Compute attention by its definition, one head and one sequence at a time, in float64."""
    B, S, N, H = q.shape
    group = N // k.shape[2]
    i, j = np.arange(S)[:, None], np.arange(S)[None, :]
    out = np.zeros(q.shape, np.float64)
    for b, n in itertools.product(range(B), range(N)):
        logits = q[b, :, n].astype(np.float64) @ k[b, :, n // group].astype(np.float64).T
        logits *= H**-0.5
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        allowed = j <= i
        if window is not None:
            allowed &= j > i - window
        if segments is not None:
            same = segments[b][:, None] == segments[b][None, :]
            allowed &= np.where((segments[b] == 0)[:, None], i == j, same)
        weights = np.where(allowed, np.exp(logits - logits.max(axis=1, keepdims=True)), 0.0)
        out[b, :, n] = weights / weights.sum(axis=1, keepdims=True) @ v[b, :, n // group].astype(np.float64)
    return out


def inputs(B, S, N, K, H):
    rng = np.random.default_rng(0)
    shapes = [(B, S, N, H), (B, S, K, H), (B, S, K, H), (B, S, N, H)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def documents(B, S):
    """Return segments of uneven lengths, split differently in each row, with padding at the end of each row."""
    ids = np.zeros((B, S), np.int32)
    for b in range(B):
        ends = [S // 5 + b, S // 2 + 2 * b, S - 3 - b]
        for number, (start, end) in enumerate(itertools.pairwise([0, *ends]), 1):
            ids[b, start:end] = number
    return ids


CASES = {
    "multi-head": ((2, 10, 3, 3, 4), {}),
    "grouped": ((2, 10, 6, 2, 4), {}),
    "one key head": ((1, 10, 4, 1, 8), {}),
    "three blocks of rows": ((1, 150, 4, 2, 4), {}),
    "window": ((1, 150, 2, 1, 4), {"window": 17}),
    "window of one": ((1, 9, 2, 2, 4), {"window": 1}),
    "window beyond the sequence": ((1, 9, 2, 2, 4), {"window": 99}),
    "softcap": ((1, 10, 2, 2, 4), {"softcap": 0.7}),
    "documents": ((2, 30, 2, 1, 4), {"segments": True}),
    "everything": ((2, 150, 4, 2, 4), {"segments": True, "window": 40, "softcap": 2.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_values_equal_the_float64_reference(case):
    (B, S, N, K, H), options = CASES[case]
    options = dict(options)
    segments = documents(B, S) if options.pop("segments", False) else None
    q, k, v, _ = inputs(B, S, N, K, H)
    ours = attend(q, k, v, segments_BS=segments, implementation="xla", **options)
    assert ours.shape == q.shape
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, reference(q, k, v, segments=segments, **options), rtol=2e-5, atol=2e-6)


@pytest.mark.once("grouped")
@pytest.mark.parametrize("case", ["grouped", "three blocks of rows", "everything"])
def test_gradients_equal_reference_finite_differences(case):
    (_, S, _, _, H), options = CASES[case]
    B, N, K, S = 1, 2, 1, min(S, 70)  # still more than one block of rows if the case has more
    options = dict(options)
    segments = documents(B, S) if options.pop("segments", False) else None
    q, k, v, cotangent = inputs(B, S, N, K, H)

    def ours(q, k, v):
        return jnp.vdot(dot_product_attention(q, k, v, segments_BS=segments, **options), cotangent)

    gradients = jax.jit(jax.grad(ours, argnums=(0, 1, 2)))(q, k, v)
    arrays = [x.astype(np.float64) for x in (q, k, v)]
    rng = np.random.default_rng(1)
    for which, gradient in enumerate(gradients):
        for index in rng.choice(gradient.size, size=min(60, gradient.size), replace=False):
            values = []
            for step in (1e-5, -1e-5):
                moved = [x.copy() for x in arrays]
                moved[which].flat[index] += step
                values.append(np.vdot(reference(*moved, segments=segments, **options), cotangent))
            expected = (values[0] - values[1]) / 2e-5
            assert float(np.asarray(gradient).flat[index]) == pytest.approx(expected, rel=2e-3, abs=2e-5)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_inputs_keep_a_float32_softmax(dtype):
    # With 600 keys of nearly equal weight, sums in half precision would be off by several percent.
    q, k, v, _ = (jnp.asarray(x, dtype) for x in inputs(1, 600, 2, 1, 16))
    q, v = q * 0.1, v + 1
    ours = attend(q, k, v)
    assert ours.dtype == jnp.dtype(dtype)
    expected = reference(*(np.asarray(x, np.float32) for x in (q, k, v)))
    np.testing.assert_allclose(np.asarray(ours, np.float32), expected, rtol=0.01, atol=0.01)
    exponentials = [e for e in equations(jax.make_jaxpr(dot_product_attention)(q, k, v)) if e.primitive.name == "exp"]
    assert exponentials
    assert {e.invars[0].aval.dtype for e in exponentials} == {jnp.dtype("float32")}


def equations(closed):
    """Yield all equations of a jaxpr, including nested ones."""
    for equation in closed.jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                yield from equations(value)


def test_float64_inputs_are_not_rounded():
    with jax.enable_x64(True):
        q, k, v, _ = (x.astype(np.float64) for x in inputs(1, 20, 2, 1, 4))
        ours = attend(q, k, v)
        assert ours.dtype == jnp.float64
        np.testing.assert_allclose(ours, reference(q, k, v), rtol=1e-12)


def test_padding_attends_only_to_itself_without_nan():
    q, k, v, cotangent = inputs(2, 12, 4, 2, 4)
    segments = np.zeros((2, 12), np.int32)

    def loss(q, k, v):
        out = attend(1e4 * q, k, v, segments_BS=segments)
        return jnp.vdot(out, cotangent), out

    (_, out), (dq, dk, dv) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    np.testing.assert_array_equal(out, np.repeat(v, 2, axis=2))
    np.testing.assert_array_equal(dq, np.zeros_like(dq))
    np.testing.assert_array_equal(dk, np.zeros_like(dk))
    np.testing.assert_allclose(dv, cotangent.reshape(2, 12, 2, 2, 4).sum(axis=3), rtol=1e-6)


def test_nothing_leaks_between_documents_or_from_the_future():
    q, k, v, _ = inputs(1, 90, 2, 1, 4)
    segments = np.repeat(np.int32([[1, 2]]), 45, axis=1)
    before = np.asarray(attend(q, k, v, segments_BS=segments))
    k[:, 60], v[:, 60] = 1e6, 7.0
    after = np.asarray(attend(q, k, v, segments_BS=segments))
    assert np.array_equal(before[:, :60], after[:, :60])
    assert np.abs(before[:, 60:] - after[:, 60:]).max() > 0.1


def test_remat_finds_the_output_by_its_name():
    q, k, v, _ = inputs(1, 8, 2, 2, 4)

    def products_in_backward(policy):
        def loss(q):
            return jax.checkpoint(lambda q: jnp.sin(dot_product_attention(q, k, v)), policy=policy)(q).sum()

        return str(jax.make_jaxpr(jax.grad(loss))(q)).count("dot_general")

    policies = jax.checkpoint_policies
    kept = products_in_backward(policies.save_only_these_names("attention"))
    assert kept == products_in_backward(policies.save_only_these_names("something else")) - 1


def call(query, key, platform="cpu", dtype=jnp.bfloat16, segments=None, value=None, **options):
    """Describe a call on a platform that this machine may not have."""
    q, k, v = (jax.ShapeDtypeStruct(shape, dtype) for shape in (query, key, value or key))
    options = {"window": None, "softcap": None, "mesh": None} | options
    return dataclasses.replace(describe_call(q, k, v, segments, **options), platform=platform)


@pytest.mark.parametrize(
    ("query", "key", "options", "message"),
    [
        ((2, 8, 4), (2, 8, 4, 4), {}, r"expected query \[B, S, N, H\]"),
        ((2, 8, 4, 4), (1, 8, 4, 4), {}, r"given \(2, 8, 4, 4\), \(1, 8, 4, 4\)"),
        ((2, 8, 4, 4), (2, 9, 4, 4), {}, "expected query"),
        ((2, 8, 4, 4), (2, 8, 3, 4), {}, "N a multiple of K"),
        ((2, 8, 4, 4), (2, 8, 4, 4), {"value": (2, 8, 2, 4)}, "expected query"),
        ((2, 8, 4, 4), (2, 8, 4, 4), {"dtype": jnp.int32}, "one floating dtype, given .*int32"),
        ((2, 8, 4, 4), (2, 8, 4, 4), {"segments": np.zeros((2, 9), np.int32)}, r"expected integers \(2, 8\)"),
        ((2, 8, 4, 4), (2, 8, 4, 4), {"segments": np.zeros((2, 8), np.float32)}, "given float32"),
    ],
)
def test_arrays_that_do_not_belong_together(query, key, options, message):
    with pytest.raises(ValueError, match=message):
        call(query, key, **options)


@pytest.mark.parametrize(
    ("implementation", "options", "message"),
    [
        ("splsh", {}, "did you mean 'splash'"),
        ("splash", {}, "runs on TPU, not on cpu; use xla"),
        ("cudnn", {}, "runs on NVIDIA GPUs, not on cpu; use xla"),
        ("splash", {"platform": "tpu", "S": 200}, "not 200 / 1; pad to 256"),
        ("splash", {"platform": "tpu", "H": 20}, "multiple of 8 channels per head, not 20"),
        ("splash", {"platform": "tpu", "dtype": jnp.float16}, "bfloat16 or float32, not float16"),
    ],
)
def test_named_implementation_explains_why_it_is_unsupported(implementation, options, message):
    options = {"S": 256, "H": 64} | options
    shape = (2, options.pop("S"), 4, options.pop("H"))
    with pytest.raises(ValueError, match=message):
        choose_implementation(call(shape, shape, **options), implementation)
    assert choose_implementation(call(shape, shape, **options)) == "xla"


def test_auto_follows_the_platform():
    query, key = (2, 256, 4, 64), (2, 256, 2, 64)
    assert choose_implementation(call(query, key)) == "xla"
    assert choose_implementation(call(query, key, "tpu")) == "splash"
    assert choose_implementation(call(query, key, "tpu", jnp.float32, softcap=50.0, window=100)) == "splash"
    assert choose_implementation(call(query, key, "tpu"), "xla") == "xla"
    assert choose_implementation(call(query, key, "gpu", softcap=50.0)) == "xla"
