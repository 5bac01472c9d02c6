"""Reads whole texts and JSON from files, without changing a byte."""

import json
from pathlib import Path
from typing import Any


def read_text(path: str | Path, *, may_be_empty: bool = False) -> str:
    """Returns a file's text, byte for byte.

    Args:
        path: the file.
        may_be_empty: accept a file without text.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not UTF-8, or it is empty.
    """
    try:
        text = Path(path).expanduser().read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from None
    if not text and not may_be_empty:
        raise ValueError(f"{path} is empty")
    return text


def parse_json(text: str | bytes | bytearray, **options: Any) -> Any:
    """Parses a JSON text; `options` are those of json.loads.

    Raises:
        ValueError: it is not JSON, or nested more deeply than Python can read.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
