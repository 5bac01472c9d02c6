"""The rates that a device reaches by kind of work and by size, measured, or assumed from what is published."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from framework.devices.accelerators import AcceleratorSpec

Kind = Literal[
    # Matrix products, by FLOPs of one.
    "product f32",
    "product bf16",
    # Many small products, as attention has on CPU, by FLOPs of one.
    "batched product",
    # Work that memory bounds, by the bytes that are in use.
    "memory",
    # Work that the cores bound, by the number of operations.
    "arithmetic",
    "transcendental",
]
Points = tuple[tuple[float, float], ...]

# Of published peaks, what programs are taken to reach on a GPU that was never measured: products by cuBLAS and Triton,
# and kernels that memory bounds.
PRODUCTS_OF_PEAK = 0.7
MEMORY_OF_PEAK = 0.85
PCIE_OF_PEAK = 0.75
# Seconds that a GPU takes to start a kernel, and that Python takes to start a program.
KERNEL_START = 3e-6
PROGRAM_START = 1e-4
# Of one core of a CPU that was never measured: AVX2 at 3 GHz reaches about half of 96 GFLOP/s in float32.
_CORE_FLOPS = 48e9
_CORE_OPERATIONS = 8e9
_CORE_TRANSCENDENTAL = 1e9
_CPU_BYTES = 12e9
_CPU_START = 1e-6


@dataclass(frozen=True)
class Curve:
    """Seconds of a kind of work by its amount.

    Attributes:
        points: (amount, seconds), the smallest amount first. Between two points it is interpolated in logarithms;
            beyond the last one the rate stays, and nothing takes less than the first.
    """

    points: Points

    @staticmethod
    def of_rate(per_second: float, start: float) -> Curve:
        """A curve of one rate, where each piece of work takes a while to start.

        Args:
            per_second: the rate of large pieces.
            start: seconds.
        """
        amounts = [10.0**exponent for exponent in range(3, 16)]
        return Curve(tuple((amount, start + amount / per_second) for amount in amounts))

    def seconds(self, amount: float) -> float:
        """The seconds that an amount takes; none for nothing."""
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
        """The amount in a second, of pieces that are so large."""
        return amount / self.seconds(amount)


@dataclass(frozen=True)
class DeviceRates:
    """The rates of one device.

    Attributes:
        device: its name, as in framework/devices/.
        curves: by kind of work.
        program_start: seconds that Python takes to start a program.
        host_link: bytes per second to or from host memory, each way; None where not known, or where they are one.
        links: bytes per second that a device receives from others; None where not known.
        measured: when and where, "2026-11-24, 2 cores"; empty: never, the rates are assumed.
        versions: of jaxlib and the compiler that it was measured with.
    """

    device: str
    curves: Mapping[Kind, Curve]
    program_start: float = PROGRAM_START
    host_link: float | None = None
    links: float | None = None
    measured: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def curve(self, kind: Kind) -> Curve:
        """The curve of a kind of work."""
        return self.curves[kind]


def assumed_gpu(spec: AcceleratorSpec) -> DeviceRates | None:
    """The rates of a GPU by its published peaks; None where these are not published."""
    half_peak = spec.peak_bf16_flops or spec.peak_f16_flops
    full_peak = spec.peak_flops("float32") or half_peak
    if half_peak is None or full_peak is None or spec.hbm_bytes_per_second is None:
        return None
    curves: dict[Kind, Curve] = {
        "product bf16": Curve.of_rate(PRODUCTS_OF_PEAK * half_peak, KERNEL_START),
        "product f32": Curve.of_rate(PRODUCTS_OF_PEAK * full_peak, KERNEL_START),
        "memory": Curve.of_rate(MEMORY_OF_PEAK * spec.hbm_bytes_per_second, KERNEL_START),
    }
    pcie = spec.pcie_bytes_per_second
    links = spec.ici_bytes_per_second or spec.nvlink_pair_bytes_per_second or pcie
    host_link = None if pcie is None else PCIE_OF_PEAK * pcie
    return DeviceRates(spec.name, curves, host_link=host_link, links=links)


def assumed_cpu(cores: int) -> DeviceRates:
    """The rates of a CPU that was never measured, by its number of cores."""
    curves: dict[Kind, Curve] = {
        "product f32": Curve.of_rate(cores * _CORE_FLOPS, _CPU_START),
        "batched product": Curve.of_rate(cores * _CORE_FLOPS / 2, _CPU_START),
        "memory": Curve.of_rate(_CPU_BYTES, _CPU_START),
        "arithmetic": Curve.of_rate(cores * _CORE_OPERATIONS, _CPU_START),
        "transcendental": Curve.of_rate(cores * _CORE_TRANSCENDENTAL, _CPU_START),
    }
    return DeviceRates("cpu", curves)
