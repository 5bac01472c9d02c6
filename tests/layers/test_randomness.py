"""Random streams: initial values and dropout masks depend only on names, layer index, row and step."""

import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.base import Context, Layer, Out
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layers.norm import LayerNorm
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import ParameterSpec, TensorSpec, flatten, fold_in_name, initialize
from tests.support import small

KEY = jax.random.key(7)


def context(rows=(0, 1, 2, 3), key=KEY) -> Context:
    return Context(batch={}, rng=key, rows=jnp.asarray(rows), training=True)


def mask(ctx: Context, rate: float = 0.5, name: str = "here", shape: tuple[int, ...] = (4, 6, 8)) -> np.ndarray:
    return np.asarray(ctx.dropout(jnp.ones(shape), rate, name))


# --- initial values --------------------------------------------------------------------------------------------------


def init_params(config) -> dict[str, np.ndarray]:
    return small.arrays(initialize(config.instantiate().parameter_specs(), KEY))


@pytest.mark.pairs
def test_another_parameter_changes_no_other_parameters_values():
    """Adding learned positions, biases and another kind of norm changes nothing that both models have."""
    few = init_params(small.gpt2(embed__max_positions=None, stack__pattern=[bare_block()]))
    many = init_params(small.gpt2())
    assert len(many) > len(few) + 4
    assert few.keys() < many.keys()
    for path, value in few.items():
        np.testing.assert_array_equal(value, many[path], err_msg=path)


def bare_block():
    block = small.block(small.gpt2())
    block.attention.linear.bias = False
    block.mlp.linear.bias = False
    block.norm = config_for(LayerNorm, bias=False)
    return block


@pytest.mark.pairs
def test_layers_differ_and_the_first_ones_do_not_depend_on_depth():
    two = init_params(small.gpt2(stack__depth_scaled_init=False))["stack/block0/attention/query/weight"]
    four = init_params(small.gpt2(stack__num_layers=4, stack__depth_scaled_init=False))[
        "stack/block0/attention/query/weight"
    ]
    np.testing.assert_array_equal(two, four[:2])
    assert np.abs(four[0] - four[1]).max() > 0.01


@pytest.mark.pairs
def test_parameters_with_equal_shapes_differ():
    values = init_params(small.gpt2())
    query, key = (values[f"stack/block0/attention/{name}/weight"] for name in ("query", "key"))
    assert np.abs(np.corrcoef(query.ravel(), key.ravel())[0, 1]) < 0.1


def test_residual_projections_are_scaled_by_depth():
    scaled, plain = (init_params(small.gpt2(stack__depth_scaled_init=on)) for on in (True, False))
    for path, value in scaled.items():
        ratio = 0.5 if path.endswith(("attention/output/weight", "mlp/down/weight")) else 1.0  # 1 / sqrt(2 * 2 layers)
        np.testing.assert_allclose(value, ratio * plain[path], rtol=1e-6, err_msg=path)


@pytest.mark.pairs
def test_names_fold_in_the_same_way_in_every_process():
    """Python's salted hash would give different parameters in each process."""
    code = (
        "import jax; from plimsoll.framework.layout import fold_in_name;"
        "print(jax.random.key_data(fold_in_name(jax.random.key(7), 'embed/token')).tolist())"
    )
    here = jax.random.key_data(fold_in_name(KEY, "embed/token")).tolist()
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=small.ROOT)
    assert there.stdout.strip() == str(here)
    # Published test vector of 32-bit FNV-1a: "foobar" hashes to 0xbf9cf968.
    expected = jax.random.fold_in(KEY, np.uint32(0xBF9CF968))
    assert jax.random.key_data(fold_in_name(KEY, "foobar")).tolist() == jax.random.key_data(expected).tolist()


def test_stacked_init_equals_per_layer_init_with_split_keys():
    spec = ParameterSpec((3, 5), "float32", initializer=jax.nn.initializers.normal(1.0), roles=("in", "out"))
    stacked = spec.stacked(4)
    assert (stacked.shape, stacked.mesh_axes, stacked.roles) == ((4, 3, 5), (None, None, None), ("layer", "in", "out"))
    values = stacked.draw(KEY)
    for layer in range(4):
        alone = spec.draw(jax.random.fold_in(KEY, layer))
        np.testing.assert_allclose(values[layer], alone, rtol=1e-6)
        np.testing.assert_allclose(stacked.draw(KEY, jnp.int32(layer)), alone, rtol=1e-6)


