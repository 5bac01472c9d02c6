"""The step time section, for reports with an estimate: a bar of its parts, the throughput, and the basis."""

from collections.abc import Sequence
from html import escape

from plimsoll.extras.plan_page.colors import FILLS, ink
from plimsoll.extras.plan_page.data_binding import Figures, bind_element
from plimsoll.framework.plan.plan_report import PlanReport, TimeReport
from plimsoll.framework.terminal.tables import human_count, human_duration

# Smallest part that has room for its name, as a fraction of the bar's width.
_LEAST_LABELLED = 0.14
_NO_TIME = TimeReport(0.0, 0.0, None, bound_by="", parts={}, basis="")


def part_names(plans: Sequence[PlanReport]) -> list[str]:
    """Return the parts of a step that take time in any of the plans, in order."""
    times = [plan.time or _NO_TIME for plan in plans]
    return list(dict.fromkeys(part for time in times for part, seconds in time.parts.items() if seconds > 0))


def figures(plan: PlanReport, parts: Sequence[str]) -> dict[str, str]:
    """Return the figures of the step time. Without an estimate, they are placeholders and hide the section.

    Args:
        plan: report of one point.
        parts: parts of a step, in the order of the bar.
    """
    time = plan.time or _NO_TIME
    whole = max(time.seconds, 1e-12)
    values = {
        "time.class": "" if plan.time else "no-time",
        "time.seconds": human_duration(time.seconds),
        "time.rate": human_count(time.tokens_per_second),
        "time.mfu": _percentage(time.model_flops_utilization),
        "time.bound_by": time.bound_by,
        "time.basis": time.basis,
    }
    start = 0.0
    for index, part in enumerate(parts):
        seconds = time.parts.get(part, 0.0)
        key = f"t{index}"
        values[f"{key}.x"] = f"{100 * start / whole:.3f}%"
        values[f"{key}.width"] = f"{100 * seconds / whole:.3f}%"
        values[f"{key}.text"] = human_duration(seconds)
        values[f"{key}.title"] = f"{part}: {human_duration(seconds)}"
        values[f"{key}.visible"] = "1" if seconds / whole >= _LEAST_LABELLED else "0"
        start += seconds
    return values


def render_section(figures: Figures, parts: Sequence[str], item: str) -> str:
    """Return the content of the section.

    Args:
        figures: figures of the point that is shown first.
        parts: parts of a step, in the order of the bar.
        item: singular noun for the unit of throughput, such as "token".
    """
    tiles = ""
    captions = {"time.seconds": "step time", "time.rate": f"{item}s per second, all devices", "time.mfu": "MFU"}
    captions["time.bound_by"] = "bound by"
    for key, caption in captions.items():
        tiles += f"<div>{bind_element('b', figures, {'text': key})}<small>{escape(caption)}</small></div>"
    shapes = "".join(_draw_part(figures, index, part) for index, part in enumerate(parts))
    legend = ""
    for index, part in enumerate(parts):
        size = bind_element("small", figures, {"text": f"t{index}.text"})
        legend += f'<span><i style="background: {_fill(index)}"></i>{escape(part)} {size}</span>'
    bar = f'<div class="track time"><svg role="img" aria-label="Parts of a step">{shapes}</svg></div>'
    basis = bind_element("p", figures, {"text": "time.basis"}, attributes='class="soft"')
    return f"<div class=tiles>{tiles}</div>{bar}<div class=legend>{legend}</div>{basis}"


def _draw_part(figures: Figures, index: int, part: str) -> str:
    key = f"t{index}"
    title = bind_element("title", figures, {"text": f"{key}.title"})
    attributes = f'y="4" height="32" fill="{_fill(index)}"'
    follow = {"x": f"{key}.x", "width": f"{key}.width"}
    shape = bind_element("rect", figures, follow, attributes=attributes, content=title)
    label = f'class="inside" y="24" dx="8" fill="{ink(_fill(index))}"'
    return shape + bind_element(
        "text", figures, {"x": f"{key}.x", "opacity": f"{key}.visible"}, attributes=label, content=escape(part)
    )


def _fill(index: int) -> str:
    # These reuse the colors of memory groups. Other colors would be no better, because the legend explains them.
    return FILLS[(0, 5, 4, 3, 8, 7, 2, 6, 1)[index % 9]]


def _percentage(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
