"""Plans of one config for other batches and sequence lengths, by the closed form, around the one that was asked for."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from framework.config import Config
from framework.plan.plan import quick
from framework.plan.report import Report
from framework.plan.suggest import check
from framework.plan.targets import Target
from framework.terminal.phases import SHORT, phase

BATCH = "data.global_batch_size"
SEQUENCE = "data.seq_len"
_SIDE = 5
# A config that does not fit is halved until it does, at most so often.
_MOST_HALVINGS = 8
_SECONDS = 3.5


class Point(NamedTuple):
    """A plan for a batch of so many rows of such a length.

    Attributes:
        batch: rows of all devices together.
        sequence: tokens of a row; None where a row has no length.
        report: its plan.
    """

    batch: int
    sequence: int | None
    report: Report


def point_of(report: Report) -> Point:
    """The point that a report is the plan of."""
    in_effect = report["in_effect"]
    return Point(in_effect[BATCH], in_effect.get(SEQUENCE), report)


def grid(config: Config, target: Target, report: Report, *, seconds: float = _SECONDS) -> list[Point]:
    """The asked point, and points around it at powers of two, as many as the config allows and as the time is for.

    Args:
        config: resolved for the target.
        target: the machine to plan for.
        report: the plan of the config itself, compiled or not.
        seconds: after so many no further row of the grid is begun.
    """
    planner = _Planner(config, target, report)
    start = time.monotonic()
    points: list[Point] = []
    with phase("planning other batches and lengths in closed form", patience=SHORT):
        batches = planner.batches()
        for sequence in planner.sequences():
            points += planner.row(batches, sequence)
            # The nearest lengths go first, so what time leaves out is far away.
            if time.monotonic() - start > seconds:
                break
    return points


class _Planner:
    """Plans points around an asked one."""

    def __init__(self, config: Config, target: Target, report: Report):
        self._config = config
        self._target = target
        self._asked = point_of(report)

    def batches(self) -> list[int]:
        """Batches around the asked one; if that does not fit, further down, until one does."""
        batch = self._asked.batch
        batches = self._around(BATCH, batch)
        if self._asked.report["fits"]:
            return batches
        smallest = min(batches)
        while len(batches) < _MOST_HALVINGS and not self._fits(smallest):
            smaller = smallest // 2
            if smallest % 2 or not self._is_possible({BATCH: smaller}):
                break
            batches.append(smaller)
            smallest = smaller
        return batches

    def sequences(self) -> list[int | None]:
        """Lengths around the asked one, the nearest first."""
        if self._asked.sequence is None:
            return [None]
        return [*self._around(SEQUENCE, self._asked.sequence)]

    def row(self, batches: list[int], sequence: int | None) -> list[Point]:
        """The points of one sequence length, without those that the config does not allow."""
        points = []
        for batch in batches:
            if (batch, sequence) == self._asked[:2]:
                points.append(self._asked)
                continue
            report = self._plan(batch, sequence)
            if report is not None:
                points.append(Point(batch, sequence, report))
        return points

    def _around(self, path: str, value: int) -> list[int]:
        """Powers of two times a value that the config allows, the nearest first."""
        values = [value]
        for distance in range(1, _SIDE):
            smaller, remainder = divmod(value, 2**distance)
            candidates = [value * 2**distance]
            if smaller and not remainder:
                candidates.append(smaller)
            for candidate in candidates:
                if len(values) < _SIDE and self._is_possible({path: candidate}):
                    values.append(candidate)
        return values

    def _is_possible(self, settings: dict[str, Any]) -> bool:
        try:
            check(self._with(settings).instantiate(), self._target)
        except ValueError:
            return False
        return True

    def _fits(self, batch: int) -> bool:
        report = self._plan(batch, self._asked.sequence)
        return report is not None and report["fits"]

    def _plan(self, batch: int, sequence: int | None) -> Report | None:
        settings: dict[str, Any] = {BATCH: batch}
        if sequence is not None:
            settings[SEQUENCE] = sequence
        asked_report = self._asked.report
        try:
            report = quick(
                asked_report["config"],
                self._with(settings),
                self._target,
                asked_report["device_limit_bytes"],
                suggests=False,
            )
        except ValueError:
            # Both together may be what each alone is not: too long for the mesh, say.
            return None
        return report | {"target": asked_report["target"], "settings": asked_report["settings"]}

    def _with(self, settings: dict[str, Any]) -> Config:
        changed = self._config.copy()
        for path, value in settings.items():
            changed.set_path(path, value)
        return changed
