"""The documentation pages as a reader sees them: links lead to a file and a heading, tables have headings."""

import re
from pathlib import Path

import pytest

import plimsoll as pl
from tests.support.pages import PAGES
from tests.support.runs import ROOT

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_RULE = re.compile(r"\|(?:-+\|)+")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub generates them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_a_file_and_a_heading(name: str) -> None:
    page = ROOT / name
    for link in _LINK.findall(page.read_text().replace("\n", " ")):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{name}: {link}: no such file"
        assert not anchor or anchor in anchors(target), f"{name}: {link}: no such heading"


@pytest.mark.parametrize("name", PAGES)
def test_tables_have_headings(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    for index, line in enumerate(lines):
        if _RULE.fullmatch(line):
            heading = lines[index - 1]
            assert heading.count("|") == line.count("|"), f"{name}:{index + 1}: the table has no row of headings"


_FIELD = re.compile(r"`((?:data|mesh|memory|model|learner|trainer)\.[\w.]+|batch_transform)(?:=([^`]+))?`")


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("docs/coming_from/")])
def test_fields_that_replace_those_of_others_exist(name: str) -> None:
    """The last column of a table of docs/coming_from/ has our fields; the first has those of the other framework."""
    # Preferences have an objective and a batch transform; adapters and a published tokenizer are added.
    config = pl.load_config("dpo-tiny", {"model.lora": "LoRA", "data.tokenizer": "PretrainedTokenizer"})
    rows = [line.split("|") for line in (ROOT / name).read_text().splitlines() if line.startswith("| ")]
    fields = [match.groups() for row in rows for match in _FIELD.finditer(row[-2])]
    assert len(fields) >= 8
    for path, value in fields:
        if value is None:
            config.get_path(path)
        else:
            config.copy().override(path, value)
