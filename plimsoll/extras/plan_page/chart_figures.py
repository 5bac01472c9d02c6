"""Figures of the memory chart: the positions of its segments, of the water and of the capacity line.

Heights are proportional to bytes. All segments are as wide as the hold, so their areas are proportional, too. The water
is as high as the segments, as for a box-shaped ship, so the mark is above the water as long as the plan fits.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plimsoll.extras.plan_page.colors import EMPTY, colors, ink
from plimsoll.extras.plan_page.tables import batch_line, need_text, verdict_kind, verdict_text
from plimsoll.framework.plan.plan_report import PlanReport
from plimsoll.framework.terminal.tables import human_bytes

# In units of the drawing, where y increases downward.
FLOOR = 372.0
DECK = 132.0
_CAPACITY_LINE = 172.0  # where the limit is drawn, unless the segments would pass the top of the picture
_TOP = 30.0
_LEAST_LABELLED = 17.0
_TICKS = 8


class Segment(NamedTuple):
    """A segment of the chart: one group of the breakdown. `key` is the prefix of its figures' keys."""

    key: str
    group: str
    label: str
    color: str
    ink: str


def list_segments(plans: Sequence[PlanReport]) -> list[Segment]:
    """Return a segment for each group that any of the plans has, from the bottom of the chart to the top."""
    groups = dict.fromkeys(group for plan in plans for group, size in bytes_by_group(plan).items() if size > 0)
    ordered = [group for plan in plans for group in bytes_by_group(plan) if group in groups]
    fills = colors(group for plan in plans for group in plan.breakdown)
    segments = []
    for index, group in enumerate(sorted(dict.fromkeys(ordered), key=lambda group: group == EMPTY)):
        segments.append(Segment(f"g{index}", group, group.replace("_", " "), fills[group], ink(fills[group])))
    return segments


def bytes_by_group(plan: PlanReport) -> Mapping[str, int]:
    """Return the bytes by group, including those that packing leaves empty."""
    gaps = plan.device_allocated_bytes - plan.device_peak_bytes
    return plan.breakdown | {EMPTY: max(0, gaps)}


def figures(plan: PlanReport, segments: Sequence[Segment]) -> dict[str, str]:
    """Return the figures of the chart and of the table next to it, by key.

    Args:
        plan: report to draw.
        segments: segments of the chart, from the bottom to the top; some may be empty in this plan.
    """
    need = plan.device_allocated_bytes
    limit = plan.device_limit_bytes
    sizes = bytes_by_group(plan)
    scale = _scale(sum(max(0, size) for size in sizes.values()), limit)
    values: dict[str, str] = {}
    y = FLOOR
    for segment in segments:
        size = max(0, sizes.get(segment.group, 0))
        height = size * scale
        y -= height
        values |= _segment_figures(segment, size, y, height)
        # As in the tables, shares are relative to the peak, so that all groups but the packing gaps add up to 100%.
        values[f"{segment.key}.share"] = f"{100 * size / max(plan.device_peak_bytes, 1):.1f}%"
    values |= _water_figures(y, limit, scale)
    values |= _scale_marks(scale)
    over = need - limit if limit and need > limit else 0
    values |= {
        "need": need_text(plan, of_limit=False),
        "need.of": f"{need_text(plan)} on each device",
        "batch": batch_line(plan),
        "limit": f"limit {human_bytes(limit)}" if limit else "",
        "over": f"{human_bytes(over)} over the limit" if over else "",
        "verdict": verdict_text(plan),
        "verdict.class": f"verdict {verdict_kind(plan)}",
        "title": f"Memory chart: {need_text(plan)}, {verdict_text(plan)}",
        "description": _description(plan, segments),
        # A plan can also exceed the limit in another phase: then its ship is afloat although the plan does not fit.
        "ship": "ship sunk" if over else "ship afloat",
    }
    return values


def _scale(num_bytes: float, limit: int | None) -> float:
    """Return the height of one byte, in units of the drawing."""
    to_line = (FLOOR - _CAPACITY_LINE) / max(limit or num_bytes, 1)
    to_top = (FLOOR - _TOP) / max(num_bytes, 1)
    return min(to_line, to_top)


def _segment_figures(segment: Segment, size: float, y: float, height: float) -> dict[str, str]:
    is_labelled = height >= _LEAST_LABELLED
    return {
        f"{segment.key}.y": f"{y:.2f}",
        f"{segment.key}.height": f"{height:.2f}",
        f"{segment.key}.middle": f"{y + height / 2 + 4.5:.2f}",
        f"{segment.key}.visible": "1" if is_labelled else "0",
        f"{segment.key}.name": segment.label,
        f"{segment.key}.size": human_bytes(size),
        f"{segment.key}.title": f"{segment.label}: {human_bytes(size)}",
    }


def _water_figures(water: float, limit: int | None, scale: float) -> dict[str, str]:
    line = FLOOR - (limit or 0) * scale
    over = max(0.0, line - water) if limit else 0.0
    return {
        "sea": f"translate(0 {water:.2f})",
        "water.label": f"{max(16.0, water - 8):.2f}",
        "line": f"translate(0 {line:.2f})",
        "line.visible": "1" if limit else "0",
        "paint": f"{line if limit else FLOOR:.2f}",
        "over.y": f"{water:.2f}",
        "over.height": f"{over:.2f}",
        # Put each label on its own side of the line.
        "over.label": f"{min(water + 18, line - 9):.2f}",
        "limit.label": "21" if over else "-9",
    }


def _scale_marks(scale: float) -> dict[str, str]:
    """Return the scale marks on the hull. Their distance is a power of two in bytes, with room for the numbers."""
    step = 2 ** max(0, math.ceil(math.log2(28 / scale)))
    values = {}
    for index in range(_TICKS):
        size = (index + 1) * step
        y = FLOOR - size * scale
        is_on_hull = y > DECK + 8
        values[f"tick{index}.place"] = f"translate(0 {max(y, DECK):.2f})"
        values[f"tick{index}.visible"] = "1" if is_on_hull else "0"
        values[f"tick{index}.text"] = human_bytes(size).replace(".00", "")
    return values


def tick_keys() -> list[str]:
    """Return the key prefixes of the scale marks' figures."""
    return [f"tick{index}" for index in range(_TICKS)]


def _description(plan: PlanReport, segments: Sequence[Segment]) -> str:
    sizes = bytes_by_group(plan)
    listed = [f"{segment.label} {human_bytes(sizes.get(segment.group, 0))}" for segment in segments]
    return f"From the bottom to the top: {', '.join(listed)}."
