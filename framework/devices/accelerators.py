"""Accelerators: their common names, their jax device kinds, and their specs (memory, peak rates, host).

The tables are accelerators.toml (TPUs, CPUs), gpus_server.toml and gpus_workstation.toml; every figure has its source.
This module imports only the standard library, because it is needed before JAX is imported.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

GIB = 2**30
MIB = 2**20
# Files of this folder.
_TABLES = ("accelerators.toml", "gpus_server.toml", "gpus_workstation.toml")
# Optional prefixes of a card's name: "NVIDIA GeForce RTX 4090", "rtx4090" and "4090" are the same card.
_MAKERS = ("nvidia", "tesla", "geforce", "rtx")
# This variable limits the host memory that XLA pins on a GPU machine, in GiB for all GPUs of a process; the default is
# 64. The pool grows on demand, in regions that double in size, and never shrinks.
HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


class Device(Protocol):
    """A jax.Device, or a device of a topology to compile for. JAX publishes no type for either."""

    id: int
    platform: str
    device_kind: str
    memory_stats: Callable[[], Mapping[str, int] | None]


@dataclass(frozen=True)
class AcceleratorSpec:
    """Specs of one kind of jax device. Bytes and FLOP/s are per jax device; None means unknown (no MFU, no limit).

    Attributes:
        name: common name: v5e, h200, cpu.
        platform: tpu, gpu or cpu, as jax names it.
        device_kinds: values of `jax.Device.device_kind` that mean this accelerator. The first one identifies a GPU when
            compiling for it without a device.
        aliases: further names, in addition to the spellings that `find_spec` already understands.
        memory_bytes: device memory: HBM as published or, for GPUs, the total that the CUDA driver reports.
        usable_bytes: memory that one program may use, if published. None for GPUs, see reserved_memory.py.
        peak_bf16_flops: FLOP/s of dense bfloat16 matrix products, and of float16 ones unless peak_f16_flops is set.
        peak_f16_flops: FLOP/s of dense float16 matrix products, if they differ from bfloat16 ones.
        peak_tf32_flops: FLOP/s of float32 matrix products in tensor cores.
        peak_f32_flops: FLOP/s of float32 outside of tensor cores.
        peak_fp8_flops: FLOP/s of products of 8-bit floats with dense operands. None for GPUs, see `peak_flops`.
        peak_int8_flops: the same for 8-bit integers.
        flops_per_cycle: FLOPs of a TPU's bfloat16 products per cycle of its compiler's cost model.
        hbm_bytes_per_second: bandwidth to and from device memory, together.
        ici_bytes_per_second: bandwidth from other chips of a slice, one way, over all links. For GPUs: NVLink that
            joins all GPUs of a machine.
        ici_link_bytes_per_second: bandwidth of one such link, one way.
        dcn_bytes_per_second: bandwidth from other slices over the data-center network, one way.
        nvlink_pair_bytes_per_second: bandwidth of an NVLink bridge, which joins two cards.
        pcie_bytes_per_second: bandwidth to or from the host, one way.
        cores_per_chip: TensorCores of one chip. Names count cores: v5p-8 has 4 chips.
        devices_per_chip: jax devices of one chip.
        chips_per_host: chips of one machine (a VM, on Cloud). The comment in the table names the machine. None if the
            number is up to the owner.
        chips_per_nvlink: number of GPUs that NVLink joins, if it spans several hosts.
        host_memory_bytes: memory of that machine; None if it is up to the owner.
        ring_chips: a dimension of a slice is closed to a ring if it is a multiple of this number of chips. In a slice
            with three dimensions, all of them have to be multiples.
        topologies: topologies of the slices that Cloud offers, in chips.
        compute_capability: compute capability of a GPU, such as "8.9".
        multiprocessors: number of streaming multiprocessors (SMs) of a GPU.
        clock_ghz: maximum clock of a GPU.
        l2_bytes: size of a GPU's L2 cache.
        compiler_options: default compiler options (name, value), which a config can override.
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
    peak_fp8_flops: float | None = None
    peak_int8_flops: float | None = None
    flops_per_cycle: int | None = None
    hbm_bytes_per_second: float | None = None
    ici_bytes_per_second: float | None = None
    ici_link_bytes_per_second: float | None = None
    dcn_bytes_per_second: float | None = None
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

    def peak_flops(self, dtype: str = "bfloat16") -> float | None:
        """Return the peak FLOP/s of a matrix product of `dtype` at XLA's default precision; None if unknown.

        8-bit numbers are called "fp8" and "int8"; None also means that the tensor cores or matrix units have none.

        By default XLA computes a float32 product in bfloat16 passes on TPU, and in TF32 on A100 and later, so that is
        the reference rate for MFU (docs.jax.dev/en/latest/201/precision.html). Older GPUs have no TF32.
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
        if dtype in ("fp8", "int8"):
            published = self.peak_fp8_flops if dtype == "fp8" else self.peak_int8_flops
            if published is not None or self.peak_bf16_flops is None or self.compute_capability is None:
                return published
            # In NVIDIA's data sheets, tensor cores that have these numbers compute twice as many products of them as
            # of bfloat16: int8 from A100 on, 8-bit floats from Ada on.
            first_capability = 8.9 if dtype == "fp8" else 8.0
            if float(self.compute_capability) >= first_capability:
                return 2 * self.peak_bf16_flops
        return None


def _table() -> Iterator[AcceleratorSpec]:
    """Yield the rows of all tables.

    Sizes in GiB or MiB become bytes, and lists become tuples, so that a spec can be hashed.
    """
    for file_name in _TABLES:
        rows = tomllib.loads(Path(__file__).with_name(file_name).read_text())
        for name, row in rows.items():
            # A row may override its name, so that several kinds of devices are one accelerator.
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
    """Normalize a name for comparison.

    "RTX 4090", "rtx-4090" and "4090" are the same, and "A100-80GB" is the same as "a100-80".
    """
    plain_name = re.sub(r"[\s_-]+", "", name.lower())
    for maker in _MAKERS:
        plain_name = plain_name.removeprefix(maker)
    return re.sub(r"(?<=\d)gb$", "", plain_name)


_SPEC_BY_PLAIN_NAME = {_plain(name): spec for spec in reversed(ACCELERATORS) for name in (*spec.aliases, spec.name)}


def find_spec(name: str) -> AcceleratorSpec | None:
    """Return the spec for a name in any common spelling ("RTX 4090", "4090", "h100-sxm"), or None."""
    return _SPEC_BY_PLAIN_NAME.get(_plain(name))


def spec_for(name_or_devices: str | Sequence[Device]) -> AcceleratorSpec:
    """Return the spec for a name ("v5p"), a jax device kind ("TPU v5"), or jax devices of one kind.

    Devices of an unknown kind get a spec with only a name and a platform. Training on them works, but without MFU.

    Raises:
        ValueError: the name is unknown (the message lists the nearest ones), or there are no devices, or devices of
            several kinds.
    """
    if isinstance(name_or_devices, str):
        kind = name_or_devices
    else:
        kinds = sorted({device.device_kind for device in name_or_devices})
        if len(kinds) != 1:
            raise ValueError(f"expected devices of one kind, got {kinds or 'no devices'}")
        kind = kinds[0]
        # When compiling for a topology without a device, each core of a v4 is a device, and libtpu calls that "TPU v4",
        # too.
        if kind == "TPU v4" and getattr(name_or_devices[0], "num_cores", 2) == 1:
            kind = "TPU v4 core"
    specs_of_kind = [spec for spec in ACCELERATORS if kind == spec.name or kind in spec.device_kinds]
    if len(specs_of_kind) > 1 and not isinstance(name_or_devices, str):
        return _pick_by_memory(specs_of_kind, name_or_devices[0])
    if specs_of_kind:
        return specs_of_kind[0]
    if isinstance(name_or_devices, str):
        spec = find_spec(kind)
        if spec is not None:
            return spec
        names = list(dict.fromkeys(name for spec in ACCELERATORS for name in (spec.name, *spec.aliases)))
        nearest_names = difflib.get_close_matches(kind, names, n=3, cutoff=0.4) or names
        raise ValueError(f"unknown accelerator {kind!r}; nearest: {', '.join(nearest_names)}")
    slug = kind.lower().removeprefix("nvidia ").replace(" ", "-")
    return AcceleratorSpec(slug, name_or_devices[0].platform, (kind,))


def _pick_by_memory(specs: Sequence[AcceleratorSpec], device: Device) -> AcceleratorSpec:
    """Pick one of several cards with the same name: the smallest whose memory holds the bytes that JAX reserved."""
    taken_bytes = 0
    # Devices of other processes, and abstract ones for compilation, do not report their memory.
    with suppress(AttributeError, RuntimeError, NotImplementedError):
        taken_bytes = (device.memory_stats() or {}).get("bytes_limit", 0)
    by_memory = sorted(specs, key=lambda spec: spec.memory_bytes or 0)
    for spec in by_memory:
        if taken_bytes <= (spec.memory_bytes or 0):
            return spec
    return by_memory[-1]


def accelerator_name(devices: Sequence[Device]) -> str:
    """Return the usual name of a set of devices, which rules by accelerator match with fnmatch.

    Examples: v5e-8 (chips), v5p-8 (cores: four chips), h200x8, cpu-8. Several slices are 2xv5e-256, which `*v5e-*`
    matches and `v5e-*` does not, because several slices need a different mesh. Raises ValueError like `spec_for`.
    """
    spec = spec_for(devices)
    slices: set[int] = set()
    for device in devices:
        # GPUs have this attribute, too, but there it counts hosts.
        slice_index = getattr(device, "slice_index", None) if spec.platform == "tpu" else None
        slices.add(slice_index or 0)
    num_slices = len(slices)
    devices_per_slice = len(devices) // num_slices
    count = devices_per_slice * spec.cores_per_chip // spec.devices_per_chip
    separator = "x" if spec.platform == "gpu" else "-"
    name = f"{spec.name}{separator}{count}"
    return f"{num_slices}x{name}" if num_slices > 1 else name
