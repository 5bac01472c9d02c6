"""Goodput: a breakdown of the time of a run, over all its starts.

As in Google's ML Goodput, it is the fraction of the total time that is spent in steps that count.
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
    "lost": "repeated steps",
    "down": "downtime before a restart",
}


class Goodput:
    """Wall-clock seconds of this process, by phase. Phases nest, and time counts for the innermost one.

    Args:
        clock: monotonic clock that returns seconds.
        since: start time of the process on that clock; None for now.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, since: float | None = None):
        self._clock = clock
        # Start of the time that `seconds` does not include yet.
        self._since = clock() if since is None else since
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.phase = "start"
        # Number of phases entered. When it changes, the training loop has made progress.
        self.entered = 0

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the time of a context for `phase`: `with goodput.during("save"): ...`"""
        outer_phase = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer_phase)

    def enter(self, phase: str) -> None:
        """Count the time from now on for `phase`, one of PHASES."""
        assert phase in PHASES, phase
        now = self._clock()
        self.seconds[self.phase] += now - self._since
        self._since = now
        self.phase = phase
        self.entered += 1

    def totals(self) -> dict[str, float]:
        """Return the seconds until now, of each phase that took any. Any thread may call it."""
        # Copy, because the loop may enter another phase in the meantime.
        seconds = dict(self.seconds)
        phase = self.phase
        since = self._since
        seconds[phase] += max(0.0, self._clock() - since)
        return {name: round(seconds[name], 3) for name in PHASES if seconds[name]}

    def elapsed(self) -> float:
        """Return the seconds that all starts of the run have taken, without the time between them."""
        totals = self.totals()
        return sum(totals.values()) - totals.get("down", 0.0)

    def carry_over(self, earlier_totals: Mapping[str, float], down: float) -> None:
        """Add the time of earlier starts.

        Args:
            earlier_totals: `totals` at the last report of the previous start.
            down: seconds between that report and this start.
        """
        for name in PHASES:
            self.seconds[name] += earlier_totals.get(name, 0.0)
        # If another host wrote the report, `down` can be negative: clocks may differ by more than the downtime.
        self.seconds["down"] += max(0.0, down)

    def go_back(self, at_save: Mapping[str, float]) -> None:
        """Count the steps since a checkpoint as lost, because the run continues from that checkpoint.

        Args:
            at_save: `totals` when the checkpoint was saved.
        """
        # Entering the current phase again updates its seconds.
        self.enter(self.phase)
        lost_seconds = max(0.0, self.seconds["step"] - at_save.get("step", 0.0))
        self.seconds["lost"] += lost_seconds
        self.seconds["step"] -= lost_seconds

    def fraction(self) -> float:
        """Return the fraction of the total time that was spent in steps that count."""
        totals = self.totals()
        step_seconds = totals.get("step", 0.0)
        return step_seconds / max(sum(totals.values()), 1e-9)

    def line(self) -> str:
        """Return a summary line: `goodput 93.1%: steps that count 512 s, compiling 20 s, ...`."""
        parts = []
        for name, seconds in self.totals().items():
            # Shorter phases would be shown as 0 s.
            if seconds >= 0.5:
                parts.append(f"{PHASES[name]} {seconds:.0f} s")
        return f"goodput {self.fraction():.1%}: {', '.join(parts)}"
