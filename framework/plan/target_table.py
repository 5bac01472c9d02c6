"""Builds the table of `plimsoll plan --targets`: the available targets, and how this machine plans for them."""

from plimsoll.framework.devices.accelerators import ACCELERATORS, AcceleratorSpec
from plimsoll.framework.plan.gpu_description import find_architecture, installed_cuda
from plimsoll.framework.plan.targets import installed_compiler
from plimsoll.framework.terminal.tables import TableSection, human_bytes

_HEADER = ["", "memory", "usable", "TFLOP/s", "GB/s", "links", "host", "planned by"]
_LEGEND = [
    ["TFLOP/s", "dense bfloat16 products; f16: float16, if bfloat16 is unknown; f32: float32, if both are unknown"],
    ["GB/s", "to and from device memory"],
    ["links", "GB/s from other devices, one way; pair: over a bridge that joins two cards"],
    ["host", "GB/s to or from the host's memory, one way"],
    ["planned by", "the compiler installed here; estimate: none, only plimsoll plan --estimate works"],
    ["-", "not published"],
]


def sections() -> list[TableSection]:
    """Return the tables of TPUs, of GPUs, of this machine's devices, and of the columns' meanings."""
    rows_by_platform: dict[str, list[list[str]]] = {"tpu": [_HEADER], "gpu": [_HEADER]}
    listed_names: set[str] = set()
    for spec in ACCELERATORS:
        # v4 has one row per core and one per chip, both under the same name; list it once.
        if spec.platform in rows_by_platform and spec.name not in listed_names:
            rows_by_platform[spec.platform].append(_row(spec))
            listed_names.add(spec.name)
    this_machine = [
        ["cpu:8", "8 CPU devices, which share this machine's memory"],
        ["local", "the devices of this machine"],
    ]
    return [
        TableSection(
            "TPUs: v5e-16, 2xv5e-256, tpu:v5e:2x4; each row describes one JAX device", rows_by_platform["tpu"], True
        ),
        TableSection("GPUs: h200, h200x8", rows_by_platform["gpu"], True),
        TableSection("this machine", this_machine),
        TableSection("columns", _LEGEND),
    ]


def _row(spec: AcceleratorSpec) -> list[str]:
    return [
        spec.name,
        human_bytes(spec.memory_bytes),
        human_bytes(spec.limit_bytes),
        _peak(spec),
        _gigabytes(spec.hbm_bytes_per_second),
        _links(spec),
        _gigabytes(spec.pcie_bytes_per_second),
        _format_planner(spec),
    ]


def _peak(spec: AcceleratorSpec) -> str:
    if spec.peak_bf16_flops:
        return _tera(spec.peak_bf16_flops)
    if spec.peak_f16_flops:
        return f"f16 {_tera(spec.peak_f16_flops)}"
    return f"f32 {_tera(spec.peak_f32_flops)}" if spec.peak_f32_flops else "-"


def _tera(flops: float) -> str:
    """Format FLOP/s in units of 1e12."""
    return f"{flops / 1e12:.4g}"


def _links(spec: AcceleratorSpec) -> str:
    if spec.ici_bytes_per_second is None and spec.nvlink_pair_bytes_per_second is not None:
        return f"pair {_gigabytes(spec.nvlink_pair_bytes_per_second)}"
    return _gigabytes(spec.ici_bytes_per_second)


def _gigabytes(bytes_per_second: float | None) -> str:
    """Format bytes per second in GB/s of 1e9 bytes, as in data sheets; "-" if unknown."""
    return "-" if bytes_per_second is None else f"{bytes_per_second / 1e9:.0f}"


def _format_planner(spec: AcceleratorSpec) -> str:
    compiler = installed_compiler(spec.platform)
    if not compiler:
        return "estimate"
    if spec.platform != "gpu":
        return compiler
    architecture = find_architecture(spec, installed_cuda())
    is_its_own = architecture.capability == spec.compute_capability
    return compiler if is_its_own else f"{compiler}, as {architecture.capability}"
