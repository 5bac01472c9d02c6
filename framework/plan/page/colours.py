"""The colours of groups, the same in every picture of a page."""

import itertools
from collections.abc import Iterable

from framework.plan.report import KEYS

# Okabe and Ito 2008 (jfly.uni-koeln.de/color), which people tell apart with any kind of colour
# vision, and two greys.
FILLS = ["#0072b2", "#4d4d4d", "#cc79a7", "#d55e00", "#009e73", "#e69f00", "#f0e442", "#56b4e9", "#b3b3b3"]
EMPTY = "left empty by packing"
COLOURS = dict(zip(KEYS, FILLS, strict=True)) | {EMPTY: "transparent", "": "#7d8794"}


def colours(groups: Iterable[str]) -> dict[str, str]:
    """{group: colour}; groups that a report of somebody's own function has take the fills in turn."""
    unknown_groups = [group for group in dict.fromkeys(groups) if group not in COLOURS]
    return COLOURS | dict(zip(unknown_groups, itertools.cycle(FILLS), strict=False))


def ink(colour: str) -> str:
    """The colour of text on a fill: white on the two dark ones."""
    return "#fff" if colour in FILLS[:2] else "#000"
