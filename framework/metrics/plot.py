"""Plots the metrics of a run as PNGs, from metrics.jsonl: losses and learning rates, objective metrics, expert loads.

matplotlib is used without pyplot, whose global state and display backends do not belong in a training process.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plimsoll.framework.metrics.jsonl import read_metrics

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAIN = "train/loss"
RATE = "train/learning_rate"
_COLORS = ("#30638e", "#d1495b", "#00798c", "#edae49", "#6a4c93", "#2e933c")
_RATE_COLOR = "#444444"
# Prefix of an objective's training metrics, and the suffixes that distinguish kinds of answers.
_OBJECTIVE = "train/head/"
_SIDES = re.compile("_(chosen|rejected|desirable|undesirable)$")
# Load metrics of an MoE layer: group 1 is the layer, group 2 the number of the expert.
_EXPERT_LOAD = re.compile("(train/.+)/load/([0-9]+)")
# With more experts than this, the plot does not name them.
_MAX_NAMED_EXPERTS = 8
# A training loss with at most this many points is not smoothed.
_MIN_SMOOTHED = 20

# (step, value) of each row, sorted by step.
Points = Sequence[tuple[float, float]]


def plot_losses(
    metrics_jsonl: str | os.PathLike[str], png_path: Path, title: str, unit: str = "nats per token"
) -> Path:
    """Plot the losses of a run by step, replace `png_path` atomically, and return it.

    The plot shows `train/loss` (smoothed, and the raw values in a pale color) and every other metric that ends in
    "loss". If the learning rate changes, it gets a panel below. Non-finite values are gaps, a dotted line marks each
    resume, and the loss axis cuts off spikes that would flatten the rest. Raises OSError, and the errors of
    `read_metrics`.
    """
    import numpy as np
    from matplotlib.figure import Figure

    rows = read_metrics(metrics_jsonl)
    rates = _collect_points(rows, RATE)
    has_rates = len({rate for _, rate in rates}) > 1
    figure = Figure(figsize=(9, 6.4 if has_rates else 5.2), dpi=130, layout="constrained")
    if has_rates:
        loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        rate_axes.plot(*zip(*rates, strict=True), color=_RATE_COLOR, linewidth=1.2)
        rate_axes.set_ylabel("learning rate")
        rate_axes.set_ylim(bottom=0.0)
        # Show the power of ten once above the axis, instead of ticks such as 0.0002.
        rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
        all_axes = [loss_axes, rate_axes]
    else:
        loss_axes = figure.add_subplot()
        all_axes = [loss_axes]
    curves = collect_loss_curves(rows)
    # Repeat the colors if there are more curves than colors.
    for color, (name, points) in zip(_COLORS * len(curves), curves.items(), strict=False):
        steps, losses = np.array(points).T
        if name == TRAIN and len(steps) > _MIN_SMOOTHED:
            loss_axes.plot(steps, losses, color=color, alpha=0.35, linewidth=0.8)
            losses = smooth(losses)
            name = f"{name}, smoothed"
        # An evaluation may have few points, so mark them. Markers on many points would look like a thick line.
        is_few = len(steps) < 40 and not name.startswith(TRAIN)
        # A single point has no line.
        marker = "o" if is_few or len(steps) == 1 else None
        label = f"{name}  {losses[-1]:.4f}"
        loss_axes.plot(steps, losses, color=color, marker=marker, markersize=3.5, label=label)
    all_losses = [loss for points in curves.values() for _, loss in points]
    finite_losses = np.array([loss for loss in all_losses if np.isfinite(loss)])
    if finite_losses.size:
        low = np.min(finite_losses)
        # Use a percentile, because a few spikes would move the maximum.
        typical_high = np.percentile(finite_losses, 98)
        top = min(np.max(finite_losses), low + 2 * (typical_high - low))
        loss_axes.set_ylim(low - 0.05, top + 0.05)
        loss_axes.legend(frameon=False, fontsize=9)
    loss_axes.set(title=title, ylabel=f"loss ({unit})")
    all_axes[-1].set_xlabel("step")
    for axes in all_axes:
        _finish(axes, rows)
    return _save(figure, png_path)


def plot_runs(rows_by_run: Mapping[str, Sequence[Mapping[str, float]]], metrics: Sequence[str], png_path: Path) -> Path:
    """Plot metrics of several runs by step, replace `png_path` atomically, and return it.

    Each metric has a panel, and each run a color. A training loss is smoothed if it has many points.

    Args:
        rows_by_run: rows of metrics.jsonl of each run, by the name in the legend.
        metrics: names of the metrics.
        png_path: file of the plot.
    """
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6 * len(metrics) + 0.4), dpi=130, layout="constrained")
    panels = figure.subplots(len(metrics), 1, squeeze=False, sharex=True).flatten()
    has_own_colors = len(rows_by_run) > len(_COLORS)
    for axes, metric in zip(panels, metrics, strict=True):
        for index, (run, rows) in enumerate(rows_by_run.items()):
            points = _collect_points(rows, metric)
            if not points:
                continue
            steps, values = np.array(points).T
            is_few = len(steps) <= _MIN_SMOOTHED
            if metric == TRAIN and not is_few:
                values = smooth(values)
            color = colormaps["turbo"](index / len(rows_by_run)) if has_own_colors else _COLORS[index]
            # Matplotlib reads text between dollar signs as a formula.
            label = f"{run}  {points[-1][1]:.4g}".replace("$", r"\$")
            marker = "o" if is_few else None
            axes.plot(steps, values, color=color, linewidth=1.1, marker=marker, markersize=3, label=label)
        axes.set_ylabel(metric.replace("$", r"\$"))
        if axes.lines:
            axes.legend(frameon=False, fontsize=7, ncols=2 if len(rows_by_run) > 8 else 1)
        _finish(axes, [])
    panels[-1].set_xlabel("step")
    return _save(figure, png_path)


def plot_objective(metrics_jsonl: str | os.PathLike[str], png_path: Path, title: str) -> Path | str:
    """Plot an objective's metrics other than its loss, by step: accuracies, margins, rewards, divergences, lengths.

    Each panel shows the metrics of one kind, for training and for each validation set. Replace `png_path` atomically
    and return it, or return a message if there is nothing to draw. Raises OSError, and the errors of `read_metrics`.
    """
    from matplotlib.figure import Figure

    rows = read_metrics(metrics_jsonl)
    panels = objective_panels(rows)
    if not panels:
        return "no metrics to plot"
    num_rows = -(-len(panels) // 2)
    figure = Figure(figsize=(11, 2.6 * num_rows + 0.6), dpi=130, layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(num_rows, 2, squeeze=False, sharex=True).flatten()
    for axes, (kind, curves) in zip(grid, panels.items(), strict=False):
        for color, (name, points) in zip(_COLORS * len(curves), curves.items(), strict=False):
            steps, values = zip(*points, strict=True)
            is_training = name.startswith(_OBJECTIVE)
            marker = None if is_training and len(points) > 1 else "o"
            label = f"{name}  {values[-1]:.4g}"
            axes.plot(steps, values, color=color, linewidth=1.0, marker=marker, markersize=3.5, label=label)
        axes.set_ylabel(kind.replace("_", " "))
        axes.legend(frameon=False, fontsize=7)
        _finish(axes, rows)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    # Label the step axis only at the lowest panel of each column.
    for axes in grid[max(0, len(panels) - 2) : len(panels)]:
        axes.set_xlabel("step")
        axes.tick_params(labelbottom=True)
    return _save(figure, png_path)


def objective_panels(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Points]]:
    """Return {kind: {metric: [(step, value)]}} of an objective's metrics.

    Metrics that differ only in their suffix, such as chosen and rejected, belong to one kind.
    """
    training_names = dict.fromkeys(name for row in rows for name in row if name.startswith(_OBJECTIVE))
    panels: dict[str, dict[str, Points]] = {}
    for training_name in training_names:
        metric = training_name.removeprefix(_OBJECTIVE)
        # These are terms of the loss, which has its own plot.
        if metric in ("preference", "sft", "nll"):
            continue
        kind = _SIDES.sub("", metric)
        evaluated = [name for row in rows for name in row if name.startswith("eval/") and name.endswith(f"/{metric}")]
        for name in dict.fromkeys([training_name, *evaluated]):
            panels.setdefault(kind, {})[name] = _collect_points(rows, name)
    return panels


def plot_experts(metrics_jsonl: str | os.PathLike[str], png_path: Path, title: str) -> Path | str:
    """Plot the load of each expert by step, as a multiple of its even share.

    Each MoE layer of the pattern gets a row of panels: the loads with the range between their minimum and maximum, the
    router's entropy and, if there is a capacity, the fraction of dropped choices. Replace `png_path` atomically and
    return it, or return a message if there is nothing to draw. Raises OSError, and the errors of `read_metrics`.
    """
    from matplotlib.figure import Figure

    rows = read_metrics(metrics_jsonl)
    loads_by_layer = expert_loads(rows)
    if not loads_by_layer:
        return "no metrics to plot"
    side_metrics = ["entropy"]
    if any(f"{layer}/dropped" in row for row in rows for layer in loads_by_layer):
        side_metrics.append("dropped")
    num_layers = len(loads_by_layer)
    figure = Figure(figsize=(11, 3.4 * num_layers + 0.6), dpi=130, layout="constrained")
    figure.suptitle(title)
    widths = (2, *[1] * len(side_metrics))
    grid = figure.subplots(num_layers, len(widths), squeeze=False, sharex=True, width_ratios=widths)
    labels = {"entropy": "entropy of the router, nats", "dropped": "share of dropped choices"}
    for layer_axes, (layer, loads) in zip(grid, loads_by_layer.items(), strict=True):
        _draw_loads(layer_axes[0], layer, loads, rows)
        for axes, name, color in zip(layer_axes[1:], side_metrics, _COLORS, strict=False):
            points = _collect_points(rows, f"{layer}/{name}")
            _draw_line(axes, points, color=color, linewidth=1.2)
            axes.set_ylabel(labels[name])
            axes.set_ylim(0.0, 1.1 * _find_highest([points]))
        for axes in layer_axes:
            _finish(axes, rows)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    return _save(figure, png_path)


def expert_loads(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[int, Points]]:
    """Return {layer: {expert: [(step, load)]}} of the layers that report loads, with the experts in order."""
    names = dict.fromkeys(name for row in rows for name in row)
    loads: dict[str, dict[int, Points]] = {}
    for name in names:
        match = _EXPERT_LOAD.fullmatch(name)
        if match is not None:
            loads.setdefault(match[1], {})[int(match[2])] = _collect_points(rows, name)
    return {layer: dict(sorted(layer_loads.items())) for layer, layer_loads in loads.items()}


def _draw_loads(axes: Axes, layer: str, loads: Mapping[int, Points], rows: Sequence[Mapping[str, float]]) -> None:
    """Draw the load of each expert of a layer, and the area between their minimum and maximum."""
    from matplotlib import colormaps

    most_points = _collect_points(rows, f"{layer}/load_max")
    extremes = zip(_collect_points(rows, f"{layer}/load_min"), most_points, strict=False)
    bounds = [(step, least, most) for (step, least), (_, most) in extremes]
    if bounds:
        label = f"load_min to load_max  {bounds[-1][2]:.4g}"
        steps, least_loads, most_loads = zip(*bounds, strict=True)
        axes.fill_between(steps, least_loads, most_loads, color="#dddddd", linewidth=0.0, label=label)
    names_experts = len(loads) <= _MAX_NAMED_EXPERTS
    for expert, points in loads.items():
        # Many experts have similar colors. Their plot shows only the spread of all loads.
        color = colormaps["tab10"](expert) if names_experts else colormaps["viridis"](expert / len(loads))
        label = f"load/{expert}  {points[-1][1]:.4g}" if names_experts else None
        _draw_line(axes, points, color=color, linewidth=1.0 if names_experts else 0.6, label=label)
    axes.axhline(1.0, color=_RATE_COLOR, linestyle=":", linewidth=1.0)
    # Leave room for the legend above the curves.
    axes.set_ylim(0.0, 1.35 * _find_highest([most_points, *loads.values()]))
    axes.set_ylabel("load of an expert / even share")
    axes.set_title(f"{layer.removeprefix('train/')}: {len(loads)} experts", fontsize=9)
    axes.legend(frameon=False, fontsize=7, ncols=3, loc="upper left")


def _find_highest(curves: Iterable[Points]) -> float:
    """Return the highest finite value of some curves; 1 if it is 0 or if there is none."""
    values = [value for points in curves for _, value in points if math.isfinite(value)]
    return max(values, default=0.0) or 1.0


def _draw_line(axes: Axes, points: Points, **style: Any) -> None:
    """Draw a curve. A single point, which has no line, becomes a dot."""
    if points:
        axes.plot(*zip(*points, strict=True), marker="o" if len(points) == 1 else None, markersize=3.5, **style)


def _finish(axes: Axes, rows: Sequence[Mapping[str, float]]) -> None:
    """Mark resumes, and apply the common style to the axes."""
    for row in rows:
        if "resumed_from" in row:
            axes.axvline(row["step"], color="#888888", linestyle=":", linewidth=1.0, zorder=0)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, png_path: Path) -> Path:
    """Write a plot atomically, so that a reader never sees a partial file."""
    temporary = png_path.with_name(png_path.name + ".tmp")
    try:
        figure.savefig(temporary, format="png")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, png_path)
    return png_path


def collect_loss_curves(rows: Sequence[Mapping[str, float]]) -> dict[str, Points]:
    """Return [(step, value)], sorted by step, for each metric whose name ends in "loss".

    The metrics are in the order of their first appearance.
    """
    names = [name for row in rows for name in row if name.endswith("loss")]
    # Use a dict instead of a set to keep the order.
    return {name: _collect_points(rows, name) for name in dict.fromkeys(names)}


def _collect_points(rows: Sequence[Mapping[str, float]], name: str) -> Points:
    """Return (step, value) of each row that has the metric, sorted by step."""
    return sorted((row["step"], row[name]) for row in rows if name in row)


def smooth(losses: np.ndarray) -> np.ndarray:
    """Smooth a curve: f64[n] -> f64[n].

    Each value becomes the mean of the finite values in a window around it: 1/50 of all points, at least 5. A non-finite
    value becomes NaN, which is a gap in the plot.
    """
    import numpy as np

    window = np.ones(max(5, len(losses) // 50))
    finite = np.isfinite(losses)
    sums = np.convolve(np.where(finite, losses, 0.0), window, "same")
    counts = np.convolve(finite.astype(float), window, "same")
    return np.where(finite, sums / np.maximum(counts, 1.0), np.nan)
