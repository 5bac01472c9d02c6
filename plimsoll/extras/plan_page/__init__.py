"""An HTML page for plans: a memory chart with a capacity line, the bytes of each group, and commands to paste.

The page is a single file with its style (page.css), script (page.js) and SVG inline. It fetches nothing, and escapes
all text of a plan. Without JavaScript it shows the plan that was asked for.

document.py       the page
chart.py          the memory chart, drawn as a ship
chart_figures.py  the positions and texts of the chart
bars.py, memory_tables.py, step_time.py, throughput.py, tables.py, commands.py: the other sections
slider.py         planned points of batch size and sequence length
redaction.py     removes folders and credentials, because a page may be shared
data_binding.py   elements that follow the slider
colors.py         the colors of groups
"""

from plimsoll.extras.plan_page.colors import COLORS
from plimsoll.extras.plan_page.commands import PlanCommand
from plimsoll.extras.plan_page.document import page

__all__ = ["COLORS", "PlanCommand", "page"]
