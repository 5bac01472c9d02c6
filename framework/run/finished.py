"""Whether the run of a workdir has come to its end, so that the same command has nothing to do and changes nothing.

Looks at the newest checkpoint's manifest and at what the first process said last; nothing here starts JAX or writes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from framework.checkpoint.checkpointer import Checkpointer
from framework.checkpoint.directory import CheckpointError, folder
from framework.config import Config
from framework.config.changes import config_changes
from framework.processes.health import read


@dataclass(frozen=True)
class LastCheckpoint:
    """The newest checkpoint of a workdir.

    Attributes:
      directory: that it is in.
      step: how many steps it has taken.
      config: of the run that wrote it, as JSON; its `trainer.max_steps` is where that run ended, or was to end.
      data: where its data stood, as JSON; see `framework.run.resuming.position`.
      complete: whether what follows the last step (evaluation, samples) was done too, as far as anyone has said.
    """

    directory: Any
    step: int
    config: dict[str, Any]
    data: dict[str, Any]
    complete: bool

    def ends(self, max_steps: int) -> bool:
        """Whether a run of so many steps has nothing left to do. A run that was killed after the save of its last step
        and before its end has: the evaluation of what it saved."""
        return self.step > max_steps or (self.step == max_steps and self.complete)

    def refuse(self) -> None:
        """Raises ValueError: nothing is to be resumed, and a run that starts would replace what is there."""
        raise ValueError(
            f"--resume=never, but {self.directory} holds checkpoints up to step {self.step}; choose another --workdir, "
            "or remove them"
        )

    def lines(self, max_steps: int, config: Config) -> list[str]:
        """The lines that tell the user what differs from the run that ended here, and that there is nothing to do."""
        # The stored config has the length in steps, so epochs are compared by the steps that they
        # are.
        resolved_config = config.copy()
        resolved_config.trainer.max_steps = max_steps
        changes = config_changes(self.config, resolved_config.to_dict())
        return [
            *(f"config changed since the checkpoint: {change}" for change in changes),
            f"step {self.step} of {max_steps}: nothing to do ({self.directory}; trainer.max_steps is where a run ends)",
        ]


def last_checkpoint(workdir: str | os.PathLike[str]) -> LastCheckpoint | None:
    """The newest checkpoint of a workdir. None: there is none, or it cannot be read, which the start will report."""
    root = folder(os.path.expanduser(workdir))
    checkpointer = Checkpointer(directory=root / "checkpoints", read_only=True)
    steps = checkpointer.steps()
    if not steps:
        return None
    last_step = max(steps)
    try:
        extra = checkpointer.manifest(last_step).extra
        config = extra["config"]
        data = extra["data"]
    except (CheckpointError, KeyError):
        return None
    # A run killed after its last save has a checkpoint at its end too, and still has to evaluate.
    last_words = read(root / "health" / "process-00000.json")
    complete = last_words is None or last_words.get("exit") == 0
    return LastCheckpoint(root / "checkpoints", last_step, config, data, complete)


def known_length(config: Config) -> int | None:
    """The step at which a run of this config ends, at the latest. None: only the data or the machine tells."""
    # A rule may change the length on some accelerators, and JAX has not looked for them yet.
    for rule in config.accelerator_rules:
        if any(path.startswith("trainer.") for path in rule.set):
            return None
    return config.trainer.max_steps
