"""Stochastic rounding and Kahan summation: unbiased, the same on any mesh and in any block; no small update is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.config import Config, ConfigError, config_for
from plimsoll.framework.layout import flatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import Rule
from plimsoll.framework.optimizers.rounding import (
    BlockOrigin,
    fold,
    fold_name,
    noise,
    round_stochastically,
    split_rounding_error,
)
from tests.support import updates

SEED = fold(jnp.uint32(3), 1, 4)


# --- noise -----------------------------------------------------------------------------------------------------------


def test_noise_is_uniform_and_independent_between_neighbors():
    """Check mean, variance, a chi-square of the highest byte, and correlations along both axes and between seeds."""
    size = 1024
    unit = np.asarray(noise(SEED, (size, size)), np.float64) / 2**32
    other = np.asarray(noise(fold(SEED, 1), (size, size)), np.float64) / 2**32
    deviation = 1 / np.sqrt(12 * size * size)
    assert abs(unit.mean() - 0.5) < 4 * deviation
    assert abs(unit.var() * 12 - 1) < 5e-3
    counts = np.bincount((unit * 256).astype(int).ravel(), minlength=256)
    assert 150 < ((counts - size * size / 256) ** 2 / (size * size / 256)).sum() < 370  # 255 degrees of freedom
    for left, right in [(unit[1:], unit[:-1]), (unit[:, 1:], unit[:, :-1]), (unit, unit.T), (unit, other)]:
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 5 / size


def test_seeds_differ_by_every_number_and_name():
    seeds = [fold(SEED, 0), fold(SEED, 1), fold(SEED, 0, 0), fold_name(SEED, "a"), fold_name(SEED, "b"), SEED]
    assert len({int(seed) for seed in seeds}) == len(seeds)


def test_noise_for_a_block_depends_on_its_offset():
    whole = noise(SEED, (64, 96))
    rows = [noise(SEED, (16, 96), BlockOrigin((16 * i, 0), (64, 96))) for i in range(4)]
    np.testing.assert_array_equal(jnp.concatenate(rows), whole)
    np.testing.assert_array_equal(noise(SEED, (32, 8), BlockOrigin((8, 40), (64, 96))), whole[8:40, 40:48])


@pytest.mark.pairs
@pytest.mark.parametrize("axes", [("x", "y"), ("y", None), (None, ("x", "y"))])
def test_the_result_is_the_same_on_any_mesh(axes):
    x = jax.random.normal(jax.random.key(0), (64, 96))

    def round_to_bfloat16(x: jax.Array) -> jax.Array:
        return round_stochastically(x, jnp.bfloat16, noise(SEED, x.shape))

    sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")), PartitionSpec(*axes))
    one, many = jax.jit(round_to_bfloat16)(x), jax.jit(round_to_bfloat16)(jax.device_put(x, sharding))
    assert len(many.sharding.device_set) == 8
    np.testing.assert_array_equal(np.asarray(many, np.float32), np.asarray(one, np.float32))


# --- rounding --------------------------------------------------------------------------------------------------------


def test_rounds_to_either_neighbor_and_is_unbiased():
    low, high, n = 1.0, 1.0 + 2.0**-7, 200_000
    for part in (0.125, 0.5, 0.9):
        x = jnp.full((n,), low + part * (high - low), jnp.float32)
        found = np.asarray(round_stochastically(x, jnp.bfloat16, noise(SEED, x.shape)), np.float64)
        assert set(np.unique(found)) == {low, high}
        assert abs((found == high).mean() - part) < 4 * np.sqrt(part * (1 - part) / n)
        below = np.asarray(round_stochastically(-x, jnp.bfloat16, noise(SEED, x.shape)), np.float64)
        np.testing.assert_array_equal(below, -found)


def test_exact_and_nonfinite_values_are_unchanged():
    most = float(jnp.finfo(jnp.bfloat16).max)
    values = jnp.array([0.0, -0.0, 1.5, -3.0, most, -most, np.inf, -np.inf, np.nan], jnp.float32)
    for bits in (0, 2**32 - 1):
        found = round_stochastically(values, jnp.bfloat16, jnp.full(values.shape, bits, jnp.uint32))
        np.testing.assert_array_equal(np.asarray(found, np.float32), values)
    over = round_stochastically(jnp.float32(3.4e38), jnp.bfloat16, jnp.uint32(2**32 - 1))
    assert float(over) == most
    payload = jax.lax.bitcast_convert_type(jnp.uint32(0x7F800001), jnp.float32)  # NaN only because of its last bit
    assert jnp.isnan(round_stochastically(payload, jnp.bfloat16, jnp.uint32(0)))


def test_kahan_compensation_survives_xla_excess_precision():
    x = jax.random.normal(jax.random.key(1), (1000,))
    near, rest = jax.jit(split_rounding_error, static_argnums=1)(x, jnp.bfloat16)
    np.testing.assert_array_equal(near, x.astype(jnp.bfloat16))
    assert float(jnp.abs(rest).max()) > 1e-4
    np.testing.assert_allclose(near.astype("float32") + rest.astype("float32"), x, rtol=2.0**-15)


# --- in the learner --------------------------------------------------------------------------------------------------


def learner(rounding: str, *, rate: float = 1e-3, dtype: str = "bfloat16", **fields) -> Learner:
    config = config_for(Learner, optimizer=config_for(optax.sgd, learning_rate=rate), clip=None, rounding=rounding)
    for name, value in fields.items():
        config[name] = value
    return config.instantiate(specs=updates.specs(dtype))


def train(rounding: str, steps: int, **fields):
    """Train weights of 1 with gradients of 1: a step of 1e-3 is a bit more than an eighth of the last place of 1."""
    ones = jax.tree.map(lambda s: jnp.ones(s.shape, jnp.bfloat16), updates.specs())
    return updates.ours(learner(rounding, **fields), ones, [ones] * steps)


@pytest.mark.pairs
def test_small_updates_are_lost_by_nearest_and_by_no_other():
    """Take 100 steps of 1e-3 down from 1; the last place of a bfloat16 just below 1 is 1/256."""
    expected = 1.0 - 100 * 1e-3
    nearest, kahan, stochastic = (train(name, 100)[-1] for name in ("nearest", "kahan", "stochastic"))
    assert all(float(x.min()) == 1.0 for x in jax.tree.leaves(nearest.params))
    for path, x in flatten(kahan.params).items():
        np.testing.assert_allclose(np.asarray(x, np.float64), expected, rtol=2.0**-8, err_msg=path)
    sums = jax.tree.map(
        lambda w, c: w.astype("float32") + c.astype("float32"),
        kahan.params["embed"],
        kahan.optimizer["embed"]["default"]["compensation"],
    )
    np.testing.assert_allclose(sums["token"], expected, rtol=1e-4)
    assert "compensation" not in str(jax.tree.structure(stochastic.optimizer))
    means = [float(x.astype("float32").mean()) for x in jax.tree.leaves(stochastic.params) if x.size > 90]
    assert max(abs(mean - expected) for mean in means) < 0.01
    assert any(float(x.max()) != float(x.min()) for x in jax.tree.leaves(stochastic.params))


def test_noise_differs_between_steps_layers_and_parameters():
    specs = {name: {"weight": updates.specs()["stack"]["block0"]["square"]["weight"]} for name in ("one", "other")}
    own = config_for(Learner, optimizer=config_for(optax.sgd, learning_rate=1e-3), clip=None, rounding="stochastic")
    built = own.instantiate(
        specs={"stack": jax.tree.map(lambda s: s.__class__(**{**vars(s), "dtype": "bfloat16"}), specs)}
    )
    ones = jax.tree.map(lambda s: jnp.ones(s.shape, jnp.bfloat16), built.specs)
    kept = updates.ours(built, ones, [ones] * 2)
    first, second = (jax.tree.map(lambda x: np.asarray(x, np.float32), k.params["stack"]) for k in kept)
    layers = [*first["one"]["weight"], *first["other"]["weight"]]
    moved = first["one"]["weight"] - second["one"]["weight"]
    layers += [*(1 + moved)]
    assert len({layer.tobytes() for layer in layers}) == len(layers)


def test_a_step_that_is_skipped_rounds_nothing():
    built, ones = learner("stochastic"), jax.tree.map(lambda s: jnp.ones(s.shape, jnp.bfloat16), updates.specs())
    kept = updates.start(built, ones)
    bad = jax.tree.map(lambda x: x * jnp.nan, ones)
    after = updates.stepper(built)(kept, jnp.float32(1.0), bad)
    for path, x in flatten(after.params).items():
        np.testing.assert_array_equal(np.asarray(x, np.float32), 1.0, err_msg=path)


def test_float32_weights_in_a_bfloat16_model_are_not_rounded():
    specs = updates.specs("bfloat16") | {"head": updates.specs()["head"]}
    params, grads, found = updates.draw(0), updates.gradients(3), {}
    params = jax.tree.map(lambda x, s: x.astype(s.dtype), params, specs)
    for rounding in ("nearest", "kahan", "stochastic"):
        optimizer = config_for(optax.sgd, learning_rate=1e-3)
        built = config_for(Learner, optimizer=optimizer, clip=None, rounding=rounding).instantiate(specs=specs)
        assert "compensation" not in built.optimizer_specs()["head"]["default"]
        found[rounding] = updates.ours(built, params, grads)[-1].params
        jax.tree.map(np.testing.assert_array_equal, found[rounding]["head"], found["nearest"]["head"])
    square = {name: np.asarray(tree["stack"]["block0"]["square"]["weight"], np.float32) for name, tree in found.items()}
    assert np.any(square["stochastic"] != square["nearest"])


@pytest.mark.parametrize(
    ("rounding", "dtype"), [("kahan", "float32"), ("stochastic", "float32"), ("stochastic", "float16")]
)
def test_rounding_without_an_effect_is_refused(rounding, dtype):
    with pytest.raises(
        ConfigError, match=rf"learner.rounding = {rounding} with weights in {dtype}: expected model.param"
    ):
        learner(rounding, dtype=dtype)


def test_bfloat16_weights_use_float32_moments():
    config = config_for(Learner, optimizer=config_for(optax.adamw, learning_rate=1e-3), rounding="stochastic")
    specs = config.instantiate(specs=updates.specs("bfloat16")).optimizer_specs()
    assert {str(s.dtype) for s in jax.tree.leaves(specs)} == {"float32", "int32"}


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_it_goes_with_clipping_by_tensor_averages_and_rules(rounding):
    """Rounding works together with the other state that a layer may have."""
    rules = [config_for(Rule, pattern="norm|bias", optimizer=config_for(optax.adamw, learning_rate=1e-3))]
    ones = jax.tree.map(lambda s: jnp.ones(s.shape, jnp.bfloat16), updates.specs())
    built = learner(rounding, clip=1.01, clip_mode="norm_growth", ema=0.5, rules=rules)
    kept = updates.ours(built, ones, [ones] * 50)[-1]
    for path, mean in flatten(jax.tree.map(lambda x: float(x.astype("float32").mean()), kept.params)).items():
        assert abs(mean - 0.95) < 0.02, path
    for path, average in flatten(kept.ema).items():
        assert average.dtype == jnp.float32
        np.testing.assert_allclose(average.mean(), 0.951, atol=0.02, err_msg=path)


def test_a_master_copy_and_rounding_are_refused_together():
    with pytest.raises(ConfigError, match=r"learner.rounding = kahan with learner.master_dtype = float32"):
        learner("kahan", master_dtype="float32")


# --- short names -----------------------------------------------------------------------------------------------------


def overridden(text: str) -> Config:
    config = config_for(Learner, optimizer=config_for(optax.sgd, learning_rate=1.0))
    config.override("optimizer", text)
    return config.optimizer


def test_optimizer_is_found_by_short_or_dotted_name():
    assert overridden("lion") == overridden("optax.lion")
    assert "learning_rate" not in dict(overridden("lion").items()), "a component that is swapped in starts afresh"
    rule = config_for(Rule, pattern="x", freeze=True)
    rule.override("optimizer", "adafactor")
    assert rule.optimizer == config_for(optax.adafactor)


def test_unknown_short_name_lists_the_valid_ones():
    with pytest.raises(ConfigError, match=r"given 'lyon'.*or is one of adamw, .*lion"):
        overridden("lyon")
