"""Analytical plans of a config at other batch sizes and sequence lengths around the requested ones."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, NamedTuple

from plimsoll.framework.config import Config
from plimsoll.framework.plan.build_report import estimate_report
from plimsoll.framework.plan.plan_report import PlanReport
from plimsoll.framework.plan.suggest import check_target
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.terminal.phases import SHORT, phase

BATCH = "data.global_batch_size"
SEQUENCE = "data.seq_len"
_POINTS_PER_AXIS = 5
# A batch that does not fit is halved until it does; this limits how many batch sizes are tried.
_MOST_HALVINGS = 8
# The grid is planned while the user waits for the report.
_SECONDS = 3.5


class GridPoint(NamedTuple):
    """The plan for one batch size and sequence length.

    Attributes:
        batch: global batch size, in rows.
        sequence: tokens per row; None if rows have no length.
        report: the plan.
    """

    batch: int
    sequence: int | None
    report: PlanReport


def point_from_report(report: PlanReport) -> GridPoint:
    """Return the grid point that a report belongs to."""
    in_effect = report.in_effect
    return GridPoint(in_effect[BATCH], in_effect.get(SEQUENCE), report)


def plan_grid(config: Config, target: Target, report: PlanReport, *, seconds: float = _SECONDS) -> list[GridPoint]:
    """Return the requested point and points around it at powers of two that the config allows, within a time limit.

    Args:
        config: config resolved for the target.
        target: the machine to plan for.
        report: the plan of the config itself, compiled or estimated.
        seconds: time limit; no further row of the grid is started after it.
    """
    planner = _Planner(config, target, report)
    start = time.monotonic()
    points: list[GridPoint] = []
    with phase("estimating other batch sizes and lengths", patience=SHORT):
        batches = planner.list_batches()
        for sequence in planner.list_sequences():
            points += planner.plan_row(batches, sequence)
            # The nearest lengths come first, so the time limit drops the farthest ones.
            if time.monotonic() - start > seconds:
                break
    return points


class _Planner:
    """Plans grid points around the requested one."""

    def __init__(self, config: Config, target: Target, report: PlanReport):
        self._config = config
        self._target = target
        self._requested = point_from_report(report)

    def list_batches(self) -> list[int]:
        """Return batch sizes around the requested one; if that does not fit, continue downward until one does."""
        batch = self._requested.batch
        batches = self._around(BATCH, batch)
        if self._requested.report.fits:
            return batches
        smallest = min(batches)
        while len(batches) < _MOST_HALVINGS and not self._fits(smallest):
            smaller = smallest // 2
            if smallest % 2 or not self._is_possible({BATCH: smaller}):
                break
            batches.append(smaller)
            smallest = smaller
        return batches

    def list_sequences(self) -> list[int | None]:
        """Return sequence lengths around the requested one, nearest first."""
        if self._requested.sequence is None:
            return [None]
        return [*self._around(SEQUENCE, self._requested.sequence)]

    def plan_row(self, batches: list[int], sequence: int | None) -> list[GridPoint]:
        """Return the points of one sequence length, without those that the config does not allow."""
        points = []
        for batch in batches:
            if (batch, sequence) == self._requested[:2]:
                points.append(self._requested)
                continue
            report = self._plan(batch, sequence)
            if report is not None:
                points.append(GridPoint(batch, sequence, report))
        return points

    def _around(self, path: str, value: int) -> list[int]:
        """Return the value times powers of two, nearest first, as far as the config allows them."""
        values = [value]
        for distance in range(1, _POINTS_PER_AXIS):
            smaller, remainder = divmod(value, 2**distance)
            candidates = [value * 2**distance]
            if smaller and not remainder:
                candidates.append(smaller)
            for candidate in candidates:
                if len(values) < _POINTS_PER_AXIS and self._is_possible({path: candidate}):
                    values.append(candidate)
        return values

    def _is_possible(self, settings: dict[str, Any]) -> bool:
        try:
            check_target(self._apply(settings).instantiate(), self._target)
        except ValueError:
            return False
        return True

    def _fits(self, batch: int) -> bool:
        report = self._plan(batch, self._requested.sequence)
        return report is not None and report.fits

    def _plan(self, batch: int, sequence: int | None) -> PlanReport | None:
        settings: dict[str, Any] = {BATCH: batch}
        if sequence is not None:
            settings[SEQUENCE] = sequence
        requested_report = self._requested.report
        try:
            report = estimate_report(
                requested_report.config,
                self._apply(settings),
                self._target,
                requested_report.device_limit_bytes,
                suggests=False,
            )
        except ValueError:
            # Batch size and length may each be possible and still be invalid together, such as too long for the mesh.
            return None
        return replace(report, target=requested_report.target, settings=requested_report.settings)

    def _apply(self, settings: dict[str, Any]) -> Config:
        changed = self._config.copy()
        for path, value in settings.items():
            changed.set_path(path, value)
        return changed
