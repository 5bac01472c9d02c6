"""The schema of a component, read from its constructor's signature, and values as it allows them.

Only data sits in a config (bool, int, float, str, None, list, tuple, dict with text keys, Config),
so a hint is read as the set of data it allows. Coercion is narrow on purpose (int -> float, list
<-> tuple): a "1e-3" that becomes a number in one place and stays text in another is how typos
reach step 1. Alternatives of a hint that are no data (an array, a callable, a protocol) are met by
a Config that builds such an object.
"""

import collections.abc
import dataclasses
import enum
import inspect
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union

import annotated_types as at
import ml_collections

from framework.config.names import (
    ConfigError,
    FieldTypeError,
    did_you_mean,
    join,
    name_of,
    nearest,
    show,
)

LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_NONE = type(None)
_WORDS = {bool: "true or false", int: "an integer", float: "a number", _NONE: "none", str: "text"}
# Alternatives are tried in this order: what settles the question comes first, since `str` and Any
# take whatever is left.
_ORDER = [Literal, _NONE, bool, int, float, *LISTS, tuple, *DICTS, str, Any]
_SIGNS = {at.Gt: ">", at.Ge: ">=", at.Lt: "<", at.Le: "<="}
_INTEGER = re.compile(r"-?[0-9]+")


class Mark(enum.Enum):
    """Stands where there is no value.

    REQUIRED is an unset field without default; ABSENT is what one side of a `diff` lacks.
    """

    REQUIRED = 1
    ABSENT = 2


REQUIRED: Any = Mark.REQUIRED
ABSENT: Any = Mark.ABSENT


class ConfigBase(ml_collections.ConfigDict):
    """The base class of `Config`. With it this module recognises a Config without importing it."""

    _target: Callable[..., Any]
    copy: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Field:
    """One parameter of a constructor."""

    # A hint whose names cannot be resolved stays text, and accepts any data.
    hint: Any
    # The signature's default.
    default: Any = REQUIRED
    # Whether the default is data, so that a config holds it; else the constructor uses its own.
    is_data: bool = False


# Without eq, since hints are hashed and a dict of components is not hashable.
@dataclasses.dataclass(frozen=True, eq=False)
class ShortNames:
    """The components that text may name without their module, for one field.

    They are part of the field's hint: `Annotated[Config, ShortNames(...)]`.
    """

    components: collections.abc.Mapping[str, Callable[..., Any]]


class _Limit(NamedTuple):
    """One bound of a range: `value > 0` has the sign ">", the bound 0 and the test operator.gt."""

    sign: str
    bound: Any
    test: Callable[[Any, Any], bool]


def short_names(hint: Any) -> dict[str, Callable[..., Any]]:
    """Returns the components that a field of this hint knows by short names."""
    components: dict[str, Callable[..., Any]] = {}
    for arm in arms(hint):
        for note in getattr(arm, "__metadata__", ()):
            if isinstance(note, ShortNames):
                components.update(note.components)
    return components


def schema(target: Callable[..., Any], reserved: Collection[str] = ()) -> dict[str, Field]:
    """Returns the fields of a function, or of a class.

    The fields of a class are those of its `__init__`, and of its bases' while `**kwargs` forwards
    to them. Parameters that start with an underscore and have a default, and `*args`, are not
    fields.

    Raises ConfigError when there is no readable signature, for names that are `reserved`, and for a
    default out of its own range.
    """
    owner = name_of(target)
    functions: list[Callable[..., Any]] = [target]
    if isinstance(target, type):
        functions += [cls for cls in target.__mro__ if "__init__" in vars(cls)]
    fields: dict[str, Field] = {}
    for function in functions:
        parameters = _signature(owner, function).parameters
        for name, parameter in parameters.items():
            # The class nearest to the target decides on a name that several of them have.
            if name in fields or _is_internal(parameter):
                continue
            _check_name(owner, parameter, reserved)
            fields[name] = _field(f"{owner}.{name}", parameter)
        forwards = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if not forwards:
            break
    return fields


