"""Analyze the program that XLA compiles from a training step for a GPU. Needs no GPU and runs nothing.

    python -m tools.bench.gpu_program h100 --config=gpt2-124m --config.data.global_batch_size=8
    python -m tools.bench.gpu_program h100x8 --config=llama3-8b --save build/plain
    python -m tools.bench.gpu_program --program build/plain --top 40
    python -m tools.bench.gpu_program h100 --config=... --against build/plain     # two programs side by side

Prints which library or emitter makes each kernel, its FLOPs and bytes, a lower bound on its time (the roofline; the
kernel's actual speed is unknown), the largest kernels by layer and line, and the kernels that overlap each collective.
The GPU compiler comes with `pip install -e '.[plan-gpu]'`.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from plimsoll.framework.devices.accelerators import spec_for
from plimsoll.framework.plan.buffer_names import describe_operation
from plimsoll.framework.plan.step_time.gpu_time import CollectiveOverlap, GpuKernel, GpuRates, GpuStep, read_step
from plimsoll.framework.terminal.tables import TableSection, human_bytes, render
from plimsoll.launch import cli
from tools.bench.step_programs import CompiledStep, add_arguments, load, load_or_compile_step
from tools.bench.tpu_figures import source_line

_Group = TypeVar("_Group", bound=Hashable)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "h100, h200, h100x8")
    parser.add_argument(
        "--top", type=int, default=25, metavar="N", help="number of largest kernels to show; default 25"
    )
    return parser


@cli.main
def main(argv: list[str]) -> int:
    """Compile or read a step, and print its analysis."""
    spec, overrides, rest = cli.split(argv)
    args = _parser().parse_args(rest)
    other = load(args.against) if args.against else None
    step = load_or_compile_step(args, spec, overrides, check=GpuRates.look_up)
    tables = _sections(step, args.top)
    if other is not None:
        tables.append(_comparison(step, other, str(args.program or args.target), str(args.against)))
    print(render(tables), end="")
    return 0


def _read_step(step: CompiledStep) -> tuple[GpuStep, GpuRates]:
    rates = GpuRates.look_up(spec_for(step.about.accelerator))
    return read_step(step.parts, rates), rates


def _sections(step: CompiledStep, top: int) -> list[TableSection]:
    gpu_step, rates = _read_step(step)
    tables = [
        TableSection("step", _head(step, gpu_step, rates)),
        _by_kind(gpu_step.kernels),
        _products(gpu_step.kernels),
        _largest(gpu_step.kernels, top),
    ]
    if gpu_step.overlaps:
        tables.append(_collectives(gpu_step.overlaps))
    return tables


def _head(step: CompiledStep, gpu_step: GpuStep, rates: GpuRates) -> list[list[str]]:
    about = step.about
    peaks = f"{rates.flops['bf16'] / 1e12:.0f} TFLOP/s in bfloat16, {rates.flops['f32'] / 1e12:.0f} in TF32"
    least, *_ = _sum(gpu_step.kernels)
    rows = [
        ["program", f"{about.name} on {about.target}"],
        ["settings", " ".join(about.settings)],
        ["versions", ", ".join(f"{name} {version}" for name, version in about.versions.items())],
        ["nothing ran", "XLA chose between Triton and cuBLAS without timing them; where there is a GPU it times both"],
        [rates.name, f"{peaks}; device memory {rates.hbm / 1e9:,.0f} GB/s; link {rates.link / 1e9:.0f} GB/s"],
        ["least time of all kernels", f"{1e3 * least:,.2f} ms, one after another and each at its bound"],
    ]
    if about.model_flops is not None:
        ideal = about.model_flops / rates.flops["bf16"]
        rows.append(["ideal", f"{1e3 * ideal:,.2f} ms: the model's FLOPs at the peak; {least / ideal:.2f} times that"])
    if about.peak_bytes is not None:
        rows.append(["peak of device memory", human_bytes(about.peak_bytes)])
    if about.compile_seconds is not None:
        rows.append(["compiling", f"{about.compile_seconds:.0f} s"])
    return rows


def _group_kernels(
    kernels: Iterable[GpuKernel], key: Callable[[GpuKernel], _Group]
) -> list[tuple[_Group, list[GpuKernel]]]:
    """Group kernels by a key, the groups with the most time first."""
    members: defaultdict[_Group, list[GpuKernel]] = defaultdict(list)
    for one in kernels:
        members[key(one)].append(one)
    return sorted(members.items(), key=lambda item: -_sum(item[1])[0])


def _sum(kernels: Iterable[GpuKernel]) -> tuple[float, int, int, int]:
    """Return (least seconds, runs, FLOPs, bytes) of a step."""
    members = list(kernels)
    return (
        sum(one.runs * one.seconds for one in members),
        sum(one.runs for one in members),
        sum(one.runs * one.flops for one in members),
        sum(one.runs * one.hbm_bytes for one in members),
    )


def _cells(kernels: Iterable[GpuKernel]) -> list[str]:
    seconds, runs, flops, hbm_bytes = _sum(kernels)
    return [f"{1e3 * seconds:.2f}", f"{runs:,}", f"{flops / 1e12:.3f}" if flops else "", f"{hbm_bytes / 1e9:.2f}"]


def _by_kind(kernels: list[GpuKernel]) -> TableSection:
    rows = [["kind", "made by", "least ms", "kernels", "TFLOP", "GB"]]
    for (kind, maker), members in _group_kernels(kernels, lambda one: (one.category, one.maker)):
        rows.append([kind, maker, *_cells(members)])
    rows.append(["sum", "", *_cells(kernels)])
    return TableSection("kernels of a step", rows, numbers=True)


def _products(kernels: list[GpuKernel]) -> TableSection:
    rows = [["operands", "made by", "least ms", "kernels", "TFLOP", "GB"]]
    products = [one for one in kernels if one.flops]
    for (dtype, maker), members in _group_kernels(products, lambda one: (one.dtype, one.maker)):
        rows.append([dtype, maker, *_cells(members)])
    return TableSection("matrix products by dtype, including attention's", rows, numbers=True)


def _largest(kernels: list[GpuKernel], top: int) -> TableSection:
    def key(one: GpuKernel) -> tuple[str, str, str, str]:
        name = describe_operation(one.op_name) if one.op_name else one.instruction.name.rstrip("0123456789.")
        return name, source_line(one.source), one.category, one.maker

    rows = [["layer and operation", "least ms", "kernels", "TFLOP", "GB", "kind", "made by", "line"]]
    for (name, line, kind, maker), members in _group_kernels(kernels, key)[:top]:
        rows.append([name, *_cells(members), kind, maker, line])
    return TableSection("largest kernels", rows, numbers=True)


def _collectives(overlaps: list[CollectiveOverlap]) -> TableSection:
    rows = [["collective", "mode", "runs", "GB received", "ms on the link", "overlapped by kernels"]]
    members: defaultdict[tuple[str, str], list[CollectiveOverlap]] = defaultdict(list)
    for one in overlaps:
        members[one.collective.kind, one.collective.mode].append(one)
    for (kind, mode), alike in [*sorted(members.items()), (("sum", ""), overlaps)]:
        runs = sum(one.collective.runs for one in alike)
        received = sum(one.collective.runs * one.collective.bytes_received for one in alike)
        seconds = sum(one.collective.runs * one.seconds for one in alike)
        hidden = sum(one.collective.runs * min(one.seconds, one.overlapped_seconds) for one in alike)
        share = f"{hidden / seconds:.0%}" if seconds else ""
        rows.append([kind, mode, f"{runs:,}", f"{received / 1e9:.2f}", f"{1e3 * seconds:.1f}", share])
    return TableSection("collectives of one GPU, each with exclusive use of the link", rows, numbers=True)


def _comparison(step: CompiledStep, other: CompiledStep, name: str, other_name: str) -> TableSection:
    """Compare the least milliseconds by kind, side by side."""
    both = [_read_step(one)[0].kernels for one in (step, other)]
    kinds = dict.fromkeys(kind for kernels in both for kind, _ in _group_kernels(kernels, lambda one: one.category))
    rows = [["least ms", name, other_name, "ratio"]]
    for kind in [*kinds, "sum"]:
        mine, theirs = (_sum(one for one in kernels if kind in (one.category, "sum"))[0] for kernels in both)
        ratio = f"{mine / theirs:.3f}" if theirs else ""
        rows.append([kind, f"{1e3 * mine:.2f}", f"{1e3 * theirs:.2f}", ratio])
    peaks = [one.about.peak_bytes for one in (step, other)]
    if all(peaks):
        rows.append(["peak, GiB", *(f"{(peak or 0) / 2**30:.2f}" for peak in peaks), ""])
    return TableSection("side by side", rows, numbers=True)


if __name__ == "__main__":
    sys.exit(main())
