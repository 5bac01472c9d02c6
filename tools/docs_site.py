"""Hooks of mkdocs.yml: pages of the site that are not in docs/, and links that lead out of docs/.

README.md, CONTRIBUTING.md, CHANGELOG.md and SECURITY.md become pages. The reference is written from docstrings: the
commands, all that `plimsoll` exports, and all components. So a name that is added to the package is on the site.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import plimsoll
from plimsoll import launch
from plimsoll.framework.config.components import find_components
from plimsoll.launch.__main__ import verbs

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# {page of the site: file of the checkout}
MOVED = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}
BENCHMARKS = "benchmarks/index.md"
# {beginning of a page's path: weight of its words in the search}. Pages that explain come before lists of names and
# numbers, and before pages for fewer readers. A word in a heading weighs 1,000 times as much as one in the text, so the
# smallest weights are those of pages with many names as headings.
SEARCH_WEIGHTS = {
    "benchmarks/": 0.1,
    "changelog": 0.1,
    "coming_from/": 0.2,
    "faults": 0.5,
    "functions_": 0.0005,
    "glossary": 0.5,
    "reference/": 0.0005,
}
# {page: words that lead to it before any other page, whatever the headings are}.
SEARCH_WORDS = {
    "checkpoints.md": ["resume"],
    "finetune.md": ["LoRA", "QLoRA"],
    "generate.md": ["inference"],
    "memory.md": ["OOM", "out of memory"],
    "optimizers.md": ["cosine", "warmup"],
    "parallelism.md": ["FSDP", "tensor parallel"],
}
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)
_ITEM = re.compile(r"(?:[-*]|\d+\.) +")
_FILE_NAME = re.compile(r"[\w./]+\.md")
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)\s#]*)(#[^)\s]*)?\)")


def write_pages() -> dict[str, str]:
    """Return {page: its Markdown} of the pages that are not in docs/."""
    pages = {page: (ROOT / file).read_text(encoding="utf-8") for page, file in MOVED.items()}
    # The header of the site has the logo.
    pages["index.md"] = pages["index.md"][pages["index.md"].index("# ") :]
    # Benchmarks are linked as a folder.
    lines = ["# Benchmarks", ""]
    for file in sorted((ROOT / "docs" / "benchmarks").glob("*.md")):
        title = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({file.name})")
    pages[BENCHMARKS] = "\n".join(lines) + "\n"
    pages["reference/commands.md"] = _write_commands()
    by_page: dict[str, list[str]] = {"python": [], "functions": [], "extending": []}
    for name in plimsoll.__all__:
        if name != "__version__":
            module = _find_module(name)
            page = "python" if module.startswith("plimsoll.api.") else "extending"
            by_page["functions" if module.startswith("plimsoll.extras.functions.") else page].append(name)
    pages["reference/python.md"] = "# Python\n\n`import plimsoll as pl`. [python.md](../python.md) has examples.\n\n"
    pages["reference/functions.md"] = "# Functions for your own program\n\n`import plimsoll as pl`.\n\n"
    pages["reference/extending.md"] = (
        "# Base classes and types\n\nWhat your own components derive from and use; see "
        "[architecture.md](../architecture.md).\n\n"
    )
    for page, names in by_page.items():
        pages[f"reference/{page}.md"] += "\n".join(_write_entry(name) for name in names)
    pages["reference/components.md"] = _write_components()
    return pages


def _find_module(name: str) -> str:
    """Return the module that a public name of `plimsoll` comes from."""
    return plimsoll._MODULE_BY_NAME.get(name) or find_components()[name]


def _write_entry(name: str) -> str:
    """Return the directive that mkdocstrings replaces by the documentation of a public name."""
    return f"::: {_find_module(name)}.{name}\n    options:\n      heading: pl.{name}\n      toc_label: {name}\n"


def _write_components() -> str:
    """Return the page of all components, by package."""
    names_by_package: dict[str, list[str]] = {}
    for name, module in sorted(find_components().items()):
        package = module.split(".")[2]
        names_by_package.setdefault(package, []).append(name)
    text = "# Components\n\nWhat a config can name: `--config.model.norm=RMSNorm`, or `pl.RMSNorm` in Python.\n"
    for package, names in sorted(names_by_package.items()):
        title = package.replace("_", " ").capitalize()
        text += f"\n## {title}\n\n" + "\n".join(_write_entry(name) for name in names)
    return text


def _write_commands() -> str:
    """Return the page of all commands, from the docstrings of their modules."""
    text = "# Commands\n\n`plimsoll COMMAND --help` shows the flags of a command.\n"
    for verb in verbs():
        source = Path(launch.__path__[0], f"{verb}.py").read_text(encoding="utf-8")
        doc = ast.get_docstring(ast.parse(source)) or ""
        # In a docstring, an indented block is code, as in Markdown.
        text += f"\n## plimsoll {verb}\n\n{doc}\n"
    return text


def rewrite(markdown: str, source: str, repository: str, labels: Mapping[str, str] | None = None) -> str:
    """Return a page as the site shows it.

    Links to moved pages lead to them; links to other files of the checkout lead to the repository, or are plain text
    if its URL is unknown. A link whose text is a file's name gets the page's label instead. A list or a table may
    follow a paragraph without an empty line, as on GitHub.

    Args:
        markdown: the page's text.
        source: path of the page's file in the checkout.
        repository: URL of the repository, or empty.
        labels: {page: its label in the navigation}, for some pages.
    """
    page_by_file = {file: page for page, file in MOVED.items()}
    here = page_by_file.get(source, source.removeprefix("docs/"))

    def replace(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if file == "docs/benchmarks":
            page = BENCHMARKS
        elif file.startswith("docs/"):
            page = file.removeprefix("docs/")
        elif file in page_by_file:
            page = page_by_file[file]
        elif repository:
            return f"[{text}]({repository.rstrip('/')}/blob/main/{file}{anchor})"
        else:
            return text
        if _FILE_NAME.fullmatch(text):
            text = (labels or {}).get(page, text)
        return f"[{text}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor})"

    def rewrite_prose(prose: str) -> str:
        prose = re.sub(r"^((?!\s*(?:[-*|]|\d+\.) ?)\S[^\n]*\n)(?=(?:[-*] |1\. |\|))", r"\1\n", prose, flags=re.M)
        return _LINK.sub(replace, prose)

    return "".join(_map_prose(_indent_lists(markdown), rewrite_prose))


def _indent_lists(markdown: str) -> str:
    """Indent the contents of list items by four spaces, which the site's Markdown needs; on GitHub, two or three do."""
    lines = []
    width = 0  # of the marker of the item that a line may belong to; 0 outside of lists
    fenced = False
    has_paragraphs = False  # that item
    previous = ""
    for line in markdown.splitlines(keepends=True):
        marker = _ITEM.match(line)
        if line.startswith("```") or fenced:
            # Fences of list items are indented.
            fenced ^= line.startswith("```")
            width = 0
        elif marker is not None:
            # After an item of several paragraphs, the next one needs an empty line too.
            if has_paragraphs and previous.strip():
                lines.append("\n")
            width = len(marker[0])
            has_paragraphs = False
        elif line.strip() and not line.startswith(" ") and not previous.strip():
            width = 0
        is_content = width > 0 and line.startswith(" " * width) and not fenced
        has_paragraphs |= is_content and not previous.strip()
        lines.append("    " + line[width:] if is_content else line)
        previous = line
    return "".join(lines)


