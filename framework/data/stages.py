"""Stages of the training data: from a given batch on, other weights, a longer sequence, or another batch size.

A stage starts at a batch number, so the data stays a pure function of (seed, step). Each stage starts where the one
before it ended: the position of a source is the number of sequences drawn from it so far. If its rows change with the
sequence length, it continues at the same fraction of an epoch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plimsoll.framework.config import Config, NonNegativeFloat, PositiveInt, component
from plimsoll.framework.data.order import GlobalOrder, check_weights


@component
class DataStage:
    """Changes to the training data from a step on. A field that is None keeps its value of the stage before.

    Args:
        weights: one number for each source of the Mixture in data.source; 0 leaves a source out.
        seq_len: tokens per sequence.
        global_batch_size: sequences per step. None keeps the tokens per step if `seq_len` changes.
    """

    def __init__(
        self,
        *,
        weights: list[NonNegativeFloat] | None = None,
        seq_len: PositiveInt | None = None,
        global_batch_size: PositiveInt | None = None,
    ):
        if weights is not None:
            try:
                check_weights(weights)
            except ValueError as error:
                raise ValueError(f"weights: {error}") from None
        self.weights = weights
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size


@dataclass(frozen=True)
class Stage:
    """The training data of a range of batches.

    Attributes:
        start: number of the first batch.
        seq_len: S, tokens per sequence.
        batch_size: B, sequences per batch.
        weights: fraction of the sequences from each source.
    """

    start: int
    seq_len: int
    batch_size: int
    weights: tuple[float, ...]

    @property
    def label(self) -> str:
        """The config path of the stage."""
        return f"data.stages.{self.start}"

    @property
    def tokens_per_step(self) -> int:
        """The tokens of a batch, including padding."""
        return self.seq_len * self.batch_size

    def describe(self) -> str:
        """Return the batches and the weights of several sources as text."""
        text = f"{self.batch_size:,} sequences of {self.seq_len:,} tokens"
        if len(self.weights) == 1:
            return text
        return f"{text}, weights {', '.join(f'{weight:.3g}' for weight in self.weights)}"


def build_stages(configs: Mapping[str, Config]) -> dict[int, DataStage]:
    """Build the stages of a config, {first batch: changes}, in order.

    Raises:
        ValueError: a key is not a step, or the stage at step 0 has more than weights.
    """
    stages = {}
    for key, config in configs.items():
        if not re.fullmatch(r"0|[1-9][0-9]*", key):
            raise ValueError(f"data.stages.{key}: expected the step that the stage starts at, such as 20000")
        stage = config.instantiate()
        if not isinstance(stage, DataStage):
            raise ValueError(f"data.stages.{key}: expected a DataStage, given {type(stage).__name__}")
        if key == "0" and (stage.seq_len, stage.global_batch_size) != (None, None):
            raise ValueError("data.stages.0: set data.seq_len and data.global_batch_size instead")
        if (stage.weights, stage.seq_len, stage.global_batch_size) == (None, None, None):
            raise ValueError(f"data.stages.{key}: changes nothing; expected weights, seq_len or global_batch_size")
        stages[int(key)] = stage
    return dict(sorted(stages.items()))


def resolve_stages(
    changes: Mapping[int, DataStage], base: Stage, inner_weights: Sequence[Sequence[float]]
) -> tuple[Stage, ...]:
    """Resolve every stage, with the base as the first one.

    Args:
        changes: the stages of the config.
        base: the data from step 0 on, if no stage changes it.
        inner_weights: for each source of the Mixture, the weights of the sources in it (one weight of 1, unless it is
            a Mixture itself); empty if data.source is no Mixture.

    Raises:
        ValueError: a stage has weights without a Mixture, another number of weights than sources, or a sequence length
            that does not divide the tokens of a step.
    """
    stages = [base]
    for start, change in changes.items():
        last = stages[-1]
        weights = last.weights
        if change.weights is not None:
            weights = _resolve_weights(f"data.stages.{start}.weights", change.weights, inner_weights)
        seq_len = change.seq_len or last.seq_len
        batch_size = change.global_batch_size
        if batch_size is None:
            batch_size = last.tokens_per_step // seq_len
            if batch_size * seq_len != last.tokens_per_step:
                raise ValueError(
                    f"data.stages.{start}.seq_len = {seq_len} does not divide the {last.tokens_per_step} tokens of a "
                    f"step ({last.batch_size} sequences of {last.seq_len}); expected another length, or "
                    f"data.stages.{start}.global_batch_size"
                )
        stage = Stage(start, seq_len, batch_size, weights)
        # A stage at step 0 replaces the base.
        stages = [stage] if start == 0 else [*stages, stage]
    return tuple(stages)


def _resolve_weights(
    label: str, weights: Sequence[float], inner_weights: Sequence[Sequence[float]]
) -> tuple[float, ...]:
    """Return the fraction of each source, given the weight of each source of the Mixture."""
    if not inner_weights:
        raise ValueError(f"{label}: data.source is no Mixture, so there is nothing to weight")
    if len(weights) != len(inner_weights):
        raise ValueError(f"{label}: expected one for each of {len(inner_weights)} sources, given {len(weights)}")
    total = sum(weights)
    return tuple(weight / total * inner for weight, part in zip(weights, inner_weights, strict=True) for inner in part)


def find_stage(stages: Sequence[Stage], batch: int) -> int:
    """Return the index of the stage that a batch belongs to."""
    return max(index for index, stage in enumerate(stages) if stage.start <= batch)


def build_orders(
    stages: Sequence[Stage], row_counts: Sequence[Sequence[int]], seed: int, origin: int
) -> list[GlobalOrder]:
    """Return the order of the sequences of each stage; sequence 0 of an order is the first of its stage.

    Args:
        stages: the stages.
        row_counts: number of rows of each source, by stage.
        seed: seed of the permutations.
        origin: the sequence that batch 0 would start with, see `BatchOrder`.
    """
    orders = [GlobalOrder(row_counts[0], stages[0].weights, seed)]
    for index in range(1, len(stages)):
        last = stages[index - 1]
        num_drawn = (stages[index].start - last.start) * last.batch_size
        if index == 1:
            num_drawn += origin
        positions = orders[-1].positions_after(num_drawn)
        rows_by_source = zip(positions, row_counts[index - 1], row_counts[index], strict=True)
        # Rows may be longer now: keep the fraction of an epoch, rounded up so that no row is read twice.
        starts = [-(-position * new // old) if old else 0 for position, old, new in rows_by_source]
        orders.append(GlobalOrder(row_counts[index], stages[index].weights, seed, starts))
    return orders
