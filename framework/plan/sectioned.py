"""An experiment as the closed form sees it: with sections in the place of stacks that are cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from framework.layers.stack import Stack
from framework.layout import Nested
from framework.models.chain import Chain
from framework.program.experiment import Experiment
from framework.schedules.sections import sections_of
from framework.schedules.storage import Parts


@dataclass(frozen=True)
class Sectioned:
    """Model and state of an experiment, where every stack lives and is recomputed alike.

    With memory.update = layer_programs too, whose state has each layer by itself.
    """

    experiment: Experiment

    @cached_property
    def _parts(self) -> Parts:
        experiment = self.experiment
        sections = sections_of(experiment.model, experiment.memory)
        return Parts.of_sections(experiment.model, experiment.memory, sections)

    @cached_property
    def model(self) -> Chain:
        """The model with sections as stages."""
        experiment = self.experiment
        sections = sections_of(experiment.model, experiment.memory)
        return experiment.model.in_sections(sections)

    @cached_property
    def specs(self) -> Nested:
        """The specs of the state, by group."""
        return self._parts.specs(self.experiment.state_specs())

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks by stage."""
        return self.model.stacks

    @cached_property
    def offloading_stacks(self) -> set[str]:
        """The stages of stacks whose kept activations go to host memory."""
        everything = self.experiment.memory.activations.hosts_everything
        offloading = set()
        for name, stack in self.stacks.items():
            if everything if stack.section is None else stack.section.offloads:
                offloading.add(name)
        return offloading

    @property
    def updates_in_backward(self) -> bool:
        """Whether each unit is updated when its gradient is there, which then is gone."""
        memory = self.experiment.memory
        return memory.update == "in_backward" or memory.updates_at_once

    def takes_gradients(self, stage: str) -> bool:
        """Whether a stage's gradients leave device memory as the backward pass makes them."""
        return self.updates_in_backward or stage in self.specs.get("gradient", {})
