"""Fields of configs, read from the source of Plimsoll, so that a typo on the command line shows before JAX is imported.

Importing the components of a config takes seconds, and reading a file takes milliseconds. Nothing is cached on disk,
so the fields are those of the code that would run. What the source does not decide is left to the config itself.
"""

import ast
import functools
import importlib.util
import re
from pathlib import Path

import plimsoll
from plimsoll import configs
from plimsoll.framework.config.migrations import RENAMED_FIELDS
from plimsoll.framework.config.names import FieldError, did_you_mean

# Published models, such as hf:ORG/NAME and qlora:DIR. The name of a file has a dot before its colon.
_PUBLISHED = re.compile(r"[a-z-]+:")
# {section of an experiment: (module, component)}; "" is the experiment itself. Every config of Plimsoll has these
# components there. Sections with a choice of components, such as the model, are left out.
SECTIONS = {
    "": ("framework/program/experiment.py", "Experiment"),
    "checkpoint": ("framework/program/options.py", "CheckpointOptions"),
    "compiler": ("framework/devices/compiler.py", "Compiler"),
    "health": ("framework/processes/health.py", "Health"),
    "learner": ("framework/learner/learner.py", "Learner"),
    "memory": ("framework/schedules/memory.py", "Memory"),
    "mesh": ("framework/devices/mesh.py", "MeshShape"),
    "trainer": ("framework/program/options.py", "TrainerOptions"),
}


def has_only_our_components(spec: str | None) -> bool:
    """Return whether a value of --config names a config of Plimsoll or a published model.

    A user's own file, or the stored config of a run, may have other components.
    """
    return spec is not None and (spec in configs.names() or _PUBLISHED.match(spec) is not None)


def check_field(path: str) -> None:
    """Raise FieldError if a path of a config of Plimsoll starts with a field that its section does not have.

    Args:
        path: dotted path of the command line.
    """
    first, *rest = path.split(".")
    _check_name("", first)
    if rest and first in SECTIONS:
        _check_name(first, rest[0])


def _check_name(section: str, name: str) -> None:
    """Raise FieldError, with the message of a config, if a section does not have a field of this name."""
    component = SECTIONS[section][1]
    fields = list_fields(section)
    # A name in brackets or without letters is for the config to judge.
    if name.isidentifier() and name not in fields and name not in RENAMED_FIELDS.get(component, {}):
        full_path = f"{section}.{name}" if section else name
        raise FieldError(f"no such field in plimsoll.{component}{did_you_mean(name, fields)}", path=full_path)


@functools.cache
def list_fields(section: str) -> list[str]:
    """Return the fields of a section: the parameters of its component, in the order of its source.

    Args:
        section: a key of SECTIONS.
    """
    file, component = SECTIONS[section]
    # More than one folder if the links of a checkout are missing, see plimsoll/__init__.py.
    paths = [Path(root, file) for root in plimsoll.__path__]
    source = next(path for path in paths if path.is_file()).read_text(encoding="utf-8")
    for definition in ast.parse(source).body:
        if isinstance(definition, ast.ClassDef) and definition.name == component:
            for method in definition.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    return [argument.arg for argument in method.args.kwonlyargs]
    raise AssertionError(f"{component} has no constructor in {file}")


def is_mentioned(name: str) -> bool:
    """Return whether a file that defines components contains a text, as it does for each field of our configs."""
    roots = [Path(root, package) for root in plimsoll.__path__ for package in ("framework", "extras", "configs")]
    optax = importlib.util.find_spec("optax")
    if optax is not None and optax.submodule_search_locations:
        roots += map(Path, optax.submodule_search_locations)
    return any(name in file.read_text(encoding="utf-8") for root in roots for file in root.rglob("*.py"))
