"""Preference pairs made from the standard library's source code, which every machine has, to try out preferences."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.framework.data.preference_formats import LabeledAnswers

# Increase this when a change to this file changes the pairs: cached tokens depend on it.
LIBRARY_PAIRS_VERSION = 1
# Number of lines of code in a prompt and in each answer.
_PROMPT_LINES = 3
_ANSWER_LINES = 3
# Maximum characters of a prompt with an answer: longer ones are rare, and would be truncated in a short row.
_MAX_CHARACTERS = 400


def make_pairs(text: str) -> Iterator[LabeledAnswers]:
    """Yields pairs from a Python file: a prompt of a few lines, the next lines as the chosen answer, a rejected one.

    The rejected answer has the same lines with the words of each in reverse order. So both answers have the same
    characters and lengths, and only word order distinguishes the original.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    size = _PROMPT_LINES + _ANSWER_LINES
    for start in range(0, len(lines) - size + 1, size):
        answer_start = start + _PROMPT_LINES
        pair = _pair(lines[start:answer_start], lines[answer_start : start + size])
        if pair is not None:
            yield pair


def _pair(prompt_lines: list[str], answer_lines: list[str]) -> LabeledAnswers | None:
    """Returns the pair of these lines; None if too long, or if more than one line is the same when reversed."""
    prompt = "\n".join(prompt_lines) + "\n"
    chosen = "\n".join(answer_lines)
    if len(prompt) + len(chosen) > _MAX_CHARACTERS:
        return None
    reversed_lines = [_reverse_words(line) for line in answer_lines]
    changed = [line for line, reversed_line in zip(answer_lines, reversed_lines, strict=True) if line != reversed_line]
    if len(changed) < len(answer_lines) - 1:
        return None
    return LabeledAnswers(prompt, [("chosen", chosen), ("rejected", "\n".join(reversed_lines))])


def _reverse_words(line: str) -> str:
    """Reverses the words of a line; its indentation stays."""
    words = line.split()
    indentation = line[: len(line) - len(line.lstrip())]
    return indentation + " ".join(reversed(words))
