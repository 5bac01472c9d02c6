"""Goodput: where the time of a run goes, over all its starts (as in Google's ML Goodput: time in steps that count, over
all time).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

PHASES = {
    "step": "steps that count",
    "start": "starting processes",
    "data": "preparing data",
    "compile": "compiling",
    "restore": "initializing and restoring",
    "input": "waiting for input",
    "evaluate": "evaluating",
    "save": "saving",
    "lost": "steps done again",
    "down": "between a death and the next start",
}


class Goodput:
    """Seconds by phase, wall clock of this process. Phases nest: time is the innermost one's.

    Args:
      clock: seconds, monotonic.
      since: when the process began, on that clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, since: float | None = None):
        self._clock, self._since = clock, clock() if since is None else since
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.phase, self.entered = "start", 0  # and how many were entered before

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """`with goodput.during("save"): ...`"""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def enter(self, phase: str) -> None:
        """What follows is `phase`, one of PHASES."""
        assert phase in PHASES, phase
        now = self._clock()
        self.seconds[self.phase] += now - self._since
        self._since, self.phase, self.entered = now, phase, self.entered + 1

    def totals(self) -> dict[str, float]:
        """Seconds of each phase that took any, until now. Any thread may ask."""
        seconds, phase, since = dict(self.seconds), self.phase, self._since
        seconds[phase] += max(0.0, self._clock() - since)
        return {name: round(seconds[name], 3) for name in PHASES if seconds[name]}

    def carry_over(self, before: Mapping[str, float], down: float) -> None:
        """Adds the time of earlier starts: totals when the run was last heard of, and seconds from then to this one."""
        for name in PHASES:
            self.seconds[name] += before.get(name, 0.0)
        self.seconds["down"] += max(0.0, down)

    def go_back(self, at_save: Mapping[str, float]) -> None:
        """The run goes on from a checkpoint that was made at those totals: the steps since then are lost."""
        self.enter(self.phase)
        lost = max(0.0, self.seconds["step"] - at_save.get("step", 0.0))
        self.seconds["lost"] += lost
        self.seconds["step"] -= lost

    def fraction(self) -> float:
        """Time in steps that count, over all time."""
        totals = self.totals()
        return totals.get("step", 0.0) / max(sum(totals.values()), 1e-9)

    def line(self) -> str:
        """For a person: `goodput 93.1%: steps that count 512 s, compiling 20 s, ...`."""
        totals = self.totals()
        parts = [f"{PHASES[name]} {value:.0f} s" for name, value in totals.items() if value >= 0.5]
        return f"goodput {self.fraction():.1%}: {', '.join(parts)}"
