"""One page that shows plans: a ship loaded to its line, where each byte goes, what moves it, and commands to paste.

One file, with its style (page.css), script (page.js) and SVG inline: nothing is fetched, and every text of a plan is
escaped. Without JavaScript it shows the plan that was asked for.

document: the page. hull: the ship, of which load has the figures. bars, tables, cargo, step_time, commands: the other
sections. slider: points of batch and sequence, through which bound elements move.
"""

from framework.plan.page.colours import COLOURS
from framework.plan.page.commands import Asked
from framework.plan.page.document import page

__all__ = ["COLOURS", "Asked", "page"]
