"""Reward functions for rows with the right answer in a field "answer"; companion.reward names one of them or your own.

--config.companion.reward=framework.companions.rewards.exact
"""

from __future__ import annotations

from typing import Any


def exact(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """1 for the right answer, spaces around it left out; 0 for any other."""
    return [float(answer.strip() == str(row["answer"])) for answer, row in zip(answers, rows, strict=True)]


def characters(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """The share of characters that are right at their place; of the longer text, the answer or the right one."""
    rewards = []
    for answer, row in zip(answers, rows, strict=True):
        right = str(row["answer"])
        num_equal = sum(a == b for a, b in zip(answer, right, strict=False))
        rewards.append(num_equal / max(len(answer), len(right), 1))
    return rewards
