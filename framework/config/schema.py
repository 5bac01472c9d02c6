"""The schema of a component, read from its constructor's signature; what its type hints allow; values as text.

Only data sits in a config (bool, int, float, str, None, list, tuple, dict with text keys, Config), so a hint is read as
the set of data it allows. Coercion is narrow on purpose (int -> float, list <-> tuple): a "1e-3" that becomes a number
in one place and stays text in another is how typos reach step 1. Alternatives of a hint that are no data (an array, a
callable, a protocol) are met by a Config that builds such an object. Text from the command line is read by the hint;
nothing is evaluated.
"""

import ast
import collections.abc
import contextlib
import dataclasses
import enum
import inspect
import json
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, Literal, Union

import annotated_types as at
import ml_collections

from framework.config.names import ConfigError, FieldTypeError, did_you_mean, join, name_of, nearest, show

LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_NONE = type(None)
_WORDS = {bool: "true or false", int: "an integer", float: "a number", _NONE: "none", str: "text"}
# In which order alternatives are tried: what settles the question first; `str` and Any take whatever is left.
_ORDER = [Literal, _NONE, bool, int, float, *LISTS, tuple, *DICTS, str, Any]
_SIGNS = {at.Gt: ">", at.Ge: ">=", at.Lt: "<", at.Le: "<="}
_INTEGER = re.compile(r"-?[0-9]+")
_PLAIN = re.compile(r"[\w./:*+-]+\Z")
_LITERALS = {"none": None, "null": None, "true": True, "false": False} | {w: float(w) for w in ("inf", "-inf", "nan")}


class Mark(enum.Enum):
    """What stands where there is no value: an unset field without default; what one side of a `diff` lacks."""

    REQUIRED = 1
    ABSENT = 2


REQUIRED: Any = Mark.REQUIRED
ABSENT: Any = Mark.ABSENT


class ConfigBase(ml_collections.ConfigDict):
    """What `Config` derives from. It exists so that this module can recognise a Config without importing it."""

    _target: Callable[..., Any]
    copy: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Field:
    """One parameter of a constructor."""

    hint: Any  # one whose names cannot be resolved stays text, and accepts any data
    default: Any = REQUIRED  # the signature's
    is_data: bool = False  # whether the default is data, so that a config holds it; else the constructor uses its own


@dataclasses.dataclass(frozen=True, eq=False)  # hints are hashed
class ShortNames:
    """Of a hint, `Annotated[Config, ShortNames(...)]`: the components that text may name without their module."""

    components: collections.abc.Mapping[str, Callable[..., Any]]


def short_names(hint: Any) -> dict[str, Callable[..., Any]]:
    """The components that a field of this hint knows by short names."""
    notes = [note for arm in arms(hint) for note in getattr(arm, "__metadata__", ())]
    return {name: one for note in notes if isinstance(note, ShortNames) for name, one in note.components.items()}


