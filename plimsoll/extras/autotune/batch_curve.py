"""Estimates tokens per second of the chosen settings at larger batches, as far as device and host memory allow."""

from __future__ import annotations

from plimsoll.extras.autotune.autotune import BATCH_MODE, BATCH_MODE_FIXED
from plimsoll.extras.autotune.cost_model import CostModel, MemoryBudget, MemoryLimits, SettingsCost, with_host_memory
from plimsoll.extras.autotune.search_space import SearchSpace
from plimsoll.extras.autotune.settings import (
    ACCUMULATE,
    BATCH,
    Settings,
    TunedSettings,
    TuningRequest,
    select_changes,
    setting,
    with_settings,
)
from plimsoll.framework.plan.build_report import report_time
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.plan.throughput_curve import (
    LEAST_RISE,
    MOST_BATCHES,
    CurveEnd,
    ThroughputCurve,
    ThroughputPoint,
)
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.terminal.phases import SHORT, phase


def estimate_curve(
    request: TuningRequest, target: Target, choice: TunedSettings, host_bytes: int | None = None
) -> ThroughputCurve | None:
    """Return the curve of the chosen settings, from the config's batch upward; None if there are no rates for it.

    Args:
        request: the request that was tuned.
        target: the machine.
        choice: the chosen settings.
        host_bytes: memory of one process's host, in bytes; None takes the target's known value.
    """
    with phase("estimating larger batches", patience=SHORT):
        return _CurveEstimator(request, target, choice, host_bytes).run()


class _CurveEstimator:
    """Doubles the batch until the rate no longer rises, or until nothing larger fits.

    Args:
        request, target, choice, host_bytes: see `estimate_curve`.
    """

    def __init__(self, request: TuningRequest, target: Target, choice: TunedSettings, host_bytes: int | None):
        device_bytes = request.machine.device_bytes
        self._target = with_host_memory(target, device_bytes, host_bytes)
        self._cost_model = CostModel(request.config, self._target)
        self._budget = MemoryBudget(MemoryLimits.derive(self._target, device_bytes))
        self._fixed = BATCH_MODE_FIXED if request.mode == BATCH_MODE else frozenset(request.fixed)
        self._choice = choice
        # The fewest rows of a microbatch, over all devices, that are known not to fit.
        self._too_many_rows: int | None = None
        # The memory that the settings that were tried last exceed.
        self._exhausted = ""

    def run(self) -> ThroughputCurve | None:
        """Return the curve; None if the rates of the device are not published."""
        settings = self._choice.settings
        cost = self._cost_model.cost(settings)
        if cost is None or cost.time is None:
            return None
        if self._choice.compiled:
            self._budget.learn(settings, cost, self._choice.peak)
        item = self._cost_model.experiment(settings).data.item
        points = [self._build_point(settings, cost)]
        end: CurveEnd = "limit"
        exhausted = ""
        while points[-1].batch < MOST_BATCHES * points[0].batch:
            batch = 2 * points[-1].batch
            counts = self._list_accumulations(batch, points[-1].accumulate)
            larger = self._find_first_fit(batch, counts)
            if larger is None:
                end = "memory" if len(counts) > 1 else "no accumulation"
                exhausted = self._exhausted
                break
            points.append(larger)
            if points[-1].rate < LEAST_RISE * points[-2].rate:
                end = "flat"
                break
        return ThroughputCurve(item, tuple(points), end, exhausted)

    def _join_settings(self, batch: int, accumulate: int) -> Settings:
        changed = (setting(BATCH, batch), setting(ACCUMULATE, accumulate))
        return select_changes(self._cost_model.config, (*self._choice.settings, *changed))

    def _list_accumulations(self, batch: int, least: int) -> list[int]:
        """Return the possible numbers of microbatches of a batch, smallest first.

        Args:
            batch: global batch size, in rows.
            least: number of microbatches of the next smaller batch, which needs no fewer.
        """
        settings = self._join_settings(batch, least)
        # Gradients that are freed after each layer's update cannot be accumulated.
        if self._cost_model.experiment(settings).memory.traits.updates_in_backward:
            return [least]
        config = with_settings(self._cost_model.config, settings)
        # The search space knows where else the number of microbatches may not change.
        space = SearchSpace(config, self._target, self._fixed)
        return [count for count in space.accumulations(()) if count >= least]

    def _find_first_fit(self, batch: int, counts: list[int]) -> ThroughputPoint | None:
        """Return the point with the fewest microbatches that fit; None if no number of them does.

        Args:
            batch: global batch size, in rows.
            counts: possible numbers of microbatches, smallest first.
        """
        for accumulate in counts:
            settings = self._join_settings(batch, accumulate)
            rows = batch // accumulate
            # Not estimated again: more microbatches with this many rows do not need less memory.
            if self._too_many_rows is not None and rows >= self._too_many_rows:
                continue
            cost = self._cost_model.cost(settings)
            if cost is None:
                continue
            if self._budget.fits(settings, cost):
                return self._build_point(settings, cost)
            self._too_many_rows = rows
            over_by_memory = {"device": self._budget.over(settings, cost), "host": self._budget.host_over(cost)}
            self._exhausted = " and ".join(name for name, over in over_by_memory.items() if over > 0)
        return None

    def _build_point(self, settings: Settings, cost: SettingsCost) -> ThroughputPoint:
        experiment: Experiment = self._cost_model.experiment(settings)
        time = report_time(cost.time, experiment, self._target)
        assert time is not None
        data = experiment.data
        return ThroughputPoint(
            batch=data.global_batch_size,
            accumulate=experiment.learner.accumulate,
            tokens_per_step=data.global_batch_size * data.seq_len,
            device_peak_bytes=self._budget.peak(settings, cost),
            host_need_bytes=cost.host_need,
            time=time,
        )
