"""Device memory that programs cannot use, the share of a GPU's memory that JAX takes, and the limit that follows.

`plimsoll plan` and `plimsoll train` use the same functions, so a plan's limit is the pool that the run gets. Figures
and sources are in outside_the_pool.toml. This module imports only the standard library, because it is needed before JAX
starts.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plimsoll.framework.devices.accelerators import MIB, AcceleratorSpec
from plimsoll.framework.devices.bfc_pool import ALLOCATOR_VARIABLE

MEMORY_FRACTION = "XLA_CLIENT_MEM_FRACTION"
# The second is the old name, which JAX still accepts.
_FRACTION_VARIABLES = (MEMORY_FRACTION, "XLA_PYTHON_CLIENT_MEM_FRACTION")
SLOP_FACTOR = "xla_gpu_memory_limit_slop_factor"
# Fraction for a GPU that is not in the accelerator tables.
UNKNOWN_GPU_FRACTION = 0.92
# Fractions are rounded down to a multiple of this.
_FRACTION_STEP = 1000
# Consumer cards are bought one by one, and no machine has room for more than this.
CARDS_PER_HOST = 8
# Mesh axes that shard the batch, as in layers/base.py, which this package may not import. A gradient's sum spans them.
BATCH_AXES = ("data", "fsdp", "expert")
# Those that shard the weights, as in layout/specs.py. Gathers of a weight span them, those of experts all but `expert`.
WEIGHT_AXES = ("fsdp", "seq", "expert")
# Each axis, and both.
_COMMUNICATORS_OF_TWO_AXES = 3
# Fractions that this process has put in the environment itself: they are not the user's.
_stored_fractions: list[str] = []


@dataclass(frozen=True)
class _CudaContext:
    mib_per_multiprocessor: float
    source: str


@dataclass(frozen=True)
class _Cublas:
    workspace_kib: dict[str, int]
    source: str


@dataclass(frozen=True)
class _Libraries:
    system_mib: dict[str, int]
    source: str


@dataclass(frozen=True)
class _Nccl:
    kernels_mib: int
    kernels_source: str
    connection_mib: int
    connection_source: str
    channels: int
    pcie_channels: int
    channels_source: str
    connections_per_channel: int
    nvls_channels: dict[str, int]
    nvls_mib_per_channel: int
    nvls_most_gpus: int
    nvls_source: str
    peer_channels: int
    pcie_peer_channels: int
    peers_source: str
    network_mib: int
    pcie_network_mib: int
    network_source: str


@dataclass(frozen=True)
class _Fragmentation:
    share: dict[str, float]
    source: str


@dataclass(frozen=True)
class _Compiler:
    base_share: float
    slop_factor: float
    source: str


# The comments in the file describe each figure; keys such as "9" are major compute capabilities.
_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("outside_the_pool.toml").read_text())
_CUDA_CONTEXT = _CudaContext(**_TABLE["cuda_context"])
_CUBLAS = _Cublas(**_TABLE["cublas"])
_LIBRARIES = _Libraries(**_TABLE["libraries"])
_NCCL = _Nccl(**_TABLE["nccl"])
_FRAGMENTATION = _Fragmentation(**_TABLE["fragmentation"])
_COMPILER = _Compiler(**_TABLE["compiler"])


@dataclass(frozen=True)
class ReservedPart:
    """A part of a device's memory that programs cannot use.

    Attributes:
        name: name of the part.
        bytes: its bytes on each device.
        source: where the figure comes from.
    """

    name: str
    bytes: int
    source: str


def list_reserved_parts(
    spec: AcceleratorSpec, num_devices: int = 1, mesh: Mapping[str, int] | None = None
) -> list[ReservedPart]:
    """Return the parts of each device's memory that programs cannot use; [] if they are unknown.

    Args:
        spec: the accelerator.
        num_devices: number of devices of the run, over all hosts.
        mesh: {mesh axis: size}, slowest first; None takes an upper bound of the meshes with at most two axes larger
            than one.
    """
    if spec.platform == "tpu" and spec.memory_bytes and spec.usable_bytes:
        source = "usable memory as the TPU compiler reports it (accelerators.toml)"
        return [ReservedPart("reserved by the TPU compiler", spec.memory_bytes - spec.usable_bytes, source)]
    if spec.platform != "gpu" or not (spec.memory_bytes and spec.multiprocessors and spec.compute_capability):
        return []
    parts = [*_list_cuda_parts(spec), *_list_nccl_parts(spec, num_devices, mesh)]
    share = _FRAGMENTATION.share.get(os.environ.get(ALLOCATOR_VARIABLE, ""))
    if share:
        pool_bytes = max(0, spec.memory_bytes - sum(part.bytes for part in parts))
        parts.append(ReservedPart("fragmentation", int(share * pool_bytes), _FRAGMENTATION.source))
    return parts


def _list_cuda_parts(spec: AcceleratorSpec) -> list[ReservedPart]:
    """Return the parts of a process that uses one GPU."""
    major = _major(spec)
    assert spec.multiprocessors is not None
    context_bytes = int(_CUDA_CONTEXT.mib_per_multiprocessor * spec.multiprocessors * MIB)
    workspace_bytes = _CUBLAS.workspace_kib[major] * 1024
    library_bytes = max(0, _LIBRARIES.system_mib[major] * MIB - context_bytes - workspace_bytes)
    return [
        ReservedPart("CUDA context", context_bytes, _CUDA_CONTEXT.source),
        ReservedPart("cuBLAS workspace", workspace_bytes, _CUBLAS.source),
        ReservedPart("kernels and libraries", library_bytes, _LIBRARIES.source),
    ]


def _list_nccl_parts(spec: AcceleratorSpec, num_devices: int, mesh: Mapping[str, int] | None) -> list[ReservedPart]:
    """Return what NCCL takes on each GPU; [] for one GPU."""
    if num_devices < 2:
        return []
    has_nvlink = spec.ici_bytes_per_second is not None
    # Machines of a cloud have a fast network, even those with one GPU each.
    is_fast = has_nvlink or spec.chips_per_host is not None
    local_sizes = _list_communicators(spec, num_devices, mesh)
    connection_bytes = _NCCL.connection_mib * MIB
    channels = _NCCL.channels if is_fast else _NCCL.pcie_channels
    ring_bytes = len(local_sizes) * channels * _NCCL.connections_per_channel * connection_bytes
    nvls_bytes = 0
    if has_nvlink:
        nvls_bytes_per_gpu = _NCCL.nvls_channels.get(_major(spec), 0) * _NCCL.nvls_mib_per_channel * MIB
        # A communicator with one GPU in each NVLink domain cannot use NVLink.
        joined_sizes = [min(size, _NCCL.nvls_most_gpus) for size in local_sizes if size > 1]
        nvls_bytes = nvls_bytes_per_gpu * sum(joined_sizes)
    peer_channels = _NCCL.peer_channels if has_nvlink else _NCCL.pcie_peer_channels
    peer_bytes = (max(local_sizes) - 1) * peer_channels * connection_bytes
    network_mib = _NCCL.network_mib if has_nvlink else _NCCL.pcie_network_mib
    ring_source = f"{_NCCL.connection_source}, {_NCCL.channels_source}"
    parts = [
        ReservedPart("NCCL kernels", _NCCL.kernels_mib * MIB, _NCCL.kernels_source),
        ReservedPart("NCCL rings and trees", ring_bytes, ring_source),
        ReservedPart("NCCL NVLink SHARP", nvls_bytes, _NCCL.nvls_source),
        ReservedPart("NCCL all-to-all", peer_bytes, _NCCL.peers_source),
        ReservedPart("NCCL network buffers", network_mib * MIB, _NCCL.network_source),
    ]
    return [part for part in parts if part.bytes]


def _list_communicators(spec: AcceleratorSpec, num_devices: int, mesh: Mapping[str, int] | None) -> list[int]:
    """Return the number of GPUs within one NVLink domain (or one host), for each communicator of a device.

    XLA makes a communicator for each distinct set of devices that a collective spans: each mesh axis, the axes of the
    batch and those of the weights together, and all axes.
    """
    island = get_island_size(spec)
    if mesh is None:
        # As if two axes were larger than one. With more of them, communicators share buffers, which is not subtracted.
        is_prime = all(num_devices % factor for factor in range(2, math.isqrt(num_devices) + 1))
        return [min(num_devices, island)] * (1 if is_prime else _COMMUNICATORS_OF_TWO_AXES)
    axes = [axis for axis, size in mesh.items() if size > 1]
    # The last axes vary fastest, so they get the nearest devices.
    local_size_by_axis = {}
    remaining = island
    for axis in reversed(axes):
        local_size_by_axis[axis] = min(mesh[axis], remaining)
        remaining = max(1, remaining // local_size_by_axis[axis])
    batch_axes = tuple(axis for axis in axes if axis in BATCH_AXES)
    weight_axes = tuple(axis for axis in axes if axis in WEIGHT_AXES)
    experts_axes = tuple(axis for axis in weight_axes if axis != "expert")
    spans = [*((axis,) for axis in axes), batch_axes, weight_axes, experts_axes, tuple(axes)]
    distinct_spans = [span for span in dict.fromkeys(spans) if span]
    return [math.prod(local_size_by_axis[axis] for axis in span) for span in distinct_spans] or [1]


def get_island_size(spec: AcceleratorSpec) -> int:
    """Return the number of GPUs that NVLink joins, or that one host has."""
    return spec.chips_per_nvlink or spec.chips_per_host or CARDS_PER_HOST


def get_user_fraction() -> float | None:
    """Return the fraction of a GPU's memory that the user's environment sets; None if it sets none.

    Raises:
        ValueError: the variable is not a positive number.
    """
    for name in _FRACTION_VARIABLES:
        text = os.environ.get(name)
        # An empty variable counts as not set.
        if not text or text in _stored_fractions:
            continue
        if not re.fullmatch(r"\d*\.?\d+", text.strip()) or float(text) == 0:
            raise ValueError(f"{name}={text}: expected a positive number, such as 0.9")
        return float(text)
    return None


def store_fraction(fraction: float) -> None:
    """Put a fraction in the environment, where JAX reads it when it starts."""
    _stored_fractions.append(str(fraction))
    os.environ[MEMORY_FRACTION] = str(fraction)


def is_fraction_set() -> bool:
    """Return whether the environment has a fraction, from the user or from `store_fraction`."""
    return any(os.environ.get(name) for name in _FRACTION_VARIABLES)


def get_memory_fraction(spec: AcceleratorSpec, num_devices: int = 1, mesh: Mapping[str, int] | None = None) -> float:
    """Return the fraction of a GPU's memory that JAX takes for programs, XLA_CLIENT_MEM_FRACTION.

    The value in the environment wins. Otherwise it is what `list_reserved_parts` leaves (JAX's own default is 0.75).
    Arguments are those of `list_reserved_parts`.
    """
    user_fraction = get_user_fraction()
    if user_fraction is not None:
        return user_fraction
    parts = list_reserved_parts(spec, num_devices, mesh)
    if not parts or not spec.memory_bytes:
        return UNKNOWN_GPU_FRACTION
    free_share = max(0, spec.memory_bytes - sum(part.bytes for part in parts)) / spec.memory_bytes
    return math.floor(free_share * _FRACTION_STEP) / _FRACTION_STEP


def get_limit_bytes(spec: AcceleratorSpec, num_devices: int = 1, mesh: Mapping[str, int] | None = None) -> int | None:
    """Return the memory of each device that a program has to fit into; None if unknown.

    On a TPU it is what the compiler reports, on a GPU the pool that JAX takes when it starts. Arguments are those of
    `list_reserved_parts`.
    """
    if spec.platform == "gpu" and spec.memory_bytes is not None:
        return int(spec.memory_bytes * get_memory_fraction(spec, num_devices, mesh))
    return spec.memory_bytes if spec.usable_bytes is None else spec.usable_bytes


def get_fraction_for_limit(spec: AcceleratorSpec, limit: int | None) -> float | None:
    """Return the fraction of a GPU's memory that makes a limit in bytes; None if there is none."""
    if spec.platform != "gpu" or limit is None or not spec.memory_bytes or limit > spec.memory_bytes:
        return None
    # A limit is a fraction's bytes, rounded down.
    return math.floor(10_000 * (limit + 1) / spec.memory_bytes) / 10_000


def get_scheduler_limit_bytes(memory_bytes: int, io_bytes: int, slop_factor: float | None = None) -> int:
    """Return the bytes of temporaries above which XLA's GPU compiler recomputes parts of a program.

    Args:
        memory_bytes: memory of the device.
        io_bytes: arguments and results in device memory, aliased ones counted once.
        slop_factor: xla_gpu_memory_limit_slop_factor; None takes the one of XLA_FLAGS, or XLA's default.
    """
    if slop_factor is None:
        flag = re.search(rf"--{SLOP_FACTOR}=(\d+)", os.environ.get("XLA_FLAGS", ""))
        slop_factor = float(flag[1]) if flag else _COMPILER.slop_factor
    return max(0, int((_COMPILER.base_share * memory_bytes - io_bytes) * slop_factor / 100))


def choose_slop_factor(memory_bytes: int, io_bytes: int, limit: int) -> int | None:
    """Return the slop factor that lets a program's temporaries fill a limit; None if none does."""
    base_bytes = get_scheduler_limit_bytes(memory_bytes, io_bytes, 100)
    return math.ceil(100 * (limit - io_bytes) / base_bytes) if base_bytes else None


def _major(spec: AcceleratorSpec) -> str:
    assert spec.compute_capability is not None
    return spec.compute_capability.partition(".")[0]
