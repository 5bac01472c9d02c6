"""Named configs: one file per family, looked up here by name.

A module of this package defines `CONFIGS: dict[str, Callable[[], Config]]`; each function returns a new config, and its
docstring documents it. A user's own file is loaded the same way, `path/to/file.py:NAME`, with NAME a key of its CONFIGS
or one of its functions. Nothing registers itself: the package is searched when a name is asked for.

Imports `framework.config`; the modules of named configs import the components that they name.
"""

import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path

from framework.config import Config, ConfigError, did_you_mean, nearest

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
    """A new config by NAME, or by path/to/file.py:NAME.

    Raises:
        ConfigError: no such name, file or function; or the function's own ConfigError, with the line that raised it.
        FileNotFoundError: no such file.
    """
    function = find(spec)
    try:
        config = function()
    except ConfigError as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next(
            (f"{f.filename}:{f.lineno}" for f in reversed(frames) if f.filename == inspect.getfile(function)), spec
        )
        raise ConfigError(f"{error}  [{line}]") from error
    if not isinstance(config, Config):
        raise ConfigError(f"{spec}: expected a function that returns a Config, but it returned {type(config).__name__}")
    return config


def find(spec: str) -> ConfigFunction:
    """The function that makes the config of a spec; see `load`."""
    path, separator, name = spec.rpartition(":")
    if not separator and spec.endswith(".py"):
        path, name = spec, ""
    if path.endswith(".py"):
        return _from_file(Path(path).expanduser(), name)
    known = functions()
    if spec not in known:
        close = ", ".join(map(repr, nearest(spec, known, count=3)))
        hint = f"did you mean {close}?" if close else f"valid: {', '.join(known)}"
        raise ConfigError(f"no config is named {spec!r}; {hint} (`python -m launch.configs list` shows them all)")
    return known[spec]


def _from_file(path: Path, name: str) -> ConfigFunction:
    if not path.is_file():
        siblings = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise FileNotFoundError(f"no config file {str(path)!r}{did_you_mean(path.name, siblings)}")
    module = _import_file(path)
    own = {key: value for key, value in vars(module).items() if _is_config_function(value, module)}
    known: dict[str, ConfigFunction] = {**own, **vars(module).get("CONFIGS", {})}
    if not name and len(known) == 1:
        return next(iter(known.values()))
    if not name:
        raise ConfigError(f"{path}: say which config: {', '.join(f'{path}:{key}' for key in known) or 'it has none'}")
    if name not in known:
        raise ConfigError(
            f"{path}: no function or CONFIGS entry {name!r}{did_you_mean(name, known) or '; it has none'}"
        )
    return known[name]


def _is_config_function(value: object, module: types.ModuleType) -> bool:
    if not inspect.isfunction(value) or value.__module__ != module.__name__ or value.__name__.startswith("_"):
        return False
    parameters = inspect.signature(value).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _import_file(path: Path) -> types.ModuleType:
    """Imports a user's file once per process, under a name that depends on the file's name alone: the name becomes part
    of saved configs ("$class"), which should not change when a directory moves."""
    path = path.resolve()
    base = "user_config_" + re.sub(r"\W", "_", path.stem)
    candidates = [base, *(f"{base}_{count}" for count in range(2, 100))]
    for name in candidates:
        module = sys.modules.get(name)
        if module is None:
            break
        if module.__file__ == str(path):
            return module
    else:
        raise ConfigError(f"{path}: too many config files of that name")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # At the end of the path, so that modules beside the file can be imported but shadow nothing.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SyntaxError):
            raise ConfigError(f"{path}, line {error.lineno}: {error.msg}") from error
        raise
    return module
