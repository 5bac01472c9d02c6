"""`import framework`, the name of this package before the first release, as a deprecated alias of `plimsoll`."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import plimsoll


class _Finder:
    """Imports `framework.x` as `plimsoll.framework.x`."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for names in `framework`, None for others; see `importlib.abc.MetaPathFinder`."""
        return ModuleSpec(name, self) if name.startswith("framework.") else None  # pyright: ignore[reportArgumentType]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of the new name; see `importlib.abc.Loader`."""
        module = importlib.import_module(f"plimsoll.{spec.name}")
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's spec, which Python has overwritten; the module itself has been executed already."""
        module.__spec__ = self._specs[module.__name__.removeprefix("plimsoll.")]


def alias_framework() -> None:
    """Make `framework` an alias of `plimsoll`, and `framework.x` one of `plimsoll.framework.x`. Warn once."""
    sys.meta_path.insert(0, _Finder())  # pyright: ignore[reportArgumentType]
    sys.modules["framework"] = plimsoll
    warnings.warn("`import framework` is deprecated; use `import plimsoll`", FutureWarning, stacklevel=5)