# --- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_keeps_the_mean_and_its_rate():
    values = mask(context(), rate=0.25, shape=(4, 64, 64))
    assert set(np.unique(values)) == {0.0, np.float32(1 / 0.75)}
    np.testing.assert_allclose(np.mean(values == 0.0), 0.25, atol=0.02)


def test_dropout_is_off_in_evaluation_and_at_rate_zero():
    assert np.all(mask(replace(context(), training=False)) == 1.0)
    assert np.all(mask(context(), rate=0.0) == 1.0)
    assert np.all(mask(Context(batch={}), rate=0.9) == 1.0)


def test_masks_are_keyed_by_global_row():
    whole = mask(context())
    np.testing.assert_array_equal(mask(context(rows=(2, 0)), shape=(2, 6, 8)), whole[[2, 0]])
    assert np.any(whole[0] != whole[1])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (context().fold("attention"), context().fold("mlp")),
        (context().fold_index(jnp.int32(0)), context().fold_index(jnp.int32(1))),
        (context(), context().fold("attention")),
        (context(), context(key=jax.random.key(8))),
    ],
    ids=["name", "layer", "depth", "key"],
)
def test_masks_differ_by_name_layer_and_key(left, right):
    agree = np.mean(mask(left, shape=(4, 32, 32)) == mask(right, shape=(4, 32, 32)))
    np.testing.assert_allclose(agree, 0.5, atol=0.05)  # like two fair coins
    agree = np.mean(mask(left, shape=(4, 32, 32)) == mask(left, name="there", shape=(4, 32, 32)))
    np.testing.assert_allclose(agree, 0.5, atol=0.05)


class Recorder(Layer):
    """Layer that returns x unchanged and stores the dropout mask that it would use in its buffer."""

    def __init__(self, *, dim: int, output_init_scale: float = 1.0):
        self.dim = dim

    def param_specs(self) -> dict[str, ParameterSpec]:
        return {"unused": ParameterSpec((self.dim,), "float32", roles=("channel",))}

    def layer_buffer_specs(self) -> dict[str, TensorSpec]:
        return {"mask": TensorSpec((4, 6, self.dim), "float32")}

    def apply(self, weights, carry, ctx, layer_state):
        return carry, Out(layer_state={"mask": ctx.dropout(jnp.ones_like(carry), 0.5, "branch")})


def record_masks(*pattern, repeats: int = 1, remat: str = "none") -> np.ndarray:
    """Return the masks of block0 in each unit of a stack, [units, B, S, D]."""
    layers = {"recorder": config_for(Recorder), "mlp": config_for(MLP, hidden=8)}
    config = config_for(Stack, num_layers=len(pattern) * repeats, pattern=[layers[name] for name in pattern])
    stack = config.instantiate(dim=8)
    params, buffers = (
        jax.tree.map(lambda s: jnp.zeros(s.shape), specs) for specs in (stack.parameter_specs(), stack.buffer_specs())
    )
    _, out = stack.forward(params, jnp.zeros((4, 6, 8)), replace(context(), remat=remat), buffers)
    return np.asarray(out.layer_state["block0"]["mask"])


@pytest.mark.pairs
def test_adding_a_layer_keeps_the_other_masks():
    alone = record_masks("recorder")
    deep = record_masks("recorder", repeats=3)
    np.testing.assert_array_equal(record_masks("recorder", "mlp", "recorder"), alone)
    np.testing.assert_array_equal(deep[:1], alone)
    assert np.any(deep[1] != deep[0])
    assert np.any(deep[2] != deep[1])
    np.testing.assert_array_equal(record_masks("recorder", repeats=3, remat="full"), deep)


def test_flattened_model_paths_are_folded_into_keys():
    paths = set(flatten(small.gpt2().instantiate().parameter_specs()))
    assert {"embed/token", "stack/block0/attention/query/weight", "head/norm/scale"} < paths
