"""Opens every page of the built site in Chromium, as a reader does, and lists what is broken.

    make docs-check                                     builds the site, and runs the next line
    python -m tools.site_check                          checks build/site; exit code 1 if anything is broken
    python -m tools.site_check --pictures=docs/images   also takes the pictures of CONTRIBUTING.md

On each page: errors in the console, failed requests, requests to other hosts, images that do not load, links to pages
and headings that do not exist, and a page that is wider than a phone or a laptop. Then the search, and the dark mode.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SITE = Path(__file__).parents[1] / "build" / "site"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (390, 1280)  # pixels: a phone, a laptop
# {what a reader types: the page that must come first}
QUERIES = {
    "out of memory": "memory/",
    "resume": "checkpoints/",
    "lora": "finetune/",
    "multi node slurm": "multihost/",
    "fp8": "precision/",
    "early stopping": "early_stopping/",
    "own loss": "own_loss_and_metric/",
    "export hugging face": "models/",
    "plan gpu": "plan/",
    "profile": "profiling/",
    "torchtitan": "coming_from/torchtitan/",
    "exit code": "operations/",
    "tensor parallel": "parallelism/",
    "13b 24 gb gpu": "questions/",
    "axolotl": "questions/",
    "huggingface dataset": "questions/",
    "nan loss": "operations/",
    "rlhf": "questions/",
    "torchrun": "questions/",
    "cpu offload": "questions/",
    "vllm": "questions/",
}
# Reads the page in one call: links and images as absolute URLs, and headings.
READ_PAGE = """() => ({
  links: [...document.querySelectorAll('a[href]')].map(a => a.href),
  ids: [...document.querySelectorAll('[id]')].map(e => e.id),
  broken: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
})"""
READ_WIDTH = "() => document.documentElement.scrollWidth"
FITS = "width => document.documentElement.scrollWidth <= width"


@dataclass
class Findings:
    """Observations of a browser on the pages of a site.

    Attributes:
        problems: one line for each problem.
        ids: {URL of a page: the ids that a link may lead to}.
        links: {URL of a page: the URLs that it links to}.
    """

    problems: list[str] = field(default_factory=list)
    ids: dict[str, set[str]] = field(default_factory=dict)
    links: dict[str, list[str]] = field(default_factory=dict)


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine, and yield its URL, which ends with a slash."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start the Chromium of this machine.

    Raises:
        FileNotFoundError: there is none.
        ModuleNotFoundError: playwright, which drives it, is not installed.
    """
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        raise FileNotFoundError(f"no browser: install one of {', '.join(BROWSERS)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def list_pages(folder: Path, url: str) -> list[str]:
    """Return the URLs of all pages of a site."""
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.html"))
    return [url + file.removesuffix("index.html") for file in files]


def check_pages(browser: Browser, folder: Path, url: str) -> list[str]:
    """Open all pages, and return one line for each problem."""
    found = Findings()
    page = browser.new_page()
    _watch(page, url, found)
    for address in list_pages(folder, url):
        _check_page(page, address, url, found)
    page.close()
    for address, links in found.links.items():
        for link in dict.fromkeys(links):
            target, anchor = urldefrag(link)
            if not target.startswith(url):
                continue
            target = target.removesuffix("index.html")
            if target not in found.ids:
                path = folder / unquote(urlsplit(target).path).lstrip("/")
                if not path.is_file():
                    found.problems.append(f"{_name(address, url)}: link to {_name(link, url)}: no such page")
            elif anchor and unquote(anchor) not in found.ids[target]:
                found.problems.append(f"{_name(address, url)}: link to {_name(link, url)}: no such heading")
    return found.problems


def _name(address: str, url: str) -> str:
    """Return the path of a page on the site, for messages."""
    return "/" + address.removeprefix(url)


def _watch(page: Page, url: str, found: Findings) -> None:
    """Record errors of the console and of scripts, failed requests, and requests to other hosts."""

    def record(problem: str) -> None:
        found.problems.append(f"{_name(page.url, url)}: {problem}")

    def check_request(address: str) -> None:
        if not address.startswith((url, "data:", "blob:")):
            record(f"request to another host: {address}")

    page.on("console", lambda message: record(f"console: {message.text}") if message.type == "error" else None)
    page.on("pageerror", lambda error: record(f"error: {error}"))
    page.on("request", lambda request: check_request(request.url))
    # A page that is left may still be loading.
    page.on(
        "requestfailed",
        lambda request: record(f"failed: {request.url}") if request.failure != "net::ERR_ABORTED" else None,
    )
    page.on(
        "response",
        lambda response: record(f"status {response.status}: {response.url}") if response.status >= 400 else None,
    )


def _check_page(page: Page, address: str, url: str, found: Findings) -> None:
    from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 844})
        if width == WIDTHS[0]:
            page.goto(address, wait_until="load")
        try:
            # The menu moves for a moment after the width has changed.
            page.wait_for_function(FITS, arg=width, timeout=3000)
        except PlaywrightTimeoutError:
            needed = page.evaluate(READ_WIDTH)
            found.problems.append(f"{_name(address, url)}: {needed} pixels wide on a screen of {width}")
    read = page.evaluate(READ_PAGE)
    found.ids[address] = set(read["ids"])
    found.links[address] = read["links"]
    found.problems += [f"{_name(address, url)}: no image: {image}" for image in read["broken"]]


