"""Whole flows: log p against dense Jacobians, gradients under every remat policy, latents, and calibration."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plimsoll.extras.flows.coupling import AdditiveCoupling, AffineCoupling
from plimsoll.extras.flows.ends import Preprocess, Prior, Split
from plimsoll.extras.flows.image_source import DigitsSource, ImagePipeline
from plimsoll.extras.flows.linear import ActNorm, InvertibleConv, Permutation
from plimsoll.extras.flows.model import Flow
from plimsoll.extras.flows.nets import AttentionNet, ConvNet
from plimsoll.extras.flows.residual import ResidualBlock
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import flatten, initialize, unflatten
from plimsoll.framework.program.program import Program
from plimsoll.framework.run.hooks import _describe_updated
from tests.support import small

BATCH = 4
NET = config_for(ConvNet, hidden=6, dropout=0.2)
GLOW = [config_for(ActNorm), config_for(InvertibleConv), config_for(AffineCoupling, net=NET)]
MIXED = [
    config_for(Permutation, kind="shuffle"),
    config_for(AdditiveCoupling, net=NET),
    config_for(
        AffineCoupling,
        net=config_for(AttentionNet, hidden=4, num_heads=2, mlp=config_for(MLP, hidden=6), dropout=0.2),
        flip=True,
    ),
]
RESIDUAL = [config_for(ActNorm), config_for(ResidualBlock, hidden=6, size=4)]


def flow(*patterns: list[Config], shape: tuple[int, int, int] = (4, 4, 1), repeats: int = 2, **fields: Any) -> Flow:
    stacks = [config_for(Stack, num_layers=repeats * len(p), pattern=p) for p in patterns or (MIXED, GLOW)]
    return config_for(Flow, **{"image_shape": shape, "levels": 5, "stacks": stacks, **fields}).instantiate()


def init_params(model: Flow, seed: int = 0) -> Any:
    """Return parameters away from their initial values, at which many gradients are zero."""
    specs = model.parameter_specs()
    rng = np.random.default_rng(seed)

    def perturb(spec: Any, p: jax.Array) -> jax.Array:
        return p + jnp.asarray(0.2 * rng.normal(size=p.shape), p.dtype) if spec.trainable else p

    return jax.tree.map(perturb, specs, jax.jit(lambda key: initialize(specs, key))(jax.random.key(seed)))


def context(model: Flow, remat: str = "none", training: bool = True, seed: int = 0) -> Context:
    images = np.random.default_rng(seed).integers(0, model.levels, (BATCH, *model.image_shape)).astype(np.uint8)
    return Context(
        batch={"images": jnp.asarray(images), "weights": jnp.array([1.0, 1.0, 0.0, 1.0])},
        rng=jax.random.key(1),
        rows=jnp.arange(BATCH),
        num_targets=jnp.float32(3.0 if training else 1.0),
        training=training,
        compute_dtype=model.compute_dtype,
        remat=remat,
    )


def gradients(model: Flow, params: Any, ctx: Context) -> Any:
    return jax.jit(jax.value_and_grad(lambda p: model.loss(p, ctx, {})[0]))(params)


@pytest.mark.pairs
@pytest.mark.parametrize("priors", [True, False])
def test_log_p_matches_the_dense_jacobian(priors: bool):
    """nll = -(log N(latents) + log |det d latents / d image|) for standardized latents; this covers all stages."""
    learned = {"split": config_for(Split, learned=priors), "prior": config_for(Prior, learned=priors)}
    with jax.enable_x64(True):
        model = flow(param_dtype="float64", compute_dtype="float64", **learned)
        params, ctx = init_params(model), context(model, training=False)

        def latents(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            z = jnp.concatenate([z.reshape(-1) for z in model.encode(params, x.reshape(1, 4, 4, 1))])
            return z, z

        @jax.jit
        def everything(params: Any) -> Any:
            seen = model.preprocess.apply({}, None, ctx.fold("data"), {})[0]["x"]
            x = model.preprocess.inverse({}, seen, ctx)[0]
            image_jacobian = jax.vmap(jax.jacrev(latents, argnums=1, has_aux=True), (None, 0))
            return image_jacobian(params, x.reshape(BATCH, -1)), model.loss(params, ctx, {})

        (jacobian, z), (loss, out) = everything(params)
        log_p = (-0.5 * (np.asarray(z) ** 2 + np.log(2.0 * np.pi))).sum(1) + np.linalg.slogdet(jacobian)[1]
        counted = np.asarray(ctx.batch["weights"])
        np.testing.assert_allclose(loss, -np.sum(counted * log_p) / 16, rtol=1e-10)
        scores, loss = jax.tree.map(np.asarray, (model.scores(out, ctx.batch), loss))
    assert abs(scores["log_det"]) > 0.1
    np.testing.assert_allclose(scores["nll"], -np.sum(counted * log_p), rtol=1e-6)
    np.testing.assert_allclose(scores["nll"], -(scores["log_det"] + scores["log_prior"]), rtol=1e-5)
    row = model.summary({name: float(value) for name, value in scores.items()})
    assert row["images"] == 3.0
    np.testing.assert_allclose(row["loss"], float(loss) / 3.0, rtol=1e-6)
    np.testing.assert_allclose(row["bits_per_dim"], row["loss"] / np.log(2.0))
    np.testing.assert_allclose(row["loss"], -(row["log_det"] + row["log_prior"]), rtol=1e-5)


@pytest.mark.pairs
def test_uniform_density_costs_the_bits_in_its_levels():
    """With only a permutation, the nll counts the original integers: log2(levels) bits a dimension, plus the prior."""
    model = flow(
        [config_for(Permutation)], preprocess=config_for(Preprocess, alpha=0.0), prior=config_for(Prior, learned=False)
    )
    ctx = context(model, training=False)
    params = initialize(model.parameter_specs(), jax.random.key(0))
    loss, out = jax.jit(lambda p: model.loss(p, ctx, {}))(params)
    np.testing.assert_allclose(out.metrics["prior/log_det"], -3.0 * np.log(5.0), rtol=1e-6)
    noise = model.stages["data"].apply({}, None, ctx, {})[0]["x"][jnp.array([0, 1, 3])]
    np.testing.assert_allclose(
        -jax.scipy.stats.norm.logpdf(noise).sum() / 16, loss + out.metrics["prior/log_det"], rtol=1e-5
    )


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_constant_memory_has_the_plain_gradient(dtype: str):
    """memory.remat = invert gives the loss and every gradient of none, with dropout; no trainable gradient is zero."""
    with jax.enable_x64(dtype == "float64"):
        model = flow(param_dtype=dtype, compute_dtype=dtype)
        params = init_params(model)
        loss, plain = gradients(model, params, context(model))
        same, found = gradients(model, params, context(model, "invert"))
        np.testing.assert_allclose(same, loss, rtol=1e-6 if dtype == "float32" else 1e-14)
        small.assert_close(small.arrays(found), small.arrays(plain), 1e-4 if dtype == "float32" else 1e-11)
        frozen = {path for path, spec in flatten(model.parameter_specs()).items() if not spec.trainable}
        assert {path for path, g in flatten(plain).items() if not np.any(g)} <= frozen
        assert frozen == {"level1/block1/fixed"}


@pytest.mark.pairs
def test_gradient_matches_finite_differences():
    with jax.enable_x64(True):
        model = flow(param_dtype="float64", compute_dtype="float64")
        params, ctx = init_params(model), context(model, "invert")
        evaluate = jax.jit(jax.value_and_grad(lambda p: model.loss(p, ctx, {})[0]))
        at, grads = flatten(params), flatten(evaluate(params)[1])
        rng = np.random.default_rng(2)
        for path, grad in grads.items():
            direction = rng.normal(size=grad.shape)

            def along(step: float, path: str = path, direction: np.ndarray = direction) -> float:
                return float(evaluate(unflatten(at | {path: np.asarray(at[path]) + step * direction}))[0])

            slope = (along(1e-5) - along(-1e-5)) / 2e-5
            np.testing.assert_allclose(np.vdot(grad, direction), slope, rtol=1e-5, atol=1e-9, err_msg=path)


@pytest.mark.pairs
def test_residual_flows_under_sqrt():
    """Recomputing a layer repeats the estimate's random draws, so the gradient does not depend on the remat policy."""
    model = flow(RESIDUAL, repeats=4)
    params = init_params(model)
    loss, plain = gradients(model, params, context(model))
    for remat in ("sqrt", "full"):
        same, found = gradients(model, params, context(model, remat))
        np.testing.assert_allclose(same, loss, rtol=1e-6)
        small.assert_close(small.arrays(found), small.arrays(plain), 1e-5)
    with pytest.raises(ValueError, match=r"pattern\.1, ResidualBlock, is not reversible.*memory.remat = sqrt"):
        model.stages["level0"].check_remat("invert")


