"""The commands that the pages of the documentation show: found, run as they are written, or recorded as run.

A block of commands is a fenced block with at least one line that starts a program. In a block with prompts (`$ `) the
other lines are what the commands print.
"""

import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.runs import ROOT

PAGES = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
# What commands of the pages name in a checkout.
_OF_A_CHECKOUT = (
    *("Makefile", "constraints.txt", "pyproject.toml", "README.md"),
    *("configs", "docs", "framework", "launch", "tests", "tools"),
)
_FENCE = re.compile(r"^ *```(\w*)$")
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ +)*(?:\.venv/bin/)?(?:plimsoll|python|pytest|make|pip|docker|git|echo|printf) ")
_DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
_VERSION = re.compile(r"\b(?:jax|Python) \d")
_MACHINE = re.compile(r"\b(?:cores?|CPUs?|GPUs?|TPUs?|libtpu|H[12]00s?|devices?|compiler|accelerator)\b")
_NOT_RUN = re.compile(r"\bNot run\b[^.]*(?::|, | )[^.]*\bneeds? ")
_RUN_BY_TEST = re.compile(r"\bRun by `(tests/[\w/]+\.py)`")


@dataclass(frozen=True)
class Block:
    """A block of commands on a page.

    Attributes:
        page: its path in the repository. line: the number of its first line, from 1.
        commands: whole commands, with their continuation lines joined.
        printed: the lines between prompts.
        beside: the paragraphs before and after the block, and the one that opens its section.
    """

    page: str
    line: int
    commands: tuple[str, ...]
    printed: tuple[str, ...]
    beside: tuple[str, ...]

    def record(self) -> str | None:
        """The paragraph that says who ran the commands, with what, or why nobody has; None: there is none."""
        for paragraph in self.beside:
            test = _RUN_BY_TEST.search(paragraph)
            is_dated = all(pattern.search(paragraph) for pattern in (_DATE, _VERSION, _MACHINE))
            if is_dated or _NOT_RUN.search(paragraph) or (test and (ROOT / test[1]).is_file()):
                return paragraph
        return None


def blocks(page: str, text: str | None = None) -> list[Block]:
    """The blocks of commands of a page, in order; `text` instead of what its file holds."""
    lines = (ROOT / page).read_text().splitlines() if text is None else text.splitlines()
    is_code = _code_lines(lines)
    return [
        block
        for start, end in _fenced(lines)
        if lines[start - 1].strip() != "```python"
        if (block := _block(page, lines, is_code, start, end)).commands
    ]


def python_block(page: str, content: str) -> str:
    """The Python block of a page that holds `content`."""
    lines = (ROOT / page).read_text().splitlines()
    texts = ["\n".join(lines[start:end]) + "\n" for start, end in _fenced(lines)]
    (text,) = [text for text in texts if content in text]
    return text


def text_lines(page: str) -> list[str]:
    """The lines of a page's blocks of kind `text` that show no command."""
    lines = (ROOT / page).read_text().splitlines()
    contents = [lines[start:end] for start, end in _fenced(lines) if lines[start - 1].strip() == "```text"]
    return [line for content in contents if not content[0].startswith("$ ") for line in content]


def _fenced(lines: list[str]) -> list[tuple[int, int]]:
    """(first line, line after the last) of each fenced block, from 0, without the fences."""
    fences = [index for index, line in enumerate(lines) if _FENCE.match(line)]
    return [(start + 1, end) for start, end in zip(fences[::2], fences[1::2], strict=True)]


def _code_lines(lines: list[str]) -> set[int]:
    return {index for start, end in _fenced(lines) for index in range(start - 1, end + 1)}


def _block(page: str, lines: list[str], is_code: set[int], start: int, end: int) -> Block:
    content = lines[start:end]
    has_prompts = any(line.startswith("$ ") for line in content)
    commands, printed = (_dialogue if has_prompts else _script)(content)
    if not any(_COMMAND.match(command) for command in commands):
        commands = []
    headings = [index for index, line in enumerate(lines) if line.startswith("#") and index not in is_code]
    heading = max((index for index in headings if index < start), default=-1)
    section_end = min((index for index in headings if index > start), default=len(lines))
    before = _paragraphs(lines[heading + 1 : start - 1])
    after = _paragraphs(lines[end + 1 : section_end])
    beside = (*before[-1:], *after[:1], *before[:1])
    return Block(page, start + 1, tuple(commands), tuple(printed), beside)


def _script(content: list[str]) -> tuple[list[str], list[str]]:
    """The block is a script. A heredoc stays in one piece with its command."""
    commands: list[str] = []
    ending = None
    is_open = False
    for line in content:
        if is_open or ending:
            commands[-1] += "\n" + line
        elif line.strip():
            commands.append(line)
        else:
            continue
        if ending is None and (heredoc := re.search(r"<<'?(\w+)'?", line)):
            ending = heredoc[1]
        elif line == ending:
            ending = None
        is_open = line.endswith("\\")
    return commands, []


