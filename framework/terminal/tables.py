"""Human-readable tables, such as the one at the start of a run, and numbers in readable units.

This module imports only the standard library. Callers pass plain values, so it does not depend on the layout of the
state or on configs.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from plimsoll.framework.terminal.escaping import escape_control_chars


@dataclasses.dataclass(frozen=True)
class TableSection:
    """A section of a table: a heading, and rows of cells.

    If `numbers`, all columns but the first are right-aligned.
    """

    title: str
    rows: Sequence[Sequence[str]]
    numbers: bool = False


def start_table(
    *,
    config: str,
    accelerator: str,
    mesh: str,
    parameters: Sequence[tuple[str, int, int]],
    device_bytes: Mapping[tuple[str, str], int],
    tokens_per_step: int,
    flops_per_token: float,
    device_limit_bytes: int | None,
    data: Mapping[str, str],
    versions: Mapping[str, str],
    item: str = "token",
    course: Mapping[str, str] | None = None,
) -> list[TableSection]:
    """Return the table that is shown before the first step.

    Args:
        config: name of the config.
        accelerator: name of the accelerator.
        mesh: description of the mesh.
        parameters: (group, number of elements, bytes over all devices), one row each.
        device_bytes: bytes on one device, by (group, memory kind).
        tokens_per_step: number of items per step, over all devices.
        flops_per_token: model FLOPs per item, forward and backward.
        device_limit_bytes: memory of one device in bytes, shown next to the sum; None if unknown.
        data: descriptions of the data sources, by name.
        versions: versions of packages, by name.
        item: kind of item that is counted: "token" or "image".
        course: additional facts about the course of the run, by name.
    """
    run = {
        "config": config,
        "accelerator": accelerator,
        "mesh": mesh,
        f"{item}s per step": f"{tokens_per_step:,}",
        f"FLOPs per {item}": human_count(flops_per_token),
        **(course or {}),
    }
    total_count = sum(count for _, count, _ in parameters)
    total_bytes = sum(size for _, _, size in parameters)
    parameter_rows = [["group", "number", "", "bytes"]]
    for group, count, size in [*parameters, ("sum", total_count, total_bytes)]:
        parameter_rows.append([group, f"{count:,}", human_count(count), human_bytes(size)])
    # A column for each memory kind. Device memory comes first, because it is the scarce one.
    kinds = sorted({kind for _, kind in device_bytes}, key=lambda kind: (kind != "device", kind))
    memory_rows = [["group", *kinds]]
    # Use a dict instead of a set to keep the order.
    for group in dict.fromkeys(group for group, _ in device_bytes):
        sizes = [human_bytes(device_bytes.get((group, kind))) for kind in kinds]
        memory_rows.append([group, *sizes])
    sums = dict.fromkeys(kinds, 0)
    for (_, kind), size in device_bytes.items():
        sums[kind] += size
    sum_row = ["sum", *(human_bytes(size) for size in sums.values())]
    if device_limit_bytes and "device" in kinds:
        sum_row[1] += f" of {human_bytes(device_limit_bytes)}"
    return [
        TableSection("run", list(run.items())),
        TableSection("parameters", parameter_rows, numbers=True),
        TableSection("bytes per device", [*memory_rows, sum_row], numbers=True),
        TableSection("data", list(data.items())),
        TableSection("versions", list(versions.items())),
    ]


def render(sections: Sequence[TableSection]) -> str:
    """Return the sections as plain text with aligned columns, for terminals, pipes and log.txt alike."""
    lines = []
    for section in sections:
        lines.append(section.title)
        widths = [max(map(len, column)) for column in zip(*section.rows, strict=True)]
        for heading, *values in section.rows:
            cells = [heading.ljust(widths[0])]
            for value, width in zip(values, widths[1:], strict=True):
                cell = value.rjust(width) if section.numbers else value.ljust(width)
                cells.append(cell)
            lines.append("  " + "   ".join(cells).rstrip())
    return escape_control_chars("\n".join(lines)) + "\n"


def human_bytes(size: float | None) -> str:
    """Format bytes: 1610612736 -> "1.50 GiB" (2^30 bytes each); None -> "-"."""
    return _human(size, 1024, (" B", " KiB", " MiB", " GiB", " TiB"), digits=2)


def human_count(count: float | None) -> str:
    """Format a count: 124439808 -> "124.4M"; 950 -> "950"; None -> "-"."""
    return _human(count, 1000, ("", "k", "M", "B", "T", "P"), digits=1)


def human_duration(seconds: float) -> str:
    """Format seconds with three significant digits: 0.0123 -> "12.3 ms"; 2.5 -> "2.50 s"; 5e-6 -> "5.00 us"."""
    factor, unit = 1e-6, "us"
    if seconds >= 1.0:
        factor, unit = 1.0, "s"
    elif seconds >= 1e-3:
        factor, unit = 1e-3, "ms"
    value = seconds / factor
    digits = max(0, 2 - max(0, math.floor(math.log10(value)))) if value > 0 else 0
    return f"{value:.{digits}f} {unit}"


def _human(value: float | None, base: int, units: Sequence[str], digits: int) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value /= base
        power += 1
    # A value without a prefix may be an integer, which is shown without decimals.
    number = f"{value:.{digits}f}" if power else f"{value:.4g}"
    return number + units[power]
