"""The check of the documentation site finds what it looks for, on two small pages in a real browser."""

import re
from pathlib import Path

import pytest

from tests.support.plan_pages import CHROMIUM
from tools import site_check

pytest.importorskip("playwright", reason="playwright is not installed: pip install -e '.[docs-check]'")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")

ICON = "<link rel=icon href='data:,'>"
SOUND = f"<!doctype html>{ICON}<h1 id=top>Sound</h1><a href='#top'>up</a> <a href='notes.txt'>notes</a>"
BROKEN = f"""<!doctype html>{ICON}<h1>Broken</h1>
<a href='gone.html'>1</a> <a href='index.html#gone'>2</a> <img src=gone.png> <img src='http://other.invalid/a.png'>
<div style='width: 1500px'>wide</div>
<script>console.error('one error'); nowhere();</script>"""
PROBLEMS = (
    "link to /gone.html: no such page",
    "link to /index.html#gone: no such heading",
    "no image: .*/gone.png",
    "status 404: .*/gone.png",
    "request to another host: http://other.invalid/a.png",
    "failed: http://other.invalid/a.png",
    "15.. pixels wide on a screen of 390",
    "15.. pixels wide on a screen of 1280",
    "console: one error",
    "error: nowhere is not defined",
)


def check(folder: Path, broken: str) -> list[str]:
    """Return the problems of a site of a sound page and one more."""
    (folder / "index.html").write_text(SOUND)
    (folder / "notes.txt").write_text("notes")
    (folder / "more.html").write_text(broken)
    with site_check.serve(folder) as url, site_check.open_browser() as browser:
        return site_check.check_pages(browser, folder, url)


def test_sound_pages_have_no_problems(tmp_path: Path) -> None:
    assert check(tmp_path, SOUND.replace("#top", "./#top")) == []


def test_each_problem_is_found(tmp_path: Path) -> None:
    problems = check(tmp_path, BROKEN)
    assert all(problem.startswith("/more.html: ") for problem in problems)
    for expected in PROBLEMS:
        assert any(re.fullmatch(f"/more.html: (Error: |ReferenceError: )?{expected}", one) for one in problems), (
            f"{expected!r} is not in\n" + "\n".join(problems)
        )


def test_dark_mode_that_does_nothing_is_a_problem(tmp_path: Path) -> None:
    button = "<label for=__palette_0>dark</label>"
    (tmp_path / "memory").mkdir()
    for file in ("index.html", "memory/index.html"):
        (tmp_path / file).write_text(f"<!doctype html>{ICON}<body style='background: #fff'>{button}")
    with site_check.serve(tmp_path) as url, site_check.open_browser() as browser:
        assert site_check.check_dark_mode(browser, url) == ["dark mode: the next page is light again"]
