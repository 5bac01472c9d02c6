"""The HTML document: one plan with its chart, or several plans with a chart each and bars on a common scale."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from plimsoll.extras.plan_page import (
    bars,
    chart,
    chart_figures,
    commands,
    lanes,
    memory_tables,
    slider,
    step_time,
    tables,
    throughput,
)
from plimsoll.extras.plan_page.batch_grid import GridPoint, point_from_report
from plimsoll.extras.plan_page.commands import PlanCommand
from plimsoll.extras.plan_page.data_binding import Figures, bind_element
from plimsoll.extras.plan_page.memory_levers import Lever, levers
from plimsoll.extras.plan_page.redaction import redact_command, redact_report
from plimsoll.framework.plan.plan_report import PlanReport
from plimsoll.framework.plan.throughput_curve import ThroughputCurve

_FOLDER = Path(__file__).parent
_CSS = (_FOLDER / "page.css").read_text("utf-8")
_SCRIPT = (_FOLDER / "page.js").read_text("utf-8")
# Inline code may run, but the browser fetches nothing for this page and sends nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_HEAD = f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><meta name="robots" content="noindex"><style>{_CSS}</style>"""
# Maximum number of charts to draw; beyond it, the bars show as much.
_MOST_CHARTS = 12


def page(
    plans: Sequence[PlanReport],
    *,
    points: Sequence[GridPoint] = (),
    asked: PlanCommand | None = None,
    moves: Sequence[Lever] | None = None,
    curves: Mapping[str, ThroughputCurve] | None = None,
) -> str:
    """Return a complete HTML document.

    Args:
        plans: one or more reports. Several plans are named after the facts that they do not share.
        points: points of the slider, which include the first plan's.
        asked: the command line that asked for the plans, for the commands to paste; None if there was none.
        moves: settings that change the groups of a single plan; by default those that may change them, without the
            size of the change.
        curves: {name: rates at larger batches}, which the page draws; the name is "" if there is only one.

    Returns:
        The document as text.
    """
    # A page may be shared, so it names neither folders of this machine nor credentials.
    plans = list(map(redact_report, plans))
    points = [point._replace(report=redact_report(point.report)) for point in points]
    asked = None if asked is None else redact_command(asked)
    common = tables.common_facts(plans)
    # Plans of one config and target have one title.
    titles = dict.fromkeys(" ".join(tables.facts(plan)[:2]) for plan in plans)
    title = ", ".join(titles)
    common_settings = " ".join(text for text in common if text not in tables.facts(plans[0])[:2])
    planned = _PageContent(plans, points, asked)
    header = f"<header><h1>{escape(title)}</h1>{planned.verdict()}{planned.settings(common_settings)}</header>"
    sections = [("", planned.draw_chart()), ("Commands", planned.commands())]
    if len(plans) == 1:
        moves = levers(plans[0]) if moves is None else moves
        sections.append(
            ("Memory by group" + (", and settings that change it" if moves else ""), planned.memory_tables(moves))
        )
    sections += _make_shared_sections(plans, planned, curves or {})
    body = "".join(_section(heading, content) for heading, content in sections if content)
    script = planned.script()
    head = f"{_HEAD}<title>{escape(title)}: plan</title>{_describe(title, plans)}</head>"
    return f"{head}<body><main>{chart.DEFINITIONS}{header}{body}</main>{script}</body></html>\n"


def _describe(title: str, plans: Sequence[PlanReport]) -> str:
    """Return the description of the page, which search results and previews of a link show."""
    verdicts = []
    for name, plan in zip(tables.name_plans(plans), plans, strict=True):
        text = f"{tables.need_text(plan)}, {tables.verdict_text(plan)}"
        verdicts.append(f"{name}: {text}" if len(plans) > 1 else text)
    batch = tables.batch_line(plans[0])
    description = f"{title}. {'; '.join(verdicts[:_MOST_CHARTS])}. {batch}".strip()
    content = escape(description, quote=True)
    return (
        f'<meta name="description" content="{content}"><meta property="og:title" content="{escape(title)}: plan">'
        f'<meta property="og:description" content="{content}">'
    )


