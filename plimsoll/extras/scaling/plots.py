"""Pictures of models of several sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from plimsoll.extras.scaling.coordinates import Coordinate, group_by_activation


def plot_coordinates(coordinates: Mapping[str, Sequence[Coordinate]], path: Path) -> Path:
    """Plot the change of each activation after the last update against the width; returns the path.

    Args:
        coordinates: the coordinates of each parametrization, by name.
        path: PNG file to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(coordinates), 4), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(coordinates), sharey=True, squeeze=False)[0]
    last = max(one.step for measured in coordinates.values() for one in measured)
    for axes, (name, measured) in zip(panels, coordinates.items(), strict=True):
        for activation, sizes in group_by_activation(measured, last).items():
            axes.plot([one.width for one in sizes], [one.size for one in sizes], marker="o", label=activation)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(name)
        axes.set_xlabel("width")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"mean change of elements after {last} steps")
    panels[0].legend(fontsize="small")
    figure.savefig(path)
    return path
