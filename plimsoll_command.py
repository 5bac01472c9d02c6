"""The console command `plimsoll`. Importing this makes launch, framework and configs the packages beside this file.

A project may have folders or files of these names, and PYTHONPATH may lead there; this module's name is its own. The
server that `plimsoll local` forks its processes from imports it first.
"""

import importlib.util
import sys
from pathlib import Path

_LAUNCH = Path(__file__).resolve().parent / "launch"


def _import_launch() -> None:
    """Imports the package `launch` by its place, and has it look after the places of the others."""
    if "launch" not in sys.modules:
        file = _LAUNCH / "__init__.py"
        spec = importlib.util.spec_from_file_location("launch", file, submodule_search_locations=[str(_LAUNCH)])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["launch"] = module
        spec.loader.exec_module(module)
    from launch import own_packages

    own_packages.insist()


def main() -> int:
    """Runs the verb of the process's command line; the exit code."""
    from launch import __main__

    return __main__.main()


_import_launch()
