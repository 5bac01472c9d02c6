"""Formats plans as text: the tables of one plan, and the table that compares several."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.framework.devices.mesh import mesh_text
from plimsoll.framework.devices.reserved_memory import MEMORY_FRACTION
from plimsoll.framework.plan.plan_report import BatchReport, HostReport, PlanReport, Suggestion
from plimsoll.framework.terminal.tables import TableSection, human_bytes, human_count, human_duration

# Rows of the table of largest buffers; the JSON report has more.
_LINES = 12


def verdict(report: PlanReport) -> str:
    """Return the verdict as text: `fits: 8.61 GiB of 15.75 GiB per device, 7.14 GiB to spare`.

    What does not fit is no part of the limit: `DOES NOT FIT: needs 1.28 TiB of the 15.75 GiB per device`.
    """
    need = report.device_allocated_bytes
    limit = report.device_limit_bytes
    note = ""
    for phase, figures in report.phases.items():
        if figures.device_peak_bytes > need:
            need = figures.device_peak_bytes
            note = f" ({phase} needs the most)"
            break
    if limit is None:
        return f"needs {human_bytes(need)} per device; the limit is unknown{note}"
    # `host_verdict` is about the host.
    if report.fits or (need <= limit and not report.message):
        spare = human_bytes(limit - need)
        return f"fits: {human_bytes(need)} of {human_bytes(limit)} per device, {spare} to spare{note}"
    return f"DOES NOT FIT: needs {human_bytes(need)} of the {human_bytes(limit)} per device{note}"


def batch_text(report: PlanReport, batch: BatchReport, *, per_device: bool = True) -> str:
    """Return the batch as text: `512 rows of 8,192 tokens = 4.2M tokens per step; 64 rows per device`.

    Args:
        report: the plan.
        batch: its batch.
        per_device: whether to append the share of one device.
    """
    rows = _count(batch.rows_per_step, "row")
    if report.item == "token":
        tokens = _count(batch.tokens_per_row, report.item)
        text = f"{rows} of {tokens} = {human_count(batch.tokens_per_step)} tokens per step"
    else:
        text = f"{_count(batch.rows_per_step, report.item)} per step"
    if batch.accumulate > 1:
        text += f", in {batch.accumulate} microbatches"
    if per_device and report.devices > 1:
        unit = "row" if report.item == "token" else report.item
        text += f"; {_count(batch.rows_per_device, unit)} per device"
        if batch.tokens_per_device != batch.rows_per_device * batch.tokens_per_row:
            text += f", {batch.tokens_per_device:,} tokens each"
    return text


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def host_verdict(host: HostReport) -> str:
    """Return the verdict on host memory as text: `fits: 3.61 GiB of 23.50 GiB (train needs the most)`."""
    need = human_bytes(host.peak_bytes)
    most = f"({host.peak_phase} needs the most)"
    if host.limit_bytes is None:
        return f"needs {need} {most}; the memory of such a host is unknown, set it with --host_memory_gib"
    return f"{'fits' if host.fits else 'DOES NOT FIT'}: {need} of {human_bytes(host.limit_bytes)} {most}"


def host_section(host: HostReport) -> TableSection:
    """Return the table of the host memory that each phase needs."""
    rows = [["", "total", "consists of"]]
    for name, parts in host.phases.items():
        total = sum(parts.values())
        largest_first = sorted(parts.items(), key=lambda item: -item[1])
        # Parts below 1% are left out here; the JSON report has them.
        text = ", ".join(f"{part} {human_bytes(size)}" for part, size in largest_first if size >= total / 100)
        rows.append([name, human_bytes(total), text])
    title = "host memory of a process"
    if host.num_processes > 1:
        title += f"; {host.num_processes} processes share this machine"
    return TableSection(title, rows)


def sections(report: PlanReport) -> list[TableSection]:
    """Return the tables that describe one plan."""
    untrained = [[leaf.path, human_bytes(leaf.bytes)] for leaf in report.zero_gradients]
    fitting = [[suggestion.setting, needs_text(suggestion)] for suggestion in report.suggestions]
    smaller = []
    if report.smaller_batch is not None:
        smaller.append([report.smaller_batch.setting, needs_text(report.smaller_batch)])
    # A report on a user's function names it as its subject.
    subject = report.subject or "the training step"
    largest = []
    for buffer in report.largest[:_LINES]:
        repeats = f" x {buffer.count}" if buffer.count > 1 else ""
        largest.append([buffer.name, buffer.shape + repeats, human_bytes(buffer.bytes)])
    # Without phases there is no header either, so that the section is left out.
    phases = [["", "device", "host"]] if report.phases else []
    for name, phase in report.phases.items():
        phases.append([name, human_bytes(phase.device_peak_bytes), human_bytes(phase.host_peak_bytes)])
    possible_sections = [
        TableSection("plan", _about(report)),
        TableSection(f"per device, at the peak of {subject}", _breakdown(report), numbers=True),
        TableSection("largest buffers", largest),
        TableSection("phases, per device", phases, numbers=True),
        *([] if report.host is None else [host_section(report.host)]),
        TableSection("device memory outside of the program", _reserved(report)),
        TableSection("work", _work(report)),
        TableSection("time, estimated", _time(report), numbers=False),
        TableSection("never trained: the gradient is zero for all data (freeze these with a rule)", untrained),
        TableSection("would fit", fitting),
        TableSection("would fit with a smaller batch, which changes the training", smaller),
    ]
    return [section for section in possible_sections if section.rows]


def time_cells(report: PlanReport) -> list[str]:
    """Return [estimated time of a step, what bounds it]."""
    time = report.time
    return [human_duration(time.seconds), time.bound_by] if time else ["-", "-"]


def needs_text(suggestion: Suggestion) -> str:
    """Return the memory that a suggested setting needs, and whether it was compiled or only estimated."""
    size = human_bytes(suggestion.device_peak_bytes)
    text = f"{size}, compiled" if suggestion.compiled else f"about {size}, not compiled"
    if suggestion.host_process_bytes:
        text += f"; offloads {human_bytes(suggestion.host_process_bytes)} to the host"
    return text


def _breakdown(report: PlanReport) -> list[list[str]]:
    rows = [["", "device", "", "host"]]
    peak = report.device_peak_bytes
    parts = []
    for key, size in report.breakdown.items():
        parts.append((key.replace("_", " "), size, report.host_breakdown.get(key)))
    gaps = report.device_allocated_bytes - peak
    parts.append(("left empty by packing", gaps, 0))
    for name, size, host_size in parts:
        if size or host_size:
            # Shares are relative to the peak without packing gaps, so that the groups add up to 100%.
            share = f"{100 * size / peak:.1f}%"
            rows.append([name, human_bytes(size), share, human_bytes(host_size) if host_size else "-"])
    rows.append(["peak", human_bytes(report.device_allocated_bytes), "", human_bytes(report.host_peak_bytes)])
    return rows


def _about(report: PlanReport) -> list[list[str]]:
    sizes = {axis: size for axis, size in report.mesh.items() if size > 1}
    mesh = mesh_text(sizes, report.mesh_across, report.platform) or "one device"
    rows = [
        ["config", " ".join([report.config, *report.settings])],
        ["target", f"{report.target}: {report.devices} devices, {report.processes} hosts; mesh {mesh}"],
        *([] if report.batch is None else [["batch", batch_text(report, report.batch)]]),
        ["verdict", verdict(report)],
    ]
    if report.message:
        rows.append(["compiler error", report.message])
    if report.host is not None:
        rows.append(["host memory", host_verdict(report.host)])
    elif report.host_process_bytes:
        limit = report.host_limit_bytes
        of_limit = f" of {human_bytes(limit)}" if limit else ""
        rows.append(["host memory", human_bytes(report.host_process_bytes) + of_limit])
    for note in report.notes:
        rows.append(["note", note])
    if report.estimated and not report.compilable:
        rows.append(["method", "estimate"])
    elif report.estimated:
        rows.append(["method", "estimate; without --estimate, the step is compiled"])
    elif report.estimate is not None and report.estimate.error is not None:
        error = report.estimate.error
        compiled = f"the {human_bytes(report.device_peak_bytes)} alive at the peak, without packing gaps"
        percentage = f"{100 * abs(error):.1f}% {'more' if error > 0 else 'less'}"
        rows.append(["estimate", f"{human_bytes(report.estimate.device_peak_bytes)}, {percentage} than {compiled}"])
    return rows


def _reserved(report: PlanReport) -> list[list[str]]:
    """Return the rows of the memory that programs cannot use; [] if it is not known."""
    rows = [[name, human_bytes(size)] for name, size in report.device_reserved.items()]
    if len(rows) > 1:
        rows.append(["total", human_bytes(sum(report.device_reserved.values()))])
    if rows and report.device_memory_fraction is not None:
        # JAX reads the variable when it starts.
        rows.append(["set", f"{MEMORY_FRACTION}={report.device_memory_fraction:g}"])
    return rows


def _work(report: PlanReport) -> list[list[str]]:
    unit = "call" if report.subject else "step"
    rows = [[f"FLOPs per {unit}", f"{human_count(report.flops_per_step)}, all devices"]]
    # A user's function has no tokens.
    if report.flops_per_token is not None:
        model_flops = f"({human_count(report.model_flops_per_token)} model FLOPs)"
        rows.append([f"FLOPs per {report.item}", f"{human_count(report.flops_per_token)} {model_flops}"])
    if report.collective_bytes:
        parts = [f"{kind} {human_bytes(size)}" for kind, size in sorted(report.collective_bytes.items())]
        rows.append(["between devices", f"{', '.join(parts)}; per device and step"])
    if report.host_transfer_bytes:
        rows.append(["device and host", f"{human_bytes(report.host_transfer_bytes)} per device and step"])
    if report.compile_seconds:
        rows.append(["compiled in", f"{report.compile_seconds:.0f} s"])
    return rows


def _time(report: PlanReport) -> list[list[str]]:
    """Return the rows of the estimated time; [] if the time is not known."""
    time = report.time
    if time is None:
        return []
    seconds = time.seconds
    unit = "call" if report.subject else "step"
    speed = human_duration(seconds)
    if time.tokens_per_second:
        speed += f", {human_count(time.tokens_per_second)} {report.item}s a second"
    if time.model_flops_utilization:
        speed += f", {100 * time.model_flops_utilization:.1f}% of the peak (MFU)"
    rows = [[f"a {unit}", speed]]
    for name, part_seconds in time.parts.items():
        # Parts below 0.1% of the step are left out here; the JSON report has them.
        if part_seconds > seconds / 1000:
            share = f"{100 * part_seconds / seconds:.1f}%"
            bounds = ", the largest part" if name == time.bound_by else ""
            rows.append([name, f"{human_duration(part_seconds)}, {share}{bounds}"])
    return [*rows, ["method", time.basis]]


def comparison(reports: Sequence[PlanReport]) -> TableSection:
    """Return a table with one row per plan: the settings that differ between plans, and the breakdown of its peak.

    The most important columns come first, because a terminal or a page may have no room for the last ones.
    """
    first = reports[0]
    common = []
    for setting in first.settings:
        if all(setting in report.settings for report in reports):
            common.append(setting)
    # Leave out columns that would be zero in all rows.
    keys = [key for key in first.breakdown if any(report.breakdown[key] for report in reports)]
    has_host = any(report.host_peak_bytes for report in reports)
    has_time = any(report.time for report in reports)
    targets = dict.fromkeys(report.target for report in reports)
    limits = dict.fromkeys(human_bytes(report.device_limit_bytes) for report in reports)
    batches = [report.batch for report in reports if report.batch is not None]
    has_batches = len(batches) == len(reports) and len(set(batches)) > 1
    header = ["setting", "needs"]
    if len(limits) > 1:
        header.append("of")
    header.append("")
    if has_batches:
        header.append("batch")
    if has_time:
        header += ["step", "bound by"]
    if has_host:
        header.append("host")
    header.append("FLOPs")
    header += [key.replace("_", " ") for key in keys]
    rows = [header]
    for report in reports:
        differing = " ".join(setting for setting in report.settings if setting not in common)
        row = [differing or report.config, human_bytes(report.device_allocated_bytes)]
        if len(limits) > 1:
            row.append(human_bytes(report.device_limit_bytes))
        row.append("fits" if report.fits else "TOO BIG")
        if has_batches and report.batch is not None:
            row.append(batch_text(report, report.batch, per_device=False))
        if has_time:
            row += time_cells(report)
        if has_host:
            row.append(human_bytes(report.host_peak_bytes))
        row.append(human_count(report.flops_per_step))
        row += [human_bytes(report.breakdown.get(key, 0)) for key in keys]
        rows.append(row)
    title = f"{' '.join([first.config, *common])} on {', '.join(targets)}"
    if batches and not has_batches:
        title += f"; {batch_text(first, batches[0])}"
    if len(limits) == 1:
        title += f", {next(iter(limits))} per device"
    return TableSection(title, rows, True)
