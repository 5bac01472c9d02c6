"""8-bit products, compared with the formulas of their rounding in NumPy's float64, and in models."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll import configs
from plimsoll.framework.config import ConfigError, config_for
from plimsoll.framework.families import export_config
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.layers.low_precision import RECIPES, multiply, round_to
from plimsoll.framework.layers.scale_history import HISTORY
from plimsoll.framework.layers.scale_history import LENGTH as LENGTH_OF_HISTORY
from plimsoll.framework.layout import flatten
from plimsoll.framework.plan.device_trace import trace
from plimsoll.framework.plan.split_experiment import SplitExperiment
from plimsoll.framework.program.program import Program
from tests.support import small
from tests.support.runs import losses, train, write_text
from tools import record_products

BATCH, LENGTH, INPUTS, OUTPUTS = 2, 24, 40, 56
# Half of the distance to the next number, relative to the number: 3 and 2 bits of mantissa.
RELATIVE_ERROR = {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
# Recipes whose scales do not belong to blocks, and those of them whose scales are of the same step.
SCALED = [name for name, recipe in RECIPES.items() if recipe.blocks is None]
CURRENT = [name for name in SCALED if not RECIPES[name].delayed]
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    """Return random numbers whose rows and columns differ in scale by factors of up to about 30."""
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.normal(size=(*shape[:-1], 1))) * np.exp(rng.normal(size=shape[-1]))
    return (rng.normal(size=shape) * spread).astype(np.float32)


# --- rounding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [None, (0,), (1,)])
@pytest.mark.parametrize("dtype", LARGEST)
def test_rounding_error_is_that_of_the_format(dtype: str, axes: Any):
    x = draw(64, 96)
    rounded = round_to(jnp.asarray(x), dtype, axes)
    assert rounded.values.dtype == dtype
    values = np.asarray(rounded.values).astype(np.float64)
    scale = np.asarray(rounded.scale, np.float64)
    exact_scale = np.abs(x).max(axis=axes, keepdims=True) / LARGEST[dtype]
    if axes is None:
        assert np.log2(scale) == np.ceil(np.log2(exact_scale))
    else:
        np.testing.assert_allclose(scale, exact_scale, rtol=1e-6)
        # The largest number of the format is used, once for each scale.
        assert (np.abs(values).max(axis=axes) == LARGEST[dtype]).all()
    error = np.abs(values * scale - x) / scale
    smallest_step = 1.0 if dtype == "int8" else float(ml_dtypes.finfo(dtype).smallest_subnormal)
    relative = 0.0 if dtype == "int8" else RELATIVE_ERROR[dtype]
    assert (error <= np.maximum(0.5 * smallest_step, relative * np.abs(x) / scale) * (1 + 1e-4)).all()


@pytest.mark.parametrize("dtype", LARGEST)
def test_zeros_and_extremes(dtype: str):
    zeros = round_to(jnp.zeros((3, 4)), dtype, (1,))
    assert not np.asarray(zeros.values).astype(np.float32).any()
    assert np.isfinite(zeros.scale).all()
    for magnitude in (1e-38, 1e-30, 3e38):
        x = np.float32(magnitude) * np.asarray([[1.0, -0.5, 0.25]], np.float32)
        rounded = round_to(jnp.asarray(x), dtype, None)
        restored = np.asarray(rounded.values).astype(np.float64) * np.asarray(rounded.scale, np.float64)
        np.testing.assert_allclose(restored, x, rtol=0.1, atol=float(2 * jnp.finfo(jnp.float32).tiny))
    # A number that is not finite must reach the loss, where the run notices it.
    for value in (np.nan, np.inf):
        rounded = round_to(jnp.asarray([[1.0, value]]), dtype, None)
        assert not jnp.isfinite(rounded.values.astype(jnp.float32) * rounded.scale).all()


def test_stochastic_rounding_is_unbiased():
    x = jnp.asarray(draw(8, 32))
    keys = jax.random.split(jax.random.key(3), 4000)
    rounded = jax.vmap(lambda key: round_to(x, "int8", (1,), key).values)(keys)
    scale = round_to(x, "int8", (1,)).scale
    quotient = np.asarray(x / scale, np.float64)
    mean = np.asarray(rounded, np.float64).mean(axis=0)
    # Four standard errors of a coin's mean, and the bias of eight bits of noise.
    fraction = quotient - np.floor(quotient)
    assert (np.abs(mean - quotient) < 4.5 * np.sqrt(fraction * (1 - fraction) / 4000) + 2.0**-8).all()
    assert set(np.unique(np.asarray(rounded) - np.floor(quotient))) <= {0.0, 1.0}


# --- products ---------------------------------------------------------------------------------------------------------


def round_by_formula(x: np.ndarray, dtype: str, axes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (8-bit numbers as float64, scale), with NumPy and ml_dtypes."""
    scale = (np.abs(x).max(axis=axes, keepdims=True) / LARGEST[dtype]).astype(np.float32)
    if axes is None:
        scale = np.exp2(np.ceil(np.log2(scale)))
    quotient = np.clip(x.astype(np.float32) / scale, -LARGEST[dtype], LARGEST[dtype])
    numbers = np.round(quotient) if dtype == "int8" else quotient.astype(np.dtype(dtype))
    return numbers.astype(np.float64), scale.astype(np.float64)


