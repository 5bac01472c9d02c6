"""What is asked of a run, by `plimsoll train` or by `framework.train`. Nothing here starts JAX."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from framework.config import Config


class RunError(RuntimeError):
    """A run has ended before its last step, and not by a mistake in what was asked for.

    Args:
        message: why.
        code: the exit code that `plimsoll train` ends with for the same reason.
    """

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class Request(Protocol):
    """A config, as a command line or a program asks for it."""

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
        """The config, without rules by accelerator."""
        ...

    @property
    def chosen(self) -> tuple[str, ...]:
        """The paths of the fields that the command line, or the program, has set."""
        ...

    def resolve(self, accelerator: str) -> tuple[Config, list[str]]:
        """(the config for that accelerator, a line for each field that its rules changed)."""
        ...


@dataclass
class Job:
    """What is asked for, with what was checked and opened for it."""

    request: Request
    experiment: Any  # built from the request's config, which has no rules by accelerator
    folder: str | Path  # of the workdir, or its URL
    limit: int | None  # bytes of device memory that the run may use; None for what the devices have
    goodput: Any
    # Calls the training, and turns the user's mistakes into exit codes; anything else is raised.
    guarded: Callable[[Callable[[], int]], int]
    resume: Literal["auto", "never", "must"] = "auto"  # what to do if there are checkpoints
    force: bool = False  # resume on other data; train although it does not fit
    dry_run: bool = False
    workdir: Any = field(init=False)  # opened when the run starts
    failure: BaseException | None = None  # what ended the training, where its exit code stands for an error

    def experiment_of(self, config: Config, rule_lines: list[str]) -> Any:
        """The experiment of the request's config once it was resolved for an accelerator.

        Args:
            config: resolved.
            rule_lines: what rules changed in it; without any, the experiment is the one that was built already.
        """
        return config.instantiate() if rule_lines else self.experiment
