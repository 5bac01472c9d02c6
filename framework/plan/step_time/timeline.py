"""The schedule of a program played through, to see what compute hides of the transfers to and from the host.

Operations run one after the other. A transfer begins when it is started, or when the one before it in its direction is
through, and goes on beside the operations; where the program waits for one that is not done, time passes until it is.
So transfers share the link, and what compute does between the start of one and its end is what hides it. Collectives
that run beside products are taken to be hidden by them; all others take their bytes' time.

May import: framework.plan.hlo, framework.plan.step_time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from framework.plan.hlo import host
from framework.plan.hlo.host import DIRECTIONS, Direction
from framework.plan.hlo.module import Module
from framework.plan.hlo.walk import longest_branch


class Cost(NamedTuple):
    """What an instruction takes: seconds of the cores, and bytes received that everything else waits for."""

    seconds: float
    received: float


class _Work(NamedTuple):
    cost: Cost


class _Start(NamedTuple):
    name: str
    direction: Direction
    num_bytes: int


class _Done(NamedTuple):
    name: str


class _Loop(NamedTuple):
    turns: int
    events: list[_Event]


_Event = _Work | _Start | _Done | _Loop


@dataclass
class Timeline:
    """Seconds of a step, or of a program.

    Attributes:
        compute: of operations. collectives: that nothing else runs beside.
        waits: for transfers that nothing hides any more.
        moved: bytes, by direction. transfers: how many.
        exposed: seconds of waiting in which the link of that direction was busy.
        hidden_alone: bytes that compute between start and done would hide if each transfer had the link to itself.
    """

    compute: float = 0.0
    collectives: float = 0.0
    waits: float = 0.0
    moved: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0))
    transfers: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0))
    exposed: dict[Direction, float] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0.0))
    hidden_alone: dict[Direction, float] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0.0))

    @property
    def seconds(self) -> float:
        """All together."""
        return self.compute + self.collectives + self.waits

    def add(self, other: Timeline, runs: int) -> None:
        """Adds a program that runs so often."""
        self.compute += runs * other.compute
        self.collectives += runs * other.collectives
        self.waits += runs * other.waits
        for direction in DIRECTIONS:
            self.moved[direction] += runs * other.moved[direction]
            self.transfers[direction] += runs * other.transfers[direction]
            self.exposed[direction] += runs * other.exposed[direction]
            self.hidden_alone[direction] += runs * other.hidden_alone[direction]


def play(module: Module, costs: Mapping[str, Cost], *, received_per_second: float, host_per_second: float) -> Timeline:
    """The timeline of a program.

    Args:
        costs: {instruction: what it takes}.
        received_per_second: bytes from other chips. host_per_second: bytes to or from the host, each way.
    """
    player = _Player(received_per_second, host_per_second)
    player.run(_merged(_events(module, costs, module.entry)))
    return player.timeline


def _events(module: Module, costs: Mapping[str, Cost], computation: str) -> Iterator[_Event]:
    started: set[str] = set()
    for instruction in module.computations[computation]:
        if instruction.opcode == "while":
            body = _merged(_events(module, costs, instruction.called("body")))
            yield _Loop(module.trip_count(instruction), body)
        elif instruction.opcode == "call":
            yield from _events(module, costs, instruction.called("to_apply"))
        elif instruction.opcode == "conditional":
            yield from _events(module, costs, longest_branch(module, instruction))
        elif transfer := host.transfer(module, instruction):
            started.add(instruction.name)
            yield _Start(instruction.name, transfer.direction, transfer.num_bytes)
            if transfer.waits:
                yield _Done(instruction.name)
        elif host.finished(instruction) in started:
            yield _Done(host.finished(instruction))
        elif instruction.name in costs:
            yield _Work(costs[instruction.name])


def _merged(events: Iterable[_Event]) -> list[_Event]:
    """The same events with work that follows work in one piece, loops that do nothing else included."""
    merged: list[_Event] = []
    for event in events:
        if isinstance(event, _Loop) and all(isinstance(inner, _Work) for inner in event.events):
            costs = [inner.cost for inner in event.events if isinstance(inner, _Work)]
            seconds, received = (event.turns * sum(column) for column in zip(*costs, strict=True)) if costs else (0, 0)
            event = _Work(Cost(seconds, received))
        last = merged[-1] if merged else None
        if isinstance(event, _Work) and isinstance(last, _Work):
            merged[-1] = _Work(Cost(*map(sum, zip(last.cost, event.cost, strict=True))))
        else:
            merged.append(event)
    return merged


class _UnderWay(NamedTuple):
    """A transfer that was started: when it is through, and what had been worked before."""

    start: _Start
    end: float
    worked_before: float


class _Player:
    """A clock, and the two directions of the link to the host."""

    def __init__(self, received_per_second: float, host_per_second: float):
        self.timeline = Timeline()
        self._received_per_second, self._host_per_second = received_per_second, host_per_second
        self._now = 0.0
        self._free_at: dict[Direction, float] = dict.fromkeys(DIRECTIONS, 0.0)
        self._under_way: dict[str, _UnderWay] = {}

    def run(self, events: list[_Event]) -> None:
        for event in events:
            if isinstance(event, _Work):
                received = event.cost.received / self._received_per_second
                self.timeline.compute += event.cost.seconds
                self.timeline.collectives += received
                self._now += event.cost.seconds + received
            elif isinstance(event, _Start):
                self._start(event)
            elif isinstance(event, _Done):
                self._finish(self._under_way[event.name])
            else:
                for _ in range(event.turns):
                    self.run(event.events)

    def _start(self, start: _Start) -> None:
        begin = max(self._now, self._free_at[start.direction])
        end = begin + start.num_bytes / self._host_per_second
        self._free_at[start.direction] = end
        self._under_way[start.name] = _UnderWay(start, end, self._worked)
        self.timeline.moved[start.direction] += start.num_bytes
        self.timeline.transfers[start.direction] += 1

    def _finish(self, transfer: _UnderWay) -> None:
        start, worked_meanwhile = transfer.start, self._worked - transfer.worked_before
        hidden = min(start.num_bytes, worked_meanwhile * self._host_per_second)
        self.timeline.hidden_alone[start.direction] += hidden
        if transfer.end <= self._now:
            return
        for direction in DIRECTIONS:
            busy_until = min(transfer.end, self._free_at[direction])
            self.timeline.exposed[direction] += max(0.0, busy_until - self._now)
        self.timeline.waits += transfer.end - self._now
        self._now = transfer.end

    @property
    def _worked(self) -> float:
        return self.timeline.compute + self.timeline.collectives
