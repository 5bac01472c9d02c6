"""The section on larger batches: a chart of tokens per second over tokens per step, and its table."""

import math
from collections.abc import Mapping
from html import escape

from plimsoll.extras.plan_page.tables import render_table
from plimsoll.framework.plan.throughput_curve import KNEE_SHARE, ThroughputCurve
from plimsoll.framework.terminal.tables import human_count

# In units of the drawing, where y increases downward.
_WIDTH = 720.0
_HEIGHT = 250.0
_LEFT = 56.0
_RIGHT = 48.0
_TOP = 30.0
_BOTTOM = 210.0


def render_section(curves: Mapping[str, ThroughputCurve]) -> str:
    """Return the content of the section: a chart and tables for each curve.

    Args:
        curves: {name of a curve: the curve}.
    """
    content = ""
    for name, curve in curves.items():
        heading = f"<h3>{escape(name)}</h3>" if name else ""
        content += heading + draw_curve(curve) + "".join(map(render_table, curve.sections()))
    return content


def draw_curve(curve: ThroughputCurve) -> str:
    """Return a chart of the rate over the items per step, on a logarithmic axis, with a line at the knee."""
    highest = max(point.rate for point in curve.points)
    first = curve.points[0].tokens_per_step
    doublings = max(1.0, math.log2(curve.points[-1].tokens_per_step / first))
    shapes = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>',
        f'<text class="tick" x="{_LEFT}" y="16">{escape(curve.item)}s per second, estimated</text>',
        f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">'
        f"{escape(curve.item)}s per step</text>",
    ]
    corners = []
    for point in curve.points:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log2(point.tokens_per_step / first) / doublings
        y = _BOTTOM - (_BOTTOM - _TOP) * point.rate / highest
        corners.append(f"{x:.1f},{y:.1f}")
        is_knee = point is curve.knee
        rate = human_count(point.rate)
        size = human_count(point.tokens_per_step)
        title = f"{size} {curve.item}s per step: {rate} {curve.item}s per second, {point.bound_text}"
        if is_knee:
            label = f"knee: {KNEE_SHARE:.0%} of the highest rate"
            anchor = "end" if x > _WIDTH / 2 else "start"
            offset = -6 if anchor == "end" else 6
            shapes.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{_BOTTOM}"/>')
            shapes.append(
                f'<text class="knee" x="{x + offset:.1f}" y="{_BOTTOM - 8}" text-anchor="{anchor}">{label}</text>'
            )
        shapes.append(
            f'<circle class="{"knee" if is_knee else "point"}" cx="{x:.1f}" cy="{y:.1f}" r="{6 if is_knee else 4}">'
            f"<title>{escape(title)}</title></circle>"
        )
        shapes.append(f'<text x="{x:.1f}" y="{y - 10:.1f}" text-anchor="middle">{rate}</text>')
        shapes.append(f'<text class="tick" x="{x:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{size}</text>')
    # The line is drawn first, below the points.
    line = f'<polyline points="{" ".join(corners)}"/>'
    label = f"{curve.item}s per second over {curve.item}s per step"
    return (
        f'<svg class="curve" role="img" aria-label="{escape(label)}" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}">'
        f"{line}{''.join(shapes)}</svg>"
    )
