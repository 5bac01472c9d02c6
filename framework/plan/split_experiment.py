"""View of an experiment for the analytical estimate: stacks are replaced by their layer ranges."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import TrainState
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.schedules.layer_ranges import split_stacks
from plimsoll.framework.schedules.stack_parts import StackParts


@dataclass(frozen=True)
class SplitExperiment:
    """Model and state of an experiment, with stacks split so that each has uniform offload and remat settings.

    This holds for memory.update = layer_programs too, whose actual state stores each layer separately.
    """

    experiment: Experiment

    @cached_property
    def _parts(self) -> StackParts:
        experiment = self.experiment
        layer_ranges = split_stacks(experiment.model, experiment.memory)
        return StackParts.from_layer_ranges(experiment.model, experiment.memory, layer_ranges)

    @cached_property
    def model(self) -> Chain:
        """The model with layer ranges as stages."""
        experiment = self.experiment
        layer_ranges = split_stacks(experiment.model, experiment.memory)
        return experiment.model.split_into_ranges(layer_ranges)

    @cached_property
    def specs(self) -> TrainState:
        """Specs of the state."""
        return self._parts.specs(self.experiment.state_specs())

    @property
    def stacks(self) -> dict[str, Stack]:
        """{stage: stack} of the model."""
        return self.model.stacks

    @cached_property
    def offloading_stacks(self) -> set[str]:
        """Stages of the stacks whose saved activations are offloaded."""
        everything = self.experiment.memory.activations.offloads_everything
        offloading = set()
        for name, stack in self.stacks.items():
            if everything if stack.layer_range is None else stack.layer_range.offloads:
                offloading.add(name)
        return offloading

    @property
    def updates_in_backward(self) -> bool:
        """True if each layer is updated as soon as its gradient is computed, which then is freed."""
        return self.experiment.memory.traits.updates_in_backward

    def releases_gradients(self, stage: str) -> bool:
        """Return whether a stage's gradients leave device memory as soon as the backward pass computes them."""
        return self.updates_in_backward or stage in self.specs.gradient
