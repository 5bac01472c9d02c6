"""The learner's state besides the parameters: averages, master weights and moments, also through non-finite steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.layout import flatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import Rule
from plimsoll.framework.learner.update import LayerTrainState, LayerUpdate
from plimsoll.framework.plan.jaxpr_analysis import inner_jaxprs
from tests.support import small, updates

ADAMW = config_for(optax.adamw, learning_rate=0.02, weight_decay=0.1)
OPTIMIZERS = {
    "sgd": config_for(optax.sgd, learning_rate=0.1, momentum=0.9),
    "adamw": ADAMW,
    "adafactor": config_for(optax.adafactor, learning_rate=0.1, min_dim_size_to_factor=4),
    "lion": config_for(optax.lion, learning_rate=0.01),
    "muon": config_for(optax.contrib.muon, learning_rate=0.02),
}


def learner(optimizer=ADAMW, dtype: str = "float32", **fields) -> Learner:
    return config_for(Learner, optimizer=optimizer, **fields).instantiate(specs=updates.specs(dtype))


def cast(tree, dtype: str):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


# --- averages --------------------------------------------------------------------------------------------------------


def test_averages_equal_a_hand_written_loop():
    params, grads = updates.draw(0), updates.gradients(20)
    history = updates.ours(learner(ema=0.9), params, grads)
    average = {path: np.asarray(leaf, np.float64) for path, leaf in flatten(params).items()}
    for kept in history:
        for path, leaf in flatten(kept.params).items():
            average[path] = 0.9 * average[path] + 0.1 * np.asarray(leaf, np.float64)
        small.assert_close(small.arrays(kept.ema), average, 1e-6)
    assert updates.worst([history[-1].ema], [history[-1].params]) > 0.01
    assert history[-1].ema.keys() == params.keys()


@pytest.mark.pairs
def test_averages_do_not_change_the_updates_and_cost_nothing_when_off():
    params, grads = updates.draw(0), updates.gradients(3)
    with_average, without = (updates.ours(learner(ema=ema), params, grads)[-1] for ema in (0.5, None))
    small.assert_same_bits(with_average.params, without.params)
    assert without.ema == learner(ema=None).ema_specs() == {}


# --- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.pairs
def test_bf16_parameters_with_a_float32_master_are_the_float32_run_cast():
    params = updates.draw(0)
    grads = [cast(tree, "bfloat16") for tree in updates.gradients(20)]
    mixed = updates.ours(learner(dtype="bfloat16", master_dtype="float32", ema=0.9), params, grads)
    precise = updates.ours(learner(ema=0.9), params, [cast(tree, "float32") for tree in grads])
    for left, right in zip(mixed, precise, strict=True):
        masters = {stage: entry["default"]["master"] for stage, entry in left.optimizer.items()}
        assert updates.worst([masters], [right.params]) <= 1e-6
        small.assert_same_bits(left.params, cast(masters, "bfloat16"))
        # Averages use the float32 master weights.
        assert {leaf.dtype for leaf in jax.tree.leaves(left.ema)} == {jnp.dtype("float32")}
        assert updates.worst([left.ema], [right.ema]) <= 1e-6
    # Without a master copy, small updates of large weights are lost.
    lost = updates.ours(learner(dtype="bfloat16"), params, grads)
    assert updates.worst([lost[-1].params], [precise[-1].params]) > 1e-3


def test_master_starts_from_the_uncast_initial_values():
    params = updates.draw(0)
    kept = updates.start(learner(dtype="bfloat16", master_dtype="float32", ema=0.9), params)
    masters = {stage: entry["default"]["master"] for stage, entry in kept.optimizer.items()}
    small.assert_same_bits(masters, params)
    small.assert_same_bits(kept.ema, params)
    small.assert_same_bits(kept.params, cast(params, "bfloat16"))


def test_no_master_where_parameters_are_precise_already():
    assert not any("master" in path for path in flatten(learner(master_dtype="float32").optimizer_specs()))


# Products with 0.5 are exact, so the moments agree to the last bit before they are rounded.
HALVES = {"learning_rate": 0.02, "b1": 0.5, "b2": 0.5, "weight_decay": 0.1}


@pytest.mark.pairs
def test_bf16_moments_are_rounded_to_a_neighbour_after_each_step_and_used_in_float32():
    params, grads = updates.draw(0), updates.gradients(20)
    history = updates.ours(
        learner(config_for(optax.adamw, **HALVES), moment_dtype="bfloat16", clip=None), params, grads
    )
    moments = [leaf for path, leaf in flatten(history[-1].optimizer).items() if "/mu/" in path or "/nu/" in path]
    assert {leaf.dtype for leaf in moments} == {jnp.dtype("bfloat16")}
    first = flatten(history[0].optimizer)["embed/default/state/0/mu/token"]
    exact = 0.5 * np.asarray(grads[0]["embed"]["token"], np.float32)
    nearest = np.asarray(jnp.asarray(exact).astype(jnp.bfloat16), np.float32)
    found = np.asarray(first, np.float32)
    spacing = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)
    assert (np.abs(found - exact) < spacing).all()
    assert (found != nearest).any(), "not all are rounded to nearest"
    precise = updates.ours(learner(config_for(optax.adamw, **HALVES), clip=None), params, grads)
    error = updates.worst([history[-1].params], [precise[-1].params])
    assert 1e-4 < error < 0.1, "the rounding should show, and no more than that"


def test_a_bf16_second_moment_comes_down_again():
    """Gradients are 1, then 0.01: with rounding to nearest, an average with b2 = 0.999 would never decrease."""
    params = updates.draw(0)
    ours = learner(config_for(optax.adamw, learning_rate=0.0, b2=0.999), moment_dtype="bfloat16", clip=None)
    kept = updates.start(ours, params)
    step = updates.stepper(ours)
    expected = 0.0
    for number in range(1200):
        size = 1.0 if number < 100 else 0.01
        grads = jax.tree.map(lambda x, size=size: jnp.full_like(x, size), params)
        kept = step(kept, jnp.float32(1.0), grads, number)
        expected = 0.999 * expected + 0.001 * size**2
    nu = np.asarray(flatten(kept.optimizer)["embed/default/state/0/nu/token"], np.float64)
    assert np.mean(nu) == pytest.approx(expected, rel=0.05)
    assert nu.max() < 1.5 * expected


def test_float32_moments_for_bf16_parameters_are_not_rounded():
    params = updates.draw(0)
    grads = [cast(tree, "bfloat16") for tree in updates.gradients(10)]
    ours = learner(config_for(optax.adamw, **HALVES), dtype="bfloat16", moment_dtype="float32", clip=None)
    kept = updates.ours(ours, params, grads)[-1]
    expected = np.zeros((16, 8))
    for tree in grads:
        expected = 0.5 * expected + 0.5 * np.asarray(tree["embed"]["token"], np.float64)
    mu = flatten(kept.optimizer)["embed/default/state/0/mu/token"]
    assert mu.dtype == jnp.float32
    np.testing.assert_allclose(mu, expected, rtol=1e-6, atol=1e-7)
    assert {leaf.dtype for leaf in jax.tree.leaves(kept.params)} == {jnp.dtype("bfloat16")}


@pytest.mark.pairs
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "master_dtype": "float32"},
        {"dtype": "bfloat16", "moment_dtype": "float32"},
        {"dtype": "bfloat16", "master_dtype": "float32", "moment_dtype": "bfloat16", "ema": 0.5},
    ],
    ids=["float32", "bf16", "master", "wide moments", "narrow moments"],
)
def test_state_matches_its_specs_before_and_after_an_update(name, fields):
    """Compare only shapes and dtypes: if a step changed them, the next step would compile again."""
    ours = learner(OPTIMIZERS[name], **fields)
    precise = jax.eval_shape(lambda: updates.draw(0))
    first = jax.eval_shape(ours.init, precise)
    second = jax.eval_shape(
        lambda kept, grads: ours.update(
            kept.weights, grads, kept.entry, kept.average, updates.decide(ours, jnp.float32(0.0), grads)
        ),
        first,
        first.weights,
    )
    specs = LayerUpdate(ours.specs, ours.optimizer_specs(), ours.ema_specs())
    for state in (first, second):
        assert jax.tree.structure(state) == jax.tree.structure(specs)
        for (path, leaf), spec in zip(flatten(state).items(), jax.tree.leaves(specs), strict=True):
            assert (leaf.shape, leaf.dtype) == (spec.shape, spec.dtype), path


# --- steps that are skipped ------------------------------------------------------------------------------------------


def set_one_element(tree, path: str, value: float):
    """Return the tree with one element of one leaf replaced."""
    flat = {key: leaf if key != path else leaf.at[(0,) * leaf.ndim].set(value) for key, leaf in flatten(tree).items()}
    return jax.tree.unflatten(jax.tree.structure(tree), list(flat.values()))


@pytest.fixture(scope="module")
def guarded_step():
    """A learner's compiled step, its state after two good steps, with all optional state, and the gradients."""
    ours = learner(dtype="bfloat16", master_dtype="float32", ema=0.9)
    kept, step = updates.start(ours, updates.draw(0)), updates.stepper(ours)
    good = [cast(tree, "bfloat16") for tree in updates.gradients(4)]
    for tree in good[:2]:
        kept = step(kept, jnp.float32(1.0), tree)
    return step, kept, good


