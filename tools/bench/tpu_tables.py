"""Tables of a TPU step's count, and of two counts side by side."""

from __future__ import annotations

from collections import defaultdict

from plimsoll.framework.plan.buffer_names import describe_operation
from plimsoll.framework.plan.hlo.transfers import Collective
from plimsoll.framework.plan.step_time.tpu_operations import (
    ATTENTION_EFFICIENCY,
    ATTENTION_FULL_HEAD,
    ELEMENTWISE_OVER_HBM,
    PCIE_EFFICIENCY,
    VMEM_BYTES_PER_CYCLE,
    TpuOperation,
    TpuRates,
)
from plimsoll.framework.plan.step_time.tpu_time import StepCount
from plimsoll.framework.plan.step_time.work_categories import OVERESTIMATED
from plimsoll.framework.terminal.tables import TableSection, human_bytes
from tools.bench.step_programs import StepInfo
from tools.bench.tpu_figures import MODES, CountedStep, Sums, figures, groups, host_figures, sum_received_bytes

_LEAST_BYTES = 1e6  # smaller collectives are left out of the table, but counted in the sums


def sections(counted: CountedStep, top: int, category: str | None) -> list[TableSection]:
    """Return all tables of one step.

    Args:
        counted: the step and its count.
        top: number of largest operations to show.
        category: show only operations of this category; None shows all.
    """
    count = counted.count
    tables = [
        TableSection("step", _head(counted.about)),
        TableSection("assumptions", assumptions(count.rates)),
        _categories(count),
        _largest(count, top, category),
    ]
    if count.collectives:
        tables.append(_collectives(count))
    if any(count.at_all_links.moved.values()):
        tables.append(_host(count))
    return [*tables, TableSection("the step, by the compiler's model", _verdict(counted))]


def _head(about: StepInfo) -> list[list[str]]:
    rows = [["program", f"{about.name} on {about.target}"]]
    if about.settings:
        rows.append(["settings", " ".join(about.settings)])
    if about.tokens is not None:
        rows.append(["tokens", f"{about.tokens:,.0f} a device and step"])
    if about.versions:
        rows.append(["versions", ", ".join(f"{name} {version}" for name, version in about.versions.items())])
    return rows


def assumptions(rates: TpuRates) -> list[list[str]]:
    """Describe the assumptions behind the figures."""
    clock = f"{rates.flops_per_cycle:,.0f} a cycle, so {rates.cycles / 1e9:.3f} GHz"
    links = f"{rates.all_links / 1e9:.0f} GB/s (all links) .. {rates.two_links / 1e9:.0f} GB/s (two: a slice's corner)"
    thin = (
        f"at most {ELEMENTWISE_OVER_HBM} x the time of their bytes in HBM, or {VMEM_BYTES_PER_CYCLE} B of VMEM a cycle"
    )
    attention = f"{ATTENTION_EFFICIENCY:.0%} of the peak, of the products that the mask leaves"
    hidden = "asynchronous ones are taken as hidden by products"
    return [
        ["nothing ran", "the compiler's cost model, calibrated on v5e: ratios are worth more than milliseconds"],
        [rates.name, f"{rates.flops / 1e12:.0f} TFLOP/s ({clock}); HBM {rates.hbm / 1e9:.0f} GB/s"],
        ["matrix products", "the compiler's estimate"],
        [", ".join(OVERESTIMATED), f"the compiler's estimate, but {thin}"],
        ["attention", f"{attention}; less in proportion for heads under {ATTENTION_FULL_HEAD}"],
        ["other kernels", "no estimate: the time of their bytes in HBM"],
        ["collectives", f"what a chip receives, at {links}; {hidden}"],
        ["host", f"{rates.pcie / 1e9:.0f} GB/s each way at once ({PCIE_EFFICIENCY:.0%} of PCIe as published)"],
    ]


def _categories(count: StepCount) -> TableSection:
    rows = [["category", "operations", "estimate ms", "adjusted ms", "roof ms", "TFLOP", "HBM GB"]]
    members: defaultdict[str, list[TpuOperation]] = defaultdict(list)
    for operation in count.operations:
        members[operation.category].append(operation)
    sums = sorted(((name, Sums.total(alike)) for name, alike in members.items()), key=lambda row: -row[1].seconds)
    for name, one in [*sums, ("sum", Sums.total(count.operations))]:
        times = (f"{1e3 * seconds:,.1f}" for seconds in (one.estimate, one.seconds, one.roof))
        flops = f"{one.flops / 1e12:.3f}" if one.flops else ""
        rows.append([name, f"{one.runs:,}", *times, flops, f"{one.hbm_bytes / 1e9:,.2f}"])
    return TableSection("time by category, a step (attention's TFLOP as if nothing were masked)", rows, numbers=True)


