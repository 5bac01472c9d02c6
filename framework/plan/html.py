"""One page that shows plans: a bar of what is live at each one's peak against the device's limit, and all figures.

Imports the standard library and the units of the tables. The page is one file: inline CSS and SVG, no script, nothing to
fetch; every text of a plan is escaped. Bars have widths in per cent, so that they stretch while text keeps its size.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from framework.metrics.tables import human_bytes, human_count

Plan = Mapping[str, Any]
# Okabe and Ito 2008 (jfly.uni-koeln.de/color), which people tell apart with any kind of colour vision, and two greys.
_GROUPS = "parameters frozen buffers gradients optimizer_state ema batch activations other".split()
_FILLS = "#0072b2 #4d4d4d #cc79a7 #d55e00 #009e73 #e69f00 #f0e442 #56b4e9 #b3b3b3".split()
EMPTY = "left empty by packing"
COLOURS = dict(zip(_GROUPS, _FILLS, strict=True)) | {EMPTY: "transparent", "": "#7d8794"}
_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Plan</title><link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width"><style>
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1b1f24; --soft: #5a6370; --line: #dde1e6;
  --good: #0a6b4a; --bad: #b42318 } @media (prefers-color-scheme: dark) { :root { --page: #0e1116; --card: #181c23;
  --ink: #e8ebef; --soft: #a0a9b5; --line: #333a45; --good: #4cc38a; --bad: #ff8f80 } } * { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, "DejaVu Sans", sans-serif }
main { max-width: 1120px; margin: auto; padding: 20px 16px; overflow-wrap: anywhere } h1, h2, p, pre { margin: 0 }
h2 { font-size: 17px } h3 { font-size: 14px; margin: 12px 0 2px } .soft, small { color: var(--soft); font-size: 13px }
.good { color: var(--good) } .bad { color: var(--bad) } section { background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 14px 16px; margin-top: 14px } pre { white-space: pre-wrap; font-size: 13px }
.row { display: grid; align-items: center; grid-template-columns: 200px 1fr 215px; gap: 0 16px } .track { min-height: 54px;
  position: relative; align-self: stretch } .thin .track { min-height: 24px } .figure * { display: inline-block }
svg { position: absolute; width: 100%; height: 100%; overflow: visible } text { font-size: 12px } .axis { fill: var(--soft) }
.mark { fill: var(--bad); font-weight: 600 } .grid { stroke: var(--line) } .limit { stroke: var(--bad); stroke-width: 2;
  stroke-dasharray: 5 3 } .beyond { fill: var(--bad); opacity: .1 } [fill=transparent] { stroke: var(--soft) }
i { border: 1px solid var(--soft); padding: 0 5px; margin-right: 6px } .legend span { margin-right: 16px; font-size: 13px;
  display: inline-block } .scroll { overflow: auto; overflow-wrap: normal; font-size: 14px } td { vertical-align: top;
  padding: 3px 20px 3px 0; border-bottom: 1px solid var(--line) } table { border-collapse: collapse }
@media (max-width: 800px) { .inside { display: none } .row { display: block } .row.thin { display: grid;
  grid-template-columns: 1fr auto } .thin .track { grid-row: 2; grid-column: 1 / 3 } .track { min-height: 40px } }
</style></head>"""


class _Bar(NamedTuple):
    label: str
    figure: str  # HTML
    parts: Mapping[str, float]  # group -> bytes
    limit: float | None


