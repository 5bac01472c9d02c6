"""Each flow layer in isolation: inverse, log-determinant, the backward pass from the output, and refusals."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.extras.flows.base import Bijection, Invertible, check_outputs
from plimsoll.extras.flows.coupling import AdditiveCoupling, AffineCoupling
from plimsoll.extras.flows.ends import Preprocess, Prior, Split
from plimsoll.extras.flows.linear import ActNorm, InvertibleConv, Permutation, Squeeze
from plimsoll.extras.flows.nets import AttentionNet, ConvNet, convolve
from plimsoll.extras.flows.residual import ResidualBlock
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layers.reversible import Reversible
from plimsoll.framework.layout import flatten, initialize
from tests.support import small

BATCH, SHAPE = 3, (4, 4, 4)
CONV = config_for(ConvNet, hidden=6, dropout=0.3)
ATTENTION = config_for(AttentionNet, hidden=8, num_heads=2, mlp=config_for(MLP, hidden=12), dropout=0.3)
CHEAP: dict[str, Config] = {
    "actnorm": config_for(ActNorm, dim=4),
    "conv1x1": config_for(InvertibleConv, dim=4),
    "conv1x1-permutation": config_for(InvertibleConv, dim=4, fixed="permutation"),
    "reverse": config_for(Permutation, dim=4),
    "shuffle": config_for(Permutation, dim=4, kind="shuffle", seed=3),
    "squeeze": config_for(Squeeze),
    "additive": config_for(AdditiveCoupling, dim=4, net=CONV),
    "affine": config_for(AffineCoupling, dim=4, net=CONV),
    "affine-flipped": config_for(AffineCoupling, dim=4, net=CONV, flip=True),
    "affine-attention": config_for(AffineCoupling, dim=4, net=ATTENTION),
}
RESIDUAL = config_for(ResidualBlock, dim=4, hidden=6, size=4, log_det="exact", tolerance=1e-14, max_iterations=400)
ALL = {
    **CHEAP,
    "residual": RESIDUAL,
    "logit": config_for(Preprocess, levels=5, alpha=0.05),
    "no-logit": config_for(Preprocess, levels=5, alpha=0.0),
}


def context(dtype: Any, training: bool = True) -> Context:
    return Context(
        batch={},
        rng=jax.random.key(5),
        rows=jnp.arange(BATCH) + 7,
        num_targets=jnp.float32(BATCH),
        training=training,
        compute_dtype=jnp.dtype(dtype),
    )


def init_params(layer: Any, dtype: Any, seed: int = 0) -> Any:
    """Return parameters away from zero and one; frozen parameters keep their initial values."""
    specs = jax.tree.map(lambda spec: replace(spec, dtype=dtype), layer.parameter_specs())
    rng = np.random.default_rng(seed)

    def perturb(spec: Any, p: jax.Array) -> jax.Array:
        return p + jnp.asarray(0.3 * rng.normal(size=p.shape), p.dtype) if spec.trainable else p

    return jax.tree.map(perturb, specs, jax.jit(lambda key: initialize(specs, key))(jax.random.key(seed)))


def images(name: str, dtype: Any, seed: int = 0) -> jax.Array:
    rng = np.random.default_rng(seed)
    x = rng.uniform(0.1, 4.9, (BATCH, *SHAPE)) if "logit" in name else rng.normal(size=(BATCH, *SHAPE))
    return jnp.asarray(x, dtype)


@pytest.fixture(params=[pytest.param("float32", marks=pytest.mark.pairs), "float64"])
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    with jax.enable_x64(True) if request.param == "float64" else nullcontext():
        yield request.param


@pytest.mark.pairs
@pytest.mark.parametrize("name", ALL)
def test_inverse_and_log_determinant(name: str, dtype: str):
    """inverse(forward(x)) is x; log_det from either direction equals that of the dense Jacobian."""
    layer: Invertible = ALL[name].instantiate()
    ctx, x = context(dtype), images(name, dtype)
    tolerance = 2e-5 if dtype == "float32" else 1e-11

    @jax.jit
    def everything(params: Any, x: jax.Array) -> Any:
        weights = layer.prepare(params, ctx)
        y, log_det = layer.forward(weights, x, ctx)

        def flat(v: jax.Array) -> jax.Array:  # all images in one call: dropout masks depend on the row
            return layer.forward(weights, v.reshape(x.shape), ctx)[0].reshape(BATCH, -1)

        return log_det, layer.inverse(weights, y, ctx), jax.jacrev(flat)(x.reshape(-1))

    log_det, (back, again), jacobian = everything(init_params(layer, dtype), x)
    np.testing.assert_allclose(back, x, atol=tolerance * 10, rtol=0)
    np.testing.assert_allclose(again, log_det, atol=tolerance * 30, rtol=tolerance)
    assert log_det.dtype == jnp.dtype(dtype)
    jacobian = np.asarray(jacobian, np.float64).reshape(BATCH, x[0].size, BATCH, x[0].size)
    for row in range(BATCH):
        dense = np.linalg.slogdet(jacobian[row, :, row])[1]
        np.testing.assert_allclose(log_det[row], dense, atol=tolerance * 30, rtol=tolerance)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", CHEAP)
def test_reverse_equals_the_gradient_through_apply(name: str, dtype: str):
    """From only the output, `reverse` gives the input and the cotangents of jax.vjp of `apply`, also for log_det."""
    layer: Bijection = CHEAP[name].instantiate()
    assert isinstance(layer, Reversible)
    ctx, x = context(dtype), images(name, dtype)
    sums = {"log_det": np.arange(3).astype(dtype), "log_prior": np.ones(3, dtype)}
    carry = {"x": x, **sums}

    def both(params: Any, carry: Any) -> Any:
        weights = layer.prepare(params, ctx)
        after, pull = jax.vjp(lambda w, c: layer.apply(w, c, ctx, {})[0], weights, carry)
        cts = {"x": images("ct", dtype, 1).reshape(after["x"].shape), **jax.tree.map(lambda s: 0.5 - s, sums)}
        return pull(cts), layer.reverse(weights, after, (cts, None), ctx, {})

    (grads, ct), result = jax.jit(both)(init_params(layer, dtype), carry)
    before, layer_grads, layer_ct = result.carry, result.grads, result.ct
    tolerance = 3e-5 if dtype == "float32" else 1e-11
    small.assert_close(small.arrays(before), small.arrays(carry), tolerance)
    small.assert_close(small.arrays(layer_ct), small.arrays(ct), tolerance)
    assert jax.tree.structure(layer_grads) == jax.tree.structure(grads)
    if grads:
        small.assert_close(small.arrays(layer_grads), small.arrays(grads), tolerance)
        assert all(np.any(g) for p, g in flatten(layer_grads).items()), "a gradient of zeros compares nothing"


def test_a_coupling_evaluates_its_net_once_to_go_back():
    layer = CHEAP["affine"].instantiate()
    ctx, x = context("float32"), images("affine", "float32")
    weights = layer.prepare(init_params(layer, "float32"), ctx)
    carry = {"x": x, "log_det": jnp.zeros(3), "log_prior": jnp.zeros(3)}

    def products(function: Any, *args: Any) -> int:
        return str(jax.make_jaxpr(function)(*args)).count("dot_general[")

    once = products(lambda w, x: layer.forward(w, x, ctx), weights, x)
    back = products(lambda w, c: layer.reverse(w, c, (c, None), ctx, {}), weights, carry)
    assert (once, back) == (3, 9)  # each convolution takes one product forward and two for its gradients


@pytest.mark.pairs
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("channels", [(3, 7), (7, 3)])
def test_convolution_matches_jax(kernel: int, channels: tuple[int, int]):
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=s).astype(np.float32) for s in ((2, 5, 4, channels[0]), (kernel, kernel, *channels)))
    expected = jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    np.testing.assert_allclose(jax.jit(convolve)(weight, x), expected, atol=2e-5)


def test_residual_flow_is_not_reversible():
    assert not isinstance(RESIDUAL.instantiate(), Reversible)
    assert not hasattr(RESIDUAL.instantiate(), "reverse")


class Doubling(Bijection):
    """Bijection 2 x, with a fault in its log-determinant that the test sets."""

    fault: Any = staticmethod(lambda log_det: log_det)

    def forward(self, weights, x_BHWC, ctx):
        """See Invertible."""
        return 2.0 * x_BHWC, self.fault(jnp.full(x_BHWC.shape[0], 64 * np.log(2.0), jnp.float32))


def test_log_det_is_checked_while_tracing():
    carry = {"x": images("", "float32"), "log_det": jnp.zeros(3), "log_prior": jnp.zeros(3)}
    for fault, words in (
        (jnp.sum, r"Doubling.forward: expected log_det float32\[3\], given float32\[\]"),
        (lambda x: x[:, None], r"given float32\[3, 1\]"),
        (lambda x: x.astype(jnp.bfloat16), r"given bfloat16\[3\]"),
        (lambda x: x.astype(jnp.int32), r"given int32\[3\]"),
    ):
        layer = Doubling()
        layer.fault = fault
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(lambda c, layer=layer: layer.apply({}, c, context("float32"), {})[0], carry)
    after, _ = jax.jit(lambda c: Doubling().apply({}, c, context("float32"), {}))(carry)
    np.testing.assert_allclose(after["log_det"], 64 * np.log(2.0), rtol=1e-6)
    x = carry["x"]
    with pytest.raises(ValueError, match=r"expected y float32 of 192 values, given float32\[3, 4, 4, 2\]"):
        check_outputs(Doubling(), x, x[..., :2], jnp.zeros(3))
    with pytest.raises(ValueError, match="expected y float32"):
        check_outputs(Doubling(), x, x.astype(jnp.bfloat16), jnp.zeros(3))


def test_incompatible_shapes_are_refused():
    ctx = context("float32")
    with pytest.raises(ValueError, match="expected an even height and width, given 3 x 4"):
        Squeeze().forward({}, jnp.zeros((1, 3, 4, 2)), ctx)
    with pytest.raises(ValueError, match="expected 2 or more, given 1; squeeze first"):
        AffineCoupling(dim=1)
    with pytest.raises(ValueError, match="expected 2 or more, given 1"):
        Split(dim=1)
    with pytest.raises(ValueError, match="num_heads = 3 does not divide hidden = 8"):
        AttentionNet(inputs=1, outputs=1, hidden=8, num_heads=3)
    with pytest.raises(ValueError, match="alpha: expected less than"):
        Preprocess(levels=17, alpha=0.7)
    layer = RESIDUAL.instantiate()
    with pytest.raises(ValueError, match="size = 4: given an image of 8 x 2"):
        jax.eval_shape(lambda p, x: layer.forward(p, x, ctx), init_params(layer, "float32"), jnp.zeros((1, 8, 2, 4)))


def at_first(layer: Any, x: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
    """Run the layer's forward pass with its initial parameters."""
    specs = layer.parameter_specs()
    return jax.jit(lambda key: layer.forward(initialize(specs, key), x, ctx))(jax.random.key(1))


