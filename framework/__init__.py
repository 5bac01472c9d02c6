"""Plimsoll, the library: `import framework as pl`, then `pl.train`, `pl.load`, `pl.plan` (docs/python.md).

Does not import named configs or verbs. Every other import is deferred until a name is used.
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
    from framework.functions.adapters import Adapter, lora_init, lora_merge, lora_unmerge
    from framework.functions.checkpoints import restore, save, steps
    from framework.functions.coupling import additive_coupling
    from framework.functions.eager import eager, eager_weights
    from framework.functions.eager_scan import eager_scan
    from framework.functions.frozen import FrozenBufferError, check_frozen
    from framework.functions.interpreter import AdapterError
    from framework.functions.nf4 import QuantizedMatrix, lora_quantize
    from framework.functions.partition import Partition, combine, differentiate, partition
    from framework.functions.reconstruction import reconstruction_error
    from framework.functions.reversible import reversible_scan
    from framework.functions.stream import stream
    from framework.functions.trained import Trained
    from framework.functions.value_and_update import value_and_update
    from framework.functions.with_lora import with_lora
    from framework.program.program import Program
    from framework.run.job import RunError

__all__ = [
    "Adapter",
    "AdapterError",
    "Checkpointer",
    "Config",
    "ConfigError",
    "FrozenBufferError",
    "Model",
    "Partition",
    "Plan",
    "Program",
    "QuantizedMatrix",
    "RunError",
    "Trained",
    "TrainedRun",
    "additive_coupling",
    "check_frozen",
    "combine",
    "component",
    "config_for",
    "differentiate",
    "eager",
    "eager_scan",
    "eager_weights",
    "load",
    "load_config",
    "lora_init",
    "lora_merge",
    "lora_quantize",
    "lora_unmerge",
    "partition",
    "plan",
    "plan_function",
    "reconstruction_error",
    "restore",
    "reversible_scan",
    "save",
    "steps",
    "stream",
    "train",
    "value_and_update",
    "with_lora",
]

# {name: module that has it}
_MODULES = {
    "Adapter": "framework.functions.adapters",
    "AdapterError": "framework.functions.interpreter",
    "Checkpointer": "framework.checkpoint.checkpointer",
    "Config": "framework.config",
    "ConfigError": "framework.config",
    "FrozenBufferError": "framework.functions.frozen",
    "Model": "framework.api.model",
    "Partition": "framework.functions.partition",
    "Plan": "framework.api.plans",
    "Program": "framework.program.program",
    "QuantizedMatrix": "framework.functions.nf4",
    "RunError": "framework.run.job",
    "Trained": "framework.functions.trained",
    "TrainedRun": "framework.api.runs",
    "additive_coupling": "framework.functions.coupling",
    "check_frozen": "framework.functions.frozen",
    "combine": "framework.functions.partition",
    "component": "framework.config",
    "config_for": "framework.config",
    "differentiate": "framework.functions.partition",
    "eager": "framework.functions.eager",
    "eager_scan": "framework.functions.eager_scan",
    "eager_weights": "framework.functions.eager",
    "load": "framework.api.model",
    "load_config": "framework.api.configs",
    "lora_init": "framework.functions.adapters",
    "lora_merge": "framework.functions.adapters",
    "lora_quantize": "framework.functions.nf4",
    "lora_unmerge": "framework.functions.adapters",
    "partition": "framework.functions.partition",
    "plan": "framework.api.plans",
    "plan_function": "framework.api.function_plans",
    "reconstruction_error": "framework.functions.reconstruction",
    "restore": "framework.functions.checkpoints",
    "reversible_scan": "framework.functions.reversible",
    "save": "framework.functions.checkpoints",
    "steps": "framework.functions.checkpoints",
    "stream": "framework.functions.stream",
    "train": "framework.api.runs",
    "value_and_update": "framework.functions.value_and_update",
    "with_lora": "framework.functions.with_lora",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_MODULES[name])
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
