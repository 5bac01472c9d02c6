"""Reads the config that a run stored in its workdir, for commands that inspect the run. It is untrusted data.

The stored config describes the model. Settings of the machine, such as the folder of compiled programs and the files
that the compiler writes, come from the user who runs the command, because the workdir may come from someone else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from plimsoll.framework.config import Config, ConfigError, did_you_mean, get_target
from plimsoll.framework.config.names import printable
from plimsoll.framework.devices.compiler import names_files

_BUILTIN_REWARDS = "plimsoll.framework.batch_transforms.rewards."


def read(workdir: Path, log: Callable[[str], None]) -> Config:
    """Read the config of a workdir, without the settings that belong to a machine.

    Args:
        workdir: the run's workdir.
        log: function that prints a line for each setting that is ignored.

    Raises:
        FileNotFoundError: the workdir has no config.
        ConfigError: the config names an object that is not a component, or does not describe an experiment.
    """
    try:
        file = workdir / "config.json"
        return _parse_and_check(lambda: Config.from_json(file.read_bytes()), str(file), log)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"--workdir: {workdir} holds no config.json; expected the workdir of a `plimsoll train` run"
        ) from None


def read_to_train(file: Path, log: Callable[[str], None]) -> Config:
    """Read a stored config in order to train it again; also drops the accelerator rules, which are already applied.

    Args:
        file: path of a config.json.
        log: function that prints a line for each setting that is ignored.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: as from `read`.
    """
    if not file.is_file():
        siblings = [sibling.name for sibling in file.parent.glob("*.json")]
        raise FileNotFoundError(f"no config file {str(file)!r}{did_you_mean(file.name, siblings)}")
    config = _parse_and_check(lambda: Config.from_json(file.read_bytes()), str(file), log)
    # Applying them again would undo overrides on that run's command line.
    if "accelerator_rules" in config and config.accelerator_rules:
        config.accelerator_rules = []
        log(f"accelerator_rules of {file} are ignored, because its other fields already contain their changes")
    return config


def read_from_checkpoint(config: dict[str, Any], where: str, log: Callable[[str], None]) -> Config:
    """Read the config in a checkpoint's manifest, like `read`.

    Args:
        config: config as JSON; the manifest's digest covers it.
        where: name of the checkpoint in messages.
        log: function that prints a line for each setting that is ignored.

    Raises:
        ConfigError: as from `read`.
    """
    return _parse_and_check(lambda: Config.from_dict(config), where, log)


def _parse_and_check(parse: Callable[[], Config], where: str, log: Callable[[str], None]) -> Config:
    """Parse a config, check that it describes an experiment, and drop the settings that belong to a machine.

    The class is checked before anything is built, because the config is untrusted.

    Args:
        parse: returns the config.
        where: file or checkpoint of the config, for errors.
        log: function that prints a line for each setting that is ignored.
    """
    from plimsoll.framework.program.experiment import Experiment

    try:
        config = parse()
        target = get_target(config)
        if not (isinstance(target, type) and issubclass(target, Experiment)):
            raise ConfigError(f"expected the config of an Experiment, given that of {target.__name__}")
        drop_machine_settings(config, log)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return config


def check(config: Config) -> None:
    """Raise ConfigError before a run whose stored config `read` would refuse after the run."""
    try:
        Config.from_json(config.to_json())
    except ConfigError as error:
        raise ConfigError(f"{error.args[0]}; the config of the run could not be read again", path=error.path) from None


def _is_builtin_reward(name: str) -> bool:
    """Return whether a reward function is one of `framework.batch_transforms.rewards`, which are safe."""
    # A path could start with that prefix too.
    return name.startswith(_BUILTIN_REWARDS) and name.removeprefix(_BUILTIN_REWARDS).isidentifier()


def drop_machine_settings(config: Config, log: Callable[[str], None]) -> None:
    """Remove, in place, the settings that name a location on the run's machine, or code stored there."""
    trainer = config.trainer
    compiler = config.compiler
    # Machine code is loaded from the cache, so an untrusted config must not choose its location.
    if trainer.takes("compilation_cache") and trainer.compilation_cache is not None:
        del trainer["compilation_cache"]
    options = compiler.options if compiler.takes("options") else {}
    # Iterate over a copy, because the loop deletes items.
    for name, value in list(options.items()):
        if names_files(name, value):
            del options[name]
            shown = printable(f"compiler.options.{name}={value}")
            log(f"{shown} of the run is ignored: it names files; to set it, pass --config.compiler.options.NAME=VALUE")
    # The batch transform, the one nested in it, and so on.
    path = "batch_transform"
    part = config.batch_transform if config.takes("batch_transform") else None
    while isinstance(part, Config):
        reward = part.reward if part.takes("reward") else None
        # A reward function is executable code, so an untrusted config must not choose it.
        names = [reward] if isinstance(reward, str) else list(reward or [])
        if not all(map(_is_builtin_reward, names)):
            del part["reward"]
            shown = printable(f"{path}.reward={reward}")
            log(
                f"{shown} of the run is ignored: it names code; to set it, pass --config.{path}.reward=FILE.py:FUNCTION"
            )
        path = f"{path}.reference"
        part = part.reference if part.takes("reference") else None