@pytest.mark.pairs
def test_the_first_convolution_is_a_rotation_and_couplings_begin_as_the_identity():
    ctx, x = context("float32"), images("", "float32")
    conv = CHEAP["conv1x1"].instantiate()
    y, log_det = at_first(conv, x, ctx)
    assert np.abs(y - x).max() > 0.1
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(log_det, 0.0)
    assert not conv.parameter_specs()["fixed"].trainable
    permuted = CHEAP["conv1x1-permutation"].instantiate()
    y, _ = at_first(permuted, x, ctx)
    np.testing.assert_allclose(np.sort(y), np.sort(x), atol=1e-6)
    for name in ("additive", "affine-flipped", "affine-attention"):
        y, log_det = at_first(CHEAP[name].instantiate(), x, ctx)
        np.testing.assert_array_equal(y, x)
        np.testing.assert_array_equal(log_det, 0.0)


def test_actnorm_calibrates():
    x = 3.0 * images("", "float32") + jnp.arange(4.0)
    layer = CHEAP["actnorm"].instantiate()
    y, _ = layer.forward(layer.calibrate({}, x), x, context("float32"))
    np.testing.assert_allclose(jnp.mean(y, (0, 1, 2)), 0.0, atol=1e-6)
    np.testing.assert_allclose(jnp.std(y, (0, 1, 2)), 1.0, rtol=1e-5)
    constant = layer.calibrate({}, jnp.full((2, 2, 2, 4), 7.0))
    assert np.all(np.isfinite(constant["log_scale"]))


