"""Command-line text read by a field's type hint. Nothing is evaluated: JSON, Python literals, and plain words.

Imports `framework.config_types`. Dotted class names are read in `framework.config`, which knows what may be resolved.
"""

import ast
import json
import re
import typing
from typing import Annotated, Any, Literal

from framework.config_errors import Mismatch
from framework.config_types import DICTS, LISTS, arms, convert_arm, element_hint, first_fit, split

_INTEGER = re.compile(r"[+-]?\d+(_\d+)*\Z")
# What settles the question goes first. `str` takes anything, so it goes last, but for Any, which guesses.
_ORDER = {Literal: 0, type(None): 1, bool: 2, int: 3, float: 4, str: 8, Any: 9}
_OTHER = 6


def parse_text(hint: Any, text: str) -> Any:
    """The value that `text` stands for under this hint.

    int: `12`, `1_000`; float: `3e-4`, `inf`; bool: `true`, `false`; None: `none`; text: as it is, or quoted;
    list, tuple and dict: JSON, a Python literal, or `a,b,c`.

    Raises:
        Mismatch: no reading of the text fits.
    """
    choices = sorted(arms(hint), key=lambda arm: _ORDER.get(split(_bare(arm))[0], _OTHER))
    return first_fit(hint, text, [lambda arm=arm: convert_arm(arm, _read(_bare(arm), text)) for arm in choices])


def _bare(arm: Any) -> Any:
    while typing.get_origin(arm) is Annotated:
        arm = typing.get_args(arm)[0]
    return arm


def _read(arm: Any, text: str) -> Any:
    """The natural value of `text` for one alternative; the text itself when there is none (the check then fails)."""
    base, args = split(arm)
    if base is Literal:
        return next((choice for choice in args if _same(choice, text)), text)
    if base is type(None):
        return None if text.lower() in ("none", "null") else text
    if base is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if base is int:
        return int(text) if _INTEGER.match(text) else text
    if base is float:
        try:
            return float(text)
        except ValueError:
            return text
    if base is str:
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'"
        return text[1:-1] if quoted else text
    if base in LISTS or base is tuple:
        value = literal(text)
        if isinstance(value, list | tuple):
            return value
        parts = [part.strip() for part in text.split(",")] if text else []
        return [_read_element(element_hint(arm, str(index)), part) for index, part in enumerate(parts)]
    return literal(text) if base in DICTS or arm is Any else text


def _same(choice: Any, text: str) -> bool:
    return str(choice) == text or (not isinstance(choice, str) and str(choice).lower() == text.lower())


def _read_element(hint: Any, text: str) -> Any:
    try:
        return parse_text(hint, text)
    except Mismatch:
        return text  # the check of the whole list then says which element it is


def literal(text: str) -> Any:
    """JSON, else a Python literal, else none/true/false in any case, else the text itself."""
    words = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue  # not of that form; the last form is the text itself
    return text
