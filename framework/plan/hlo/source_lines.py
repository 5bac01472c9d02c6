"""Finds the line of Python that an instruction comes from.

XLA writes it in one of two ways. In jax 0.10 and later, there are tables at the top of the text (file names, locations
in files, and frames with a location and a caller), and instructions have `stack_frame_id=7`. In earlier versions, and
if the tables are switched off, instructions have `source_file="..." source_line=78`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_FILE = re.compile(r'(\d+) "(.*)"')
_LOCATION = re.compile(r"(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)")
_FRAME = re.compile(r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
_INLINE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_LIBRARY = ("/site-packages/", "/dist-packages/")


class SourceLine(NamedTuple):
    """A file and a line number in it, counted from 1."""

    file: str
    line: int


class _Frame(NamedTuple):
    location: SourceLine
    caller: int


class Sources:
    """The source tables of one program."""

    def __init__(self, lines: list[str]):
        """Read the tables from the lines before the first computation."""
        files: dict[int, str] = {}
        locations: dict[int, SourceLine] = {}
        frames: dict[int, _Frame] = {}
        table = ""
        for line in lines:
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = line
            elif table == "FileNames" and (match := _FILE.match(line)):
                files[int(match[1])] = match[2]
            elif table == "FileLocations" and (match := _LOCATION.match(line)):
                file = files.get(int(match[2]), "")
                locations[int(match[1])] = SourceLine(file, int(match[3]))
            elif table == "StackFrames" and (match := _FRAME.match(line)):
                location = locations.get(int(match[2]), SourceLine("", 0))
                frames[int(match[1])] = _Frame(location, int(match[3] or 0))
        # The first frame has no caller. If it names itself, XLA counts callers from 1 and frames from 0, so callers
        # need a shift.
        shift = 1 if 1 in frames and frames[1].caller == 1 else 0
        self._frames: dict[int, _Frame] = {}
        for number, frame in frames.items():
            self._frames[number] = _Frame(frame.location, frame.caller - shift)

    def find_line(self, attributes: str) -> SourceLine | None:
        """Return the innermost line outside installed packages, or else the innermost line; None if unknown.

        Args:
            attributes: text of the instruction's attributes.
        """
        if inline := _INLINE.search(attributes):
            return SourceLine(inline[1], int(inline[2] or 0))
        frame_id = _FRAME_ID.search(attributes)
        number = int(frame_id[1]) if frame_id else 0
        innermost = None
        # Guard against a cycle of callers in the table.
        visited: set[int] = set()
        while number in self._frames and number not in visited:
            visited.add(number)
            frame = self._frames[number]
            innermost = innermost or frame.location
            if not any(folder in frame.location.file for folder in _LIBRARY):
                return frame.location
            number = frame.caller
        return innermost
