"""The lanes of a step: when the cores, the links to other devices and the link to the host are busy."""

from collections.abc import Sequence
from html import escape

from plimsoll.extras.plan_page.colors import FILLS
from plimsoll.framework.plan.plan_report import TimeReport
from plimsoll.framework.terminal.tables import human_duration

# Names for readers, in the order of the drawing, and their colors.
_LANES = {
    "computation": ("computation", FILLS[0]),
    "collectives": ("between devices", FILLS[4]),
    "from host": ("host to device", FILLS[5]),
    "to host": ("device to host", FILLS[3]),
}
# In units of the drawing, where y increases downward.
_WIDTH = 720.0
_LEFT = 130.0
_HEIGHT = 34.0
_PITCH = 46.0


def render_section(time: TimeReport | None) -> str:
    """Return the content of the section; "" for a step that moves nothing to or from the host."""
    if time is None or not {"to host", "from host"} & time.lanes.keys():
        return ""
    note = (
        "Filled: busy. Transfers that run below computation are hidden; where nothing computes, the step waits. "
        "Asynchronous collectives are not drawn."
    )
    return f"{_draw_lanes(time)}<p class=soft>{note}</p>"


def _draw_lanes(time: TimeReport) -> str:
    shapes = ""
    names = [name for name in _LANES if name in time.lanes]
    for row, name in enumerate(names):
        shapes += _draw_lane(time.lanes[name], *_LANES[name], top=row * _PITCH)
    height = len(names) * _PITCH
    axis = (
        f'<text class="tick" x="{_LEFT}" y="{height + 12}">0</text>'
        f'<text class="tick" x="{_WIDTH}" y="{height + 12}" text-anchor="end">{human_duration(time.seconds)}</text>'
    )
    return (
        f'<svg class="curve" role="img" aria-label="What is busy during a step" '
        f'viewBox="0 0 {_WIDTH:g} {height + 18:g}">{shapes}{axis}</svg>'
    )


def _draw_lane(shares: Sequence[float], name: str, color: str, top: float) -> str:
    """Return an area whose height is the share of each interval during which the lane is busy."""
    bottom = top + _HEIGHT
    width = (_WIDTH - _LEFT) / len(shares)
    corners = f"M{_LEFT:g} {bottom:g}"
    for index, share in enumerate(shares):
        corners += f"V{bottom - share * _HEIGHT:.1f}H{_LEFT + (index + 1) * width:.1f}"
    busy = sum(shares) / len(shares)
    title = f"<title>{escape(name)}: busy {busy:.0%} of the step</title>"
    label = (
        f'<text x="0" y="{top + 15:g}">{escape(name)}</text><text class="tick" x="0" y="{top + 30:g}">{busy:.0%}</text>'
    )
    line = f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{bottom:g}" y2="{bottom:g}"/>'
    return f'{label}<path d="{corners}V{bottom:g}Z" fill="{color}">{title}</path>{line}'
