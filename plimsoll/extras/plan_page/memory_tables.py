"""Memory tables of a plan: its groups with the settings that change them, its largest buffers, and fitting settings."""

from collections.abc import Sequence
from html import escape

from plimsoll.extras.plan_page.chart_figures import Segment, bytes_by_group
from plimsoll.extras.plan_page.colors import COLORS
from plimsoll.extras.plan_page.data_binding import Figures, bind_element
from plimsoll.extras.plan_page.memory_levers import Lever
from plimsoll.extras.plan_page.tables import breakable
from plimsoll.framework.plan.plan_report import LargestBuffer, PlanReport
from plimsoll.framework.plan.report_tables import needs_text
from plimsoll.framework.terminal.tables import human_bytes

_MOST_GROUPS = 20
_MOST_LEVERS = 4
_MOST_BUFFERS = 12
_MOST_CUT = 160


def render_groups(figures: Figures, plan: PlanReport, segments: Sequence[Segment], levers: Sequence[Lever]) -> str:
    """Return the table of the groups, from the top of the chart to the bottom.

    Args:
        figures: figures of the point that is shown first.
        plan: report of that point.
        segments: segments of the chart, one for each group.
        levers: settings that change the groups; without any, the table has no column for them.
    """
    is_measured = any(lever.peak_bytes is not None for lever in levers)
    legend = " (→: estimate)" if is_measured else ""
    heading = "<th>group<th>bytes<th>share<th>" + (f"<th>settings that change it{legend}" if levers else "")
    shown = _select_largest(plan, segments)
    rows = ""
    for segment in reversed(shown):
        moves = f"<td>{_render_levers(plan, segment, levers)}" if levers else ""
        rows += _group_row(figures, segment) + moves
    if len(shown) < len(segments):
        left_out = [segment for segment in segments if segment not in shown]
        size = sum(bytes_by_group(plan)[segment.group] for segment in left_out)
        rows += f"<tr><td>{len(left_out)} smaller groups<td class=number>{human_bytes(size)}<td><td>"
    kind = " wide" if levers else ""
    return f'<div class="scroll"><table class="group-table{kind}"><tr>{heading}{rows}</table></div>'


def _group_row(figures: Figures, segment: Segment) -> str:
    """Return the cells of a group: name, bytes, share, and a bar of the share."""
    name = f'<td><i style="background: {segment.color}"></i>{escape(segment.label)}</td>'
    size = bind_element("td", figures, {"text": f"{segment.key}.size"}, attributes='class="number"')
    share = bind_element("td", figures, {"text": f"{segment.key}.share"}, attributes='class="number"')
    attributes = f'height="100%" fill="{segment.color}"'
    bar = bind_element("rect", figures, {"width": f"{segment.key}.share"}, attributes=attributes)
    return f"<tr>{name}{size}{share}<td><svg class=mini>{bar}</svg>"


def _select_largest(plan: PlanReport, segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments to list. A user's function may have hundreds of arguments, each of them its own group."""
    sizes = bytes_by_group(plan)
    by_size = sorted(segments, key=lambda segment: sizes.get(segment.group, 0), reverse=True)
    return [segment for segment in segments if segment in by_size[:_MOST_GROUPS]]


def render_suggestions(plan: PlanReport) -> str:
    """Return the list of settings that would fit, if the plan does not; "" if there are none."""
    items = ""
    for suggestion in plan.suggestions:
        items += f"<li><code>{breakable(suggestion.setting)}</code> <small>{escape(needs_text(suggestion))}</small>"
    return f"<h3>settings that would fit</h3><ul>{items}</ul>" if items else ""


def render_buffers(plan: PlanReport, segments: Sequence[Segment]) -> str:
    """Return the table of the largest buffers, each with a bar relative to the peak; "" if none are known.

    Args:
        plan: report with the buffers.
        segments: segments of the chart, whose colors the bars use.
    """
    color_by_group = COLORS | {segment.group: segment.color for segment in segments}
    peak = max(plan.device_peak_bytes, 1)
    rows = ""
    for buffer in plan.largest[:_MOST_BUFFERS]:
        rows += _buffer_row(buffer, color_by_group.get(buffer.group, COLORS[""]), buffer.bytes / peak)
    if not rows:
        return ""
    return f'<h3>largest buffers</h3><div class="scroll"><table class="buffers">{rows}</table></div>'


def _buffer_row(buffer: LargestBuffer, color: str, share: float) -> str:
    repeats = f" x {buffer.count}" if buffer.count > 1 else ""
    bar = f'<svg class="mini"><rect width="{min(1, share):.2%}" height="100%" fill="{color}"/></svg>'
    # Names are paths without spaces, so let lines break at the slashes.
    name = escape(_truncate(buffer.name)).replace("/", "/<wbr>")
    shape = escape(_truncate(buffer.shape) + repeats)
    return f"<tr><td>{name}<td class=shape>{shape}<td class=number>{human_bytes(buffer.bytes)}<td>{bar}"


def _render_levers(plan: PlanReport, segment: Segment, levers: Sequence[Lever]) -> str:
    """Return the settings that change a group, and by how much, if that was estimated."""
    texts = []
    for lever in [lever for lever in levers if lever.group == segment.group][:_MOST_LEVERS]:
        effect = escape(lever.effect)
        if lever.peak_bytes is not None and lever.group_bytes is not None:
            effect += f" <small>{_format_change(plan, lever)}</small>"
        texts.append(f"<div><code>{breakable(lever.text)}</code> {effect}</div>")
    return "".join(texts)


def _format_change(plan: PlanReport, lever: Lever) -> str:
    """Return the effect of a lever on its group and on the peak. Both figures are analytical estimates."""
    present = plan.estimate
    assert present is not None
    group_bytes = present.breakdown[lever.group]
    change = f"{human_bytes(group_bytes)} → {human_bytes(lever.group_bytes)}"
    difference = (lever.peak_bytes or 0) - present.device_peak_bytes
    direction = "less" if difference < 0 else "more"
    return f"{change}; peak {human_bytes(abs(difference))} {direction}"


def _truncate(text: str) -> str:
    return text if len(text) <= _MOST_CUT else f"{text[: _MOST_CUT - 1]}…"