@pytest.mark.pairs
@pytest.mark.parametrize("patterns", [(GLOW, MIXED), (RESIDUAL,)])
def test_images_and_latents(patterns: Any):
    model = flow(*patterns)
    params, images = init_params(model), context(model).batch["images"]
    latents = jax.jit(model.encode)(params, images)
    assert [z.shape[1:] for z in latents] == model.latent_shapes
    assert sum(z.size for z in latents) == images.size
    back = jax.jit(model.decode)(params, latents)
    np.testing.assert_allclose(back, images + 0.5, atol=2e-3)
    np.testing.assert_array_equal(model.quantize(back), images)
    again = jax.jit(model.encode)(params, back)  # floating-point images are used as they are
    for first, second in zip(latents, again, strict=True):
        np.testing.assert_allclose(second, first, atol=2e-2)
    sample = jax.jit(model.sample, static_argnums=2)
    cold = sample(params, jax.random.key(0), 3, 0.0)
    assert (cold.shape, cold.dtype) == ((3, 4, 4, 1), jnp.uint8)
    np.testing.assert_array_equal(cold[0], cold[1])
    warm = sample(params, jax.random.key(0), 3, 1.0)
    assert warm.max() < 5
    assert np.any(warm[0] != warm[1])
    np.testing.assert_array_equal(warm, sample(params, jax.random.key(0), 3))
    assert np.any(warm != sample(params, jax.random.key(1), 3))


