"""Tables for people: the one at the start of a run, and figures in units that are read at a glance.

Imports only the standard library. Callers bring plain values, so that this file knows neither the layout nor configs.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a table: a heading, and rows of cells. All columns but the first are aligned right if `numbers`."""

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
) -> list[Section]:
    """The table shown before the first step.

    Args:
      parameters: (group, number of elements, bytes over all devices), one row each.
      device_bytes: bytes on one device, by (group, memory kind).
      tokens_per_step: over all devices. flops_per_token: model FLOPs, forward and backward.
      device_limit_bytes: what a device has; shown with the sum, if known.
      data: what is read, by name. versions: of packages. item: what is counted, if no tokens.
    """
    run = {
        "config": config,
        "accelerator": accelerator,
        "mesh": mesh,
        f"{item}s per step": f"{tokens_per_step:,}",
        f"FLOPs per {item}": human_count(flops_per_token),
    }
    counts = [*parameters, ("sum", sum(row[1] for row in parameters), sum(row[2] for row in parameters))]
    groups = list(dict.fromkeys(group for group, _ in device_bytes))
    kinds = sorted({kind for _, kind in device_bytes}, key=lambda kind: (kind != "device", kind))
    sums = [human_bytes(sum(size for (_, k), size in device_bytes.items() if k == kind)) for kind in kinds]
    if device_limit_bytes and "device" in kinds:
        sums[0] += f" of {human_bytes(device_limit_bytes)}"
    parts = [[name, f"{count:,}", human_count(count), human_bytes(size)] for name, count, size in counts]
    places = [[group, *(human_bytes(device_bytes.get((group, kind))) for kind in kinds)] for group in groups]
    return [
        Section("run", list(run.items())),
        Section("parameters", [["group", "number", "", "bytes"], *parts], numbers=True),
        Section("bytes per device", [["group", *kinds], *places, ["sum", *sums]], numbers=True),
        Section("data", list(data.items())),
        Section("versions", list(versions.items())),
    ]


def render(sections: Sequence[Section]) -> str:
    """The sections as plain text, columns aligned: the same on a terminal, in a pipe and in log.txt."""
    lines = []
    for section in sections:
        lines.append(section.title)
        widths = [max(map(len, column)) for column in zip(*section.rows, strict=True)]
        for first, *others in section.rows:
            cells = [first.ljust(widths[0])]
            for cell, width in zip(others, widths[1:], strict=True):
                cells.append(cell.rjust(width) if section.numbers else cell.ljust(width))
            lines.append("  " + "   ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def human_bytes(size: float | None) -> str:
    """1610612736 -> "1.50 GiB" (of 2^30 bytes); None -> "-"."""
    return _human(size, 1024, (" B", " KiB", " MiB", " GiB", " TiB"), digits=2)


def human_count(count: float | None) -> str:
    """124439808 -> "124.4M"; 950 -> "950"; None -> "-"."""
    return _human(count, 1000, ("", "k", "M", "B", "T", "P"), digits=1)


def _human(value: float | None, base: int, units: Sequence[str], digits: int) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value /= base
        power += 1
    return (f"{value:.{digits}f}" if power else f"{value:.4g}") + units[power]
