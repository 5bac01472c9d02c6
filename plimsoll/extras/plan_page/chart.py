"""The memory chart, drawn as a ship in side view: the groups of a plan are segments in its hold.

The capacity line is a load line on the hull.
"""

from collections.abc import Sequence

from plimsoll.extras.plan_page.chart_figures import DECK, FLOOR, Segment, tick_keys
from plimsoll.extras.plan_page.data_binding import Figures, bind_element

_WIDTH = 960
_HEIGHT = 430
_HOLD_LEFT = 236
_HOLD_WIDTH = 440
_HOLD_RIGHT = _HOLD_LEFT + _HOLD_WIDTH
_MARK_X = 716
# From the stern along the deck to the bow, down the stem and back along the keel.
_HULL = (
    "M124 128 L706 128 Q764 126 812 98 C800 176 782 262 762 332 Q748 394 704 394 L190 394 Q158 394 152 344 "
    "C146 284 128 232 124 188 Z"
)
# The deckhouse, its windows, the funnel, and a mast with its stays.
_HOUSE = (
    '<path class="house" d="M142 128V80h16V54h50v26h14v48z"/>'
    '<path class="window" d="M164 63h38v9h-38zM150 90h12v10h-12zM170 90h12v10h-12zM190 90h12v10h-12z'
    'M150 109h12v10h-12zM170 109h12v10h-12zM190 109h12v10h-12z"/>'
    '<path class="funnel" d="M176 54l3-26h20l-3 26z"/><path class="band" d="M178.100 36h20l-1 8h-20z"/>'
    '<path class="rope" d="M772 116V38M772 44L812 98M772 44L694 128"/>'
)
_PUFFS = '<circle cx="176" cy="16" r="7"/><circle cx="162" cy="8" r="9"/><circle cx="143" cy="4" r="11"/>'
_SMOKE = f'<g class="smoke">{_PUFFS}</g>'
# One wave is 40 wide; repeat it beyond the width of the drawing.
_WAVES = f"M-40 0{'q10 -5 20 0t20 0' * 26}V460H-40Z"
_HOLD = (
    f'<rect class="hold" x="{_HOLD_LEFT}" y="{DECK - 4:.0f}" width="{_HOLD_WIDTH}" height="{FLOOR - DECK + 4:.0f}"/>'
)
# The frames of an empty hold, and the coaming of its hatch.
_FRAMES = "".join(f"M{_HOLD_LEFT + 55 * index} {DECK - 4:.0f}V{FLOOR:.0f}" for index in range(1, 8))
_COAMING = f'<path class="hull" d="M{_HOLD_LEFT - 9} 132V118h9v14zM{_HOLD_RIGHT} 132V118h9v14z"/>'
# The water in front of the ship leaves out the hold, whose colors must not change.
_BEFORE = f"M0 -40H{_WIDTH}V{_HEIGHT + 40}H0ZM{_HOLD_LEFT} -40H{_HOLD_RIGHT}V{FLOOR:.0f}H{_HOLD_LEFT}Z"
# Definitions that all charts of a page share.
DEFINITIONS = f"""<svg class="definitions" width="0" height="0" aria-hidden="true"><defs>
<clipPath id="hull"><path d="{_HULL}"/></clipPath>
<clipPath id="before"><path clip-rule="evenodd" d="{_BEFORE}"/></clipPath>
<pattern id="over" width="9" height="9" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<path class="hatch" d="M0 0V9"/></pattern>
<pattern id="empty" width="7" height="7" patternUnits="userSpaceOnUse">
<circle class="dot" cx="2" cy="2" r="1"/></pattern>
</defs></svg>"""


def draw_chart(figures: Figures, segments: Sequence[Segment]) -> str:
    """Return the chart of one plan. Its figures may follow the slider.

    Args:
        figures: positions and texts by key, as computed by `chart_figures.figures`.
        segments: segments to draw, from the bottom to the top.
    """
    title = bind_element("title", figures, {"text": "title"})
    description = bind_element("desc", figures, {"text": "description"})
    # SVG paints later shapes over earlier ones, so this list goes from back to front.
    shapes = [
        title,
        description,
        _SMOKE,
        _draw_sea(figures, "behind"),
        f'<path class="hull" d="{_HULL}"/>',
        f'<g clip-path="url(#hull)">{_draw_paint(figures)}</g>',
        _HOUSE,
        _COAMING,
        _HOLD,
        f'<path class="frames" d="{_FRAMES}"/>',
        *(_draw_segment(figures, segment) for segment in segments),
        _draw_excess(figures),
        _draw_scale(figures),
        f'<g clip-path="url(#before)">{_draw_sea(figures, "front")}</g>',
        *(_draw_segment_label(figures, segment) for segment in segments),
        _draw_capacity_line(figures),
        _draw_labels(figures),
    ]
    drawing = "".join(shapes)
    return bind_element(
        "svg",
        figures,
        {"class": "ship"},
        attributes=f'role="img" viewBox="0 -18 {_WIDTH} {_HEIGHT + 18}"',
        content=drawing,
    )


