"""Pairs of answers made of the standard library's source: text that every machine has, to try preferences with."""

from __future__ import annotations

from collections.abc import Iterator

from framework.data.comparisons import Judged

# Raise this when a change of this file changes the pairs: their tokens are kept by it.
LIBRARY_PAIRS_VERSION = 1
# Lines of code of a prompt, and of its answers.
_PROMPT_LINES = 3
_ANSWER_LINES = 3
# Characters that a prompt with an answer has at most: longer ones are rare, and would be cut in a short row.
_MAX_CHARACTERS = 400


def pairs_of_code(text: str) -> Iterator[Judged]:
    """Yields, along a file of Python, a prompt of a few lines, the lines behind it as chosen, and a rejected answer.

    The rejected answer has the same lines with the words of each in the opposite order. So both have the same letters
    and lengths, and only their order tells which one a person wrote.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    size = _PROMPT_LINES + _ANSWER_LINES
    for start in range(0, len(lines) - size + 1, size):
        answer_start = start + _PROMPT_LINES
        pair = _pair(lines[start:answer_start], lines[answer_start : start + size])
        if pair is not None:
            yield pair


def _pair(prompt_lines: list[str], answer_lines: list[str]) -> Judged | None:
    """The pair of these lines; None where they are too long, or where most lines are the same in any order."""
    prompt = "\n".join(prompt_lines) + "\n"
    chosen = "\n".join(answer_lines)
    if len(prompt) + len(chosen) > _MAX_CHARACTERS:
        return None
    reversed_lines = [_reversed_words(line) for line in answer_lines]
    changed = [line for line, reversed_line in zip(answer_lines, reversed_lines, strict=True) if line != reversed_line]
    if len(changed) < len(answer_lines) - 1:
        return None
    return Judged(prompt, [("chosen", chosen), ("rejected", "\n".join(reversed_lines))])


def _reversed_words(line: str) -> str:
    """A line with its words in the opposite order; its indentation stays."""
    words = line.split()
    indentation = line[: len(line) - len(line.lstrip())]
    return indentation + " ".join(reversed(words))
