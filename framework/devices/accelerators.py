"""Accelerators: the names people use, what jax calls them, and what each one has (memory, peak rates, host).

The tables are accelerators.toml (TPUs, CPUs), gpus_server.toml and gpus_workstation.toml, every figure with its source.
Imports nothing but the standard library: it is there before JAX is.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
MIB = 2**20
# Files of this folder.
_TABLES = ("accelerators.toml", "gpus_server.toml", "gpus_workstation.toml")
# What people write before a card's name, or leave out: "NVIDIA GeForce RTX 4090", "rtx4090" and "4090" are one.
_MAKERS = ("nvidia", "tesla", "geforce", "rtx")
# Of a GPU's memory, for XLA. The rest is for the CUDA context, the kernels' code, NCCL, and cuDNN and cuBLAS handles.
GPU_MEMORY_FRACTION = 0.92
# XLA pins no more host memory than that on a GPU machine, GiB for all GPUs of a process; 64 where it is not set. It
# grows by need, so `plimsoll train` sets nearly all that the machine has: the rest is for Python, data and checkpoints.
HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
HOST_MEMORY_FRACTION = 0.9
# The second is the old name, which still counts.
_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# Limits of a container, of cgroup version 2 and 1.
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class AcceleratorSpec:
    """What one jax device of a kind has. Bytes and FLOP/s are per jax device; None: unknown (no MFU, no limit).

    Attributes:
      name: the name people use: v5e, h200, cpu. platform: tpu, gpu or cpu, as jax names it.
      device_kinds: the values of `jax.Device.device_kind` that mean this accelerator; by the first of them a GPU that
        is only compiled for is told from others.
      aliases: further names, besides those that `named` understands without.
      memory_bytes: device memory: HBM as published, or (GPU) the total that the CUDA driver reports.
      usable_bytes: what one program may use, where that is published. None for GPUs, see `limit_bytes`.
      peak_bf16_flops: dense bfloat16 products, and float16 ones where peak_f16_flops does not say otherwise.
      peak_tf32_flops: float32 in tensor cores. peak_f32_flops: float32 outside of them.
      flops_per_cycle: bfloat16 products of a TPU, in cycles of its compiler's cost model.
      hbm_bytes_per_second: to and from device memory, together.
      ici_bytes_per_second: from other chips of a slice, one way, over all links; ici_link_bytes_per_second: over one.
        Of GPUs: NVLink that joins all of a machine. nvlink_pair_bytes_per_second: of a bridge, which joins two cards.
      pcie_bytes_per_second: to or from the host, one way.
      cores_per_chip, devices_per_chip: TensorCores and jax devices of one chip. Names count cores (v5p-8 has 4 chips).
      chips_per_host, host_memory_bytes: of one machine (a VM, on Cloud), which the comment beside them names. None: as
        many as its owner has put in.
      chips_per_nvlink: GPUs that NVLink joins, where they are of several hosts.
      ring_chips: a slice's dimension is closed to a ring where it is a multiple of so many chips; one with three
        dimensions, where all of them are.
      topologies: of the slices that Cloud has, in chips.
      compute_capability: of a GPU, "8.9"; multiprocessors (SMs), clock_ghz (the largest) and l2_bytes likewise.
      compiler_options: what its compiler is told unless a config says otherwise (name, value).
    """

    name: str
    platform: str
    device_kinds: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    memory_bytes: int | None = None
    usable_bytes: int | None = None
    peak_bf16_flops: float | None = None
    peak_f16_flops: float | None = None
    peak_tf32_flops: float | None = None
    peak_f32_flops: float | None = None
    flops_per_cycle: int | None = None
    hbm_bytes_per_second: float | None = None
    ici_bytes_per_second: float | None = None
    ici_link_bytes_per_second: float | None = None
    nvlink_pair_bytes_per_second: float | None = None
    pcie_bytes_per_second: float | None = None
    cores_per_chip: int = 1
    devices_per_chip: int = 1
    chips_per_host: int | None = None
    chips_per_nvlink: int | None = None
    host_memory_bytes: int | None = None
    ring_chips: int | None = None
    topologies: tuple[str, ...] = ()
    compute_capability: str | None = None
    multiprocessors: int | None = None
    clock_ghz: float | None = None
    l2_bytes: int | None = None
    compiler_options: tuple[tuple[str, bool | int | str], ...] = ()

    @property
    def limit_bytes(self) -> int | None:
        """What a program has to fit into: usable bytes where known, else the whole memory, else None.

        On a GPU JAX takes a fraction of the memory when it starts and gives no program more: XLA_CLIENT_MEM_FRACTION,
        for which `plimsoll train` takes GPU_MEMORY_FRACTION (JAX itself 0.75) where the environment says nothing.
        """
        if self.platform == "gpu" and self.memory_bytes is not None:
            values = [os.environ.get(name) for name in _FRACTION_VARIABLES]
            # Variables that are set to nothing count as not set.
            fractions = [value for value in values if value]
            fraction = fractions[0] if fractions else GPU_MEMORY_FRACTION
            return int(self.memory_bytes * float(fraction))
        if self.usable_bytes is not None:
            return self.usable_bytes
        return self.memory_bytes

    def peak_flops(self, dtype: str = "bfloat16") -> float | None:
        """Peak FLOP/s of a matrix product whose operands are `dtype`, at XLA's default precision; None if not known.

        By default XLA runs a float32 product in bfloat16 passes on TPU and in TF32 on A100 and later, so that is the
        rate an MFU has to be measured against (docs.jax.dev/en/latest/201/precision.html). Older GPUs have no TF32.
        """
        if dtype == "bfloat16":
            return self.peak_bf16_flops
        if dtype == "float16":
            return self.peak_f16_flops or self.peak_bf16_flops
        if dtype == "float32":
            if self.platform == "tpu":
                return self.peak_bf16_flops
            has_tf32 = self.compute_capability is not None and float(self.compute_capability) >= 8.0
            return self.peak_tf32_flops if has_tf32 else self.peak_f32_flops
        return None


def _table() -> Iterator[AcceleratorSpec]:
    """The rows of all tables. There sizes are in GiB or MiB; lists become tuples, so that a spec can be hashed."""
    for file_name in _TABLES:
        rows = tomllib.loads(Path(__file__).with_name(file_name).read_text())
        for name, row in rows.items():
            # A row may give a name of its own: several kinds of devices are one accelerator.
            fields: dict[str, Any] = {"name": name}
            for key, value in row.items():
                if key.endswith("_gib"):
                    fields[key.replace("_gib", "_bytes")] = int(value * GIB)
                elif key.endswith("_mib"):
                    fields[key.replace("_mib", "_bytes")] = int(value * MIB)
                elif key == "compiler_options":
                    fields[key] = tuple(value.items())
                elif isinstance(value, list):
                    fields[key] = tuple(value)
                else:
                    fields[key] = value
            yield AcceleratorSpec(**fields)


ACCELERATORS = tuple(_table())


def _plain(name: str) -> str:
    """A name as it is compared: "RTX 4090", "rtx-4090" and "4090" are one, and "A100-80GB" is "a100-80"."""
    plain_name = re.sub(r"[\s_-]+", "", name.lower())
    for maker in _MAKERS:
        plain_name = plain_name.removeprefix(maker)
    return re.sub(r"(?<=\d)gb$", "", plain_name)


_SPEC_BY_PLAIN_NAME = {_plain(name): spec for spec in reversed(ACCELERATORS) for name in (*spec.aliases, spec.name)}


def named(name: str) -> AcceleratorSpec | None:
    """The row of a name as people type it ("RTX 4090", "4090", "h100-sxm"), or None."""
    return _SPEC_BY_PLAIN_NAME.get(_plain(name))


def names() -> list[str]:
    """All names, aliases included, each once."""
    return list(dict.fromkeys(name for spec in ACCELERATORS for name in (spec.name, *spec.aliases)))


def spec_for(name_or_devices: str | Sequence[Any]) -> AcceleratorSpec:
    """The row for a name ("v5p"), a jax device kind ("TPU v5"), or jax devices of one kind.

    Devices of a kind without a row get a spec that knows nothing but its name: training on them works, without an MFU.

    Raises:
      ValueError: an unknown name (the nearest ones are given), no devices, or devices of several kinds.
    """
    if isinstance(name_or_devices, str):
        kind = name_or_devices
    else:
        kinds = sorted({device.device_kind for device in name_or_devices})
        if len(kinds) != 1:
            raise ValueError(f"expected devices of one kind, got {kinds or 'no devices'}")
        kind = kinds[0]
        # A topology that is compiled for without a device shows each core of a v4 as a device, and
        # libtpu calls that a TPU v4 too.
        if kind == "TPU v4" and getattr(name_or_devices[0], "num_cores", 2) == 1:
            kind = "TPU v4 core"
    specs_of_kind = [spec for spec in ACCELERATORS if kind == spec.name or kind in spec.device_kinds]
    if len(specs_of_kind) > 1 and not isinstance(name_or_devices, str):
        return _told_by_memory(specs_of_kind, name_or_devices[0])
    if specs_of_kind:
        return specs_of_kind[0]
    if isinstance(name_or_devices, str):
        spec = named(kind)
        if spec is not None:
            return spec
        nearest_names = difflib.get_close_matches(kind, names(), n=3, cutoff=0.4) or names()
        raise ValueError(f"unknown accelerator {kind!r}; nearest: {', '.join(nearest_names)}")
    slug = kind.lower().removeprefix("nvidia ").replace(" ", "-")
    return AcceleratorSpec(slug, name_or_devices[0].platform, (kind,))


def _told_by_memory(specs: Sequence[AcceleratorSpec], device: Any) -> AcceleratorSpec:
    """Of cards that share a name: the smallest whose memory holds what JAX has taken of the device's."""
    taken_bytes = 0
    # Devices that are only compiled for, and those of other processes, know no memory.
    with suppress(AttributeError, RuntimeError, NotImplementedError):
        taken_bytes = (device.memory_stats() or {}).get("bytes_limit", 0)
    by_memory = sorted(specs, key=lambda spec: spec.memory_bytes or 0)
    for spec in by_memory:
        if taken_bytes <= (spec.memory_bytes or 0):
            return spec
    return by_memory[-1]


