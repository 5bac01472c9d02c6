"""Detects a run that has already finished, so that repeating its command does nothing and changes nothing.

Reads the newest checkpoint's manifest and the last status that process 0 wrote. Nothing here starts JAX or writes
files.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.checkpoint.directory import CheckpointError, folder
from plimsoll.framework.config import Config
from plimsoll.framework.config.accelerator_rules import find_accelerator_rules
from plimsoll.framework.config.changes import config_changes
from plimsoll.framework.config.nested import get_value_at
from plimsoll.framework.processes.health import read
from plimsoll.framework.terminal.exit_codes import COMPLETED

# Config fields that say which model was trained, and on what.
_IDENTITY = ("$class", "model.", "data.$class", "data.source", "data.tokenizer")


@dataclass(frozen=True)
class LastCheckpoint:
    """The newest checkpoint of a workdir.

    Attributes:
        directory: directory of the checkpoints.
        step: number of steps taken.
        config: config of the run that wrote it, as JSON. Its `trainer.max_steps` is the last step of that run.
        data: position in the data, as JSON; see `framework.run.resuming.position`.
        complete: whether the work after the last step (evaluation, samples) is done too, as far as the workdir
            records.
        stop_reason: reason why trainer.stop or a hook ended the run at this step; None if the run may go on.
    """

    directory: Any
    step: int
    config: dict[str, Any]
    data: dict[str, Any]
    complete: bool
    stop_reason: str | None = None

    def ends(self, max_steps: int) -> bool:
        """Return whether a run of `max_steps` steps has nothing left to do.

        A run that was killed between the save of its last step and its end still has to evaluate that step.
        """
        return self.step > max_steps or (self.step == max_steps and self.complete)

    def has_stopped(self, config: Config) -> bool:
        """Return whether a rule of trainer.stop has ended the run, and the config still has the same rules.

        A run that a hook has stopped continues: only the hook knows whether it should.
        """
        rules = self.config["trainer"].get("stop")
        # The field of the rule is part of the reason.
        is_rule = isinstance(self.stop_reason, str) and "trainer.stop." in self.stop_reason
        return is_rule and self.complete and not config_changes(rules, config.trainer.to_dict()["stop"])

    def may_belong_to_another_run(self, config: Config) -> bool:
        """Return whether the model or the source of the data differs from that of the run that wrote the checkpoint.

        Many fields of a model do not change its leaves, and the same text may have another path. So `resuming.check`
        decides, which needs the program and its data.
        """
        # Rules change the config once the accelerator is known. The stored config contains their changes.
        rules = config.accelerator_rules if config.takes("accelerator_rules") else []
        ruled = tuple(path for rule in rules for path in rule.set)
        for change in config_changes(self.config, config.to_dict()):
            path = change.partition(":")[0].removeprefix("config.").replace("[", ".").replace("]", "")
            if path.startswith(_IDENTITY) and not path.startswith(ruled):
                return True
        return False

    def stop_lines(self) -> list[str]:
        """Return the lines that report that the run was stopped early, and that there is nothing to do."""
        return [
            f"step {self.step}: stopped early: {self.stop_reason}: nothing to do ({self.directory}; other rules of "
            "trainer.stop continue the run)"
        ]

    def lines(self, max_steps: int, config: Config, override_paths: Collection[str] = ()) -> list[str]:
        """Return the lines that report config changes since the run ended, and that there is nothing to do.

        Args:
            max_steps: the step at which a run of `config` ends.
            config: the config, with or without accelerator rules applied.
            override_paths: paths of the fields that no rule may change.
        """
        # The stored config gives the length in steps, so convert epochs to steps before comparing.
        resolved_config = self._apply_rules(config.copy(), override_paths)
        resolved_config.trainer.max_steps = max_steps
        changes = config_changes(self.config, resolved_config.to_dict())
        return [
            *(f"config changed since the checkpoint: {change}" for change in changes),
            f"step {self.step} of {max_steps}: nothing to do ({self.directory}; trainer.max_steps sets the last step)",
        ]

    def _apply_rules(self, config: Config, override_paths: Collection[str]) -> Config:
        """Return the config with the values that a rule sets and the stored config has: the run applied that rule.

        The accelerator is unknown before JAX starts.
        """
        for rule in find_accelerator_rules(config, None).values():
            for path, value in rule.set.items():
                if any(path == one or path.startswith(f"{one}.") for one in override_paths):
                    continue
                changed = config.copy()
                changed.set_path(path, value)
                stored = get_value_at(self.config, path)
                if not config_changes(stored, get_value_at(changed.to_dict(), path)):
                    config = changed
        return config


def find_last_checkpoint(workdir: str | os.PathLike[str]) -> LastCheckpoint | None:
    """Return the newest checkpoint of a workdir. None: there is none, or it is unreadable."""
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
        # The start of the run reports the unreadable checkpoint.
        return None
    # A run killed after its last save has a checkpoint of its last step but still has to evaluate.
    last_status = read(root / "health" / "process-00000.json")
    complete = last_status is None or last_status.get("exit") in COMPLETED
    return LastCheckpoint(root / "checkpoints", last_step, config, data, complete, extra.get("stop_reason"))


def get_run_length(config: Config) -> int | None:
    """Return the step at which a run of this config ends at the latest; None if it depends on data or machine."""
    # A rule may change the length on some accelerators, and JAX has not detected the devices yet.
    for rule in config.accelerator_rules:
        if any(path.startswith("trainer.") for path in rule.set):
            return None
    return config.trainer.max_steps