def _make_shared_sections(
    plans: Sequence[PlanReport], planned: "_PageContent", curves: Mapping[str, ThroughputCurve]
) -> list[tuple[str, str]]:
    names = tables.name_plans(plans)
    sections = []
    if len(plans) > 1:
        sections.append(("Memory of one device at the peak", bars.draw_device_bars(names, plans)))
    sections += [
        ("Step time", planned.step_time()),
        ("What is busy during a step", lanes.render_section(plans[0].time) if len(plans) == 1 else ""),
        ("Larger batches", throughput.render_section(curves)),
        ("Host memory of one process", bars.draw_host_bars(names, plans)),
        ("Peak of one device in each phase", bars.draw_phase_bars(names, plans)),
        ("Figures", _figures(names, plans, planned)),
    ]
    return sections


def _figures(names: Sequence[str], plans: Sequence[PlanReport], planned: "_PageContent") -> str:
    """Return all tables of a single plan, or a comparison of several plans with the tables of each folded in."""
    if len(plans) == 1:
        return tables.render_tables(plans[0], is_drawn=True)
    folded = ""
    for name, plan in zip(names, plans, strict=True):
        command = planned.command_for(plan)
        content = command + tables.render_tables(plan, is_drawn=False)
        folded += f"<details><summary>{escape(name)}</summary>{content}</details>"
    return tables.render_comparison(plans) + folded


def _section(heading: str, content: str) -> str:
    title = f"<h2>{heading}</h2>" if heading else ""
    return f"<section>{title}{content}</section>"


