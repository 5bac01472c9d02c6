"""Accelerators: the names people use, what jax calls them, and what each one has (memory, peak rates, host).

One table, every figure with its source; one that nobody publishes is None and means unknown (no MFU, no limit), it is
never guessed. Imports nothing but the standard library: the table is there before JAX is.

Sources
  [v4], [v5e], [v5p], [v6e], [7x] https://docs.cloud.google.com/tpu/docs/ and v4, v5e, v5p, v6e, tpu7x (the last one's
           table also gives the VM memory of v5p and v6e)
  [book] https://jax-ml.github.io/scaling-book/tpus
  [libtpu] usable memory as the TPU compiler states it ("exceeds available HBM (15.75G)"), and `device_kind`:
           libtpu 0.0.42.1 with jax 0.10.2, topologies v4:2x2x1, v5e:2x2, v5p:2x2x1, v6e:2x2, tpu7x:2x2x1
  [nv] the data sheets of NVIDIA's A100, H100 and H200 (SXM), dense products: "with sparsity" figures are halved
  [xla] https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs (device names, memory)
  [precision] https://docs.jax.dev/en/latest/201/precision.html (what a float32 product runs as by default)
"""

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

GIB = 2**30
# Of a GPU's memory, for XLA. The rest is for the CUDA context, the kernels' code, NCCL, and cuDNN and cuBLAS handles.
GPU_MEMORY_FRACTION = 0.92


@dataclass(frozen=True)
class AcceleratorSpec:
    """What one jax device of a kind has. Bytes and FLOP/s are per jax device; None means not known.

    Attributes:
      name: the name people use: v5e, h200, cpu. platform: tpu, gpu or cpu, as jax names it.
      device_kinds: the values of `jax.Device.device_kind` that mean this accelerator.
      memory_bytes: device memory: HBM as published, or (GPU) the total that the CUDA driver reports.
      usable_bytes: what one program may use, where that is published. None for GPUs, see `limit_bytes`.
      peak_bf16_flops: dense bfloat16 products. peak_tf32_flops: float32 in tensor cores.
      cores_per_chip, devices_per_chip: TensorCores and jax devices of one chip. Names count cores (v5p-8 has 4 chips).
      chips_per_host, host_memory_bytes: of one machine (a VM, on Cloud), which the comment beside them names.
    """

    name: str
    platform: str
    device_kinds: tuple[str, ...]
    memory_bytes: int | None = None
    usable_bytes: int | None = None
    peak_bf16_flops: float | None = None
    peak_tf32_flops: float | None = None
    cores_per_chip: int = 1
    devices_per_chip: int = 1
    chips_per_host: int | None = None
    host_memory_bytes: int | None = None

    @property
    def limit_bytes(self) -> int | None:
        """What a program has to fit into: usable bytes where known, else the whole memory, else None.

        On a GPU JAX takes a fraction of the memory when it starts and gives no program more: XLA_CLIENT_MEM_FRACTION,
        for which launch.train takes GPU_MEMORY_FRACTION (JAX itself 0.75) where the environment says nothing.
        """
        if self.platform == "gpu" and self.memory_bytes is not None:
            names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the old name still counts
            fraction = next(filter(None, map(os.environ.get, names)), GPU_MEMORY_FRACTION)
            return int(self.memory_bytes * float(fraction))
        return self.usable_bytes if self.usable_bytes is not None else self.memory_bytes

    def peak_flops(self, dtype: str = "bfloat16") -> float | None:
        """Peak FLOP/s of a product whose operands are `dtype`, at XLA's default precision; None where not known.

        By default XLA runs a float32 product in bfloat16 passes on TPU and in TF32 on A100 and later [precision], so
        that is the rate an MFU has to be measured against; a product at `highest` precision cannot reach it.
        """
        float32 = self.peak_bf16_flops if self.platform == "tpu" else self.peak_tf32_flops
        return {"bfloat16": self.peak_bf16_flops, "float16": self.peak_bf16_flops, "float32": float32}.get(dtype)


