"""Reward functions for rows that have the correct answer in a field "answer".

Set batch_transform.reward to one of these, or to your own function:

    --config.batch_transform.reward=plimsoll.framework.batch_transforms.rewards.exact
"""

from __future__ import annotations

from typing import Any


def exact(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """Return 1 for each correct answer, ignoring surrounding whitespace, and 0 for any other."""
    return [float(answer.strip() == str(row["answer"])) for answer, row in zip(answers, rows, strict=True)]


def characters(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """Return the fraction of characters that match by position, relative to the longer of answer and reference."""
    rewards = []
    for answer, row in zip(answers, rows, strict=True):
        right = str(row["answer"])
        num_equal = sum(a == b for a, b in zip(answer, right, strict=False))
        rewards.append(num_equal / max(len(answer), len(right), 1))
    return rewards
