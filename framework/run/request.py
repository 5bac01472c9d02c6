"""The request for a run, from `plimsoll train` or `pl.train`. Nothing here starts JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plimsoll.framework.config import Config

if TYPE_CHECKING:
    from plimsoll.framework.metrics.goodput import Goodput
    from plimsoll.framework.program.experiment import Experiment

# The file of a workdir that has the choice of memory.auto.
TUNING_FILE = "auto.json"


class RunError(RuntimeError):
    """A run ended before its last step for a reason other than a user error; the run has printed the reason.

    Args:
        message: reason why the run ended.
        code: exit code that `plimsoll train` returns for the same reason.
    """

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class TuneResult:
    """The outcome of memory.auto for a run.

    Attributes:
        config: config with the chosen settings.
        lines: lines to show to the user.
        record: JSON record of the choice, for the workdir.
    """

    config: Config
    lines: list[str]
    record: dict[str, object]


@dataclass(frozen=True)
class RunRequest:
    """A training run as requested by a command line or a program.

    Attributes:
        spec: name of the config.
        notes: lines that the run shows first.
        config: the config, without accelerator rules applied.
        override_paths: paths of the fields that the command line or the program sets.
        resolve: returns (the config for an accelerator, a line for each field that its rules changed).
        experiment: the experiment of `config`; building it has validated the config.
        folder: the workdir, or its URL.
        goodput: accounting of this process's time, which began when the process did.
        limit: bytes of device memory that the run may use; None for all of the device memory.
        host_limit: bytes of host memory that the run may use, on each machine; None for what is free.
        resume: what to do if there are checkpoints: resume if there are any, refuse to, or require them.
        force: resume on different data, and train even if the step does not fit.
        dry_run: compile the step, but do not train.
        tune_memory: chooses the settings of a config that sets memory.auto, for the workdir at a path. Collective;
            raises DoesNotFitError.
    """

    spec: str
    notes: list[str]
    config: Config
    override_paths: tuple[str, ...]
    resolve: Callable[[str], tuple[Config, list[str]]]
    experiment: Experiment
    folder: str | Path
    goodput: Goodput
    tune_memory: Callable[[RunRequest, Config, Path], TuneResult]
    limit: int | None = None
    host_limit: int | None = None
    resume: Literal["auto", "never", "must"] = "auto"
    force: bool = False
    dry_run: bool = False
