"""Plimsoll, the library: `import framework as pl`, then `pl.train`, `pl.load`, `pl.plan` (docs/python.md).

Imports no named configs and no verbs, and nothing at all before it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.api.configs import load_config
    from framework.api.function_plans import plan_function
    from framework.api.model import Model, load
    from framework.api.plans import Plan, plan
    from framework.api.runs import TrainedRun, train
    from framework.checkpoint.checkpointer import Checkpointer
    from framework.config import Config, ConfigError, component, config_for
    from framework.functions.checkpoints import restore, save, steps
    from framework.functions.coupling import additive_coupling
    from framework.functions.reconstruction import reconstruction_error
    from framework.functions.reversible import reversible_scan
    from framework.program.program import Program
    from framework.run.job import RunError

__all__ = [
    "Checkpointer",
    "Config",
    "ConfigError",
    "Model",
    "Plan",
    "Program",
    "RunError",
    "TrainedRun",
    "additive_coupling",
    "component",
    "config_for",
    "load",
    "load_config",
    "plan",
    "plan_function",
    "reconstruction_error",
    "restore",
    "reversible_scan",
    "save",
    "steps",
    "train",
]

# {name: module that has it}
_MODULES = {
    "Checkpointer": "framework.checkpoint.checkpointer",
    "Config": "framework.config",
    "ConfigError": "framework.config",
    "Model": "framework.api.model",
    "Plan": "framework.api.plans",
    "Program": "framework.program.program",
    "RunError": "framework.run.job",
    "TrainedRun": "framework.api.runs",
    "additive_coupling": "framework.functions.coupling",
    "component": "framework.config",
    "config_for": "framework.config",
    "load": "framework.api.model",
    "load_config": "framework.api.configs",
    "plan": "framework.api.plans",
    "plan_function": "framework.api.function_plans",
    "reconstruction_error": "framework.functions.reconstruction",
    "restore": "framework.functions.checkpoints",
    "reversible_scan": "framework.functions.reversible",
    "save": "framework.functions.checkpoints",
    "steps": "framework.functions.checkpoints",
    "train": "framework.api.runs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_MODULES[name])
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