def _is_internal(parameter: inspect.Parameter) -> bool:
    """Tells whether a parameter is no field: `*args`, `**kwargs`, or private with a default."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return True
    return parameter.name.startswith("_") and parameter.default is not parameter.empty


def _check_name(owner: str, parameter: inspect.Parameter, reserved: Collection[str]) -> None:
    """Raises ConfigError for a parameter that no field can stand for."""
    name = parameter.name
    if name in reserved:
        reason = "Config needs that name itself; rename it"
    elif name.startswith("_") or parameter.kind is parameter.POSITIONAL_ONLY:
        reason = "it goes by position only"
    else:
        return
    raise ConfigError(f"{owner}: parameter {name!r} cannot be a field: {reason}")


def _signature(owner: str, function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except (NameError, AttributeError, SyntaxError):
        # Hints with names that only type checkers import stay text.
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{owner} cannot be configured: {error}") from error


def _field(path: str, parameter: inspect.Parameter) -> Field:
    hint = Any if parameter.annotation is parameter.empty else parameter.annotation
    default = parameter.default
    if default is parameter.empty:
        return Field(hint)
    # `x: int = None` is common in other people's code.
    if default is None and not isinstance(hint, str):
        hint = Union[hint, None]  # noqa: UP007
    try:
        value = convert(hint, default, f"{path}, by default")
        return Field(hint, value, is_data=True)
    except FieldTypeError:
        return Field(hint, default)


def arms(hint: Any) -> list[Any]:
    """Returns the alternatives of a hint, in the order in which they are tried."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if bool in args and complex in args:
            # This is jax.typing.ArrayLike, an array or anything that becomes one: there, true would
            # be the number 1.
            args = tuple(part for part in args if part is not bool)
        alternatives = [arm for part in args for arm in arms(part)]
        return sorted(alternatives, key=_rank)
    if origin is Annotated:
        return [Annotated[(arm, *hint.__metadata__)] for arm in arms(args[0])]
    # A hint that nobody can resolve must not refuse a good value.
    if hint is object or isinstance(hint, str | typing.ForwardRef | typing.TypeVar):
        return [Any]
    return [_NONE if hint is None else hint]


