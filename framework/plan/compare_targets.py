"""Compares many targets for one config in a table, and finds the smallest machine that fits it."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.framework.devices.accelerators import ACCELERATORS
from plimsoll.framework.plan import targets
from plimsoll.framework.plan.plan_report import PlanReport
from plimsoll.framework.plan.report_tables import batch_text, time_cells
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.terminal.tables import TableSection, human_bytes

# Sizes to try for the smallest machine: these numbers of GPUs, and Cloud's slices of up to this many devices.
_GPU_COUNTS = (1, 2, 4, 8)
_MOST_DEVICES = 256


def parse_target_names(text: str) -> list[str]:
    """Return the targets in a list such as "4090,h100x8", without duplicates, in order."""
    names = [name.strip() for name in text.split(",")]
    return list(dict.fromkeys(name for name in names if name))


def list_candidates() -> list[str]:
    """Return names of machines, sorted by the total memory of their devices, smallest first."""
    machines: list[tuple[int, int, str]] = []
    for spec in ACCELERATORS:
        names = []
        if spec.platform == "gpu" and spec.memory_bytes is not None:
            # A rented machine has one GPU or all GPUs of a host; consumer cards come in any of these counts.
            counts = [n for n in _GPU_COUNTS if n in (1, spec.chips_per_host) or spec.chips_per_host is None]
            names = [spec.name if count == 1 else f"{spec.name}x{count}" for count in counts]
        elif spec.topologies:
            names = [f"{spec.name}-{size}" for size in targets.topology_by_size(spec.name)]
        for name in names:
            machine = targets.resolve(name)
            if spec.platform == "gpu" or machine.num_devices <= _MOST_DEVICES:
                # Ties are broken by fewer devices, then by name, so that the order is deterministic.
                machines.append((total_bytes(machine), machine.num_devices, name))
    return [name for _, _, name in sorted(set(machines))]


def total_bytes(machine: Target) -> int:
    """Return the device memory that programs may use, summed over all devices."""
    return (machine.limit_bytes or 0) * machine.num_devices


def can_fit(report: PlanReport) -> bool:
    """Return whether the config fits the target, unchanged or with settings that do not change what is computed."""
    return bool(report.fits or report.suggestions)


def table(reports: Sequence[PlanReport], left_out: dict[str, str]) -> list[TableSection]:
    """Return a table with one row per target: what the config needs there, and the cheapest settings that fit.

    Args:
        reports: plans of one config.
        left_out: {target: reason why the config cannot be trained there at all}.
    """
    header = ["target", "memory per device", "needs", "", "step", "bound by"]
    # The global batch is in the title; its share depends on the number of devices. A function has no batch.
    has_batch = any(report.batch is not None for report in reports)
    batch_header = ["rows per device"] if has_batch else []
    rows = [[*header, *batch_header, "or", "source", "with the first settings that fit"]]
    for report in reports:
        has = human_bytes(report.device_limit_bytes) if report.device_limit_bytes else "unknown"
        if report.devices > 1:
            has = f"{report.devices} x {has}"
        verdict = "fits" if report.fits else "TOO BIG"
        row = [report.target, has, human_bytes(report.device_allocated_bytes), verdict, *time_cells(report)]
        if has_batch:
            row.append("-" if report.batch is None else f"{report.batch.rows_per_device:,}")
        # The bytes, the source of the figure, and the settings of the first suggestion; suggestions are cheapest first.
        if report.fits:
            row += ["", "estimate" if report.estimated else "compiler", "unchanged"]
        elif not report.suggestions and report.smaller_batch is not None:
            smaller = report.smaller_batch
            row += [human_bytes(smaller.device_peak_bytes), "estimate", f"{smaller.setting} (changes the training)"]
        elif not report.suggestions:
            row += ["", "estimate", "none found"]
        else:
            suggestion = report.suggestions[0]
            source = "compiler" if suggestion.compiled and not report.estimated else "estimate"
            row += [human_bytes(suggestion.device_peak_bytes), source, suggestion.setting]
        rows.append(row)
    impossible = [[name, reason] for name, reason in left_out.items()]
    sections = []
    if reports:
        # The title has the settings that all reports share.
        first, *others = reports
        shared = [setting for setting in first.settings if all(setting in report.settings for report in others)]
        title = " ".join([first.config, *shared])
        # The rules of a target may change the batch.
        batches = [batch_text(report, report.batch, per_device=False) for report in reports if report.batch is not None]
        if batches:
            title += f": {' or '.join(dict.fromkeys(batches))}"
        sections.append(TableSection(title, rows))
    if impossible:
        sections.append(TableSection("not possible", impossible))
    return sections
