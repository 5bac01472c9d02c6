"""Goodput: where the time of a run goes, over all its starts.

As in Google's ML Goodput, it is the time in steps that count, over all time.
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
    """Seconds by phase, by the wall clock of this process.

    Phases nest: time counts for the innermost one.

    Args:
      clock: returns seconds, and is monotonic.
      since: when the process began, on that clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, since: float | None = None):
        self._clock = clock
        # When the time began that is not counted in `seconds` yet.
        self._since = clock() if since is None else since
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.phase = "start"
        # How many phases were entered: when this changes, the loop has moved.
        self.entered = 0

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Counts the time of a context for `phase`: `with goodput.during("save"): ...`"""
        outer_phase = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer_phase)

    def enter(self, phase: str) -> None:
        """Counts time from now on for `phase`, one of PHASES."""
        assert phase in PHASES, phase
        now = self._clock()
        self.seconds[self.phase] += now - self._since
        self._since = now
        self.phase = phase
        self.entered += 1

    def totals(self) -> dict[str, float]:
        """Returns the seconds of each phase that took any, until now. Any thread may call it."""
        # Copies, since the loop may enter a phase meanwhile.
        seconds = dict(self.seconds)
        phase = self.phase
        since = self._since
        seconds[phase] += max(0.0, self._clock() - since)
        return {name: round(seconds[name], 3) for name in PHASES if seconds[name]}

    def carry_over(self, earlier_totals: Mapping[str, float], down: float) -> None:
        """Adds the time of earlier starts.

        Args:
            earlier_totals: `totals` when the run was last heard of.
            down: seconds from then to this start.
        """
        for name in PHASES:
            self.seconds[name] += earlier_totals.get(name, 0.0)
        # The clocks of two hosts may differ by more than the run was down.
        self.seconds["down"] += max(0.0, down)

    def go_back(self, at_save: Mapping[str, float]) -> None:
        """Counts steps as lost, since the run goes on from a checkpoint that does not have them.

        Args:
            at_save: `totals` when the checkpoint was made.
        """
        # Entering the phase again brings its seconds up to date.
        self.enter(self.phase)
        lost_seconds = max(0.0, self.seconds["step"] - at_save.get("step", 0.0))
        self.seconds["lost"] += lost_seconds
        self.seconds["step"] -= lost_seconds

    def fraction(self) -> float:
        """Returns the time in steps that count, over all time."""
        totals = self.totals()
        step_seconds = totals.get("step", 0.0)
        return step_seconds / max(sum(totals.values()), 1e-9)

    def line(self) -> str:
        """Returns a line to show: `goodput 93.1%: steps that count 512 s, compiling 20 s, ...`."""
        parts = []
        for name, seconds in self.totals().items():
            # Shorter phases would be shown as 0 s.
            if seconds >= 0.5:
                parts.append(f"{PHASES[name]} {seconds:.0f} s")
        return f"goodput {self.fraction():.1%}: {', '.join(parts)}"
