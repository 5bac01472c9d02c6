"""One page that shows plans: a bar of what is live at each one's peak against the device's limit, and all tables.

One file, with its style (page.css) and SVG inline: no script, nothing to fetch; every text of a plan is escaped. Bars
have widths in per cent: they stretch, text keeps its size.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from framework.plan.report import KEYS, Report, comparison, sections
from framework.terminal.tables import Section, human_bytes

# Okabe and Ito 2008 (jfly.uni-koeln.de/color), which people tell apart with any kind of colour
# vision, and two greys.
_FILLS = ["#0072b2", "#4d4d4d", "#cc79a7", "#d55e00", "#009e73", "#e69f00", "#f0e442", "#56b4e9", "#b3b3b3"]
_EMPTY = "left empty by packing"
COLOURS = dict(zip(KEYS, _FILLS, strict=True)) | {_EMPTY: "transparent", "": "#7d8794"}
_CSS = Path(__file__).with_name("page.css").read_text()
_HEAD = f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Plan</title>
<link rel="icon" href="data:,"><meta name="viewport" content="width=device-width"><style>{_CSS}</style>"""


class _Bar(NamedTuple):
    """A bar of a picture.

    Attributes:
        label: text to the left.
        figure: HTML to the right.
        parts: bytes by group.
        limit: bytes of the device, or None where not known.
    """

    label: str
    figure: str
    parts: Mapping[str, float]
    limit: float | None


def page(plans: Sequence[Report]) -> str:
    """A complete HTML document about one report, or about several: what they do not share names their bars."""
    is_several = len(plans) > 1
    facts = [[plan["config"], f"on {plan['target']}", *plan["settings"]] for plan in plans]
    common = [text for text in facts[0] if all(text in plan_facts for plan_facts in facts)]
    names = []
    for plan_facts in facts:
        differing = " ".join(text for text in plan_facts if text not in common)
        names.append(differing or plan_facts[0])
    device_bars: list[_Bar] = []
    host_bars: list[_Bar] = []
    for name, plan in zip(names, plans, strict=True):
        device_bars.append(_device_bar(name, plan))
        if plan["host_process_bytes"]:
            host_bars.append(_host_bar(name, plan))
    phase_rows = _phase_rows(names, plans)
    pictures = {
        "On one device at the peak": _picture(device_bars),
        "On the host, in one process": _picture(host_bars) if host_bars else "",
        "Peak of each phase, on one device": _picture(phase_rows, "thin") if phase_rows else "",
        "Figures": _tables(names, plans),
    }
    result = f"{sum(plan['fits'] for plan in plans)} of {len(plans)} fit" if is_several else _verdict(plans[0])
    # Plans of one config and target have one title.
    titles = dict.fromkeys(" ".join(plan_facts[:2]) for plan_facts in facts)
    common_settings = " ".join(text for text in common if text not in facts[0][:2])
    body = f"<h1>{escape(', '.join(titles))}</h1><p>{result}"
    body += f"<p class=soft>{escape(common_settings)}"
    for title, content in pictures.items():
        if content:
            body += f"<section><h2>{title}</h2>{content}</section>"
    return f"{_HEAD}<body><main>{body}</main></body></html>\n"


def _device_bar(name: str, plan: Report) -> _Bar:
    need = plan["device_allocated_bytes"]
    parts = plan["breakdown"] | {_EMPTY: max(0, need - plan["device_peak_bytes"])}
    about = "≈ " if plan["estimated"] else ""
    figure = f"<b>{about}{human_bytes(need)}</b> <small>{_verdict(plan)}</small>"
    return _Bar(name, figure, parts, plan["device_limit_bytes"])


def _host_bar(name: str, plan: Report) -> _Bar:
    process_bytes = plan["host_process_bytes"]
    parts = {}
    for group, size in plan["host_breakdown"].items():
        # The breakdown is that of one device, of which a process has several.
        parts[group] = process_bytes * size / plan["host_peak_bytes"]
    return _Bar(name, f"<b>{human_bytes(process_bytes)}</b>", parts, plan["host_limit_bytes"])


def _phase_rows(names: Sequence[str], plans: Sequence[Report]) -> list[_Bar | str]:
    """A bar for each phase; with several plans, under a heading for each plan."""
    rows: list[_Bar | str] = []
    for name, plan in zip(names, plans, strict=True):
        if len(plans) > 1 and plan["phases"]:
            rows.append(f"<h3>{escape(name)}</h3>")
        for phase, sizes in plan["phases"].items():
            size = sizes["device_peak_bytes"]
            host_size = sizes["host_peak_bytes"]
            figure = human_bytes(size)
            if host_size:
                figure += f" <small>host {human_bytes(host_size)}</small>"
            rows.append(_Bar(phase, figure, {"": size}, plan["device_limit_bytes"]))
    return rows


def _tables(names: Sequence[str], plans: Sequence[Report]) -> str:
    """All tables of one plan; of several, a comparison, and the tables of each to be unfolded."""
    renamed = [plan | {"settings": [name]} for name, plan in zip(names, plans, strict=True)]
    comparison_table = _table(comparison(renamed))
    tables = comparison_table if len(plans) > 1 else ""
    for name, plan in zip(names, plans, strict=True):
        versions = Section("versions", list(plan["versions"].items()))
        plan_tables = "".join(map(_table, [*sections(plan), versions]))
        if len(plans) > 1:
            tables += f"<details><summary>{escape(name)}</summary>{plan_tables}</details>"
        else:
            tables += plan_tables
    return tables