@pytest.mark.pairs
def test_dequantization_noise_is_fixed_in_evaluation():
    layer = Preprocess(levels=17, alpha=0.05)
    batch = {"images": np.random.default_rng(0).integers(0, 17, (4, 2, 2, 1)).astype(np.uint8)}

    @partial(jax.jit, static_argnums=3)
    def round_trip(own: Any, rng: Any, rows: Any, training: bool) -> jax.Array:
        ctx = Context(batch=own, rng=rng, rows=rows, training=training)
        return layer.inverse({}, layer.apply({}, None, ctx, {})[0]["x"], ctx)[0]

    def noise(rng: Any, rows: Any, training: bool, part: slice = slice(None)) -> np.ndarray:
        own = {"images": batch["images"][part]}
        return np.asarray(round_trip(own, rng, rows, training)) - own["images"]

    rows, key = jnp.arange(4), jax.random.key(1)
    first = noise(key, rows, True)
    assert first.min() >= -1e-3
    assert first.max() < 1.001
    assert first.std() > 0.2
    assert np.abs(first - noise(jax.random.key(2), rows, True)).max() > 0.1
    np.testing.assert_allclose(noise(key, rows[2:], True, slice(2, 4)), first[2:], atol=1e-4)  # also for a microbatch
    np.testing.assert_array_equal(noise(key, rows, False), noise(None, None, False))
    assert np.abs(noise(None, None, False) - first).max() > 0.1


