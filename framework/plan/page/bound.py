"""Elements whose texts and attributes follow the slider.

`figures` of a point are texts by key. An element names the keys that it shows in its attribute `data-follow`, as
`y:top height:size text:label`; the script of the page (page.js) sets the same attributes and texts for another point.
So each shape is drawn in one place, and what the page stores of a point is text that is never read as HTML.
"""

from collections.abc import Mapping
from html import escape

Figures = Mapping[str, str]


def bound(
    tag: str,
    figures: Figures,
    follow: Mapping[str, str],
    *,
    attributes: str = "",
    content: str = "",
) -> str:
    """An element of HTML or SVG.

    Args:
        tag: its name.
        figures: of the point that is shown first.
        follow: {attribute, or "text" for what it holds: key of the figures}.
        attributes: those that stay, as HTML.
        content: HTML inside, where its text follows nothing.
    """
    pairs = " ".join(f"{attribute}:{key}" for attribute, key in follow.items())
    followed = ""
    for attribute, key in follow.items():
        if attribute == "text":
            content = escape(figures[key])
        else:
            followed += f' {attribute}="{escape(figures[key], quote=True)}"'
    space = " " if attributes else ""
    return f'<{tag}{space}{attributes} data-follow="{pairs}"{followed}>{content}</{tag}>'
