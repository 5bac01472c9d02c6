"""The count of a step: its operations, collectives and host transfers, and how long it takes by them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from framework.plan.hlo.collectives import Collective, collectives
from framework.plan.hlo.module import Module
from framework.plan.step_time.operations import Operation, operations
from framework.plan.step_time.rates import Rates
from framework.plan.step_time.timeline import Cost, Span, Timeline, play


class Part(NamedTuple):
    """A program that is a step, or, of a step that is several programs, one of them; how often it runs in a step."""

    module: Module
    runs: int


@dataclass(frozen=True)
class StepCount:
    """What a step does on one chip, and how long it takes.

    Attributes:
        rates: of the chip.
        operations, collectives: of all programs; `runs` are those of a whole step.
        at_all_links, at_two_links: the timelines with the fastest and with the slowest collectives, asynchronous ones
            taken as hidden.
        not_hidden_at_all_links, not_hidden_at_two_links: seconds that would be added if asynchronous collectives went
            one after the other over the links, beside the operations between their start and their end.
        unknown_loops: loops that are counted once, as their text does not tell how often they run.
    """

    rates: Rates
    operations: list[Operation]
    collectives: list[Collective]
    at_all_links: Timeline
    at_two_links: Timeline
    not_hidden_at_all_links: float
    not_hidden_at_two_links: float
    unknown_loops: int

    @property
    def low(self) -> float:
        """Seconds of the step, at best."""
        return self.at_all_links.seconds

    @property
    def high(self) -> float:
        """Seconds of the step where collectives have two links only."""
        return self.at_two_links.seconds

    @property
    def middle(self) -> float:
        """The middle of the range: what two programs are compared by."""
        return (self.low + self.high) / 2

    @property
    def product_flops(self) -> int:
        """Of matrix products, attention kernels left out."""
        return sum(one.flops * one.runs for one in self.operations if one.category != "attention")

    @property
    def attention_flops(self) -> int:
        """Of attention kernels, as if nothing were masked."""
        return sum(one.flops * one.runs for one in self.operations if one.category == "attention")


def count(parts: Sequence[Part], rates: Rates) -> StepCount:
    """The count of a step.

    Args:
        parts: its programs, compiled for TPU, scheduled. rates: of the chip they are for.

    Raises:
        ValueError: the text has no estimates of the compiler: it was written before the code was generated.
    """
    all_operations: list[Operation] = []
    all_collectives: list[Collective] = []
    timelines, not_hidden = (Timeline(), Timeline()), [0.0, 0.0]
    for module, runs in parts:
        found, exchanged = list(operations(module, rates)), collectives(module)
        costs, spans = _costs(found, exchanged), _spans(exchanged)
        for index, speed in enumerate((rates.all_links, rates.two_links)):
            played = play(module, costs, received_per_second=speed, host_per_second=rates.pcie)
            timelines[index].add(played, runs)
            shared = play(module, costs, spans, received_per_second=speed, host_per_second=rates.pcie)
            not_hidden[index] += runs * max(0.0, shared.seconds - played.seconds)
        all_operations += [replace(one, runs=one.runs * runs) for one in found]
        all_collectives += [one._replace(runs=one.runs * runs) for one in exchanged]
    fusions = [one for one in all_operations if one.instruction.opcode == "fusion"]
    if fusions and all(one.estimate is None for one in fusions):
        raise ValueError(
            "the program's text has no estimated_cycles: expected that of the executable, compiled for TPU"
        )
    unknown_loops = sum(len(module.unknown_loops) for module, _ in parts)
    return StepCount(
        rates=rates,
        operations=all_operations,
        collectives=all_collectives,
        at_all_links=timelines[0],
        at_two_links=timelines[1],
        not_hidden_at_all_links=not_hidden[0],
        not_hidden_at_two_links=not_hidden[1],
        unknown_loops=unknown_loops,
    )


def _costs(found: list[Operation], exchanged: list[Collective]) -> dict[str, Cost]:
    received: defaultdict[str, float] = defaultdict(float)
    for one in exchanged:
        if one.mode != "async":
            received[one.scheduled.name] += one.bytes_received
    return {one.instruction.name: Cost(one.seconds, received[one.instruction.name]) for one in found}


def _spans(exchanged: list[Collective]) -> list[Span]:
    """The asynchronous collectives; each has to be through before the program goes on after the last of its steps."""
    waited_for = (one for one in exchanged if one.mode == "async")
    return [Span(one.scheduled.name, one.last.name, one.bytes_received) for one in waited_for]
