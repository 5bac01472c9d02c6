"""Counts the operations, collectives and host transfers of a TPU step, and estimates its time from them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plimsoll.framework.plan.hlo.module import Module
from plimsoll.framework.plan.hlo.transfers import Collective, collectives, slice_transfers
from plimsoll.framework.plan.step_time.schedule_simulation import (
    Activity,
    AsyncCollective,
    InstructionCost,
    Timeline,
    simulate,
)
from plimsoll.framework.plan.step_time.time_breakdown import ProgramTime, StepProgram
from plimsoll.framework.plan.step_time.tpu_operations import TpuOperation, TpuRates, iter_operations
from plimsoll.framework.plan.step_time.work_categories import PRODUCT_CATEGORIES


@dataclass(frozen=True)
class StepCount:
    """The work of a step on one chip, and its estimated time.

    Attributes:
        rates: rates of the chip.
        operations: operations of all programs; their `runs` are per step.
        collectives: collectives of all programs; their `runs` are per step.
        at_all_links: timeline with the fastest collectives, assuming that asynchronous ones are hidden.
        at_two_links: timeline with the slowest collectives, assuming that asynchronous ones are hidden.
        not_hidden_at_all_links: seconds to add if asynchronous collectives share the links one after the other and
            overlap only with the operations between their start and their end, at the speed of all links.
        not_hidden_at_two_links: the same seconds at the speed of two links.
        unknown_loops: number of loops that count once because their trip count is not known from the text.
        activities: when cores and links are busy in one run of each program, with the fastest collectives.
    """

    rates: TpuRates
    operations: list[TpuOperation]
    collectives: list[Collective]
    at_all_links: Timeline
    at_two_links: Timeline
    not_hidden_at_all_links: float
    not_hidden_at_two_links: float
    unknown_loops: int
    activities: list[Activity]

    @property
    def low(self) -> float:
        """Seconds of the step in the best case."""
        return self.at_all_links.seconds

    @property
    def high(self) -> float:
        """Seconds of the step if collectives have only two links."""
        return self.at_two_links.seconds

    @property
    def middle(self) -> float:
        """Middle of the range in seconds, used to compare programs."""
        return (self.low + self.high) / 2

    @property
    def product_flops(self) -> int:
        """FLOPs of matrix products, excluding attention kernels."""
        products = [operation for operation in self.operations if operation.category != "attention"]
        return sum(operation.flops * operation.runs for operation in products)

    @property
    def attention_flops(self) -> int:
        """FLOPs of attention kernels, counted without masks."""
        kernels = [operation for operation in self.operations if operation.category == "attention"]
        return sum(kernel.flops * kernel.runs for kernel in kernels)


def count(parts: Sequence[StepProgram], rates: TpuRates) -> StepCount:
    """Count the work of a step.

    Args:
        parts: programs of the step, compiled for TPU and scheduled.
        rates: rates of the chip that they are compiled for.

    Raises:
        ValueError: the text has no compiler estimates, because it was written before code generation.
    """
    all_operations: list[TpuOperation] = []
    all_collectives: list[Collective] = []
    timelines = (Timeline(), Timeline())
    not_hidden = [0.0, 0.0]
    activities = []
    for part in parts:
        module = part.module
        runs = part.runs
        program_operations = list(iter_operations(module, rates))
        program_collectives = collectives(module)
        received: defaultdict[str, float] = defaultdict(float)
        spans = []
        for collective in program_collectives:
            num_bytes = collective.bytes_received
            if collective.mode == "async":
                # It has to be done before the program continues after its last step.
                spans.append(AsyncCollective(collective.scheduled.name, collective.last.name, num_bytes))
            else:
                received[collective.scheduled.name] += num_bytes
        from_slices = [
            AsyncCollective(transfer.started.name, transfer.done.name, transfer.num_bytes, "from slices")
            for transfer in slice_transfers(module)
        ]
        speeds = {"host_per_second": rates.pcie, "slices_per_second": rates.dcn or math.inf}
        costs = {}
        for operation in program_operations:
            name = operation.instruction.name
            costs[name] = InstructionCost(operation.seconds, received[name])
        for index, speed in enumerate((rates.all_links, rates.two_links)):
            # Without spans, asynchronous collectives within a slice cost nothing.
            timeline = simulate(module, costs, from_slices, received_per_second=speed, **speeds)
            timelines[index].add(timeline, runs)
            if index == 0:
                activities.append(timeline.activity)
            with_spans = simulate(module, costs, [*spans, *from_slices], received_per_second=speed, **speeds)
            not_hidden[index] += runs * max(0.0, with_spans.seconds - timeline.seconds)
        for operation in program_operations:
            all_operations.append(replace(operation, runs=operation.runs * runs))
        for collective in program_collectives:
            all_collectives.append(replace(collective, runs=collective.runs * runs))
    # In every scheduled program, at least some fusions have an estimate.
    fusions = [operation for operation in all_operations if operation.instruction.opcode == "fusion"]
    if fusions and all(fusion.estimate is None for fusion in fusions):
        raise ValueError(
            "the program's text has no estimated_cycles; expected the text of an executable compiled for TPU"
        )
    unknown_loops = sum(len(part.module.unknown_loops) for part in parts)
    return StepCount(
        rates=rates,
        operations=all_operations,
        collectives=all_collectives,
        at_all_links=timelines[0],
        at_two_links=timelines[1],
        not_hidden_at_all_links=not_hidden[0],
        not_hidden_at_two_links=not_hidden[1],
        unknown_loops=unknown_loops,
        activities=activities,
    )


def tpu_time(module: Module, rates: TpuRates) -> ProgramTime:
    """Return the time of one run of a program that was compiled for TPU.

    Collectives use all links of a chip in the best case and two in the worst. The result is the middle of the two and
    includes the exposed part of asynchronous collectives.

    Args:
        module: the program.
        rates: rates of the chip.

    Raises:
        ValueError: the text has no compiler estimates.
    """
    step_count = count([StepProgram(module, 1)], rates)
    products = 0.0
    for operation in step_count.operations:
        if operation.category in PRODUCT_CATEGORIES:
            products += operation.runs * operation.seconds
    fast = step_count.at_all_links
    slow = step_count.at_two_links
    fast_links = fast.collectives + step_count.not_hidden_at_all_links
    slow_links = slow.collectives + step_count.not_hidden_at_two_links
    return ProgramTime(
        products=products,
        others=fast.compute - products,
        links=(fast_links + slow_links) / 2,
        host_waits=(fast.waits + slow.waits) / 2,
        activity=step_count.activities[0],
        other_slices=(fast.slice_waits + slow.slice_waits) / 2,
    )
