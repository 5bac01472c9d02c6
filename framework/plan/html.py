"""One page that shows plans: a bar of what is live at each one's peak against the device's limit, and all tables.

One file, with its style (page.css) and SVG inline: no script, nothing to fetch; every text of a plan is escaped. Bars
have widths in per cent: they stretch, text keeps its size.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from framework.plan.report import KEYS, Report, comparison, sections
from framework.terminal.tables import Section, human_bytes

# Okabe and Ito 2008 (jfly.uni-koeln.de/color), which people tell apart with any kind of colour vision, and two greys.
_FILLS = ["#0072b2", "#4d4d4d", "#cc79a7", "#d55e00", "#009e73", "#e69f00", "#f0e442", "#56b4e9", "#b3b3b3"]
_EMPTY = "left empty by packing"
COLOURS = dict(zip(KEYS, _FILLS, strict=True)) | {_EMPTY: "transparent", "": "#7d8794"}
_CSS = Path(__file__).with_name("page.css").read_text()
_HEAD = f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Plan</title>
<link rel="icon" href="data:,"><meta name="viewport" content="width=device-width"><style>{_CSS}</style>"""


class _Bar(NamedTuple):
    label: str
    figure: str  # HTML
    parts: Mapping[str, float]  # group -> bytes
    limit: float | None


def page(plans: Sequence[Report]) -> str:
    """A complete HTML document about one report, or about several: what they do not share names their bars."""
    given = [[plan["config"], f"on {plan['target']}", *plan["settings"]] for plan in plans]
    common, several = [text for text in given[0] if all(text in each for each in given)], len(plans) > 1
    names = [" ".join(text for text in each if text not in common) or each[0] for each in given]
    device, host, phases = [], [], []
    renamed = [plan | {"settings": [name]} for name, plan in zip(names, plans, strict=True)]
    tables = _table(comparison(renamed)) * several
    for name, plan in zip(names, plans, strict=True):
        limit, need = plan["device_limit_bytes"], plan["device_allocated_bytes"]
        parts = plan["breakdown"] | {_EMPTY: max(0, need - plan["device_peak_bytes"])}
        figure = f"<b>{'≈ ' * plan['estimated']}{human_bytes(need)}</b> <small>{_verdict(plan)}</small>"
        device.append(_Bar(name, figure, parts, limit))
        if size := plan["host_process_bytes"]:
            parts = {group: size * part / plan["host_peak_bytes"] for group, part in plan["host_breakdown"].items()}
            host.append(_Bar(name, f"<b>{human_bytes(size)}</b>", parts, plan["host_limit_bytes"]))
        phases += [f"<h3>{escape(name)}</h3>"] if several and plan["phases"] else []
        for phase, sizes in plan["phases"].items():
            size, aside = sizes["device_peak_bytes"], sizes["host_peak_bytes"]
            figure = human_bytes(size) + f" <small>host {human_bytes(aside)}</small>" * bool(aside)
            phases.append(_Bar(phase, figure, {"": size}, limit))
        found = "".join(map(_table, [*sections(plan), Section("versions", list(plan["versions"].items()))]))
        tables += f"<details><summary>{escape(name)}</summary>{found}</details>" if several else found
    pictures = {
        "On one device at the peak": _picture(device),
        "On the host, in one process": host and _picture(host),
        "Peak of each phase, on one device": phases and _picture(phases, "thin"),
        "Figures": tables,
    }
    result = f"{sum(plan['fits'] for plan in plans)} of {len(plans)} fit" if several else _verdict(plans[0])
    body = f"<h1>{escape(', '.join(dict.fromkeys(' '.join(each[:2]) for each in given)))}</h1><p>{result}"
    body += f"<p class=soft>{escape(' '.join(text for text in common if text not in given[0][:2]))}"
    body += "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in pictures.items() if content)
    return f"{_HEAD}<body><main>{body}</main></body></html>\n"


