"""The closed forms of many settings of one config, which share the traces that they have in common.

A trace takes most of an estimate's time, and depends on little: the rows that a device has at once, the axes that cut
weights and positions, what is recomputed, and whether the weights come from the host.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr

from framework.config import Config
from framework.layers.base import batch_shards
from framework.plan.auto.settings import Settings, with_settings
from framework.plan.estimate import estimate
from framework.plan.local_step import trace
from framework.plan.plan import closed_time
from framework.plan.sectioned import Sectioned
from framework.plan.suggest import check, state_bytes
from framework.plan.targets import Target
from framework.program.experiment import Experiment


class Cost(NamedTuple):
    """What a setting costs on a target.

    Attributes:
        peak: bytes of one device.
        state: those of them that live there between steps.
        host: bytes of one device in its host's memory.
        seconds: of a step; infinite where the rates of the device are not published.
        moved: bytes whose time the link to the host takes in a step, see `Work.link_bytes`.
    """

    peak: int
    state: int
    host: int
    seconds: float
    moved: float


class ClosedForms:
    """Answers what settings of a config cost, each asked once.

    Args:
        config: resolved for the target.
        target: the machine.
    """

    def __init__(self, config: Config, target: Target):
        self.config = config
        self.target = target
        self._costs: dict[Settings, Cost | None] = {}
        self._traces: dict[tuple[object, ...], ClosedJaxpr] = {}
        self._parts: dict[str, object] = {}

    @property
    def count(self) -> int:
        """How many settings were asked for."""
        return len(self._costs)

    def experiment(self, settings: Settings) -> Experiment:
        """The experiment with these settings, to be looked at only. Raises ValueError: there is no such.

        Most of an experiment is alike for all settings, and is built once.
        """
        config = with_settings(self.config, settings)
        model = self._part("model", config.model, ())
        data = self._part("data", config.data, settings)
        learner = self._learner(config, settings, model, data)
        return config.instantiate(model=model, data=data, learner=learner)

    def _learner(self, config: Config, settings: Settings, model: Any, data: Any) -> Any:
        """The learner of a config, which only a whole experiment builds."""
        key = _key("learner", settings)
        if key not in self._parts:
            experiment: Experiment = config.instantiate(model=model, data=data)
            self._parts[key] = experiment.learner
        return self._parts[key]

    def _part(self, section: str, config: Config, settings: Settings) -> Any:
        key = _key(section, settings)
        if key not in self._parts:
            self._parts[key] = config.instantiate()
        return self._parts[key]

    def cost(self, settings: Settings) -> Cost | None:
        """What the settings cost; None where they do not go with the config or the target."""
        if settings not in self._costs:
            try:
                self._costs[settings] = self._cost(settings)
            except ValueError:
                self._costs[settings] = None
        return self._costs[settings]

    def leave_out(self, settings: Settings) -> None:
        """Takes settings for ones that cannot be."""
        self._costs[settings] = None

    def known(self) -> dict[Settings, Cost]:
        """What was asked for so far, and can be."""
        return {settings: cost for settings, cost in self._costs.items() if cost is not None}

    def _cost(self, settings: Settings) -> Cost:
        experiment = self.experiment(settings)
        sizes = check(experiment, self.target)
        need = estimate(experiment, sizes, self.target.spec, self._trace)
        time = closed_time(experiment, need, self.target)
        return Cost(
            peak=need.peak_bytes,
            state=state_bytes(need),
            host=need.host_bytes,
            seconds=math.inf if time is None else time.seconds,
            moved=need.work.link_bytes,
        )

    def _trace(self, sectioned: Sectioned, sizes: dict[str, int], platform: str) -> ClosedJaxpr:
        """The trace of an experiment, or of another one that is traced alike."""
        experiment = sectioned.experiment
        memory = experiment.memory
        rows = experiment.data.global_batch_size // (experiment.learner.accumulate * batch_shards(sizes))
        cuts = tuple(size for axis, size in sizes.items() if axis != "data")
        # Where layers are placed by their number, a stack is traced in sections.
        placements = (memory.gradients, memory.optimizer_state, memory.activations)
        numbers = tuple(placement.text for placement in placements if placement.is_partial)
        key = (rows, cuts, memory.remat, memory.parameters.text, numbers)
        if key not in self._traces:
            self._traces[key] = trace(sectioned, sizes, platform)
        return self._traces[key]


def _key(section: str, settings: Settings) -> str:
    """A section of the config, with what settings change in it."""
    return section + repr([one for one in settings if one.path.startswith(f"{section}.")])
