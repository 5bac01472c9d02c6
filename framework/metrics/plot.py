"""Loss curves as a PNG, drawn from metrics.jsonl.

Imports framework.metrics.jsonl; matplotlib is imported when something is drawn. It is used without pyplot, whose global
state and choice of a display have no place in a training process.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.metrics.jsonl import read_metrics

TRAIN = "train/loss"
_TRAIN_COLOR = "#30638e"
_COLORS = ("#d1495b", "#00798c", "#edae49", "#6a4c93", "#2e933c", "#8d5524")
_GREY = "#888888"


def plot_losses(metrics_jsonl: str | os.PathLike[str], png_path: str | os.PathLike[str], title: str = "") -> Path:
    """Draws `train/loss` (raw and smoothed) and every other metric that ends in "loss", by step.

    The step axis is logarithmic once a curve spans two decades: a loss falls fast and then slowly, and both parts stay
    readable. The loss axis leaves out spikes that would flatten the rest. Points that are not finite are left out, and
    a cross on the lower edge marks them; a dotted line marks each resume.

    Args:
      metrics_jsonl: what JsonlWriter wrote. png_path: replaced atomically. title: the workdir's name if empty.

    Returns:
      png_path.

    Raises:
      FileNotFoundError: no such metrics file. ValueError: a line of it is no JSON object.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(metrics_jsonl)
    curves = loss_curves(rows)
    finite = {name: [point for point in curve if math.isfinite(point[1])] for name, curve in curves.items()}
    figure = Figure(figsize=(9, 5.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()

    _draw_train(axes, finite.pop(TRAIN, []))
    for color, (name, points) in zip(_COLORS * len(finite), finite.items(), strict=False):
        if points:
            _draw(axes, points, name, color=color, marker="o" if len(points) < 40 else None)
    _mark_resumes(axes, rows)
    bad = [step for curve in curves.values() for step, value in curve if not math.isfinite(value)]
    if bad:
        low = [0.015] * len(bad)
        axes.plot(bad, low, "x", color="#b00020", transform=axes.get_xaxis_transform(), label="not finite")
    _set_axes(axes, [point for curve in curves.values() for point in curve if math.isfinite(point[1])])
    axes.set_title(title or Path(metrics_jsonl).resolve().parent.name, fontsize=11)

    target = Path(png_path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, target)  # whoever looks at the picture while it is renewed sees a whole one
    return target


def loss_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by step for each metric whose name ends in "loss": train first, then by first appearance."""
    curves: dict[str, list[tuple[int, float]]] = {TRAIN: []}
    for row in rows:
        for name, value in row.items():
            if name.endswith("loss") and isinstance(value, (int, float)):
                curves.setdefault(name, []).append((row["step"], float(value)))
    return {name: sorted(curve, key=lambda point: point[0]) for name, curve in curves.items() if curve}


def smoothed(values: Sequence[float]) -> list[float]:
    """A running mean over 1/50 of the points (at least 5), narrower at the start, where a loss falls steeply."""
    half = max(2, len(values) // 100)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for index in range(len(values)):
        reach = min(half, index // 6)
        first, end = index - reach, min(index + reach + 1, len(values))
        means.append((sums[end] - sums[first]) / (end - first))
    return means


def _draw_train(axes: Any, points: Sequence[tuple[int, float]]) -> None:
    if 0 < len(points) < 20:
        _draw(axes, points, TRAIN, color=_TRAIN_COLOR, marker="o")
    elif points:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=_TRAIN_COLOR, alpha=0.25, linewidth=0.8)
        smooth = list(zip(steps, smoothed(values), strict=True))
        _draw(axes, smooth, f"{TRAIN}, smoothed", color=_TRAIN_COLOR, marker=None)


def _draw(axes: Any, points: Sequence[tuple[int, float]], name: str, *, color: str, marker: str | None) -> None:
    steps, values = zip(*points, strict=True)
    label = f"{name}  {values[-1]:.4f}"
    axes.plot(steps, values, color=color, linewidth=1.6, marker=marker, markersize=3.5, label=label)


def _mark_resumes(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for step in sorted({row["resumed_from"] for row in rows if row.get("resumed_from") is not None}):
        axes.axvline(step, color=_GREY, linestyle=":", linewidth=1.0, zorder=0)
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "xytext": (3, -3), "va": "top"}
        axes.annotate("resumed", (step, 1.0), rotation=90, fontsize=7, color=_GREY, **place)


def _set_axes(axes: Any, points: Sequence[tuple[int, float]]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    steps = sorted({step for step, _ in points if step > 0})
    if len(steps) >= 20 and steps[-1] >= 100 * steps[0]:
        axes.set_xscale("log")
        axes.set_xlim(left=steps[0])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if points:
        axes.set_ylim(*_loss_limits([value for _, value in points]))
        axes.legend(frameon=False, fontsize=9)
    else:
        axes.text(0.5, 0.5, "no losses were logged", ha="center", va="center", transform=axes.transAxes)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _loss_limits(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    typical = ordered[int(0.98 * (len(ordered) - 1))]
    if len(ordered) >= 50 and high - low > 3 * (typical - low) > 0:
        high = typical + 0.5 * (typical - low)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
    return low - margin, high + margin
