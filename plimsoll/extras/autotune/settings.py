"""Settings of a config that are tuned together: as overrides to paste, and applied to a copy of the config."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import optax

from plimsoll.extras.autotune import ALLOWED
from plimsoll.framework.config import Config, ConfigError, config_for, did_you_mean, diff, get_schema, get_target
from plimsoll.framework.config.value_parsing import as_text
from plimsoll.framework.devices.accelerators import AcceleratorSpec
from plimsoll.framework.optimizers.quantized import adamw8bit
from plimsoll.framework.plan import cache
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.terminal.tables import TableSection, human_bytes, human_duration

# The tuned fields, in the order in which they are printed.
PIPE = "mesh.pipe"
PIPE_CHUNKS = "mesh.pipe_chunks"
MESH = (PIPE, PIPE_CHUNKS, "mesh.data", "mesh.fsdp", "mesh.expert", "mesh.seq", "mesh.model")
ACCUMULATE = "learner.accumulate"
BATCH = "data.global_batch_size"
CLIP_MODE = "learner.clip_mode"
UPDATE = "memory.update"
ACCUMULATE_BY = "memory.accumulate_by"
PREFETCH = "memory.prefetch"
REMAT = "memory.remat"
GRADIENTS = "memory.gradients"
EXPERTS = "memory.experts"
# Fields that can be offloaded, in the order in which they are moved: first those that are transferred once per step.
PLACEMENT_FIELDS = ("memory.optimizer_state", GRADIENTS, "memory.parameters", EXPERTS, "memory.activations")
DEVICE = "device"
HOST = "pinned_host"
TUNED_FIELDS = (*MESH, BATCH, ACCUMULATE, CLIP_MODE, UPDATE, ACCUMULATE_BY, REMAT, *PLACEMENT_FIELDS, PREFETCH)


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


MASTER = "learner.master_dtype"
MOMENTS = "learner.moment_dtype"
ROUNDING = "learner.rounding"
OPTIMIZER = "learner.optimizer"
PRECISION = "model.precision"
# Changes that exclude each other: with the 8-bit optimizer the moments already have a dtype, and a product one format.
_EXCLUSIVE = ({"moments", "optimizer8bit"}, {"fp8", "int8"})
# The projections of attention and MLPs, but not those to one number per head or token.
_LARGE_LAYERS = "/(query|key|value|output|gate|up|down|(query|kv)_(up|down))$"


def parse_allowed(text: str) -> tuple[str, ...]:
    """Parse a list of names such as "rounding,optimizer8bit". Raises ConfigError for an unknown name.

    Args:
        text: names, separated by commas.

    Returns:
        The names in the order of `ALLOWED`, without duplicates.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    # An empty list is an error, too: report it under the text itself.
    for name in names or [text]:
        if name not in ALLOWED:
            hint = did_you_mean(name, ALLOWED)
            raise ConfigError(f"--allow={text}: {name!r} is not one of {', '.join(ALLOWED)}{hint}")
    return tuple(name for name in ALLOWED if name in names)


def list_changes(
    config: Config, names: Sequence[str], fixed: Collection[str], spec: AcceleratorSpec
) -> dict[str, Settings]:
    """Return the settings of each allowed change that is possible, by name.

    Args:
        config: config, resolved for the target.
        names: allowed changes, keys of `ALLOWED`.
        fixed: paths of fields that the user has set.
        spec: the target's accelerator.
    """
    changes = {}
    for name in names:
        change = _build_change(config, name, spec)
        if change and not any(one.path in fixed for one in change):
            changes[name] = change
    return changes


def list_variants(changes: Mapping[str, Settings]) -> list[Settings]:
    """Return every combination of the changes, starting with no change."""
    variants: list[Settings] = []
    for count in range(len(changes) + 1):
        for chosen in itertools.combinations(changes, count):
            if not any(set(chosen) >= exclusive for exclusive in _EXCLUSIVE):
                variants.append(tuple(itertools.chain.from_iterable(changes[name] for name in chosen)))
    return variants