@pytest.mark.pairs
def test_samples_have_the_density():
    """In a flow with one free scale, the logits of samples have the mean and deviation that the parameters set."""
    model = flow([config_for(ActNorm)], repeats=1, levels=256, image_shape=(2, 2, 1))
    params = initialize(model.parameter_specs(), jax.random.key(0))
    params["level0"]["block0"] = {"bias": jnp.full((1, 4), -0.4), "log_scale": jnp.full((1, 4), np.log(2.0))}
    latents = [jax.random.normal(jax.random.key(0), (20000, 1, 1, 4))]
    images = jax.jit(model.decode)(params, latents)
    logits = np.asarray(model.preprocess.forward({}, images, context(model))[0])
    np.testing.assert_allclose(logits.mean((0, 1, 2)), 0.4, atol=0.02)
    np.testing.assert_allclose(logits.std((0, 1, 2)), 0.5, atol=0.02)
    integers = np.asarray(model.sample(params, jax.random.key(0), 20000))
    np.testing.assert_allclose(np.mean(integers / 256), np.mean(np.asarray(images) / 256), atol=5e-3)


@pytest.mark.pairs
def test_calibration_makes_every_actnorm_standardize_the_first_batch():
    model = flow(GLOW, [GLOW[0], *MIXED], shape=(8, 8, 1))
    params, ctx = init_params(model), replace(context(model), batch=dict(context(model).batch))
    ctx.batch["images"] = ctx.batch["images"] // 3  # far from the data that the initial values suit
    found = jax.jit(lambda p: model.calibrate(p, ctx, {}))(params)

    @jax.jit
    def behind_actnorms(params: Any) -> list[jax.Array]:
        carry, seen = None, []
        for name, stage in list(model.stages.items())[:-1]:
            if not isinstance(stage, Stack):
                carry, _ = model.run(name, params, carry, ctx, {})
                continue
            for index in range(stage.num_repeats):
                at = ctx.fold(name).fold_index(jnp.int32(index))
                for key, layer in stage.pattern.layers.items():
                    own = jax.tree.map(lambda p, i=index: p[i], params[name].get(key, {}))
                    carry, _ = layer.apply(layer.prepare(own, at), carry, at.fold(key), {})
                    if isinstance(layer, ActNorm):
                        seen.append(carry["x"])
        return seen

    seen = behind_actnorms(found)
    assert len(seen) == 4
    for x in map(np.asarray, seen):
        np.testing.assert_allclose(x.mean((0, 1, 2)), 0.0, atol=1e-4)
        np.testing.assert_allclose(x.std((0, 1, 2)), 1.0, atol=1e-3)
    moved = {p for p, x in flatten(found).items() if np.any(np.asarray(x) != np.asarray(flatten(params)[p]))}
    assert moved == {f"{level}/block0/{name}" for level in ("level0", "level1") for name in ("bias", "log_scale")}
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    with pytest.raises(ValueError, match="calibrate: expected float32 parameters"):
        model.calibrate(half, ctx, {})


def experiment(memory: dict[str, str], mesh: dict[str, int] | None = None, **learner: Any) -> Config:
    """Return a small multi-scale flow on synthetic digits; it reads no files."""
    stacks = [config_for(Stack, num_layers=2 * len(pattern), pattern=pattern) for pattern in (GLOW, MIXED)]
    config = small.experiment(
        config_for(Flow, image_shape=(8, 8, 1), levels=17, stacks=stacks),
        memory=memory,
        mesh=mesh,
        **{"optimizer": config_for(optax.sgd, learning_rate=1e-2, momentum=0.9), "clip": None},
        **learner,
    )
    config.data = config_for(ImagePipeline, source=config_for(DigitsSource), global_batch_size=8)
    return config


