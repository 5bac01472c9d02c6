"""The slider: points of batch size and sequence length, their figures as data in the page, and the controls.

The slider reaches only points that were planned, because the page computes nothing.
"""

import json
from collections.abc import Sequence

from plimsoll.extras.plan_page.batch_grid import GridPoint
from plimsoll.extras.plan_page.data_binding import Figures, bind_element

_LABELS = {"batch": "global batch", "sequence": "sequence length"}


def render_data(points: Sequence[GridPoint], figures: Sequence[Figures], asked: int) -> str:
    """Return the points as JSON in a script tag that browsers do not run.

    Figures that are the same at all points are left out.

    Args:
        points: points of the grid.
        figures: figures of each point.
        asked: index of the point that the page shows first.
    """
    shared = {key: text for key, text in figures[0].items() if all(other[key] == text for other in figures)}
    stored = {}
    for point, values in zip(points, figures, strict=True):
        stored[f"{point.batch},{_length(point)}"] = {key: text for key, text in values.items() if key not in shared}
    content = {
        "batch": sorted({point.batch for point in points}),
        "sequence": sorted({_length(point) for point in points}),
        "asked": {"batch": points[asked].batch, "sequence": _length(points[asked])},
        "points": stored,
    }
    # In JSON, "<" occurs only in strings. Escape it, so that no name of a config can close the script tag.
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="points">{text}</script>'


def render_controls(points: Sequence[GridPoint]) -> str:
    """Return the sliders, one for each quantity that varies. The script makes them visible."""
    values = {"batch": {point.batch for point in points}, "sequence": {_length(point) for point in points}}
    sliders = ""
    for name, choices in values.items():
        if len(choices) > 1:
            sliders += _render_slider(name, len(choices))
    compiled = sum(not point.report.estimated for point in points)
    estimated = len(points) - compiled
    counts = []
    if compiled:
        counts.append(f"{compiled} compiled")
    if estimated:
        counts.append(f"{estimated} estimated")
    about = f"<p class=soft>The sliders stop only at planned points: {' and '.join(counts)}.</p>"
    return f'<form class="controls" hidden>{sliders}<button type="button" class="back">reset</button>{about}</form>'


def render_basis(figures: Figures) -> str:
    """Return the line that names the source of the figures: compiled or estimated."""
    return bind_element("p", figures, {"text": "basis"}, attributes='class="basis soft" aria-live="polite"')


def describe_basis(point: GridPoint, asked: GridPoint) -> str:
    """Describe a point in words: its batch and sequence, and the source of its figures.

    Args:
        point: point to describe.
        asked: the requested point, whose estimate may have been compared with the compiled peak.
    """
    description = f"Batch {point.batch:,}"
    if point.sequence is not None:
        description += f", sequence {point.sequence:,}"
    if not point.report.estimated:
        return f"{description}: compiled by the target's own compiler."
    error = asked.report.estimate and asked.report.estimate.error
    accuracy = ""
    if not asked.report.estimated and error is not None:
        direction = "high" if error > 0 else "low"
        accuracy = f" At the compiled point, the estimate is {abs(error):.1%} too {direction}."
    return f"{description}: analytical estimate, not compiled.{accuracy}"


def _render_slider(name: str, count: int) -> str:
    attributes = f'type="range" name="{name}" min="0" max="{count - 1}" step="1" value="0"'
    label = f'<label>{_LABELS[name]} <output name="{name}-value"></output></label>'
    return f'<div class="slider">{label}<input {attributes} aria-label="{_LABELS[name]}"></div>'


def _length(point: GridPoint) -> int:
    """Return the sequence length of a point; 0 if its config has no sequences."""
    return point.sequence or 0
