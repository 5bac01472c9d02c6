"""The rates that a device achieves by kind of work and by size: measured, or assumed from published figures.

Measured rates are stored under $XDG_CACHE_HOME, one file for each kind of device.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from plimsoll.framework.devices.accelerators import AcceleratorSpec
from plimsoll.framework.plan.cache import rates_folder

WorkKind = Literal[
    # Matrix products, by the FLOPs of one product.
    "product f32",
    "product bf16",
    # Many small products, as in attention on a CPU, by the FLOPs of one product.
    "batched product",
    # Memory-bound work, by the bytes in use.
    "memory",
    # Compute-bound elementwise work, by the number of operations.
    "arithmetic",
    "transcendental",
]
CurvePoints = tuple[tuple[float, float], ...]

# Fractions of the published peaks that programs are assumed to reach on a GPU that was never measured: matrix products
# by cuBLAS and Triton, memory-bound kernels, and transfers over PCIe.
PRODUCT_EFFICIENCY = 0.7
# GeForce cards come closer to their peak: summing in float32 halves their rate, so operands arrive fast enough, and
# their clocks rise above the published one. Fitted to the three rates of torchtune on an RTX 4090 in
# docs/benchmarks/public_record.md. Nine rates of FlexTrain on an RTX 5090 were not used for it: the estimates are 0.80
# to 1.02 times these, with a median of 0.88.
GEFORCE_PRODUCT_EFFICIENCY = 0.85
MEMORY_EFFICIENCY = 0.85
PCIE_EFFICIENCY = 0.75
# Seconds that a GPU takes to start a kernel, and that Python takes to start a program.
KERNEL_START = 3e-6
PROGRAM_START = 1e-4
# Assumed rates of one core of a CPU that was never measured: AVX2 at 3 GHz reaches about half of 96 GFLOP/s in float32.
_CORE_FLOPS = 48e9
_CORE_OPERATIONS = 8e9
_CORE_TRANSCENDENTAL = 1e9
_CPU_BYTES = 12e9
_CPU_START = 1e-6


@dataclass(frozen=True)
class TimeCurve:
    """Seconds that a kind of work takes, by its amount.

    Attributes:
        points: (amount, seconds), sorted by amount. Between two points, the curve is interpolated in log-log space.
            Beyond the last one the rate stays constant, and below the first one the seconds do.
    """

    points: CurvePoints

    @staticmethod
    def from_rate(per_second: float, start: float) -> TimeCurve:
        """Return a curve with a constant rate and a startup time.

        Args:
            per_second: rate of large amounts of work, in amount per second.
            start: startup time in seconds.
        """
        amounts = [10.0**exponent for exponent in range(3, 16)]
        return TimeCurve(tuple((amount, start + amount / per_second) for amount in amounts))

    def seconds(self, amount: float) -> float:
        """Return the seconds that an amount takes; 0 for an amount of 0."""
        if amount <= 0:
            return 0.0
        amounts = [point_amount for point_amount, _ in self.points]
        position = bisect.bisect_left(amounts, amount)
        if position == 0:
            return self.points[0][1]
        if position == len(self.points):
            last_amount, last_seconds = self.points[-1]
            return last_seconds * amount / last_amount
        (low, low_seconds), (high, high_seconds) = self.points[position - 1 : position + 1]
        share = math.log(amount / low) / math.log(high / low)
        return low_seconds * (high_seconds / low_seconds) ** share

    def rate(self, amount: float) -> float:
        """Return the amount per second when the work comes in chunks of `amount`."""
        return amount / self.seconds(amount)


@dataclass(frozen=True)
class DeviceRates:
    """The rates of one device.

    Attributes:
        device: name of the device, as in framework/devices/.
        curves: curve of each kind of work.
        program_start: seconds that Python takes to start a program.
        host_link: bytes per second to or from host memory, in each direction; None if unknown, or if device and host
            memory are the same.
        links: bytes per second that a device receives from others; None if unknown.
        measured: date and machine of the measurement, such as "2026-11-24, 2 cores"; empty if the rates are assumed.
        versions: versions of the packages that it was measured with, such as jax and jaxlib.
    """

    device: str
    curves: Mapping[WorkKind, TimeCurve]
    program_start: float = PROGRAM_START
    host_link: float | None = None
    links: float | None = None
    measured: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def curve(self, kind: WorkKind) -> TimeCurve:
        """Return the curve of a kind of work."""
        return self.curves[kind]


def get_product_efficiency(spec: AcceleratorSpec) -> float:
    """Return the fraction of its peak that a GPU that was never measured is assumed to reach in matrix products."""
    is_geforce = any("GeForce" in kind for kind in spec.device_kinds)
    return GEFORCE_PRODUCT_EFFICIENCY if is_geforce else PRODUCT_EFFICIENCY


def assume_gpu_rates(spec: AcceleratorSpec) -> DeviceRates | None:
    """Return the rates of a GPU, assumed from its published peaks; None if those are not published."""
    half_peak = spec.peak_bf16_flops or spec.peak_f16_flops
    full_peak = spec.peak_flops("float32") or half_peak
    if half_peak is None or full_peak is None or spec.hbm_bytes_per_second is None:
        return None
    reached = get_product_efficiency(spec)
    curves: dict[WorkKind, TimeCurve] = {
        "product bf16": TimeCurve.from_rate(reached * half_peak, KERNEL_START),
        "product f32": TimeCurve.from_rate(reached * full_peak, KERNEL_START),
        "memory": TimeCurve.from_rate(MEMORY_EFFICIENCY * spec.hbm_bytes_per_second, KERNEL_START),
    }
    pcie = spec.pcie_bytes_per_second
    links = spec.ici_bytes_per_second or spec.nvlink_pair_bytes_per_second or pcie
    host_link = None if pcie is None else PCIE_EFFICIENCY * pcie
    return DeviceRates(spec.name, curves, host_link=host_link, links=links)


def assume_cpu_rates(cores: int) -> DeviceRates:
    """Return the assumed rates of a CPU that was never measured, by its number of cores."""
    curves: dict[WorkKind, TimeCurve] = {
        "product f32": TimeCurve.from_rate(cores * _CORE_FLOPS, _CPU_START),
        "batched product": TimeCurve.from_rate(cores * _CORE_FLOPS / 2, _CPU_START),
        "memory": TimeCurve.from_rate(_CPU_BYTES, _CPU_START),
        "arithmetic": TimeCurve.from_rate(cores * _CORE_OPERATIONS, _CPU_START),
        "transcendental": TimeCurve.from_rate(cores * _CORE_TRANSCENDENTAL, _CPU_START),
    }
    return DeviceRates("cpu", curves)


def rates_path(device: str) -> Path:
    """Return the file that stores the rates of a kind of device.

    Args:
        device: name of the kind of device, such as "h100".
    """
    return rates_folder() / f"{device}.json"


def save_rates(rates: DeviceRates) -> Path:
    """Write the rates of a device, and return the file.

    Raises:
        OSError: the file cannot be written.
    """
    path = rates_path(rates.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Write to another file first, so that an interrupted write leaves no damaged rates.
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(asdict(rates), indent=1) + "\n")
    temporary.replace(path)
    return path


def load_measured_rates(device: str) -> DeviceRates | None:
    """Load the measured rates of a device; None if it was never measured, or if the file is damaged."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        fields = json.loads(rates_path(device).read_text())
        curves = {}
        for kind, curve in fields.pop("curves").items():
            points = tuple((float(amount), float(seconds)) for amount, seconds in curve["points"])
            curves[kind] = TimeCurve(points)
        return DeviceRates(curves=curves, **fields)
    return None


def load_rates(spec: AcceleratorSpec, cores: int) -> DeviceRates | None:
    """Return the measured rates of a device, else assumed ones.

    Args:
        spec: the device.
        cores: number of cores, for the assumed rates of a CPU.
    """
    measured = load_measured_rates(spec.name)
    if measured is not None:
        return measured
    return assume_cpu_rates(cores) if spec.platform == "cpu" else assume_gpu_rates(spec)
