"""A training job as requested by `plimsoll train` or `pl.train`. Nothing here starts JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from plimsoll.framework.config import Config

# The file of a workdir that has the choice of memory.auto.
TUNING_FILE = "auto.json"


class RunError(RuntimeError):
    """A run ended before its last step for a reason other than a user error.

    Args:
        message: reason why the run ended.
        code: exit code that `plimsoll train` returns for the same reason.
    """

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class Request(Protocol):
    """A config as requested by a command line or a program."""

    @property
    def spec(self) -> str:
        """The name of the config."""
        ...

    @property
    def notes(self) -> list[str]:
        """Lines that the run shows first."""
        ...

    @property
    def config(self) -> Config:
        """The config, without accelerator rules applied."""
        ...

    @property
    def override_paths(self) -> tuple[str, ...]:
        """The paths of the fields that the command line or the program sets."""
        ...

    def resolve(self, accelerator: str) -> tuple[Config, list[str]]:
        """Return (the config for that accelerator, a line for each field that its rules changed)."""
        ...


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


@dataclass
class Job:
    """A request together with the objects that were validated and opened for it."""

    request: Request
    experiment: Any  # built from the request's config, without accelerator rules
    folder: str | Path  # the workdir or its URL
    limit: int | None  # bytes of device memory that the run may use; None for all of the device memory
    goodput: Any
    # Calls the training and turns user errors into exit codes; other exceptions propagate.
    handle_errors: Callable[[Callable[[], int]], int]
    # Chooses the settings of a config that sets memory.auto. Collective. Raises DoesNotFitError.
    tune_memory: Callable[[Job, Config], TuneResult]
    resume: Literal["auto", "never", "must"] = "auto"  # what to do if there are checkpoints
    force: bool = False  # resume on different data; train even if the step does not fit
    dry_run: bool = False
    workdir: Any = field(init=False)  # opened when the run starts
    failure: BaseException | None = None  # the exception that ended training, if the exit code stands for one

    def rebuild_experiment(self, config: Config, rule_lines: list[str]) -> Any:
        """Return the experiment after the request's config was resolved for an accelerator.

        Args:
            config: resolved config.
            rule_lines: changes that rules made to it. If there are none, the experiment that was already built is
                returned.
        """
        return config.instantiate() if rule_lines else self.experiment
