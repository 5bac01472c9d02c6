"""Where the bytes of a plan go: its groups with what moves each of them, its largest buffers, and what would fit."""

from collections.abc import Mapping, Sequence
from html import escape

from framework.plan.levers import Lever
from framework.plan.page.bound import Figures, bound
from framework.plan.page.colours import COLOURS
from framework.plan.page.load import Layer
from framework.plan.page.tables import breakable
from framework.plan.report import Report, needs
from framework.terminal.tables import human_bytes

_MOST_LEVERS = 4
_MOST_BUFFERS = 12
_MOST_CUT = 160


def groups(
    figures: Figures,
    plan: Report,
    held: Sequence[Layer],
    levers: Sequence[Lever],
) -> str:
    """The table of the groups, the top of the hold first, as the picture has them."""
    is_measured = any(lever.peak_bytes is not None for lever in levers)
    by = " (→ by the closed form)" if is_measured else ""
    heading = "<th>group<th>bytes<th>share<th>" + (f"<th>what moves it{by}" if levers else "")
    rows = ""
    for layer in reversed(held):
        size = bound("td", figures, {"text": f"{layer.key}.size"}, attributes='class="number"')
        share = bound("td", figures, {"text": f"{layer.key}.share"}, attributes='class="number"')
        bar = bound("rect", figures, {"width": f"{layer.key}.share"}, attributes=f'height="100%" fill="{layer.colour}"')
        moves = f"<td>{_moves(plan, layer, levers)}" if levers else ""
        rows += f"<tr><td>{_swatch(layer.colour)}{escape(layer.label)}</td>{size}{share}<td><svg class=mini>{bar}</svg>{moves}"
    return f'<div class="scroll"><table class="cargo-table"><tr>{heading}{rows}</table></div>'


def suggestions(plan: Report) -> str:
    """Settings that would fit, where a plan does not; "" where there are none."""
    rows = ""
    for suggestion in plan["suggestions"]:
        rows += f"<tr><td><code>{breakable(suggestion['setting'])}</code><td class=number>{escape(needs(suggestion))}"
    return f'<h3>what would fit</h3><div class="scroll"><table>{rows}</table></div>' if rows else ""


def buffers(plan: Report, held: Sequence[Layer]) -> str:
    """The largest buffers, each with a bar on the scale of the peak; "" where none is known."""
    colour_by_group = COLOURS | {layer.group: layer.colour for layer in held}
    peak = max(plan["device_peak_bytes"], 1)
    rows = ""
    for buffer in plan["largest"][:_MOST_BUFFERS]:
        rows += _buffer_row(buffer, colour_by_group.get(buffer["group"], COLOURS[""]), buffer["bytes"] / peak)
    if not rows:
        return ""
    return f'<h3>largest buffers</h3><div class="scroll"><table class="buffers">{rows}</table></div>'


def _buffer_row(buffer: Mapping, colour: str, share: float) -> str:
    repeats = f" × {buffer['count']}" if buffer["count"] > 1 else ""
    bar = f'<svg class="mini"><rect width="{min(1, share):.2%}" height="100%" fill="{colour}"/></svg>'
    name = escape(_shortened(buffer["name"])).replace("/", "/<wbr>")
    shape = escape(_shortened(buffer["shape"]) + repeats)
    return f"<tr><td>{name}<td class=shape>{shape}<td class=number>{human_bytes(buffer['bytes'])}<td>{bar}"


def _moves(plan: Report, layer: Layer, levers: Sequence[Lever]) -> str:
    """The settings that move a group, and by how much where that was asked."""
    texts = []
    for lever in [lever for lever in levers if lever.group == layer.group][:_MOST_LEVERS]:
        effect = escape(lever.effect)
        if lever.peak_bytes is not None and lever.group_bytes is not None:
            effect += f" <small>{_change(plan, lever)}</small>"
        texts.append(f"<div><code>{breakable(lever.text)}</code> {effect}</div>")
    return "".join(texts)


def _change(plan: Report, lever: Lever) -> str:
    """What a lever does to its group and to the peak; both figures are of the closed form."""
    present = plan["estimate"]
    group_bytes = present["breakdown"][lever.group]
    change = f"{human_bytes(group_bytes)} → {human_bytes(lever.group_bytes)}"
    difference = (lever.peak_bytes or 0) - present["device_peak_bytes"]
    sign = "−" if difference < 0 else "+"
    return f"{change}, peak {sign}{human_bytes(abs(difference))}"


def _swatch(colour: str) -> str:
    return f'<i style="background: {colour}"></i>'


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CUT else f"{text[: _MOST_CUT - 1]}…"
