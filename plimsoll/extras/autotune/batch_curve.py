"""Estimates tokens per second of the chosen settings at larger batches, as far as device and host memory allow.

Only the number of microbatches and the placements follow the batch: mesh, remat and schedule stay as chosen.
"""

from __future__ import annotations

from plimsoll.extras.autotune.autotune import BATCH_MODE, BATCH_MODE_FIXED
from plimsoll.extras.autotune.cost_model import (
    Candidate,
    CostModel,
    MemoryBudget,
    MemoryLimits,
    SettingsCost,
    with_host_memory,
)
from plimsoll.extras.autotune.search_space import OffloadLevels, SearchSpace
from plimsoll.extras.autotune.settings import (
    ACCUMULATE,
    ACCUMULATE_BY,
    BATCH,
    CLIP_MODE,
    GRADIENTS,
    PLACEMENT_FIELDS,
    UPDATE,
    Settings,
    TunedSettings,
    TuningRequest,
    flags,
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

# If placements have to change, the curve takes the fastest of this many numbers of microbatches that fit.
_MOST_COMPARED = 2


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
        # The settings of the largest batch so far, from which the next one starts.
        self._settings = choice.settings
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
            space = self._build_space(batch, points[-1].accumulate)
            counts = self._list_accumulations(space, points[-1].accumulate)
            larger = self._find_fastest(space, batch, counts)
            if larger is None:
                end = "memory" if len(counts) > 1 else "no accumulation"
                exhausted = self._exhausted
                break
            self._settings = larger.settings
            points.append(self._build_point(larger.settings, larger.cost))
            # One doubling is not enough: other placements or a first sum of gradients can cost as much as it gains.
            if len(points) > 2 and points[-1].rate < LEAST_RISE * points[-3].rate:
                end = "flat"
                break
        return ThroughputCurve(item, tuple(points), end, exhausted)

    def _join_settings(self, batch: int, accumulate: int, order: str) -> Settings:
        changed = (setting(BATCH, batch), setting(ACCUMULATE, accumulate), setting(ACCUMULATE_BY, order))
        return select_changes(self._cost_model.config, (*self._settings, *changed))

    def _build_space(self, batch: int, accumulate: int) -> SearchSpace:
        """Return the search space of the chosen settings at another batch.

        Args:
            batch: global batch size, in rows.
            accumulate: number of microbatches that is possible for this batch.
        """
        (order, *_) = self._list_orders(accumulate)
        config = with_settings(self._cost_model.config, self._join_settings(batch, accumulate, order))
        return SearchSpace(config, self._target, self._fixed)

    def _list_accumulations(self, space: SearchSpace, least: int) -> list[int]:
        """Return the possible numbers of microbatches of a batch, smallest first.

        Args:
            space: search space of the batch.
            least: number of microbatches of the next smaller batch, which needs no fewer.
        """
        # Gradients that are freed after each layer's update cannot be accumulated from one pass to the next.
        if self._updates_in_backward and "layer" not in self._list_orders(least + 1):
            return [least]
        return [count for count in space.accumulations(()) if count >= least]

    @property
    def _updates_in_backward(self) -> bool:
        return self._cost_model.experiment(self._choice.settings).memory.traits.updates_in_backward

    def _list_orders(self, accumulate: int) -> list[str]:
        """Return the possible values of memory.accumulate_by, the preferred one first.

        Args:
            accumulate: number of microbatches.
        """
        memory = self._cost_model.experiment(self._choice.settings).memory
        traits = memory.traits
        is_possible = traits.is_many_programs or (traits.needs_stack and self._target.platform == "tpu")
        if ACCUMULATE_BY in self._fixed or accumulate == 1 or not is_possible:
            return [memory.accumulate_by]
        if traits.updates_in_backward or memory.delays_update or memory.speculates:
            return ["layer"]
        return ["layer", "microbatch"] if traits.is_many_programs else ["microbatch", "layer"]

    def _find_fastest(self, space: SearchSpace, batch: int, counts: list[int]) -> Candidate | None:
        """Return the faster of the two fewest numbers of microbatches that fit; None if no number of them does.

        Args:
            space: search space of the batch.
            batch: global batch size, in rows.
            counts: possible numbers of microbatches, smallest first.
        """
        fitting: list[Candidate] = []
        for accumulate in counts:
            rows = batch // accumulate
            # Not estimated again: more microbatches with this many rows do not need less memory.
            if self._too_many_rows is not None and rows >= self._too_many_rows:
                continue
            fits = []
            is_unchanged = False
            for order in self._list_orders(accumulate):
                settings = self._join_settings(batch, accumulate, order)
                fit = self._fit(space, settings)
                if fit is not None:
                    fits.append(fit)
                    is_unchanged |= fit.settings == settings
            if not fits:
                self._too_many_rows = rows
                continue
            fitting.append(min(fits, key=lambda fit: fit.cost.seconds))
            # With the same placements, more microbatches are not faster.
            if is_unchanged or len(fitting) == _MOST_COMPARED:
                break
        return min(fitting, key=lambda fit: fit.cost.seconds, default=None)

    def _fit(self, space: SearchSpace, settings: Settings) -> Candidate | None:
        """Return the settings if they fit, else the fastest ones that fit with other placements; None if none do.

        Args:
            space: search space of their batch.
            settings: the settings of the next smaller batch, with this batch.
        """
        cost = self._cost_model.cost(settings)
        if cost is not None and self._budget.fits(settings, cost):
            return Candidate(settings, cost, self._budget.peak(settings, cost))
        if cost is not None:
            over_by_memory = {"device": self._budget.over(settings, cost), "host": self._budget.host_over(cost)}
            self._exhausted = " and ".join(name for name, over in over_by_memory.items() if over > 0)
        # What the schedule itself sets stays: memory.gradients = none is no placement.
        paths = (UPDATE, CLIP_MODE, ACCUMULATE_BY)
        schedule = [one for one in settings if one.path in paths or one == setting(GRADIENTS, "none")]
        kept = [
            one for one in settings if one.path not in PLACEMENT_FIELDS or one in schedule or one.path in self._fixed
        ]
        levels = OffloadLevels(self._estimate_cost, self._budget, space)
        orders = space.offload_orders(tuple(schedule))
        fits = [levels.find_cheapest_fit(tuple(kept), order) for order in orders]
        fastest = min((fit for fit in fits if fit is not None), key=lambda fit: fit.cost.seconds, default=None)
        return None if fastest is None else fastest._replace(settings=self._select(fastest.settings))

    def _select(self, settings: Settings) -> Settings:
        return select_changes(self._cost_model.config, settings)

    def _estimate_cost(self, settings: Settings) -> SettingsCost | None:
        return self._cost_model.cost(self._select(settings))

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
            overrides=flags(settings),
            time=time,
        )
