"""Preference losses as written in their papers, one sequence at a time in float64; and rows of sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.packing import Batch
from plimsoll.framework.objectives.kto import KTO
from plimsoll.framework.objectives.preferences import DPO, IPO, ORPO, SimPO
from tools.peers.preference_rows import LabeledAnswer, to_batch

# Our objectives by name. The name's first word selects the plain formula, which reads the config's fields.
OBJECTIVES: dict[str, Config] = {
    "dpo": config_for(DPO, beta=0.3),
    "dpo_smooth_sft": config_for(DPO, beta=0.3, label_smoothing=0.2, sft=0.5),
    "ipo": config_for(IPO, beta=0.4),
    "ipo_sums": config_for(IPO, beta=0.4, per_token=False, sft=0.3),
    "orpo": config_for(ORPO, beta=0.7),
    "orpo_answers": config_for(ORPO, beta=0.7, sft_prompt=False),
    "simpo": config_for(SimPO, beta=2.0, gamma=0.6),
    "simpo_smooth_sft": config_for(SimPO, beta=2.0, gamma=0.6, label_smoothing=0.1, sft=0.4),
    "kto": config_for(KTO, beta=0.3, desirable_weight=1.4, undesirable_weight=0.6),
}


class PlainSequence(NamedTuple):
    """One sequence of a row: a float per target of the answer, or for `all_log_probs` of prompt and answer."""

    log_probs: list[float]
    references: list[float]
    all_log_probs: list[float]
    label: float
    counted: bool


def sequences(batch: Batch, log_probs_BS: np.ndarray) -> list[list[PlainSequence]]:
    """Return the sequences of each row, read from the arrays position by position."""
    rows = []
    for row in range(batch["tokens"].shape[0]):
        members = []
        for number in range(1, int(batch["segments"][row].max()) + 1):
            columns = [s for s in range(batch["tokens"].shape[1]) if batch["segments"][row, s] == number]
            answer = [s for s in columns if batch["weights"][row, s] > 0]
            members.append(
                PlainSequence(
                    [float(log_probs_BS[row, s]) for s in answer],
                    [float(batch["reference"][row, s]) for s in answer],
                    [float(log_probs_BS[row, s]) for s in columns],
                    float(batch["labels"][row, columns[-1]]) if "labels" in batch else 1.0,
                    bool(batch["ends"][row, columns[-1]]),
                )
            )
        rows.append(members)
    return rows


def plain_loss(name: str, batch: Batch, log_probs_BS: np.ndarray, microbatches: int = 1) -> float:
    """Return the loss of a batch by the paper's formula (for IPO and ORPO, TRL's).

    Rows are dealt round-robin to microbatches.
    """
    rows = sequences(batch, log_probs_BS)
    fields = dict(OBJECTIVES[name].items())
    if name == "kto":
        return _kto([rows[part::microbatches] for part in range(microbatches)], fields)
    pairs = [(row[i], row[i + 1]) for row in rows for i in range(0, len(row), 2) if row[i].counted]
    loss = sum(_pair_loss(name, fields, *pair) for pair in pairs) / len(pairs)
    prompts = fields.get("sft_prompt", False)
    nlls = [-p for chosen, _ in pairs for p in (chosen.all_log_probs if prompts else chosen.log_probs)]
    sft = 1.0 if name.startswith("orpo") else fields["sft"]
    return loss + sft * sum(nlls) / len(nlls)


def _pair_loss(name: str, fields: dict[str, Any], chosen: PlainSequence, rejected: PlainSequence) -> float:
    beta = fields["beta"]
    if name.startswith(("dpo", "ipo")):
        ratios = [sum(one.log_probs) - sum(one.references) for one in (chosen, rejected)]
        if name.startswith("dpo"):
            return _smooth_loss(beta * (ratios[0] - ratios[1]), fields["label_smoothing"])
        if fields["per_token"]:
            ratios = [ratio / len(one.log_probs) for ratio, one in zip(ratios, (chosen, rejected), strict=True)]
        return (ratios[0] - ratios[1] - 1 / (2 * beta)) ** 2
    means = [sum(one.log_probs) / len(one.log_probs) for one in (chosen, rejected)]
    if name.startswith("simpo"):
        return _smooth_loss(beta * means[0] - beta * means[1] - fields["gamma"], fields["label_smoothing"])
    odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in means]
    return -beta * math.log(_sigmoid(math.log(odds[0] / odds[1])))


def _smooth_loss(margin: float, smoothing: float) -> float:
    return -(1 - smoothing) * math.log(_sigmoid(margin)) - smoothing * math.log(_sigmoid(-margin))


def _kto(parts: list[list[list[PlainSequence]]], fields: dict[str, Any]) -> float:
    losses = []
    for rows in parts:
        members = [one for row in rows for one in row]
        estimates = [sum(one.log_probs) - sum(one.references) for one in members if one.label == 0]
        kl = max(0.0, sum(estimates) / len(estimates)) if estimates else 0.0
        for one in members:
            if one.label == 0:
                continue
            ratio = sum(one.log_probs) - sum(one.references)
            if one.label > 0:
                losses.append(fields["desirable_weight"] * (1 - _sigmoid(fields["beta"] * (ratio - kl))))
            else:
                losses.append(fields["undesirable_weight"] * (1 - _sigmoid(fields["beta"] * (kl - ratio))))
    return sum(losses) / len(losses)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def random_batch(name: str, shape: tuple[int, int], vocab_size: int, seed: int = 0) -> Batch:
    """Return rows of random sequences of many lengths, with a reference.

    A row has as many sequences as fit; the last row has the fewest. Chosen and rejected answers alternate. For unpaired
    preferences, each answer is followed by a sequence for the KL estimate.
    """
    rng = np.random.default_rng(seed)
    thumbs = name == "kto"
    rows: list[Sequence[LabeledAnswer]] = []
    for row in range(shape[0]):
        members: list[LabeledAnswer] = []
        columns_left = shape[1]
        for example_index in range(2 if row < shape[0] - 1 else 1):
            prompt = rng.integers(1, vocab_size, rng.integers(1, 3)).tolist()
            answers = [
                rng.integers(1, vocab_size, length).tolist() for length in rng.permutation([1 + example_index, 3])
            ]
            labels = (int(rng.choice([1, -1])), 0) if thumbs else (1, 1)
            columns = sum(len(prompt) + len(answer) - 1 for answer in answers)
            if columns <= columns_left:
                columns_left -= columns
                members += [LabeledAnswer(prompt, answer, label) for answer, label in zip(answers, labels, strict=True)]
        rows.append(members)
    batch = to_batch(rows, shape[1], labels=thumbs)
    # Close to the log-probabilities of the model itself, so that log-ratios have both signs.
    reference = np.where(batch["weights"] > 0, -math.log(vocab_size) + rng.normal(size=shape), 0.0)
    return {**batch, "reference": reference.astype(np.float32)}
