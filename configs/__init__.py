"""Named configs: one file per family, looked up here by name.

A module of this package defines `CONFIGS: dict[str, Callable[[], Config]]`; each function returns a new config, and its
docstring documents it. A user's own file is loaded the same way, `path/to/file.py:NAME`, with NAME a key of its CONFIGS
or one of its functions; a directory of published weights as hf:DIR, lora:DIR or qlora:DIR. Nothing registers itself:
the package is searched when a name is asked for.

Imports `framework.config`; the modules of named configs import the components that they name.
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

from framework.config import Config, ConfigError, did_you_mean
from framework.config.names import nearest

ConfigFunction = Callable[[], Config]


def functions() -> dict[str, ConfigFunction]:
    """Every named config of this package: name -> function, in the order of files and of definition."""
    found: dict[str, ConfigFunction] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for name, function in vars(module).get("CONFIGS", {}).items():
            assert name not in found, f"two configs are named {name!r}"
            found[name] = function
    return found


def names() -> list[str]:
    """The names that `load` knows."""
    return list(functions())


def load(spec: str) -> Config:
    """A new config by NAME, by path/to/file.py:NAME, or by hf:DIR. Raises ConfigError when there is no such name or
    function, or the function's own, with the line that raised it; FileNotFoundError when there is no such file."""
    function = find(spec)
    try:
        config = function()
    except ConfigError as error:
        file = inspect.getfile(inspect.unwrap(getattr(function, "func", function)))
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        where = "".join(f"  [{frame.filename}:{frame.lineno}]" for frame in frames[-1:])
        raise ConfigError(f"{error}{where}") from error
    if not isinstance(config, Config):
        raise ConfigError(f"{spec}: expected a function that returns a Config, but it returned {type(config).__name__}")
    return config


def find(spec: str) -> ConfigFunction:
    """The function that makes the config of a spec; see `load`."""
    kind, _, directory = spec.partition(":")
    if directory and kind in (kinds := importlib.import_module("configs.finetune").KINDS):
        return functools.partial(kinds[kind], directory)
    path, _, name = spec.rpartition(":") if not spec.endswith(".py") else (spec, "", "")
    if path.endswith(".py"):
        return _from_file(Path(path).expanduser().resolve(), name)
    known = functions()
    if spec not in known:
        close = ", ".join(map(repr, nearest(spec, known, count=3)))
        hint = f"did you mean {close}?" if close else f"valid: {', '.join(known)}"
        raise ConfigError(f"no config is named {spec!r}; {hint} (`python -m launch.configs list` shows them all)")
    return known[spec]


def _from_file(path: Path, name: str) -> ConfigFunction:
    if not path.is_file():
        siblings = [file.name for file in path.parent.glob("*.py")]
        raise FileNotFoundError(f"no config file {str(path)!r}{did_you_mean(path.name, siblings)}")
    module = _import_file(path)
    own = {key: value for key, value in inspect.getmembers(module, inspect.isfunction) if not key.startswith("_")}
    known = {key: value for key, value in own.items() if value.__module__ == module.__name__}
    known |= vars(module).get("CONFIGS", {})
    if name not in known:
        raise ConfigError(f"{path}: no function or CONFIGS entry {name!r}{did_you_mean(name, known)}")
    return known[name]


def _import_file(path: Path) -> types.ModuleType:
    """Imports a user's file once per process, under a name that depends on the file's name alone: the name becomes part
    of saved configs ("$class"), which should not change when a directory moves."""
    name = "user_config_" + re.sub(r"\W", "_", path.stem)
    while name in sys.modules:
        if sys.modules[name].__file__ == str(path):
            return sys.modules[name]
        name += "_"  # a file of the same name in another directory
    sys.modules[name] = module = types.ModuleType(name)
    module.__file__ = str(path)
    # At the end of the path, so that modules beside the file can be imported but shadow nothing.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SyntaxError):
            raise ConfigError(f"{path}, line {error.lineno}: {error.msg}") from error
        raise
    return module
