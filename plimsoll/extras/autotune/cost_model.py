"""Analytical estimates for many settings of one config, with shared traces.

Tracing takes most of an estimate's time, but a trace depends on few settings, see `TraceCache`.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr

from plimsoll.extras.autotune.settings import REMAT, UPDATE, Settings, get_text, with_settings
from plimsoll.framework.config import Config
from plimsoll.framework.plan.build_report import estimate_step_time
from plimsoll.framework.plan.device_trace import TraceCache
from plimsoll.framework.plan.estimate import estimate
from plimsoll.framework.plan.host_memory import PROCESS_BYTES, PROGRAM_BYTES, build_host_model
from plimsoll.framework.plan.plan_report import PhaseReport
from plimsoll.framework.plan.split_experiment import SplitExperiment
from plimsoll.framework.plan.step_time.time_breakdown import StepTime
from plimsoll.framework.plan.suggest import check_target, state_bytes
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program.experiment import Experiment


class SettingsCost(NamedTuple):
    """Estimated cost of settings on a target.

    Attributes:
        peak: peak bytes of one device.
        state: the part of `peak` that stays allocated between steps.
        host: arrays in host memory, in bytes per device.
        host_need: everything that the memory of a host has to hold, in bytes; see `HostMemoryModel`.
        seconds: time of a step; infinite if the rates of the device are not published.
        moved: bytes that occupy the link to the host in a step, see `StepWork.link_bytes`.
        time: the parts of `seconds`; None if the rates of the device are not published.
    """

    peak: int
    state: int
    host: int
    host_need: int
    seconds: float
    moved: float
    time: StepTime | None = None


@contextlib.contextmanager
def thawing_traces() -> Iterator[None]:
    """Return traces to the garbage collector at the end, from which `CostModel` keeps them."""
    try:
        yield
    finally:
        gc.unfreeze()


class CostModel:
    """Estimates the cost of settings of a config, and caches the results.

    Args:
        config: config, resolved for the target.
        target: the machine.
    """

    def __init__(self, config: Config, target: Target):
        self.config = config
        self.target = target
        self._costs: dict[Settings, SettingsCost | None] = {}
        self._traces = TraceCache()
        self._components: dict[str, object] = {}

    @property
    def count(self) -> int:
        """The number of settings that were estimated so far."""
        return len(self._costs)

    def experiment(self, settings: Settings) -> Experiment:
        """Return the experiment with these settings. It shares components with others, so do not modify it.

        Most components of an experiment are the same for all settings, and are built once. Raises ValueError if the
        settings are not possible.
        """
        config = with_settings(self.config, settings)
        model = self._get_component("model", config.model, settings)
        data = self._get_component("data", config.data, settings)
        learner_key = _component_key("learner", settings)
        if learner_key not in self._components:
            # The learner's config lacks what it needs from the model and the data, so build a whole experiment.
            experiment: Experiment = config.instantiate(model=model, data=data)
            self._components[learner_key] = experiment.learner
        return config.instantiate(model=model, data=data, learner=self._components[learner_key])

    def _get_component(self, section: str, config: Config, settings: Settings) -> Any:
        key = _component_key(section, settings)
        if key not in self._components:
            self._components[key] = config.instantiate()
        return self._components[key]

    def cost(self, settings: Settings) -> SettingsCost | None:
        """Return the cost of settings; None if they are not compatible with the config or the target."""
        if settings not in self._costs:
            try:
                self._costs[settings] = self._cost(settings)
            except ValueError:
                self._costs[settings] = None
        return self._costs[settings]

    def exclude(self, settings: Settings) -> None:
        """Mark settings as impossible."""
        self._costs[settings] = None

    def get_possible_costs(self) -> dict[Settings, SettingsCost]:
        """Return the possible settings that were estimated so far, with their costs."""
        return {settings: cost for settings, cost in self._costs.items() if cost is not None}

    def _cost(self, settings: Settings) -> SettingsCost:
        experiment = self.experiment(settings)
        sizes = check_target(experiment, self.target)
        num_slices = self.target.num_slices
        need = estimate(experiment, sizes, self.target.spec, self._trace, num_slices=num_slices)
        time = estimate_step_time(experiment, need, self.target)
        state = state_bytes(need)
        host_model = build_host_model(experiment, need.layout, self.target)
        # The step on a CPU counts with the memory of its devices, see `MemoryLimits.derive`.
        step = PhaseReport(state if self.target.platform == "cpu" else need.peak_bytes, need.host_bytes)
        return SettingsCost(
            peak=need.peak_bytes,
            state=state,
            host=need.host_bytes,
            host_need=host_model.report(host_model.checkpoint_peaks() | {"train": step}).peak_bytes,
            seconds=math.inf if time is None else time.seconds,
            moved=need.work.link_bytes,
            time=time,
        )

    def _trace(
        self, split_experiment: SplitExperiment, sizes: dict[str, int], platform: str, *, pipe_chunks: int = 1
    ) -> ClosedJaxpr:
        """Return the trace of an experiment; experiments with the same key share one."""
        num_traces = len(self._traces)
        traced = self._traces(split_experiment, sizes, platform, pipe_chunks=pipe_chunks)
        if len(self._traces) > num_traces:
            # Traces stay until the search is over (`thawing_traces`), and have millions of objects. Without this, the
            # garbage collector visits all of them again and again, which took a third of the time of a long search.
            gc.freeze()
        return traced


def _component_key(section: str, settings: Settings) -> str:
    """Return a cache key: the name of a section of the config, with the settings that change it."""
    return section + repr([one for one in settings if one.path.startswith(f"{section}.")])


# Fractions of the limit: the most that the result may use, and what the estimate aims at.
MOST_USED = 0.98
_AIMED_FRACTION = 0.965
# How far to lower the aim after a candidate turned out too big when compiled.
_AIM_STEP = 0.02
# If the memory of a host is unknown, assume this multiple of the memory of its devices: hosts usually have two to four
# times as much.
ASSUMED_HOST = 3
# But at least this many bytes.
_LEAST_ASSUMED_HOST = 16 << 30
_SCALE_RANGE = (0.5, 2.0)


class Candidate(NamedTuple):
    """Settings with their cost.

    Attributes:
        settings: settings that differ from the config.
        cost: cost by the analytical estimate.
        peak: peak bytes of one device: compiled if available, else the corrected estimate.
    """

    settings: Settings
    cost: SettingsCost
    peak: int


class MemoryLimits(NamedTuple):
    """Memory that settings may use.

    Attributes:
        device: bytes of device memory, per device; None if unknown.
        host: bytes of each host's memory; None if unknown.
    """

    device: int | None
    host: int | None

    @staticmethod
    def derive(target: Target, device: int | None) -> MemoryLimits:
        """Return the limits on a target.

        Args:
            target: the machine.
            device: bytes that one device may use; None if unknown.
        """
        host = target.host_limit_bytes
        num_local_devices = target.num_devices // target.num_processes
        if target.platform == "cpu" and host is not None and device is not None:
            # The devices have what the process leaves of the machine's memory.
            left_bytes = host - PROCESS_BYTES["cpu"] - PROGRAM_BYTES["cpu"]
            return MemoryLimits(min(device, max(left_bytes, 0) // num_local_devices), host)
        return MemoryLimits(device, host)


def with_host_memory(target: Target, device: int | None, host: int | None) -> Target:
    """Return the target with the memory of its hosts.

    Args:
        target: the machine.
        device: bytes that one device may use; None if unknown.
        host: memory of each host, in bytes; None takes the target's own, or an assumption if that is unknown.
    """
    if host is None and target.host_limit_bytes is None and device is not None:
        devices_bytes = device * target.num_devices // target.num_processes
        host = max(ASSUMED_HOST * devices_bytes, _LEAST_ASSUMED_HOST)
    return target if host is None else replace(target, host_bytes=host)


@dataclass
class MemoryBudget:
    """Decides whether settings fit: by the compiled size if known, else by the analytical estimate.

    Attributes:
        limits: limits of one device.
        scales: correction factors for the estimated bytes other than the state, by (schedule, remat policy).
        compiled: compiled bytes of one device, by settings.
        aim: fraction of the device limit that an estimated peak may use.
        scale: correction factor for schedules and policies without an entry in `scales`.
    """

    limits: MemoryLimits
    scales: dict[tuple[str | None, str | None], float] = field(default_factory=dict)
    compiled: dict[Settings, int] = field(default_factory=dict)
    aim: float = _AIMED_FRACTION
    scale: float = 1.0

    def peak(self, settings: Settings, cost: SettingsCost) -> int:
        """Return the peak bytes of one device: compiled if known, else the corrected estimate.

        Args:
            settings: settings of the config.
            cost: their estimated cost.
        """
        if settings in self.compiled:
            return self.compiled[settings]
        scale = self.scales.get(_scale_key(settings), self.scale)
        # The size of the state is exact. Only the estimate of the rest, such as residuals and temporaries, is scaled.
        return int(cost.state + scale * (cost.peak - cost.state))

    def over(self, settings: Settings, cost: SettingsCost) -> int:
        """Return by how many bytes the settings exceed the usable device memory; negative if there is room left.

        Args:
            settings: settings of the config.
            cost: their estimated cost.
        """
        if self.limits.device is None:
            return -1
        # An estimate may be too low, so it has to leave a larger margin than a compiled size.
        usable = self.limits.device * (MOST_USED if settings in self.compiled else self.aim)
        return self.peak(settings, cost) - int(usable)

    def host_over(self, cost: SettingsCost) -> int:
        """Return by how many bytes the settings exceed the memory of a host; negative if there is room left."""
        return -1 if self.limits.host is None else cost.host_need - self.limits.host

    def fits(self, settings: Settings, cost: SettingsCost | None) -> bool:
        """Return whether device and host have room for the settings.

        Args:
            settings: settings of the config.
            cost: their estimated cost; None if they are not possible.
        """
        return cost is not None and self.over(settings, cost) <= 0 and self.host_over(cost) <= 0

    def learn(self, settings: Settings, cost: SettingsCost, compiled: int) -> None:
        """Record the compiled bytes of settings and update the correction factors.

        Args:
            settings: settings that were compiled.
            cost: their estimated cost.
            compiled: bytes that the compiled program needs on one device.
        """
        self.compiled[settings] = compiled
        # The clamp keeps one unusual program from distorting the estimates of all other settings.
        low, high = _SCALE_RANGE
        scale = (compiled - cost.state) / max(cost.peak - cost.state, 1)
        self.scale = min(max(scale, low), high)
        self.scales[_scale_key(settings)] = self.scale
        if self.limits.device is not None and compiled > self.limits.device:
            self.aim -= _AIM_STEP


def _scale_key(settings: Settings) -> tuple[str | None, str | None]:
    remat = get_text(settings, REMAT)
    # Count a mixture of two policies as its first one: their correction factors are nearly the same.
    policy = remat.partition(",")[0].partition(":")[0] if remat else remat
    return get_text(settings, UPDATE), policy
