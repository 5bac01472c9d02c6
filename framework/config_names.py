"""Errors of the config system, and the dotted names of classes and functions. Imports nothing of Plimsoll.

A saved config and the command line are data from outside, so a name is resolved, running nothing on the way, only if
1. this process's own code has called `config_for` on that very object (a user's config file did), or
2. the name lies in a trusted package, and the object that it leads to is *defined* there: `framework.x.os.system`, a
   re-export, is refused. No module outside the trusted packages is ever imported for a name.
"""

import difflib
import importlib
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

# Where names may lead. What they lead to must be defined in the same distribution, private modules included.
TRUSTED = ("framework", "configs", "optax", "jax.nn")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+\Z")
# What config_for was called on in this process, by name: how a user's own classes become loadable.
_configured: dict[str, Any] = {}


class ConfigError(ValueError):
    """A mistake in a config, in one line: what was expected, what was given, the nearest valid choice. `path`: dotted
    path of what is at fault, "" for the whole config."""

    def __init__(self, message: str, *, path: str = ""):
        super().__init__(message)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.args[0]}" if self.path else self.args[0]


class FieldError(ConfigError, AttributeError, KeyError):
    """A name that the constructor does not take, a path that leads nowhere, or a required field that was never set:
    also what code that probes a Config expects."""


class FieldTypeError(ConfigError, TypeError):
    """A value of the wrong type; one of the right type that is out of range is a plain ConfigError."""


def join(path: str, name: Any) -> str:
    """The dotted path of `name` under `path`; the root's path is ""."""
    return f"{path}.{name}" if path else str(name)


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
    return name in _configured or bool(_DOTTED.match(name) and name.startswith(tuple(f"{one}." for one in TRUSTED)))


def resolve(name: Any, path: str = "") -> Any:
    """The class or function of a dotted name. Raises ConfigError at `path`: it is refused, or not there."""
    if not isinstance(name, str) or not is_trusted(name):
        raise ConfigError(
            f"{name!r} is refused: names resolve only inside {', '.join(TRUSTED)}, or to what your own config file "
            "configures (give it as --config=path/to/file.py:NAME)",
            path=path,
        )
    if name in _configured:
        return _configured[name]
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)  # `framework.x.os` is an attribute and no module: not imported
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; one that it imports is not
        raise ConfigError(f"{name!r} does not exist: no module {error.name!r}", path=path) from None
    found = getattr(module, attribute, None)
    if found is None:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"{name!r} does not exist{did_you_mean(attribute, public)}", path=path)
    prefix = next(prefix for prefix in TRUSTED if name.startswith(f"{prefix}."))
    home = (getattr(found, "__module__", None) or "").partition(".")[0]
    if attribute.startswith("_") or not hasattr(found, "__qualname__") or home != prefix.partition(".")[0]:
        why = f"it is not a public class or function defined in {prefix}"
        raise ConfigError(f"{name!r} is refused: {why}", path=path)
    return found
