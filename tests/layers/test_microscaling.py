"""MXFP8 products: blocks compared with torchao's, products with the formulas in NumPy's float64, and refusals.

Schedules, meshes and models are in test_low_precision.py, which runs them for all recipes.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.block_rounding import round_blocks
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.layers.low_precision import RECIPES, multiply
from plimsoll.framework.plan.jaxpr_analysis import FlopCount, flops
from tests.support import small
from tools import record_products

MXFP8 = RECIPES["mxfp8"]
ROWS, LENGTH, INPUTS, OUTPUTS = 2, 32, 64, 96


def restore(x: np.ndarray) -> np.ndarray:
    """Return x [M, K] rounded in blocks along K, as float64, with NumPy and ml_dtypes."""
    blocks = x.astype(np.float64).reshape(x.shape[0], -1, 32)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(largest / 448.0)))
    values = (blocks / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return (values * scale).reshape(x.shape)


def draw() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return x, weight and the cotangent of their product, whose rows and columns differ in scale."""
    rng = np.random.default_rng(0)
    arrays = []
    for shape in ((ROWS, LENGTH, INPUTS), (INPUTS, OUTPUTS), (ROWS, LENGTH, OUTPUTS)):
        spread = np.exp(rng.normal(size=(*shape[:-1], 1))) * np.exp(rng.normal(size=shape[-1]))
        arrays.append(jnp.asarray(rng.normal(size=shape) * spread, jnp.float32))
    return arrays[0], arrays[1], arrays[2]


def compare_blocks(recorded: Any) -> None:
    found = round_blocks(jnp.asarray(recorded["x"]), 32)
    np.testing.assert_array_equal(found.values, recorded["values"])
    np.testing.assert_array_equal(found.scales, recorded["scales"])


def test_blocks_equal_recorded_torchao():
    with np.load(record_products.RECORDED) as file:
        compare_blocks({name: file[f"blocks/{name}"] for name in ("x", "values", "scales")})


@pytest.mark.peers
def test_blocks_equal_torchao():
    compare_blocks(record_products.compute_blocks())


def test_numbers_that_are_zero_or_not_finite():
    zeros = round_blocks(jnp.zeros((2, 64)), 32)
    assert not np.asarray(zeros.values).any()
    for value in (np.nan, np.inf):
        x = jnp.ones((1, 64)).at[0, 3].set(value)
        y = multiply(x[None], jnp.ones((64, 32)), None, MXFP8, "cpu")
        assert not np.isfinite(y).any()


def test_products_equal_the_formulas():
    x, weight, grad = draw()
    y, pull = jax.vjp(lambda x, weight: multiply(x, weight, None, MXFP8, "cpu"), x, weight)
    x_grad, weight_grad = pull(grad)
    x_TI, grad_TO = np.asarray(x).reshape(-1, INPUTS), np.asarray(grad).reshape(-1, OUTPUTS)
    w_IO = np.asarray(weight)
    expected = {
        "y": restore(x_TI) @ restore(w_IO.T).T,
        "x_grad": restore(grad_TO) @ restore(w_IO).T,
        "weight_grad": restore(x_TI.T) @ restore(grad_TO.T).T,
    }
    for name, found in (("y", y), ("x_grad", x_grad), ("weight_grad", weight_grad)):
        flat = np.asarray(found).reshape(expected[name].shape)
        np.testing.assert_allclose(flat, expected[name], rtol=0, atol=1e-6 * np.abs(expected[name]).max())


def test_products_are_counted():
    x, weight, _ = (jax.ShapeDtypeStruct(array.shape, jnp.bfloat16) for array in draw())

    def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(multiply(x, weight, None, MXFP8, "gpu").astype(jnp.float32))

    products = 3 * 2 * ROWS * LENGTH * INPUTS * OUTPUTS
    assert flops(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, weight)) == FlopCount(products, fp8=products)


def test_the_input_rounded_by_channel_is_saved():
    """With its scales: 33/32 bytes an element. A frozen weight needs no input."""
    linear = Linear(inputs=INPUTS, outputs=OUTPUTS)
    linear.recipe = MXFP8
    x, weight, _ = (array.astype(jnp.bfloat16) for array in draw())
    _, pull = jax.vjp(lambda weight, x: linear({"weight": weight}, x, Context({})), weight, x)
    tokens = ROWS * LENGTH
    saved = sorted((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(pull) if leaf.size > 1)
    assert saved == sorted(
        [((INPUTS, tokens), "uint8"), ((INPUTS, tokens // 32), "uint8"), ((INPUTS, OUTPUTS), "bfloat16")]
    )
    _, pull = jax.vjp(lambda x: linear({"weight": weight}, x, Context({})), x)
    assert [leaf.shape for leaf in jax.tree.leaves(pull) if leaf.size > 1] == [(INPUTS, OUTPUTS)]


def test_one_token_has_a_product_but_no_weight_gradient():
    x, weight, _ = draw()
    token = x[:1, :1]
    whole = multiply(x, weight, None, MXFP8, "cpu")
    np.testing.assert_allclose(multiply(token, weight, None, MXFP8, "cpu"), whole[:1, :1], rtol=1e-6)
    with pytest.raises(ValueError, match="mxfp8 needs a multiple of 32 tokens in a microbatch, given 1"):
        jax.grad(lambda weight: jnp.sum(multiply(token, weight, None, MXFP8, "cpu")))(weight)


def test_unsuitable_layers_meshes_and_devices_are_refused():
    with pytest.raises(ValueError, match=re.escape("stack/block0/mlp/gate has 32 inputs and 48 outputs; expected mul")):
        small.llama(precision={"mlp": "mxfp8"}).instantiate()
    rules = {"query|output|mlp": "mxfp8"}
    config = small.experiment(small.llama(precision=rules, stack__pattern__0__mlp__hidden=64))
    experiment = config.instantiate()

    def check(**sizes: int) -> None:
        axes = {"data": 1, "fsdp": 1, "expert": 1, "seq": 1, "model": 1} | sizes
        experiment.model.check(AbstractMesh(tuple(axes.values()), tuple(axes)), experiment.data)

    with pytest.raises(ValueError, match=r"data.seq_len = 16: expected a multiple of 32"):
        check()
    config.data.seq_len = 32
    experiment = config.instantiate()
    check()
    check(data=2)
    with pytest.raises(ValueError, match=r"mesh.seq = 2: expected 1 with model.precision = mxfp8"):
        check(seq=2)
    with pytest.raises(ValueError, match=r"mesh.fsdp = 2 splits the blocks of 32 numbers of stack/block0/attention/"):
        check(fsdp=2)
    config.model.lora = config_for(LoRA, base="bfloat16")
    experiment = config.instantiate()
    with pytest.raises(ValueError, match=r"mesh.seq = 2: expected 1 with model.precision = mxfp8"):
        check(seq=2)
    model = experiment.model
    with pytest.raises(ValueError, match=r"needs compute capability 10.0 \(Blackwell\) and this GPU has 9.0"):
        model.check_platform("gpu", "9.0")
    with pytest.raises(ValueError, match=r"has mxfp8, which TPUs do not compute"):
        model.check_platform("tpu", None)
    model.check_platform("gpu", "10.0")
    model.check_platform("cpu", None)
