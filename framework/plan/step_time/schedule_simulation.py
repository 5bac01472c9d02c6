"""Simulates the schedule of a program to find how much of its transfers compute hides.

Operations run one after the other. A transfer begins when it is started, or when the previous transfer on its lane is
done, and overlaps with the operations. If the program waits for an unfinished transfer, the clock advances until it is
done. So transfers on one lane are serialized, and the compute between a transfer's start and its end hides it. There is
one lane to the host, one from the host, one from other slices, and one from other chips of the slice, for asynchronous
collectives. Synchronous collectives take the time of their bytes and delay transfers on that last lane.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from plimsoll.framework.plan.hlo import transfers
from plimsoll.framework.plan.hlo.module import Module, longest_branch
from plimsoll.framework.plan.hlo.transfers import DIRECTIONS, Direction


@dataclass(frozen=True)
class InstructionCost:
    """The cost of an instruction: seconds of the cores, and bytes received synchronously, while nothing else runs."""

    seconds: float
    received: float


# What is busy: the cores, the links to other chips in synchronous collectives, or the link to the host in a direction.
COMPUTATION = "computation"
COLLECTIVES = "collectives"
Span = tuple[float, float]  # seconds from the start of a program: the begin and the end of a busy period
Lane = Direction | Literal["from chips", "from slices"]
_LANES: tuple[Lane, ...] = (*DIRECTIONS, "from chips", "from slices")


@dataclass(frozen=True)
class _Start:
    """The start of a transfer."""

    name: str
    lane: Lane
    num_bytes: float


@dataclass(frozen=True)
class _Done:
    """A wait for the transfer that was started under this name."""

    name: str


@dataclass(frozen=True)
class _Loop:
    """Events that repeat in each iteration of a loop."""

    iterations: int
    events: list[_Event]


_Event = InstructionCost | _Start | _Done | _Loop


@dataclass(frozen=True)
class AsyncCollective:
    """An asynchronous collective: it may start before instruction `first` and has to be done after `last`."""

    first: str
    last: str
    num_bytes: float
    lane: Lane = "from chips"


@dataclass(frozen=True)
class Activity:
    """When the cores and the links of a device are busy in a program.

    Attributes:
        seconds: duration of the program.
        spans: busy periods in order, by `COMPUTATION`, `COLLECTIVES` or direction of host transfers.
    """

    seconds: float
    spans: Mapping[str, Sequence[Span]]


def share_busy(programs: Sequence[Activity], num_intervals: int) -> dict[str, list[float]]:
    """Return the share of each interval during which something is busy, by name as in `Activity.spans`.

    Args:
        programs: programs that run one after the other.
        num_intervals: number of intervals of equal length into which their time is divided.
    """
    seconds = sum(program.seconds for program in programs)
    names = dict.fromkeys(name for program in programs for name in program.spans)
    shares = {name: [0.0] * num_intervals for name in names}
    if not seconds:
        return shares
    started = 0.0
    for program in programs:
        for name, spans in program.spans.items():
            for begin, end in spans:
                # In intervals, from the start of the first program.
                first = (started + begin) / seconds * num_intervals
                last = (started + end) / seconds * num_intervals
                for interval in range(int(first), min(math.ceil(last), num_intervals)):
                    shares[name][interval] += min(last, interval + 1) - max(first, interval)
        started += program.seconds
    return shares


@dataclass
class Timeline:
    """Seconds of a step, or of a program.

    Attributes:
        compute: seconds of operations.
        collectives: seconds of synchronous collectives.
        waits: seconds of waiting for host transfers that compute does not hide.
        collective_waits: seconds of waiting for asynchronous collectives, if they are simulated.
        slice_waits: seconds of waiting for other slices.
        moved: bytes to and from the host, by direction.
        transfers: number of host transfers, by direction.
        exposed: seconds of waiting during which the link of that direction was busy.
        hidden_without_contention: bytes that compute between start and end would hide if each transfer had the link to
            itself.
        spans: see `Activity`; only of a single program.
    """

    compute: float = 0.0
    collectives: float = 0.0
    waits: float = 0.0
    collective_waits: float = 0.0
    slice_waits: float = 0.0
    moved: dict[Direction, float] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0))
    transfers: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0))
    exposed: dict[Direction, float] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0.0))
    hidden_without_contention: dict[Direction, float] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0.0))
    spans: dict[str, list[Span]] = field(default_factory=dict)

    @property
    def activity(self) -> Activity:
        """When the cores and the links are busy."""
        return Activity(self.seconds, self.spans)

    @property
    def seconds(self) -> float:
        """Total seconds."""
        return self.compute + self.collectives + self.waits + self.collective_waits + self.slice_waits

    def add(self, program: Timeline, runs: int) -> None:
        """Add a program that runs `runs` times."""
        self.compute += runs * program.compute
        self.collectives += runs * program.collectives
        self.waits += runs * program.waits
        self.collective_waits += runs * program.collective_waits
        self.slice_waits += runs * program.slice_waits
        for direction in DIRECTIONS:
            self.moved[direction] += runs * program.moved[direction]
            self.transfers[direction] += runs * program.transfers[direction]
            self.exposed[direction] += runs * program.exposed[direction]
            self.hidden_without_contention[direction] += runs * program.hidden_without_contention[direction]


def simulate(
    module: Module,
    costs: Mapping[str, InstructionCost],
    spans: Iterable[AsyncCollective] = (),
    *,
    received_per_second: float,
    host_per_second: float,
    slices_per_second: float = math.inf,
) -> Timeline:
    """Simulate a program and return its timeline.

    Args:
        module: the program.
        costs: {instruction: cost}.
        spans: asynchronous collectives; those that are left out cost nothing.
        received_per_second: bytes per second from other chips.
        host_per_second: bytes per second between device and host, in each direction.
        slices_per_second: bytes per second from other slices.
    """
    simulator = _Simulator(received_per_second, host_per_second, slices_per_second)
    events = _Schedule(module, costs, spans).events(module.entry)
    simulator.run(_merge_events(events))
    return simulator.timeline


class _Schedule:
    """The events of a program, in the order of its text."""

    def __init__(self, module: Module, costs: Mapping[str, InstructionCost], spans: Iterable[AsyncCollective]):
        self._module = module
        self._costs = costs
        self._begins: dict[str, list[_Start]] = {}
        self._ends: dict[str, list[_Done]] = {}
        for number, span in enumerate(spans):
            name = f"span {number}"
            start = _Start(name, span.lane, span.num_bytes)
            self._begins.setdefault(span.first, []).append(start)
            self._ends.setdefault(span.last, []).append(_Done(name))

    def events(self, computation: str) -> Iterator[_Event]:
        started: set[str] = set()
        for instruction in self._module.computations[computation]:
            yield from self._begins.get(instruction.name, ())
            if transfer := transfers.find_transfer(self._module, instruction):
                started.add(instruction.name)
                yield _Start(instruction.name, transfer.direction, transfer.num_bytes)
                if transfer.waits:
                    yield _Done(instruction.name)
            elif transfers.find_transfer_start(instruction) in started:
                yield _Done(transfers.find_transfer_start(instruction))
            elif instruction.opcode == "while":
                iterations = self._module.trip_count(instruction)
                body_events = self.events(instruction.get_called_computation("body"))
                # Merge events, because a loop over many layers is simulated iteration by iteration.
                yield _Loop(iterations, _merge_events(body_events))
            elif instruction.opcode == "call":
                yield from self.events(instruction.get_called_computation("to_apply"))
            elif instruction.opcode == "conditional":
                yield from self.events(longest_branch(self._module, instruction))
            elif instruction.name in self._costs:
                yield self._costs[instruction.name]
            yield from self._ends.get(instruction.name, ())


def _merge_events(events: Iterable[_Event]) -> list[_Event]:
    """Merge consecutive work into one event, including loops that contain only work."""
    merged: list[_Event] = []
    for event in events:
        if isinstance(event, _Loop):
            costs = [inner for inner in event.events if isinstance(inner, InstructionCost)]
            if len(costs) == len(event.events):
                event = InstructionCost(
                    seconds=event.iterations * sum(cost.seconds for cost in costs),
                    received=event.iterations * sum(cost.received for cost in costs),
                )
        last = merged[-1] if merged else None
        if isinstance(event, InstructionCost) and isinstance(last, InstructionCost):
            merged[-1] = InstructionCost(last.seconds + event.seconds, last.received + event.received)
        else:
            merged.append(event)
    return merged


@dataclass(frozen=True)
class _InFlight:
    """A transfer in progress: its end time, and the seconds of work before its start."""

    start: _Start
    end: float
    worked_before: float


class _Simulator:
    """Simulates events with a clock and the transfer lanes."""

    def __init__(self, received_per_second: float, host_per_second: float, slices_per_second: float):
        self.timeline = Timeline()
        self._speeds: dict[Lane, float] = dict.fromkeys(DIRECTIONS, host_per_second)
        self._speeds["from chips"] = received_per_second
        self._speeds["from slices"] = slices_per_second
        self._free_at: dict[Lane, float] = dict.fromkeys(_LANES, 0.0)
        self._now = 0.0
        self._in_flight: dict[str, _InFlight] = {}

    def run(self, events: list[_Event]) -> None:
        for event in events:
            if isinstance(event, InstructionCost):
                self._work(event)
            elif isinstance(event, _Start):
                self._start(event)
            elif isinstance(event, _Done):
                self._finish(self._in_flight[event.name])
            else:
                # Simulate each iteration, because the lanes may still be busy from the previous one.
                for _ in range(event.iterations):
                    self.run(event.events)

    def _work(self, cost: InstructionCost) -> None:
        received = cost.received / self._speeds["from chips"]
        self.timeline.compute += cost.seconds
        self.timeline.collectives += received
        # An asynchronous collective in progress pauses while this one uses the links.
        if self._free_at["from chips"] > self._now:
            self._free_at["from chips"] += received
        self._note(COMPUTATION, self._now, self._now + cost.seconds)
        self._now += cost.seconds + received
        self._note(COLLECTIVES, self._now - received, self._now)

    def _start(self, start: _Start) -> None:
        begin = max(self._now, self._free_at[start.lane])
        end = begin + start.num_bytes / self._speeds[start.lane]
        self._free_at[start.lane] = end
        self._in_flight[start.name] = _InFlight(start, end, self._busy_seconds)
        if start.lane not in ("from chips", "from slices"):
            self._note(start.lane, begin, end)
            self.timeline.moved[start.lane] += start.num_bytes
            self.timeline.transfers[start.lane] += 1

    def _finish(self, transfer: _InFlight) -> None:
        lane = transfer.start.lane
        wait = max(0.0, transfer.end - self._now)
        for direction in DIRECTIONS:
            busy_until = min(transfer.end, self._free_at[direction])
            self.timeline.exposed[direction] += max(0.0, busy_until - self._now)
        self._now += wait
        if lane == "from chips":
            self.timeline.collective_waits += wait
            return
        if lane == "from slices":
            self.timeline.slice_waits += wait
            return
        self.timeline.waits += wait
        worked_meanwhile = self._busy_seconds - transfer.worked_before
        hidden = min(transfer.start.num_bytes, worked_meanwhile * self._speeds[lane])
        self.timeline.hidden_without_contention[lane] += hidden

    def _note(self, name: str, begin: float, end: float) -> None:
        """Add a busy period; one that continues the last one extends it."""
        if end <= begin:
            return
        spans = self.timeline.spans.setdefault(name, [])
        if spans and begin <= spans[-1][1]:
            begin, _ = spans.pop()
        spans.append((begin, end))

    @property
    def _busy_seconds(self) -> float:
        return self.timeline.compute + self.timeline.collectives
