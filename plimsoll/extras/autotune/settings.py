"""Settings of a config that are tuned together: as overrides to paste, and applied to a copy of the config."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable
from typing import NamedTuple

from plimsoll.framework.config import Config, diff, get_schema
from plimsoll.framework.config.value_parsing import as_text

# The tuned fields, in the order in which they are printed.
MESH = ("mesh.data", "mesh.fsdp", "mesh.expert", "mesh.seq", "mesh.model")
ACCUMULATE = "learner.accumulate"
BATCH = "data.global_batch_size"
CLIP_MODE = "learner.clip_mode"
UPDATE = "memory.update"
REMAT = "memory.remat"
GRADIENTS = "memory.gradients"
# Fields that can be offloaded, in the order in which they are moved: first those that are transferred once per step.
PLACEMENT_FIELDS = ("memory.optimizer_state", GRADIENTS, "memory.parameters", "memory.activations")
DEVICE = "device"
HOST = "pinned_host"
TUNED_FIELDS = (*MESH, BATCH, ACCUMULATE, CLIP_MODE, UPDATE, REMAT, *PLACEMENT_FIELDS)


class Setting(NamedTuple):
    """One override.

    Attributes:
        path: dotted path of the field in the config.
        text: value of the field, as written on the command line.
    """

    path: str
    text: str

    @property
    def flag(self) -> str:
        """The override as a command-line flag, quoted for a shell."""
        return shlex.quote(f"--config.{self.path}={self.text}")


Settings = tuple[Setting, ...]


def setting(path: str, value: str | int | None) -> Setting:
    """Return a setting for a value.

    Args:
        path: dotted path of the field in the config.
        value: value of the field. Strings are not quoted here: `Setting.flag` quotes for the shell.
    """
    return Setting(path, value if isinstance(value, str) else as_text(value))


def flags(settings: Iterable[Setting]) -> str:
    """Return the overrides in one line, for pasting into a shell."""
    return " ".join(one.flag for one in settings)


def with_settings(config: Config, settings: Iterable[Setting]) -> Config:
    """Return a copy of a config with overrides.

    Args:
        config: config to copy.
        settings: overrides; a later one of the same field wins.
    """
    changed = config.copy()
    for path, text in settings:
        changed.override(path, text)
    return changed


def sort_settings(settings: Iterable[Setting]) -> Settings:
    """Sort settings in the order of `TUNED_FIELDS`, then all others by path. The last setting of a field wins."""
    text_by_path = dict(settings)
    positions = {path: position for position, path in enumerate(TUNED_FIELDS)}
    paths = sorted(text_by_path, key=lambda path: (positions.get(path, len(positions)), path))
    return tuple(Setting(path, text_by_path[path]) for path in paths)


def get_text(settings: Iterable[Setting], path: str) -> str | None:
    """Return the text that a field is set to; None if it is not set.

    Args:
        settings: settings to search.
        path: dotted path of the field.
    """
    return dict(settings).get(path)


def find_fixed_paths(config: Config, chosen: Collection[str]) -> frozenset[str]:
    """Return the fields that autotuning leaves unchanged because the user has set them.

    Fields set on the command line are fixed, whatever their value. A config that sets memory.auto itself was written
    for autotuning, so its values that differ from the defaults are deliberate and fixed as well. Any other config was
    written to work without tuning, so its values are only the starting point of the search.

    Args:
        config: resolved config.
        chosen: paths that the command line or the calling program has set.
    """
    fixed = set(chosen)
    if config.memory.auto and "memory.auto" not in fixed:
        fixed |= {path for path in TUNED_FIELDS if path != BATCH and not _is_default(config, path)}
    if any(path == "mesh" or path.startswith("mesh.") for path in fixed):
        # The axes multiply to the number of devices, so setting one constrains all of them.
        fixed |= set(MESH)
    return frozenset(path for path in TUNED_FIELDS if _is_within(path, fixed))


def _is_default(config: Config, path: str) -> bool:
    section, _, field = path.partition(".")
    value = config.get_path(path)
    # -1 (the remaining devices) and 1 both count as "not set".
    if section == "mesh" and value in (1, -1):
        return True
    return value == get_schema(config[section])[field].default


def _is_within(path: str, fixed: Collection[str]) -> bool:
    return any(path == other or path.startswith(f"{other}.") for other in fixed)


def select_changes(config: Config, settings: Iterable[Setting]) -> Settings:
    """Return the settings that change the config, in canonical order.

    Args:
        config: config that the settings override.
        settings: settings; those that repeat values of the config are left out.
    """
    trial = with_settings(config, settings)
    differing = {path for path, _, _ in diff(config, trial)}
    return sort_settings(one for one in settings if any(_is_within(path, {one.path}) for path in differing))