def page(plans: Sequence[Plan]) -> str:
    """A complete HTML document about one plan, or several that are compared: what they do not share names their bars.

    Args:
      plans: reports as `framework/plan/report.py` makes them, at least one; what is absent or None is left out.
    """
    given = [[str(plan.get("config")), f"on {plan.get('target')}", *(plan.get("settings") or [])] for plan in plans]
    common, several = [text for text in given[0] if all(text in each for each in given)], len(plans) > 1
    default = "as configured" if several else given[0][0]
    names = [" ".join(text for text in each if text not in common) or default for each in given]
    device, host, phases, notes, largest, figures = [], [], [], "", "", {"": names}
    for index, (name, plan) in enumerate(zip(names, plans, strict=True)):
        title, limit, peak = f"<h3>{escape(name)}</h3>" * several, plan.get("device_limit_bytes"), _peak(plan)
        parts = dict(plan.get("breakdown") or {"": peak})
        parts[EMPTY] = max(0, (plan.get("device_allocated_bytes") or 0) - sum(parts.values()))
        device.append(_Bar(name, f"<b>{human_bytes(peak)}</b> <small>{_verdict(plan)}</small>", parts, limit))
        if size := plan.get("host_process_bytes"):
            local = plan["devices"] / plan["processes"]
            parts = {group: local * part for group, part in (plan.get("host_breakdown") or {}).items()}
            parts["other"] = parts.get("other", 0) + max(0, size - sum(parts.values()))
            host.append(_Bar(name, f"<b>{human_bytes(size)}</b>", parts, plan.get("host_limit_bytes")))
        phases += [title] if plan.get("phases") else []
        for phase, sizes in (plan.get("phases") or {}).items():
            aside = (
                f" <small>host {human_bytes(sizes['host_peak_bytes'])}</small>" if sizes.get("host_peak_bytes") else ""
            )
            phases.append(_Bar(phase, human_bytes(_peak(sizes)) + aside, {"": _peak(sizes)}, limit))
        notes += title + found if (found := _notes(plan)) else ""
        rows = [(b["name"], b["group"], b["shape"], human_bytes(b["bytes"])) for b in plan.get("largest") or []]
        largest += title + _table(rows) if rows else ""
        for key, figure in _figures(plan):
            figures.setdefault(key, ["-"] * len(plans))[index] = figure
    sections = {
        "On one device at the peak": _picture(device),
        "On the host, in one process": _picture(host),
        "Peak of each phase, on one device": _picture(phases, "thin"),
        "Notes": notes,
        "Figures": _table([(key, *row) for key, row in figures.items()]),
        "Largest buffers at the peak": largest,
    }
    body = f"<h1>{escape(', '.join(dict.fromkeys(' '.join(each[:2]) for each in given)))}</h1>"
    body += (
        f"<p>{sum(bool(p.get('fits')) for p in plans)} of {len(plans)} fit" if several else f"<p>{_verdict(plans[0])}"
    )
    machines = [f"{p.get('devices')} devices ({p.get('accelerator')}), {p.get('processes')} processes" for p in plans]
    settings = " ".join(text for text in common if text not in given[0][:2])
    body += "".join(f"<p class=soft>{escape(line)}" for line in [*dict.fromkeys(machines), settings])
    body += "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections.items() if content)
    return f"{_HEAD}<body><main>{body}</main></body></html>\n"


def _peak(sizes: Plan) -> float:
    return sizes.get("device_peak_bytes") or 0


def _verdict(plan: Plan) -> str:
    limit, by = plan.get("device_limit_bytes") or 0, " by the estimate" if plan.get("estimated") else ""
    room = limit - _peak(plan)
    if plan.get("fits") is False:
        return f"<b class=bad>✗ does not fit{by}{f', {human_bytes(-room)} over' if room < 0 < limit else ''}</b>"
    return (
        f"<b class=good>✓ fits{by}, {human_bytes(room)} free</b>"
        if limit
        else f"limit not known{by and ', an estimate'}"
    )


