"""The config that a run has stored, read from its file: data from outside.

It says what the model is. Where this machine keeps compiled programs, and which files its compiler writes, is for who
runs it to say: the file may be a stranger's. Nothing here starts JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from framework.config import Config, ConfigError, did_you_mean, target_of
from framework.config.names import printable
from framework.devices.compiler import names_files


def read(file: Path, tell: Callable[[str], None]) -> Config:
    """The config of an experiment in a file, without the settings that belong to a machine; `tell` is told of those.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: the config names something that is no component, or describes no experiment.
    """
    from framework.program.experiment import Experiment

    try:
        config = Config.from_json(file.read_bytes())
        # Checked by its class before anything is built: the file may be a stranger's.
        target = target_of(config)
        if not (isinstance(target, type) and issubclass(target, Experiment)):
            raise ConfigError(f"expected the config of an Experiment, given that of {target.__name__}")
        _leave_places_out(config, tell)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return config


def read_to_train(file: Path, tell: Callable[[str], None]) -> Config:
    """The config that a run has stored, to train it again.

    Args:
        file: a config.json.
        tell: is told what of it is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: see `read`.
    """
    if not file.is_file():
        siblings = [sibling.name for sibling in file.parent.glob("*.json")]
        raise FileNotFoundError(f"no config file {str(file)!r}{did_you_mean(file.name, siblings)}")
    config = read(file, tell)
    # They were applied when the run started. Applied again, they would undo what its command line had set.
    if "accelerator_rules" in config and config.accelerator_rules:
        config.accelerator_rules = []
        tell(f"accelerator_rules of {file} are left out: its other fields have what they set")
    return config


def _leave_places_out(config: Config, tell: Callable[[str], None]) -> None:
    """Resets, in place, the settings that name a place on the machine that the run was on."""
    trainer = config.trainer
    compiler = config.compiler
    # Machine code is loaded from the cache, so a stranger does not choose where it is.
    if trainer.takes("compilation_cache") and trainer.compilation_cache is not None:
        del trainer["compilation_cache"]
    options = compiler.options if compiler.takes("options") else {}
    # A copy of the items, as some are deleted on the way.
    for name, value in list(options.items()):
        if names_files(name, value):
            del options[name]
            shown = printable(f"compiler.options.{name}={value}")
            tell(f"{shown} of the run is left out, as it names files; to set it, --config.compiler.options.NAME=VALUE")
