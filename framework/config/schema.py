"""Schema of a component, read from its constructor's signature, and conversion of values according to it.

A config holds only data (bool, int, float, str, None, list, tuple, dict with string keys, Config), so a type hint is
interpreted as the set of data it allows. Coercion is intentionally narrow (int -> float, list <-> tuple): if "1e-3"
became a number in one place and stayed text in another, typos would go unnoticed until step 1. If an alternative of a
hint is not data (an array, a callable, a protocol), the field accepts a Config that builds such an object.
"""

import collections.abc
import dataclasses
import enum
import inspect
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias, Union

import annotated_types as at
import ml_collections

from plimsoll.framework.config.components import Target
from plimsoll.framework.config.names import (
    ConfigError,
    FieldTypeError,
    did_you_mean,
    get_dotted_name,
    join,
    nearest,
    show,
)

# A type hint as Python keeps it at run time. `type` does not cover unions, Literal or strings.
Annotation: TypeAlias = Any
# The alternative that accepts any data, and configs.
_ANY_DATA: Annotation = Any
LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_NONE = type(None)
_TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", _NONE: "none", str: "text"}
# Alternatives are tried in this order: the specific ones come first, because `str` and Any accept whatever is left.
_ORDER = [Literal, _NONE, bool, int, float, *LISTS, tuple, *DICTS, str, _ANY_DATA]
_SIGNS = {at.Gt: ">", at.Ge: ">=", at.Lt: "<", at.Le: "<="}
_INTEGER = re.compile(r"-?[0-9]+")


class Mark(enum.Enum):
    """Placeholder for a missing value.

    REQUIRED marks an unset field without a default; ABSENT marks a value that one side of a `diff` does not have.
    """

    REQUIRED = 1
    ABSENT = 2


REQUIRED = Mark.REQUIRED
ABSENT = Mark.ABSENT


class ConfigBase(ml_collections.ConfigDict):
    """Base class of `Config`, so that this module can recognize a Config without importing it."""

    _target: Target
    copy: Callable[..., "ConfigBase"]


@dataclasses.dataclass(frozen=True)
class Field:
    """One parameter of a constructor."""

    # A hint whose names cannot be resolved stays a string, and accepts any data.
    hint: Annotation
    # The default in the signature.
    default: object = REQUIRED
    # True if the default is data, so that a config can hold it; otherwise the constructor applies the default.
    is_data: bool = False


# No eq, because hints are hashed and a dict of components is not hashable.
@dataclasses.dataclass(frozen=True, eq=False)
class ShortNames:
    """Components that text may name without their module, for one field.

    It is part of the field's hint: `Annotated[Config, ShortNames(...)]`.
    """

    components: Mapping[str, Target]


@dataclasses.dataclass(frozen=True)
class _Limit:
    """One bound of a range: `value > 0` has the sign ">", the bound 0 and the test operator.gt."""

    sign: str
    bound: float
    test: Callable[[object, float], bool]


def short_names(hint: Annotation) -> dict[str, Target]:
    """Returns the components that a field with this hint accepts by short name."""
    components: dict[str, Target] = {}
    for arm in arms(hint):
        for note in getattr(arm, "__metadata__", ()):
            if isinstance(note, ShortNames):
                components.update(note.components)
    return components


def schema(target: Target, reserved: Collection[str] = ()) -> dict[str, Field]:
    """Returns the fields of a function or class.

    The fields of a class are the parameters of its `__init__`, and of those of its bases as long as `**kwargs` forwards
    to them. `*args`, and parameters that start with an underscore and have a default, are not fields.

    Raises ConfigError if there is no readable signature, if a name is `reserved`, or if a default is out of its own
    range.
    """
    owner = get_dotted_name(target)
    functions: list[Target] = [target]
    if isinstance(target, type):
        functions += [cls for cls in target.__mro__ if "__init__" in vars(cls)]
    fields: dict[str, Field] = {}
    for function in functions:
        try:
            parameters = inspect.signature(function, eval_str=True).parameters
        except (NameError, AttributeError, SyntaxError):
            # Hints with names that are imported only for type checking stay strings.
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{owner} cannot be configured: {error}") from error
        for name, parameter in parameters.items():
            # If several classes define a name, the one closest to the target wins.
            if name in fields or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if name.startswith("_") and parameter.default is not parameter.empty:
                continue
            reason = ""
            if name in reserved:
                reason = "Config has a member with that name; rename the parameter"
            elif name.startswith("_") or parameter.kind is parameter.POSITIONAL_ONLY:
                reason = "it is positional-only"
            if reason:
                raise ConfigError(f"{owner}: parameter {name!r} cannot be a field: {reason}")
            hint = _ANY_DATA if parameter.annotation is parameter.empty else parameter.annotation
            default = parameter.default
            if default is parameter.empty:
                fields[name] = Field(hint)
                continue
            # `x: int = None` is common in third-party code.
            if default is None and not isinstance(hint, str):
                hint = Union[hint, None]  # noqa: UP007
            try:
                value = convert(hint, default, f"{owner}.{name}, by default")
                fields[name] = Field(hint, value, is_data=True)
            except FieldTypeError:
                fields[name] = Field(hint, default)
        forwards = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if not forwards:
            break
    return fields


