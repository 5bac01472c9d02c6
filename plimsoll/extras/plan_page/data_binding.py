"""Elements whose texts and attributes follow the slider.

The `figures` of a point are texts by key. An element lists the keys that it shows in its attribute `data-follow`, such
as `y:top height:size text:label`. The script of the page (page.js) sets the same attributes and texts for another
point. So each shape is drawn in one place, and the page stores a point as text that is never parsed as HTML.
"""

from collections.abc import Mapping
from html import escape

Figures = Mapping[str, str]


def bind_element(
    tag: str, figures: Figures, follow: Mapping[str, str], *, attributes: str = "", content: str = ""
) -> str:
    """Return an HTML or SVG element.

    Args:
        tag: name of the element.
        figures: figures of the point that is shown first.
        follow: {attribute, or "text" for the content: key of the figures}.
        attributes: constant attributes, as HTML.
        content: HTML inside the element, if its text does not follow the slider.
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
