"""What a run will need, told before it starts: see docs/plan.md.

The room itself can be called: `import framework as pl; pl.plan(config, target="v5e-8")` is `framework.api.plans.plan`.
Python gives a package the name of each of its packages that is imported, so no function of `framework` could have that
name for long.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """A package that can be called."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Calls framework.api.plans.plan, and returns its Plan."""
        # By its name, when it is called: that module is of a room above this one.
        return importlib.import_module("framework.api.plans").plan(*arguments, **options)


sys.modules[__name__].__class__ = _Room
