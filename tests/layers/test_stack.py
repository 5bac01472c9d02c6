"""The stack: for any pattern, a loop over units equals the layers applied one after the other."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.base import Context, Out
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import flatten
from tests.support import small
from tests.support.layers import Centering

DIM = 8
PATTERN = [
    config_for(MLP, hidden=12, activation="relu"),
    config_for(Centering),
    config_for(MLP, hidden=6, activation="silu", gated=True),
]


def stack(unroll: int = 1, num_layers: int = 6) -> Stack:
    return config_for(Stack, num_layers=num_layers, pattern=PATTERN, unroll=unroll).instantiate(dim=DIM)


CTX = Context(
    batch={}, rng=jax.random.key(1), rows=jnp.arange(2), num_targets=jnp.float32(5.0), training=True, remat="none"
)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, DIM)), jnp.float32)


def values(layer: Stack, scale: float = 1.0):
    """Return random parameters, and buffers that differ between units."""
    rng = np.random.default_rng(1)

    def draw(spec):
        return jnp.asarray(scale * rng.normal(size=spec.shape), spec.dtype)

    return jax.tree.map(draw, layer.parameter_specs()), jax.tree.map(draw, layer.buffer_specs())


def run_sequentially(layer: Stack, params, x, buffers):
    """Compute the same result one layer after the other."""
    states, losses = [], []
    for index in range(layer.num_repeats):
        unit, state = (jax.tree.map(lambda a, i=index: a[i], tree) for tree in (params, buffers))
        ctx = CTX.fold_index(jnp.int32(index))
        new = {}
        for name, sub in layer.pattern.layers.items():
            x, out = sub.apply(unit[name], x, ctx.fold(name), state.get(name, {}))
            if out.layer_state:
                new[name] = out.layer_state
            if out.loss is not None:
                losses.append(out.loss)
        states.append(new)
    return x, sum(losses), jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


@pytest.mark.pairs
@pytest.mark.parametrize(("unroll", "remat"), [(1, "none"), (2, "none"), (0, "none"), (1, "sqrt:2"), (0, "sqrt")])
def test_mixed_layer_pattern_equals_its_layers_in_order(unroll, remat):
    layer, ctx = stack(unroll, 6 if remat == "none" else 12), replace(CTX, remat=remat)
    params, buffers = values(layer, 1.0 if remat == "none" else 0.5)
    # An unrolled stack takes its parameters as training passes them: a list with one entry per unit.
    passed = layer.split(params) if layer.is_unrolled(remat) else params
    y, out = jax.jit(layer.forward)(passed, X, ctx, buffers)
    expected, loss, states = jax.jit(lambda *args: run_sequentially(layer, *args))(params, X, buffers)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-5)
    small.assert_close(small.arrays(out.layer_state), small.arrays(states), 1e-6)
    np.testing.assert_allclose(out.metrics["block1/penalty"], loss / layer.num_repeats, rtol=1e-5)
    assert float(jnp.abs(y - X).max()) > 0.1


def test_specs_have_a_leading_layer_axis():
    layer = stack()
    specs, unit = flatten(layer.parameter_specs()), flatten(layer.pattern.parameter_specs())
    assert specs.keys() == unit.keys()
    for path, spec in specs.items():
        assert spec.shape == (2, *unit[path].shape)
        assert spec.mesh_axes == ("pipe", *unit[path].mesh_axes)
        assert spec.roles == ("layer", *unit[path].roles)
    assert {path: spec.shape for path, spec in flatten(layer.buffer_specs()).items()} == {
        "block1/mean": (2, DIM),
        "block1/count": (2,),
    }
    assert layer.flops_per_token(9) == 2 * (2 * 2 * DIM * 12 + 3 * 2 * DIM * 6)


def test_fetch_loads_each_layers_parameters():
    """A schedule that stores parameters elsewhere passes its own `fetch`; here they are stored halved."""
    layer = stack()
    params, buffers = values(layer)
    y, _ = layer.forward(params, X, CTX, buffers)
    halves = jax.tree.map(lambda p: p / 2, params)
    fetched, _ = layer.forward(halves, X, CTX, buffers, fetch=lambda unit: jax.tree.map(lambda p: 2 * p, unit))
    np.testing.assert_array_equal(fetched, y)


def test_bf16_compute_casts_f32_parameters_inside_the_loop():
    layer = stack()
    params, buffers = values(layer)
    ctx = replace(CTX, compute_dtype=jnp.bfloat16, remat="full")
    y, out = jax.jit(layer.forward)(params, X.astype(jnp.bfloat16), ctx, buffers)
    assert y.dtype == jnp.bfloat16
    assert out.loss.dtype == jnp.float32
    expected, _ = layer.forward(params, X, CTX, buffers)
    small.assert_close({"y": np.asarray(y, np.float32)}, {"y": np.asarray(expected)}, 0.05)


def test_layer_outputs_are_merged_by_name():
    one = Out(loss=jnp.float32(1.0), metrics={"a": jnp.float32(2.0)}, layer_state={"s": jnp.zeros(1)})
    two = Out(metrics={"a": jnp.float32(3.0)})
    merged = Out.merge({"x": one, "y": two, "z": Out(loss=jnp.float32(5.0))})
    assert float(merged.loss) == 6.0
    assert {name: float(value) for name, value in merged.metrics.items()} == {"x/a": 2.0, "y/a": 3.0}
    assert list(merged.layer_state) == ["x"]
    assert Out.merge({"y": two}).loss is None
