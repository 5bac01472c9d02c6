"""Programs of the stages of the training data: one for each shape of a batch, all with the same state.

A stage of the data may change the sequence length and the batch size (`framework.data.stages`). The layout of the state
does not depend on them, so a program continues with the state of another one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.framework.config import Config
from plimsoll.framework.data.order import BatchOrder
from plimsoll.framework.data.stages import Stage, find_stage
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import Program


@dataclass(frozen=True)
class StageProgram:
    """The program of a stage.

    Attributes:
        stage: the stage; None if the data has no stages.
        program: its program, which other stages share if their batches have the same shape.
    """

    stage: Stage | None
    program: Program

    @property
    def label(self) -> str:
        """Name of the stage in messages; "" if the data has no stages."""
        return "" if self.stage is None else f"the stage from step {self.stage.start:,} on ({self.stage.describe()})"


def build_stage_programs(program: Program) -> list[StageProgram]:
    """Return the program of each stage, in order. `program` is that of the first one."""
    stages = program.experiment.data.stages
    if not stages:
        return [StageProgram(None, program)]
    programs = {(stages[0].seq_len, stages[0].batch_size): program}
    stage_programs = []
    for index, stage in enumerate(stages):
        shape = (stage.seq_len, stage.batch_size)
        if shape not in programs:
            programs[shape] = Program(get_stage_experiment(program.experiment, index), program.devices)
        stage_programs.append(StageProgram(stage, programs[shape]))
    return stage_programs


def get_stage_experiment(experiment: Experiment, index: int) -> Experiment:
    """Return the experiment with the data of one stage; everything else is shared."""
    other = copy.copy(experiment)
    other.data = experiment.data.at_stage(index)
    return other


def with_stage(config: Config, stage: Stage) -> Config:
    """Return a copy of an experiment's config whose data has the batches of one stage from the start."""
    config = config.copy()
    config.data.stages = {}
    config.data.seq_len = stage.seq_len
    config.data.global_batch_size = stage.batch_size
    return config


def list_shapes(stages: Sequence[Stage]) -> list[Stage]:
    """Return the first stage of each shape of a batch."""
    by_shape: dict[tuple[int, int], Stage] = {}
    for stage in stages:
        by_shape.setdefault((stage.seq_len, stage.batch_size), stage)
    return list(by_shape.values())


def find_largest(stages: Sequence[Stage]) -> Stage:
    """Return the stage whose step probably needs the most memory: most tokens, and of these the longest sequences."""
    return max(stages, key=lambda stage: (stage.tokens_per_step, stage.seq_len))


def with_largest_stage(config: Config) -> Config:
    """Return the config of a run for a plan of one step: with the data of the largest stage, if there are several."""
    if "data" not in config or not config.data.takes("stages") or not config.data.stages:
        return config
    stages = list_shapes(config.data.instantiate().stages)
    return config if len(stages) == 1 else with_stage(config, find_largest(stages))


def with_stage_at(config: Config, step: int | None, order: BatchOrder = BatchOrder()) -> Config:
    """Return the config of a run for the use of its model: with the data of the stage that it has reached.

    Args:
        config: config of an experiment.
        step: number of trained steps; None for the last stage.
        order: the batches of these steps. A stage starts at a batch, and a rollback leaves some out.
    """
    if not config.data.takes("stages") or not config.data.stages:
        return config
    stages = config.data.instantiate().stages
    return with_stage(config, stages[-1 if step is None else find_stage(stages, order.batch_after(max(step - 1, 0)))])
