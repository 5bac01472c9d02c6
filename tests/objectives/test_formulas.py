"""Preference losses as functions of log-probabilities, compared in float64 to the formulas of their papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.layers.base import Context
from plimsoll.framework.objectives.preferences import ORPO
from tests.support import preferences
from tests.support.preferences import OBJECTIVES, plain_loss, random_batch

SHAPE, VOCAB = (4, 16), 32


class GivenLogProbs:
    """A fake head whose inputs already are log-probabilities."""

    softcap = None

    def log_probs(self, weights, x_BS, ctx):
        return x_BS


def setup(name, seed=0):
    """Return (objective, batch, float64 log-probabilities of all targets)."""
    batch = random_batch(name, SHAPE, VOCAB, seed)
    noise = np.random.default_rng(seed + 100).normal(size=SHAPE)
    return OBJECTIVES[name].instantiate(), batch, np.minimum(-np.log(VOCAB) + noise, -0.1)


def run(objective, log_probs, batch, counted=None):
    """Return (loss, metrics) of a microbatch in training; the counts come from `counted`, the global batch."""
    counted = batch if counted is None else counted
    counts = {name: jnp.maximum(count, 1.0) for name, count in objective.counts(counted).items()}
    ctx = Context(batch, num_sequences=jnp.sum(counted["ends"]), counts=counts, training=True)
    return objective.loss(GivenLogProbs(), {}, log_probs, ctx)


@pytest.mark.pairs
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient(name):
    objective, batch, log_probs = setup(name)
    with jax.enable_x64(True):
        (loss, _), grad = jax.value_and_grad(lambda x: run(objective, x, batch), has_aux=True)(jnp.asarray(log_probs))
    assert loss == pytest.approx(plain_loss(name, batch, log_probs), rel=1e-12)
    # Finite differences of the formula. KTO's estimate of KL is held constant, because it has no gradient.
    step, expected = 1e-6, np.zeros(SHAPE)
    for index in zip(*np.nonzero(batch["segments"]), strict=True):
        sides = []
        for sign in (1, -1):
            moved = log_probs.copy()
            moved[index] += sign * step
            sides.append(plain_loss(name, batch, moved))
        expected[index] = (sides[0] - sides[1]) / (2 * step)
    if name == "kto":
        expected = np.where(batch["labels"] == 0, 0.0, expected)
    np.testing.assert_allclose(grad, expected, atol=2e-9)
    assert np.abs(expected).max() > 1e-3


@pytest.mark.pairs
@pytest.mark.parametrize("name", OBJECTIVES)
def test_microbatches_add_up(name):
    objective, batch, log_probs = setup(name)
    parts = [{key: array[part::2] for key, array in batch.items()} for part in range(2)]
    with jax.enable_x64(True):
        results = [run(objective, log_probs[part::2], parts[part], batch) for part in range(2)]
        losses, metrics = zip(*jax.device_get(results), strict=True)
        _, whole = run(objective, log_probs, batch)
    assert sum(losses) == pytest.approx(plain_loss(name, batch, log_probs, microbatches=2), rel=1e-12)
    for metric, value in whole.items():
        # KTO estimates KL per microbatch; see its docstring.
        if name != "kto" or metric not in ("kl", "preference", "accuracy"):
            assert sum(part[metric] for part in metrics) == pytest.approx(float(value), rel=1e-6, abs=1e-9), metric


@pytest.mark.parametrize("name", OBJECTIVES)
def test_evaluation_over_two_batches_reports_joint_means(name):
    objective = OBJECTIVES[name].instantiate()
    totals, losses = {}, []
    batches, all_log_probs = [], []
    for seed in (3, 4):
        _, batch, log_probs = setup(name, seed)
        ctx = Context(batch, num_targets=jnp.float32(1), num_sequences=jnp.float32(1))
        with jax.enable_x64(True):
            loss, metrics = objective.loss(GivenLogProbs(), {}, jnp.asarray(log_probs), ctx)
        sums = {"loss": loss, "tokens": batch["weights"].sum(), "sequences": batch["ends"].sum(), **metrics}
        for key, value in (sums | objective.counts(batch)).items():
            totals[key] = totals.get(key, 0.0) + float(value)
        batches.append(batch)
        all_log_probs.append(log_probs)
        losses.append(loss)
    summary = objective.summary(totals)
    # KTO estimates KL per evaluated batch, as it does per microbatch.
    order = np.arange(2 * SHAPE[0]).reshape(2, -1).T.ravel()
    both = {key: np.concatenate([batch[key] for batch in batches])[order] for key in batches[0]}
    log_probs = np.concatenate(all_log_probs)[order]
    assert summary["loss"] == pytest.approx(plain_loss(name, both, log_probs, microbatches=2), rel=1e-6)
    rows = [one for row in preferences.sequences(both, log_probs) for one in row]
    groups = {"chosen": rows[0::2], "rejected": rows[1::2]}
    if name == "kto":
        groups = {
            kind: [one for one in rows if one.label == sign] for kind, sign in (("desirable", 1), ("undesirable", -1))
        }
    for kind, members in groups.items():
        assert summary[f"length_{kind}"] == pytest.approx(np.mean([len(one.log_probs) for one in members]), rel=1e-6)
        assert summary[f"log_prob_{kind}"] == pytest.approx(np.mean([sum(one.log_probs) for one in members]), rel=1e-6)
    rewards = [summary[f"reward_{kind}"] for kind in groups]
    assert summary["margin"] == pytest.approx(rewards[0] - rewards[1], rel=1e-5)
    assert 0 <= summary["accuracy"] <= 1
    if name.startswith(("dpo", "ipo")):
        ratios = [sum(one.log_probs) - sum(one.references) for one in rows]
        assert summary["kl"] == pytest.approx(np.mean(ratios), rel=1e-5)
        assert summary["reward_chosen"] == pytest.approx(objective.beta * np.mean(ratios[0::2]), rel=1e-5)
        assert summary["accuracy"] == pytest.approx(np.mean(np.greater(ratios[0::2], ratios[1::2])))
        assert summary["pairs"] == len(rows) / 2


def test_a_reference_that_is_stored_as_sums_is_the_same():
    """The reference may be stored as the sum over a sequence, at one position of its answer."""
    objective, batch, log_probs = setup("dpo")
    stored = np.zeros(SHAPE, np.float32)
    for row, column in zip(*np.nonzero(batch["ends"]), strict=True):
        members = batch["segments"][row] == batch["segments"][row, column]
        stored[row, column] = (batch["reference"][row] * batch["weights"][row])[members].sum()
    with jax.enable_x64(True):
        loss, _ = run(objective, log_probs, batch)
        same, _ = run(objective, log_probs, {**batch, "reference": stored})
    assert same == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.pairs
def test_odds_for_a_certain_answer_are_finite():
    """If a log-probability rounds to 0 in float32, neither the loss nor the gradient is NaN."""
    batch = random_batch("orpo", SHAPE, VOCAB)
    objective = ORPO(beta=0.7)
    log_probs = jnp.zeros(SHAPE, jnp.float32)
    (loss, _), grad = jax.value_and_grad(lambda x: run(objective, x, batch), has_aux=True)(log_probs)
    assert np.isfinite(loss)
    assert np.isfinite(grad).all()


@pytest.mark.pairs
@pytest.mark.parametrize("name", OBJECTIVES)
def test_padding_batch_has_zero_loss_and_no_nan(name):
    """Padding rows after the end of an evaluation set do not count."""
    objective, batch, log_probs = setup(name)
    empty = {key: np.zeros_like(array) for key, array in batch.items()}
    (loss, metrics), grad = jax.value_and_grad(
        lambda x: objective.loss(GivenLogProbs(), {}, x, Context(empty, num_sequences=jnp.float32(1))), has_aux=True
    )(jnp.asarray(log_probs, jnp.float32))
    assert float(loss) == 0
    assert not np.asarray(grad).any()
    assert not any(float(value) for value in metrics.values())
    totals = {"loss": 0.0, "tokens": 0.0, "sequences": 0.0, **dict.fromkeys(metrics, 0.0)}
    totals |= dict.fromkeys(objective.counts(empty), 0.0)
    assert set(objective.summary(totals).values()) == {0.0}
