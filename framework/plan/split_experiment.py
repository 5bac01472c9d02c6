"""View of an experiment for the analytical estimate: stacks are replaced by their layer ranges."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import TrainState, flatten
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.schedules.stack_layout import StackParts, split_stacks


@dataclass(frozen=True)
class SplitExperiment:
    """Model and state of an experiment, with stacks split so that each has uniform offload and remat settings.

    This holds for memory.update = layer_programs too, whose actual state stores each layer separately.
    """

    experiment: Experiment

    @cached_property
    def model(self) -> Chain:
        """The model with layer ranges as stages."""
        experiment = self.experiment
        layer_ranges = split_stacks(experiment.model, experiment.memory)
        return experiment.model.split_into_ranges(layer_ranges)

    @cached_property
    def specs(self) -> TrainState:
        """Specs of the state."""
        experiment = self.experiment
        layer_ranges = split_stacks(experiment.model, experiment.memory)
        parts = StackParts.from_layer_ranges(experiment.model, experiment.memory, layer_ranges)
        return parts.specs(experiment.state_specs())

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

    def releases_gradient(self, stage: str, path: str) -> bool:
        """Return whether the gradient of a parameter leaves device memory as soon as the backward pass computes it.

        Args:
            stage: name of the stage.
            path: path of the parameter within the stage.
        """
        updates_in_backward = self.experiment.memory.traits.updates_in_backward
        return updates_in_backward or f"{stage}/{path}" in self._buffered_gradients

    @cached_property
    def _buffered_gradients(self) -> frozenset[str]:
        """Paths of the gradients that have buffers in host memory, or belong to a stage whose gradients do."""
        return frozenset(flatten(self.specs.gradient))
