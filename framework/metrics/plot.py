"""Draws loss curves as a PNG, from metrics.jsonl.

matplotlib is used without pyplot, whose global state and choice of a display have no place in a
training process.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.metrics.jsonl import read_metrics

TRAIN = "train/loss"
_COLORS = ("#30638e", "#d1495b", "#00798c", "#edae49", "#6a4c93", "#2e933c")


def plot_losses(
    metrics_jsonl: str | os.PathLike[str], png_path: Path, title: str, unit: str = "nats per token"
) -> Path:
    """Draws the losses of a run by step; replaces `png_path` atomically, and returns it.

    Drawn are `train/loss` (raw and smoothed) and every other metric that ends in "loss". Values
    that are not finite are gaps, a dotted line marks each resume, and the loss axis leaves out
    spikes that would flatten the rest. Raises what `read_metrics` does, and OSError.
    """
    import numpy as np
    from matplotlib.figure import Figure

    rows = read_metrics(metrics_jsonl)
    curves = loss_curves(rows)
    figure = Figure(figsize=(9, 5.2), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    # The colors come again where there are more curves than colors.
    for color, (name, points) in zip(_COLORS * len(curves), curves.items(), strict=False):
        steps, losses = np.array(points).T
        if name == TRAIN and len(steps) > 100:
            axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
            losses = smoothed(losses)
        # Points of an evaluation may be few; markers on many would be a thick line.
        marker = "o" if len(steps) < 40 else None
        label = f"{name}  {losses[-1]:.4f}"
        axes.plot(steps, losses, color=color, marker=marker, markersize=3.5, label=label)
    for row in rows:
        if "resumed_from" in row:
            axes.axvline(row["step"], color="#888888", linestyle=":", linewidth=1.0, zorder=0)
    all_losses = [loss for points in curves.values() for _, loss in points]
    finite_losses = np.array([loss for loss in all_losses if np.isfinite(loss)])
    if finite_losses.size:
        low = np.min(finite_losses)
        # By a percentile, as a few spikes would move the highest loss.
        typical_high = np.percentile(finite_losses, 98)
        top = min(np.max(finite_losses), low + 2 * (typical_high - low))
        axes.set_ylim(low - 0.05, top + 0.05)
        axes.legend(frameon=False, fontsize=9)
    axes.set(title=title, xlabel="step", ylabel=f"loss ({unit})")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    temporary = png_path.with_name(png_path.name + ".tmp")
    try:
        figure.savefig(temporary, format="png")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    # Whoever looks at the picture while it is renewed sees a whole one.
    os.replace(temporary, png_path)
    return png_path


def loss_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Returns [(step, value)], sorted by step, for each metric whose name ends in "loss".

    The metrics stand in the order of their first appearance.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name.endswith("loss"):
                curves.setdefault(name, []).append((row["step"], value))
    return {name: sorted(points) for name, points in curves.items()}


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
