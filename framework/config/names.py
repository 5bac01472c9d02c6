"""Errors of the config system, and the dotted names of classes and functions.

Saved configs and the command line are untrusted input. A name is therefore resolved, without calling anything, only if
1. it names a component of Plimsoll, optax or jax.nn (see `framework.config.components`), or
2. code of this process has called `config_for` on that exact object (as a user's config file does), and the object is
   not part of Plimsoll. Objects of Plimsoll that are not components stay out of reach, even if something has configured
   them.
Resolving a name imports only the module that defines the component; a name that is refused imports nothing.

A saved config names a component of Plimsoll as `plimsoll.NAME`, without its module, so that modules can move. Configs
of older versions have the module too (`framework.any.module.NAME`). Such a module may no longer exist, so the component
is found by the last part of the name. `RENAMED` maps components that have been renamed since.
"""

import contextlib
import difflib
import importlib
import re
import sys
from collections.abc import Iterable
from types import ModuleType

from plimsoll.framework.config.components import (
    FOREIGN_MODULES,
    INITIALIZERS,
    OPTAX,
    OURS,
    Target,
    find_components,
    is_component,
    is_foreign_component,
    is_ours,
)

# Packages in which names may be resolved.
TRUSTED = ("plimsoll", "optax", "jax.nn")
# Top-level packages of Plimsoll in configs that older versions saved. Their modules have since moved, so a component is
# found by its own name, see `get_current_name`.
_OLD_PACKAGES = ("framework", "configs")
# {name of a component in a config that an older version saved: current name}. When a component is renamed, add it here.
RENAMED = {"LabelledSource": "LabeledSource", "ThumbSource": "UnpairedSource"}
# Public names only: no part starts with an underscore.
_DOTTED = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+\Z", re.ASCII)
# Maximum length of a name in characters. importlib imports dotted names recursively, so a long name from a file could
# exhaust the stack.
_LONGEST = 200
# Targets of config_for in this process, by name. This makes a user's own classes loadable.
_configured: dict[str, Target] = {}


class ConfigError(ValueError):
    """An error in a config, as one line: the expected and the given value, and the nearest valid choice.

    Args:
        message: error text without the path.
        path: dotted path of the invalid field, "" for the whole config.
    """

    def __init__(self, message: str, *, path: str = ""):
        super().__init__(message)
        self.path = path

    def __str__(self) -> str:
        message = self.args[0]
        if not self.path:
            return message
        # The path may be untrusted text. Values in the message are already escaped by repr.
        return f"{printable(self.path)}: {message}"


class FieldError(ConfigError, AttributeError, KeyError):
    """An unknown field, a path that does not exist, or an unset required field.

    It is also an AttributeError and a KeyError, because code that probes a Config expects one of these.
    """


class FieldTypeError(ConfigError, TypeError):
    """A value of the wrong type. A value of the right type that is out of range raises a plain ConfigError."""


def join(path: str, name: object) -> str:
    """Returns the dotted path of `name` under `path`; the path of the root is ""."""
    return f"{path}.{name}" if path else str(name)


def printable(text: str) -> str:
    """Makes untrusted text safe to print on a terminal.

    The result is one line without control sequences, with at most 200 characters of the text.
    """
    cut = text if len(text) <= 200 else f"{text[:197]}..."
    characters = []
    for character in cut:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def show(value: object) -> str:
    """Formats a value for an error message: its repr, cut to 80 characters, and its type."""
    text = repr(value)
    if len(text) > 80:
        text = f"{text[:77]}..."
    return f"{text} ({type(value).__name__})"


