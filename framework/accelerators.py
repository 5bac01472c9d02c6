"""Accelerators: the names people use, what jax calls them, and what each one has (memory, peak rates, host).

One table, one row per kind, every figure with its source; a figure that nobody publishes is None and must be treated
as unknown by whoever reads it (no MFU, no limit), never guessed. Imports nothing but the standard library, so that it
can be used before JAX is imported: functions take devices (or anything with `device_kind`) as arguments.

Sources
  [v4] https://cloud.google.com/tpu/docs/v4          [v5e] https://docs.cloud.google.com/tpu/docs/v5e
  [v5p] https://cloud.google.com/tpu/docs/v5p        [v6e] https://docs.cloud.google.com/tpu/docs/v6e
  [7x] https://docs.cloud.google.com/tpu/docs/tpu7x (its table also gives the VM memory of v5p, v6e and tpu7x)
  [book] https://jax-ml.github.io/scaling-book/tpus (host link, chips per host, 96 GB of v5p)
  [libtpu] usable memory as the TPU compiler states it ("exceeds available HBM (15.75G)"), and `device_kind`:
           libtpu 0.0.42.1 with jax 0.10.2, topologies v4:2x2x1, v5e:2x2, v5p:2x2x1, v6e:2x2, tpu7x:2x2x1
  [nv] the data sheets of NVIDIA's A100, H100 and H200 (SXM); "with sparsity" figures are halved, because only dense
       products are counted here; PCIe rates are given there for both directions together and halved here
  [xla] https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs (device names, memory, bandwidth)
  [precision] https://docs.jax.dev/en/latest/201/precision.html (what a float32 product runs as by default)
"""

import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceleratorSpec:
    """What one jax device of a kind has. Bytes, FLOP/s and bytes/s are per jax device; None means not known.

    Attributes:
      name: the name people use: v5e, h200, cpu.
      platform: tpu, gpu or cpu, as jax names it.
      device_kinds: the values of `jax.Device.device_kind` that mean this accelerator.
      counted_in: what the number in a name counts: "cores" (v5p-8 has 4 chips), "chips" or "devices".
      memory_bytes: device memory: HBM as published, or (GPU) the total that the CUDA driver reports.
      usable_bytes: what one program may use, where that is known. GPU: unknown, as the CUDA context and
        XLA_CLIENT_MEM_FRACTION (0.75 unless set) decide; where there is a device, `memory_stats()["bytes_limit"]`.
      peak_bf16_flops: dense bfloat16 products. peak_f32_flops: IEEE float32. peak_tf32_flops: float32 in tensor cores.
      hbm_bandwidth: bytes/s. host_link_bandwidth: bytes/s between host and device, one direction.
      cores_per_chip, devices_per_chip: TensorCores and jax devices of one chip.
      chips_per_host, host_memory_bytes: of one machine (a VM, on Cloud), which the comment beside them names.
    """

    name: str
    platform: Literal["tpu", "gpu", "cpu", "unknown"]
    device_kinds: tuple[str, ...]
    counted_in: Literal["cores", "chips", "devices"] = "devices"
    memory_bytes: int | None = None
    usable_bytes: int | None = None
    peak_bf16_flops: float | None = None
    peak_tf32_flops: float | None = None
    peak_f32_flops: float | None = None
    hbm_bandwidth: float | None = None
    host_link_bandwidth: float | None = None
    cores_per_chip: int = 1
    devices_per_chip: int = 1
    chips_per_host: int | None = None
    host_memory_bytes: int | None = None

    @property
    def limit_bytes(self) -> int | None:
        """What a program has to fit into: usable bytes where known, else the whole memory, else None."""
        return self.usable_bytes if self.usable_bytes is not None else self.memory_bytes

    def peak_flops(self, dtype: str = "bfloat16") -> float | None:
        """Peak FLOP/s of a product whose operands are `dtype`, at XLA's default precision; None where not known.

        By default XLA runs a float32 product in bfloat16 passes on TPU and in TF32 on A100 and later [precision], so
        that is the rate an MFU has to be measured against; a product at `highest` precision cannot reach it.
        """
        if dtype in ("bfloat16", "float16"):
            return self.peak_bf16_flops
        if dtype != "float32":
            return None
        return self.peak_bf16_flops if self.platform == "tpu" else self.peak_tf32_flops or self.peak_f32_flops