def schema(target: Callable[..., Any], reserved: Collection[str] = ()) -> dict[str, Field]:
    """The fields of a function, or of a class: its `__init__`, and its bases' while `**kwargs` forwards to them.

    Parameters that start with an underscore and have a default, and `*args`, are not fields. Raises ConfigError when
    there is no readable signature, for names that are `reserved`, and for a default out of its own range.
    """
    owner = name_of(target)
    bases = [cls for cls in target.__mro__ if "__init__" in vars(cls)] if isinstance(target, type) else []
    fields: dict[str, Field] = {}
    for function in [target, *bases]:
        parameters = _signature(owner, function).parameters
        for name, parameter in parameters.items():
            starred = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            private = name.startswith("_") and parameter.default is not parameter.empty
            if starred or private or name in fields:
                continue
            if name in reserved or name.startswith("_") or parameter.kind is parameter.POSITIONAL_ONLY:
                why = "it goes by position only" if name not in reserved else "Config needs that name itself; rename it"
                raise ConfigError(f"{owner}: parameter {name!r} cannot be a field: {why}")
            fields[name] = _field(f"{owner}.{name}", parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return fields


def _signature(owner: str, function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except (NameError, AttributeError, SyntaxError):
        return inspect.signature(function)  # names that only type checkers import: those hints stay text
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{owner} cannot be configured: {error}") from error


def _field(path: str, parameter: inspect.Parameter) -> Field:
    hint, default = Any if parameter.annotation is parameter.empty else parameter.annotation, parameter.default
    if default is parameter.empty:
        return Field(hint)
    if default is None and not isinstance(hint, str):
        hint = Union[hint, None]  # noqa: UP007 (`x: int = None` is common in other people's code)
    try:
        return Field(hint, convert(hint, default, f"{path}, by default"), is_data=True)
    except FieldTypeError:
        return Field(hint, default)


def arms(hint: Any) -> list[Any]:
    """The alternatives of a hint, in the order in which they are tried."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if bool in args and complex in args:
            # An array or anything that becomes one (jax.typing.ArrayLike): there, true would be the number 1.
            args = tuple(part for part in args if part is not bool)
        return sorted((arm for part in args for arm in arms(part)), key=_rank)
    if origin is Annotated:
        return [Annotated[(arm, *hint.__metadata__)] for arm in arms(args[0])]
    # A hint that nobody can resolve must not refuse a good value.
    if hint is object or isinstance(hint, str | typing.ForwardRef | typing.TypeVar):
        return [Any]
    return [_NONE if hint is None else hint]


def split(arm: Any) -> tuple[Any, tuple[Any, ...]]:
    """(origin or the type itself, arguments) of an alternative, through Annotated: `list[int]` -> (list, (int,))."""
    while typing.get_origin(arm) is Annotated:
        arm = typing.get_args(arm)[0]
    return typing.get_origin(arm) or arm, typing.get_args(arm)


def _rank(arm: Any) -> int:
    base = split(arm)[0]
    return _ORDER.index(base) if base in _ORDER else len(_ORDER)


def mentions_config(hint: Any) -> bool:
    """Whether a parameter wants configs as they are: `Config`, `Config | None`, `list[Config]`, `dict[str, Config]`."""
    if isinstance(hint, str):
        return "Config" in hint
    parts = [split(arm) for arm in arms(hint)]
    return any((isinstance(b, type) and issubclass(b, ConfigBase)) or any(map(mentions_config, a)) for b, a in parts)


def accepts_config(hint: Any) -> bool:
    """Whether a Config itself may stand here: where a hint asks for one, for any data, or for what is no data."""
    return any(_rank(arm) >= _ORDER.index(Any) for arm in arms(hint))


def element_hint(hint: Any, key: str | int) -> Any:
    """The hint of `value[key]` for a value of the given hint; Any where the hint does not say."""
    for base, args in map(split, arms(hint)):
        if args and (base in LISTS or (base is tuple and args[-1] is Ellipsis)):
            return args[0]
        if base is tuple and int(key) < len(args):
            return args[int(key)]
        if base in DICTS and len(args) == 2:
            return args[1]
    return Any


def has_integer_keys(hint: Any) -> bool:
    """Whether a value of this hint may be a dict whose keys are integers (steps, of optax's piecewise schedules)."""
    return any(base in DICTS and args[:1] == (int,) for base, args in map(split, arms(hint)))


def expected(hint: Any) -> str:
    """A hint in words: `an integer > 0 or none`."""
    choices = sorted(arms(hint), key=lambda arm: arm is _NONE)
    return " or ".join(dict.fromkeys(map(_arm_in_words, choices)))


def _arm_in_words(arm: Any) -> str:
    base, args = split(arm)
    if base is Literal:
        words = f"one of {', '.join(map(repr, args))}"
    elif base is tuple and args and args[-1] is not Ellipsis:
        words = f"a tuple of {len(args)} ({', '.join(map(expected, args))})"
    elif base is tuple or base in LISTS:
        words = f"a {'tuple' if base is tuple else 'list'}" + (f" (each: {expected(args[0])})" if args else "")
    elif base in DICTS:
        words = f"a dict with {'integer' if has_integer_keys(arm) else 'text'} keys" + (
            f" (each value: {expected(args[1])})" if args else ""
        )
    else:
        words = _WORDS.get(base, "data or a config" if base is Any else "a config")
    limits = " and ".join(f"{limit} {bound}" for limit, bound, _ in _limits(arm))
    return f"{words} {limits}".strip()


def _limits(hint: Any) -> Iterator[tuple[str, Any, Callable[[Any, Any], bool]]]:
    """(sign, bound, test) of each annotated-types limit. Other metadata is documentation, not a limit."""
    for limit in getattr(hint, "__metadata__", ()):
        for one in limit if isinstance(limit, at.Interval) else [limit]:
            if type(one) in _SIGNS:
                name = type(one).__name__.lower()  # gt: the attribute of Gt, and the function of `operator`
                yield _SIGNS[type(one)], getattr(one, name), getattr(operator, name)
            elif isinstance(one, at.BaseMetadata | at.GroupedMetadata):
                raise ConfigError(f"{one!r} is not supported in a type hint; use Gt, Ge, Lt, Le, Interval")


def convert(hint: Any, value: Any, path: str) -> Any:
    """`value` as a field of this hint stores it; containers and configs are copied. Raises ConfigError at `path` when
    the value does not fit (FieldTypeError if by its type), or at the path of the element that does not."""
    failures: list[ConfigError] = []
    for arm in arms(hint):
        try:
            result = _convert_arm(arm, value, path)
        except ConfigError as failure:
            failures.append(failure)
            continue
        if isinstance(result, ConfigBase) or all(test(result, bound) for _, bound, test in _limits(arm)):
            return result
        failures.append(ConfigError("", path=path))
    inner = [failure for failure in failures if failure.path != path]
    if len(inner) == 1:
        raise inner[0]
    choices = [str(choice) for base, args in map(split, arms(hint)) if base is Literal for choice in args]
    near = did_you_mean(value, choices) if isinstance(value, str) and nearest(value, choices) else ""
    kind = FieldTypeError if all(isinstance(failure, FieldTypeError) for failure in failures) else ConfigError
    raise kind(f"expected {expected(hint)}, given {show(value)}{near}", path=path)


def _convert_arm(arm: Any, value: Any, path: str) -> Any:
    """`convert` for one alternative, its limits aside. An error at `path` itself needs no words: `convert` has them."""
    base, args = split(arm)

    def element(key: Any, item: Any) -> Any:
        return convert(element_hint(arm, key), item, join(path, key))

    if isinstance(value, ConfigBase) and accepts_config(arm):
        return value.copy()
    if base is Any:
        base = next((kind for kind in (bool, int, float, str, dict, _NONE) if isinstance(value, kind)), list)
    if base is Literal:
        for choice in args:
            if choice == value and type(choice) is type(value):
                return choice
        if type(value) in map(type, args):
            raise ConfigError("", path=path)
    elif base in LISTS and isinstance(value, list | tuple):
        # A list, also of a tuple: where the hint does not say tuple, JSON could not bring one back.
        return [element(key, item) for key, item in enumerate(value)]
    elif base is tuple and isinstance(value, list | tuple):
        if args and args[-1] is not Ellipsis and len(args) != len(value):
            raise ConfigError("", path=path)
        return tuple(element(key, item) for key, item in enumerate(value))
    elif base in DICTS and has_integer_keys(arm) and isinstance(value, dict):
        # As text, since JSON has no other keys; `Config.instantiate` makes them integers again.
        keys = [str(key) for key in value if not isinstance(key, bool)]
        if len(keys) == len(value) and all(map(_INTEGER.fullmatch, keys)):
            return {key: element(key, item) for key, item in zip(keys, value.values(), strict=True)}
    elif base in DICTS and isinstance(value, dict):
        if all(isinstance(key, str) and key and not key.startswith("$") for key in value):
            return {key: element(key, item) for key, item in value.items()}
    elif base in (bool, _NONE) and isinstance(value, base):
        return value
    elif base is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif base in (int, str) and isinstance(value, base) and not isinstance(value, bool):
        return base(value)  # without a subclass: numpy's, an Enum's
    raise FieldTypeError("", path=path)


def parse_text(hint: Any, text: str, path: str) -> Any:
    """The value that `text` stands for under this hint: `12`, `3e-4`, `true`, `none`, a choice, text with or without
    quotes, JSON, a Python literal, or `a,b,c` where a list may stand. Raises as `convert` does."""
    kinds = [split(arm) for arm in arms(hint)]
    chosen = any(base is Literal and text in choices for base, choices in kinds)  # "none" may be a choice
    try:
        return convert(hint, text if chosen else literal(text), path)
    except ConfigError as error:
        failure = error
    with contextlib.suppress(ConfigError):
        return convert(hint, text, path)
    if text.startswith(("[", "(", "{")) or not any(base in (*LISTS, tuple) for base, _ in kinds):
        raise failure
    parts = enumerate(text.split(",") if text else [])
    return convert(hint, [parse_text(element_hint(hint, i), part.strip(), join(path, i)) for i, part in parts], path)


def literal(text: str) -> Any:
    """JSON, else a Python literal, else none, true, false, inf or nan in any case, else the text itself."""
    if text.lower() in _LITERALS:
        return _LITERALS[text.lower()]
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return read(text)
    return text


def as_text(value: Any) -> str:
    """A value as one writes it on the command line: a config by its name; "?" for an unset one, "-" for none at all."""
    if isinstance(value, ConfigBase):
        return name_of(value._target)
    if isinstance(value, Mark):
        return "?" if value is REQUIRED else "-"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) and literal(value) == value and _PLAIN.match(value) else repr(value)
