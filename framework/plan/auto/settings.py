"""Settings of a config that are chosen together: as overrides to paste, and applied to a copy."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable
from typing import NamedTuple

from framework.config import Config, diff, schema_of
from framework.config.texts import as_text

# The settings that a choice is made of, in the order in which they are printed.
MESH = ("mesh.data", "mesh.fsdp", "mesh.expert", "mesh.seq", "mesh.model")
ACCUMULATE = "learner.accumulate"
BATCH = "data.global_batch_size"
CLIP_MODE = "learner.clip_mode"
UPDATE = "memory.update"
REMAT = "memory.remat"
GRADIENTS = "memory.gradients"
# What may live on the host, in the order in which it is moved: what comes and goes once a step first.
PLACES = ("memory.optimizer_state", GRADIENTS, "memory.parameters", "memory.activations")
DEVICE = "device"
HOST = "pinned_host"
SEARCHED = (*MESH, BATCH, ACCUMULATE, CLIP_MODE, UPDATE, REMAT, *PLACES)


class Setting(NamedTuple):
    """One override.

    Attributes:
        path: of the field.
        text: its value, as one writes it on the command line.
    """

    path: str
    text: str

    @property
    def flag(self) -> str:
        """As a shell takes it."""
        return shlex.quote(f"--config.{self.path}={self.text}")


Settings = tuple[Setting, ...]


def setting(path: str, value: str | int | None) -> Setting:
    """The setting of a value. Text is not quoted here: a flag quotes what a shell needs quoted."""
    return Setting(path, value if isinstance(value, str) else as_text(value))


def flags(settings: Iterable[Setting]) -> str:
    """The overrides in one line, to be pasted."""
    return " ".join(one.flag for one in settings)


def with_settings(config: Config, settings: Iterable[Setting]) -> Config:
    """A copy of the config with these overrides."""
    changed = config.copy()
    for path, text in settings:
        changed.override(path, text)
    return changed


def ordered(settings: Iterable[Setting]) -> Settings:
    """In the order of `SEARCHED`, whatever else comes last; of several settings of one field the last one counts."""
    text_by_path = dict(settings)
    places = {path: place for place, path in enumerate(SEARCHED)}
    paths = sorted(text_by_path, key=lambda path: (places.get(path, len(places)), path))
    return tuple(Setting(path, text_by_path[path]) for path in paths)


def value_of(settings: Iterable[Setting], path: str) -> str | None:
    """The text that a field is set to; None where it is not set."""
    return dict(settings).get(path)


def fixed_paths(config: Config, chosen: Collection[str]) -> frozenset[str]:
    """The fields that a choice leaves as they are, because somebody has set them.

    These are the fields of the command line, whatever their value. A config that says memory.auto itself was written
    for that: what it sets to anything but the default is meant, too. Any other config was written to work without a
    choice, so what it has of these fields is only where the search begins.

    Args:
        config: resolved.
        chosen: paths that the command line, or a program, has set.
    """
    fixed = set(chosen)
    if config.memory.auto and "memory.auto" not in fixed:
        fixed |= {path for path in SEARCHED if path != BATCH and not _is_default(config, path)}
    if any(path == "mesh" or path.startswith("mesh.") for path in fixed):
        # Axes multiply to the number of devices: whoever sets one has thought of all.
        fixed |= set(MESH)
    return frozenset(path for path in SEARCHED if _is_within(path, fixed))


def _is_default(config: Config, path: str) -> bool:
    section, _, field = path.partition(".")
    value = config.get_path(path)
    # An axis of what is left is as open as one of 1.
    if section == "mesh" and value in (1, -1):
        return True
    return value == schema_of(config[section])[field].default


def _is_within(path: str, fixed: Collection[str]) -> bool:
    return any(path == other or path.startswith(f"{other}.") for other in fixed)


def changed(config: Config, settings: Iterable[Setting]) -> Settings:
    """Those of the settings that change the config."""
    trial = with_settings(config, settings)
    differing = {path for path, _, _ in diff(config, trial)}
    return ordered(one for one in settings if any(_is_within(path, {one.path}) for path in differing))