def _largest(count: StepCount, top: int, category: str | None) -> TableSection:
    whole = Sums.total(count.operations).seconds
    rows = [["layer and operation", "adjusted ms", "share", "estimate ms", "HBM GB", "runs", "category", "line"]]
    chosen = [one for one in count.operations if category in (None, one.category)]
    for group in groups(chosen)[:top]:
        one = group.sums
        share = f"{one.seconds / whole:.1%}" if whole else ""
        times = [f"{1e3 * one.seconds:.2f}", share, f"{1e3 * one.estimate:.2f}"]
        rows.append([group.name, *times, f"{one.hbm_bytes / 1e9:.2f}", f"{one.runs:,}", group.category, group.line])
    return TableSection(f"largest operations{f', {category}' if category else ''}", rows, numbers=True)


def _collectives(count: StepCount) -> TableSection:
    rates = count.rates
    rows = [["collective", "mode", "type", "GB received", "ms, all links", "ms, two links", "runs", "largest MB"]]
    members: defaultdict[tuple[str, str, str], list[Collective]] = defaultdict(list)
    for one in count.collectives:
        where = describe_operation(one.instruction.op_name) if one.instruction.op_name else ""
        members[f"{one.kind} {where}", one.mode, one.dtype].append(one)
    sums = [(sum(one.bytes_received * one.runs for one in alike), key, alike) for key, alike in members.items()]
    for size, key, alike in sorted(sums, key=lambda row: -row[0]):
        if size > _LEAST_BYTES:
            largest = max(one.bytes_received for one in alike)
            runs = sum(one.runs for one in alike)
            rows.append([*key, *_bytes_and_ms(size, rates), f"{runs:,}", f"{largest / 1e6:.1f}"])
    rows += [["sum", mode, "", *_bytes_and_ms(sum_received_bytes(count, mode), rates), "", ""] for mode in MODES]
    return TableSection("collectives: what one chip receives in a step", rows, numbers=True)


def _bytes_and_ms(size: float, rates: TpuRates) -> list[str]:
    at_all, at_two = (1e3 * size / speed for speed in (rates.all_links, rates.two_links))
    return [f"{size / 1e9:.3f}", f"{at_all:.1f}", f"{at_two:.1f}"]


def _host(count: StepCount) -> TableSection:
    rows = [["direction", "GB", "transfers", "ms", "hidden", "hidden if each had the link to itself"]]
    for direction, one in host_figures(count).items():
        shares = [f"{share:.0%}" if share is not None else "" for share in (one.hidden, one.hidden_without_contention)]
        rows.append(
            [direction, f"{one.num_bytes / 1e9:.2f}", f"{one.transfers:,}", f"{1e3 * one.seconds:.0f}", *shares]
        )
    title = "transfers to and from host memory, and how much of them work on the chip hides"
    return TableSection(title, rows, numbers=True)


def _verdict(counted: CountedStep) -> list[list[str]]:
    count, about = counted.count, counted.about
    low, high = count.at_all_links, count.at_two_links
    not_hidden = _range(count.not_hidden_at_all_links, count.not_hidden_at_two_links)
    rows = [
        ["compute", _milliseconds(low.compute)],
        ["synchronous collectives", _range(low.collectives, high.collectives)],
        ["waiting for the host", _range(low.waits, high.waits)],
        ["asynchronous collectives", f"not counted; sharing the links they would add {not_hidden}"],
        ["step", f"{_range(count.low, count.high)}, middle {_milliseconds(count.middle)}"],
    ]
    if counted.ideal is not None and about.model_flops is not None:
        needs = f"{about.model_flops / 1e12:.3f} TFLOP of the model at the peak"
        over = f"the step is {count.low / counted.ideal:.2f} .. {count.high / counted.ideal:.2f} of it"
        rows += [
            ["ideal", f"{_milliseconds(counted.ideal)}: {needs}; {over}"],
            ["MFU, upper bound", f"{counted.ideal / count.high:.1%} .. {counted.ideal / count.low:.1%}"],
        ]
    found = f"{count.product_flops / 1e12:.3f} TFLOP of products, {count.attention_flops / 1e12:.3f} of attention"
    if counted.found_over_traced is not None:
        found += f": {counted.found_over_traced:.4f} of what the traced program needs"
    rows.append(["FLOPs found", found])
    if count.unknown_loops:
        rows.append(["loops", f"{count.unknown_loops} run as often as the data says; what is in them counts once"])
    if about.peak_bytes is not None:
        rows.append(["peak of device memory", human_bytes(about.peak_bytes)])
    if about.compile_seconds is not None:
        rows.append(["compiling", f"{about.compile_seconds:.0f} s"])
    return rows


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def _range(low: float, high: float) -> str:
    return _milliseconds(low) if low == high else f"{1e3 * low:,.1f} .. {1e3 * high:,.1f} ms"


def comparison(one: CountedStep, other: CountedStep, name: str, other_name: str) -> TableSection:
    """Compare two steps side by side; the ratio is first over second."""
    rows = [["", name, other_name, "ratio"]]
    others = figures(other)
    for key, figure in figures(one).items():
        against = others[key]
        if figure or against:
            ratio = f"{figure / against:.3f}" if figure and against else ""
            rows.append([key, _figure(figure), _figure(against), ratio])
    return TableSection("side by side", rows, numbers=True)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}" if abs(value) < 100 else f"{value:,.1f}"
