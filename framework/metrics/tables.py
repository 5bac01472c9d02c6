"""Tables for people: the one at the start of a run, and figures in units that are read at a glance.

Imports only the standard library; rich, which draws, is imported when something is drawn. Callers bring plain values,
so that this file knows neither the layout nor the configs. One renderer serves the terminal and log.txt.
"""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

Row = Sequence[str]


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a table. The first column is aligned left, the others right if `numbers`, else left.

    Attributes:
      title: heading.
      rows: cells as text, all rows of one length.
      header: column names, or none.
      total: a last row set apart by a rule.
    """

    title: str
    rows: Sequence[Row]
    header: Row | None = None
    total: Row | None = None
    numbers: bool = False


def start_table(
    *,
    config: str,
    accelerator: str,
    mesh: Mapping[str, int],
    parameters: Sequence[tuple[str, int, int]],
    device_bytes: Mapping[tuple[str, str], int],
    tokens_per_step: int,
    flops_per_token: float | None,
    device_limit_bytes: int | None = None,
    data: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
) -> list[Section]:
    """The table shown before the first step.

    Args:
      config: name of the config. accelerator: name of the devices. mesh: size of each axis.
      parameters: (group, number of elements, bytes over all devices), one row each.
      device_bytes: bytes on one device, by (group, memory kind).
      tokens_per_step: over all devices. flops_per_token: model FLOPs, forward and backward; None if not known.
      device_limit_bytes: what a device has; shown with the sum, if known.
      data: what is read, as lines of a report. versions: packages and hashes.
    """
    run = {
        "config": config,
        "accelerator": accelerator,
        "mesh": "  ".join(f"{axis} {size}" for axis, size in mesh.items()) or "-",
        "tokens per step": f"{tokens_per_step:,}",
        "FLOPs per token": human_count(flops_per_token),
    }
    groups = sorted({group for group, _ in device_bytes}, key=[g for g, _ in device_bytes].index)
    kinds = sorted({kind for _, kind in device_bytes}, key=lambda kind: (kind != "device", kind))
    sums = [sum(size for (_, kind), size in device_bytes.items() if kind == column) for column in kinds]
    total = ["sum", *(human_bytes(size) for size in sums)]
    if device_limit_bytes and "device" in kinds:
        total[1 + kinds.index("device")] += f" of {human_bytes(device_limit_bytes)}"
    sections = [
        _pairs("run", run),
        Section(
            "parameters",
            [[group, f"{count:,}", human_count(count), human_bytes(size)] for group, count, size in parameters],
            header=["group", "number", "", "bytes"],
            total=[
                "sum",
                f"{sum(r[1] for r in parameters):,}",
                human_count(sum(r[1] for r in parameters)),
                human_bytes(sum(r[2] for r in parameters)),
            ],
            numbers=True,
        ),
        Section(
            "bytes per device",
            [[group, *(human_bytes(device_bytes.get((group, kind))) for kind in kinds)] for group in groups],
            header=["group", *kinds],
            total=total,
            numbers=True,
        ),
    ]
    if data:
        sections.append(_pairs("data", data))
    if versions:
        sections.append(_pairs("versions", versions))
    return sections


def render(sections: Sequence[Section], width: int = 100) -> str:
    """The sections as plain text, no line wider than `width`; long cells are folded."""
    import io

    text = io.StringIO()
    _draw(sections, text, width=width, color=False)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def print_table(sections: Sequence[Section], file: IO[str] | None = None, width: int = 100) -> None:
    """Prints the sections: in colour and no wider than the terminal if `file` is one, as `render` does otherwise."""
    import os

    out: IO[str] = sys.stdout if file is None else file
    if out.isatty():
        _draw(sections, out, width=min(width, os.get_terminal_size(out.fileno()).columns or width), color=True)
    else:
        out.write(render(sections, width))
    out.flush()


def human_bytes(size: float | None) -> str:
    """1610612736 -> "1.50 GiB" (of 2^30 bytes); None -> "-"."""
    if size is None or not math.isfinite(size):
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1023.5 or unit == "TiB":
            break
        size /= 1024
    if unit == "B":
        return f"{size:.0f} B"
    return f"{size:.2f} {unit}" if abs(size) < 99.95 else f"{size:.1f} {unit}"


def human_count(count: float | None) -> str:
    """124439808 -> "124.4M"; 950 -> "950"; None -> "-"."""
    if count is None or not math.isfinite(count):
        return "-"
    for unit in ("", "k", "M", "B", "T", "P", "E"):
        if abs(count) < 999.95 or unit == "E":
            break
        count /= 1000
    return f"{count:g}" if unit == "" and count == int(count) else f"{count:.1f}{unit}"


def human_seconds(seconds: float | None) -> str:
    """0.25 -> "250 ms"; 12.3 -> "12.3 s"; 192 -> "3m 12s"; 7500 -> "2h 05m"; 200000 -> "2d 07h"; None -> "-"."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def _pairs(title: str, values: Mapping[str, Any]) -> Section:
    return Section(title, [[name, str(value)] for name, value in values.items()])


def _draw(sections: Sequence[Section], file: IO[str], *, width: int, color: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=file, width=width, no_color=not color, force_terminal=color, highlight=False)
    for section in sections:
        console.print(Text(section.title, style="bold"))
        table = Table(box=None, show_header=section.header is not None, header_style="dim", padding=(0, 3, 0, 0))
        columns = max([len(row) for row in section.rows] + [len(section.header or ()), len(section.total or ())])
        for index in range(columns):
            right = section.numbers and index > 0
            name = section.header[index] if section.header else ""
            table.add_column("  " + name if index == 0 else name, justify="right" if right else "left", overflow="fold")
        for row in section.rows:
            table.add_row(*_cells(row))
        if section.total:
            table.add_row(*[Text(cell.plain, style="bold") for cell in _cells(section.total)])
        console.print(table)


def _cells(row: Row) -> list[Any]:
    from rich.text import Text  # Text, not str: rich would read [brackets] in a value as markup

    return [Text("  " + cell if index == 0 else cell) for index, cell in enumerate(row)]
