"""Products of `fp8_block`: the formulas in NumPy's float64, torchao's numbers, the kernels for GPUs, and meshes.

The kernels run as JAX operations. Schedules, meshes and models are in test_low_precision.py, which runs them for all
recipes, and compiled programs in test_low_precision_compiled.py.
"""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.layers import block_kernels_gpu
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.block_kernels_gpu import round_along_both_axes, round_square_tiles
from plimsoll.framework.layers.block_rounding import Blocks, round_blocks, round_square_blocks
from plimsoll.framework.layers.block_scaling import FP8_BLOCK, BlockOptions, Partition, multiply_blocks, round_input
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.low_precision import RECIPES, multiply
from plimsoll.framework.layout import MeshAxes
from plimsoll.framework.plan.device_trace import trace
from plimsoll.framework.plan.jaxpr_analysis import FlopCount, flops
from plimsoll.framework.plan.split_experiment import SplitExperiment
from plimsoll.framework.plan.step_time.estimated_time import count_traced_work
from tests.support import small
from tools import record_products

RECIPE = RECIPES["fp8_block"]
ROWS, LENGTH, INPUTS, OUTPUTS = 4, 256, 256, 512
ON_CPU = BlockOptions(FP8_BLOCK, "cpu")
ON_GPU = BlockOptions(FP8_BLOCK, "gpu", interpret=True)
BATCH_AXES = ("data", "fsdp", "expert")


def draw(*shape: int, seed: int = 0) -> jax.Array:
    """Return random numbers whose rows and columns differ in scale."""
    rng = np.random.default_rng(seed)
    spread = np.exp(2 * rng.normal(size=(*shape[:-1], 1))) * np.exp(2 * rng.normal(size=shape[-1]))
    return jnp.asarray(rng.normal(size=shape) * spread, jnp.float32)


def draw_product() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return x, weight and the cotangent of their product."""
    return (draw(ROWS, LENGTH, INPUTS), draw(INPUTS, OUTPUTS, seed=1), draw(ROWS, LENGTH, OUTPUTS, seed=2))


def restore_by_formula(x: np.ndarray, rows: int) -> np.ndarray:
    """Return x rounded in blocks of rows x 128 numbers, as float64, with NumPy and ml_dtypes."""
    blocks = x.astype(np.float64).reshape(x.shape[0] // rows, rows, -1, 128)
    scale = np.exp2(np.ceil(np.log2(np.abs(blocks).max(axis=(1, 3), keepdims=True) / 448.0)))
    values = (blocks / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return (values * scale).reshape(x.shape)


def restore(blocks: Blocks) -> np.ndarray:
    """Return the numbers that blocks stand for, as float64."""
    values = np.asarray(blocks.values).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scales = np.exp2(np.asarray(blocks.scales).astype(np.float64) - 127)
    for axis in (0, 1):
        scales = np.repeat(scales, values.shape[axis] // scales.shape[axis], axis=axis)
    return values * scales


@partial(jax.jit, static_argnums=0)
def compute_gradients(options: BlockOptions, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return y and the gradients of x and weight."""

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return multiply_blocks(x, round_input(x, options), weight, options)

    x, weight, grad = arrays
    y, pull = jax.vjp(product, x, weight)
    return (y, *pull(grad))


def assert_near(found: tuple[jax.Array, ...], expected: tuple[Any, ...], most: float = 1e-6) -> None:
    """Compare y and gradients, whose sums may have another order."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=most * np.abs(other).max())


# --- rounding ---------------------------------------------------------------------------------------------------------


def test_rounding_equals_the_formula():
    x = np.array(draw(256, 384))
    # The scale of 448 times a power of two is that power, and that of the next number is twice as large.
    x[0, :128] = 0
    x[0, 5] = 448 * 2.0**-3
    x[1, :128] = 0
    x[1, 5] = np.nextafter(np.float32(448 * 2.0**-3), np.float32(1e3))
    rows = round_blocks(jnp.asarray(x), 128)
    assert rows.scales.shape == (256, 3)
    assert np.asarray(rows.scales)[:2, 0].tolist() == [127 - 3, 127 - 2]
    np.testing.assert_array_equal(restore(rows), restore_by_formula(x, 1))
    squares = round_square_blocks(jnp.asarray(x), 128)
    assert squares.scales.shape == (2, 3)
    np.testing.assert_array_equal(restore(squares), restore_by_formula(x, 128))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_round_the_same_numbers(dtype: str):
    x = draw(256, 384).astype(dtype).at[3].set(0).at[:, 7].set(0)
    rows, columns = round_along_both_axes(x, interpret=True)
    pairs = [(rows, round_blocks(x, 128)), (columns, round_blocks(x.T, 128))]
    pairs.append((round_square_tiles(x, transpose=False, interpret=True), round_square_blocks(x, 128)))
    pairs.append((round_square_tiles(x, transpose=True, interpret=True), round_square_blocks(x.T, 128)))
    for found, expected in pairs:
        np.testing.assert_array_equal(found.values, expected.values)
        np.testing.assert_array_equal(found.scales, expected.scales)


def compare_with_torchao(recorded: Any) -> None:
    """Compare with torchao's `blockwise_fp8_training`, for numbers whose scales there are powers of two."""
    x = jnp.asarray(recorded["x"])
    rows, columns = round_along_both_axes(x, interpret=True)
    squares = round_square_tiles(x, transpose=False, interpret=True)
    for name, found, transpose in (("row", rows, False), ("column", columns, True), ("square", squares, False)):
        values, scales = np.asarray(found.values), np.exp2(np.asarray(found.scales, np.float32) - 127)
        np.testing.assert_array_equal(values.T if transpose else values, recorded[f"{name}_values"])
        np.testing.assert_array_equal(scales.T if transpose else scales, recorded[f"{name}_scales"])