ACCELERATORS: tuple[AcceleratorSpec, ...] = (
    AcceleratorSpec(
        name="v4",
        platform="tpu",
        device_kinds=("TPU v4",),  # [libtpu]
        counted_in="cores",
        memory_bytes=32 * GIB,  # [v4]
        usable_bytes=int(30.75 * GIB),  # [libtpu], megacore (what a TPU VM shows); a lone core has 15.25, see spec_for
        peak_bf16_flops=275e12,  # [v4]
        hbm_bandwidth=1200e9,  # [v4]
        host_link_bandwidth=16e9,  # [book]
        cores_per_chip=2,
        chips_per_host=4,  # [book]
    ),
    AcceleratorSpec(
        name="v5e",
        platform="tpu",
        device_kinds=("TPU v5 lite", "TPU v5e"),  # [libtpu]; the second is an alias that jax knows
        counted_in="chips",
        memory_bytes=16 * GIB,  # [v5e]
        usable_bytes=int(15.75 * GIB),  # [libtpu]
        peak_bf16_flops=197e12,  # [v5e]
        hbm_bandwidth=819e9,  # [v5e]
        host_link_bandwidth=15e9,  # [book] "typically around 1.5e10"
        chips_per_host=8,  # [v5e]
        host_memory_bytes=384 * GIB,  # machine type ct5lp-hightpu-8t as Compute Engine lists it; a 4-chip VM has half
    ),
    AcceleratorSpec(
        name="v5p",
        platform="tpu",
        device_kinds=("TPU v5", "TPU v5p"),  # [libtpu]; alias as above
        counted_in="cores",
        memory_bytes=96 * GIB,  # [book]; [v5p] says 95 GB, less than the compiler offers
        usable_bytes=int(95.74 * GIB),  # [libtpu]
        peak_bf16_flops=459e12,  # [v5p]
        hbm_bandwidth=2765e9,  # [v5p]
        host_link_bandwidth=15e9,  # [book]
        cores_per_chip=2,
        chips_per_host=4,  # [v5p]
        host_memory_bytes=448 * 10**9,  # [7x], 4-chip VM
    ),
    AcceleratorSpec(
        name="v6e",
        platform="tpu",
        device_kinds=("TPU v6 lite", "TPU v6e"),  # [libtpu]; alias as above
        counted_in="chips",
        memory_bytes=32 * GIB,  # [v6e]
        usable_bytes=int(31.25 * GIB),  # [libtpu]
        peak_bf16_flops=918e12,  # [v6e]
        hbm_bandwidth=1638e9,  # [v6e]
        host_link_bandwidth=32e9,  # [book]
        chips_per_host=4,  # the VM of multi-host slices; an 8-chip VM exists
        host_memory_bytes=720 * 10**9,  # [7x], 4-chip VM
    ),
    AcceleratorSpec(
        name="tpu7x",
        platform="tpu",
        device_kinds=("TPU7x",),  # [libtpu]
        counted_in="cores",  # tpu7x-8 is 2x2x1: 4 chips, 8 cores, 8 jax devices
        memory_bytes=96 * GIB,  # [7x] 192 GiB a chip
        usable_bytes=int(94.75 * GIB),  # [libtpu]
        peak_bf16_flops=2307e12 / 2,  # [7x] per chip, two devices a chip
        hbm_bandwidth=7380e9 / 2,  # [7x]
        cores_per_chip=2,
        devices_per_chip=2,
        chips_per_host=4,  # [7x]
        host_memory_bytes=960 * 10**9,  # [7x]
    ),
    # A GPU server has the host memory that its owner bought, so it is None; 8 GPUs is the HGX/DGX board.
    AcceleratorSpec(
        name="a100-40",
        platform="gpu",
        device_kinds=("NVIDIA A100-SXM4-40GB",),  # [xla]
        memory_bytes=42_331_013_120,  # [xla]
        peak_bf16_flops=312e12,  # [nv]
        peak_tf32_flops=156e12,  # [nv]
        peak_f32_flops=19.5e12,  # [nv]
        hbm_bandwidth=1555e9,  # [nv]
        host_link_bandwidth=32e9,  # [nv] PCIe Gen4
        chips_per_host=8,
    ),
    AcceleratorSpec(
        name="a100-80",
        platform="gpu",
        device_kinds=("NVIDIA A100-SXM4-80GB",),  # [xla]
        memory_bytes=85_100_068_864,  # [xla]
        peak_bf16_flops=312e12,  # [nv]
        peak_tf32_flops=156e12,  # [nv]
        peak_f32_flops=19.5e12,  # [nv]
        hbm_bandwidth=2039e9,  # [nv]
        host_link_bandwidth=32e9,  # [nv] PCIe Gen4
        chips_per_host=8,
    ),
    AcceleratorSpec(
        name="h100",
        platform="gpu",
        device_kinds=("NVIDIA H100 80GB HBM3",),  # [xla], the SXM module; the PCIe card is slower and has no row
        memory_bytes=84_942_979_072,  # [xla]
        peak_bf16_flops=1979e12 / 2,  # [nv] 1979 with sparsity
        peak_tf32_flops=989e12 / 2,  # [nv] 989 with sparsity
        peak_f32_flops=67e12,  # [nv]
        hbm_bandwidth=3350e9,  # [nv]
        host_link_bandwidth=64e9,  # [nv] PCIe Gen5
        chips_per_host=8,
    ),
    AcceleratorSpec(
        name="h200",
        platform="gpu",
        device_kinds=("NVIDIA H200", "NVIDIA H200 141GB HBM3e"),  # the driver's name; [xla]
        memory_bytes=150_110_011_392,  # the total that CUDA reports on an H200 (139.8 GiB; nvidia-smi: 143771 MiB)
        peak_bf16_flops=1979e12 / 2,  # [nv] 1979 with sparsity
        peak_tf32_flops=989e12 / 2,  # [nv] 989 with sparsity
        peak_f32_flops=67e12,  # [nv]
        hbm_bandwidth=4800e9,  # [nv]
        host_link_bandwidth=64e9,  # [nv] PCIe Gen5
        chips_per_host=8,
    ),
    AcceleratorSpec(name="cpu", platform="cpu", device_kinds=("cpu",)),  # peaks vary by machine: no MFU on CPU
)


