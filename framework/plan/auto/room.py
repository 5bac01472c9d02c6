"""How much a device and its host have for a choice, and what the compiler has said of earlier ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from framework.plan.auto.closed_forms import Cost
from framework.plan.auto.settings import REMAT, UPDATE, Settings, value_of
from framework.plan.targets import Target

# Of the limit: what a choice is to use where something had to move, and what the closed form aims at between.
LEAST_USED = 0.92
MOST_USED = 0.98
_AIM = 0.965
# After a choice that the compiler found too big, the next one aims so much lower.
_LOWER = 0.02
# Where nobody knows what a host has, it is taken to have so many times the memory of its devices.
ASSUMED_HOST = 3
# Of a host's memory: what its operating system, the process itself with its libraries, and the batches take.
HOST_ASIDE = 4 << 30
_SANE_SCALES = (0.5, 2.0)


class Candidate(NamedTuple):
    """Settings, and what they come to.

    Attributes:
        settings: those that differ from the config.
        cost: by the closed form.
        peak: bytes of one device, as far as is known.
    """

    settings: Settings
    cost: Cost
    peak: int


class Limits(NamedTuple):
    """What one device may use.

    Attributes:
        device: bytes of its memory; None where not known.
        host: bytes of its host's memory; None where not known.
    """

    device: int | None
    host: int | None

    @staticmethod
    def of(target: Target, device: int | None, process_host: int | None) -> Limits:
        """The limits on a target.

        Args:
            target: the machine.
            device: bytes of a device.
            process_host: bytes of a process's host, which its devices share; None: what is known of the target.
        """
        host = process_host if process_host is not None else target.host_limit_bytes
        if host is not None:
            room_on_host = max(host - HOST_ASIDE, 0)
            return Limits(device, room_on_host * target.num_processes // target.num_devices)
        # People put into a host what goes with its cards: two to four times their memory.
        return Limits(device, None if device is None else ASSUMED_HOST * device)


@dataclass
class Room:
    """Whether settings fit, by the closed form as far as the compiler has not said it.

    Attributes:
        limits: of a device.
        scales: what the bytes beside the state are multiplied by, by schedule and recomputation.
        compiled: bytes of settings that were compiled.
    """

    limits: Limits
    scales: dict[tuple[str | None, str | None], float] = field(default_factory=dict)
    compiled: dict[Settings, int] = field(default_factory=dict)
    aim: float = _AIM
    scale: float = 1.0

    def peak(self, settings: Settings, cost: Cost) -> int:
        """Bytes of one device."""
        if settings in self.compiled:
            return self.compiled[settings]
        scale = self.scales.get(_kind(settings), self.scale)
        return int(cost.state + scale * (cost.peak - cost.state))

    def over(self, settings: Settings, cost: Cost) -> int:
        """The bytes of a device that are too many for what is aimed at; negative where there is room left."""
        if self.limits.device is None:
            return -1
        mark = self.limits.device * (MOST_USED if settings in self.compiled else self.aim)
        return self.peak(settings, cost) - int(mark)

    def host_over(self, cost: Cost) -> int:
        """The bytes of a device that are too many for its host."""
        return -1 if self.limits.host is None else cost.host - self.limits.host

    def fits(self, settings: Settings, cost: Cost | None) -> bool:
        """Whether device and host have room for the settings."""
        return cost is not None and self.over(settings, cost) <= 0 and self.host_over(cost) <= 0

    def learn(self, settings: Settings, cost: Cost, compiled: int) -> None:
        """Takes in what the compiler said of settings."""
        self.compiled[settings] = compiled
        low, high = _SANE_SCALES
        scale = (compiled - cost.state) / max(cost.peak - cost.state, 1)
        self.scale = min(max(scale, low), high)
        self.scales[_kind(settings)] = self.scale
        if self.limits.device is not None and compiled > self.limits.device:
            self.aim -= _LOWER


def _kind(settings: Settings) -> tuple[str | None, str | None]:
    remat = value_of(settings, REMAT)
    # Layers of two policies are nearly as those of one.
    policy = remat.partition(",")[0].partition(":")[0] if remat else remat
    return value_of(settings, UPDATE), policy