def _map_prose(markdown: str, change: Callable[[str], str]) -> Iterator[str]:
    """Yield the parts of a page in order: fenced blocks unchanged, and what `change` makes of the text between them."""
    end = 0
    for fence in _FENCE.finditer(markdown):
        yield change(markdown[end : fence.start()])
        yield fence[0]
        end = fence.end()
    yield change(markdown[end:])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for page, markdown in write_pages().items():
        files.append(File.generated(config, page, content=markdown))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite a page's links, and set what the search finds it by."""
    path = page.file.src_uri
    weights = [weight for start, weight in SEARCH_WEIGHTS.items() if path.startswith(start)]
    page.meta["search"] = {"boost": weights[0] if weights else 1}
    if path in SEARCH_WORDS:
        page.meta["tags"] = SEARCH_WORDS[path]
    if path.startswith("reference/") or path == BENCHMARKS:
        return markdown
    return rewrite(markdown, MOVED.get(path, f"docs/{path}"), config.repo_url or "", dict(_list_labels(config.nav)))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Keep the theme from asking the repository's host for its stars: a reader of the site asks no other host."""
    return output.replace(' data-md-component="source"', "")


def _list_labels(entry: Any) -> Iterator[tuple[str, str]]:
    """Yield (page, label) for all pages of the navigation that have a label."""
    if isinstance(entry, list):
        for one in entry:
            yield from _list_labels(one)
    elif isinstance(entry, dict):
        for label, value in entry.items():
            if isinstance(value, str):
                yield value, label
            else:
                yield from _list_labels(value)
