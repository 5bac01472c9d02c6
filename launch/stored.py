"""The config that a run has stored in its workdir, for verbs that look at the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from framework.config import Config, ConfigError
from launch import cli


def read(workdir: Path, overrides: cli.Overrides, tell: Callable[[str], None]) -> Config:
    """The config of a workdir with `overrides`, but without the settings that belong to a machine.

    Raises:
        FileNotFoundError: the workdir has no config.
        ConfigError: the config names something that is no component, or describes no experiment.
    """
    from framework.program import stored

    try:
        config = stored.read(workdir / "config.json", tell)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"--workdir: {workdir} holds no config.json, so no run of launch.train") from None
    return cli.apply_overrides(config, overrides)


def check(config: Config) -> None:
    """Raises ConfigError where `read` would refuse what a run with this config stores: before the run, not after it."""
    try:
        Config.from_json(config.to_json())
    except ConfigError as error:
        raise ConfigError(f"{error.args[0]}; the config of the run could not be read again", path=error.path) from None
