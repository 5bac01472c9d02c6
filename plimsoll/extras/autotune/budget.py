"""Memory budget of a device and its host, corrected by the results of earlier compilations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from plimsoll.extras.autotune.cost_model import SettingsCost
from plimsoll.extras.autotune.settings import REMAT, UPDATE, Settings, get_text
from plimsoll.framework.plan.targets import Target

# Fractions of the limit: the most that the result may use, and what the estimate aims at.
MOST_USED = 0.98
_AIMED_FRACTION = 0.965
# How far to lower the aim after a candidate turned out too big when compiled.
_AIM_STEP = 0.02
# If the memory of a host is unknown, assume this multiple of the memory of its devices.
ASSUMED_HOST = 3
# Host memory reserved for the operating system, the process itself with its libraries, and the batches, in bytes.
HOST_RESERVE = 4 << 30
_SCALE_RANGE = (0.5, 2.0)


class Candidate(NamedTuple):
    """Settings with their cost.

    Attributes:
        settings: settings that differ from the config.
        cost: cost by the analytical estimate.
        peak: peak bytes of one device: compiled if available, else the corrected estimate.
    """

    settings: Settings
    cost: SettingsCost
    peak: int


class MemoryLimits(NamedTuple):
    """Memory that one device may use.

    Attributes:
        device: bytes of device memory; None if unknown.
        host: bytes of host memory per device; None if unknown.
    """

    device: int | None
    host: int | None

    @staticmethod
    def derive(target: Target, device: int | None, process_host: int | None) -> MemoryLimits:
        """Return the limits on a target.

        Args:
            target: the machine.
            device: bytes that one device may use; None if unknown.
            process_host: memory of one process's host, which its devices share, in bytes; None takes the target's
                known value.
        """
        host = process_host if process_host is not None else target.host_limit_bytes
        if host is not None:
            available = max(host - HOST_RESERVE, 0)
            return MemoryLimits(device, available * target.num_processes // target.num_devices)
        # Hosts usually have two to four times the memory of their cards.
        return MemoryLimits(device, None if device is None else ASSUMED_HOST * device)


@dataclass
class MemoryBudget:
    """Decides whether settings fit: by the compiled size if known, else by the analytical estimate.

    Attributes:
        limits: limits of one device.
        scales: correction factors for the estimated bytes other than the state, by (schedule, remat policy).
        compiled: compiled bytes of one device, by settings.
        aim: fraction of the device limit that an estimated peak may use.
        scale: correction factor for schedules and policies without an entry in `scales`.
    """

    limits: MemoryLimits
    scales: dict[tuple[str | None, str | None], float] = field(default_factory=dict)
    compiled: dict[Settings, int] = field(default_factory=dict)
    aim: float = _AIMED_FRACTION
    scale: float = 1.0

    def peak(self, settings: Settings, cost: SettingsCost) -> int:
        """Return the peak bytes of one device: compiled if known, else the corrected estimate.

        Args:
            settings: settings of the config.
            cost: their estimated cost.
        """
        if settings in self.compiled:
            return self.compiled[settings]
        scale = self.scales.get(_scale_key(settings), self.scale)
        # The size of the state is exact. Only the estimate of the rest, such as residuals and temporaries, is scaled.
        return int(cost.state + scale * (cost.peak - cost.state))

    def over(self, settings: Settings, cost: SettingsCost) -> int:
        """Return by how many bytes the settings exceed the usable device memory; negative if there is room left.

        Args:
            settings: settings of the config.
            cost: their estimated cost.
        """
        if self.limits.device is None:
            return -1
        # An estimate may be too low, so it has to leave a larger margin than a compiled size.
        usable = self.limits.device * (MOST_USED if settings in self.compiled else self.aim)
        return self.peak(settings, cost) - int(usable)

    def host_over(self, cost: SettingsCost) -> int:
        """Return by how many bytes one device exceeds its share of host memory; negative if there is room left."""
        return -1 if self.limits.host is None else cost.host - self.limits.host

    def fits(self, settings: Settings, cost: SettingsCost | None) -> bool:
        """Return whether device and host have room for the settings.

        Args:
            settings: settings of the config.
            cost: their estimated cost; None if they are not possible.
        """
        return cost is not None and self.over(settings, cost) <= 0 and self.host_over(cost) <= 0

    def learn(self, settings: Settings, cost: SettingsCost, compiled: int) -> None:
        """Record the compiled bytes of settings and update the correction factors.

        Args:
            settings: settings that were compiled.
            cost: their estimated cost.
            compiled: bytes that the compiled program needs on one device.
        """
        self.compiled[settings] = compiled
        # The clamp keeps one unusual program from distorting the estimates of all other settings.
        low, high = _SCALE_RANGE
        scale = (compiled - cost.state) / max(cost.peak - cost.state, 1)
        self.scale = min(max(scale, low), high)
        self.scales[_scale_key(settings)] = self.scale
        if self.limits.device is not None and compiled > self.limits.device:
            self.aim -= _AIM_STEP


def _scale_key(settings: Settings) -> tuple[str | None, str | None]:
    remat = get_text(settings, REMAT)
    # Count a mixture of two policies as its first one: their correction factors are nearly the same.
    policy = remat.partition(",")[0].partition(":")[0] if remat else remat
    return get_text(settings, UPDATE), policy
