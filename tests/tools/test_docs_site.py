"""The documentation site: its navigation lists every page, and its pages have all names. `make docs` builds it."""

import re
from typing import Any

import pytest
import yaml

import plimsoll
from plimsoll.framework.config.components import find_components
from plimsoll.launch.__main__ import verbs
from tests.support.runs import ROOT
from tools import docs_site, site_check

PAGES = docs_site.write_pages()


def list_nav(entry: Any) -> list[str]:
    """Return the pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    entries = entry.values() if isinstance(entry, dict) else entry
    return [page for one in entries for page in list_nav(one)]


def test_navigation_lists_every_page_once() -> None:
    # A safe loader does not know the tags of MkDocs.
    text = re.sub(r"!!python/\S+|!ENV", "", (ROOT / "mkdocs.yml").read_text())
    listed = list_nav(yaml.safe_load(text)["nav"])
    files = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted([*files, *PAGES])


def test_reference_has_every_name() -> None:
    documented = re.findall(r"^      heading: pl\.(\w+)$", "".join(PAGES.values()), re.M)
    assert sorted(documented) == sorted([*set(plimsoll.__all__) - {"__version__"}, *find_components()])
    commands = re.findall(r"^## plimsoll (\w+)$", PAGES["reference/commands.md"], re.M)
    assert commands == list(verbs())


@pytest.mark.parametrize(
    ("source", "markdown", "expected"),
    [
        ("README.md", "[a](docs/plan.md#b) [c](#d)", "[a](plan.md#b) [c](#d)"),
        ("README.md", "![a](docs/images/plan.png)", "![a](images/plan.png)"),
        ("README.md", "[b](docs/benchmarks/), [x](https://a.org)", "[b](benchmarks/index.md), [x](https://a.org)"),
        ("docs/plan.md", "[a](../README.md#b), [c](memory.md)", "[a](index.md#b), [c](memory.md)"),
        ("docs/benchmarks/gpu.md", "[a](../../README.md) [b](../gpu.md)", "[a](../index.md) [b](../gpu.md)"),
        ("docs/plan.md", "[`a`](../tools/x.py)", "[`a`](URL/blob/main/tools/x.py)"),
        ("docs/plan.md", "```\n[a](../README.md)\n- b\n```\n", "```\n[a](../README.md)\n- b\n```\n"),
        ("docs/plan.md", "Some:\n- a\n- b\n", "Some:\n\n- a\n- b\n"),
        ("docs/plan.md", "1. a\n\n   b\n2. c\n\nd\n", "1. a\n\n    b\n\n2. c\n\nd\n"),
    ],
)
def test_pages_are_rewritten_for_the_site(source: str, markdown: str, expected: str) -> None:
    assert docs_site.rewrite(markdown, source, "URL") == expected


def test_pages_of_the_search_exist() -> None:
    """Weights, words and expected results of the search name pages of the site."""
    files = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} | {*PAGES}
    assert {*docs_site.SEARCH_WORDS} <= files
    assert {page.rstrip("/") + ".md" for page in site_check.QUERIES.values()} <= files
    assert all(any(file.startswith(start) for file in files) for start in docs_site.SEARCH_WEIGHTS)


def test_link_by_file_name_gets_the_label_of_the_page() -> None:
    markdown = "[docs/plan.md](docs/plan.md#a) [memory.md](docs/memory.md) [plans](docs/plan.md)"
    expected = "[A run](plan.md#a) [memory.md](memory.md) [plans](plan.md)"
    assert docs_site.rewrite(markdown, "README.md", "URL", {"plan.md": "A run"}) == expected


def test_link_to_a_file_is_text_if_the_repository_is_unknown() -> None:
    assert docs_site.rewrite("[`a`](../tools/x.py)", "docs/plan.md", "") == "`a`"