@pytest.mark.parametrize("name", CURRENT)
def test_products_equal_the_formulas(name: str):
    recipe = RECIPES[name]
    x, weight, grad = draw(BATCH, LENGTH, INPUTS), draw(INPUTS, OUTPUTS, seed=1), draw(BATCH, LENGTH, OUTPUTS, seed=2)
    x8, x_scale = round_by_formula(x, recipe.forward, (2,) if recipe.by_row else None)
    w8, w_scale = round_by_formula(weight, recipe.forward, (0,) if recipe.by_row else None)
    if recipe.by_row:
        g_outputs, g_outputs_scale = round_by_formula(grad * w_scale[0], recipe.backward, (2,))
        g_tokens, g_tokens_scale = round_by_formula(grad * x_scale, recipe.backward, (0, 1))
        x_grad = (g_outputs @ w8.T) * g_outputs_scale
        weight_grad = np.einsum("bsi,bso->io", x8, g_tokens) * g_tokens_scale[0]
    else:
        g8, g_scale = round_by_formula(grad, recipe.backward, None)
        x_grad = (g8 @ w8.T) * g_scale * w_scale
        weight_grad = np.einsum("bsi,bso->io", x8, g8) * (g_scale * x_scale).reshape(())
    y, pull = jax.vjp(lambda x, weight: multiply(x, weight, None, recipe, "cpu"), jnp.asarray(x), jnp.asarray(weight))
    found = (y, *pull(jnp.asarray(grad)))
    for one, expected in zip(found, ((x8 @ w8) * x_scale * w_scale[0], x_grad, weight_grad), strict=True):
        # A scale that is off by a rounding error of float32 may move a number across a boundary.
        difference = np.abs(np.asarray(one, np.float64) - expected)
        assert np.median(difference) <= 2e-6 * np.abs(expected).max()
        assert np.linalg.norm(difference) <= 2e-3 * np.linalg.norm(expected)


def compare_with_torchao(recorded: Any) -> None:
    """Compare `multiply` with the results of torchao, which round the same numbers and sum them in another order."""
    x, weight, y_grad = (jnp.asarray(recorded[name]) for name in ("x", "weight", "y_grad"))
    y, pull = jax.vjp(lambda x, weight: multiply(x, weight, None, RECIPES["fp8_tensor"], "cpu"), x, weight)
    x_grad, weight_grad = pull(y_grad)
    for name, found in (("y", y), ("x_grad", x_grad), ("weight_grad", weight_grad)):
        expected = recorded[name]
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6 * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("case", record_products.CASES)
def test_equals_recorded_torchao(case: str):
    with np.load(record_products.RECORDED) as file:
        recorded = {name.partition("/")[2]: file[name] for name in file if name.startswith(f"{case}/")}
    compare_with_torchao(recorded)


@pytest.mark.peers
@pytest.mark.parametrize("case", record_products.CASES)
def test_equals_torchao(case: str):
    compare_with_torchao(record_products.compute(case))


@pytest.mark.parametrize(
    ("name", "most"), [("fp8_tensor", 0.07), ("fp8_row", 0.07), ("int8_row", 0.02), ("mxfp8", 0.05)]
)
def test_products_are_near_the_exact_ones(name: str, most: float):
    recipe = RECIPES[name]
    rng = np.random.default_rng(0)
    x, weight, grad = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 32, 64), (64, 96), (2, 32, 96))
    )
    key = jax.random.key(1)
    y, pull = jax.vjp(lambda x, weight: multiply(x, weight, key, recipe, "cpu"), x, weight)
    exact_y, exact_pull = jax.vjp(jnp.matmul, x, weight)
    for found, exact in zip((y, *pull(grad)), (exact_y, *exact_pull(grad)), strict=True):
        assert 1e-3 < float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)) < most