def _verdict(plan: Report) -> str:
    limit = plan["device_limit_bytes"]
    need = plan["device_allocated_bytes"]
    if not plan["fits"]:
        excess = f", {human_bytes(need - limit)} over" if limit and need > limit else ""
        return f"<b class=bad>✗ does not fit{excess}</b>"
    if not limit:
        return "limit not known"
    return f"<b class=good>✓ fits, {human_bytes(limit - need)} free</b>"


def _table(section: Section) -> str:
    rows = ""
    for row in section.rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        rows += f"<tr>{cells}"
    kind = " numbers" if section.numbers else ""
    return f'<h3>{escape(section.title)}</h3><div class="scroll{kind}"><table>{rows}</table></div>'


def _picture(rows: Sequence[_Bar | str], kind: str = "") -> str:
    """Bars, and headings, on one scale. A bar may pass its limit; a limit far beyond all bars is named at the edge."""
    bars = [row for row in rows if isinstance(row, _Bar)]
    longest = max(sum(bar.parts.values()) for bar in bars)
    limits = {bar.limit for bar in bars if bar.limit}
    near_limits = [limit for limit in limits if limit <= 8 * longest]
    # The largest bar or limit leaves a margin of 5%.
    scale = 1.05 * max(longest, 1, *near_limits)
    drawing = _Drawing(kind, scale, _colours(bars))
    marks = [drawing.limit_mark(limit) for limit in limits]
    drawn_rows = []
    for row in rows:
        if isinstance(row, str):
            drawn_rows.append(row)
        else:
            drawn_rows.append(drawing.row(row.label, drawing.bar(row), row.figure, "bar"))
    legend = ""
    for group, colour in drawing.colours.items():
        if group and any(bar.parts.get(group, 0) >= 1 for bar in bars):
            legend += f'<span><i style="background: {colour}"></i>{group.replace("_", " ")}</span>'
    axis = drawing.row("", drawing.tick_labels())
    return f"{drawing.row('', marks)}{''.join(drawn_rows)}{axis}<div class=legend>{legend}</div>"


def _colours(bars: Sequence[_Bar]) -> dict[str, str]:
    """{group: colour}; groups that a report of somebody's own function has take the fills in turn."""
    own_groups = [group for group in dict.fromkeys(part for bar in bars for part in bar.parts) if group not in COLOURS]
    return COLOURS | dict(zip(own_groups, itertools.cycle(_FILLS), strict=False))


class _Drawing:
    """HTML and SVG of a picture's rows; `scale` is the number of bytes that the full width stands for."""

    def __init__(self, kind: str, scale: float, colours: Mapping[str, str]):
        self.colours = colours
        self._kind = kind
        self._scale = scale
        # Ticks are a power of two of bytes apart, at most six of them and zero.
        step = 2 ** max(0, math.ceil(math.log2(scale / 6)))
        self._ticks = range(0, int(scale) + 1, step)

    def row(
        self,
        label: str,
        shapes: Iterable[str],
        figure: str = "",
        role: str = "axis",
    ) -> str:
        track = f"<div class=track><svg>{''.join(shapes)}</svg></div><div class=figure>{figure}</div>"
        # Settings such as memory.remat=full may be broken behind the sign.
        breakable_label = escape(label).replace("=", "=<wbr>")
        return f'<div class="row {role} {self._kind}"><div>{breakable_label}</div>{track}</div>'

    def bar(self, bar: _Bar) -> Iterator[str]:
        limit = bar.limit or math.inf
        for tick in self._ticks:
            yield self._line("grid", tick)
        if limit <= self._scale:
            x = self._percentage(limit)
            width = f"{1 - limit / self._scale:.3%}"
            yield f'<rect class="beyond" x="{x}" width="{width}" height="100%"/>'
        start = 0.0
        for group, size in bar.parts.items():
            label = escape(group.replace("_", " ") or bar.label)
            yield from self._part(group, label, start, size)
            start += max(0, size)
        # The limit is drawn last, over the bar.
        if limit <= self._scale:
            yield self._line("limit", limit)

    def _part(
        self,
        group: str,
        label: str,
        start: float,
        size: float,
    ) -> Iterator[str]:
        """The rectangle of a group, with the group's name on it if there is room."""
        height = 12 if self._kind else 32
        position = f'x="{self._percentage(start)}" y="50%"'
        width = self._percentage(max(0, size))
        yield f'<rect {position} width="{width}" height="{height}" fill="{self.colours[group]}" '
        yield f'transform="translate(0 {-height / 2})"><title>{label}: {human_bytes(size)}</title></rect>'
        # A track is 600 pixels wide where text is shown, and a letter about 7.
        if group and 600 * size / self._scale > 12 + 7 * len(label):
            # Text on the two dark fills is white.
            ink = "#fff" if self.colours[group] in _FILLS[:2] else "#000"
            yield f'<text class="inside" {position} dx="6" dy="4" fill="{ink}">{label}</text>'

    def limit_mark(self, limit: float) -> str:
        arrow = " →" if limit > self._scale else ""
        return self._text("mark", limit, f"limit {human_bytes(limit)}{arrow}")

    def tick_labels(self) -> list[str]:
        return [self._text("tick", tick, human_bytes(tick).replace(".00", "")) for tick in self._ticks]

    def _percentage(self, size: float) -> str:
        return f"{size / self._scale:.3%}"

    def _line(self, kind: str, size: float) -> str:
        x = self._percentage(size)
        return f'<line class="{kind}" x1="{x}" x2="{x}" y2="100%"/>'

    def _text(
        self,
        kind: str,
        size: float,
        text: str,
    ) -> str:
        # The name of a limit in the right half is put to the left of it.
        anchor = "end" if size > self._scale / 2 else "start"
        if kind == "tick":
            anchor = "middle"
        x = f"{min(1, size / self._scale):.3%}"
        return f'<text class="{kind}" x="{x}" y="14" text-anchor="{anchor}">{text}</text>'
