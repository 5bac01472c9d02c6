"""What was chosen for a config on a machine, as JSON and as what a person is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from framework.plan.auto.settings import Setting, Settings, flags
from framework.plan.targets import Target
from framework.terminal.tables import Section, human_bytes, human_duration


class Neighbor(NamedTuple):
    """Settings that were not chosen.

    Attributes:
        setting: what differs from the choice.
        peak: bytes of one device; None where it cannot be.
        seconds: of a step; None likewise.
        reason: why not, in words.
    """

    setting: str
    peak: int | None
    seconds: float | None
    reason: str


class Machine(NamedTuple):
    """The machine of a choice: another one has another choice.

    Attributes:
        target: its name, with the kind and number of its devices.
        processes: hosts.
        device_bytes: that a device may use; None where not known.
        host_bytes: of a process's host; None where not known.
    """

    target: str
    processes: int
    device_bytes: int | None
    host_bytes: int | None

    @staticmethod
    def of(target: Target, device_bytes: int | None, host_bytes: int | None) -> Machine:
        """The machine that a target is."""
        known_host = host_bytes if host_bytes is not None else target.host_limit_bytes
        return Machine(target.name, target.num_processes, device_bytes, known_host)


@dataclass(frozen=True)
class Choice:
    """The chosen settings of a config on a machine.

    Attributes:
        machine: where.
        settings: overrides of the config; none where it is the fastest as it is.
        kept: fields that somebody has set, and which were left alone.
        allowed: names of what might be changed of the training.
        peak: bytes of one device.
        host: bytes of one device in its host's memory.
        seconds: of a step by the closed form, which ranked the settings; None where rates are not published.
        moved: bytes whose time the link to the host takes in a step: what moves both ways at once counts once.
        compiled: whether the peak is the compiler's word.
        neighbors: what was not chosen.
        notes: further lines.
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
        """The overrides in one line, to be pasted."""
        return flags(self.settings)

    @property
    def used(self) -> float | None:
        """The part of the device's limit that is used."""
        limit = self.machine.device_bytes
        return None if limit is None else self.peak / limit

    def sections(self) -> list[Section]:
        """The tables: the choice, and its neighbors."""
        rows = [["overrides", self.flags or "none: the config is the fastest that fits as it is"]]
        use = "" if self.used is None else f", {100 * self.used:.1f}% of {human_bytes(self.machine.device_bytes)}"
        judge = "compiled" if self.compiled else "by the closed form"
        rows.append(["device", f"{human_bytes(self.peak)}{use}, {judge}"])
        if self.host:
            rows.append(["its host", f"{human_bytes(self.host)}; {human_bytes(self.moved)} pass the link in a step"])
        if self.seconds is not None:
            rows.append(["a step", f"{human_duration(self.seconds)} by the closed form, which ranked the settings"])
        if self.kept:
            rows.append(["kept as set", " ".join(self.kept)])
        if self.allowed:
            rows.append(["allowed to change", " ".join(self.allowed)])
        rows += [["note", note] for note in self.notes]
        return [Section("chosen", rows), *self._neighbor_section()]

    def _neighbor_section(self) -> list[Section]:
        if not self.neighbors:
            return []
        rows = [["instead", "needs", "a step", "why not"]]
        for neighbor in self.neighbors:
            peak = "-" if neighbor.peak is None else human_bytes(neighbor.peak)
            seconds = "-" if neighbor.seconds is None else human_duration(neighbor.seconds)
            rows.append([neighbor.setting, peak, seconds, neighbor.reason])
        return [Section("not chosen, by the closed form", rows)]

    def line(self) -> str:
        """The choice in one line, for a run."""
        use = "" if self.used is None else f" ({100 * self.used:.1f}% of the limit)"
        return f"memory.auto: {human_bytes(self.peak)} per device{use}; {self.flags or 'the config as it is'}"

    def without_neighbors(self) -> Choice:
        """The choice alone, without what was kept and what was not chosen."""
        return dataclasses.replace(self, neighbors=(), kept=())

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            **dataclasses.asdict(self),
            "machine": self.machine._asdict(),
            "neighbors": [neighbor._asdict() for neighbor in self.neighbors],
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """The choice that `to_json` gave. Raises KeyError or TypeError: it is of another version."""
        fields = dict(stored)
        fields["machine"] = Machine(**stored["machine"])
        fields["settings"] = tuple(Setting(*pair) for pair in stored["settings"])
        fields["neighbors"] = tuple(Neighbor(**neighbor) for neighbor in stored["neighbors"])
        for name in ("kept", "allowed", "notes"):
            fields[name] = tuple(stored[name])
        return cls(**fields)
