"""Shows frontiers as tables and as a plot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plimsoll.extras.largest.frontier import Family, Frontier, FrontierPoint
from plimsoll.framework.terminal.tables import TableSection, human_bytes, human_count

_COLORS = ("#30638e", "#d1495b", "#00798c", "#edae49", "#6a4c93", "#2e933c")


def frontier_sections(frontiers: Sequence[Frontier]) -> list[TableSection]:
    """Return a table for each frontier, and one that compares the largest members; all are of the same kind."""
    tables = []
    failures = []
    family = frontiers[0].family
    columns = [*family.columns, "batch", "device", "host", "tokens/s"]
    largest = [["", *columns]]
    for frontier in frontiers:
        if not frontier.points:
            largest.append([frontier.name, "none", *[""] * (len(columns) - 1)])
            failures.append([frontier.name, frontier.failure])
            continue
        rows = [[*columns, "settings"]]
        rows += [[*_format_point(family, point), point.choice.flags or "unchanged"] for point in frontier.points]
        tables.append(TableSection(f"frontier, {frontier.name}", rows))
        largest.append([frontier.name, *_format_point(family, frontier.points[-1])])
    sections = [*tables, TableSection(family.title, largest)]
    return [*sections, TableSection("nothing fits", failures)] if failures else sections


def _format_point(family: Family[Any], point: FrontierPoint) -> list[str]:
    choice = point.choice
    used = "" if choice.used is None else f", {100 * choice.used:.1f}%"
    source = "" if choice.compiled else " (estimate)"
    host = human_bytes(choice.host) if choice.host else "-"
    rate = "-" if point.tokens_per_second is None else human_count(point.tokens_per_second)
    device = f"{human_bytes(choice.peak)}{used}{source}"
    data = family.scale_config(point.member.size).data
    batch = f"{data.global_batch_size:,} x {data.seq_len:,}"
    return [*family.to_cells(point.member), batch, device, host, rate]


def plot_frontiers(frontiers: Sequence[Frontier], picture: Path, title: str) -> None:
    """Plot tokens per second over the members' amounts as a PNG, which is replaced atomically. Raises OSError.

    Each frontier is a line. Its last point is the largest member that fits.

    Args:
        frontiers: the frontiers to plot.
        picture: file to write.
        title: title of the plot.
    """
    # Imported here, because only --picture needs matplotlib.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    for color, frontier in zip(_COLORS * len(frontiers), frontiers, strict=False):
        points = [point for point in frontier.points if point.tokens_per_second is not None]
        if not points:
            continue
        amounts = [point.member.amount for point in points]
        rates = [point.tokens_per_second or 0.0 for point in points]
        label = f"{frontier.name}: up to {frontier.family.to_cells(points[-1].member)[0]}"
        axes.plot(amounts, rates, color=color, marker="o", markersize=4, label=label)
        axes.axvline(amounts[-1], color=color, linestyle=":", linewidth=1.0)
    amount_name = frontiers[0].family.columns[0]
    axes.set(xscale="log", yscale="log", title=title, xlabel=amount_name, ylabel="tokens/s, estimated")
    axes.xaxis.set_major_formatter(lambda amount, _: human_count(amount))
    axes.grid(color="#dddddd", linewidth=0.6, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    temporary = picture.with_name(f"{picture.name}.tmp")
    try:
        figure.savefig(temporary, format="png")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, picture)
