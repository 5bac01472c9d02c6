"""Draws the losses and the learning rate of a run as a PNG, from metrics.jsonl.

matplotlib is used without pyplot, whose global state and choice of a display have no place in a
training process.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.metrics.jsonl import read_metrics

TRAIN = "train/loss"
RATE = "train/learning_rate"
_COLORS = ("#30638e", "#d1495b", "#00798c", "#edae49", "#6a4c93", "#2e933c")
_RATE_COLOR = "#444444"
# What an objective reports of training steps, and the ends of names that tell two kinds of answers apart.
_OBJECTIVE = "train/head/"
_SIDES = re.compile("_(chosen|rejected|desirable|undesirable)$")
# A training loss of fewer points is drawn as it is.
_MIN_SMOOTHED = 20

# (step, value) of each row, by step.
Points = list[tuple[int, float]]


def plot_losses(
    metrics_jsonl: str | os.PathLike[str], png_path: Path, title: str, unit: str = "nats per token"
) -> Path:
    """Draws the losses of a run by step; replaces `png_path` atomically, and returns it.

    Drawn are `train/loss` (smoothed, and pale as it is) and every other metric that ends in "loss";
    a learning rate that changes is in a panel below. Values that are not finite are gaps, a dotted
    line marks each resume, and the loss axis leaves out spikes that would flatten the rest. Raises
    what `read_metrics` does, and OSError.
    """
    from matplotlib.figure import Figure

    rows = read_metrics(metrics_jsonl)
    rates = _points(rows, RATE)
    has_rates = len({rate for _, rate in rates}) > 1
    figure = Figure(figsize=(9, 6.4 if has_rates else 5.2), dpi=130, layout="constrained")
    if has_rates:
        loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        _draw_rates(rate_axes, rates)
        all_axes = [loss_axes, rate_axes]
    else:
        loss_axes = figure.add_subplot()
        all_axes = [loss_axes]
    _draw_losses(loss_axes, loss_curves(rows))
    loss_axes.set(title=title, ylabel=f"loss ({unit})")
    all_axes[-1].set_xlabel("step")
    for axes in all_axes:
        _finish(axes, rows)
    return _save(figure, png_path)


def plot_objective(metrics_jsonl: str | os.PathLike[str], png_path: Path, title: str) -> Path | str:
    """Draws what an objective reports beside its loss, by step: accuracies, margins, rewards, divergences, lengths.

    A panel has the metrics of one kind, of training and of each validation set. Replaces `png_path` atomically, and
    returns it, or the words that there is nothing to draw. Raises what `read_metrics` does, and OSError.
    """
    from matplotlib.figure import Figure

    rows = read_metrics(metrics_jsonl)
    panels = objective_panels(rows)
    if not panels:
        return "nothing was reported of it"
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
    # The lowest panel of each column says what all of them are drawn over.
    for axes in grid[max(0, len(panels) - 2) : len(panels)]:
        axes.set_xlabel("step")
        axes.tick_params(labelbottom=True)
    return _save(figure, png_path)


def objective_panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Points]]:
    """Returns {kind: {metric: [(step, value)]}} of an objective's metrics, those of chosen and rejected in one kind."""
    training_names = dict.fromkeys(name for row in rows for name in row if name.startswith(_OBJECTIVE))
    panels: dict[str, dict[str, Points]] = {}
    for training_name in training_names:
        metric = training_name.removeprefix(_OBJECTIVE)
        # The loss without its other terms is in the picture of losses.
        if metric in ("preference", "sft", "nll"):
            continue
        kind = _SIDES.sub("", metric)
        evaluated = [name for row in rows for name in row if name.startswith("eval/") and name.endswith(f"/{metric}")]
        for name in dict.fromkeys([training_name, *evaluated]):
            panels.setdefault(kind, {})[name] = _points(rows, name)
    return panels


def _finish(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Marks resumes, and gives axes the look of all pictures."""
    for row in rows:
        if "resumed_from" in row:
            axes.axvline(row["step"], color="#888888", linestyle=":", linewidth=1.0, zorder=0)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, png_path: Path) -> Path:
    """Writes a picture; whoever looks at it while it is renewed sees a whole one."""
    temporary = png_path.with_name(png_path.name + ".tmp")
    try:
        figure.savefig(temporary, format="png")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, png_path)
    return png_path


def _draw_losses(axes: Any, curves: Mapping[str, Points]) -> None:
    """Draws each curve with its last value in the legend, and bounds the axis."""
    import numpy as np

    # The colors come again where there are more curves than colors.
    for color, (name, points) in zip(_COLORS * len(curves), curves.items(), strict=False):
        steps, losses = np.array(points).T
        if name == TRAIN and len(steps) > _MIN_SMOOTHED:
            axes.plot(steps, losses, color=color, alpha=0.35, linewidth=0.8)
            losses = smoothed(losses)
            name = f"{name}, smoothed"
        # Points of an evaluation may be few; markers on many would be a thick line.
        is_few = len(steps) < 40 and not name.startswith(TRAIN)
        # A single point has no line.
        marker = "o" if is_few or len(steps) == 1 else None
        label = f"{name}  {losses[-1]:.4f}"
        axes.plot(steps, losses, color=color, marker=marker, markersize=3.5, label=label)
    all_losses = [loss for points in curves.values() for _, loss in points]
    finite_losses = np.array([loss for loss in all_losses if np.isfinite(loss)])
    if finite_losses.size:
        low = np.min(finite_losses)
        # By a percentile, as a few spikes would move the highest loss.
        typical_high = np.percentile(finite_losses, 98)
        top = min(np.max(finite_losses), low + 2 * (typical_high - low))
        axes.set_ylim(low - 0.05, top + 0.05)
        axes.legend(frameon=False, fontsize=9)


def _draw_rates(axes: Any, rates: Points) -> None:
    """Draws the learning rate, from zero on."""
    axes.plot(*zip(*rates, strict=True), color=_RATE_COLOR, linewidth=1.2)
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0.0)
    # 2e-4 in place of 0.0002, once above the axis.
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)


def loss_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Returns [(step, value)], sorted by step, for each metric whose name ends in "loss".

    The metrics stand in the order of their first appearance.
    """
    names = [name for row in rows for name in row if name.endswith("loss")]
    # A dict instead of a set, as it keeps the order.
    return {name: _points(rows, name) for name in dict.fromkeys(names)}


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> Points:
    """Returns (step, value) of each row that has a metric, by step."""
    return sorted((row["step"], row[name]) for row in rows if name in row)


def smoothed(losses: Any) -> Any:
    """Smooths a curve: f64[n] -> f64[n].

    Each value becomes the mean of the finite values among 1/50 of the points around it. A value
    that is not finite becomes NaN, which is a gap in the plot.
    """
    import numpy as np

    window = np.ones(max(5, len(losses) // 50))
    finite = np.isfinite(losses)
    sums = np.convolve(np.where(finite, losses, 0.0), window, "same")
    counts = np.convolve(finite.astype(float), window, "same")
    return np.where(finite, sums / np.maximum(counts, 1.0), np.nan)
