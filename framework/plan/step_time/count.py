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
    """A program that is a step, or one of a step's several programs, and how often it runs in a step."""

    module: Module
    runs: int


@dataclass(frozen=True)
class StepCount:
    """The work of a step on one chip, and how long it takes.

    Attributes:
        rates: of the chip.
        operations: of all programs; `runs` are those of a step.
        collectives: likewise.
        at_all_links: the timeline with the fastest collectives, asynchronous ones taken as hidden.
        at_two_links: the timeline with the slowest collectives, asynchronous ones taken as hidden.
        not_hidden_at_all_links: seconds that would be added if asynchronous collectives went one after the other over
            the links, beside the operations between their start and their end.
        not_hidden_at_two_links: likewise with the slowest collectives.
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
        """The middle of the range in seconds, by which two programs are compared."""
        return (self.low + self.high) / 2

    @property
    def product_flops(self) -> int:
        """FLOPs of matrix products, attention kernels left out."""
        products = [operation for operation in self.operations if operation.category != "attention"]
        return sum(operation.flops * operation.runs for operation in products)

    @property
    def attention_flops(self) -> int:
        """FLOPs of attention kernels, as if nothing were masked."""
        kernels = [operation for operation in self.operations if operation.category == "attention"]
        return sum(kernel.flops * kernel.runs for kernel in kernels)


def count(parts: Sequence[Part], rates: Rates) -> StepCount:
    """Counts a step.

    Args:
        parts: its programs, compiled for TPU, scheduled.
        rates: of the chip that they are for.

    Raises:
        ValueError: the text has no estimates of the compiler: it was written before the code was generated.
    """
    all_operations: list[Operation] = []
    all_collectives: list[Collective] = []
    timelines = (Timeline(), Timeline())
    not_hidden = [0.0, 0.0]
    for module, runs in parts:
        program_operations = list(operations(module, rates))
        program_collectives = collectives(module)
        costs = _costs(program_operations, program_collectives)
        spans = _spans(program_collectives)
        for index, speed in enumerate((rates.all_links, rates.two_links)):
            # Without spans asynchronous collectives cost nothing.
            timeline = play(module, costs, received_per_second=speed, host_per_second=rates.pcie)
            timelines[index].add(timeline, runs)
            with_spans = play(
                module,
                costs,
                spans,
                received_per_second=speed,
                host_per_second=rates.pcie,
            )
            not_hidden[index] += runs * max(0.0, with_spans.seconds - timeline.seconds)
        for operation in program_operations:
            all_operations.append(replace(operation, runs=operation.runs * runs))
        for collective in program_collectives:
            all_collectives.append(collective._replace(runs=collective.runs * runs))
    _check_estimates(all_operations)
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


def _check_estimates(all_operations: list[Operation]) -> None:
    # Some fusions of every program that is scheduled have an estimate.
    fusions = [operation for operation in all_operations if operation.instruction.opcode == "fusion"]
    if fusions and all(fusion.estimate is None for fusion in fusions):
        raise ValueError(
            "the program's text has no estimated_cycles: expected that of the executable, compiled for TPU"
        )


def _costs(program_operations: list[Operation], program_collectives: list[Collective]) -> dict[str, Cost]:
    """{instruction: what it takes}; asynchronous collectives are no cost of the instructions that start them."""
    received: defaultdict[str, float] = defaultdict(float)
    for collective in program_collectives:
        if collective.mode != "async":
            received[collective.scheduled.name] += collective.bytes_received
    costs = {}
    for operation in program_operations:
        name = operation.instruction.name
        costs[name] = Cost(operation.seconds, received[name])
    return costs


def _spans(program_collectives: list[Collective]) -> list[Span]:
    """The asynchronous collectives; each has to be through before the program goes on after the last of its steps."""
    spans = []
    for collective in program_collectives:
        if collective.mode == "async":
            spans.append(Span(collective.scheduled.name, collective.last.name, collective.bytes_received))
    return spans
