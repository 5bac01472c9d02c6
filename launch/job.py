"""What `launch.train` asks of a run. Nothing here starts JAX."""

from dataclasses import dataclass
from typing import Any

from framework.config import Config
from launch import cli


@dataclass
class Job:
    """What the command line asks for, with what `main` has checked and opened for it."""

    command: cli.Command
    experiment: Any  # built from the command's config, which has no rules by accelerator
    workdir: Any
    limit: int | None  # bytes of device memory that --device_memory_gib allows
    goodput: Any

    @property
    def args(self) -> Any:
        """The verb's own flags."""
        return self.command.args

    def experiment_of(self, config: Config, rule_lines: list[str]) -> Any:
        """The experiment of the command's config once it was resolved for an accelerator.

        Args:
            config: resolved.
            rule_lines: what rules changed in it; without any, the experiment is the one that was built already.
        """
        return config.instantiate() if rule_lines else self.experiment
