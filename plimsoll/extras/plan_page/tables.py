"""The tables of a page, the names of its plans, and a short verdict."""

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from plimsoll.framework.plan.plan_report import PlanReport
from plimsoll.framework.plan.report_tables import batch_text, comparison, sections
from plimsoll.framework.terminal.tables import TableSection, human_bytes

# The page has a separate section for each of these.
_DRAWN = ("largest buffers", "would fit")


def facts(plan: PlanReport) -> list[str]:
    """Return the facts that distinguish a plan from others: config, target and settings."""
    return [plan.config, f"on {plan.target}", *plan.settings]


def common_facts(plans: Sequence[PlanReport]) -> list[str]:
    """Return the facts that all plans share."""
    return [text for text in facts(plans[0]) if all(text in facts(plan) for plan in plans)]


def name_plans(plans: Sequence[PlanReport]) -> list[str]:
    """Return a name for each plan: the facts that it does not share with the others."""
    common = common_facts(plans)
    plan_names = []
    for plan in plans:
        differing = " ".join(text for text in facts(plan) if text not in common)
        plan_names.append(differing or plan.config)
    return plan_names


def breakable(text: str) -> str:
    """Return HTML of settings such as memory.remat=full, where a line may break after the equals sign."""
    return escape(text).replace("=", "=<wbr>")


def need_text(plan: PlanReport, *, of_limit: bool = True) -> str:
    """Return the required memory, such as `8.52 GiB of 15.75 GiB`.

    Args:
        plan: report of a plan.
        of_limit: whether to append the limit, if it is known.
    """
    limit = plan.device_limit_bytes
    about = "≈ " if plan.estimated else ""
    limit_text = f" of {human_bytes(limit)}" if limit and of_limit else ""
    return f"{about}{human_bytes(plan.device_allocated_bytes)}{limit_text}"


def batch_line(plan: PlanReport, *, per_device: bool = True) -> str:
    """Return the batch of a plan as text; "" for a function, which has none.

    Args:
        plan: report of a plan.
        per_device: whether to append the share of one device.
    """
    return "" if plan.batch is None else batch_text(plan, plan.batch, per_device=per_device)


def verdict_text(plan: PlanReport) -> str:
    """Return the verdict as text, such as `✓ fits, 7.15 GiB free`."""
    limit = plan.device_limit_bytes
    need = plan.device_allocated_bytes
    if not plan.fits:
        excess = f", {human_bytes(need - limit)} over" if limit and need > limit else ""
        return f"✗ does not fit{excess}"
    if not limit:
        return "limit unknown"
    return f"✓ fits, {human_bytes(limit - need)} free"


def verdict_kind(plan: PlanReport) -> str:
    """Return the CSS class of a verdict: good, bad, or soft if the limit is unknown."""
    if not plan.fits:
        return "bad"
    return "good" if plan.device_limit_bytes else "soft"


def verdict(plan: PlanReport) -> str:
    """Return the verdict as HTML."""
    return f"<b class={verdict_kind(plan)}>{verdict_text(plan)}</b>"


def render_table(section: TableSection) -> str:
    """Return a section of a report as HTML."""
    rows = ""
    for row in section.rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        rows += f"<tr>{cells}"
    kind = " numbers" if section.numbers else ""
    return f'<h3>{escape(section.title)}</h3><div class="scroll{kind}"><table>{rows}</table></div>'


def render_tables(plan: PlanReport, *, is_drawn: bool) -> str:
    """Return all tables of a plan.

    Args:
        plan: report of the plan.
        is_drawn: whether other sections of the page show the plan; their tables are left out here.
    """
    versions = TableSection("versions", list(plan.versions.items()))
    shown = [section for section in sections(plan) if not (is_drawn and section.title in _DRAWN)]
    return "".join(map(render_table, [*shown, versions]))


def render_comparison(plans: Sequence[PlanReport]) -> str:
    """Return one table that compares several plans."""
    renamed = [replace(plan, settings=[name]) for name, plan in zip(name_plans(plans), plans, strict=True)]
    return render_table(comparison(renamed))
