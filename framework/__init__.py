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
    from framework.functions.eager import eager, eager_weights
    from framework.functions.eager_scan import eager_scan
    from framework.functions.stream import stream
    from framework.functions.trained import Trained
    from framework.functions.value_and_update import value_and_update
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
    "Trained",
    "TrainedRun",
    "component",
    "config_for",
    "eager",
    "eager_scan",
    "eager_weights",
    "load",
    "load_config",
    "plan",
    "plan_function",
    "stream",
    "train",
    "value_and_update",
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
    "Trained": "framework.functions.trained",
    "TrainedRun": "framework.api.runs",
    "component": "framework.config",
    "config_for": "framework.config",
    "eager": "framework.functions.eager",
    "eager_scan": "framework.functions.eager_scan",
    "eager_weights": "framework.functions.eager",
    "load": "framework.api.model",
    "load_config": "framework.api.configs",
    "plan": "framework.api.plans",
    "plan_function": "framework.api.function_plans",
    "stream": "framework.functions.stream",
    "train": "framework.api.runs",
    "value_and_update": "framework.functions.value_and_update",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_MODULES[name])
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