def split(arm: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns (origin or the type itself, arguments) of an alternative.

    `list[int]` gives (list, (int,)). Annotated is looked through.
    """
    while typing.get_origin(arm) is Annotated:
        arm = typing.get_args(arm)[0]
    return typing.get_origin(arm) or arm, typing.get_args(arm)


def _rank(arm: Any) -> int:
    base, _ = split(arm)
    return _ORDER.index(base) if base in _ORDER else len(_ORDER)


def mentions_config(hint: Any) -> bool:
    """Tells whether a parameter takes configs as they are.

    It does with `Config`, `Config | None`, `list[Config]` or `dict[str, Config]`.
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


def accepts_config(hint: Any) -> bool:
    """Tells whether a Config itself may stand here.

    It may where a hint asks for one, for any data, or for what is no data.
    """
    # Any is the last kind of data in the order, so what ranks behind it is no data.
    return any(_rank(arm) >= _ORDER.index(Any) for arm in arms(hint))


def element_hint(hint: Any, key: str | int) -> Any:
    """Returns the hint of `value[key]` for a value of this hint; Any where the hint has none."""
    for arm in arms(hint):
        base, args = split(arm)
        if args and (base in LISTS or (base is tuple and args[-1] is Ellipsis)):
            return args[0]
        if base is tuple and int(key) < len(args):
            return args[int(key)]
        if base in DICTS and len(args) == 2:
            return args[1]
    return Any


def has_integer_keys(hint: Any) -> bool:
    """Tells whether a value of this hint may be a dict whose keys are integers.

    Those of optax's piecewise schedules are steps.
    """
    for arm in arms(hint):
        base, args = split(arm)
        if base in DICTS and args[:1] == (int,):
            return True
    return False


def expected(hint: Any) -> str:
    """Describes a hint in words: `an integer > 0 or none`."""
    # "none" goes last, where a reader expects it.
    choices = sorted(arms(hint), key=lambda arm: arm is _NONE)
    # A dict, as it drops repetitions and keeps the order.
    phrases = dict.fromkeys(map(_arm_in_words, choices))
    return " or ".join(phrases)


def _arm_in_words(arm: Any) -> str:
    base, args = split(arm)
    if base is Literal:
        words = f"one of {', '.join(map(repr, args))}"
    elif base is tuple and args and args[-1] is not Ellipsis:
        elements = ", ".join(map(expected, args))
        words = f"a tuple of {len(args)} ({elements})"
    elif base is tuple or base in LISTS:
        words = "a tuple" if base is tuple else "a list"
        if args:
            words += f" (each: {expected(args[0])})"
    elif base in DICTS:
        key_type = "integer" if has_integer_keys(arm) else "text"
        words = f"a dict with {key_type} keys"
        if args:
            words += f" (each value: {expected(args[1])})"
    elif base is Any:
        words = "data or a config"
    else:
        words = _WORDS.get(base, "a config")
    limits = " and ".join(f"{limit.sign} {limit.bound}" for limit in _limits(arm))
    return f"{words} {limits}".strip()


def _limits(hint: Any) -> Iterator[_Limit]:
    """Yields each annotated-types limit. Other metadata is documentation, not a limit.

    Raises ConfigError, when it comes to it, for a constraint of annotated-types that is none of
    Gt, Ge, Lt, Le and Interval: a range that is not checked would be worse than none.
    """
    for note in getattr(hint, "__metadata__", ()):
        # An Interval is several limits.
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


def convert(hint: Any, value: Any, path: str) -> Any:
    """Returns `value` as a field of this hint stores it; containers and configs are copied.

    Raises ConfigError at `path` when the value does not fit (FieldTypeError if by its type), or at
    the path of the element that does not.
    """
    failures: list[ConfigError] = []
    for arm in arms(hint):
        try:
            result = _convert_arm(arm, value, path)
        except ConfigError as failure:
            failures.append(failure)
            continue
        if isinstance(result, ConfigBase) or _is_in_range(arm, result):
            return result
        failures.append(ConfigError("", path=path))
    # An element's own error says more than that the container does not fit. Of several nobody knows
    # which alternative was meant.
    element_failures = [failure for failure in failures if failure.path != path]
    if len(element_failures) == 1:
        raise element_failures[0]
    suggestion = ""
    if isinstance(value, str):
        choices = _text_choices(hint)
        if nearest(value, choices):
            suggestion = did_you_mean(value, choices)
    is_type_error = all(isinstance(failure, FieldTypeError) for failure in failures)
    error_type = FieldTypeError if is_type_error else ConfigError
    raise error_type(f"expected {expected(hint)}, given {show(value)}{suggestion}", path=path)


def _is_in_range(arm: Any, value: Any) -> bool:
    return all(limit.test(value, limit.bound) for limit in _limits(arm))


def _text_choices(hint: Any) -> list[str]:
    """Returns the choices of a hint's Literals, as text."""
    choices = []
    for arm in arms(hint):
        base, args = split(arm)
        if base is Literal:
            choices += [str(choice) for choice in args]
    return choices


def _convert_arm(arm: Any, value: Any, path: str) -> Any:
    """Does `convert` for one alternative, its limits aside.

    An error at `path` itself needs no words: `convert` has them.
    """
    base, args = split(arm)
    if isinstance(value, ConfigBase) and accepts_config(arm):
        return value.copy()
    if base is Any:
        base = _data_type(value)
    if base is Literal:
        return _convert_choice(args, value, path)
    if base in LISTS and isinstance(value, list | tuple):
        # A tuple becomes a list too: where the hint does not say tuple, JSON could not bring one
        # back.
        return _convert_elements(arm, value, path)
    if base is tuple and isinstance(value, list | tuple):
        if args and args[-1] is not Ellipsis and len(args) != len(value):
            raise ConfigError("", path=path)
        return tuple(_convert_elements(arm, value, path))
    if base in DICTS and isinstance(value, dict):
        return _convert_dict(arm, value, path)
    if base in (bool, _NONE) and isinstance(value, base):
        return value
    # True and False are integers to Python, and a mistake where a number is expected.
    if base is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if base in (int, str) and isinstance(value, base) and not isinstance(value, bool):
        # Without a subclass, such as numpy's or an Enum's.
        return base(value)
    raise FieldTypeError("", path=path)


def _data_type(value: Any) -> type:
    """Returns the type of data that a value is; list for one that is no data, which then fails."""
    # bool before int, since it is a subclass.
    for kind in (bool, int, float, str, dict, _NONE):
        if isinstance(value, kind):
            return kind
    return list


def _convert_choice(choices: tuple[Any, ...], value: Any, path: str) -> Any:
    """Returns the choice of a Literal that equals the value."""
    for choice in choices:
        # The types too, as 1 == True.
        if choice == value and type(choice) is type(value):
            return choice
    if type(value) in map(type, choices):
        raise ConfigError("", path=path)
    raise FieldTypeError("", path=path)


def _convert_elements(arm: Any, values: list[Any] | tuple[Any, ...], path: str) -> list[Any]:
    return [convert(element_hint(arm, i), item, join(path, i)) for i, item in enumerate(values)]


def _convert_dict(arm: Any, value: dict[Any, Any], path: str) -> dict[str, Any]:
    keys: list[str]
    if has_integer_keys(arm):
        # As text, since JSON has no other keys; `Config.instantiate` makes them integers again.
        keys = [str(key) for key in value if not isinstance(key, bool)]
        fits = len(keys) == len(value) and all(map(_INTEGER.fullmatch, keys))
    else:
        # "$class" is what makes a dict of a JSON file a config.
        keys = list(value)
        fits = all(isinstance(key, str) and key and not key.startswith("$") for key in keys)
    if not fits:
        raise FieldTypeError("", path=path)
    converted = {}
    for key, item in zip(keys, value.values(), strict=True):
        converted[key] = convert(element_hint(arm, key), item, join(path, key))
    return converted
