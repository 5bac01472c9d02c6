"""Access to the named configs: the package `configs` that is installed with this one.

The library does not import any named config by itself; they are looked up here on demand.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from framework.config.config import Config
from framework.config.names import ConfigError

_NAME = "configs"
# The `configs` folder next to the `framework` package.
_FOLDER = Path(__file__).resolve().parents[2] / _NAME


def _ignore(line: str) -> None:
    """Discards a line."""


def named_configs() -> ModuleType:
    """Import the package of the named configs.

    A different `configs` folder on sys.path, such as one in the directory of a script or notebook, is not used.

    Raises:
        ConfigError: a different package of that name has already been imported.
    """
    module = sys.modules.get(_NAME)
    if module is None:
        return _imported()
    place = Path(module.__file__).resolve().parent if module.__file__ else None
    if place == _FOLDER:
        return module
    shown = place or ", ".join(module.__path__)
    raise ConfigError(
        f"the package 'configs' of {shown} was imported before Plimsoll's, which has the same name: "
        "call framework.load_config before that import, or give that package another name"
    )


def load_named(spec: str, tell: Callable[[str], None] = _ignore, *, shape_is_enough: bool = False) -> Config:
    """Return a new config by NAME, path/to/file.py:NAME, hf:DIR or hf:ORG/NAME; see `configs.load`."""
    return named_configs().load(spec, tell, shape_is_enough=shape_is_enough)


def family_module() -> ModuleType:
    """Import `configs.families`, the module with the families of published models."""
    named_configs()
    return importlib.import_module(f"{_NAME}.families")


def _imported() -> ModuleType:
    # Import by file path: a search of sys.path would first find a folder of that name in the working directory.
    file = _FOLDER / "__init__.py"
    spec = importlib.util.spec_from_file_location(_NAME, file, submodule_search_locations=[str(_FOLDER)])
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"{_FOLDER}: the package of the named configs is not there")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_NAME]
        raise
    return module
