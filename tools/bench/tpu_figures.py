"""Figures of a counted TPU step, for tables, comparisons and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from plimsoll.framework.plan.buffer_names import describe_operation
from plimsoll.framework.plan.hlo.computations import SourceLine
from plimsoll.framework.plan.hlo.transfers import DIRECTIONS, Direction
from plimsoll.framework.plan.step_time.tpu_operations import TpuOperation
from plimsoll.framework.plan.step_time.tpu_time import StepCount
from plimsoll.framework.plan.step_time.work_categories import OVERESTIMATED
from tools.bench.step_programs import StepInfo

MODES = ("sync", "fused", "async")
_COMPARED = ("matmul", "collective matmul", "attention", "kernel", *OVERESTIMATED, "custom call")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class CountedStep:
    """A step, and its count."""

    about: StepInfo
    count: StepCount

    @property
    def ideal(self) -> float | None:
        """Seconds that the model's FLOPs need at the peak rate; None if they are unknown."""
        needed = self.about.model_flops
        return None if needed is None else needed / self.count.rates.flops

    @property
    def found_over_traced(self) -> float | None:
        """FLOPs found in the compiled program over those of the traced one.

        A value other than 1.00 means that the compiler computes something twice, or that the count is wrong.
        """
        found = self.count.product_flops + self.count.attention_flops
        return None if self.about.traced_flops is None else found / self.about.traced_flops


class Sums(NamedTuple):
    """Operations added up, each multiplied by its runs in a step: seconds, FLOPs and bytes."""

    runs: int
    seconds: float
    estimate: float
    roof: float
    flops: int
    hbm_bytes: int

    @staticmethod
    def total(operations: Iterable[TpuOperation]) -> Sums:
        """Add up operations."""
        members = list(operations)
        return Sums(
            runs=sum(one.runs for one in members),
            seconds=sum(one.runs * one.seconds for one in members),
            estimate=sum(one.runs * (one.estimate or 0.0) for one in members),
            roof=sum(one.runs * one.roof for one in members),
            flops=sum(one.runs * one.flops for one in members),
            hbm_bytes=sum(one.runs * one.hbm_bytes for one in members),
        )


class OperationGroup(NamedTuple):
    """Operations of one category with the same name in the traced program, from the same line of Python."""

    category: str
    name: str
    line: str
    sums: Sums


def groups(operations: Iterable[TpuOperation]) -> list[OperationGroup]:
    """Group the operations by layer and line, longest first; groups that take no core time are sorted by bytes."""
    members: dict[tuple[str, str, str], list[TpuOperation]] = {}
    for one in operations:
        name = describe_operation(one.op_name) if one.op_name else one.instruction.name.rstrip("0123456789.")
        members.setdefault((one.category, name, source_line(one.source)), []).append(one)
    found = [OperationGroup(*key, Sums.total(alike)) for key, alike in members.items()]
    return sorted(found, key=lambda group: (-group.sums.seconds, -group.sums.hbm_bytes))


def source_line(source: SourceLine | None) -> str:
    """Return `framework/layers/mlp.py:78`; for installed packages, the path starts at the package."""
    if source is None:
        return ""
    file = source.file.partition("/site-packages/")[2] or source.file.removeprefix(f"{_ROOT}/")
    return f"{file}:{source.line}"


def sum_received_bytes(count: StepCount, mode: str) -> float:
    """Return the bytes that a chip receives in a step through collectives of a mode."""
    return sum(one.bytes_received * one.runs for one in count.collectives if one.mode == mode)


class HostFigures(NamedTuple):
    """Transfers in one direction between device and host memory, in a step.

    Attributes:
        num_bytes, transfers: bytes moved, and number of transfers.
        seconds: seconds that the link takes.
        hidden: share of these seconds in which the chip worked; None if nothing is moved.
        hidden_without_contention: share of the bytes that the work between the start and the end of a transfer would
            hide if the transfer had the link to itself; None if nothing is moved.
    """

    num_bytes: float
    transfers: int
    seconds: float
    hidden: float | None
    hidden_without_contention: float | None


def host_figures(count: StepCount) -> dict[Direction, HostFigures]:
    """Return the transfers of a step by direction, with collectives at all links."""
    timeline, found = count.at_all_links, dict[Direction, HostFigures]()
    for direction in DIRECTIONS:
        moved = timeline.moved[direction]
        seconds = moved / count.rates.pcie
        hidden = 1 - timeline.exposed[direction] / seconds if moved else None
        hidden_bytes_share = timeline.hidden_without_contention[direction] / moved if moved else None
        found[direction] = HostFigures(moved, timeline.transfers[direction], seconds, hidden, hidden_bytes_share)
    return found


def figures(counted: CountedStep) -> dict[str, float | None]:
    """Return the figures for comparing steps, by their names in the table; None means unknown."""
    count, about = counted.count, counted.about
    found: dict[str, float | None] = {"products, TFLOP": count.product_flops / 1e12}
    for category in _COMPARED:
        sums = Sums.total(one for one in count.operations if one.category == category)
        found[f"{category}, ms"] = 1e3 * sums.seconds
    found["HBM of operations, GB"] = Sums.total(count.operations).hbm_bytes / 1e9
    for mode in MODES:
        found[f"{mode} collectives, GB"] = sum_received_bytes(count, mode) / 1e9
    for direction, host in host_figures(count).items():
        found[f"{direction}, GB"] = host.num_bytes / 1e9
    found |= {
        "compute, ms": 1e3 * count.at_all_links.compute,
        "waiting for the host, ms": 1e3 * count.at_all_links.waits,
        "async collectives not hidden (not counted) at two links, ms": 1e3 * count.not_hidden_at_two_links,
        "step at all links, ms": 1e3 * count.low,
        "step at two links, ms": 1e3 * count.high,
        "step, middle, ms": 1e3 * count.middle,
        "MFU, middle, %": None if counted.ideal is None else 100 * counted.ideal / count.middle,
        "peak, GiB": None if about.peak_bytes is None else about.peak_bytes / 2**30,
        "compiling, s": about.compile_seconds,
    }
    return found


def as_json(counted: CountedStep) -> dict[str, Any]:
    """Convert everything to JSON data: seconds, bytes and FLOPs of one device and step."""
    count = counted.count
    return {
        "about": vars(counted.about),
        "rates": dataclasses.asdict(count.rates),
        "figures": figures(counted),
        "ideal_seconds": counted.ideal,
        "found_over_traced_flops": counted.found_over_traced,
        "timelines": {"all_links": vars(count.at_all_links), "two_links": vars(count.at_two_links)},
        "host": {direction: host._asdict() for direction, host in host_figures(count).items()},
        "operations": [group._asdict() | {"sums": group.sums._asdict()} for group in groups(count.operations)],
        "collectives": [
            {
                "kind": one.kind,
                "mode": one.mode,
                "name": one.instruction.op_name,
                "dtype": one.dtype,
                "runs": one.runs,
                "bytes_received": one.bytes_received,
            }
            for one in count.collectives
        ],
    }
