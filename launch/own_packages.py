"""Makes a Plimsoll process import `framework`, `configs` and `launch` from the folder that contains this package.

The folder where a verb is started, and those in PYTHONPATH, come first in Python's search path, and may contain other
packages with these names. A program that imports Plimsoll keeps Python's order.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_NAMES = ("framework", "configs", "launch")
_FOLDER = str(Path(__file__).resolve().parent.parent)


class _Finder:
    """Finds these packages, and leaves all other modules to other finders."""

    @staticmethod
    def find_spec(
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of one of our packages, None for any other module; see `importlib.abc.MetaPathFinder`."""
        if name not in _NAMES:
            return None
        return PathFinder.find_spec(name, [_FOLDER], target)


def insist() -> None:
    """Make this process import the packages next to this one. May be called repeatedly."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
