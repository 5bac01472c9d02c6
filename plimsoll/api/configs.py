"""`load_config`: loads a config from Python, with overrides; and the config requests of `train` and `plan`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from plimsoll import configs
from plimsoll.configs.data_flag import with_data
from plimsoll.framework.config import Config, diff, get_target
from plimsoll.framework.config.accelerator_rules import apply_accelerator_rules
from plimsoll.framework.program import stored_config
from plimsoll.framework.terminal.escaping import escape_control_chars


class _Origin(NamedTuple):
    """The origin of a loaded config."""

    spec: str
    named: Config  # without overrides
    overridden: tuple[str, ...]  # paths of the overrides
    notes: tuple[str, ...]  # lines that a run prints first


class LoadedConfig(Config):
    """A config that remembers its origin; copies keep it."""

    _origin: _Origin

    def copy(self) -> LoadedConfig:
        """Return a deep copy."""
        return _with_origin(super().copy(), self._origin)

    __copy__ = copy


def load_config(
    spec: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    data: str | Path | Sequence[str | Path] | None = None,
    data_weights: Sequence[float] | None = None,
    shape_only: bool = False,
) -> Config:
    """Load a new config. Its fields can be changed like attributes: `config.trainer.max_steps = 5`.

    Args:
        spec: name of a config, path/to/file.py:NAME, hf:DIR or hf:ORG/NAME, or the config.json that a run has stored.
        overrides: {dotted path: value}, applied in order. Strings are parsed like command-line values; any other value
            is set unchanged.
        data: file, folder, glob or URL to train on instead of the config's own data, or several to mix; a part of each
            is held out.
        data_weights: a weight for each of several `data`; None weights all equally.
        shape_only: the model's shape is sufficient, as for a plan: a well-known hf:ORG/NAME needs no files from
            the Hub.

    Raises:
        ConfigError: the config, path or choice does not exist, or a value has the wrong type.
        FileNotFoundError: a file does not exist.
    """
    spec = str(spec)
    notes: list[str] = []
    if spec.endswith(".json"):
        named = stored_config.read_to_train(Path(spec).expanduser(), notes.append)
    else:
        named = configs.load(spec, notes.append, shape_only=shape_only)
    changes = {named.current_path(path): value for path, value in (overrides or {}).items()}
    if data is not None:
        paths = [str(data)] if isinstance(data, str | Path) else [str(path) for path in data]
        weights = None if data_weights is None else ",".join(map(str, data_weights))
        named, data_notes = with_data(named, paths, changes, weights=weights, image_size=changes.get("data.image_size"))
        notes += data_notes
    config = named.copy()
    override(config, changes)
    return _with_origin(config, _Origin(spec, named, tuple(changes), tuple(notes)))


def attach_origin(config: Config, spec: str, named: Config, overridden: Sequence[str]) -> Config:
    """Return a copy of a config that a command line has loaded; the copy remembers its origin, as from `load_config`.

    Args:
        config: the config with its overrides.
        spec: its name.
        named: the config without overrides.
        overridden: dotted paths of the overrides.
    """
    return _with_origin(config.copy(), _Origin(spec, named, tuple(overridden), ()))


def override(config: Config, overrides: Mapping[str, Any]) -> None:
    """Apply overrides in order, in place; strings are parsed like command-line values."""
    for path, value in overrides.items():
        if isinstance(value, str):
            config.override(path, value)
        else:
            config.set_path(path, value)


def _with_origin(config: Config, origin: _Origin) -> LoadedConfig:
    """Copy a config and attach its origin."""
    loaded = LoadedConfig(config._target, config._fields, config._path)
    # The `__setattr__` of the class would look for a field of that name.
    object.__setattr__(loaded, "_origin", origin)
    return loaded


@dataclass(frozen=True)
class ConfigRequest:
    """A config as requested by the calling program. Accelerator rules only change fields that it has not set."""

    spec: str
    notes: list[str]
    config: Config
    override_paths: tuple[str, ...]  # dotted paths that the program has set

    def resolve(self, accelerator: str) -> tuple[Config, list[str]]:
        """Return (config for that accelerator, a line for each field that its rules changed)."""
        config = self.config.copy()
        lines = apply_accelerator_rules(config, accelerator, self._is_chosen)
        return config, lines

    def _is_chosen(self, path: str) -> bool:
        """Return whether the program has set the field at a path, a field inside it, or a field that contains it."""
        for chosen in self.override_paths:
            if path == chosen or path.startswith(f"{chosen}.") or chosen.startswith(f"{path}."):
                return True
        return False

    @property
    def settings(self) -> list[str]:
        """The fields that the program has set, as `path=value`, for a report."""
        texts = []
        for path in self.override_paths:
            value = self.config.get_path(path)
            # Show only the name of a component; its fields would fill the line.
            shown = get_target(value).__name__ if isinstance(value, Config) else value
            texts.append(f"{path}={shown}")
        return texts


def create_request(config: Config | str | Path, *, shape_only: bool = False) -> ConfigRequest:
    """Create the request for a config, or for the name of one. Later changes to the config do not affect the request.

    Raises:
        ConfigError: an accelerator rule of the config is invalid, or the config cannot be stored.
        TypeError: the argument is neither a config nor a name.
    """
    if isinstance(config, (str, Path)):
        config = load_config(config, shape_only=shape_only)
    if not isinstance(config, Config):
        raise TypeError(f"expected a config or the name of one, given {type(config).__name__}")
    if isinstance(config, LoadedConfig):
        origin = config._origin
        changed = [path for path, _, _ in diff(origin.named, config)]
        # An override counts as set even if its value equals that of the named config.
        chosen = tuple(dict.fromkeys([*origin.overridden, *changed]))
    else:
        origin = _Origin(get_target(config).__name__, config, (), ())
        chosen = ()
    copied = Config(config._target, config._fields)
    # Try all rules on copies, so that an error in one is found even without its accelerator.
    apply_accelerator_rules(copied, None)
    stored_config.check(copied)
    return ConfigRequest(origin.spec, list(origin.notes), copied, chosen)


def log(line: str) -> None:
    """Print a line that is not part of the result to stderr."""
    print(escape_control_chars(line), file=sys.stderr, flush=True)
