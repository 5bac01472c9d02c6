"""The chosen settings of a config on a machine, as JSON and as tables for the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from plimsoll.extras.autotune.settings import Setting, Settings, flags
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.terminal.tables import TableSection, human_bytes, human_duration


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
        host: host memory per device, in bytes.
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
            rows.append(["host", f"{human_bytes(self.host)} per device; {traffic}"])
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
