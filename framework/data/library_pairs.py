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
        answer_lines = lines[start + _PROMPT_LINES : start + size]
        prompt = "\n".join(lines[start : start + _PROMPT_LINES]) + "\n"
        chosen = "\n".join(answer_lines)
        if len(prompt) + len(chosen) > _MAX_CHARACTERS:
            continue
        reversed_lines = []
        for line in answer_lines:
            indentation = line[: len(line) - len(line.lstrip())]
            reversed_lines.append(indentation + " ".join(reversed(line.split())))
        num_changed = sum(line != other for line, other in zip(answer_lines, reversed_lines, strict=True))
        # At most one line may be the same when reversed.
        if num_changed >= len(answer_lines) - 1:
            yield LabeledAnswers(prompt, [("chosen", chosen), ("rejected", "\n".join(reversed_lines))])
