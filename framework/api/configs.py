"""`load_config`: a named config with overrides, for a program; and what `train` and `plan` are asked for by one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from framework.config import Config, diff, target_of
from framework.config.accelerator_rules import apply_accelerator_rules
from framework.config.named import load_named
from framework.data.own_data import with_data
from framework.program import stored
from framework.terminal.visible import visible


class _Origin(NamedTuple):
    """What a config was loaded as."""

    spec: str
    named: Config  # without overrides
    overridden: tuple[str, ...]  # paths of the overrides
    notes: tuple[str, ...]  # lines that a run shows first


class LoadedConfig(Config):
    """A config that keeps, through copies, what it was loaded as."""

    _origin: _Origin

    def copy(self) -> LoadedConfig:
        """Returns a deep copy."""
        return _with_origin(super().copy(), self._origin)

    __copy__ = copy


def load_config(
    spec: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    data: str | Path | None = None,
    shape_is_enough: bool = False,
) -> Config:
    """A new config, which can be changed like any object: `config.trainer.max_steps = 5`.

    Args:
        spec: the name of a config, path/to/file.py:NAME, hf:DIR or hf:ORG/NAME, or the config.json that a run has
            stored.
        overrides: {dotted path: value}, applied in order. A text is read as the command line reads it; any other value
            is set as it is.
        data: a file, a folder, a glob or a URL to train on, in the place of the config's own data; a part of it is
            held out.
        shape_is_enough: for a plan: of hf:ORG/NAME, a well-known shape needs no file of the Hub.

    Raises:
        ConfigError: there is no such config, path or choice, or a value is of the wrong type.
        FileNotFoundError: there is no such file.
    """
    spec = str(spec)
    notes: list[str] = []
    if spec.endswith(".json"):
        named = stored.read_to_train(Path(spec).expanduser(), notes.append)
    else:
        named = load_named(spec, notes.append, shape_is_enough=shape_is_enough)
    changes = dict(overrides or {})
    if data is not None:
        named, data_notes = with_data(named, str(data), list(changes))
        notes += data_notes
    config = named.copy()
    override(config, changes)
    return _with_origin(config, _Origin(spec, named, tuple(changes), tuple(notes)))


def override(config: Config, overrides: Mapping[str, Any]) -> None:
    """Applies overrides in order, in place; those that are texts are read as on the command line."""
    for path, value in overrides.items():
        if isinstance(value, str):
            config.override(path, value)
        else:
            config.set_path(path, value)


def _with_origin(config: Config, origin: _Origin) -> LoadedConfig:
    """A copy of a config that knows its origin."""
    loaded = LoadedConfig(config._target, config._fields, config._path)
    # The class's own `__setattr__` would look for a field of that name.
    object.__setattr__(loaded, "_origin", origin)
    return loaded


@dataclass(frozen=True)
class ConfigRequest:
    """A config as a program asks for it. Rules by accelerator change what the program has not set itself."""

    spec: str
    notes: list[str]
    config: Config
    chosen: tuple[str, ...]  # dotted paths that the program has set

    def resolve(self, accelerator: str) -> tuple[Config, list[str]]:
        """(the config for that accelerator, a line for each field that its rules changed)."""
        config = self.config.copy()
        lines = apply_accelerator_rules(config, accelerator, self._is_chosen)
        return config, lines

    def _is_chosen(self, path: str) -> bool:
        """Whether the program has set the field of a path, something in it, or what it is in."""
        for chosen in self.chosen:
            if path == chosen or path.startswith(f"{chosen}.") or chosen.startswith(f"{path}."):
                return True
        return False

    @property
    def settings(self) -> list[str]:
        """`path=value` of what the program has set, for a report."""
        texts = []
        for path in self.chosen:
            value = self.config.get_path(path)
            # A component is named; its fields would fill the line.
            shown = target_of(value).__name__ if isinstance(value, Config) else value
            texts.append(f"{path}={shown}")
        return texts


def request_of(config: Config | str | Path, *, shape_is_enough: bool = False) -> ConfigRequest:
    """What is asked for by a config, or by the name of one. A later change of the config changes no request.

    Raises:
        ConfigError: a rule of the config sets what cannot be, or the config could not be stored.
        TypeError: it is neither a config nor a name.
    """
    if isinstance(config, (str, Path)):
        config = load_config(config, shape_is_enough=shape_is_enough)
    if not isinstance(config, Config):
        raise TypeError(f"expected a config or the name of one, given {type(config).__name__}")
    if isinstance(config, LoadedConfig):
        origin = config._origin
        changed = [path for path, _, _ in diff(origin.named, config)]
        # An override may set what the named config has already, and is meant all the same.
        chosen = tuple(dict.fromkeys([*origin.overridden, *changed]))
    else:
        origin = _Origin(target_of(config).__name__, config, (), ())
        chosen = ()
    copied = Config(config._target, config._fields)
    # All rules are tried on copies: a mistake in one of them should not wait for its accelerator.
    apply_accelerator_rules(copied, None)
    stored.check(copied)
    return ConfigRequest(origin.spec, list(origin.notes), copied, chosen)


def tell(line: str) -> None:
    """Prints a line to stderr, for what is no result."""
    print(visible(line), file=sys.stderr, flush=True)
