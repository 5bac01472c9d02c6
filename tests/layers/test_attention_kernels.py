"""XLA attention against a float64 reference written in numpy: values, gradients, masks, dtypes, and argument checks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from framework.layers.attention_kernels import chosen_implementation, dot_product_attention, why_not

# One compile for each case, not one for each operation.
attend = jax.jit(
    dot_product_attention,
    static_argnames=("window", "softcap", "scale", "causal", "implementation", "mesh", "platform"),
)


def reference(q, k, v, *, segments=None, window=None, softcap=None, scale=None, causal=True):
    """Attention by its definition, one head and one sequence at a time, in float64."""
    B, S, N, H = q.shape
    T, group = k.shape[1], N // k.shape[2]
    i, j = np.arange(S)[:, None], np.arange(T)[None, :]
    out = np.zeros(q.shape, np.float64)
    for b, n in itertools.product(range(B), range(N)):
        logits = q[b, :, n].astype(np.float64) @ k[b, :, n // group].astype(np.float64).T
        logits *= H**-0.5 if scale is None else scale
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        allowed = np.ones((S, T), bool)
        if causal:
            allowed &= j <= i
        if window is not None:
            allowed &= (j <= i) & (j > i - window)
        if segments is not None:
            same = segments[b][:, None] == segments[b][None, :]
            allowed &= np.where((segments[b] == 0)[:, None], i == j, same)
        weights = np.where(allowed, np.exp(logits - logits.max(axis=1, keepdims=True)), 0.0)
        out[b, :, n] = weights / weights.sum(axis=1, keepdims=True) @ v[b, :, n // group].astype(np.float64)
    return out


def inputs(B, S, N, K, H, T=None, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(B, S, N, H), (B, T or S, K, H), (B, T or S, K, H), (B, S, N, H)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def documents(B, S):
    """Segments of uneven lengths, another split in each row, and padding at the end of each."""
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
    "window without causal": ((1, 9, 2, 2, 4), {"window": 3, "causal": False}),
    "softcap": ((1, 10, 2, 2, 4), {"softcap": 0.7}),
    "scale": ((1, 10, 2, 2, 4), {"scale": 1.3}),
    "all to all": ((2, 10, 4, 2, 4), {"causal": False}),
    "documents": ((2, 30, 2, 1, 4), {"segments": True}),
    "documents, all to all": ((2, 30, 2, 1, 4), {"segments": True, "causal": False}),
    "everything": ((2, 150, 4, 2, 4), {"segments": True, "window": 40, "softcap": 2.0, "scale": 0.9}),
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


def test_attention_to_another_sequence():
    q, k, v, _ = inputs(2, 6, 4, 2, 4, T=11)
    ours = attend(q, k, v, causal=False)
    np.testing.assert_allclose(ours, reference(q, k, v, causal=False), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", ["grouped", "three blocks of rows", "everything"])
def test_gradients_equal_finite_differences_of_the_reference(case):
    (_, S, _, _, H), options = CASES[case]
    B, N, K, S = 1, 2, 1, min(S, 70)  # still more than one block of rows where the case has more
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_inputs_keep_a_float32_softmax(dtype):
    # 600 keys of nearly equal weight: sums in half precision would be off by percents.
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
    """All equations of a jaxpr, nested ones included."""
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


def test_padding_attends_to_itself_alone_and_gives_no_nan():
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


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("query", "key", "options", "message"),
    [
        ((2, 8, 4), (2, 8, 4, 4), {}, r"expected query \[B, S, N, H\]"),
        ((2, 8, 4, 4), (1, 8, 4, 4), {}, "the same B and H"),
        ((2, 8, 4, 4), (2, 8, 4, 8), {}, "the same B and H"),
        ((2, 8, 4, 4), (2, 8, 3, 4), {}, "multiple of key/value heads, given 4 and 3"),
        ((2, 8, 4, 4), (2, 9, 4, 4), {}, "8 queries and 9 keys; pass causal=False"),
        ((2, 8, 4, 4), (2, 8, 4, 4), {"window": 0}, "window: expected at least 1, given 0"),
        ((2, 8, 4, 4), (2, 8, 4, 4), {"softcap": -1.0}, "softcap: expected a positive number"),
        ((2, 8, 4, 4), (2, 8, 4, 4), {"segments_BS": struct(2, 9, dtype=jnp.int32)}, r"expected shape \(2, 8\)"),
        ((2, 8, 4, 4), (2, 8, 4, 4), {"segments_BS": struct(2, 8)}, "an integer dtype, given float32"),
        ((2, 8, 4, 4), (2, 8, 4, 4), {"platform": "npu"}, "expected one of cpu, tpu, gpu"),
        ((2, 8, 4, 4), (2, 8, 4, 4), {"implementation": "splsh"}, "did you mean 'splash'"),
        ((2, 8, 4, 4), (2, 8, 4, 4), {"implementation": "splash"}, "runs on TPU, not on cpu; use xla"),
        ((2, 8, 4, 4), (2, 8, 4, 4), {"implementation": "cudnn"}, "runs on NVIDIA GPUs, not on cpu; use xla"),
    ],
)
def test_arguments_that_do_not_belong_together(query, key, options, message):
    with pytest.raises(ValueError, match=message):
        chosen_implementation(struct(*query), struct(*key), **options)


def test_dtypes_must_agree():
    q, k, v, _ = inputs(1, 4, 2, 2, 4)
    with pytest.raises(ValueError, match="one floating dtype"):
        dot_product_attention(q, k.astype(np.float16), v)
    with pytest.raises(ValueError, match="key and value of one shape"):
        dot_product_attention(q, k, v[:, :, :1])


def test_auto_goes_by_the_platform_and_by_what_its_kernel_can_serve():
    def choice(S=256, H=64, dtype=jnp.bfloat16, **options):
        return chosen_implementation(struct(2, S, 4, H, dtype=dtype), struct(2, S, 2, H, dtype=dtype), **options)

    assert choice() == "xla"
    assert choice(platform="tpu") == "splash"
    assert choice(platform="tpu", softcap=50.0, window=100, dtype=jnp.float32) == "splash"
    assert choice(platform="tpu", S=200) == "xla"
    assert choice(platform="tpu", dtype=jnp.float16) == "xla"
    assert choice(platform="tpu", implementation="xla") == "xla"
    assert choice(platform="gpu", softcap=50.0) == "xla"


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        (
            (2, 200, 4, 64),
            jnp.bfloat16,
            "multiple of 128 positions on each device, not 200 / 1; a length of 256 would do",
        ),
        ((2, 256, 4, 20), jnp.bfloat16, "multiple of 8 channels a head, not 20"),
        ((2, 256, 4, 64), jnp.float16, "bfloat16 or float32, not float16"),
    ],
)
def test_why_not_splash(shape, dtype, message):
    query = struct(*shape, dtype=dtype)
    assert message in (why_not("splash", query, query, platform="tpu") or "")
    assert chosen_implementation(query, query, platform="tpu") == "xla"
    with pytest.raises(ValueError, match="implementation='splash' cannot serve this call"):
        chosen_implementation(query, query, platform="tpu", implementation="splash")


def test_xla_serves_everything():
    assert why_not("xla", struct(1, 7, 3, 5), struct(1, 7, 1, 5)) is None
