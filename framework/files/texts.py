"""Texts that are read from files, whole and to the byte."""

from pathlib import Path


def read_text(path: str | Path) -> str:
    """A file's text, to the byte. Raises ValueError where it is empty or not UTF-8, FileNotFoundError if not there."""
    try:
        text = Path(path).expanduser().read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from None
    if not text:
        raise ValueError(f"{path} is empty")
    return text
