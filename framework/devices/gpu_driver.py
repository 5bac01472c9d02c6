"""Asks NVIDIA's driver for the GPUs of this machine, before JAX starts and without taking any of their memory.

It uses NVML, the library of nvidia-smi, which the driver installs. This module imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from plimsoll.framework.devices.accelerators import ACCELERATORS, AcceleratorSpec

_LIBRARY = "libnvidia-ml.so.1"
_NAME_LENGTH = 96
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class InstalledGpu:
    """A GPU of this machine.

    Attributes:
        name: name, such as "NVIDIA H100 80GB HBM3"; JAX calls it the device kind.
        memory_bytes: memory of the card, which is some hundred MiB more than CUDA's total.
    """

    name: str
    memory_bytes: int


class _Memory(ctypes.Structure):
    """The struct nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def list_gpus() -> list[InstalledGpu]:
    """Return the NVIDIA GPUs that this process may use; [] without a driver, or if they are parts of GPUs (MIG)."""
    visible = os.environ.get(_VISIBLE)
    if visible is not None and "MIG" in visible:
        return []
    gpus = _query_driver()
    if visible is not None:
        # Machines have GPUs of one kind, so only their number matters.
        names = [name for name in visible.split(",") if name.strip()]
        gpus = gpus[: len(names)]
    return gpus


def _query_driver() -> list[InstalledGpu]:
    """Return all GPUs that the driver knows."""
    try:
        nvml = ctypes.CDLL(_LIBRARY)
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        gpus = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            name = ctypes.create_string_buffer(_NAME_LENGTH)
            memory = _Memory()
            codes = (
                nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)),
                nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(_NAME_LENGTH)),
                nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
            )
            if any(codes):
                return []
            gpus.append(InstalledGpu(name.value.decode(), memory.total))
        return gpus
    finally:
        nvml.nvmlShutdown()


def find_installed_spec(gpus: list[InstalledGpu]) -> AcceleratorSpec | None:
    """Return the spec of GPUs of one kind; None if they are of several kinds or not in the accelerator tables."""
    if len({gpu.name for gpu in gpus}) != 1:
        return None
    # Two cards may have the same name. Take the largest spec with no more memory than the card.
    best = None
    for spec in ACCELERATORS:
        memory_bytes = spec.memory_bytes or 0
        if gpus[0].name not in spec.device_kinds or memory_bytes > gpus[0].memory_bytes:
            continue
        if best is None or memory_bytes > (best.memory_bytes or 0):
            best = spec
    return best