@pytest.mark.parametrize("name", SCALED)
def test_only_8_bit_inputs_are_saved(name: str):
    """The backward pass has the rounded input and the weight, and a frozen weight needs no input."""
    linear = Linear(inputs=INPUTS, outputs=OUTPUTS)
    linear.recipe = RECIPES[name]
    weights = {"weight": jnp.asarray(draw(INPUTS, OUTPUTS), jnp.bfloat16)}
    if RECIPES[name].delayed:
        weights[HISTORY] = jnp.zeros((2, LENGTH_OF_HISTORY))
    x = jnp.asarray(draw(BATCH, LENGTH, INPUTS), jnp.bfloat16)
    ctx = Context({}, rng=jax.random.key(0))
    _, pull = jax.vjp(lambda weights, x: linear(weights, x, ctx), weights, x)
    saved = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= x.size]
    assert sorted((leaf.shape, leaf.dtype.itemsize) for leaf in saved) == [
        ((BATCH, LENGTH, INPUTS), 1),
        ((INPUTS, OUTPUTS), 2),
    ]
    _, pull = jax.vjp(lambda x: linear(weights, x, ctx), x)
    assert [leaf.shape for leaf in jax.tree.leaves(pull) if leaf.size >= x.size] == [(INPUTS, OUTPUTS)]


@pytest.mark.parametrize("recipe", SCALED)
def test_shared_inputs_are_saved_once(recipe: str):
    built = small.experiment(small.llama(precision={"stack/": recipe}), memory={"remat": "none"}).instantiate()
    jaxpr = trace(SplitExperiment(built), built.mesh.resolve(1), "cpu").jaxpr
    # The loop over layers returns what it saves, with an axis of layers.
    loop = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    saved = [var.aval.shape[-1] for var in loop.outvars if var.aval.dtype == jnp.uint8]
    # The inputs of query, key and value, of output, of gate and up, and of down.
    assert sorted(saved) == [32, 32, 32, 48]


@pytest.mark.parametrize(
    ("name", "layers", "count"),
    [
        # Four layers; in three, the input of query serves the gate and the rates too.
        ("qwen3.5-tiny", "stack", 16),
        ("mamba2-tiny", "stack", 16),
        # The inputs of query and kv_down, of kv_up, of output, of gate and up, and of down.
        ("deepseek-tiny", "first", 5),
    ],
)
def test_layers_round_a_shared_input_once(name: str, layers: str, count: int):
    config = configs.load(name).model
    config.precision = {f"{layers}/": "fp8_row"}
    model = config.instantiate()
    pattern = model.stages[layers].pattern
    weights = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16), pattern.parameter_specs())
    x = jax.ShapeDtypeStruct((2, 64, model.dim), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda weights, x: pattern.apply(weights, x, Context({}), {})[0])(weights, x)
    assert str(jaxpr).count("name[name=rounded]") == count


@pytest.mark.parametrize("name", CURRENT)
@pytest.mark.parametrize(
    "policy", [jax.checkpoint_policies.save_only_these_names("rounded"), jax.checkpoint_policies.everything_saveable]
)
def test_gradient_checkpointing_saves_bits(name: str, policy: Any):
    """JAX applies `reduce_precision` to saved floats, for which numbers of e4m3 above 240 are infinite."""

    def loss(weight: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(multiply(x, weight, None, RECIPES[name], "cpu")))

    gradients = jax.grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1))
    arguments = jnp.asarray(draw(INPUTS, OUTPUTS)), jnp.asarray(draw(BATCH, LENGTH, INPUTS))
    text = str(jax.make_jaxpr(gradients)(*arguments))
    assert re.findall(r":f8_\w+\[[\d,]*\] = reduce_precision", text) == []
    for found, expected in zip(gradients(*arguments), jax.grad(loss, argnums=(0, 1))(*arguments), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * float(jnp.max(jnp.abs(expected))))


# --- in a model -------------------------------------------------------------------------------------------------------


def experiment(recipe: str | None, dim: int = 32, layers: int | None = None, **options: Any) -> Any:
    rules = {} if recipe is None else {"mlp": recipe, "attention/(query|output)": recipe}
    # Multiples of the size of blocks.
    fields: dict[str, Any] = {"dim": dim, "stack__pattern__0__mlp__hidden": 2 * dim}
    if layers is not None:
        # Each layer amplifies the differences of numbers that are rounded to another e4m3, and there are more numbers.
        fields["stack__num_layers"] = layers
    model = small.llama(precision=rules, compute_dtype="float32", **fields)
    return small.experiment(model, **{"seq_len": 32, "optimizer": small.STEADY_ADAMW, **options})