def _verdict(plan: Report) -> str:
    limit, need = plan["device_limit_bytes"], plan["device_allocated_bytes"]
    over = f", {human_bytes(need - limit)} over" if limit and need > limit else ""
    if not plan["fits"]:
        return f"<b class=bad>✗ does not fit{over}</b>"
    return f"<b class=good>✓ fits, {human_bytes(limit - need)} free</b>" if limit else "limit not known"


def _table(section: Section) -> str:
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) for row in section.rows)
    kind = " numbers" * section.numbers
    return f'<h3>{escape(section.title)}</h3><div class="scroll{kind}"><table>{rows}</table></div>'


def _picture(rows: Sequence[_Bar | str], kind: str = "") -> str:
    """Bars, and headings, on one scale. A bar may pass its limit; a limit far beyond all bars is named at the edge."""
    bars = [row for row in rows if isinstance(row, _Bar)]
    longest, limits = max(sum(bar.parts.values()) for bar in bars), {bar.limit for bar in bars if bar.limit}
    scale = 1.05 * max(longest, 1, *(limit for limit in limits if limit <= 8 * longest))
    ticks = range(0, int(scale) + 1, 2 ** max(0, math.ceil(math.log2(scale / 6))))

    def line(kind: str, size: float) -> str:
        return f'<line class="{kind}" x1="{size / scale:.3%}" x2="{size / scale:.3%}" y2="100%"/>'

    def drawing(bar: _Bar) -> Iterator[str]:
        start, height, limit = 0.0, 12 if kind else 32, bar.limit or math.inf
        yield from (line("grid", tick) for tick in ticks)
        if limit <= scale:
            yield f'<rect class="beyond" x="{limit / scale:.3%}" width="{1 - limit / scale:.3%}" height="100%"/>'
        for group, size in bar.parts.items():
            words, x = escape(group.replace("_", " ") or bar.label), f'x="{start / scale:.3%}" y="50%"'
            yield f'<rect {x} width="{max(0, size) / scale:.3%}" height="{height}" fill="{COLOURS[group]}" '
            yield f'transform="translate(0 {-height / 2})"><title>{words}: {human_bytes(size)}</title></rect>'
            if group and 600 * size / scale > 12 + 7 * len(words):  # a track is 600 pixels wide where text is shown
                ink = "#fff" if group in ("parameters", "frozen") else "#000"
                yield f'<text class="inside" {x} dx="6" dy="4" fill="{ink}">{words}</text>'
            start += max(0, size)
        if limit <= scale:
            yield line("limit", limit)

    def row(label: str, shapes: Iterable[str], figure: str = "", role: str = "axis") -> str:
        drawn = f"<div class=track><svg>{''.join(shapes)}</svg></div><div class=figure>{figure}</div>"
        return f'<div class="row {role} {kind}"><div>{escape(label).replace("=", "=<wbr>")}</div>{drawn}</div>'

    def text(kind: str, size: float, words: str) -> str:
        anchor = "middle" if kind == "tick" else "end" if size > scale / 2 else "start"
        return f'<text class="{kind}" x="{min(1, size / scale):.3%}" y="14" text-anchor="{anchor}">{words}</text>'

    marks = [text("mark", limit, f"limit {human_bytes(limit)}{' →' * (limit > scale)}") for limit in limits]
    labels = [text("tick", tick, human_bytes(tick).replace(".00", "")) for tick in ticks]
    drawn = [r if isinstance(r, str) else row(r.label, drawing(r), r.figure, "bar") for r in rows]
    used = [group for group in COLOURS if group and any(bar.parts.get(group, 0) >= 1 for bar in bars)]
    legend = (f'<span><i style="background: {COLOURS[g]}"></i>{g.replace("_", " ")}</span>' for g in used)
    return f"{row('', marks)}{''.join(drawn)}{row('', labels)}<div class=legend>{''.join(legend)}</div>"
