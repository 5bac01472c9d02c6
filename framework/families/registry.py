"""All families of published models: the modules of this package are searched, so that a family is one file."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from plimsoll.framework.weights.family import ModelFamily


def _find_families() -> list[type[ModelFamily]]:
    """Return the families that the modules of this package define, in the order of the modules' names."""
    package = __name__.rpartition(".")[0]
    families = []
    for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        module = importlib.import_module(f"{package}.{info.name}")
        for value in vars(module).values():
            is_own = isinstance(value, type) and value.__module__ == module.__name__
            if is_own and issubclass(value, ModelFamily) and value.architectures:
                families.append(value)
    return families


FAMILIES: list[type[ModelFamily]] = _find_families()
