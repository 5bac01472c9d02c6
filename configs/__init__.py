"""Named configs: one file per family, looked up here by name.

A module of this package defines `CONFIGS: dict[str, Callable[[], Config]]`. Each function returns a new config, and
its docstring documents it. A user's own file is loaded the same way, as `path/to/file.py:NAME`, where NAME is a key
of its CONFIGS or one of its functions. Published weights are loaded as hf:DIR, lora:DIR or qlora:DIR; with a score
head as reward:DIR or classify:DIR (lora-reward:DIR, ...); for GRPO as grpo:DIR or lora-grpo:DIR. DIR may be the Hub's
ORG/NAME. The stored config of a run is loaded as WORKDIR/config.json. There is no registration: a lookup searches the
package.

This module imports `framework.config`; the modules of named configs import the components that they name. Names are
therefore read from the source, and a lookup imports only the module that defines the name.
"""

import functools
import importlib
import inspect
import pkgutil
import re
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path

from plimsoll.framework.config import Config, ConfigError, did_you_mean
from plimsoll.framework.config.names import nearest
from plimsoll.framework.files import hub_models
from plimsoll.framework.program import stored_config

ConfigFunction = Callable[[], Config]
# The names that a module of this package defines.
_TABLE = re.compile(r"^CONFIGS = \{([^}]*)\}", re.MULTILINE)
_KEY = re.compile(r'"([^"]+)":')


def _ignore(line: str) -> None:
    """Ignore a line."""


def functions() -> dict[str, ConfigFunction]:
    """Return every named config of this package: name -> function, in the order of files and definitions."""
    function_by_name: dict[str, ConfigFunction] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        module_configs = vars(module).get("CONFIGS", {})
        for name, function in module_configs.items():
            assert name not in function_by_name, f"two configs are named {name!r}"
            function_by_name[name] = function
    return function_by_name


def names() -> list[str]:
    """Return the names of the named configs, in the order of `functions`, without importing their modules."""
    return list(find_modules())


@functools.cache
def find_modules() -> dict[str, str]:
    """Return {name of a config: name of its module}, read from the source.

    Importing every module takes more than a second, because they import JAX.
    """
    module_by_name = {}
    for module_info in pkgutil.iter_modules(__path__):
        source = Path(__path__[0], f"{module_info.name}.py").read_text(encoding="utf-8")
        for table in _TABLE.findall(source):
            module_by_name |= dict.fromkeys(_KEY.findall(table), f"{__name__}.{module_info.name}")
    return module_by_name


def load(spec: str, log: Callable[[str], None] = _ignore, *, shape_only: bool = False) -> Config:
    """Build a new config from NAME, path/to/file.py:NAME, path/to/config.json, hf:DIR or hf:ORG/NAME.

    Args:
        spec: one of these forms.
        log: function that prints a line for each omission from a stored config, and one for the commit of a Hub
            model.
        shape_only: whether the shape is sufficient, as for a plan; a well-known hf:ORG/NAME then needs no file.

    Raises:
        ConfigError: there is no such name or function, or the function raised the error. The message then ends with
            the line that raised it.
        FileNotFoundError: there is no such file.
    """
    function = find(spec, log, shape_only=shape_only)
    if getattr(function, "func", None) is stored_config.read_to_train:
        # Its errors name the file, and there is no line of Python to change.
        return function()
    try:
        config = function()
    except ConfigError as error:
        # hf:DIR is a functools.partial, which stores the function in `func`.
        plain_function = inspect.unwrap(getattr(function, "func", function))
        file = inspect.getfile(plain_function)
        frames = traceback.extract_tb(error.__traceback__)
        # The innermost line in the config's file is the one to change; the frames below it are the framework's.
        frames_of_file = [frame for frame in frames if frame.filename == file]
        location = "".join(f"  [{frame.filename}:{frame.lineno}]" for frame in frames_of_file[-1:])
        raise ConfigError(f"{error}{location}") from error
    if is_published_model(spec):
        # Imported here, because the package of the families imports JAX and a mistyped name should fail quickly.
        from plimsoll.framework.families import published

        path = config.pretrained.path
        for line in published.note(path) or hub_models.describe_source(path):
            log(line)
    if not isinstance(config, Config):
        raise ConfigError(f"{spec}: expected a function that returns a Config, but it returned {type(config).__name__}")
    return config


