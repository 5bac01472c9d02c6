"""Delayed scaling: products against Transformer Engine's formulas, and histories in training."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.layers.low_precision import RECIPES
from plimsoll.framework.layers.scale_history import HISTORY, LENGTH, history_spec, pack_scales, record_scales
from plimsoll.framework.layout import flatten
from plimsoll.framework.learner.rules import Rule
from tests.support import small

BATCH, TOKENS, INPUTS, OUTPUTS = 2, 12, 24, 40
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


class TransformerEngineScale:
    """The scale of an array, as `DelayedScaling` computes it: amax_compute_algo="max", margin=0, powers of two."""

    def __init__(self, dtype: str):
        self.dtype = dtype
        self.amaxes: list[float] = []

    def round(self, x: np.ndarray) -> tuple[np.ndarray, float]:
        """Return (rounded numbers as float64, factor that restores them), and record the largest magnitude."""
        amax = max(self.amaxes[-LENGTH:], default=0.0)
        scale = 1.0 if amax == 0.0 else 2.0 ** np.floor(np.log2(LARGEST[self.dtype] / amax))
        self.amaxes.append(float(np.abs(x).max()))
        clipped = np.clip(x * scale, -LARGEST[self.dtype], LARGEST[self.dtype]).astype(np.float32)
        return clipped.astype(ml_dtypes.finfo(self.dtype).dtype).astype(np.float64), 1.0 / scale


def test_products_follow_transformer_engine():
    """More steps than a history has, with magnitudes that jump by factors of up to 1,000."""
    rng = np.random.default_rng(0)
    linear = Linear(inputs=INPUTS, outputs=OUTPUTS)
    linear.recipe = RECIPES["fp8_delayed"]
    weight = rng.normal(size=(INPUTS, OUTPUTS)).astype(np.float32)
    # The scale of weights is the current one.
    weight_scale = 2.0 ** np.floor(np.log2(448.0 / np.abs(weight).max()))
    w8 = (weight * weight_scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / weight_scale
    input_scale = TransformerEngineScale("float8_e4m3fn")
    grad_scale = TransformerEngineScale("float8_e5m2")
    spec = linear.param_specs()[HISTORY]
    history = spec.draw(jax.random.key(0))
    optimizer = record_scales()
    state = optimizer.init({HISTORY: history})

    @jax.jit
    def step(history: jax.Array, x: jax.Array, grad: jax.Array) -> Any:
        y, pull = jax.vjp(lambda weights, x: linear(weights, x, Context({})), {"weight": weight, HISTORY: history}, x)
        return y, *pull(grad)

    for index in range(LENGTH + 6):
        x = (rng.normal(size=(BATCH, TOKENS, INPUTS)) * 10.0 ** rng.uniform(-2, 1)).astype(np.float32)
        grad = (rng.normal(size=(BATCH, TOKENS, OUTPUTS)) * 10.0 ** rng.uniform(-8, -5)).astype(np.float32)
        x8, x_factor = input_scale.round(x)
        g8, g_factor = grad_scale.round(grad)
        y, weights_grad, x_grad = step(history, x, grad)
        expected = {
            "y": (y, x_factor * (x8 @ w8)),
            "x_grad": (x_grad, g_factor * (g8 @ w8.T)),
            "weight_grad": (weights_grad["weight"], x_factor * g_factor * np.einsum("bti,bto->io", x8, g8)),
        }
        for name, (found, exact) in expected.items():
            bound = 1e-6 * np.abs(exact).max()
            np.testing.assert_allclose(found, exact, rtol=1e-6, atol=bound, err_msg=f"{name} of step {index}")
        updates, state = optimizer.update({HISTORY: weights_grad[HISTORY]}, state, {HISTORY: history})
        history = history + updates[HISTORY]
    for row, scale in zip(history, (input_scale, grad_scale), strict=True):
        newest_first = scale.amaxes[: -LENGTH - 1 : -1]
        np.testing.assert_array_equal(row, np.ceil(np.log2(np.asarray(newest_first) / LARGEST[scale.dtype])))


def test_a_number_that_is_not_finite_is_not_clipped():
    linear = Linear(inputs=4, outputs=4)
    linear.recipe = RECIPES["fp8_delayed"]
    weights = {"weight": jnp.eye(4), HISTORY: jnp.zeros((2, LENGTH))}
    for value in (jnp.inf, -jnp.inf, jnp.nan):
        y = linear(weights, jnp.ones((2, 4)).at[0, 1].set(value), Context({}))
        assert jnp.isnan(y[0, 1])
    # A number that is too large for the scale of earlier steps is clipped.
    y = linear(weights, jnp.ones((2, 4)).at[0, 1].set(1e6), Context({}))
    np.testing.assert_array_equal(y[0], [1.0, 448.0, 1.0, 1.0])


def test_sums_of_scales_are_rounded_up():
    history = history_spec().draw(jax.random.key(0))
    scales = pack_scales(jnp.float32(0.25), jnp.float32(0.0)) + pack_scales(jnp.float32(0.5), jnp.float32(0.0))
    updates, _ = record_scales().update(scales, record_scales().init(history), history)
    # 0.75 becomes 1; an array of zeros leaves nothing.
    np.testing.assert_array_equal((history + updates)[:, :2], [[0.0, -127.0], [-127.0, -127.0]])


def experiment(**options: Any) -> Any:
    model = small.llama(precision={"mlp": "fp8_delayed"}, compute_dtype="float32", **options.pop("model", {}))
    return small.experiment(model, optimizer=small.STEADY_ADAMW, **options)


def find_histories(state: Any) -> dict[str, np.ndarray]:
    return {path: x for path, x in small.arrays(state.parameter).items() if path.endswith(HISTORY)}


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 1e-3},
        {"clip": 1.01, "clip_mode": "norm_growth"},
        {"rules": [config_for(Rule, pattern="stack", freeze=True)]},
        {"ema": 0.9},
        {"model": {"lora": config_for(LoRA, rank=4, base="bfloat16")}},
    ],
    ids=["clip", "norm_growth", "frozen", "ema", "lora"],
)
def test_histories_are_recorded_whatever_the_learner_does(options: dict[str, Any]):
    program = small.program(experiment(**options))
    state, _ = small.run(program, 2)
    histories = find_histories(state)
    assert len(histories) == 3
    for path, history in histories.items():
        # Two of the steps, in each layer, for input and cotangent.
        assert (history[..., :2] > -127).all(), path
        assert (history[..., 2:] == -127).all(), path
        if "ema" in options:
            np.testing.assert_array_equal(small.arrays(state.ema)[path], history)
    # The first step's scales depend on nothing but the model.
    plain, _ = small.run(small.program(experiment(model=options.get("model", {}))), 2)
    for path, history in find_histories(plain).items():
        np.testing.assert_array_equal(history[..., 1], histories[path][..., 1])


def test_the_norm_of_gradients_has_no_scales():
    program = small.program(experiment())
    state = program.init()
    _, grads = small.loss_and_grads(program, state)
    assert any(path.endswith(HISTORY) for path in grads)
    squares = [np.sum(np.square(grad)) for path, grad in grads.items() if not path.endswith(HISTORY)]
    _, metrics = small.run(small.program(experiment()), 1)
    np.testing.assert_allclose(metrics[0]["grad_norm"], np.sqrt(np.sum(squares)), rtol=1e-5)


def test_histories_are_no_part_of_the_optimizer():
    program = small.program(experiment())
    state = program.init()
    assert not [path for path in flatten(state.optimizer) if HISTORY in path and "state" not in path]
    assert not [path for path in flatten(state.optimizer) if path.endswith(f"/{HISTORY}")]
