"""An HTML page for plans: a memory chart with a capacity line, the bytes of each group, and commands to paste.

The page is a single file with its style (page.css), script (page.js) and SVG inline. It fetches nothing, and escapes
all text of a plan. Without JavaScript it shows the plan that was asked for.

document: the page. hull: the chart, drawn as a ship; load computes its figures. bars, tables, cargo, step_time,
commands: the other sections. slider: planned points of batch size and sequence length; bound: elements that follow it.
"""

from plimsoll.framework.plan.page.colors import COLORS
from plimsoll.framework.plan.page.commands import PlanCommand
from plimsoll.framework.plan.page.document import page

__all__ = ["COLORS", "PlanCommand", "page"]