def find(spec: str, log: Callable[[str], None] = _ignore, *, shape_only: bool = False) -> ConfigFunction:
    """Return the function that builds the config of a spec; see `load`."""
    if is_published_model(spec):
        kind, _, source = spec.partition(":")
        return functools.partial(_get_published_builders()[kind], source, shape_only)
    if spec.endswith(".json"):
        return functools.partial(stored_config.read_to_train, Path(spec).expanduser(), log)
    if spec.endswith(".py"):
        # The name is missing. `_from_file` reports this, unless the file does not exist.
        path = spec
        name = ""
    else:
        path, _, name = spec.rpartition(":")
    if path.endswith(".py"):
        return _from_file(Path(path).expanduser().resolve(), name)
    module_by_name = find_modules()
    if spec in module_by_name:
        return vars(importlib.import_module(module_by_name[spec]))["CONFIGS"][spec]
    stored_file = Path(spec).expanduser() / "config.json"
    if stored_file.is_file():
        raise ConfigError(f"{spec!r} is a folder; did you mean {str(stored_file)!r}, the config of its run?")
    similar_names = ", ".join(map(repr, nearest(spec, module_by_name, count=3)))
    hint = f"valid: {', '.join(module_by_name)}"
    if similar_names:
        hint = f"did you mean {similar_names}?"
    raise ConfigError(f"no config is named {spec!r}; {hint} (`plimsoll configs list` shows them all)")


def is_published_model(spec: str) -> bool:
    """Return whether a spec is hf:SOURCE, lora:SOURCE, reward:SOURCE or another kind of published model."""
    kind, _, source = spec.partition(":")
    return bool(source) and kind in _get_published_builders()


def _get_published_builders() -> dict[str, Callable[[str, bool], Config]]:
    """Return {kind: function that builds the config of a published model}, such as "hf", "lora" and "qlora"."""
    # Imported here, because that module imports JAX and a mistyped name should fail quickly.
    from plimsoll.configs.finetune import KINDS

    return KINDS


def _from_file(path: Path, name: str) -> ConfigFunction:
    """Return the config function of that name in a user's file."""
    if not path.is_file():
        siblings = [file.name for file in path.parent.glob("*.py")]
        raise FileNotFoundError(f"no config file {str(path)!r}{did_you_mean(path.name, siblings)}")
    module = _import_file(path)
    function_by_name = {}
    for key, function in inspect.getmembers(module, inspect.isfunction):
        # A function that the file imports, such as config_for, is not one of its configs.
        is_imported = function.__module__ != module.__name__
        if not key.startswith("_") and not is_imported:
            function_by_name[key] = function
    function_by_name |= vars(module).get("CONFIGS", {})
    if name not in function_by_name:
        hint = did_you_mean(name, function_by_name)
        raise ConfigError(f"{path}: no function or CONFIGS entry {name!r}{hint}")
    return function_by_name[name]


def _import_file(path: Path) -> types.ModuleType:
    """Import a user's file once per process, under a name that depends only on the file's name.

    The name becomes part of saved configs ("$class"), which should not change when a directory moves.
    """
    name = "user_config_" + re.sub(r"\W", "_", path.stem)
    while name in sys.modules:
        if sys.modules[name].__file__ == str(path):
            return sys.modules[name]
        # A file with the same name in another directory already uses this name.
        name += "_"
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__file__ = str(path)
    # Append to the path, so that modules next to the file can be imported but shadow nothing.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except BaseException as error:
        # A file that failed halfway must be read again on the next attempt.
        del sys.modules[name]
        if isinstance(error, SyntaxError):
            raise ConfigError(f"{path}, line {error.lineno}: {error.msg}") from error
        raise
    return module
