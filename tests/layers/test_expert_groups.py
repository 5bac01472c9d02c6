"""Routing limited to a few expert groups, compared to DeepSeek's rules token by token, and invalid settings."""

import jax
import numpy as np
import pytest

from plimsoll.framework.layers.experts.router import Router
from plimsoll.framework.layers.experts.scores import GroupLimit, choose


def choose_by_hand(ranks_E: np.ndarray, limit: GroupLimit, top_k: int) -> list[int]:
    """Return a token's experts, from the groups with the best expert (V2) or the best sum of two experts (V3)."""
    groups = np.split(np.arange(len(ranks_E)), limit.groups)
    num_counted = 1 if limit.score == "best" else 2
    scores = [np.sort(ranks_E[group])[-num_counted:].sum() for group in groups]
    allowed = np.concatenate([groups[i] for i in np.argsort(scores)[-limit.top_groups :]])
    return sorted(allowed[np.argsort(ranks_E[allowed])[-top_k:]])


@pytest.mark.pairs
@pytest.mark.parametrize("score", ["best", "best_two"])
def test_experts_come_from_the_best_groups(score):
    limit = GroupLimit(groups=4, top_groups=2, score=score)
    logits = jax.random.normal(jax.random.key(0), (3, 50, 12))
    bias = jax.random.normal(jax.random.key(1), (12,)) * 0.3
    options = {"top_k": 4, "score": "sigmoid", "normalize": True, "scale": 2.5}
    choice = choose(logits, bias, limit=limit, **options)
    scores = np.asarray(jax.nn.sigmoid(logits))
    differs = 0
    free = np.sort(np.asarray(choose(logits, bias, **options).experts_BSK), axis=-1)
    for position in np.ndindex(3, 50):
        expected = choose_by_hand(scores[position] + np.asarray(bias), limit, 4)
        experts = np.asarray(choice.experts_BSK[position])
        assert sorted(experts) == expected
        shares = scores[position][experts]
        np.testing.assert_allclose(choice.shares_BSK[position], 2.5 * shares / shares.sum(), rtol=1e-5)
        differs += list(free[position]) != expected
    assert differs > 20, "without the limit other experts are chosen"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": 3}, "groups = 3 does not divide num_experts = 8"),
        ({"groups": 4, "top_groups": 5}, "top_groups = 5 is more than groups = 4"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "expected top_groups of at least 2"),
        ({"groups": 8, "top_groups": 2, "group_score": "best_two"}, "groups = 8 of one expert each"),
    ],
)
def test_groups_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        Router(dim=8, num_experts=8, **fields)
