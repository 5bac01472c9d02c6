"""Analytical estimates for many settings of one config, with shared traces.

Tracing takes most of an estimate's time, but a trace depends on few settings: the rows per device and microbatch, the
mesh axes that shard weights and positions, the remat policy, whether the weights are offloaded, and the numbers of
layers in partial placements.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr

from plimsoll.extras.autotune.settings import Settings, with_settings
from plimsoll.framework.config import Config
from plimsoll.framework.layers.base import batch_shards
from plimsoll.framework.plan.build_report import estimate_step_time
from plimsoll.framework.plan.device_trace import trace
from plimsoll.framework.plan.estimate import estimate
from plimsoll.framework.plan.split_experiment import SplitExperiment
from plimsoll.framework.plan.suggest import check_target, state_bytes
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program.experiment import Experiment


class SettingsCost(NamedTuple):
    """Estimated cost of settings on a target.

    Attributes:
        peak: peak bytes of one device.
        state: the part of `peak` that stays allocated between steps.
        host: host memory per device, in bytes.
        seconds: time of a step; infinite if the rates of the device are not published.
        moved: bytes that occupy the link to the host in a step, see `StepWork.link_bytes`.
    """

    peak: int
    state: int
    host: int
    seconds: float
    moved: float


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
        self._traces: dict[tuple[object, ...], ClosedJaxpr] = {}
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
        # No setting changes the model, so all experiments share one.
        model = self._get_component("model", config.model, ())
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
        need = estimate(experiment, sizes, self.target.spec, self._trace)
        time = estimate_step_time(experiment, need, self.target)
        return SettingsCost(
            peak=need.peak_bytes,
            state=state_bytes(need),
            host=need.host_bytes,
            seconds=math.inf if time is None else time.seconds,
            moved=need.work.link_bytes,
        )

    def _trace(self, split_experiment: SplitExperiment, sizes: dict[str, int], platform: str) -> ClosedJaxpr:
        """Return the trace of an experiment; experiments with the same key share one."""
        experiment = split_experiment.experiment
        memory = experiment.memory
        rows = experiment.data.global_batch_size // (experiment.learner.accumulate * batch_shards(sizes))
        # The data axis shards only the batch, which `rows` covers.
        shards = tuple(size for axis, size in sizes.items() if axis != "data")
        # A partial placement (the first N layers) splits the stack into layer ranges, which are traced one by one.
        placements = (memory.gradients, memory.optimizer_state, memory.activations)
        partial = tuple(placement.text for placement in placements if placement.is_partial)
        key = (rows, shards, memory.remat, memory.parameters.text, partial)
        if key not in self._traces:
            self._traces[key] = trace(split_experiment, sizes, platform)
        return self._traces[key]


def _component_key(section: str, settings: Settings) -> str:
    """Return a cache key: the name of a section of the config, with the settings that change it."""
    return section + repr([one for one in settings if one.path.startswith(f"{section}.")])
