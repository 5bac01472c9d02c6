"""Plots the results of tools.memory_vs_depth: temporaries against depth, and step time if it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Color and marker by policy, so that plots of different policies match. Dashed lines may cover others.
STYLES = {
    "none": ("#d1495b", "o"),
    "full": ("#edae49", "s"),
    "sqrt": ("#6a4c93", "^"),
    "offload": ("#30638e", "v"),
    "invert": ("#2e933c", "D"),
    "invert+in_backward": ("#111111", "x"),
}
_UNITS = (("KiB", 10), ("MiB", 20), ("GiB", 30))


def draw(rows: Sequence[Any], png: Path, title: str) -> Path:
    """Plot the rows of one config and target (`tools.memory_vs_depth.DepthRow`), and return `png`.

    Hollow markers do not fit into the device. In the panel of times, the legend shows the step time at the greatest
    depth, as a multiple of that of `none`.
    """
    from matplotlib.figure import Figure

    timed = any(row.step_seconds is not None for row in rows)
    figure = Figure(figsize=(11.5 if timed else 6.6, 4.8), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    policies = list(dict.fromkeys(row.policy for row in rows))
    name, power = next(
        (unit for unit in reversed(_UNITS) if max(row.temp_bytes for row in rows) >= 4 << unit[1]), _UNITS[0]
    )
    for policy in policies:
        own = [row for row in rows if row.policy == policy]
        _line(panels[0], policy, own, [row.temp_bytes / 2**power for row in own], policy)
    if not all(row.fits for row in rows):
        grey = {"color": "#888888", "marker": "o", "markerfacecolor": "white", "linestyle": ""}
        panels[0].plot([], [], label="hollow: does not fit into the device", **grey)
    panels[0].set(title="memory in addition to weights and optimizer state", ylabel=f"temporaries per device ({name})")
    if timed:
        deepest = {row.policy: row.step_seconds for row in rows if row.layers == max(row.layers for row in rows)}
        for policy in policies:
            own = [row for row in rows if row.policy == policy]
            times = f"  {deepest[policy] / deepest['none']:.2f}\N{MULTIPLICATION SIGN}" if "none" in deepest else ""
            _line(panels[1], policy, own, [row.step_seconds for row in own], policy + times)
        panels[1].set(title="time", ylabel="seconds per step (wall, median)")
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        depths = sorted({row.layers for row in rows})
        axes.set_xticks(depths, [str(depth) for depth in depths])
        axes.minorticks_off()
        _plain_ticks(axes)
        axes.set_xlabel("layers")
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9, loc="upper left")
    figure.suptitle(title, fontsize=11)
    figure.savefig(png, format="png")
    return png


def _line(axes: Any, policy: str, rows: Sequence[Any], values: Sequence[float], label: str) -> None:
    color, marker = STYLES[policy]
    depths = [row.layers for row in rows]
    dashes = {"linestyle": (0, (4, 3))} if marker in "vx" else {}
    axes.plot(depths, values, color=color, marker=marker, markersize=6, linewidth=1.6, label=label, **dashes)
    refused = [(depth, value) for depth, value, row in zip(depths, values, rows, strict=True) if not row.fits]
    if refused:
        axes.plot(
            *zip(*refused, strict=True), linestyle="", color=color, marker=marker, markerfacecolor="white", zorder=3
        )


def _plain_ticks(axes: Any) -> None:
    """Set ticks at 1, 2, 5 times powers of ten, written out, and leave room above the lines for the legend."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.35)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