def third_loss(program: Program, checkpoint: dict[str, np.ndarray]) -> float:
    """Return the loss of the third step of a run that resumes from the checkpoint of the second."""
    specs = program.backend.abstract_checkpoint
    leaves = [jax.device_put(checkpoint[path], spec.sharding) for path, spec in flatten(specs).items()]
    state = program.backend.from_checkpoint(jax.tree.unflatten(jax.tree.structure(specs), leaves))
    _, metrics = program.step(state, program.put(small.host_batch(program, 2)))
    return float(metrics["loss"])


def schedule_program(name: str, recipe: str | None, **memory: str) -> Program:
    """Return the program of a recipe, on arrays that fit the blocks of `name`."""
    # The clipping of in_backward differs by design.
    options: dict[str, Any] = {"clip": None}
    if name == "fp8_block":
        options |= {"dim": 128, "seq_len": 128, "layers": 1}
    return small.program(experiment(recipe, **options, memory=memory))


@functools.cache
def jit_program(name: str, *, exact: bool = False) -> tuple[Program, list[float]]:
    """Return the program of a recipe with the default schedule and its losses; with full precision if `exact`."""
    program = schedule_program(name, None if exact else name)
    return program, [metrics["loss"] for metrics in small.run(program, 3)[1]]


@pytest.mark.pairs
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    "memory",
    [
        {"remat": "full"},
        {"update": "streamed", "optimizer_state": "pinned_host", "remat": "full"},
        {"update": "in_backward", "optimizer_state": "pinned_host"},
        {"update": "layer_programs", "optimizer_state": "pinned_host", "parameters": "pinned_host"},
    ],
    ids=["full", "streamed", "in_backward", "layer_programs"],
)
def test_schedules_round_the_same_numbers(name: str, memory: dict[str, str]):
    same, losses = jit_program(name)
    program = schedule_program(name, name, **memory)
    state, metrics = small.run(program, 2)
    checkpoint = small.arrays(program.backend.to_checkpoint(state))
    np.testing.assert_allclose([one["loss"] for one in metrics], losses[:2], rtol=2e-5)
    # After two updates, the weights differ by rounding errors, which may round one of them to another 8-bit number. So
    # the third losses are compared for the same weights.
    np.testing.assert_allclose(third_loss(program, checkpoint), third_loss(same, checkpoint), rtol=2e-5)
    _, plain = jit_program(name, exact=True)
    assert 1e-6 < abs(losses[-1] / plain[-1] - 1) < 1e-2


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, {"data": 2, "fsdp": 4}) for name in RECIPES),
        # `seq` would split the blocks of mxfp8.
        *((name, {"fsdp": 2, "model": 2, "seq": 2}) for name in (*SCALED, "fp8_block")),
    ],
    ids=str,
)
def test_meshes_round_the_same_numbers(name: str, mesh: dict[str, int]):
    """A scale covers the whole vector or array, not a shard of it."""
    # Each shard has whole blocks.
    options: dict[str, Any] = {"dim": 32}
    if name == "mxfp8":
        options = {"dim": 128}
    if name == "fp8_block":
        options = {"dim": 256, "seq_len": 256, "layers": 1}
    one = small.program(experiment(name, **options))
    state = one.init()
    loss, grads = small.loss_and_grads(one, state)
    other_loss, other_grads = small.loss_and_grads(small.program(experiment(name, **options, mesh=mesh)), state)
    np.testing.assert_allclose(other_loss, loss, rtol=2e-6)
    for path, grad in grads.items():
        # Sums in another order move single numbers across a boundary; a scale of a shard would move most of them.
        assert np.linalg.norm(other_grads[path] - grad) < 5e-3 * np.linalg.norm(grad), path