def spec_for(devices_or_kind: str | Sequence[Any] | Any) -> AcceleratorSpec:
    """The row for a name ("v5p"), a jax device kind ("TPU v5"), a device, or a list of devices of one kind.

    A device of a kind without a row gets a spec that knows nothing but its name, so that training on it works and
    prints no MFU; a string that means nothing is a mistake of the person who typed it.

    Raises:
      ValueError: an unknown name (the nearest ones are given), no devices, or devices of several kinds.
    """
    if isinstance(devices_or_kind, str):
        for spec in ACCELERATORS:
            if devices_or_kind == spec.name or devices_or_kind in spec.device_kinds:
                return spec
        names = [spec.name for spec in ACCELERATORS]
        near = difflib.get_close_matches(devices_or_kind, names, n=3, cutoff=0.4) or names
        raise ValueError(f"unknown accelerator {devices_or_kind!r}; nearest: {', '.join(near)}")

    devices = _as_list(devices_or_kind)
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) != 1:
        raise ValueError(f"expected devices of one kind, got {kinds or 'no devices'}")
    for spec in ACCELERATORS:
        if kinds[0] in spec.device_kinds:
            # A v4 topology compiled for without a device shows each core as a device; a TPU VM shows whole chips.
            return _one_core(spec) if _is_lone_core(devices[0], spec) else spec
    platform = getattr(devices[0], "platform", "unknown")
    platform = platform if platform in ("tpu", "gpu", "cpu") else "unknown"
    slug = kinds[0].lower().removeprefix("nvidia ").replace(" ", "-")
    return AcceleratorSpec(name=slug, platform=platform, device_kinds=(kinds[0],))


def accelerator_name(devices: Sequence[Any]) -> str:
    """The name of a set of devices, as Cloud and people write it; rules by accelerator match it with fnmatch.

    v5e-8 (chips), v5p-8 (cores: four chips), h200x8, cpu-8; several slices are 2xv5e-256, which `v5e-*` does not match
    (a mesh over slices is another mesh) and `*v5e-*` does.

    Raises:
      ValueError: no devices, or devices of several kinds.
    """
    devices = _as_list(devices)
    spec = spec_for(devices)
    slices = len({getattr(device, "slice_index", None) or 0 for device in devices})
    count = len(devices) // slices
    if spec.counted_in == "cores":
        count = count * spec.cores_per_chip // spec.devices_per_chip
    elif spec.counted_in == "chips":
        count //= spec.devices_per_chip
    name = f"{spec.name}x{count}" if spec.platform == "gpu" else f"{spec.name}-{count}"
    return f"{slices}x{name}" if slices > 1 else name


def _as_list(devices: Any) -> list[Any]:
    # A mesh's `devices` is an n-dimensional object array; a single device is not iterable.
    if hasattr(devices, "flat"):
        return list(devices.flat)
    return list(devices) if isinstance(devices, Iterable) else [devices]


def _is_lone_core(device: Any, spec: AcceleratorSpec) -> bool:
    return spec.name == "v4" and getattr(device, "num_cores", 2) == 1


def _one_core(spec: AcceleratorSpec) -> AcceleratorSpec:
    return dataclasses.replace(
        spec,
        memory_bytes=16 * GIB,
        usable_bytes=int(15.25 * GIB),  # [libtpu]
        peak_bf16_flops=275e12 / 2,
        hbm_bandwidth=1200e9 / 2,
        host_link_bandwidth=None,  # one link serves both cores
        devices_per_chip=2,
    )