def trace(memory: dict[str, str], **fields: Any) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """Return the metrics of five steps and the state after them."""
    program = small.program(experiment(memory, **fields))
    state, metrics = program.init(), []
    for step in range(5):
        rng = np.random.default_rng(step)
        images = rng.integers(0, 17, (8, 8, 8, 1)).astype(np.uint8)
        batch = {"images": images, "weights": np.array([1, 1, 0, 1] * 2, np.float32)}
        state, values = program.step(state, program.put(batch))
        metrics.append({name: float(value) for name, value in values.items()})
    return metrics, small.arrays(state)


@pytest.fixture(scope="module")
def plain() -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    return trace({"remat": "none"})


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("memory", "mesh"),
    [
        ({"remat": "invert"}, None),
        ({"remat": "invert", "update": "in_backward"}, None),
        pytest.param({"remat": "invert"}, {"data": 4, "fsdp": 2}, marks=pytest.mark.slow),  # one image per device
        pytest.param(
            {"remat": "full", "update": "streamed", "optimizer_state": "pinned_host"}, None, marks=pytest.mark.slow
        ),
    ],
)
def test_training_is_the_same_in_constant_memory_and_under_other_schedules(memory: Any, mesh: Any, plain: Any):
    expected, last = plain
    assert expected[-1]["loss"] < expected[0]["loss"]
    third = expected[2]
    np.testing.assert_allclose(third["prior/nll"], -(third["prior/log_det"] + third["prior/log_prior"]), rtol=1e-5)
    metrics, state = trace(memory, mesh=mesh)
    for name in ("loss", "prior/log_det", "prior/log_prior"):
        np.testing.assert_allclose([m[name] for m in metrics], [m[name] for m in expected], rtol=2e-4, err_msg=name)
    small.assert_close(state, last, 1e-3)


def test_incompatible_flow_settings_are_refused():
    with pytest.raises(ValueError, match=r"stacks\.1: expected an even height and width to squeeze, given 3 x 2"):
        flow(GLOW, GLOW, shape=(6, 4, 1))
    with pytest.raises(ValueError, match=r"stacks\.0\.pattern\.0: expected a layer of plimsoll\.extras\.flows, given"):
        flow([config_for(MLP, hidden=8)])
    data = config_for(ImagePipeline, source=config_for(DigitsSource), global_batch_size=8).instantiate()
    shape = {"pipe": 1, "data": 1, "fsdp": 1, "expert": 1, "seq": 1, "model": 1}
    mesh = type("Mesh", (), {"shape": shape})()
    flow(shape=(8, 8, 1), levels=17).check(mesh, data)
    with pytest.raises(ValueError, match=r"model\.image_shape = \(4, 4, 1\), but the data's is \(8, 8, 1\)"):
        flow(levels=17).check(mesh, data)
    with pytest.raises(ValueError, match=r"model\.levels = 5, but the data's is 17"):
        flow(shape=(8, 8, 1)).check(mesh, data)
    with pytest.raises(ValueError, match="data: expected an image pipeline, given Text"):
        flow().check(mesh, type("Text", (), {})())
    mesh.shape = {**shape, "model": 2}
    with pytest.raises(ValueError, match=r"mesh\.model = 2: a flow is split over images only; expected 1"):
        flow(shape=(8, 8, 1), levels=17).check(mesh, data)


@pytest.mark.pairs
def test_layer_programs_refusal_names_stages_for_estimates_too():
    from plimsoll.configs.flows import CONFIGS
    from plimsoll.framework.devices.accelerators import spec_for
    from plimsoll.framework.plan.estimate import estimate

    config = CONFIGS["digits-glow"]()
    config.memory.update = "layer_programs"
    experiment, message = (config.instantiate(), "layer_programs runs embed, stack and head; the model has data, ")
    with pytest.raises(ValueError, match=message):
        Program(experiment, jax.devices()[:1])
    with pytest.raises(ValueError, match=message):
        estimate(experiment, experiment.mesh.resolve(1), spec_for("v5e"))


def test_nonfinite_gradient_reports_the_updated_layers():
    found = [_describe_updated(small.llama().instantiate(), count) for count in (0, 1, 3)]
    assert found == ["nothing was", "the head was", "the head and layers 1 to 0 of the stack were"]
    assert _describe_updated(flow(), 3) == "the last 3 of the model's layers and stages were"
