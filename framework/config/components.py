"""Components are the classes and functions to which a name in a file may lead.

A component describes a part of an experiment: a layer, a model, a data source, a tokenizer, the
learner, an optimizer, a schedule, an initializer. Building one computes and remembers; it reads
and writes no file, starts no process and opens no connection. What loads, writes, launches or
exports is no component, so no file can name it.

- Of Plimsoll: what is marked with `@component` where it is defined. A subclass is marked itself,
  or is none.
- Of optax: functions that return a transformation or a schedule, by their return annotation.
- Of jax.nn: functions that return an initializer; and, as objects that are passed and not called
  here, its functions of arrays (`jax.nn.gelu`).
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Target = TypeVar("Target", bound=Callable[..., Any])
_MARK = "_marked_component"
# Code in these packages needs the mark, whoever configured it in this process.
OURS = ("framework", "configs", "launch", "tools")
# The modules of other packages in which names are looked up. They are imported anyway, so a name
# imports nothing new.
OPTAX = ("optax", "optax.contrib", "optax.schedules", "optax.transforms")
INITIALIZERS = "jax.nn.initializers"
FUNCTIONS = "jax.nn"
# Functions of optax that return a transformation, and are not annotated. The code of each was read,
# in optax 0.2.8.
_NOT_ANNOTATED = {
    "monitor",
    "scale_by_factored_rms",
    "dog",
    "dowg",
    "hutchinson_estimator_diag_hessian",
}


def component(target: Target) -> Target:
    """Marks a component: data from outside may name the class or function, with any arguments."""
    # The mark is the object itself: a subclass inherits it and functools.wraps copies it, and
    # neither is then marked.
    setattr(target, _MARK, target)
    return target


def is_component(target: Any) -> bool:
    """Tells whether this very class or function is marked."""
    if not callable(target):
        return False
    attributes = getattr(target, "__dict__", {})
    return attributes.get(_MARK) is target


def is_ours(target: Any) -> bool:
    """Tells whether a class or function is defined in a package of Plimsoll."""
    return _package(target) in OURS


def foreign_component(module_name: str, target: Any) -> bool:
    """Tells whether an object in a module of optax or jax.nn is a component.

    It is if it is a function that returns an optimizer, a schedule or an initializer.
    """
    package = module_name.partition(".")[0]
    if not _is_public_function(target, package):
        return False
    annotation = _return_annotation(target)
    # Imported here, as a config alone needs neither jax nor optax, and mistakes in it are told
    # before either is imported.
    if module_name == INITIALIZERS:
        return annotation is importlib.import_module(INITIALIZERS).Initializer
    if module_name not in OPTAX:
        return False
    optax = importlib.import_module("optax")
    if isinstance(annotation, type) and issubclass(annotation, optax.GradientTransformation):
        return True
    return annotation == optax.Schedule or target.__name__ in _NOT_ANNOTATED


def foreign_function(module_name: str, target: Any) -> bool:
    """Tells whether an object of jax.nn may be passed without being called.

    It may if it is a function of arrays, or an initializer itself (`jax.nn.initializers.zeros`).
    """
    if module_name == INITIALIZERS:
        # The other initializers of that module are functions that return one.
        is_listed = getattr(target, "__name__", "") in ("zeros", "ones")
    else:
        is_listed = module_name == FUNCTIONS
    return is_listed and _is_public_function(target, "jax")


def _is_public_function(target: Any, package: str) -> bool:
    if isinstance(target, type) or not callable(target):
        return False
    return hasattr(target, "__qualname__") and _package(target) == package


def _package(target: Any) -> str:
    """Returns the package in which an object says that it is defined; "" if it does not say."""
    module_name = getattr(target, "__module__", None) or ""
    return module_name.partition(".")[0]


def _return_annotation(function: Callable[..., Any]) -> Any:
    """Returns the return annotation; None where it cannot be read."""
    try:
        return inspect.signature(function, eval_str=True).return_annotation
    except (TypeError, ValueError, NameError):
        return None
