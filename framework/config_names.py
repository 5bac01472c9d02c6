"""Dotted names of classes and functions: the name of an object, and the object of a name, without running anything on the way.

A saved config and the command line are data from outside, so a name is resolved only if
1. this process's own code has already called `config_for` on that very object (a user's config file did), or
2. the name lies in a trusted package and the object that it leads to is *defined* there: a re-export such as
   `framework.x.os.system` is refused. Modules outside the trusted packages are never imported for a name.
Imports `framework.config_types`.
"""

import enum
import importlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

from framework.config_types import UntrustedNameError, arms, did_you_mean

# name prefix -> where the objects of that prefix must be defined (jax and optax re-export from private modules)
TRUSTED = {
    "framework": ("framework",),
    "configs": ("configs", "framework"),
    "optax": ("optax",),
    "jax.nn": ("jax._src.nn", "jax.nn"),
}
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+\Z")
# Objects that config_for was called on in this process, by name: what makes a user's own classes loadable.
_configured: dict[str, Any] = {}


def remember(target: Callable[..., Any]) -> None:
    """Notes that this process's own code configures `target`."""
    _configured[name_of(target)] = target


def name_of(target: Callable[..., Any]) -> str:
    """The dotted name: where it is defined, or, for what is defined in a private module, the shortest public name."""
    module = getattr(target, "__module__", None) or type(target).__module__
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    parts = module.split(".")
    if any(part.startswith("_") for part in parts[1:]):
        public = [part for part in parts if not part.startswith("_")]
        for end in range(1, len(public) + 1):
            prefix = ".".join(public[:end])
            if getattr(sys.modules.get(prefix), name, None) is target:
                return f"{prefix}.{name}"
    return f"{module}.{name}"


def looks_dotted(text: str) -> bool:
    """Whether text has the form of a dotted name."""
    return bool(_DOTTED.match(text))


def resolve(name: Any) -> Any:
    """The class or function of a dotted name.

    Raises:
        UntrustedNameError: not a dotted name, outside the trusted packages, not there, or defined elsewhere.
    """
    if isinstance(name, str) and name in _configured:
        return _configured[name]
    if not isinstance(name, str) or not looks_dotted(name):
        raise UntrustedNameError(f"expected the dotted name of a class or function, given {name!r}")
    prefix = next((prefix for prefix in TRUSTED if name.startswith(prefix + ".")), None)
    if prefix is None:
        raise UntrustedNameError(
            f"{name!r} is refused: names resolve only inside {', '.join(TRUSTED)}, or to what your own config file configures "
            "(load it with --config=path/to/file.py:NAME)"
        )
    module_name, _, attribute = name.rpartition(".")
    module = _import(module_name, prefix, name)
    found = vars(module).get(attribute)
    if found is None and not hasattr(module, attribute):
        public = [
            f"{module_name}.{key}" for key, value in vars(module).items() if callable(value) and not key.startswith("_")
        ]
        raise UntrustedNameError(f"{name!r} does not exist{did_you_mean(name, public)}")
    found = getattr(module, attribute)
    home = getattr(found, "__module__", None) or ""
    trusted = any(home == root or home.startswith(root + ".") for root in TRUSTED[prefix])
    if isinstance(found, types.ModuleType) or not callable(found) or not trusted or attribute.startswith("_"):
        raise UntrustedNameError(f"{name!r} is refused: it is not a class or function defined in {prefix}")
    return found


def _import(module_name: str, prefix: str, name: str) -> types.ModuleType:
    """Imports a module below a trusted prefix. Only real submodules count: `framework.x.os` is an attribute, not a module."""
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            parent = module_name.rpartition(".")[0]
            names = [key for key in sys.modules if key.startswith(f"{parent}.")]
            raise UntrustedNameError(
                f"{name!r} does not exist: no module {error.name!r}{did_you_mean(module_name, names)}"
            ) from None
        raise
    if module.__name__ != module_name and not module.__name__.startswith(prefix):
        raise UntrustedNameError(f"{name!r} is refused: {module_name!r} is not a module of {prefix}")
    return module


def enum_member(hint: Any, text: str) -> Any:
    """The member that `text` names when the hint has an Enum, else the text."""
    for arm in arms(hint):
        if isinstance(arm, type) and issubclass(arm, enum.Enum) and text in arm.__members__:
            return arm[text]
    return text