def accelerator_name(devices: Sequence[Any]) -> str:
    """The name of a set of devices, as Cloud and people write it; rules by accelerator match it with fnmatch.

    v5e-8 (chips), v5p-8 (cores: four chips), h200x8, cpu-8; several slices are 2xv5e-256, which `v5e-*` does not match
    (a mesh over slices is another mesh) and `*v5e-*` does. Raises ValueError as `spec_for`.
    """
    spec = spec_for(devices)
    slices: set[int] = set()
    for device in devices:
        # GPUs have this attribute too, where it counts hosts.
        slice_index = getattr(device, "slice_index", None) if spec.platform == "tpu" else None
        slices.add(slice_index or 0)
    num_slices = len(slices)
    devices_per_slice = len(devices) // num_slices
    count = devices_per_slice * spec.cores_per_chip // spec.devices_per_chip
    separator = "x" if spec.platform == "gpu" else "-"
    name = f"{spec.name}{separator}{count}"
    return f"{num_slices}x{name}" if num_slices > 1 else name


def machine_memory_bytes() -> int:
    """Memory of this machine, or as much of it as this process's container (cgroup) may use."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    limits = [page_bytes * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        # A file says "max" where there is no limit; it is not there with the other cgroup version.
        with suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text()))
    return min(limits)
