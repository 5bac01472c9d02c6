"""Bar charts of bytes against a limit: for the devices of several plans, for hosts, and for phases.

Bars have widths in percent, so that they stretch while text keeps its size.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from plimsoll.extras.plan_page.colors import EMPTY, colors, ink
from plimsoll.extras.plan_page.tables import breakable, verdict
from plimsoll.framework.plan.plan_report import PlanReport
from plimsoll.framework.terminal.tables import human_bytes


class _Bar(NamedTuple):
    """A bar of a chart.

    Attributes:
        label: text to the left of the bar.
        figure: HTML to the right of the bar.
        parts: bytes by group.
        limit: memory of the device or host, in bytes; None if unknown.
    """

    label: str
    figure: str
    parts: Mapping[str, float]
    limit: float | None


def draw_device_bars(names: Sequence[str], plans: Sequence[PlanReport]) -> str:
    """Return a bar for each plan: the arrays that are alive on one device at its peak.

    Args:
        names: names of the plans.
        plans: reports, one for each name.
    """
    return _draw_chart([_device_bar(name, plan) for name, plan in zip(names, plans, strict=True)])


def draw_host_bars(names: Sequence[str], plans: Sequence[PlanReport]) -> str:
    """Return a bar for each plan: the host memory of one process; "" if no plan uses any.

    Args:
        names: names of the plans.
        plans: reports, one for each name.
    """
    bars = [_host_bar(name, plan) for name, plan in zip(names, plans, strict=True) if plan.host_process_bytes]
    return _draw_chart(bars) if bars else ""


def draw_phase_bars(names: Sequence[str], plans: Sequence[PlanReport]) -> str:
    """Return a bar for each phase, with a heading for each of several plans; "" if there are no phases.

    Args:
        names: names of the plans.
        plans: reports, one for each name.
    """
    rows: list[_Bar | str] = []
    for name, plan in zip(names, plans, strict=True):
        if len(plans) > 1 and plan.phases:
            rows.append(f"<h3>{escape(name)}</h3>")
        for phase, sizes in plan.phases.items():
            size = sizes.device_peak_bytes
            host_size = sizes.host_peak_bytes
            figure = human_bytes(size)
            if host_size:
                figure += f" <small>host {human_bytes(host_size)}</small>"
            rows.append(_Bar(phase, figure, {"": size}, plan.device_limit_bytes))
    return _draw_chart(rows, "thin") if rows else ""


def _device_bar(name: str, plan: PlanReport) -> _Bar:
    need = plan.device_allocated_bytes
    parts = plan.breakdown | {EMPTY: max(0, need - plan.device_peak_bytes)}
    about = "≈ " if plan.estimated else ""
    figure = f"<b>{about}{human_bytes(need)}</b> <small>{verdict(plan)}</small>"
    return _Bar(name, figure, parts, plan.device_limit_bytes)


def _host_bar(name: str, plan: PlanReport) -> _Bar:
    process_bytes = plan.host_process_bytes
    parts = {}
    for group, size in plan.host_breakdown.items():
        # The breakdown covers one device, but a process has several. Scale it to the process.
        parts[group] = process_bytes * size / plan.host_peak_bytes
    return _Bar(name, f"<b>{human_bytes(process_bytes)}</b>", parts, plan.host_limit_bytes)


def _draw_chart(rows: Sequence[_Bar | str], kind: str = "") -> str:
    """Return bars and headings on a common scale.

    A bar may exceed its limit. A limit far beyond all bars is only named, at the edge.
    """
    bars = [row for row in rows if isinstance(row, _Bar)]
    longest = max(sum(bar.parts.values()) for bar in bars)
    limits = {bar.limit for bar in bars if bar.limit}
    near_limits = [limit for limit in limits if limit <= 8 * longest]
    # Leave a margin of 5% to the right of the largest bar or limit.
    scale = 1.05 * max(longest, 1, *near_limits)
    drawing = _ChartDrawing(kind, scale, colors(part for bar in bars for part in bar.parts))
    marks = [drawing.draw_limit_mark(limit) for limit in _select_labeled_limits(limits, scale)]
    drawn_rows = []
    for row in rows:
        if isinstance(row, str):
            drawn_rows.append(row)
        else:
            drawn_rows.append(drawing.draw_row(row.label, drawing.draw_bar(row), row.figure, "bar"))
    legend = ""
    for group, color in drawing.colors.items():
        if group and any(bar.parts.get(group, 0) >= 1 for bar in bars):
            legend += f'<span><i style="background: {color}"></i>{escape(group.replace("_", " "))}</span>'
    axis = drawing.draw_row("", drawing.draw_tick_labels())
    return f"{drawing.draw_row('', marks)}{''.join(drawn_rows)}{axis}<div class=legend>{legend}</div>"


def _select_labeled_limits(limits: Iterable[float], scale: float) -> list[float]:
    """Return the limits that have room for a label. The lines of the others are still drawn."""
    named: list[float] = []
    for limit in sorted(limits, reverse=True):
        # Labels on both sides of the middle extend away from each other.
        if all(abs(limit - other) > 0.3 * scale for other in named):
            named.append(limit)
    return named


class _ChartDrawing:
    """HTML and SVG of a chart's rows; `scale` is the number of bytes that the full width represents."""

    def __init__(self, kind: str, scale: float, colors: Mapping[str, str]):
        self.colors = colors
        self._kind = kind
        self._scale = scale
        # The distance of ticks is a power of two in bytes; there are at most six of them, plus zero.
        step = 2 ** max(0, math.ceil(math.log2(scale / 6)))
        self._ticks = range(0, int(scale) + 1, step)

    def draw_row(self, label: str, shapes: Iterable[str], figure: str = "", role: str = "axis") -> str:
        track = f"<div class=track><svg>{''.join(shapes)}</svg></div><div class=figure>{figure}</div>"
        return f'<div class="row {role} {self._kind}"><div>{breakable(label)}</div>{track}</div>'

    def draw_bar(self, bar: _Bar) -> Iterator[str]:
        limit = bar.limit or math.inf
        for tick in self._ticks:
            yield self._draw_line("grid", tick)
        if limit <= self._scale:
            x = self._percentage(limit)
            width = f"{1 - limit / self._scale:.3%}"
            yield f'<rect class="beyond" x="{x}" width="{width}" height="100%"/>'
        start = 0.0
        for group, size in bar.parts.items():
            label = escape(group.replace("_", " ") or bar.label)
            yield from self._draw_part(group, label, start, size)
            start += max(0, size)
        # The limit is drawn last, over the bar.
        if limit <= self._scale:
            yield self._draw_line("limit", limit)

    def _draw_part(self, group: str, label: str, start: float, size: float) -> Iterator[str]:
        """Yield the rectangle of a group, with the group's name on it if there is room."""
        height = 12 if self._kind else 32
        position = f'x="{self._percentage(start)}" y="50%"'
        width = self._percentage(max(0, size))
        yield f'<rect {position} width="{width}" height="{height}" fill="{self.colors[group]}" '
        yield f'transform="translate(0 {-height / 2})"><title>{label}: {human_bytes(size)}</title></rect>'
        # A track is 600 pixels wide where text is shown, and a letter is about 7 pixels wide.
        if group and 600 * size / self._scale > 12 + 7 * len(label):
            fill = ink(self.colors[group])
            yield f'<text class="inside" {position} dx="6" dy="4" fill="{fill}">{label}</text>'

    def draw_limit_mark(self, limit: float) -> str:
        arrow = " →" if limit > self._scale else ""
        return self._draw_text("mark", limit, f"limit {human_bytes(limit)}{arrow}")

    def draw_tick_labels(self) -> list[str]:
        return [self._draw_text("tick", tick, human_bytes(tick).replace(".00", "")) for tick in self._ticks]

    def _percentage(self, size: float) -> str:
        return f"{size / self._scale:.3%}"

    def _draw_line(self, kind: str, size: float) -> str:
        x = self._percentage(size)
        return f'<line class="{kind}" x1="{x}" x2="{x}" y2="100%"/>'

    def _draw_text(self, kind: str, size: float, text: str) -> str:
        # In the right half, put the label to the left of the limit.
        anchor = "end" if size > self._scale / 2 else "start"
        if kind == "tick":
            anchor = "middle"
        x = f"{min(1, size / self._scale):.3%}"
        return f'<text class="{kind}" x="{x}" y="14" text-anchor="{anchor}">{text}</text>'
