"""Texts that are read from files, whole and to the byte."""

from pathlib import Path


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