def arms(hint: Annotation) -> list[Annotation]:
    """Returns the alternatives of a hint, in the order in which they are tried."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if bool in args and complex in args:
            # This is jax.typing.ArrayLike (an array or anything that converts to one), for which true would become the
            # number 1.
            args = tuple(part for part in args if part is not bool)
        alternatives = [arm for part in args for arm in arms(part)]
        return sorted(alternatives, key=_rank)
    if origin is Annotated:
        return [Annotated[(arm, *hint.__metadata__)] for arm in arms(args[0])]
    # A hint that cannot be resolved must not refuse a valid value.
    if hint is object or isinstance(hint, str | typing.ForwardRef | typing.TypeVar):
        return [_ANY_DATA]
    return [_NONE if hint is None else hint]


def split(arm: Annotation) -> tuple[Annotation, tuple[Annotation, ...]]:
    """Returns (origin or the type itself, arguments) of an alternative.

    `list[int]` gives (list, (int,)). Annotated is unwrapped first.
    """
    while typing.get_origin(arm) is Annotated:
        arm = typing.get_args(arm)[0]
    return typing.get_origin(arm) or arm, typing.get_args(arm)


def _rank(arm: Annotation) -> int:
    base, _ = split(arm)
    return _ORDER.index(base) if base in _ORDER else len(_ORDER)


def mentions_config(hint: Annotation) -> bool:
    """Returns whether a parameter receives configs without building them.

    That is the case for `Config`, `Config | None`, `list[Config]` or `dict[str, Config]`.
    """
    if isinstance(hint, str):
        return "Config" in hint
    for arm in arms(hint):
        base, args = split(arm)
        if isinstance(base, type) and issubclass(base, ConfigBase):
            return True
        if any(map(mentions_config, args)):
            return True
    return False


def accepts_config(hint: Annotation) -> bool:
    """Returns whether a field with this hint accepts a Config.

    It does if the hint mentions Config, allows any data, or has an alternative that is not data.
    """
    # Any comes last in the order of data types, so alternatives with a higher rank are not data.
    return any(_rank(arm) >= _ORDER.index(_ANY_DATA) for arm in arms(hint))


def element_hint(hint: Annotation, key: str | int) -> Annotation:
    """Returns the hint of `value[key]` for a value of this hint; Any if the hint does not specify one."""
    for arm in arms(hint):
        base, args = split(arm)
        if args and (base in LISTS or (base is tuple and args[-1] is Ellipsis)):
            return args[0]
        if base is tuple and int(key) < len(args):
            return args[int(key)]
        if base in DICTS and len(args) == 2:
            return args[1]
    return _ANY_DATA


def has_integer_keys(hint: Annotation) -> bool:
    """Returns whether a value of this hint may be a dict with integer keys.

    In optax's piecewise schedules, for example, the keys are steps.
    """
    for arm in arms(hint):
        base, args = split(arm)
        if base in DICTS and args[:1] == (int,):
            return True
    return False


def describe_hint(hint: Annotation) -> str:
    """Describes a hint in words: `an integer > 0 or none`."""
    # A dict removes duplicates and keeps the order.
    phrases: dict[str, None] = {}
    # "none" goes last, where readers expect it.
    for arm in sorted(arms(hint), key=lambda arm: arm is _NONE):
        base, args = split(arm)
        if base is Literal:
            description = f"one of {', '.join(map(repr, args))}"
        elif base is tuple and args and args[-1] is not Ellipsis:
            elements = ", ".join(map(describe_hint, args))
            description = f"a tuple of {len(args)} ({elements})"
        elif base is tuple or base in LISTS:
            description = "a tuple" if base is tuple else "a list"
            if args:
                description += f" (each: {describe_hint(args[0])})"
        elif base in DICTS:
            key_type = "integer" if has_integer_keys(arm) else "text"
            description = f"a dict with {key_type} keys"
            if args:
                description += f" (each value: {describe_hint(args[1])})"
        elif base is _ANY_DATA:
            description = "data or a config"
        else:
            description = _TYPE_NAMES.get(base, "a config")
        limits = " and ".join(f"{limit.sign} {limit.bound}" for limit in _limits(arm))
        phrases[f"{description} {limits}".strip()] = None
    return " or ".join(phrases)


def _limits(hint: Annotation) -> Iterator[_Limit]:
    """Yields each annotated-types limit. Other metadata is documentation, not a limit.

    Raises ConfigError, on iteration, for an annotated-types constraint other than Gt, Ge, Lt, Le and Interval: a range
    that is silently not checked would be worse than none.
    """
    for note in getattr(hint, "__metadata__", ()):
        # An Interval consists of several limits.
        constraints = note if isinstance(note, at.Interval) else [note]
        for constraint in constraints:
            kind = type(constraint)
            if kind in _SIGNS:
                # "gt" is both the attribute of Gt and the function of `operator`.
                name = kind.__name__.lower()
                bound = getattr(constraint, name)
                yield _Limit(_SIGNS[kind], bound, getattr(operator, name))
            elif isinstance(constraint, at.BaseMetadata | at.GroupedMetadata):
                advice = "use Gt, Ge, Lt, Le, Interval"
                raise ConfigError(f"{constraint!r} is not supported in a type hint; {advice}")


def convert(hint: Annotation, value: object, path: str) -> object:
    """Converts `value` to the form that a field with this hint stores; containers and configs are copied.

    Raises ConfigError if the value does not fit (FieldTypeError if its type is wrong), with `path` or the path of the
    element that does not fit.
    """
    failures: list[ConfigError] = []
    for arm in arms(hint):
        try:
            result = _convert_arm(arm, value, path)
        except ConfigError as failure:
            # A kept traceback keeps the frames of all callers alive, and with them the state that they refer to.
            failures.append(failure.with_traceback(None))
            continue
        if isinstance(result, ConfigBase) or all(limit.test(result, limit.bound) for limit in _limits(arm)):
            return result
        failures.append(ConfigError("", path=path))
    # The error of an element is more precise than the error that the container does not fit. If there are several, it
    # is unknown which alternative was meant.
    element_failures = [failure for failure in failures if failure.path != path]
    if len(element_failures) == 1:
        raise element_failures[0]
    suggestion = ""
    # 1e3 is a float in Python and in JSON.
    if isinstance(value, float) and value.is_integer():
        number = int(value)
        integers = [arm for arm in arms(hint) if split(arm)[0] is int]
        if any(all(limit.test(number, limit.bound) for limit in _limits(arm)) for arm in integers):
            suggestion = f"; write {number}"
    if isinstance(value, str):
        choices = []
        for arm in arms(hint):
            base, args = split(arm)
            if base is Literal:
                choices += [str(choice) for choice in args]
        if nearest(value, choices):
            suggestion = did_you_mean(value, choices)
    is_type_error = all(isinstance(failure, FieldTypeError) for failure in failures)
    error_type = FieldTypeError if is_type_error else ConfigError
    raise error_type(f"expected {describe_hint(hint)}, given {show(value)}{suggestion}", path=path)


def _convert_arm(arm: Annotation, value: object, path: str) -> object:
    """Converts a value for one alternative, without checking its limits.

    Errors at `path` itself have no message, because `convert` writes one.
    """
    base, args = split(arm)
    if isinstance(value, ConfigBase) and accepts_config(arm):
        return value.copy()
    if base is _ANY_DATA:
        # bool before int, because it is a subclass of int. Anything that is not data fails as a list.
        base = next((kind for kind in (bool, int, float, str, dict, _NONE) if isinstance(value, kind)), list)
    if base is Literal:
        for choice in args:
            # Compare the types too, because 1 == True.
            if choice == value and type(choice) is type(value):
                return choice
        if type(value) in map(type, args):
            raise ConfigError("", path=path)
    elif (base in LISTS or base is tuple) and isinstance(value, list | tuple):
        if base is tuple and args and args[-1] is not Ellipsis and len(args) != len(value):
            raise ConfigError("", path=path)
        elements = [convert(element_hint(arm, i), item, join(path, i)) for i, item in enumerate(value)]
        # Tuples become lists too: unless the hint is a tuple, reading back from JSON could not restore one.
        return tuple(elements) if base is tuple else elements
    elif base in DICTS and isinstance(value, dict):
        return _convert_dict(arm, value, path)
    elif base in (bool, _NONE) and isinstance(value, base):
        return value
    # True and False are integers in Python, but a mistake where a number is expected.
    elif base is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif base in (int, str) and isinstance(value, base) and not isinstance(value, bool):
        # Convert subclasses, such as those of numpy or Enum, to the plain type.
        return base(value)
    raise FieldTypeError("", path=path)


def _convert_dict(arm: Annotation, value: dict[object, object], path: str) -> dict[str, object]:
    keys = list(value)
    if has_integer_keys(arm):
        # Stored as strings, because JSON has no other keys; `Config.instantiate` converts them back to integers.
        fits = all(not isinstance(key, bool) and _INTEGER.fullmatch(str(key)) for key in keys)
    else:
        # "$class" is reserved: it marks a dict in a JSON file as a config.
        fits = all(isinstance(key, str) and key and not key.startswith("$") for key in keys)
    if not fits:
        raise FieldTypeError("", path=path)
    converted = {}
    for key, item in value.items():
        name = key if isinstance(key, str) else str(key)
        converted[name] = convert(element_hint(arm, name), item, join(path, name))
    return converted
