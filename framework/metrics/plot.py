"""Loss curves as a PNG, drawn from metrics.jsonl.

matplotlib is used without pyplot, whose global state and choice of a display have no place in a training process.
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
    """Draws `train/loss` (raw and smoothed) and every other metric that ends in "loss", by step; replaces `png_path`
    atomically, and returns it.

    Values that are not finite are gaps, a dotted line marks each resume, and the loss axis leaves out spikes that would
    flatten the rest. Errors are those of `read_metrics`.
    """
    import numpy as np
    from matplotlib.figure import Figure

    rows = read_metrics(metrics_jsonl)
    curves = loss_curves(rows)
    figure = Figure(figsize=(9, 5.2), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    for color, (name, points) in zip(_COLORS * len(curves), curves.items(), strict=False):
        steps, losses = np.array(points).T
        if name == TRAIN and len(steps) > 100:
            axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
            losses = smoothed(losses)
        marker = "o" if len(steps) < 40 else None
        axes.plot(steps, losses, color=color, marker=marker, markersize=3.5, label=f"{name}  {losses[-1]:.4f}")
    for row in rows:
        if "resumed_from" in row:
            axes.axvline(row["step"], color="#888888", linestyle=":", linewidth=1.0, zorder=0)
    finite = np.array([loss for points in curves.values() for _, loss in points if np.isfinite(loss)])
    if finite.size:
        low, typical = np.min(finite), np.percentile(finite, 98)
        axes.set_ylim(low - 0.05, min(np.max(finite), low + 2 * (typical - low)) + 0.05)
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
    os.replace(temporary, png_path)  # whoever looks at the picture while it is renewed sees a whole one
    return png_path


def loss_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by step for each metric whose name ends in "loss", by first appearance."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name.endswith("loss"):
                curves.setdefault(name, []).append((row["step"], value))
    return {name: sorted(points) for name, points in curves.items()}


def smoothed(losses: Any) -> Any:
    """f64[n] -> f64[n]: the mean of the values that are finite among 1/50 of the points, around each."""
    import numpy as np

    window = np.ones(max(5, len(losses) // 50))
    finite = np.isfinite(losses)
    sums = np.convolve(np.where(finite, losses, 0.0), window, "same")
    counts = np.convolve(finite.astype(float), window, "same")
    return np.where(finite, sums / np.maximum(counts, 1.0), np.nan)
