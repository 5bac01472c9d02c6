"""Errors of the config system, and the dotted names of classes and functions.

A saved config and the command line are data from outside, so a name is resolved, running nothing on the way, only if
1. it names a component of Plimsoll, optax or jax.nn (`framework.config.components` says which those are), or
2. this process's own code has called `config_for` on that very object (a user's config file did), and it is not
   Plimsoll's: what is no component there stays out of reach, whoever has configured it.
No module outside those packages is ever imported for a name.
"""

import difflib
import importlib
import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from framework.config.components import (
    FUNCTIONS,
    INITIALIZERS,
    OPTAX,
    OURS,
    foreign_component,
    foreign_function,
    is_component,
    is_ours,
)

# Where names may lead.
TRUSTED = ("framework", "configs", "optax", "jax.nn")
# {name that an older config, checkpoint or exported directory has: today's}
RENAMED = {
    "framework.compiler.Compiler": "framework.devices.compiler.Compiler",
    "framework.experiment.AcceleratorRule": "framework.program.experiment.AcceleratorRule",
    "framework.experiment.Experiment": "framework.program.experiment.Experiment",
    "framework.health.Health": "framework.processes.health.Health",
    "framework.learner.Learner": "framework.learner.learner.Learner",
    "framework.learner.Rule": "framework.learner.rules.Rule",
    "framework.memory.Memory": "framework.schedules.memory.Memory",
    "framework.mesh.MeshShape": "framework.devices.mesh.MeshShape",
    "framework.pretrained.Pretrained": "framework.weights.pretrained.Pretrained",
    "framework.rules.Rule": "framework.learner.rules.Rule",
    "framework.trainer_options.TrainerOptions": "framework.program.options.TrainerOptions",
}
# Public names alone: no part begins with an underscore.
_DOTTED = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+\Z", re.ASCII)
_LONGEST = 200  # characters of a name; importlib goes into a name of many parts recursively
# What config_for was called on in this process, by name: how a user's own classes become loadable.
_configured: dict[str, Any] = {}


class ConfigError(ValueError):
    """A mistake in a config, in one line: what was expected, what was given, the nearest valid choice. `path`: dotted
    path of what is at fault, "" for the whole config."""

    def __init__(self, message: str, *, path: str = ""):
        super().__init__(message)
        self.path = path

    def __str__(self) -> str:
        return f"{printable(self.path)}: {self.args[0]}" if self.path else self.args[0]


class FieldError(ConfigError, AttributeError, KeyError):
    """A name that the constructor does not take, a path that leads nowhere, or a required field that was never set:
    also what code that probes a Config expects."""


class FieldTypeError(ConfigError, TypeError):
    """A value of the wrong type; one of the right type that is out of range is a plain ConfigError."""


def join(path: str, name: Any) -> str:
    """The dotted path of `name` under `path`; the root's path is ""."""
    return f"{path}.{name}" if path else str(name)


def printable(text: str) -> str:
    """A text that came from outside, for a terminal: one line of at most 200 characters, without control sequences."""
    cut = text if len(text) <= 200 else f"{text[:197]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def show(value: Any) -> str:
    """A value as it stands in an error: its repr, cut at 80 characters, and its type."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def nearest(name: str, names: Iterable[str], count: int = 1) -> list[str]:
    """The closest of `names`, best first; empty when nothing is close."""
    by_lower = {one.lower(): one for one in names}
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), list(by_lower), count, 0.6)]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error: `; did you mean 'x'?`, else all valid names when they are few, else nothing."""
    names = list(names)
    close = nearest(name, names)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid: {', '.join(names)}" if 0 < len(names) <= 40 else ""


def remember(target: Callable[..., Any]) -> None:
    """Notes that this process's own code configures `target`. Lambdas and partials have no name and are refused."""
    name = getattr(target, "__qualname__", None)
    if not callable(target) or not name or "<lambda>" in name or not target.__module__:
        raise ConfigError(f"config_for expects a class or a named function, given {show(target)}")
    _configured[name_of(target)] = target


def name_of(target: Callable[..., Any]) -> str:
    """The dotted name: where it is defined, or the shortest public name of what a private module defines."""
    module, name = target.__module__, target.__qualname__
    if "._" in module:
        public = [part for part in module.split(".") if not part.startswith("_")]
        for end in range(1, len(public) + 1):
            prefix = ".".join(public[:end])
            if getattr(sys.modules.get(prefix), name, None) is target:
                return f"{prefix}.{name}"
    return f"{module}.{name}"


def is_trusted(name: str) -> bool:
    """Whether a text could be resolved at all, going by its form and first parts."""
    is_dotted = len(name) <= _LONGEST and _DOTTED.match(name) is not None
    return name in _configured or (is_dotted and name.startswith(tuple(f"{one}." for one in TRUSTED)))


def resolve(name: Any, path: str = "", *, passed: bool = False) -> Any:
    """The component of a dotted name. Raises ConfigError at `path`: it is refused, or not there.

    Args:
        name: as it stands in a file or on the command line.
        path: what an error names.
        passed: the object itself is handed on and not called here, so that functions of arrays will do (`jax.nn.gelu`).
    """
    if not isinstance(name, str) or not is_trusted(name):
        shown = show(name).removesuffix(" (str)")
        raise ConfigError(
            f"{shown} is refused: names resolve only inside {', '.join(TRUSTED)}, or to what your own config file "
            "configures (give it as --config=path/to/file.py:NAME)",
            path=path,
        )
    if name in _configured and not is_ours(_configured[name]):
        return _configured[name]
    name = RENAMED.get(name, name)
    module_name, _, attribute = name.rpartition(".")
    module = _module(name, module_name, path)
    known = vars(module)
    if attribute in known and _may_be_named(module_name, known[attribute], passed):
        return known[attribute]
    hint = did_you_mean(attribute, [key for key, value in known.items() if _may_be_named(module_name, value, passed)])
    if attribute not in known:
        raise ConfigError(f"{name!r} does not exist{hint}", path=path)
    raise ConfigError(f"{name!r} is refused: it is no component (see docs/configs.md){hint}", path=path)


def _may_be_named(module_name: str, target: Any, passed: bool) -> bool:
    if module_name.partition(".")[0] in OURS:
        return is_component(target)
    is_function = passed and foreign_function(module_name, target)
    return is_function or foreign_component(module_name, target)


def _module(name: str, module_name: str, path: str) -> ModuleType:
    """The module that a name begins with; of other packages only the few that `framework.config.components` lists."""
    foreign = (*OPTAX, INITIALIZERS, FUNCTIONS)
    if module_name.partition(".")[0] not in OURS and module_name not in foreign:
        raise ConfigError(f"{name!r} is refused: of other packages names resolve in {', '.join(foreign)}", path=path)
    try:
        return importlib.import_module(module_name)  # `framework.x.os` is an attribute and no module: not imported
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; one that it imports is not
        raise ConfigError(f"{name!r} does not exist: no module {error.name!r}", path=path) from None
