"""The commands shown on documentation pages, and the lines that record when and where they were run.

A block of commands is a fenced block with at least one line that starts a program. In a block with prompts (`$ `), the
other lines are the output of the commands.
"""

import re
from dataclasses import dataclass

from tests.support.runs import ROOT

PAGES = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
_FENCE = re.compile(r"^ *```(\w*)$")
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ +)*(?:\.venv/bin/)?(?:plimsoll|python|pytest|make|pip|docker|git|echo|printf) ")
_DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
_VERSION = re.compile(r"\b(?:jax|Python) \d")
_MACHINE = re.compile(r"\b(?:cores?|CPUs?|GPUs?|TPUs?|libtpu|H[12]00s?|devices?|compiler|accelerator)\b")
_NOT_RUN = re.compile(r"\bNot run\b[^.]*(?::|, | )[^.]*\bneeds? ")
_RUN_BY_TEST = re.compile(r"\bRun by `(tests/[\w/]+\.py)`")


@dataclass(frozen=True)
class CommandBlock:
    """A block of commands on a page.

    Attributes:
        page: path of the page in the repository.
        line: number of the block's first line, from 1.
        commands: whole commands, including their continuation lines.
        printed: output lines between the prompts.
        context: paragraphs before and after the block, and the first paragraph of its section.
    """

    page: str
    line: int
    commands: tuple[str, ...]
    printed: tuple[str, ...]
    context: tuple[str, ...]

    def record(self) -> str | None:
        """Return the paragraph that records when and where the commands were run, or why not; None if there is none."""
        for paragraph in self.context:
            test = _RUN_BY_TEST.search(paragraph)
            is_dated = all(pattern.search(paragraph) for pattern in (_DATE, _VERSION, _MACHINE))
            if is_dated or _NOT_RUN.search(paragraph) or (test and (ROOT / test[1]).is_file()):
                return paragraph
        return None


def blocks(page: str, text: str | None = None) -> list[CommandBlock]:
    """Return the blocks of commands of a page, in order; `text` replaces the content of its file."""
    lines = (ROOT / page).read_text().splitlines() if text is None else text.splitlines()
    is_code = _code_lines(lines)
    return [
        block
        for start, end in _find_fenced_blocks(lines)
        if lines[start - 1].strip() != "```python"
        if (block := _block(page, lines, is_code, start, end)).commands
    ]


def python_block(page: str, content: str) -> str:
    """Return the only Python block of a page that contains `content`."""
    lines = (ROOT / page).read_text().splitlines()
    texts = ["\n".join(lines[start:end]) + "\n" for start, end in _find_fenced_blocks(lines)]
    (text,) = [text for text in texts if content in text]
    return text


def text_lines(page: str) -> list[str]:
    """Return the lines of a page's `text` blocks that show no command."""
    lines = (ROOT / page).read_text().splitlines()
    contents = [lines[start:end] for start, end in _find_fenced_blocks(lines) if lines[start - 1].strip() == "```text"]
    return [line for content in contents if not content[0].startswith("$ ") for line in content]


def _find_fenced_blocks(lines: list[str]) -> list[tuple[int, int]]:
    """Return (first line, line after the last) of each fenced block, from 0, without the fences."""
    fences = [index for index, line in enumerate(lines) if _FENCE.match(line)]
    return [(start + 1, end) for start, end in zip(fences[::2], fences[1::2], strict=True)]


def _code_lines(lines: list[str]) -> set[int]:
    return {index for start, end in _find_fenced_blocks(lines) for index in range(start - 1, end + 1)}


def _block(page: str, lines: list[str], is_code: set[int], start: int, end: int) -> CommandBlock:
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
    context = (*before[-1:], *after[:1], *before[:1])
    return CommandBlock(page, start + 1, tuple(commands), tuple(printed), context)


def _script(content: list[str]) -> tuple[list[str], list[str]]:
    """Split a script into commands; a heredoc stays with its command. There is no output."""
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
    """Split a terminal session into commands and output lines."""
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
    """Return the paragraphs of a part of a page, including blocks of code."""
    return [text for text in re.split(r"\n\s*\n", "\n".join(lines)) if text.strip()]
