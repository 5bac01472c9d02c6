"""Losses of score heads compared to their formulas in float64 numpy, and configs that a score head refuses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit, log_softmax

from plimsoll.framework.config import Config, ConfigError, config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layers.score_head import ScoreHead
from plimsoll.framework.objectives.preferences import DPO
from plimsoll.framework.objectives.rewards import Classification, PairwiseReward
from tests.support import score_heads, small

D = 8
SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 4, 4, 0, 0], [1, 1, 2, 2, 2, 2, 0, 0, 0, 0]], np.int32)
ENDS = np.array([[0, 0, 1, 0, 1, 1, 0, 1, 0, 0], [0, 1, 0, 0, 0, 1, 0, 0, 0, 0]], np.float64)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(*SEGMENTS.shape, D))


def compute_loss(
    objective: Config, num_labels: int, labels: Any = None, bias: bool = False
) -> tuple[float, dict, np.ndarray]:
    """Return (loss, metrics, scores of all positions) in float64; the norm's scale is one."""
    head = config_for(ScoreHead, dim=D, vocab_size=1, num_labels=num_labels, objective=objective, bias=bias)
    score = np.random.default_rng(1).normal(size=(num_labels, D))
    offset = np.arange(num_labels) / 2 if bias else np.zeros(num_labels)
    with jax.enable_x64(True):
        params = {"score": jnp.asarray(score), "norm": {"scale": jnp.ones(D)}}
        if bias:
            params["score_bias"] = jnp.asarray(offset)
        batch = {"ends": jnp.asarray(ENDS), "segments": jnp.asarray(SEGMENTS)}
        if labels is not None:
            batch["labels"] = jnp.asarray(labels)
        ctx = Context(batch=batch, num_sequences=jnp.sum(batch["ends"]), training=True, compute_dtype=jnp.float64)
        built = head.instantiate()
        _, out = built.apply(built.prepare(params, ctx), jnp.asarray(X), ctx, {})
        normed = X / np.sqrt(np.mean(X * X, axis=-1, keepdims=True) + 1e-6)
        metrics = {name: float(value) for name, value in out.metrics.items()}
        return float(out.loss), metrics, normed @ score.T + offset


@pytest.mark.pairs
@pytest.mark.parametrize(("margin", "centering"), [(0.0, 0.0), (0.4, 0.0), (0.3, 0.1)])
def test_pairs(margin: float, centering: float):
    loss, metrics, scores = compute_loss(config_for(PairwiseReward, margin=margin, centering=centering), 1)
    rewards = scores[ENDS > 0][:, 0]
    chosen, rejected = rewards[0::2], rewards[1::2]
    losses = -np.log(expit(chosen - rejected - margin)) + centering * (chosen + rejected) ** 2
    assert loss == pytest.approx(losses.mean(), rel=1e-12)
    assert metrics["margin"] == pytest.approx((chosen - rejected).mean(), rel=1e-12)
    assert metrics["accuracy"] == pytest.approx((chosen > rejected).mean())
    assert metrics["chosen"] == pytest.approx(chosen.mean(), rel=1e-12)
    assert metrics["rejected"] == pytest.approx(rejected.mean(), rel=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_classes(bias: bool):
    classes = np.array([2, 0, 1, 1, 0, 2])
    labels = np.zeros(SEGMENTS.shape, np.float32)
    labels[ENDS > 0] = classes
    loss, metrics, scores = compute_loss(config_for(Classification), 3, labels, bias=bias)
    log_probs = log_softmax(scores[ENDS > 0], axis=-1)
    assert loss == pytest.approx(-log_probs[np.arange(6), classes].mean(), rel=1e-12)
    assert metrics["accuracy"] == pytest.approx((log_probs.argmax(-1) == classes).mean())


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (config_for(ScoreHead, num_labels=2, objective=config_for(PairwiseReward)), "num_labels = 2.*expected 1"),
        (config_for(ScoreHead, num_labels=1, objective=config_for(Classification)), "num_labels = 1.*at least 2"),
        (config_for(ScoreHead, objective=config_for(DPO)), "objective = DPO is for a language model's head"),
        (config_for(LMHead, objective=config_for(PairwiseReward)), "objective = PairwiseReward is for a ScoreHead"),
    ],
)
def test_incompatible_heads_and_objectives_are_refused(head: Config, message: str):
    with pytest.raises((ValueError, ConfigError), match=message):
        head.instantiate(dim=D, vocab_size=4)


def test_next_token_data_is_refused():
    config = score_heads.experiment("reward")
    config.data.source = small.experiment().data.source
    with pytest.raises(ValueError, match=r"data.source is a TokenMemmap, but model.head is a ScoreHead"):
        small.program(config)


def test_other_classes_than_labels_are_refused():
    config = score_heads.experiment("classify")
    config.model.head.num_labels = 4
    with pytest.raises(ValueError, match=r"model.head.num_labels = 4, but the data has 3 classes \(a, b, c\)"):
        small.program(config)


def test_a_score_head_without_an_objective_does_not_train():
    config = score_heads.experiment("classify")
    config.model.head.objective = None
    with pytest.raises(ValueError, match=r"model.head.objective is None"):
        small.program(config)