BAD = {
    "NaN in the last layer": (1.0, ("stack/block0/square/weight", float("nan"))),
    "infinity in the embedding": (1.0, ("embed/token", float("-inf"))),
    "a norm that overflows": (1.0, ("head/norm/scale", 3e38)),
    "a loss that is NaN": (float("nan"), None),
    "a loss that is infinite": (float("inf"), None),
}


@pytest.mark.parametrize("name", BAD)
def test_nonfinite_step_changes_no_bit_and_leaves_no_trace(guarded_step, name):
    step, kept, good = guarded_step
    loss, poison = BAD[name]
    bad = good[2] if poison is None else set_one_element(good[2], *poison)
    after = step(kept, jnp.float32(loss), bad)
    small.assert_same_bits(after, kept)
    small.assert_same_bits(step(after, jnp.float32(1.0), good[3]), step(kept, jnp.float32(1.0), good[3]))
    assert updates.worst([step(kept, jnp.float32(1.0), good[3]).params], [kept.params]) > 1e-3


# --- one layer at a time ---------------------------------------------------------------------------------------------


@pytest.mark.pairs
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_updating_one_layer_equals_updating_all(name):
    """Streamed updates rely on this: the update of a whole stage is the vmap of `get_layer_update`."""
    ours = learner(OPTIMIZERS[name], master_dtype="float32", dtype="bfloat16", ema=0.9, clip=0.5)
    grads = cast(updates.draw(7), "bfloat16")
    kept = updates.start(ours, updates.draw(0))
    whole = updates.stepper(ours)(kept, jnp.float32(1.0), grads)
    (group,) = [group for group in ours.groups if group.stage == "stack"]
    assert group.length == updates.LAYERS
    decision = updates.decide(ours, jnp.float32(1.0), grads)
    unit = jax.jit(ours.get_layer_update(group))
    for index in range(updates.LAYERS):
        train_state = LayerTrainState(
            kept.params["stack"], grads["stack"], kept.optimizer["stack"]["default"], kept.ema["stack"]
        )
        alone = unit(jax.tree.map(lambda x, i=index: x[i], train_state), decision)
        stage = (whole.params["stack"], whole.optimizer["stack"]["default"], whole.ema["stack"])
        expected = jax.tree.map(lambda x, i=index: x[i], stage)
        small.assert_close(small.arrays(alone.entry), small.arrays(expected[1]), 1e-6)
        small.assert_close(small.arrays(alone.average), small.arrays(expected[2]), 1e-6)
        assert updates.worst([alone.weights], [expected[0]]) <= 2**-8  # one rounding to bf16


def test_frozen_stages_have_no_group():
    ours = learner(rules=[config_for(Rule, pattern="^stack/", freeze=True)])
    assert [group.stage for group in ours.groups] == ["embed", "head"]
    assert set(ours.optimizer_specs()) == {"embed", "head"}


@pytest.mark.pairs
def test_layers_share_one_counter_while_they_are_updated_together():
    """One counter per layer would make vectors; to multiply by them, XLA for TPU transposes whole stacks of weights."""
    program = small.program(small.experiment(small.llama(stack__num_layers=4), optimizer=ADAMW))
    powers = [
        eqn.outvars[0].aval.shape
        for eqn in _equations(program.jit_step.traced_step.jaxpr.jaxpr)
        if "pow" in str(eqn.primitive)
    ]
    assert () in powers  # Adam's bias corrections, 1 - b ** count
    assert (4,) not in powers


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn.params):
            yield from _equations(inner)
