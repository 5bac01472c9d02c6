"""muP: the rules of table 8 of arXiv 2203.03466, and what they are for, activations whose size depends on no width."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import plimsoll as pl
from plimsoll.extras.scaling.coordinates import fit_growth, group_by_activation, measure_coordinates
from plimsoll.framework.layout import flatten

SMALL = {
    "model.dim": 32,
    "model.stack.num_layers": 2,
    "model.stack.unroll": 1,
    "model.stack.pattern.0.attention.num_heads": 2,
    "model.stack.pattern.0.mlp.hidden": 128,
    "data.global_batch_size": 2,
    "trainer.max_steps": 10,
}


def load(**changes) -> pl.Config:
    return pl.load_config("nanogpt-cpu", {**SMALL, **changes})


def test_nothing_changes_at_the_base_width():
    base = load()
    assert pl.diff(base, pl.widen(base, 2)) == []


def test_a_wider_model_follows_table_8():
    base = load()
    wide = pl.widen(base, 8)
    assert (wide.model.dim, wide.model.stack.pattern[0].mlp.hidden) == (128, 512)
    assert wide.model.head.logit_divisor == 4
    # The head dimension stays, so the logits of attention do.
    assert wide.model.stack.pattern[0].attention.scale is None
    program = pl.Program(wide.instantiate(), jax.devices()[:1])
    narrow = pl.Program(base.instantiate(), jax.devices()[:1])
    deviations = [
        {path: float(jnp.std(leaf)) for path, leaf in flatten(one.init().parameter).items()}
        for one in (narrow, program)
    ]
    for path, deviation in deviations[1].items():
        if deviation == 0.0 or "norm" in path:
            continue
        expected = 0.5 if path.startswith("stack") else 1.0
        assert deviation / deviations[0][path] == pytest.approx(expected, rel=0.1), path


def test_widths_of_mlps_are_rounded_by_two_percent_at_most():
    """A multiple of 256 is convenient for large models, but would be twice the width of a small one."""
    for heads in (1, 3, 5):
        wide = pl.widen(pl.load_config("nanogpt-cpu"), heads)
        assert wide.model.stack.pattern[0].mlp.hidden == 4 * wide.model.dim == 128 * heads
    large = pl.load_config("qwen2.5-0.5b")
    hidden = pl.widen(large, 16).model.stack.pattern[0].mlp.hidden
    exact = large.model.stack.pattern[0].mlp.hidden * 16 / 14
    assert hidden % 128 == 0
    assert abs(hidden / exact - 1) <= 0.02


def test_heads_that_share_keys_and_values_must_divide():
    with pytest.raises(pl.ConfigError, match="heads=15: the heads that share keys and values do not divide"):
        pl.widen(pl.load_config("qwen2.5-0.5b"), 15)
    with pytest.raises(pl.ConfigError, match="heads=0: expected at least 1"):
        pl.widen(load(), 0)


def test_head_channels_that_grow_change_the_logits_of_attention():
    base = load()
    wide = load(**{"model.dim": 128, "model.stack.pattern.0.mlp.hidden": 512})
    scaled = pl.apply_mup(wide, base)
    # 64 channels instead of 16: sqrt(16) / 64.
    assert scaled.model.stack.pattern[0].attention.scale == pytest.approx(4 / 64)


def test_updates_are_those_of_adamw_with_smaller_rates():
    """Compared with optax: matrices of a four times wider model take a quarter of the step, and decay as before."""
    rate, decay = 0.01, 0.1
    settings = {"learner.optimizer.learning_rate": rate, "learner.optimizer.weight_decay": decay}
    learner = pl.widen(load(**settings), 8).instantiate().learner
    expected = {"rule0": (rate / 4, decay * 4), "default": (rate, decay), "rule1": (rate, 0.0)}
    for group in learner.groups:
        specs = flatten(learner.select(learner.specs, group))
        is_matrix = group.label == "rule0"
        assert all((path.endswith("weight") and group.stage == "stack") == is_matrix for path in specs)
        weights = {path: jax.random.normal(jax.random.key(0), spec.shape) for path, spec in specs.items()}
        grads = {path: jax.random.normal(jax.random.key(1), spec.shape) for path, spec in specs.items()}
        transformation = learner.get_layer_update(group).optimizer.transformation
        updates, _ = transformation.update(grads, transformation.init(weights), weights)
        group_rate, group_decay = expected.pop(group.label) if group.label != "rule1" else expected["rule1"]
        adamw = optax.adamw(group_rate, b2=0.99, weight_decay=group_decay)
        reference, _ = adamw.update(grads, adamw.init(weights), weights)
        jax.tree.map(
            lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-8), updates, reference
        )
    assert expected.keys() == {"rule1"}


def test_muon_is_left_as_it_is():
    base = pl.load_config("stdlib-tiny")
    wide = pl.widen(base, 4)
    rates = [rule.optimizer.learning_rate.peak_value for rule in wide.learner.rules if rule.optimizer is not None]
    assert rates == [rule.optimizer.learning_rate.peak_value for rule in base.learner.rules]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.stack.num_layers": 3}, None),
        ({"model.dim": 64}, "grow 1.00 times, but model.dim 2.00 times"),
        ({"model.stack.pattern.0.mlp.gated": True}, "only one of the two models has stack/block0/mlp/gate"),
    ],
    ids=["deeper", "mlp_width", "other_layers"],
)
def test_only_the_width_may_differ(change, message):
    base = load()
    other = load(**change)
    if message is None:
        assert pl.apply_mup(other, base).model.head.logit_divisor is None
        return
    with pytest.raises(pl.ConfigError, match=message):
        pl.apply_mup(other, base)


def test_an_optimizer_without_a_rule_is_refused():
    config = load()
    config.learner.optimizer = pl.config_for(optax.sgd, learning_rate=0.1)
    config.learner.rules = []
    with pytest.raises(pl.ConfigError, match="muP has no rule for the optimizer sgd; expected adamw"):
        pl.widen(config, 4)


@pytest.mark.pairs
def test_activations_keep_their_size(tmp_path):
    base = load()
    growth: dict[bool, dict[str, float]] = {}
    for mup in (True, False):
        coordinates = []
        for heads in (2, 8, 32):
            coordinates += measure_coordinates(pl.widen(base, heads, mup=mup), 2, tmp_path)
        growth[mup] = {name: fit_growth(sizes) for name, sizes in group_by_activation(coordinates, 2).items()}
    layers = [name for name in growth[True] if name.startswith("stack")]
    assert len(layers) == 2
    for name in layers:
        assert abs(growth[True][name]) < 0.2
        assert growth[False][name] > 0.7
