"""Memory tables of a plan: its groups with the settings that change them, its largest buffers, and fitting settings."""

from collections.abc import Mapping, Sequence
from html import escape

from plimsoll.framework.plan.levers import Lever
from plimsoll.framework.plan.page.bound import Figures, bound
from plimsoll.framework.plan.page.colours import COLOURS
from plimsoll.framework.plan.page.load import Layer, parts
from plimsoll.framework.plan.page.tables import breakable
from plimsoll.framework.plan.report import Report, needs
from plimsoll.framework.terminal.tables import human_bytes

_MOST_GROUPS = 20
_MOST_LEVERS = 4
_MOST_BUFFERS = 12
_MOST_CUT = 160


def groups(
    figures: Figures,
    plan: Report,
    held: Sequence[Layer],
    levers: Sequence[Lever],
) -> str:
    """Return the table of the groups, from the top of the chart to the bottom."""
    is_measured = any(lever.peak_bytes is not None for lever in levers)
    by = " (→ by the closed form)" if is_measured else ""
    heading = "<th>group<th>bytes<th>share<th>" + (f"<th>what moves it{by}" if levers else "")
    shown = _largest(plan, held)
    rows = ""
    for layer in reversed(shown):
        moves = f"<td>{_moves(plan, layer, levers)}" if levers else ""
        rows += _group_row(figures, layer) + moves
    if len(shown) < len(held):
        left_out = [layer for layer in held if layer not in shown]
        size = sum(parts(plan)[layer.group] for layer in left_out)
        rows += f"<tr><td>{len(left_out)} smaller groups<td class=number>{human_bytes(size)}<td><td>"
    kind = " wide" if levers else ""
    return f'<div class="scroll"><table class="cargo-table{kind}"><tr>{heading}{rows}</table></div>'


def _group_row(figures: Figures, layer: Layer) -> str:
    """Return the cells of a group: name, bytes, share, and a bar of the share."""
    name = f"<td>{_swatch(layer.colour)}{escape(layer.label)}</td>"
    size = bound("td", figures, {"text": f"{layer.key}.size"}, attributes='class="number"')
    share = bound("td", figures, {"text": f"{layer.key}.share"}, attributes='class="number"')
    attributes = f'height="100%" fill="{layer.colour}"'
    bar = bound("rect", figures, {"width": f"{layer.key}.share"}, attributes=attributes)
    return f"<tr>{name}{size}{share}<td><svg class=mini>{bar}</svg>"


def _largest(plan: Report, held: Sequence[Layer]) -> list[Layer]:
    """Return the segments to list. A user's function may have hundreds of arguments, each of them its own group."""
    sizes = parts(plan)
    by_size = sorted(held, key=lambda layer: sizes.get(layer.group, 0), reverse=True)
    return [layer for layer in held if layer in by_size[:_MOST_GROUPS]]


def suggestions(plan: Report) -> str:
    """Return the list of settings that would fit, if the plan does not; "" if there are none."""
    items = ""
    for suggestion in plan["suggestions"]:
        items += f"<li><code>{breakable(suggestion['setting'])}</code> <small>{escape(needs(suggestion))}</small>"
    return f"<h3>what would fit</h3><ul>{items}</ul>" if items else ""


def buffers(plan: Report, held: Sequence[Layer]) -> str:
    """Return the table of the largest buffers, each with a bar relative to the peak; "" if none are known."""
    colour_by_group = COLOURS | {layer.group: layer.colour for layer in held}
    peak = max(plan["device_peak_bytes"], 1)
    rows = ""
    for buffer in plan["largest"][:_MOST_BUFFERS]:
        rows += _buffer_row(buffer, colour_by_group.get(buffer["group"], COLOURS[""]), buffer["bytes"] / peak)
    if not rows:
        return ""
    return f'<h3>largest buffers</h3><div class="scroll"><table class="buffers">{rows}</table></div>'


def _buffer_row(buffer: Mapping, colour: str, share: float) -> str:
    repeats = f" x {buffer['count']}" if buffer["count"] > 1 else ""
    bar = f'<svg class="mini"><rect width="{min(1, share):.2%}" height="100%" fill="{colour}"/></svg>'
    name = escape(_truncate(buffer["name"])).replace("/", "/<wbr>")
    shape = escape(_truncate(buffer["shape"]) + repeats)
    return f"<tr><td>{name}<td class=shape>{shape}<td class=number>{human_bytes(buffer['bytes'])}<td>{bar}"


def _moves(plan: Report, layer: Layer, levers: Sequence[Lever]) -> str:
    """Return the settings that change a group, and by how much where that was estimated."""
    texts = []
    for lever in [lever for lever in levers if lever.group == layer.group][:_MOST_LEVERS]:
        effect = escape(lever.effect)
        if lever.peak_bytes is not None and lever.group_bytes is not None:
            effect += f" <small>{_change(plan, lever)}</small>"
        texts.append(f"<div><code>{breakable(lever.text)}</code> {effect}</div>")
    return "".join(texts)


def _change(plan: Report, lever: Lever) -> str:
    """Return the effect of a lever on its group and on the peak. Both figures are analytical estimates."""
    present = plan["estimate"]
    group_bytes = present["breakdown"][lever.group]
    change = f"{human_bytes(group_bytes)} → {human_bytes(lever.group_bytes)}"
    difference = (lever.peak_bytes or 0) - present["device_peak_bytes"]
    direction = "less" if difference < 0 else "more"
    return f"{change}; peak {human_bytes(abs(difference))} {direction}"


def _swatch(colour: str) -> str:
    return f'<i style="background: {colour}"></i>'


def _truncate(text: str) -> str:
    return text if len(text) <= _MOST_CUT else f"{text[: _MOST_CUT - 1]}…"