def search(page: Page, url: str, query: str) -> list[str]:
    """Type a query into the search of the start page, and return the pages of the results, best first."""
    page.goto(url, wait_until="load")
    page.locator(".md-search__input").fill(query)
    # The first results are of the words that are typed so far; the number above them changes last.
    result = page.locator(".md-search-result__item > a").first
    result.wait_for(state="attached", timeout=20_000)
    page.wait_for_timeout(300)
    links = page.locator(".md-search-result__item > a").evaluate_all("all => all.map(one => one.href)")
    return [urldefrag(link).url.partition("?")[0].removeprefix(url) for link in links]


def check_search(browser: Browser, url: str) -> list[str]:
    """Search for what readers look for, and return one line for each query whose first result is another page."""
    problems = []
    page = browser.new_page(viewport={"width": WIDTHS[1], "height": 844})
    for query, expected in QUERIES.items():
        found = search(page, url, query)
        if found[0] != expected:
            place = f"result {found.index(expected) + 1}" if expected in found else "not among the results"
            problems.append(f"search for {query!r}: first /{found[0]}; expected /{expected}, which is {place}")
    page.close()
    return problems


def read_brightness(page: Page) -> float:
    """Return the brightness of the page's background, from 0 (black) to 255."""
    return page.evaluate(
        "() => getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3)"
        ".reduce((sum, value) => sum + Number(value) / 3, 0)"
    )


def switch_to_dark(page: Page) -> None:
    """Press the button of the color scheme until the page is dark."""
    for _ in range(3):
        if read_brightness(page) < 80:
            return
        page.locator("label[for^=__palette]:visible").click()
        page.wait_for_timeout(400)


def check_dark_mode(browser: Browser, url: str) -> list[str]:
    """Switch to the dark mode and reload; return one line for each problem."""
    problems = []
    page = browser.new_page(viewport={"width": WIDTHS[1], "height": 844}, color_scheme="light")
    page.goto(url, wait_until="load")
    if read_brightness(page) < 180:
        problems.append("dark mode: the page is dark before it is switched")
    switch_to_dark(page)
    page.goto(url + "memory/", wait_until="load")
    page.wait_for_timeout(400)
    if read_brightness(page) > 80:
        problems.append("dark mode: the next page is light again")
    page.close()
    return problems


def take_pictures(browser: Browser, url: str, folder: Path) -> None:
    """Write pictures of the start page, of a page on a phone, and of the dark mode."""
    page = browser.new_page(viewport={"width": WIDTHS[1], "height": 800}, color_scheme="light")
    page.goto(url, wait_until="load")
    _write_picture(page, folder / "site_start.png")
    page.goto(url + "finetune/", wait_until="load")
    switch_to_dark(page)
    _write_picture(page, folder / "site_dark.png")
    page.close()
    page = browser.new_page(viewport={"width": WIDTHS[0], "height": 800}, color_scheme="light")
    page.goto(url + "plan/", wait_until="load")
    _write_picture(page, folder / "site_phone.png")
    page.close()


def _write_picture(page: Page, file: Path) -> None:
    """Write what the window shows, in 64 colors, as a text page needs no more."""
    import io

    from PIL import Image

    page.wait_for_timeout(400)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    image.quantize(64).save(file, optimize=True)


def main(argv: list[str] | None = None) -> int:
    """Check the site, and return 1 if anything is broken, or 2 if it cannot be checked."""
    parser = argparse.ArgumentParser(prog="python -m tools.site_check", description="Check the built site in Chromium.")
    parser.add_argument("--site", type=Path, default=SITE, help="folder of the site")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="folder for pictures of the site")
    args = parser.parse_args(argv)
    if not (args.site / "index.html").is_file():
        print(f"error: --site={args.site}: no index.html; build the site with `make docs`", file=sys.stderr)
        return 2
    if args.pictures is not None and not args.pictures.is_dir():
        print(f"error: --pictures={args.pictures}: no such folder", file=sys.stderr)
        return 2
    try:
        with serve(args.site) as url, open_browser() as browser:
            pages = list_pages(args.site, url)
            problems = [
                *check_pages(browser, args.site, url),
                *check_search(browser, url),
                *check_dark_mode(browser, url),
            ]
            if args.pictures is not None:
                take_pictures(browser, url, args.pictures)
    except ModuleNotFoundError as error:
        print(f"error: {error}; pip install -e '.[docs-check]'", file=sys.stderr)
        return 2
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"{len(pages)} pages, {len(QUERIES)} searches: {len(problems) or 'no'} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
