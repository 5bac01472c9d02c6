"""Plimsoll: config-driven training of large models on JAX. `import plimsoll as pl`; see docs/python.md.

Everything that a user's program or component needs is here: the verbs (`pl.train`, `pl.load`, `pl.plan`), the base
classes (`pl.Layer`, `pl.Hook`, ...), and every component by its name (`pl.RMSNorm`, `pl.TextFiles`, `pl.muon`). A
name is imported when it is first used, so `import plimsoll` is fast and starts nothing.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# The only place that states the version: pyproject.toml reads this line, without importing the package.
__version__ = "0.1.0"

# In a checkout, this folder has links to framework, configs and launch. A copy without links finds them next to it.
if not os.path.isdir(os.path.join(__path__[0], "framework")):
    __path__.append(os.path.dirname(__path__[0]))

# For type checkers and editors. At run time, `__getattr__` imports a name when it is first used.
# ruff: noqa: F401
if TYPE_CHECKING:
    from plimsoll.api.configs import load_config
    from plimsoll.api.function_plans import plan_function
    from plimsoll.api.ladder import Ladder
    from plimsoll.api.model import Model, load
    from plimsoll.api.plans import Plan, plan
    from plimsoll.api.runs import TrainedRun, train
    from plimsoll.extras.flows.base import Bijection, Invertible, sum_each
    from plimsoll.extras.flows.image_source import ImageSource
    from plimsoll.extras.functions.additive_coupling import additive_coupling
    from plimsoll.extras.functions.check_frozen import FrozenBufferError, check_frozen
    from plimsoll.extras.functions.checkpoints import restore, save, steps
    from plimsoll.extras.functions.eager import eager, eager_weights
    from plimsoll.extras.functions.eager_scan import eager_scan
    from plimsoll.extras.functions.leaf_selection import Partition, combine, differentiate, partition
    from plimsoll.extras.functions.lora_adapters import (
        Adapter,
        QuantizedMatrix,
        lora_init,
        lora_merge,
        lora_quantize,
        lora_unmerge,
    )
    from plimsoll.extras.functions.lora_interpreter import AdapterError
    from plimsoll.extras.functions.reversible_scan import reconstruction_error, reversible_scan
    from plimsoll.extras.functions.stream import stream
    from plimsoll.extras.functions.trained_weights import Trained
    from plimsoll.extras.functions.value_and_update import value_and_update
    from plimsoll.extras.functions.with_lora import with_lora
    from plimsoll.extras.scaling.mup import apply_mup, widen
    from plimsoll.framework.checkpoint.checkpointer import Checkpointer
    from plimsoll.framework.checkpoint.directory import describe_checkpoints
    from plimsoll.framework.config import (
        Config,
        ConfigError,
        DType,
        Fraction,
        NonNegativeFloat,
        NonNegativeInt,
        PositiveFloat,
        PositiveInt,
        Probability,
        component,
        config_for,
        diff,
    )
    from plimsoll.framework.data.files import DataFile
    from plimsoll.framework.data.sources import DataSource
    from plimsoll.framework.families.decoders import llama_model, mixture
    from plimsoll.framework.families.published import find_published_model
    from plimsoll.framework.inference.generation import Generator, stream_text
    from plimsoll.framework.inference.sampling import Sampling
    from plimsoll.framework.layers.base import Layer
    from plimsoll.framework.layers.objective import Objective
    from plimsoll.framework.layout import ParameterSpec, copy_partition
    from plimsoll.framework.optimizers.schedule_steps import RunSteps, TrainingSteps
    from plimsoll.framework.program.program import Program
    from plimsoll.framework.run.hooks import Hook
    from plimsoll.framework.run.request import RunError

# {module: public names in it}. Components are not listed: `find_components` finds them.
_EXPORTS = {
    "plimsoll.api.configs": ("load_config",),
    "plimsoll.api.function_plans": ("plan_function",),
    "plimsoll.api.ladder": ("Ladder",),
    "plimsoll.api.model": ("Model", "load"),
    "plimsoll.api.plans": ("Plan", "plan"),
    "plimsoll.api.runs": ("TrainedRun", "train"),
    "plimsoll.framework.checkpoint.checkpointer": ("Checkpointer",),
    "plimsoll.framework.checkpoint.directory": ("describe_checkpoints",),
    "plimsoll.framework.config": (
        "Config",
        "ConfigError",
        "DType",
        "Fraction",
        "NonNegativeFloat",
        "NonNegativeInt",
        "PositiveFloat",
        "PositiveInt",
        "Probability",
        "component",
        "config_for",
        "diff",
    ),
    "plimsoll.framework.data.files": ("DataFile",),
    "plimsoll.extras.flows.image_source": ("ImageSource",),
    "plimsoll.framework.data.sources": ("DataSource",),
    "plimsoll.framework.families.decoders": ("llama_model", "mixture"),
    "plimsoll.framework.families.published": ("find_published_model",),
    "plimsoll.extras.functions.additive_coupling": ("additive_coupling",),
    "plimsoll.extras.functions.check_frozen": ("FrozenBufferError", "check_frozen"),
    "plimsoll.extras.functions.checkpoints": ("restore", "save", "steps"),
    "plimsoll.extras.functions.eager": ("eager", "eager_weights"),
    "plimsoll.extras.functions.eager_scan": ("eager_scan",),
    "plimsoll.extras.functions.leaf_selection": ("Partition", "combine", "differentiate", "partition"),
    "plimsoll.extras.functions.lora_adapters": (
        "Adapter",
        "QuantizedMatrix",
        "lora_init",
        "lora_merge",
        "lora_quantize",
        "lora_unmerge",
    ),
    "plimsoll.extras.functions.lora_interpreter": ("AdapterError",),
    "plimsoll.extras.functions.reversible_scan": ("reconstruction_error", "reversible_scan"),
    "plimsoll.extras.functions.stream": ("stream",),
    "plimsoll.extras.functions.trained_weights": ("Trained",),
    "plimsoll.extras.functions.value_and_update": ("value_and_update",),
    "plimsoll.extras.functions.with_lora": ("with_lora",),
    "plimsoll.extras.scaling.mup": ("apply_mup", "widen"),
    "plimsoll.framework.inference.generation": ("Generator", "stream_text"),
    "plimsoll.framework.inference.sampling": ("Sampling",),
    "plimsoll.framework.layers.base": ("Layer",),
    "plimsoll.extras.flows.base": ("Bijection", "Invertible", "sum_each"),
    "plimsoll.framework.layers.objective": ("Objective",),
    "plimsoll.framework.layout": ("ParameterSpec", "copy_partition"),
    "plimsoll.framework.optimizers.schedule_steps": ("RunSteps", "TrainingSteps"),
    "plimsoll.framework.program.program": ("Program",),
    "plimsoll.framework.run.hooks": ("Hook",),
    "plimsoll.framework.run.request": ("RunError",),
}
_SUBMODULES = ("api", "configs", "extras", "framework", "launch", "old_imports")
_MODULE_BY_NAME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = ["__version__", *_MODULE_BY_NAME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    module_name = _MODULE_BY_NAME.get(name)
    # Python asks for dunder names of every module, and for a submodule before it imports it. Neither is a component,
    # and finding components takes 40 ms.
    if module_name is None and not name.startswith("_") and name not in _SUBMODULES:
        from plimsoll.framework.config.components import find_components

        module_name = find_components().get(name)
    if module_name is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module_name), name)


def __dir__() -> list[str]:
    from plimsoll.framework.config.components import find_components

    return sorted({*globals(), *__all__, *find_components()})
