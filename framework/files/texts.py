"""Texts and JSON that are read from files, whole and to the byte."""

import json
from pathlib import Path
from typing import Any


def read_text(path: str | Path, *, may_be_empty: bool = False) -> str:
    """A file's text, to the byte. Raises ValueError where it is empty (unless it may be) or not UTF-8,
    FileNotFoundError if it is not there."""
    try:
        text = Path(path).expanduser().read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from None
    if not text and not may_be_empty:
        raise ValueError(f"{path} is empty")
    return text


def parse_json(text: str | bytes | bytearray, **options: Any) -> Any:
    """What a JSON text says; `options` are those of json.loads.

    Raises:
        ValueError: it is not JSON, or nested more deeply than Python can read.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