def test_rounding_equals_recorded_torchao():
    with np.load(record_products.RECORDED) as file:
        compare_with_torchao({name.partition("/")[2]: file[name] for name in file if name.startswith("tiles/")})


@pytest.mark.peers
def test_rounding_equals_torchao():
    compare_with_torchao(record_products.compute_tiles())


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
def test_products_equal_the_formulas(options: BlockOptions):
    x, weight, grad = draw_product()
    x_TI, grad_TO = np.asarray(x).reshape(-1, INPUTS), np.asarray(grad).reshape(-1, OUTPUTS)
    # One rounded weight serves y and the gradient of x.
    w_IO = restore_by_formula(np.asarray(weight), 128)
    expected = (
        (restore_by_formula(x_TI, 1) @ w_IO).reshape(ROWS, LENGTH, OUTPUTS),
        (restore_by_formula(grad_TO, 1) @ w_IO.T).reshape(ROWS, LENGTH, INPUTS),
        restore_by_formula(x_TI.T, 1) @ restore_by_formula(grad_TO.T, 1).T,
    )
    assert_near(compute_gradients(options, x, weight, grad), expected)
    exact = (np.asarray(x) @ np.asarray(weight), np.asarray(grad) @ np.asarray(weight).T, x_TI.T @ grad_TO)
    for one, other in zip(expected, exact, strict=True):
        assert 1e-3 < np.linalg.norm(one - other) / np.linalg.norm(other) < 0.05


def test_products_in_bfloat16():
    arrays = [array.astype(jnp.bfloat16) for array in draw_product()]
    found, expected = (compute_gradients(options, *arrays) for options in (ON_GPU, ON_CPU))
    assert {array.dtype for array in found} == {jnp.dtype("bfloat16")}
    assert_near(found, tuple(array.astype(jnp.float32) for array in expected), most=2.0**-8)