# fmt: off
_V4 = AcceleratorSpec(
    "v4", "tpu", ("TPU v4",),  # [libtpu], as a TPU VM shows it: one device a chip (megacore)
    32 * GIB, int(30.75 * GIB), 275e12,  # [v4], [libtpu], [v4]
    cores_per_chip=2, chips_per_host=4,  # [book]
)
_A100 = AcceleratorSpec(
    "a100-40", "gpu", ("NVIDIA A100-SXM4-40GB",), 42_331_013_120, None, 312e12, 156e12,  # [xla], [nv]
    chips_per_host=8,  # the HGX/DGX board; a GPU server has the memory that its owner bought
)
_H100 = AcceleratorSpec(  # [xla], [nv]; SXM: the slower PCIe has no row
    "h100", "gpu", ("NVIDIA H100 80GB HBM3",), 84_942_979_072, None, 1979e12 / 2, 989e12 / 2, chips_per_host=8,
)
ACCELERATORS: tuple[AcceleratorSpec, ...] = (
    _V4,
    replace(  # a topology compiled for without a device shows each core of a v4 as a device, see spec_for
        _V4, device_kinds=("TPU v4 core",), devices_per_chip=2,
        memory_bytes=16 * GIB, usable_bytes=int(15.25 * GIB), peak_bf16_flops=275e12 / 2,  # [libtpu]
    ),
    AcceleratorSpec(
        "v5e", "tpu", ("TPU v5 lite", "TPU v5e"),  # [libtpu]; the second is an alias that jax knows
        16 * GIB, int(15.75 * GIB), 197e12,  # [v5e], [libtpu], [v5e]
        chips_per_host=8, host_memory_bytes=384 * GIB,  # [v5e], ct5lp-hightpu-8t; a 4-chip VM has half
    ),
    AcceleratorSpec(
        "v5p", "tpu", ("TPU v5", "TPU v5p"),  # [libtpu]; alias as above
        96 * GIB, int(95.74 * GIB), 459e12,  # [book] ([v5p] says 95 GB, less than the compiler offers), [libtpu], [v5p]
        cores_per_chip=2, chips_per_host=4, host_memory_bytes=448 * 10**9,  # [v5p], [7x], 4-chip VM
    ),
    AcceleratorSpec(
        "v6e", "tpu", ("TPU v6 lite", "TPU v6e"),  # [libtpu]; alias as above
        32 * GIB, int(31.25 * GIB), 918e12,  # [v6e], [libtpu], [v6e]
        chips_per_host=4, host_memory_bytes=720 * 10**9,  # [7x], the VM of multi-host slices; an 8-chip VM exists
    ),
    AcceleratorSpec(
        "tpu7x", "tpu", ("TPU7x",),  # [libtpu]; tpu7x-8 is 2x2x1: 4 chips, 8 cores, 8 jax devices
        192 * GIB // 2, int(94.75 * GIB), 2307e12 / 2,  # [7x] per chip, [libtpu], [7x] per chip
        cores_per_chip=2, devices_per_chip=2, chips_per_host=4, host_memory_bytes=960 * 10**9,  # [7x]
    ),
    _A100,
    replace(_A100, name="a100-80", device_kinds=("NVIDIA A100-SXM4-80GB",), memory_bytes=85_100_068_864),  # [xla]
    _H100,
    replace(
        _H100, name="h200", device_kinds=("NVIDIA H200", "NVIDIA H200 141GB HBM3e"),  # the driver's name; [xla]
        memory_bytes=150_110_011_392,  # the total that CUDA reports on an H200 (139.8 GiB; nvidia-smi: 143771 MiB)
    ),
    AcceleratorSpec("cpu", "cpu", ("cpu",)),  # peaks vary by machine: no MFU on CPU
)
# fmt: on


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
        if kind == "TPU v4" and getattr(name_or_devices[0], "num_cores", 2) == 1:
            kind = "TPU v4 core"
    for spec in ACCELERATORS:
        if kind == spec.name or kind in spec.device_kinds:
            return spec
    if isinstance(name_or_devices, str):
        names = list(dict.fromkeys(spec.name for spec in ACCELERATORS))
        near = difflib.get_close_matches(kind, names, n=3, cutoff=0.4) or names
        raise ValueError(f"unknown accelerator {kind!r}; nearest: {', '.join(near)}")
    slug = kind.lower().removeprefix("nvidia ").replace(" ", "-")
    return AcceleratorSpec(slug, name_or_devices[0].platform, (kind,))


def accelerator_name(devices: Sequence[Any]) -> str:
    """The name of a set of devices, as Cloud and people write it; rules by accelerator match it with fnmatch.

    v5e-8 (chips), v5p-8 (cores: four chips), h200x8, cpu-8; several slices are 2xv5e-256, which `v5e-*` does not match
    (a mesh over slices is another mesh) and `*v5e-*` does. Raises ValueError as `spec_for`.
    """
    spec = spec_for(devices)
    slices = len({getattr(device, "slice_index", None) or 0 for device in devices})
    count = len(devices) // slices * spec.cores_per_chip // spec.devices_per_chip
    name = f"{spec.name}{'x' if spec.platform == 'gpu' else '-'}{count}"
    return f"{slices}x{name}" if slices > 1 else name