def _draw_sea(figures: Figures, kind: str) -> str:
    waves = f'<path d="{_WAVES}"/>'
    return bind_element("g", figures, {"transform": "sea"}, attributes=f'class="sea {kind}"', content=waves)


def _draw_paint(figures: Figures) -> str:
    """Return the red paint of the ship's bottom, up to the capacity line."""
    attributes = f'class="bottom" x="0" width="{_WIDTH}" height="{_HEIGHT}"'
    return bind_element("rect", figures, {"y": "paint"}, attributes=attributes)


def _draw_segment(figures: Figures, segment: Segment) -> str:
    title = bind_element("title", figures, {"text": f"{segment.key}.title"})
    fill = "url(#empty)" if segment.color == "transparent" else segment.color
    return bind_element(
        "rect",
        figures,
        {"y": f"{segment.key}.y", "height": f"{segment.key}.height"},
        attributes=f'class="segment" x="{_HOLD_LEFT}" width="{_HOLD_WIDTH}" fill="{fill}"',
        content=title,
    )


def _draw_segment_label(figures: Figures, segment: Segment) -> str:
    follow = {"y": f"{segment.key}.middle", "opacity": f"{segment.key}.visible"}
    # The segment that packing leaves empty has no color of its own.
    fill = "" if segment.color == "transparent" else f' fill="{segment.ink}"'
    size = f'class="inside" x="{_HOLD_RIGHT - 12}" text-anchor="end"{fill}'
    name = f'class="inside" x="{_HOLD_LEFT + 12}"{fill}'
    name_label = bind_element("text", figures, follow | {"text": f"{segment.key}.name"}, attributes=name)
    return name_label + bind_element("text", figures, follow | {"text": f"{segment.key}.size"}, attributes=size)


def _draw_excess(figures: Figures) -> str:
    """Return the hatched area above the capacity line."""
    attributes = f'class="excess" x="{_HOLD_LEFT}" width="{_HOLD_WIDTH}" fill="url(#over)"'
    return bind_element("rect", figures, {"y": "over.y", "height": "over.height"}, attributes=attributes)


def _draw_scale(figures: Figures) -> str:
    marks = ""
    for key in tick_keys():
        text = bind_element("text", figures, {"text": f"{key}.text"}, attributes='x="218" y="4" text-anchor="end"')
        follow = {"transform": f"{key}.place", "opacity": f"{key}.visible"}
        marks += bind_element("g", figures, follow, content=f'<path d="M222 0h14"/>{text}')
    return f'<g class="scale">{marks}</g>'


def _draw_capacity_line(figures: Figures) -> str:
    """Return the capacity line across the hold, with its mark: a circle with a bar through it."""
    circle = f'<circle cx="{_MARK_X}" cy="0" r="15"/><path d="M{_MARK_X - 26} 0h52"/>'
    mark = f'<g class="halo">{circle}</g><g class="mark">{circle}</g>'
    line = f'<path class="limit" d="M{_HOLD_LEFT} 0H{_WIDTH - 4}"/>{mark}'
    label = f'class="limit-label" x="{_WIDTH - 8}" text-anchor="end"'
    line += bind_element("text", figures, {"y": "limit.label", "text": "limit"}, attributes=label)
    return bind_element("g", figures, {"transform": "line", "opacity": "line.visible"}, content=line)


def _draw_labels(figures: Figures) -> str:
    need = bind_element("text", figures, {"y": "water.label", "text": "need"}, attributes='class="need" x="10"')
    attributes = f'class="over-label" x="{_WIDTH - 8}" text-anchor="end"'
    return need + bind_element("text", figures, {"y": "over.label", "text": "over"}, attributes=attributes)