class _PageContent:
    """The plans of a page, with the figures that its script may change."""

    def __init__(self, plans: Sequence[PlanReport], points: Sequence[GridPoint], asked: PlanCommand | None):
        self._plans = plans
        self._first = plans[0]
        self._asked = asked
        self._points = points if len(points) > 1 else ()
        reports = [point.report for point in self._points] or list(plans)
        self._segments = chart_figures.list_segments(reports)
        self._parts = step_time.part_names(reports)
        self._point_figures = [self._figures_at(point) for point in self._points]
        self._shown = self._select_figures()

    def settings(self, common_settings: str) -> str:
        """Return the settings that all plans share; for one plan with a slider, all settings of the point."""
        if self._points and len(self._plans) == 1:
            return bind_element("p", self._shown, {"text": "settings"}, attributes="class=soft")
        return f"<p class=soft>{tables.breakable(common_settings)}</p>"

    def verdict(self) -> str:
        """Return the verdict on a single plan, or the number of plans that fit."""
        if len(self._plans) > 1:
            fitting = sum(plan.fits for plan in self._plans)
            kind = "good" if fitting else "bad"
            batches = dict.fromkeys(tables.batch_line(plan, per_device=False) for plan in self._plans)
            # Plans with different batches have them in the table of figures.
            batch = f"<p>{escape(next(iter(batches)))}</p>" if len(batches) == 1 else ""
            return f"<p class='verdict {kind}'>{fitting} of {len(self._plans)} fit</p>{batch}"
        return self._format_verdict()

    def draw_chart(self) -> str:
        """Return the chart with its sliders, or one chart for each of several plans."""
        if len(self._plans) > 1 and not self._points:
            return self._draw_charts() if len(self._plans) <= _MOST_CHARTS else ""
        content = f"<div class=stage>{chart.draw_chart(self._shown, self._segments)}</div>"
        if len(self._plans) > 1:
            content += self._format_verdict()
        if self._points:
            content += slider.render_basis(self._shown) + slider.render_controls(self._points)
        return content

    def memory_tables(self, moves: Sequence[Lever]) -> str:
        """Return the groups of a single plan, the settings that change them or would fit, and the largest buffers."""
        first = self._first
        content = memory_tables.render_groups(
            self._shown, first, self._segments, moves
        ) + memory_tables.render_suggestions(first)
        return content + memory_tables.render_buffers(first, self._segments) + _fixed_parts_note(self._points)

    def commands(self) -> str:
        """Return the commands to paste."""
        if self._asked is None:
            return ""
        boxes = ""
        # Several plans without a slider have no common train command; `command_for` shows one with each plan.
        if (len(self._plans) == 1 or self._points) and self._shown["command.train"]:
            boxes = commands.render_command(self._shown, "command.train", "train")
        return boxes + commands.render_command(self._shown, "command.plan", "plan again")

    def command_for(self, plan: PlanReport) -> str:
        """Return the command that trains one of several plans."""
        if self._asked is None or plan.subject:
            return ""
        command = commands.train_command(self._asked, commands.get_overrides(plan))
        return commands.render_command({"train": command}, "train", "train") if command else ""

    def step_time(self) -> str:
        """Return the section on the step time; "" if no report estimates it."""
        if not self._parts or (len(self._plans) > 1 and not self._points):
            return ""
        content = step_time.render_section(self._shown, self._parts, self._first.item)
        return bind_element("div", self._shown, {"class": "time.class"}, content=content)

    def script(self) -> str:
        """Return the data of the points and the script; "" if there are neither sliders nor commands."""
        if not self._points and self._asked is None:
            return ""
        data = ""
        if self._points:
            data = slider.render_data(self._points, self._point_figures, self._find_shown_index())
        return f"{data}<script>{_SCRIPT}</script>"

    def _format_verdict(self) -> str:
        verdict = bind_element("p", self._shown, {"class": "verdict.class", "text": "verdict"})
        need = bind_element("p", self._shown, {"text": "need.of"})
        return verdict + need + bind_element("p", self._shown, {"text": "batch"})

    def _draw_charts(self) -> str:
        charts = ""
        for name, plan in zip(tables.name_plans(self._plans), self._plans, strict=True):
            segments = chart_figures.list_segments([plan])
            drawing = chart.draw_chart(chart_figures.figures(plan, segments), segments)
            caption = f"{tables.breakable(name)}<br>{tables.verdict(plan)}<br><small>{tables.need_text(plan)}</small>"
            batch = tables.batch_line(plan)
            caption += f"<br><small>{escape(batch)}</small>" if batch else ""
            charts += f"<figure>{drawing}<figcaption>{caption}</figcaption></figure>"
        caption = "Each chart has its own scale. The bars below share one."
        return f"<div class=fleet>{charts}</div><p class=soft>{caption}</p>"

    def _find_shown_index(self) -> int:
        asked = point_from_report(self._first)
        return next(index for index, point in enumerate(self._points) if point[:2] == asked[:2])

    def _select_figures(self) -> Figures:
        if self._points:
            return self._point_figures[self._find_shown_index()]
        figures = chart_figures.figures(self._first, self._segments) | step_time.figures(self._first, self._parts)
        if self._asked is None:
            return figures
        settings = self._asked.settings
        return figures | _command_figures(self._asked, settings, settings)

    def _figures_at(self, point: GridPoint) -> Figures:
        """Return the figures of a point of the slider."""
        asked = self._points[[other[:2] for other in self._points].index(point_from_report(self._first)[:2])]
        figures = chart_figures.figures(point.report, self._segments) | step_time.figures(point.report, self._parts)
        figures["basis"] = slider.describe_basis(point, asked)
        settings = self._first.settings
        is_asked = point[:2] == asked[:2]
        figures["settings"] = " ".join(settings if is_asked else commands.settings_at(point, settings))
        if self._asked is None:
            return figures
        settings = list(self._asked.settings)
        # At the asked point, show the command as the user typed it.
        if is_asked and len(self._plans) == 1:
            return figures | _command_figures(self._asked, settings, settings)
        changed = commands.settings_at(point, settings)
        # With several plans, the plan command makes all of them again, so it keeps the original settings.
        return figures | _command_figures(self._asked, changed, settings if len(self._plans) > 1 else changed)


def _command_figures(asked: PlanCommand, train_settings: Sequence[str], plan_settings: Sequence[str]) -> dict[str, str]:
    return {
        "command.train": commands.train_command(asked, train_settings),
        "command.plan": commands.plan_command(asked, plan_settings),
    }


def _fixed_parts_note(points: Sequence[GridPoint]) -> str:
    """Return a note on the parts that do not follow the slider; "" without a slider."""
    if not points:
        return ""
    note = "In this section, only bytes and shares follow the slider. The rest of it, and the tables below, show the"
    return f"<p class='soft stays'>{note} requested point.</p>"
