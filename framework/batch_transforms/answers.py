"""Turns sampled answers into batch rows, computes their advantages, and times sampling and rewards."""

from __future__ import annotations

import time
from typing import Literal

import numpy as np

from plimsoll.framework.data.prompts import Prompts, Row
from plimsoll.framework.inference.rollout import SampledAnswers

# Added to the standard deviation, as in TRL: a group whose rewards barely differ gets small advantages.
_STD_EPS = 1e-4


def get_row(data: Prompts, host_batch: dict[str, np.ndarray], index: int) -> Row:
    """Return the data row that prompt `index` of a batch comes from."""
    return data.row(int(host_batch["sources"][index]), int(host_batch["indices"][index]))


def get_location(data: Prompts, host_batch: dict[str, np.ndarray], index: int) -> str:
    """Return where the row of prompt `index` of a batch is from."""
    return data.sets[int(host_batch["sources"][index])].locations[int(host_batch["indices"][index])]


def decode_answers(data: Prompts, host_batch: dict[str, np.ndarray], answers: SampledAnswers) -> list[str]:
    """Decode each answer to text, without its stop token."""
    stop_ids = set(data.stop_ids)
    texts = []
    for tokens, count in zip(answers.tokens, answers.counts, strict=True):
        answer = [token for token in tokens[:count].tolist() if token not in stop_ids]
        texts.append(data.tokenizer.decode(answer))
    return texts


def get_answer_tokens(answers: SampledAnswers, index: int) -> list[int]:
    """Return the tokens of an answer, with the one that ends it."""
    return answers.tokens[index, : int(answers.counts[index])].tolist()


def encode_demonstrations(data: Prompts, host_batch: dict[str, np.ndarray]) -> SampledAnswers:
    """Return the reference answers of a batch's rows; their log-probabilities are unknown, so they are NaN.

    Raises:
        ValueError: a row has no answer, or its answer is longer than data.answer_tokens.
    """
    shape = (len(host_batch["lengths"]), data.answer_tokens)
    tokens_BA = np.zeros(shape, np.int32)
    counts_B = np.zeros(shape[0], np.int32)
    for index in np.flatnonzero(host_batch["lengths"]).tolist():
        row = get_row(data, host_batch, index)
        if "answer" not in row:
            raise ValueError(
                f'batch_transform.demonstrations: expected rows with a field "answer", given one with {", ".join(row)}'
            )
        (encoded,) = data.tokenizer.encode_batch([str(row["answer"])])
        answer = [*encoded.tolist(), data.end_id]
        if len(answer) > data.answer_tokens:
            raise ValueError(
                f"batch_transform.demonstrations: an answer of {len(answer)} tokens is over data.answer_tokens = "
                f"{data.answer_tokens}: {row['answer']!r}"
            )
        tokens_BA[index, : len(answer)] = answer
        counts_B[index] = len(answer)
    return SampledAnswers(tokens_BA, np.full(shape, np.nan, np.float32), counts_B)


def build_answer_rows(host_batch: dict[str, np.ndarray], answers: SampledAnswers) -> dict[str, np.ndarray]:
    """Build the [B, S] arrays of a batch whose rows are a prompt followed by its answer.

    int32: tokens, targets (the next token of each input), positions, and segments (1; 0 after the answer). float32:
    weights, 1 where the target is an answer token; behavior, the log-probability of that token when it was sampled;
    ends, 1 at the last such column.
    """
    prompts_BS = host_batch["prompts"]
    shape = prompts_BS.shape
    tokens_BS, targets_BS, positions_BS, segments_BS = (np.zeros(shape, np.int32) for _ in range(4))
    weights_BS, behavior_BS, ends_BS = (np.zeros(shape, np.float32) for _ in range(3))
    for row, (length, count) in enumerate(zip(host_batch["lengths"], answers.counts, strict=True)):
        # A row without a prompt has no answer: all of it is padding.
        if not length or not count:
            continue
        sequence = np.concatenate([prompts_BS[row, :length], answers.tokens[row, :count]])
        num_columns = len(sequence) - 1
        answer = slice(length - 1, num_columns)
        tokens_BS[row, :num_columns] = sequence[:-1]
        targets_BS[row, :num_columns] = sequence[1:]
        positions_BS[row, :num_columns] = np.arange(num_columns)
        segments_BS[row, :num_columns] = 1
        weights_BS[row, answer] = 1.0
        behavior_BS[row, answer] = answers.log_probs[row, :count]
        ends_BS[row, num_columns - 1] = 1.0
    return {
        "tokens": tokens_BS,
        "targets": targets_BS,
        "positions": positions_BS,
        "segments": segments_BS,
        "weights": weights_BS,
        "behavior": behavior_BS,
        "ends": ends_BS,
    }


def compute_advantages(
    rewards_B: np.ndarray, group_size: int, scale: Literal["group", "batch", "none"]
) -> tuple[np.ndarray, np.ndarray]:
    """Return (advantages, standard deviation of each row's group), both f32[B]; zeros for groups of one (evaluation).

    A = (reward - group mean) / (standard deviation + 1e-4), with the sample standard deviation (n - 1), as in TRL. An
    answer whose reward is NaN has the advantage 0, and is left out of the mean and the deviation of the others.
    """
    if group_size == 1:
        return np.zeros_like(rewards_B), np.zeros_like(rewards_B)
    groups_GN = rewards_B.astype(np.float64).reshape(-1, group_size)
    spreads_B = np.repeat([_compute_std(group_N) for group_N in groups_GN], group_size)
    counts_G = np.maximum(1, np.sum(~np.isnan(groups_GN), axis=1))
    means_G = np.nansum(groups_GN, axis=1) / counts_G
    differences_B = np.nan_to_num(groups_GN - means_G[:, None]).reshape(-1)
    divisors_B = {"group": spreads_B + _STD_EPS, "batch": _compute_std(groups_GN) + _STD_EPS, "none": 1.0}[scale]
    return (differences_B / divisors_B).astype(np.float32), spreads_B.astype(np.float32)


def _compute_std(rewards: np.ndarray) -> float:
    """Return the sample standard deviation of the rewards that are not NaN; 0 of fewer than two."""
    known = rewards[~np.isnan(rewards)]
    return float(known.std(ddof=1)) if known.size > 1 else 0.0


class SamplingTimer:
    """Measures the share of time spent on sampling and on the reward function since the first batch."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._now = 0.0
        self._seconds = {"sampling": 0.0, "rewards": 0.0}

    def begin(self) -> None:
        """Start the clock of a batch."""
        self._now = time.perf_counter()

    def lap(self, name: Literal["sampling", "rewards"]) -> None:
        """Count the time since `begin` or the previous lap."""
        now = time.perf_counter()
        # The first batch includes the sampler's compilation, so it does not count.
        if self._start is not None:
            self._seconds[name] += now - self._now
        self._now = now

    def end(self) -> None:
        """End a batch. The total time starts at the end of the first one."""
        if self._start is None:
            self._start = time.perf_counter()

    def shares(self) -> str:
        """Return text such as " (61% of the time sampling, 1% the reward function)"; "" before any measurement."""
        if self._start is None or not self._seconds["sampling"]:
            return ""
        total = time.perf_counter() - self._start
        sampling, rewards = (self._seconds[name] / total for name in ("sampling", "rewards"))
        return f" ({sampling:.0%} of the time sampling, {rewards:.0%} the reward function)"
