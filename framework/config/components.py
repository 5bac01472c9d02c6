"""Components: the classes and functions that a config file may refer to by name.

A component describes a part of an experiment: a layer, a model, a data source, a tokenizer, the learner, an optimizer,
a schedule, an initializer. Constructing one only computes and stores values: it reads and writes no files, starts no
process and opens no connection. Code that loads, writes, launches or exports is not a component, so a file cannot name
it.

A saved config names a component of Plimsoll as `plimsoll.NAME`, without its module, so that moving a class to another
module does not invalidate saved configs. The name of a component is therefore unique in the package, and
`find_components` maps it to the module that defines it now.

- Plimsoll: classes and functions marked with `@component` where they are defined. Subclasses need their own mark.
- optax: functions that return a transformation or a schedule, according to their return annotation.
- jax.nn: functions that return an initializer. Its functions of arrays (`jax.nn.gelu`) may be passed as objects, but
  are not called here.
"""

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, TypeVar

import plimsoll

_DEFINITION = re.compile(r"^@component\n(?:@.+\n)*(?:class|def) (\w+)", re.MULTILINE)

# A class or function that a config builds from.
Target: TypeAlias = Callable[..., object]
_Marked = TypeVar("_Marked", bound=Target)
_MARK = "_marked_component"
# Code in these packages always needs the mark, even if code of this process has configured it.
OURS = ("plimsoll", "tools")
# Modules of other packages in which names are looked up. They are imported anyway, so resolving a name imports nothing
# new.
OPTAX = ("optax", "optax.contrib", "optax.schedules", "optax.transforms")
INITIALIZERS = "jax.nn.initializers"
FUNCTIONS = "jax.nn"
FOREIGN_MODULES = (*OPTAX, INITIALIZERS, FUNCTIONS)
# Functions of optax that return a transformation but have no return annotation. The code of each was reviewed, in
# optax 0.2.8.
_NOT_ANNOTATED = {"monitor", "scale_by_factored_rms", "dog", "dowg", "hutchinson_estimator_diag_hessian"}


def component(target: _Marked) -> _Marked:
    """Marks a component: untrusted data may name the class or function, with any arguments."""
    # The mark is the object itself, not True. A subclass inherits it and functools.wraps copies it, but then it is not
    # equal to the object, so neither counts as marked.
    setattr(target, _MARK, target)
    return target


def is_component(target: object) -> bool:
    """Returns whether this exact class or function is marked."""
    if not callable(target):
        return False
    attributes = getattr(target, "__dict__", {})
    return attributes.get(_MARK) is target


@functools.cache
def find_components() -> dict[str, str]:
    """Returns {name: module} of Plimsoll's components, such as {"Linear": "plimsoll.framework.layers.linear"}.

    A saved config has only the name (`plimsoll.Linear`), and so does a short name on the command line; this map finds
    the module to import. Names that older versions saved (`framework.any.module.Linear`) are looked up by their last
    part, see `names.get_current_name`.

    The first call reads all source files of the package, which takes about 50 ms: components are found by their mark
    in the source, because importing every module would take seconds. Later calls return the cached map.
    """
    module_by_name = {}
    # More than one folder if the links of a checkout are missing, see plimsoll/__init__.py.
    for root in plimsoll.__path__:
        for package in ("framework", "extras"):
            for file in sorted(Path(root, package).rglob("*.py")):
                names = _DEFINITION.findall(file.read_text(encoding="utf-8"))
                module_name = ".".join(["plimsoll", *file.relative_to(root).with_suffix("").parts])
                module_by_name |= dict.fromkeys(names, module_name.removesuffix(".__init__"))
    return module_by_name


def is_ours(target: object) -> bool:
    """Returns whether a class or function is defined in a package of Plimsoll."""
    return _package(target) in OURS


def is_foreign_component(module_name: str, target: object, *, passed: bool) -> bool:
    """Returns whether an object in a module of optax or jax.nn may be named.

    Functions that return an optimizer, a schedule or an initializer are components.

    Args:
        module_name: module that has the object as a member.
        target: the object.
        passed: the object is passed on and not called, so it may also be a function of arrays (`jax.nn.gelu`) or an
            initializer (`jax.nn.initializers.zeros`).
    """
    if isinstance(target, type) or not callable(target) or not hasattr(target, "__qualname__"):
        return False
    if _package(target) != module_name.partition(".")[0]:
        return False
    name = getattr(target, "__name__", "")
    if module_name == FUNCTIONS:
        return passed
    # All other functions of that module return an initializer.
    if module_name == INITIALIZERS and name in ("zeros", "ones") and passed:
        return True
    try:
        annotation = inspect.signature(target, eval_str=True).return_annotation
    except (TypeError, ValueError, NameError):
        annotation = None
    # Imported here, because a config by itself needs neither jax nor optax, and errors in it are reported before either
    # is imported.
    if module_name == INITIALIZERS:
        return annotation is importlib.import_module(INITIALIZERS).Initializer
    if module_name not in OPTAX:
        return False
    optax = importlib.import_module("optax")
    if isinstance(annotation, type) and issubclass(annotation, optax.GradientTransformation):
        return True
    return annotation == optax.Schedule or name in _NOT_ANNOTATED


def _package(target: object) -> str:
    """Returns the package of an object's `__module__`; "" if it has none."""
    module_name = getattr(target, "__module__", None) or ""
    return module_name.partition(".")[0]