def test_fsdp_gathers_8_bit_weights():
    """Rounding a rounded weight again changes nothing, so the products are the same."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("fsdp", "model"))
    stored = NamedSharding(mesh, PartitionSpec("fsdp", "model"))
    weight = jax.device_put(jnp.asarray(draw(INPUTS, OUTPUTS), jnp.bfloat16), stored)

    def gather(weight: jax.Array) -> jax.Array:
        return Context({}, mesh=mesh).gather(weight, ("fsdp", "model"), as_fp8=True)

    gathered, pull = jax.vjp(jax.jit(gather), weight)
    assert gathered.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(None, "model")), 2)
    rounded = round_to(weight, "float8_e4m3fn", None)
    exact = rounded.values.astype(jnp.float32) * rounded.scale
    np.testing.assert_array_equal(gathered.astype(jnp.float32), exact)
    again = round_to(gathered, "float8_e4m3fn", None)
    np.testing.assert_array_equal(again.values.astype(jnp.float32) * again.scale, exact)
    # The gradient passes unrounded, and is scattered.
    (grad,) = pull(gathered)
    assert grad.sharding.is_equivalent_to(stored, 2)
    np.testing.assert_array_equal(grad, gathered)
    linear = Linear(inputs=INPUTS, outputs=OUTPUTS, mesh_axes=("fsdp", "model"))
    linear.recipe = RECIPES["fp8_tensor"]
    ctx = Context({}, mesh=mesh, compute_dtype=jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda weight: linear.prepare({"weight": weight}, ctx))(weight)
    assert re.search(rf"u8\[{INPUTS},{OUTPUTS}\] = sharding_constraint", str(jaxpr))


def test_only_weights_with_one_scale_are_gathered_rounded():
    for name, recipe in RECIPES.items():
        linear = Linear(inputs=INPUTS, outputs=OUTPUTS)
        assert not linear.param_specs()["weight"].gathered_as_fp8
        linear.recipe = recipe
        assert linear.param_specs()["weight"].gathered_as_fp8 == (name in ("fp8_tensor", "fp8_delayed"))


@pytest.mark.pairs
@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_delayed", "int8_row"])
def test_resumes_to_the_bit(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Scales come from the arrays or from histories in the checkpoint, and noise from the step."""
    monkeypatch.setenv("TINY_TEXT", "")
    write_text(tmp_path / "text")
    rules = json.dumps({"mlp|attention": recipe})
    flags = [f"--config.model.precision={rules}", "--config.trainer.max_steps=8"]
    assert train(tmp_path / "whole", *flags) == 0
    assert train(tmp_path / "parts", *flags, "--config.trainer.max_steps=4") == 0
    assert train(tmp_path / "parts", *flags, "--resume=must") == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "parts")) == 8
    assert train(tmp_path / "plain", "--config.trainer.max_steps=8") == 0
    assert losses(tmp_path / "plain") != losses(tmp_path / "whole")


def test_rules_that_cannot_apply_are_refused():
    for rules, message in (
        ({"mlp": "fp8_tensor", "mlp/up": "int8_row"}, r"'mlp/up' decides for none of 8 layers"),
        ({"(mlp": "fp8_row"}, r"'\(mlp' is no regular expression"),
        (
            {"mlp": "fp4"},
            r"expected one of 'fp8_tensor', 'fp8_delayed', 'fp8_row', 'int8_row', 'mxfp8', 'fp8_block', given 'fp4'",
        ),
    ):
        with pytest.raises((ConfigError, ValueError), match=message):
            small.llama(precision=rules).instantiate()
    mixed = small.llama()
    small.block(mixed).mlp = mixture(experts=4, top_k=2, hidden=16)
    mixed.precision = {"experts": "fp8_row"}
    with pytest.raises(ValueError, match=re.escape("the products of experts have no 8-bit form")):
        mixed.instantiate()
    stored = small.llama(dim=64, lora=config_for(LoRA, base="nf4"), precision={"mlp": "fp8_row"})
    with pytest.raises(ValueError, match=r"whose weight is stored as nf4 \(lora.base\)"):
        stored.instantiate()


def test_exports_do_not_depend_on_the_precision_of_products():
    plain, _ = export_config(small.llama())
    rounded, _ = export_config(small.llama(precision={"mlp": "int8_row"}))
    assert rounded == plain


def test_gpus_without_8_bit_floats_are_refused():
    floats = small.llama(precision={"mlp": "fp8_row"}).instantiate()
    with pytest.raises(ValueError, match=r"need compute capability 8.9 .* this GPU has 8.0; expected int8_row"):
        floats.check_platform("gpu", "8.0")
    for platform, capability in (("gpu", "9.0"), ("gpu", None), ("cpu", None), ("tpu", None)):
        floats.check_platform(platform, capability)
    small.llama(precision={"mlp": "int8_row"}).instantiate().check_platform("gpu", "8.0")


@pytest.mark.pairs
def test_adapters_train_beside_8_bit_products():
    lora = config_for(LoRA, rank=4, base="bfloat16")
    config = small.experiment(small.llama(lora=lora, precision={"mlp": "fp8_tensor"}), optimizer=small.STEADY_ADAMW)
    program = small.program(config)
    start = small.arrays(program.init().parameter)
    state, metrics = small.run(program, 3)
    assert metrics[-1]["loss"] != metrics[0]["loss"]
    assert all("lora" in path for path in flatten(state.parameter))
    assert any((small.arrays(state.parameter)[path] != value).any() for path, value in start.items())