def log_normal(x: Any, mean: np.ndarray, log_std: np.ndarray) -> np.ndarray:
    """Return the log-density of normal distributions."""
    deviations = (np.asarray(x) - mean) / np.exp(log_std)
    return -0.5 * (deviations**2 + np.log(2.0 * np.pi)) - log_std


def test_splits_and_priors_score_factored_out_channels():
    ctx, x = context("float32"), images("", "float32")
    carry = {"x": x, "log_det": jnp.zeros(3), "log_prior": jnp.ones(3)}
    for learned in (True, False):
        layer = Split(dim=4, learned=learned)

        @jax.jit
        def everything(params: Any, layer: Split = layer, learned: bool = learned) -> Any:
            weights = layer.prepare(params, ctx)
            after, _ = layer.apply(weights, carry, ctx, {})
            kept, latent = layer.encode(weights, x, ctx)
            head = layer.conv(weights["conv"], kept, ctx) if learned else jnp.zeros_like(x)
            return after, kept, layer.decode(weights, kept, latent, ctx), head

        after, kept, back, head = jax.device_get(everything(init_params(layer, "float32")))
        np.testing.assert_array_equal(after["x"], kept)
        np.testing.assert_allclose(back, x, atol=1e-6)
        mean, log_std = np.split(head, 2, axis=-1)
        expected = log_normal(x[..., 2:], mean, log_std).sum((1, 2, 3))
        np.testing.assert_allclose(after["log_prior"] - 1.0, expected, rtol=1e-5)
    prior = Prior(shape=SHAPE, dims=64)
    weights = init_params(prior, "float32")
    batch = {"weights": jnp.array([1.0, 0.0, 1.0])}
    ctx = Context(batch=batch, num_targets=jnp.float32(2.0), training=True)

    @jax.jit
    def ends(weights: Any, carry: Any) -> Any:
        nothing, latent = prior.encode(weights, carry["x"], ctx)
        return prior.apply(weights, carry, ctx, {}), prior.decode(weights, nothing, latent, ctx)

    (nothing, out), back = ends(weights, {**carry, "log_det": jnp.array([5.0, 6.0, 7.0])})
    log_prior = 1.0 + log_normal(x, *map(np.asarray, (weights["mean"], weights["log_std"]))).sum((1, 2, 3))
    assert nothing is None
    np.testing.assert_allclose(out.metrics["log_prior"], (log_prior[0] + log_prior[2]) / 128, rtol=1e-5)
    np.testing.assert_allclose(out.metrics["log_det"], 12.0 / 128, rtol=1e-6)
    np.testing.assert_allclose(out.loss, -(out.metrics["log_det"] + out.metrics["log_prior"]), rtol=1e-5)
    np.testing.assert_allclose(back, x, atol=1e-5)


def test_permutation_matches_its_name():
    assert Permutation(dim=5).order.tolist() == [4, 3, 2, 1, 0]
    orders = [Permutation(dim=64, kind="shuffle", seed=seed).order.tolist() for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == list(range(64)) != order for order in orders)
