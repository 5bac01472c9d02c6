"""The colors of groups, the same in every chart of a page."""

import itertools
from collections.abc import Iterable

from plimsoll.framework.plan.plan_report import BREAKDOWN_KEYS

# The palette of Okabe and Ito 2008 (jfly.uni-koeln.de/color), which people can tell apart with any kind of color
# vision, and two grays.
FILLS = ["#0072b2", "#4d4d4d", "#cc79a7", "#d55e00", "#009e73", "#e69f00", "#f0e442", "#56b4e9", "#b3b3b3"]
EMPTY = "left empty by packing"
COLORS = dict(zip(BREAKDOWN_KEYS, FILLS, strict=True)) | {EMPTY: "transparent", "": "#7d8794"}


def colors(groups: Iterable[str]) -> dict[str, str]:
    """Return {group: color}. Unknown groups, from reports on a user's own function, cycle through the fills."""
    unknown_groups = [group for group in dict.fromkeys(groups) if group not in COLORS]
    return COLORS | dict(zip(unknown_groups, itertools.cycle(FILLS), strict=False))


def ink(color: str) -> str:
    """Return the color of text on a fill: white on the two dark ones, else black."""
    return "#fff" if color in FILLS[:2] else "#000"