def _build_change(config: Config, name: str, spec: AcceleratorSpec) -> Settings:
    """Return the settings of an allowed change; empty if they would change nothing or do not suit config or target."""
    learner = config.learner
    if name == "rounding":
        # Stochastic rounding replaces the master copy only for weights that are stored in bfloat16.
        is_possible = learner.master_dtype is not None and str(config.model.get("param_dtype")) == "bfloat16"
        return (setting(MASTER, None), setting(ROUNDING, "stochastic")) if is_possible else ()
    if name == "moments":
        return (setting(MOMENTS, "bfloat16"),) if str(learner.moment_dtype) != "bfloat16" else ()
    if name in ("fp8", "int8"):
        # Other models than language models have no such field.
        is_free = config.model.takes("precision") and not config.model.get("precision")
        usual, faster = spec.peak_flops(), spec.peak_flops(name)
        is_faster = faster is not None and (usual is None or faster > usual)
        recipe = "fp8_tensor" if name == "fp8" else "int8_row"
        return (setting(PRECISION, json.dumps({_LARGE_LAYERS: recipe})),) if is_free and is_faster else ()
    optimizer = learner.optimizer
    if get_target(optimizer) is not optax.adamw:
        return ()
    shared_fields = {field: optimizer[field] for field in get_schema(config_for(adamw8bit)) if field in optimizer}
    # JSON keeps the override on one line, so that it can be pasted.
    return (Setting(OPTIMIZER, json.dumps(config_for(adamw8bit, **shared_fields).to_dict())),)


class Neighbor(NamedTuple):
    """A neighbor of the chosen settings that was rejected.

    Attributes:
        setting: the overrides that differ from the chosen settings.
        peak: peak bytes of one device; None if the settings are not possible.
        seconds: time of a step; None if the settings are not possible.
        reason: the reason for the rejection, in words.
    """

    setting: str
    peak: int | None
    seconds: float | None
    reason: str


class Machine(NamedTuple):
    """The machine that settings were chosen for. Results are not valid on another machine.

    Attributes:
        target: name of the target, with the kind and number of its devices.
        processes: number of processes (hosts).
        device_bytes: bytes that one device may use; None if unknown.
        host_bytes: memory of one process's host, in bytes; None if unknown.
    """

    target: str
    processes: int
    device_bytes: int | None
    host_bytes: int | None

    @staticmethod
    def derive(target: Target, device_bytes: int | None, host_bytes: int | None) -> Machine:
        """Describe a target.

        Args:
            target: the target.
            device_bytes: bytes that one device may use; None if unknown.
            host_bytes: memory of one process's host, in bytes; None takes the target's known value.
        """
        known_host = host_bytes if host_bytes is not None else target.host_limit_bytes
        return Machine(target.name, target.num_processes, device_bytes, known_host)


