"""Dotted names of classes and functions: the name of an object, and the object of a name, running nothing on the way.

A saved config and the command line are data from outside, so a name is resolved only if
1. this process's own code has called `config_for` on that very object (a user's config file did), or
2. the name lies in a trusted package, and the object that it leads to is *defined* there: `framework.x.os.system`, a
   re-export, is refused. No module outside the trusted packages is ever imported for a name.
Imports `framework.config_errors`.
"""

import importlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

from framework.config_errors import ConfigError, UntrustedNameError, did_you_mean, show

# Where names may lead. What they lead to must be defined in the same distribution, private modules included.
TRUSTED = ("framework", "configs", "optax", "jax.nn")

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
# What config_for was called on in this process, by name: how a user's own classes become loadable.
_configured: dict[str, Any] = {}


def remember(target: Callable[..., Any]) -> None:
    """Notes that this process's own code configures `target`.

    Raises:
        ConfigError: it has no name to store: a lambda, a partial, an object that happens to be callable.
    """
    name = getattr(target, "__qualname__", None)
    if not callable(target) or not name or "<lambda>" in name or not target.__module__:
        raise ConfigError(f"config_for expects a class or a named function, given {show(target)}")
    _configured[name_of(target)] = target


def name_of(target: Callable[..., Any]) -> str:
    """The dotted name: where it is defined, or the shortest public name of what a private module defines."""
    module, name = target.__module__, target.__qualname__
    parts = module.split(".")
    if any(part.startswith("_") for part in parts[1:]):
        public = [part for part in parts if not part.startswith("_")]
        for end in range(1, len(public) + 1):
            prefix = ".".join(public[:end])
            if getattr(sys.modules.get(prefix), name, None) is target:
                return f"{prefix}.{name}"
    return f"{module}.{name}"


def is_name(text: str) -> bool:
    """Whether text has the form of a name, dotted or not."""
    return bool(_NAME.match(text))


def is_trusted(name: str) -> bool:
    """Whether a dotted name could be resolved at all, going by its first parts."""
    return name in _configured or any(name.startswith(f"{prefix}.") for prefix in TRUSTED)


def resolve(name: Any) -> Any:
    """The class or function of a dotted name.

    Raises:
        UntrustedNameError: no dotted name, outside of the trusted packages, not there, or defined elsewhere.
    """
    if isinstance(name, str) and name in _configured:
        return _configured[name]
    if not isinstance(name, str) or not is_name(name):
        raise UntrustedNameError(f"expected the dotted name of a class or function, given {show(name)}")
    if not is_trusted(name):
        raise UntrustedNameError(
            f"{name!r} is refused: names resolve only inside {', '.join(TRUSTED)}, or to what your own config file "
            "configures (give it as --config=path/to/file.py:NAME)"
        )
    prefix = next(prefix for prefix in TRUSTED if name.startswith(f"{prefix}."))
    module_name, _, attribute = name.rpartition(".")
    module = _import(module_name, name)
    found = getattr(module, attribute, None)
    if found is None:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UntrustedNameError(f"{name!r} does not exist{did_you_mean(attribute, public)}")
    home = f"{getattr(found, '__module__', None) or ''}."
    if (
        attribute.startswith("_")
        or not hasattr(found, "__qualname__")
        or not home.startswith(f"{prefix.split('.')[0]}.")
    ):
        raise UntrustedNameError(f"{name!r} is refused: it is not a public class or function defined in {prefix}")
    return found


def resolve_beside(name: str, bare: str) -> Any:
    """The class or function that is called `bare` in the module of `name`, or in a package around that module.

    Raises:
        UntrustedNameError: there is none; the error with the nearest name that any of them has.
    """
    errors = []
    module = name.rpartition(".")[0]
    while module:
        try:
            return resolve(f"{module}.{bare}")
        except UntrustedNameError as error:
            errors.append(error)
        module = module.rpartition(".")[0]
    raise next((error for error in errors if "did you mean" in str(error)), errors[0])


def _import(module_name: str, name: str) -> types.ModuleType:
    """Imports a module of a trusted package. `framework.x.os` is an attribute and no module, so it does not import."""
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; one that it imports is not
        parent = error.name.rpartition(".")[0]
        siblings = [key for key in sys.modules if key.rpartition(".")[0] == parent]
        hint = did_you_mean(error.name, siblings)
        raise UntrustedNameError(f"{name!r} does not exist: no module {error.name!r}{hint}") from None
