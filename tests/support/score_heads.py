"""Tiny models that score sequences, and synthetic batches of packed sequences; no data is read."""

from typing import Any

import numpy as np

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.scored import LabeledSource, RankedSource
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.layers.score_head import ScoreHead
from plimsoll.framework.objectives.rewards import Classification, PairwiseReward
from plimsoll.framework.program.program import Program
from tests.support import small

CLASSES = ["a", "b", "c"]


def experiment(kind: str, *, lora: str | None = None, **fields: Any) -> Config:
    """Return the config of a reward model or of a classifier.

    Args:
        kind: "reward" or "classify".
        lora: storage of the base weights under LoRA adapters; None for no adapters.
        fields: fields of small.experiment.
    """
    model = small.llama()
    if kind == "reward":
        head = config_for(ScoreHead, objective=config_for(PairwiseReward, margin=0.3, centering=0.05))
        source = config_for(RankedSource, paths=["never-read.jsonl"])
    else:
        head = config_for(ScoreHead, num_labels=len(CLASSES), objective=config_for(Classification))
        source = config_for(LabeledSource, paths=["never-read.jsonl"], classes=CLASSES)
    head.init.stddev = 0.2
    model.head = head
    if lora is not None:
        model.lora = config_for(LoRA, rank=4, base=lora)
        # A multiple of nf4's block.
        model.dim = 64
        small.block(model).mlp.hidden = 64
    config = small.experiment(model, **fields)
    config.data.source = source
    # An update in the backward pass cannot clip by the norm of all gradients.
    config.learner.clip = None
    return config


def batch(program: Program, seed: int = 0, lengths: tuple[int, ...] = (4, 2, 5, 3)) -> dict[str, np.ndarray]:
    """Return a batch of four sequences per row (two in the last row) and padding; with labels if there are classes."""
    data = program.experiment.data
    shape = (data.global_batch_size, data.seq_len)
    rng = np.random.default_rng(seed)
    made = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "positions", "segments")}
    made |= {name: np.zeros(shape, np.float32) for name in ("weights", "ends")}
    labels = np.zeros(shape, np.float32)
    for row in range(shape[0]):
        start = 0
        order = rng.permutation(lengths)
        for segment, length in enumerate(order[: 2 if row == shape[0] - 1 else None], 1):
            columns = slice(start, start + length)
            made["tokens"][row, columns] = rng.integers(0, small.VOCAB, length)
            made["positions"][row, columns] = np.arange(length)
            made["segments"][row, columns] = segment
            made["weights"][row, columns] = 1
            start += length
            made["ends"][row, start - 1] = 1
            labels[row, start - 1] = rng.integers(0, len(CLASSES))
    if data.classes is not None:
        made["labels"] = labels
    return made


def run(program: Program, steps: int) -> tuple[Any, list[dict[str, float]]]:
    """Run `steps` training steps on batches 0, 1, ... and return the last state and the metrics of each step."""
    state = program.init()
    metrics = []
    for step in range(steps):
        state, values = program.step(state, program.put(batch(program, step)))
        metrics.append({name: float(value) for name, value in values.items()})
    return state, metrics