@pytest.mark.parametrize("tokens", [1, 200])
@pytest.mark.parametrize("options", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
def test_any_number_of_tokens_has_a_product_but_no_weight_gradient(options: BlockOptions, tokens: int):
    x, weight, grad = draw_product()
    some = x[:1, :tokens]

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return multiply_blocks(x, round_input(x, options), weight, options)

    whole = compute_gradients(ON_CPU, x, weight, grad)
    y, pull = jax.vjp(lambda some: product(some, weight), some)
    assert_near((y, *pull(grad[:1, :tokens])), (whole[0][:1, :tokens], whole[1][:1, :tokens]))
    with pytest.raises(ValueError, match=f"fp8_block needs a multiple of 128 tokens in a microbatch, given {tokens}"):
        jax.grad(lambda weight: jnp.sum(product(some, weight)))(weight)


@pytest.mark.parametrize("options", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_reach_the_results(options: BlockOptions, value: float):
    x, weight, grad = draw_product()
    y, x_grad, weight_grad = compute_gradients(options, x.at[0, 3, 5].set(value), weight, grad)
    # The numbers of the token's block, and the tokens of the channel's block.
    assert not np.isfinite(y[0, 3]).any()
    assert not np.isfinite(weight_grad[5]).any()
    assert np.isfinite(y[0, 4]).all()
    assert np.isfinite(x_grad).all()
    y, x_grad, _ = compute_gradients(options, x, weight.at[3, 5].set(value), grad)
    assert not np.isfinite(y[..., 5]).any()
    assert not np.isfinite(x_grad[..., 3]).any()
    _, x_grad, weight_grad = compute_gradients(options, x, weight, grad.at[0, 3, 5].set(value))
    assert not np.isfinite(x_grad[0, 3]).any()
    assert not np.isfinite(weight_grad[:, 5]).any()


def test_zeros():
    x, weight, grad = draw_product()
    for options in (ON_CPU, ON_GPU):
        for array in compute_gradients(options, 0 * x, 0 * weight, 0 * grad):
            np.testing.assert_array_equal(array, 0)


def test_kernels_refuse_arrays_beyond_their_offsets():
    left = jax.ShapeDtypeStruct((2**20, 2048), jnp.float8_e4m3fn)
    right = jax.ShapeDtypeStruct((128, 2048), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((2**20, 16), jnp.float32), jax.ShapeDtypeStruct((1, 16), jnp.float32)
    with pytest.raises(ValueError, match=r"has an array of 2147483648 elements, .* raise learner.accumulate"):
        jax.eval_shape(
            lambda left, left_scales, right, right_scales: block_kernels_gpu.multiply_blocks(
                left, left_scales, right, right_scales, jnp.bfloat16
            ),
            *(left, scales[0], right, scales[1]),
        )


# --- memory and planning ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_input_rounded_by_channel_is_saved(platform: str):
    """With its scales: 129/128 bytes an element. A frozen weight needs no input."""
    x, weight, _ = (jax.ShapeDtypeStruct(array.shape, jnp.bfloat16) for array in draw_product())

    def product(weight: jax.Array, x: jax.Array) -> jax.Array:
        return multiply(x, weight, None, RECIPE, platform)

    def find_saved(function: Any, *arguments: Any) -> list[tuple[tuple[int, ...], str]]:
        pull = jax.eval_shape(lambda *arguments: jax.vjp(function, *arguments)[1], *arguments)
        return sorted((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(pull) if leaf.size > 1)

    tokens = ROWS * LENGTH
    kept_weight = ((INPUTS, OUTPUTS), "bfloat16")
    assert find_saved(product, weight, x) == sorted(
        [((INPUTS, tokens), "uint8"), ((INPUTS, tokens // 128), "uint8"), kept_weight]
    )
    assert find_saved(lambda x: product(jnp.zeros(weight.shape, weight.dtype), x), x) == [kept_weight]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_shared_inputs_are_saved_once(platform: str):
    model = small.llama(precision={"stack/": "fp8_block"}, dim=256, stack__pattern__0__mlp__hidden=384)
    built = small.experiment(model, memory={"remat": "none"}, seq_len=128).instantiate()
    jaxpr = trace(SplitExperiment(built), built.mesh.resolve(1), platform).jaxpr
    # The loop over layers returns what it saves, with an axis of layers.
    loop = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    saved = [var.aval.shape[1:] for var in loop.outvars if var.aval.dtype == jnp.uint8]
    # Values and scales of the inputs of query, key and value, of output, of gate and up, and of down.
    tokens = 8 * 128
    assert sorted(saved) == sorted([(size, tokens // width) for size in (256, 256, 256, 384) for width in (1, 128)])


@pytest.mark.parametrize(
    "policy", [jax.checkpoint_policies.save_only_these_names("rounded"), jax.checkpoint_policies.everything_saveable]
)
def test_gradient_checkpointing_saves_bits(policy: Any):
    def loss(weight: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(multiply(x, weight, None, RECIPE, "cpu")))

    gradients = jax.grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1))
    x, weight, _ = draw_product()
    text = str(jax.make_jaxpr(gradients)(weight, x))
    assert re.findall(r":f8_\w+\[[\d,]*\] = reduce_precision", text) == []
    assert_near(gradients(weight, x), jax.grad(loss, argnums=(0, 1))(weight, x))


def test_products_and_rounding_are_counted():
    x, weight, _ = (jax.ShapeDtypeStruct(array.shape, jnp.bfloat16) for array in draw_product())

    def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(multiply(x, weight, None, RECIPE, "gpu").astype(jnp.float32))

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, weight)
    tokens = ROWS * LENGTH
    products = 3 * 2 * tokens * INPUTS * OUTPUTS
    assert flops(jaxpr) == FlopCount(products, fp8=products)
    sizes = (tokens * INPUTS, tokens * OUTPUTS, INPUTS * OUTPUTS)
    # Products read two of these arrays, and write the third in bfloat16. Rounding reads bfloat16 and writes x and the
    # cotangent along both axes, and the weight once for each of its products.
    exact = sum(2 * sizes[index] + 2 * sizes[index] for index in range(3))
    exact += 4 * sizes[0] + 4 * sizes[1] + 2 * 3 * sizes[2]
    assert exact < count_traced_work(jaxpr).product_bytes < 1.1 * exact


# --- several devices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "weight_axes", "platform"),
    [
        ((1, 2, 1, 2, 2), ("fsdp", "model"), "gpu"),
        ((2, 2, 1, 1, 2), ("model", "fsdp"), "gpu"),
        ((1, 2, 2, 2, 1), (None, "fsdp"), "gpu"),
        ((1, 2, 2, 1, 2), (("model", "fsdp"), None), "gpu"),
        ((1, 2, 1, 2, 2), ("model", "fsdp"), "cpu"),
        ((1, 2, 1, 2, 2), (("fsdp", "seq"), "model"), "gpu"),
        ((2, 1, 1, 2, 2), ("model", ("fsdp", "seq")), "cpu"),
    ],
    ids=str,
)
def test_devices_share_products(sizes: tuple[int, ...], weight_axes: MeshAxes, platform: str):
    """Each device has whole blocks of its own tokens, inputs and outputs."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(sizes), (*BATCH_AXES, "seq", "model"))
    arrays = draw_product()
    partition = Partition(mesh, (BATCH_AXES, "seq"), weight_axes)
    options = BlockOptions(FP8_BLOCK, platform, partition, interpret=True)
    found = compute_gradients(options, *arrays)
    assert_near(found, compute_gradients(ON_CPU, *arrays))
    if {"fsdp", ("fsdp", "seq")} & {*weight_axes}:
        # The gradient of the weight is scattered to where the weight is stored.
        stored = NamedSharding(mesh, PartitionSpec(*weight_axes))
        assert found[2].sharding.is_equivalent_to(stored, 2)


def test_layers_divide_their_tokens():
    """Also those of a generation, whose rows and single tokens some axes do not divide."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(1, 2, 1, 2, 2), (*BATCH_AXES, "seq", "model"))
    linear = Linear(inputs=INPUTS, outputs=OUTPUTS, mesh_axes=("fsdp", "model"))
    linear.recipe = RECIPE
    x, weight, grad = draw_product()
    whole, _, _ = compute_gradients(ON_CPU, x, weight, grad)
    for rows, length in ((4, 256), (4, 1), (3, 1), (1, 256)):
        run = jax.jit(lambda x: linear({"weight": weight}, x, Context({}, mesh=mesh).share_inputs()))
        y = run(x[:rows, :length])
        np.testing.assert_allclose(y, whole[:rows, :length], rtol=0, atol=1e-6 * np.abs(whole).max())


def test_tokens_of_each_device_are_whole_blocks():
    mesh = Mesh(np.asarray(jax.devices()).reshape(1, 8, 1, 1, 1), (*BATCH_AXES, "seq", "model"))
    linear = Linear(inputs=INPUTS, outputs=OUTPUTS)
    linear.recipe = RECIPE
    x = jnp.ones((8, 64, INPUTS))
    message = "fp8_block needs a multiple of 128 tokens in a microbatch on each device, given 64"
    with pytest.raises(ValueError, match=message):
        jax.grad(lambda weight: jnp.sum(linear({"weight": weight}, x, Context({}, mesh=mesh))))(
            jnp.ones((INPUTS, OUTPUTS))
        )


def test_unsuitable_layers_meshes_and_devices_are_refused():
    with pytest.raises(ValueError, match=re.escape("32 inputs and 48 outputs; expected multiples of 128")):
        small.llama(precision={"mlp": "fp8_block"}).instantiate()
    model = small.llama(precision={"query|output|mlp": "fp8_block"}, dim=128, stack__pattern__0__mlp__hidden=256)
    config = small.experiment(model, seq_len=128)
    experiment = config.instantiate()

    def check(**sizes: int) -> None:
        axes = {"data": 1, "fsdp": 1, "expert": 1, "seq": 1, "model": 1} | sizes
        experiment.model.check(AbstractMesh(tuple(axes.values()), tuple(axes)), experiment.data)

    check()
    # Weights are gathered over fsdp before they are rounded.
    check(fsdp=8)
    with pytest.raises(ValueError, match=r"data.seq_len = 128: expected a multiple of 256 with .* = fp8_block"):
        check(seq=2)
    with pytest.raises(ValueError, match=r"mesh.model = 2 splits the blocks of 128 numbers of stack/block0/attention/"):
        check(model=2)
    config.data.seq_len = 256
    experiment = config.instantiate()
    check(seq=2)
    config.data.seq_len = 96
    experiment = config.instantiate()
    with pytest.raises(ValueError, match=r"data.seq_len = 96: expected a multiple of 128"):
        check()
    model = experiment.model
    with pytest.raises(ValueError, match=r"need compute capability 8.9 .* this GPU has 8.0"):
        model.check_platform("gpu", "8.0")
    with pytest.raises(ValueError, match=r"has fp8_block, which TPUs do not compute"):
        model.check_platform("tpu", None)
    for capability in ("8.9", "9.0", "10.0"):
        model.check_platform("gpu", capability)
    model.check_platform("cpu", None)
