"""Updates equal plain optax on unstacked leaves, for 20 steps: optimizers, clipping, rules, and frozen leaves."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.layout import flatten, unflatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import Rule
from tests.support import updates

STEPS = 20


class OwnState(NamedTuple):
    """State of `user_optimizer`: a momentum, and each tensor's count of updates."""

    momentum: dict
    seen: dict


def user_optimizer(*, learning_rate: float, beta: float = 0.8) -> optax.GradientTransformation:
    """Return a user's optimizer: momentum divided by its mean size over the tensor, with a falling learning rate."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return OwnState(zeros, jax.tree.map(lambda p: jnp.zeros((), jnp.int32), params))

    def update(grads, state, params=None):
        momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.momentum, grads)
        seen = jax.tree.map(lambda n: n + 1, state.seen)
        step = jax.tree.map(lambda m, n: -learning_rate / n * m / jnp.mean(jnp.abs(m)), momentum, seen)
        return step, OwnState(momentum, seen)

    return optax.GradientTransformation(init, update)


SCHEDULE = config_for(
    optax.warmup_cosine_decay_schedule, init_value=0.0, peak_value=0.02, warmup_steps=5, decay_steps=18, end_value=0.001
)
OPTIMIZERS = {
    "sgd": (config_for(optax.sgd, learning_rate=0.05, momentum=0.9), 1e-6),
    "adamw": (config_for(optax.adamw, learning_rate=0.02, b2=0.95, weight_decay=0.1), 1e-6),
    "adamw with a schedule": (config_for(optax.adamw, learning_rate=SCHEDULE, weight_decay=0.1), 1e-6),
    "adafactor": (config_for(optax.adafactor, learning_rate=0.05, min_dim_size_to_factor=4), 1e-6),
    "lion": (config_for(optax.lion, learning_rate=0.01, weight_decay=0.1), 1e-6),
    "muon": (config_for(optax.contrib.muon, learning_rate=0.02, weight_decay=0.1), 1e-5),
    "a user's own": (config_for(user_optimizer, learning_rate=0.05), 1e-6),
}


def learner(optimizer: Config, *, rules: list[Config] | None = None, clip: float | None = None, **fields) -> Learner:
    specs = fields.pop("specs", None) or updates.specs()
    return config_for(Learner, optimizer=optimizer, rules=rules or [], clip=clip, **fields).instantiate(specs=specs)


def compare(ours: Learner, reference: optax.GradientTransformation, grads=None) -> float:
    params = updates.draw(0)
    grads = updates.gradients(STEPS) if grads is None else grads
    history = updates.ours(ours, params, grads)
    expected, _ = updates.plain(reference, params, grads)
    moved = updates.worst(expected[-1:], [updates.unstack(params)])
    assert moved > 0.01, "the comparison is empty: nothing moved"
    return updates.worst([updates.unstack(kept.params) for kept in history], expected)


@pytest.mark.once("adamw with a schedule", "adafactor", "muon")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_equal_plain_optax_with_an_active_clip(name):
    config, tolerance = OPTIMIZERS[name]
    grads = updates.gradients(STEPS)
    norms = [float(optax.tree.norm(tree)) for tree in grads]
    clip = float(np.median(norms))  # active in half of the steps
    reference = optax.chain(optax.clip_by_global_norm(clip), config.instantiate())
    assert compare(learner(config, clip=clip), reference, grads) <= tolerance


@pytest.mark.parametrize(
    "config",
    [
        # Products of powers of two are exact, so it does not matter where the compiler fuses multiply and add.
        config_for(optax.sgd, learning_rate=0.0625, momentum=0.5),
        config_for(optax.lion, learning_rate=0.015625, b1=0.5, b2=0.75, weight_decay=0.25),
    ],
    ids=["sgd", "lion"],
)
def test_without_a_clip_the_bits_are_optaxs(config):
    assert compare(learner(config), config.instantiate()) == 0.0


@pytest.mark.pairs
def test_in_float64_adamw_is_exact_far_beyond_float32():
    with jax.enable_x64(True):
        config = config_for(optax.adamw, learning_rate=0.02, weight_decay=0.1)  # optax's schedules are in float32
        params, grads = updates.draw(0, "float64"), updates.gradients(STEPS, "float64")
        history = updates.ours(learner(config, clip=1.0, specs=updates.specs("float64")), params, grads)
        reference = optax.chain(optax.clip_by_global_norm(1.0), config.instantiate())
        expected, _ = updates.plain(reference, params, grads)
        assert {leaf.dtype for leaf in jax.tree.leaves(history[-1].params)} == {jnp.dtype("float64")}
        assert updates.worst([updates.unstack(kept.params) for kept in history], expected) < 1e-14


def test_one_instance_per_layer_counters_included():
    kept = updates.start(learner(OPTIMIZERS["adamw"][0]), updates.draw(0))
    state = flatten(kept.optimizer)
    assert state["stack/default/state/0/count"].shape == (updates.LAYERS,)
    assert state["embed/default/state/0/count"].shape == ()
    assert state["stack/default/state/0/mu/block0/wide/weight"].shape == (updates.LAYERS, 8, 12)


# --- rules -----------------------------------------------------------------------------------------------------------


def by_path(tree, label):
    """Return a tree of label(path) over unstacked parameters."""
    return jax.tree_util.tree_map_with_path(lambda keypath, _: label(jax.tree_util.keystr(keypath)), tree)


@pytest.mark.pairs
def test_weight_decay_rules_equal_optaxs_mask():
    config = config_for(optax.adamw, learning_rate=0.02, weight_decay=0.5)
    rule = config_for(Rule, pattern="bias|norm", set={"weight_decay": 0.0})

    def mask(params):
        return by_path(params, lambda path: "bias" not in path and "norm" not in path)

    reference = optax.adamw(0.02, weight_decay=0.5, mask=mask)
    assert compare(learner(config, rules=[rule]), reference) <= 1e-6
    # Without the rule they differ: the decay is large enough to be visible.
    assert compare(learner(config), reference) > 1e-3


@pytest.mark.pairs
def test_rules_choose_optimizers_per_group_and_the_first_match_decides():
    rules = [
        config_for(Rule, pattern="square", optimizer=config_for(optax.contrib.muon, learning_rate=0.01)),
        config_for(Rule, pattern="embed/", optimizer=config_for(optax.sgd, learning_rate=0.1, momentum=0.5)),
        config_for(Rule, pattern="weight|scale", set={"learning_rate": 0.005, "b1": 0.5}),
    ]
    ours = learner(config_for(optax.adamw, learning_rate=0.02, weight_decay=0.1), rules=rules, clip=1.0)

    def label(path: str) -> str:
        for name in ("square", "embed", "weight", "scale"):
            if name in path:
                return {"scale": "weight"}.get(name, name)
        return "default"

    reference = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.multi_transform(
            {
                "square": optax.contrib.muon(0.01),
                "embed": optax.sgd(0.1, momentum=0.5),
                "weight": optax.adamw(0.005, b1=0.5, weight_decay=0.1),
                "default": optax.adamw(0.02, weight_decay=0.1),
            },
            lambda params: by_path(params, label),
        ),
    )
    assert compare(ours, reference) <= 1e-5
    labels = {(group.stage, group.label): set(group.paths) for group in ours.groups}
    assert labels == {
        ("embed", "rule1"): {"token"},
        ("head", "rule2"): {"norm/scale"},
        ("stack", "rule0"): {"block0/square/weight"},
        ("stack", "rule2"): {"block0/wide/weight", "block0/high/weight"},
        ("stack", "default"): {"block0/wide/bias"},
    }


def test_frozen_parameters_have_no_state_and_the_others_move_as_if_they_were_constants():
    config = config_for(optax.adamw, learning_rate=0.02, weight_decay=0.1)
    ours = learner(config, rules=[config_for(Rule, pattern="embed|wide/weight", freeze=True)], clip=1.0, ema=0.9)
    frozen = {"embed/token", "stack/block0/wide/weight"}
    assert set(flatten(ours.frozen_specs)) == frozen
    assert set(flatten(ours.specs)) == set(flatten(updates.specs())) - frozen
    assert not any("token" in path or "wide/weight" in path for path in flatten(ours.optimizer_specs()))
    assert not any("token" in path or "wide/weight" in path for path in flatten(ours.ema_specs()))

    def trainable(tree):
        flat = {path: leaf for path, leaf in flatten(tree).items() if path not in frozen}
        return unflatten(flat)

    params, grads = trainable(updates.draw(0)), [trainable(tree) for tree in updates.gradients(STEPS)]
    history = updates.ours(ours, params, grads)
    reference = optax.chain(optax.clip_by_global_norm(1.0), config.instantiate())
    expected, _ = updates.plain(reference, params, grads)
    assert updates.worst([updates.unstack(kept.params) for kept in history], expected) <= 1e-6
    # The global norm covers only the trained parameters.
    norm = updates.decide(ours, jnp.float32(0.0), grads[0]).norm
    np.testing.assert_allclose(norm, optax.tree.norm(grads[0]), rtol=1e-6)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"pattern": "decoder"}], r"learner\.rules\.0\.pattern: 'decoder' matches none of 6 parameters, such as"),
        ([{"pattern": "embed"}, {"pattern": "^weight"}], r"learner\.rules\.1\.pattern: '\^weight' matches none"),
        ([{"pattern": "(unclosed"}], r"rule pattern '\(unclosed' is no regular expression"),
        (
            [{"pattern": "embed|wide"}, {"pattern": "wide"}],
            r"learner\.rules\.1\.pattern: 'wide' has no effect: .* match all of its .*: rules\.0 \('embed\|wide'\)\.",
        ),
        (
            [{"pattern": "em"}, {"pattern": "wide"}, {"pattern": "embed|wide"}],
            r"all of .*: rules\.0 \('em'\), rules\.1",
        ),
        (
            [{"pattern": "embed"}, {"pattern": "embed", "freeze": False, "set": {"weight_decay": 0.0}}],
            r"learner\.rules\.1\.pattern: 'embed' has no effect",
        ),
        (
            [{"pattern": "embed", "freeze": False, "set": {"b1": 1.5}}],
            r"learner\.rules\.0\.set\.b1: expected a number >= 0 and < 1, given 1\.5",
        ),
        (
            [{"pattern": "embed", "freeze": False, "optimizer": config_for(optax.lion, learning_rate=-1.0)}],
            r"learner\.rules\.0\.optimizer\.learning_rate: expected a finite number >= 0, given -1",
        ),
        ([{"pattern": "."}], r"learner\.rules freeze every parameter; nothing would be trained"),
        ([{"pattern": "embed"}, {"pattern": "stack|head"}], "freeze every parameter"),
        ([{"pattern": "embed", "set": {"weight_decay": 0.0}}], "expected exactly one of freeze, optimizer and set"),
        ([{"pattern": "embed", "freeze": False}], "expected exactly one of freeze, optimizer and set"),
        ([{"pattern": "embed", "freeze": False, "set": {"weight_dekay": 0.0}}], "weight_dekay.*did you mean"),
    ],
)
def test_rules_that_cannot_be_meant_are_errors(rules, message):
    rules = [config_for(Rule, **{"freeze": True, **rule}) for rule in rules]
    with pytest.raises(ValueError, match=message):
        learner(OPTIMIZERS["adamw"][0], rules=rules)


def test_an_optimizer_must_be_one():
    with pytest.raises(ValueError, match=r"learner\.optimizer: expected an optax transformation, given"):
        learner(config_for(optax.constant_schedule, value=0.1))


def test_rates_are_reported_for_each_distinct_optimizer():
    scheduled = OPTIMIZERS["adamw with a schedule"][0]
    schedule = SCHEDULE.instantiate()
    rules = [
        config_for(Rule, pattern="^embed", optimizer=OPTIMIZERS["sgd"][0]),
        config_for(Rule, pattern="norm", set={"weight_decay": 0.0}),
    ]
    rates = learner(scheduled, rules=rules).learning_rates
    assert list(rates) == ["default", "rule0"]
    for count in (0, 3, 5, 17, 40):
        assert float(rates["default"](count)) == float(schedule(count))
    assert float(rates["rule0"](7)) == np.float32(0.05)
    assert list(learner(OPTIMIZERS["sgd"][0]).learning_rates) == ["default"]


def test_the_norm_that_is_reported_is_the_one_before_clipping():
    grads = updates.draw(5)
    decision = updates.decide(learner(OPTIMIZERS["sgd"][0], clip=0.5), jnp.float32(1.0), grads)
    np.testing.assert_allclose(decision.norm, optax.tree.norm(grads), rtol=1e-6)
    np.testing.assert_allclose(decision.factor, 0.5 / optax.tree.norm(grads), rtol=1e-6)
    assert bool(decision.ok)
    zero = updates.decide(
        learner(OPTIMIZERS["sgd"][0], clip=0.5), jnp.float32(1.0), jax.tree.map(jnp.zeros_like, grads)
    )
    assert (float(zero.norm), float(zero.factor), bool(zero.ok)) == (0.0, 1.0, True)
    half = jax.tree.map(lambda g: g.astype(jnp.bfloat16), updates.draw(5, scale=1e3))
    norm = updates.decide(learner(OPTIMIZERS["sgd"][0]), jnp.float32(1.0), half).norm
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), half)), rtol=1e-6)