@dataclass(frozen=True)
class TunedSettings:
    """The chosen settings of a config on a machine.

    Attributes:
        machine: the machine that they were chosen for.
        settings: overrides of the config; empty if the config itself is the fastest.
        kept: fields that the user has set, and that tuning left unchanged.
        allowed: names of the changes to the training that were allowed.
        peak: peak bytes of one device.
        host: arrays in host memory, in bytes per device.
        host_need: everything that the memory of a host has to hold, in bytes.
        seconds: time of a step by the analytical estimate, which ranked the settings; None if the rates of the device
            are not published.
        moved: bytes that occupy the link to the host in a step. Simultaneous traffic in both directions counts once.
        compiled: whether the peak comes from the compiler instead of the estimate.
        neighbors: similar settings that were not chosen.
        notes: additional lines for the report.
    """

    machine: Machine
    settings: Settings
    kept: tuple[str, ...]
    allowed: tuple[str, ...]
    peak: int
    host: int
    host_need: int
    seconds: float | None
    moved: float
    compiled: bool
    neighbors: tuple[Neighbor, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def flags(self) -> str:
        """The overrides in one line, for pasting into a shell."""
        return flags(self.settings)

    @property
    def used(self) -> float | None:
        """The fraction of the device's limit that is used; None if the limit is unknown."""
        limit = self.machine.device_bytes
        return None if limit is None else self.peak / limit

    def sections(self) -> list[TableSection]:
        """Return the tables of the report: the chosen settings and their neighbors."""
        rows = [["overrides", self.flags or "none: the config itself is the fastest that fits"]]
        use = "" if self.used is None else f", {100 * self.used:.1f}% of {human_bytes(self.machine.device_bytes)}"
        source = "compiled" if self.compiled else "estimated"
        rows.append(["device", f"{human_bytes(self.peak)}{use}, {source}"])
        if self.host:
            traffic = f"{human_bytes(self.moved)} over the host link per step"
            need = f"the host has to hold {human_bytes(self.host_need)} in all"
            rows.append(["host", f"{human_bytes(self.host)} per device; {need}; {traffic}"])
        if self.seconds is not None:
            rows.append(["step time", f"{human_duration(self.seconds)}, estimated; the settings are ranked by it"])
        if self.kept:
            rows.append(["fixed by you", " ".join(self.kept)])
        if self.allowed:
            rows.append(["allowed to change", " ".join(self.allowed)])
        rows += [["note", note] for note in self.notes]
        return [TableSection("chosen", rows), *self._neighbor_section()]

    def _neighbor_section(self) -> list[TableSection]:
        if not self.neighbors:
            return []
        rows = [["alternative", "device", "step time", "reason"]]
        for neighbor in self.neighbors:
            peak = "-" if neighbor.peak is None else human_bytes(neighbor.peak)
            seconds = "-" if neighbor.seconds is None else human_duration(neighbor.seconds)
            rows.append([neighbor.setting, peak, seconds, neighbor.reason])
        return [TableSection("not chosen (estimates)", rows)]

    def line(self) -> str:
        """Return the chosen settings in one line, for the log of a run."""
        use = "" if self.used is None else f" ({100 * self.used:.1f}% of the limit)"
        return f"memory.auto: {human_bytes(self.peak)} per device{use}; {self.flags or 'config unchanged'}"

    def without_neighbors(self) -> TunedSettings:
        """Return a copy without the list of fixed fields and without the neighbors."""
        return dataclasses.replace(self, neighbors=(), kept=())

    def to_json(self) -> dict[str, Any]:
        """Return a dict that JSON can represent."""
        return {
            **dataclasses.asdict(self),
            "machine": self.machine._asdict(),
            "neighbors": [neighbor._asdict() for neighbor in self.neighbors],
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Restore what `to_json` returned. Raises KeyError or TypeError if another version wrote it."""
        fields = dict(stored)
        fields["machine"] = Machine(**stored["machine"])
        fields["settings"] = tuple(Setting(*pair) for pair in stored["settings"])
        fields["neighbors"] = tuple(Neighbor(**neighbor) for neighbor in stored["neighbors"])
        # JSON has no tuples.
        for name in ("kept", "allowed", "notes"):
            fields[name] = tuple(stored[name])
        return cls(**fields)


class TuningRequest(NamedTuple):
    """A tuning request. Its fields are the cache key of the result.

    Attributes:
        config: config, resolved for the machine.
        machine: the machine to tune for.
        mode: "memory" or "batch".
        fixed: paths of fields that must not change.
        allowed: names of changes to the training that are allowed.
        estimate: whether to use only the analytical estimate, without compiling.
    """

    config: Config
    machine: Machine
    mode: str
    fixed: Sequence[str]
    allowed: Sequence[str]
    estimate: bool

    def path(self, part: str) -> Path:
        """Return the file that stores a part of the result, such as "choice" or "compiled"."""
        about = self._asdict()
        del about["config"]
        about["machine"] = self.machine._asdict()
        about["fixed"] = sorted(self.fixed)
        about["allowed"] = list(self.allowed)
        return cache.cache_path(self.config, auto=part, **about)
