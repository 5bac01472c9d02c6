"""Errors of the config system, and the dotted names of classes and functions.

A saved config and the command line are data from outside, so a name is resolved, running nothing
on the way, only if
1. it names a component of Plimsoll, optax or jax.nn (`framework.config.components` says which
   those are), or
2. this process's own code has called `config_for` on that very object (a user's config file did),
   and it is not Plimsoll's: what is no component there stays out of reach, whoever has configured
   it.
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

# The packages into which names may lead.
TRUSTED = ("framework", "configs", "optax", "jax.nn")
# {name that an older config, checkpoint or exported directory has: today's name}
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
# Characters of a name. importlib goes into a name of many parts recursively, so a long one from a
# file could exhaust the stack.
_LONGEST = 200
# The targets of config_for in this process, by name: this is how a user's own classes become
# loadable.
_configured: dict[str, Any] = {}


class ConfigError(ValueError):
    """A mistake in a config, in one line: expected and given value, the nearest valid choice.

    Args:
        message: the text without the path.
        path: dotted path of the field at fault, "" for the whole config.
    """

    def __init__(self, message: str, *, path: str = ""):
        super().__init__(message)
        self.path = path

    def __str__(self) -> str:
        message = self.args[0]
        if not self.path:
            return message
        # The path may be a text from outside; what is in the message was shown by its repr.
        return f"{printable(self.path)}: {message}"


class FieldError(ConfigError, AttributeError, KeyError):
    """A name that the constructor does not take, a path to nowhere, or an unset required field.

    It is an AttributeError and a KeyError too, since code that probes a Config expects one of
    these.
    """


class FieldTypeError(ConfigError, TypeError):
    """A value of the wrong type; one of the right type, out of range, is a plain ConfigError."""


def join(path: str, name: Any) -> str:
    """Returns the dotted path of `name` under `path`; the root's path is ""."""
    return f"{path}.{name}" if path else str(name)


def printable(text: str) -> str:
    """Makes a text from outside safe for a terminal.

    The result is one line without control sequences, of at most 200 characters of the text.
    """
    cut = text if len(text) <= 200 else f"{text[:197]}..."
    characters = []
    for character in cut:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def show(value: Any) -> str:
    """Returns a value as it stands in an error: its repr, cut at 80 characters, and its type."""
    text = repr(value)
    if len(text) > 80:
        text = f"{text[:77]}..."
    return f"{text} ({type(value).__name__})"


def nearest(name: str, names: Iterable[str], count: int = 1) -> list[str]:
    """Returns the closest of `names`, best first; an empty list when nothing is close."""
    # Lower case, as a name in the wrong case of letters is a near miss.
    name_by_lower = {candidate.lower(): candidate for candidate in names}
    matches = difflib.get_close_matches(name.lower(), list(name_by_lower), count, 0.6)
    return [name_by_lower[match] for match in matches]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns the end of an error: `; did you mean 'x'?`, or all valid names when they are few.

    Where no name is close and there are none or many, it is empty.
    """
    valid_names = list(names)
    close_names = nearest(name, valid_names)
    if close_names:
        return f"; did you mean {close_names[0]!r}?"
    if 0 < len(valid_names) <= 40:
        return f"; valid: {', '.join(valid_names)}"
    return ""


def remember(target: Callable[..., Any]) -> None:
    """Notes that this process's own code configures `target`.

    Raises ConfigError for lambdas and partials, which have no name to store.
    """
    name = getattr(target, "__qualname__", None)
    if not callable(target) or not name or "<lambda>" in name or not target.__module__:
        raise ConfigError(f"config_for expects a class or a named function, given {show(target)}")
    _configured[name_of(target)] = target


def name_of(target: Callable[..., Any]) -> str:
    """Returns the dotted name of a class or function.

    It is where the target is defined, or the shortest public name of what a private module defines.
    """
    module_name = target.__module__
    name = target.__qualname__
    # A saved config outlives the private modules of a package (optax._src.alias), which may move.
    if "._" in module_name:
        public_parts = [part for part in module_name.split(".") if not part.startswith("_")]
        for length in range(1, len(public_parts) + 1):
            prefix = ".".join(public_parts[:length])
            if getattr(sys.modules.get(prefix), name, None) is target:
                return f"{prefix}.{name}"
    return f"{module_name}.{name}"


def is_trusted(name: str) -> bool:
    """Tells whether a text could be resolved at all, going by its form and first parts."""
    if name in _configured:
        return True
    is_dotted = len(name) <= _LONGEST and _DOTTED.match(name) is not None
    prefixes = tuple(f"{package}." for package in TRUSTED)
    return is_dotted and name.startswith(prefixes)


def resolve(name: Any, path: str = "", *, passed: bool = False) -> Any:
    """Returns the component of a dotted name.

    Args:
        name: the name as it stands in a file or on the command line.
        path: the dotted path that an error names.
        passed: the object itself is handed on and not called here, so that functions of arrays will
            do (`jax.nn.gelu`).

    Raises:
        ConfigError: the name is refused, or leads nowhere.
    """
    if not isinstance(name, str) or not is_trusted(name):
        shown = show(name).removesuffix(" (str)")
        packages = ", ".join(TRUSTED)
        message = (
            f"{shown} is refused: names resolve only inside {packages}, or to what your own config "
            "file configures (give it as --config=path/to/file.py:NAME)"
        )
        raise ConfigError(message, path=path)
    if name in _configured and not is_ours(_configured[name]):
        return _configured[name]
    name = RENAMED.get(name, name)
    module_name, _, attribute = name.rpartition(".")
    module = _module(name, module_name, path)
    # vars and not getattr: a module's __getattr__ would run code.
    members = vars(module)
    if attribute in members and _may_be_named(module_name, members[attribute], passed):
        return members[attribute]
    hint = did_you_mean(attribute, choices_in(module, passed))
    if attribute not in members:
        raise ConfigError(f"{name!r} does not exist{hint}", path=path)
    reason = "it is no component (see docs/configs.md)"
    raise ConfigError(f"{name!r} is refused: {reason}{hint}", path=path)


def choices_in(module: ModuleType, passed: bool = False) -> list[str]:
    """Lists the names of a module's members that may be named in a config."""
    return [name for name, value in vars(module).items() if _may_be_named(module.__name__, value, passed)]


def _may_be_named(module_name: str, target: Any, passed: bool) -> bool:
    package = module_name.partition(".")[0]
    if package in OURS:
        return is_component(target)
    is_function = passed and foreign_function(module_name, target)
    return is_function or foreign_component(module_name, target)


def _module(name: str, module_name: str, path: str) -> ModuleType:
    """Imports the module that a name begins with.

    Of other packages there are only the few that `framework.config.components` lists. Raises
    ConfigError.
    """
    package = module_name.partition(".")[0]
    foreign_modules = (*OPTAX, INITIALIZERS, FUNCTIONS)
    if package not in OURS and module_name not in foreign_modules:
        choices = ", ".join(foreign_modules)
        reason = f"of other packages names resolve in {choices}"
        raise ConfigError(f"{name!r} is refused: {reason}", path=path)
    try:
        # `framework.x.os` is an attribute and no module, so this does not import os.
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Where another module is missing, this one exists, and an import in it has failed.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{name!r} does not exist: no module {error.name!r}", path=path) from None
