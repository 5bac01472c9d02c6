"""What a name that stands in a file may lead to: a component.

A component describes a part of an experiment: a layer, a model, a data source, a tokenizer, the learner, an optimizer,
a schedule, an initializer. Building one computes and remembers; it reads and writes no file, starts no process and
opens no connection. What loads, writes, launches or exports is no component, so no file can name it.

- Of Plimsoll: what is marked with `@component` where it is defined. A subclass is marked itself, or is none.
- Of optax: functions that return a transformation or a schedule, by their return annotation.
- Of jax.nn: functions that return an initializer; and, as objects that are passed and not called here, its functions
  of arrays (`jax.nn.gelu`).
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Target = TypeVar("Target", bound=Callable[..., Any])
_MARK = "_marked_component"
# What is defined below these needs the mark, whoever configured it in this process.
OURS = ("framework", "configs", "launch", "tools")
# The modules of other packages in which names are looked up. They are imported anyway, so a name imports nothing new.
OPTAX = ("optax", "optax.contrib", "optax.schedules", "optax.transforms")
INITIALIZERS = "jax.nn.initializers"
FUNCTIONS = "jax.nn"
# Functions of optax that return a transformation, and are not annotated: each was read, in optax 0.2.8.
_NOT_ANNOTATED = {"monitor", "scale_by_factored_rms", "dog", "dowg", "hutchinson_estimator_diag_hessian"}


def component(target: Target) -> Target:
    """Marks a class or function as a component: data from outside may name it, with arguments of its choice."""
    # The mark is the object itself: a subclass inherits it and functools.wraps copies it, and neither is then marked.
    setattr(target, _MARK, target)
    return target


def is_component(target: Any) -> bool:
    """Whether this very class or function is marked."""
    return callable(target) and getattr(target, "__dict__", {}).get(_MARK) is target


def is_ours(target: Any) -> bool:
    """Whether a class or function is defined in a package of Plimsoll."""
    return (getattr(target, "__module__", None) or "").partition(".")[0] in OURS


def foreign_component(module_name: str, target: Any) -> bool:
    """Whether what a module of optax or jax.nn holds is a function that returns an optimizer, a schedule or an
    initializer."""
    if not _is_public_function(target, module_name.partition(".")[0]):
        return False
    returned = _returned(target)
    if module_name == INITIALIZERS:
        return returned is importlib.import_module(INITIALIZERS).Initializer
    if module_name not in OPTAX:
        return False
    optax = importlib.import_module("optax")
    is_transformation = isinstance(returned, type) and issubclass(returned, optax.GradientTransformation)
    return is_transformation or returned == optax.Schedule or target.__name__ in _NOT_ANNOTATED


def foreign_function(module_name: str, target: Any) -> bool:
    """Whether it is a function of arrays of jax.nn, or an initializer itself (`jax.nn.initializers.zeros`)."""
    is_initializer = module_name == INITIALIZERS and getattr(target, "__name__", "") in ("zeros", "ones")
    return (module_name == FUNCTIONS or is_initializer) and _is_public_function(target, "jax")


def _is_public_function(target: Any, package: str) -> bool:
    if isinstance(target, type) or not callable(target) or not hasattr(target, "__qualname__"):
        return False
    return (getattr(target, "__module__", None) or "").partition(".")[0] == package


def _returned(function: Callable[..., Any]) -> Any:
    """The return annotation; None where it cannot be read."""
    try:
        return inspect.signature(function, eval_str=True).return_annotation
    except (TypeError, ValueError, NameError):
        return None