def _picture(rows: Sequence[_Bar | str], kind: str = "") -> str:
    """Bars on one scale, each against its limit, which it may pass; a limit far beyond all bars is named at the edge."""
    bars = [row for row in rows if isinstance(row, _Bar)]
    if not bars:
        return ""
    longest, limits = max(sum(bar.parts.values()) for bar in bars), {bar.limit for bar in bars if bar.limit}
    scale = 1.05 * max(longest, 1, *(limit for limit in limits if limit <= 8 * longest))
    unit = 1024 ** int(math.log(scale, 1024))
    step = next(unit * step for step in (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if 5 * unit * step >= scale)
    ticks = [step * index for index in range(1 + int(scale / step))]

    def text(kind: str, size: float, words: str) -> str:
        anchor = (
            "end" if size > scale * (0.5 if kind == "mark" else 0.95) else "middle" if size > scale / 8 else "start"
        )
        return f'<text class="{kind}" x="{min(1, size / scale):.3%}" y="14" text-anchor="{anchor}">{words}</text>'

    def line(kind: str, size: float) -> str:
        return f'<line class="{kind}" x1="{size / scale:.3%}" x2="{size / scale:.3%}" y2="100%"/>'

    def drawing(bar: _Bar) -> Iterator[str]:
        inside = bar.limit and bar.limit <= scale
        yield from (line("grid", tick) for tick in ticks)
        if inside:
            yield f'<rect class="beyond" x="{bar.limit / scale:.3%}" width="{1 - bar.limit / scale:.3%}" height="100%"/>'
        start, height = 0.0, 12 if kind else 32
        for group, size in bar.parts.items():
            words, x = escape(group.replace("_", " ") or bar.label), f'x="{start / scale:.3%}" y="50%"'
            yield f'<rect {x} width="{size / scale:.3%}" height="{height}" transform="translate(0 {-height / 2})" '
            yield f'fill="{COLOURS.get(group, COLOURS["other"])}" data-bytes="{size:.0f}"><title>{words}: {human_bytes(size)}</title></rect>'
            if group and 600 * size / scale > 12 + 7 * len(words):
                ink = "#fff" if group in ("parameters", "frozen") else "#000"
                yield f'<text class="inside" {x} dx="6" dy="4" fill="{ink}">{words}</text>'
            start += size
        if inside:
            yield line("limit", bar.limit)

    marks = (text("mark", limit, f"limit {human_bytes(limit)}{' →' * (limit > scale)}") for limit in limits)
    labels = (text("axis", tick, human_bytes(tick).replace(".00", "")) for tick in ticks)
    drawn = (row if isinstance(row, str) else _row(row.label, drawing(row), row.figure, kind) for row in rows)
    used = [group for group in COLOURS if group and any(bar.parts.get(group, 0) >= 1 for bar in bars)]
    legend = "".join(f'<span><i style="background: {COLOURS[g]}"></i>{g.replace("_", " ")}</span>' for g in used)
    return (
        f"{_row('', marks, '', 'thin')}{''.join(drawn)}{_row('', labels, '', 'thin')}<div class=legend>{legend}</div>"
    )


def _row(label: str, shapes: Iterable[str], figure: str, kind: str) -> str:
    drawing = f"<div class=track><svg role=img>{''.join(shapes)}</svg></div>"
    label = escape(label).replace("=", "=<wbr>")
    return f'<div class="row {kind}"><div>{label}</div>{drawing}<div class=figure>{figure}</div></div>'


def _notes(plan: Plan) -> str:
    lines = ["an estimate: no compiler ran"] if plan.get("estimated") else []
    lines += [f"with {s['setting']}: {human_bytes(s['device_peak_bytes'])}" for s in plan.get("suggestions") or []]
    zeros = plan.get("zero_gradients") or []
    lines += [f"the gradient of {zero['path']} is always zero ({human_bytes(zero['bytes'])})" for zero in zeros]
    message = f"<pre class=bad>{escape(plan['message'])}</pre>" if plan.get("message") else ""
    return message + "".join(f"<p>{escape(line)}" for line in [*lines, *(plan.get("notes") or [])])


def _figures(plan: Plan, above: str = "") -> Iterator[tuple[str, str]]:
    """(name, text) of every figure that is known, in the order of the report and by the names of its keys."""
    for key, value in plan.items():
        name = f"{above} {key}".strip().replace("_", " ").replace("flops", "FLOPs")
        if isinstance(value, Mapping) and key != "phases":
            yield from _figures(value, name.removesuffix("bytes"))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            human = human_bytes if "bytes" in key or "breakdown" in above or "collective" in above else human_count
            yield name.removesuffix(" bytes"), f"{value:+.1%}" if key == "error" else human(value)
        elif above == "versions":
            yield key, str(value)


def _table(rows: Iterable[Sequence[str]]) -> str:
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows)
    return f"<div class=scroll><table>{''.join(lines)}</table></div>"