def _dialogue(content: list[str]) -> tuple[list[str], list[str]]:
    """The block is what a terminal showed."""
    commands, printed = [], []
    is_open = False
    for line in content:
        if is_open:
            commands[-1] += "\n" + line
        elif line.startswith("$ "):
            commands.append(line[2:])
        elif line.strip() not in ("", "..."):
            printed.append(line)
        is_open = (is_open or line.startswith("$ ")) and line.endswith("\\")
    return commands, printed


def _paragraphs(lines: list[str]) -> list[str]:
    """The paragraphs of a stretch of a page, blocks of code among them."""
    return [text for text in re.split(r"\n\s*\n", "\n".join(lines)) if text.strip()]


@dataclass(frozen=True)
class Recipe:
    """How a test runs blocks of a page: as they are written, in order, in one folder, but for what is replaced.

    Attributes:
        page: its path. blocks: how the first command of each begins.
        replaced: text of the commands -> what is run in its place: fewer steps, a folder for DIR. Each must occur.
        setup: commands before them, for what the reader has already. after: commands that run the page's Python.
        files: file of the folder -> a line of the page's Python block that it holds.
        prints: patterns of what the commands print.
        has_outputs: what the blocks show between prompts, and the page's blocks of kind `text`, is printed too, but for
            numbers of spaces.
        fails: the commands end with an exit code other than 0.
    """

    page: str
    blocks: tuple[str, ...]
    replaced: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    prints: tuple[str, ...] = ()
    has_outputs: bool = False
    fails: bool = False

    def found(self) -> list[Block]:
        """The blocks on the page. Raises LookupError: it has none that begins so."""
        chosen = []
        for start in self.blocks:
            matching = [block for block in blocks(self.page) if block.commands[0].startswith(start)]
            exact = [block for block in matching if block.commands[0] == start]
            if len(exact or matching) != 1:
                raise LookupError(f"{self.page} has {len(matching)} blocks that begin with {start!r}")
            chosen += exact or matching
        return sorted(chosen, key=lambda block: block.line)

    def commands(self) -> list[str]:
        """What is run. Raises LookupError: the commands do not hold a text that is to be replaced."""
        commands = [command for block in self.found() for command in block.commands]
        for old, new in self.replaced.items():
            if not any(old in command for command in commands):
                raise LookupError(f"no command of {self.page} holds {old!r}")
            commands = [command.replace(old, new) for command in commands]
        return commands

    def lay_out(self, folder: Path) -> None:
        """Writes the files of the page into the folder, beside links to what a checkout has."""
        for name in _OF_A_CHECKOUT:
            (folder / name).symlink_to(ROOT / name)
        for name, line in self.files.items():
            (folder / name).write_text(python_block(self.page, line))

    def check(self, printed: str) -> None:
        """Asserts that the commands have printed what they should."""
        for pattern in self.prints:
            assert re.search(pattern, printed), f"{pattern!r} is not in\n{printed}"
        if self.has_outputs:
            squeezed = re.sub(r" +", " ", printed)
            for line in self._outputs():
                assert re.sub(r" +", " ", line).split("; ...")[0] in squeezed, f"{line!r} is not in\n{printed}"

    def _outputs(self) -> list[str]:
        found = self.found()
        printed = [line for block in found for line in block.printed]
        return printed or text_lines(self.page)


def run_here(recipe: Recipe) -> None:
    """Runs the commands in this process, which shares the imports: no pipes, no setup."""
    printed = io.StringIO()
    for command in recipe.commands():
        program, *words = shlex.split(command.replace("\\\n", " "), comments=True)
        if program == "plimsoll":
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                code = importlib.import_module(f"launch.{words[0]}").main(words[1:])
        else:
            program = sys.executable if program == "python" else program
            code = subprocess.run([program, *words], check=False).returncode
        assert (code != 0) == recipe.fails, f"{command}: exit code {code}\n{printed.getvalue()}"
    recipe.check(printed.getvalue())


def run_in_shell(recipe: Recipe, folder: Path) -> None:
    """Runs the commands as a shell does, in processes of their own with one CPU device."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "",
        "JAX_PLATFORMS": "cpu",
    }
    printed = ""
    # Each command has a shell of its own, so that a failure names the command. A reader of stdin finds it empty.
    for command in (*recipe.setup, *recipe.commands(), *recipe.after):
        words = ["bash", "-o", "pipefail", "-c", command]
        done = subprocess.run(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        printed += done.stdout
        assert (done.returncode != 0) == recipe.fails, f"{command}: exit code {done.returncode}\n{done.stdout}"
    recipe.check(printed)