def nearest(name: str, names: Iterable[str], count: int = 1) -> list[str]:
    """Returns the closest of `names`, best first; an empty list if nothing is close."""
    # Compare in lower case, because a name in the wrong case is a near miss.
    name_by_lower = {candidate.lower(): candidate for candidate in names}
    matches = difflib.get_close_matches(name.lower(), list(name_by_lower), count, 0.6)
    return [name_by_lower[match] for match in matches]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns a suffix for an error message: `; did you mean 'x'?`, or all valid names if there are at most 40.

    The suffix is empty if no name is close and there are no valid names, or too many.
    """
    valid_names = list(names)
    close_names = nearest(name, valid_names)
    if close_names:
        return f"; did you mean {close_names[0]!r}?"
    if 0 < len(valid_names) <= 40:
        return f"; valid: {', '.join(valid_names)}"
    return ""


def remember(target: Target) -> None:
    """Records that code of this process configures `target`.

    Args:
        target: class or function that was passed to `config_for`.

    Raises:
        ConfigError: it is a lambda or a partial, which has no name to store.
    """
    name = getattr(target, "__qualname__", None)
    if not callable(target) or not name or "<lambda>" in name or not target.__module__:
        raise ConfigError(f"config_for expects a class or a named function, given {show(target)}")
    _configured[get_dotted_name(target)] = target


def get_dotted_name(target: Target) -> str:
    """Returns the dotted name of a class or function.

    This is `plimsoll.NAME` for a component of Plimsoll, and else the name of its definition. For an object defined in a
    private module, it is the shortest public name.
    """
    module_name = target.__module__
    name = target.__qualname__
    if is_ours(target) and is_component(target):
        return f"plimsoll.{name}"
    # Private modules (optax._src.alias) may move between versions of a package, and saved configs must still load.
    if "._" in module_name:
        public_parts = [part for part in module_name.split(".") if not part.startswith("_")]
        for length in range(1, len(public_parts) + 1):
            prefix = ".".join(public_parts[:length])
            if getattr(sys.modules.get(prefix), name, None) is target:
                return f"{prefix}.{name}"
    return f"{module_name}.{name}"


def get_current_name(name: str) -> str:
    """Returns the current name of a component whose name was saved by an older version; other names stay unchanged.

    For a component, `framework.any.module.NAME` becomes `plimsoll.NAME`, whatever the module.
    """
    package = name.partition(".")[0]
    if package not in ("plimsoll", *_OLD_PACKAGES):
        return name
    attribute = name.rpartition(".")[2]
    attribute = RENAMED.get(attribute, attribute)
    if attribute in find_components():
        return f"plimsoll.{attribute}"
    # Not a component; `resolve` rejects it.
    return name if package == "plimsoll" else f"plimsoll.{name}"


def is_trusted(name: str) -> bool:
    """Returns whether text could be a resolvable name, judging by its form and package prefix."""
    if name in _configured:
        return True
    is_dotted = len(name) <= _LONGEST and _DOTTED.match(name) is not None
    prefixes = tuple(f"{package}." for package in (*TRUSTED, *_OLD_PACKAGES))
    return is_dotted and name.startswith(prefixes)


def resolve(name: object, path: str = "", *, passed: bool = False) -> Target:
    """Returns the component with a dotted name.

    Args:
        name: name from a file or the command line.
        path: dotted path to show in errors.
        passed: the object is passed on and not called here, so functions of arrays (`jax.nn.gelu`) are allowed too.

    Raises:
        ConfigError: the name is refused, or does not exist.
    """
    if not isinstance(name, str) or not is_trusted(name):
        shown = show(name).removesuffix(" (str)")
        packages = ", ".join(TRUSTED)
        message = (
            f"{shown} is refused: a name must be inside {packages}, or belong to a class or function that your own "
            "config file configures (pass it as --config=path/to/file.py:NAME)"
        )
        raise ConfigError(message, path=path)
    if name in _configured and not is_ours(_configured[name]):
        return _configured[name]
    module_name, _, attribute = get_current_name(name).rpartition(".")
    if module_name.partition(".")[0] in OURS:
        module_by_name = find_components()
        if attribute not in module_by_name:
            hint = did_you_mean(attribute, module_by_name)
            raise ConfigError(f"{name!r} is refused: it is not a component (see docs/configs.md){hint}", path=path)
        module_name = module_by_name[attribute]
    elif module_name not in FOREIGN_MODULES:
        modules = ", ".join(FOREIGN_MODULES)
        raise ConfigError(f"{name!r} is refused: names of other packages must be inside {modules}", path=path)
    module = importlib.import_module(module_name)
    # vars instead of getattr: a module's __getattr__ would run code.
    members = vars(module)
    if attribute in members and _is_nameable(module_name, members[attribute], passed):
        return members[attribute]
    hint = did_you_mean(attribute, choices_in(module, passed))
    if attribute not in members:
        raise ConfigError(f"{name!r} does not exist{hint}", path=path)
    raise ConfigError(f"{name!r} is refused: it is not a component (see docs/configs.md){hint}", path=path)


def choices_in(module: ModuleType, passed: bool = False) -> list[str]:
    """Lists the names of a module's members that may be named in a config."""
    return [name for name, value in vars(module).items() if _is_nameable(module.__name__, value, passed)]


def _is_nameable(module_name: str, target: object, passed: bool) -> bool:
    if module_name.partition(".")[0] in OURS:
        return is_component(target)
    return is_foreign_component(module_name, target, passed=passed)


def resolve_short_name(name: str, neighbors: Iterable[str]) -> tuple[Target | None, str]:
    """Returns the component with a name without dots.

    Args:
        name: short name, such as TextFiles or cosine_decay_schedule.
        neighbors: dotted names of components, such as plimsoll.JsonLines. Their modules are searched first, in this
            order; then Plimsoll's components, and those of optax and jax.nn.initializers.

    Returns:
        (component, ""), or (None, suggestion for the error message) if there is no component of that name.
    """
    if not name.isidentifier():
        return None, ""
    module_names = [neighbor.rpartition(".")[0] for neighbor in neighbors]
    if name in find_components():
        module_names.append(find_components()[name])
    # Only imported modules are searched: a config that can use these has imported them.
    module_names += [module_name for module_name in (*OPTAX, INITIALIZERS) if module_name in sys.modules]
    choices = list(find_components())
    for module_name in dict.fromkeys(module_names):
        with contextlib.suppress(ConfigError):
            return resolve(f"{module_name}.{name}"), ""
        if module_name in sys.modules:
            choices += choices_in(sys.modules[module_name])
    return None, did_you_mean(name, choices)
