"""Which packages a process of Plimsoll's own means by `framework`, `configs` and `launch`: those that are side by side.

The folder where a verb is started, and those of PYTHONPATH, come first when Python looks for a package, and may hold
others of these names. A program that imports Plimsoll keeps Python's order.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_NAMES = ("framework", "configs", "launch")
_FOLDER = str(Path(__file__).resolve().parent.parent)


class _Finder:
    """Finds these packages, and leaves everything else to others."""

    @staticmethod
    def find_spec(
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """The spec of a package of ours, None for any other module; see `importlib.abc.MetaPathFinder`."""
        if name not in _NAMES:
            return None
        return PathFinder.find_spec(name, [_FOLDER], target)


def insist() -> None:
    """Makes this process find the packages beside this one under their names. It may be called again."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
