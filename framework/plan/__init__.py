"""Predicts the memory and time of a run before it starts; see docs/plan.md.

The package itself is callable: `import framework as pl; pl.plan(config, target="v5e-8")` calls
`framework.api.plans.plan`. Importing a subpackage binds its name in the parent package, so a function named `plan` in
`framework` would be overwritten as soon as this package is imported.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """A callable package."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call framework.api.plans.plan and return its Plan."""
        # Imported by name at call time, because that module belongs to a higher layer, which imports this one.
        return importlib.import_module("framework.api.plans").plan(*arguments, **options)


sys.modules[__name__].__class__ = _Room
