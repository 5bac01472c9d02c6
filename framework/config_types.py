"""What a type hint means for a config field: which data it allows, in code and in words.

Imports `framework.config_errors`. Only data sits in a config (bool, int, float, str, None, list, tuple, dict with text
keys, Config), so a hint is read as the set of data it allows. Coercion is narrow on purpose (int -> float, list <->
tuple): a `"1e-3"` that becomes a number in one place and stays text in another is how typos reach step 1. Alternatives
of a hint that are no data (an array, a callable, a protocol) are met by a Config that builds such an object.
"""

import collections.abc
import enum
import types
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, Union

import annotated_types as at
import ml_collections

from framework.config_errors import Mismatch, did_you_mean, nearest

PositiveInt = Annotated[int, at.Gt(0)]
NonNegativeInt = Annotated[int, at.Ge(0)]
PositiveFloat = Annotated[float, at.Gt(0)]
NonNegativeFloat = Annotated[float, at.Ge(0)]
Fraction = Annotated[float, at.Interval(ge=0, lt=1)]
Probability = Annotated[float, at.Interval(ge=0, le=1)]
DType = Literal["float32", "bfloat16", "float16", "float64"]

LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "none"}
_LIMITS: dict[type, tuple[str, Callable[[Any, Any], bool]]] = {
    at.Gt: ("> {gt}", lambda value, limit: value > limit.gt),
    at.Ge: (">= {ge}", lambda value, limit: value >= limit.ge),
    at.Lt: ("< {lt}", lambda value, limit: value < limit.lt),
    at.Le: ("<= {le}", lambda value, limit: value <= limit.le),
    at.MultipleOf: ("a multiple of {multiple_of}", lambda value, limit: value % limit.multiple_of == 0),
    at.MinLen: ("at least {min_length} long", lambda value, limit: len(value) >= limit.min_length),
    at.MaxLen: ("at most {max_length} long", lambda value, limit: len(value) <= limit.max_length),
}


class ConfigBase(ml_collections.ConfigDict):
    """What `Config` derives from. It exists so that this module can recognise a Config without importing it."""

    def copy(self) -> "ConfigBase":
        raise NotImplementedError


def arms(hint: Any) -> list[Any]:
    """The alternatives of a hint, with Optional, Union, aliases and new types opened."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [arm for part in typing.get_args(hint) for arm in arms(part)]
    if hasattr(hint, "__supertype__"):
        return arms(hint.__supertype__)
    if isinstance(hint, typing.TypeVar):
        return arms(hint.__bound__) if hint.__bound__ is not None else [Any]
    if type(hint).__name__ == "TypeAliasType":  # Python 3.12's `type X = ...`
        return arms(hint.__value__)
    if hint is None:
        return [type(None)]
    # A hint that nobody can resolve must not refuse a good value.
    return [Any] if hint in (Any, object) or isinstance(hint, str | typing.ForwardRef) else [hint]


def split(arm: Any) -> tuple[Any, tuple[Any, ...]]:
    """(origin or the type itself, arguments) of one alternative: `list[int]` -> (list, (int,)), `int` -> (int, ())."""
    return typing.get_origin(arm) or arm, typing.get_args(arm)


def _is(base: Any, kind: type) -> bool:
    return isinstance(base, type) and issubclass(base, kind)


def mentions_config(hint: Any) -> bool:
    """Whether a parameter wants configs as they are: `Config`, `Config | None`, `list[Config]`, `dict[str, Config]`."""
    return any(_is(arm, ConfigBase) or any(map(mentions_config, split(arm)[1])) for arm in _opened(hint))


def _opened(hint: Any) -> list[Any]:
    # Literal choices and the parameter list of a Callable are arguments but no hints.
    return arms(hint) if not isinstance(hint, str | list | int | bytes | enum.Enum) else []


def accepts_config(hint: Any) -> bool:
    """Whether a Config itself may stand here."""
    return any(arm is Any or is_opaque(arm) or _is(split(arm)[0], ConfigBase) for arm in arms(hint))


def is_opaque(arm: Any) -> bool:
    """Whether an alternative is no data: an array, a callable, a protocol, any other class."""
    base, args = split(arm)
    if base is Annotated:
        return any(is_opaque(inner) for inner in arms(args[0]))
    data = arm is Any or base in (Literal, tuple) or base in _WORDS or base in LISTS or base in DICTS
    return not (data or _is(base, enum.Enum) or _is(base, ConfigBase))


def expected(hint: Any) -> str:
    """A hint in words: `an integer > 0 or none`."""
    choices = arms(hint)
    words = [_arm_in_words(arm) for arm in choices if not is_opaque(arm)]
    if any(map(is_opaque, choices)):
        names = {_name(split(arm)[0]) for arm in choices if is_opaque(arm)}
        words.append("a config" if words else f"a config that builds {' or '.join(sorted(names))}")
    return " or ".join(dict.fromkeys(words))


def _name(base: Any) -> str:
    return "a function" if base is collections.abc.Callable else getattr(base, "__name__", str(base))


def _arm_in_words(arm: Any) -> str:
    base, args = split(arm)
    if arm is Any:
        return "any data"
    if base is Annotated:
        return f"{expected(args[0])} {' and '.join(words for words, _ in _limits(args[1:]))}".strip()
    if base is Literal:
        return "one of " + ", ".join(map(repr, args))
    if base in _WORDS:
        return _WORDS[base]
    if base in LISTS:
        return f"a list (each: {expected(args[0])})" if args else "a list"
    if base is tuple and args and args[-1] is not Ellipsis:
        return f"a tuple of {len(args)} ({', '.join(map(expected, args))})"
    if base is tuple:
        return f"a tuple (each: {expected(args[0])})" if args else "a tuple"
    if base in DICTS:
        return f"a dict (each value: {expected(args[1])})" if len(args) == 2 else "a dict"
    if _is(base, enum.Enum):
        return "one of " + ", ".join(map(repr, arm.__members__))
    return "a config"


def _limits(metadata: Iterable[Any]) -> list[tuple[str, Callable[[Any], bool]]]:
    """(words, test) of each annotated-types limit. Other metadata is documentation, not a limit."""
    found: list[tuple[str, Callable[[Any], bool]]] = []
    for limit in metadata:
        if type(limit) in _LIMITS:
            words, test = _LIMITS[type(limit)]
            found.append((words.format(**vars_of(limit)), lambda value, test=test, limit=limit: test(value, limit)))
        elif isinstance(limit, at.GroupedMetadata):  # Interval, Len
            found.extend(_limits(limit))
    return found


def vars_of(limit: Any) -> dict[str, Any]:
    return {name: getattr(limit, name) for name in type(limit).__dataclass_fields__}


def convert(hint: Any, value: Any) -> Any:
    """`value` as a field of this hint stores it. Containers and configs are copied: a config owns what it holds.

    Raises:
        Mismatch: the value does not fit; its `where` leads to the inner element at fault.
    """
    # Exact types first, so that 3 under `float | int` stays an integer.
    choices = sorted(arms(hint), key=lambda arm: not (arm is type(value) or split(arm)[0] in (Annotated, Literal)))
    return first_fit(hint, value, [lambda arm=arm: convert_arm(arm, value) for arm in choices])


def first_fit(hint: Any, value: Any, attempts: list[Callable[[], Any]]) -> Any:
    """The first attempt that raises no Mismatch; else the most telling of their mismatches."""
    failures: list[Mismatch] = []
    for attempt in attempts:
        try:
            return attempt()
        except Mismatch as mismatch:
            failures.append(mismatch)
    inner = [failure for failure in failures if failure.where]
    if len(failures) == 1 or len(inner) == 1:
        raise (inner or failures)[0]
    near = next((failure.near for failure in failures if failure.near), "")
    raise Mismatch(expected(hint), value, right_type=any(failure.right_type for failure in failures), near=near)


def convert_arm(arm: Any, value: Any) -> Any:
    """`convert` for one alternative of a hint."""
    base, args = split(arm)
    if arm is Any:
        return as_data(value)
    if base is Annotated:
        try:
            result = convert(args[0], value)
        except Mismatch as mismatch:
            raise mismatch if mismatch.where else Mismatch(expected(arm), value, near=mismatch.near) from None
        if not isinstance(result, ConfigBase) and not all(test(result) for _, test in _limits(args[1:])):
            raise Mismatch(expected(arm), value, right_type=True)
        return result
    if base is Literal:
        return _choice(arm, value, args, args)
    if _is(base, enum.Enum):
        if isinstance(value, base):
            return value.name
        names = [member.name for member in base]
        by_value = {member.value: member.name for member in base}
        return _choice(arm, by_value.get(value, value) if isinstance(value, str) else value, names, names)
    if isinstance(value, ConfigBase):
        if _is(base, ConfigBase) or is_opaque(arm):
            return as_data(value)
    elif base in LISTS and isinstance(value, list | tuple):
        items = [inner(args[0] if args else Any, key, item) for key, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) and base is not list else items  # a Sequence may be either
    elif base is tuple and isinstance(value, list | tuple):
        hints = args if args and args[-1] is not Ellipsis else (args[0] if args else Any,) * len(value)
        if len(hints) != len(value):
            raise Mismatch(expected(arm), value, right_type=True)
        return tuple(inner(hint, key, item) for key, (hint, item) in enumerate(zip(hints, value, strict=True)))
    elif base in DICTS and isinstance(value, dict):
        return {key: inner(args[1] if len(args) == 2 else Any, key, item) for key, item in _text_keys(value)}
    elif base is bool or base is type(None):
        if isinstance(value, base):
            return value
    elif base in (int, float) and not isinstance(value, bool):
        if isinstance(value, int) or (base is float and isinstance(value, float)):
            return base(value)
    elif base is str and isinstance(value, str):
        return str.__str__(value)  # the content, also of a text Enum member
    raise Mismatch(expected(arm), value)


def _choice(arm: Any, value: Any, valid: Iterable[Any], names: Iterable[Any]) -> Any:
    for one in valid:
        if one == value and type(one) is type(value):
            return value
    near = did_you_mean_only(value, [name for name in names if isinstance(name, str)])
    raise Mismatch(expected(arm), value, right_type=isinstance(value, tuple({type(one) for one in valid})), near=near)


def did_you_mean_only(value: Any, names: list[str]) -> str:
    """`did_you_mean`, silent when nothing is close: the choices are in the message already."""
    return did_you_mean(value, names) if isinstance(value, str) and nearest(value, names) else ""


def inner(hint: Any, key: Any, value: Any) -> Any:
    """`convert` of one element, its key noted in a mismatch."""
    try:
        return convert(hint, value)
    except Mismatch as mismatch:
        raise mismatch.at(key) from None


def _text_keys(value: dict[Any, Any]) -> Iterable[tuple[str, Any]]:
    for key in value:
        if not isinstance(key, str) or not key or key.startswith("$"):
            raise Mismatch("keys that are text and do not start with '$'", key)
    return value.items()


def as_data(value: Any) -> Any:
    """A copy of any data.

    Raises:
        Mismatch: what a config cannot hold: arrays, functions, sets, objects.
    """
    if isinstance(value, ConfigBase):
        return value.copy()
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)  # without numpy's or an Enum's subclass
    if isinstance(value, str):
        return str.__str__(value)
    if type(value) in (list, tuple):
        return type(value)(inner(Any, key, item) for key, item in enumerate(value))
    if type(value) is dict:
        return {key: inner(Any, key, item) for key, item in _text_keys(value)}
    raise Mismatch("data (bool, int, float, str, None, list, tuple, dict) or a config", value)


def element_hint(hint: Any, key: str) -> Any:
    """The hint of `value[key]` for a value of the given hint; Any where the hint does not say."""
    found = []
    for arm in arms(hint):
        base, args = split(arm)
        if base is Annotated:
            found.append(element_hint(args[0], key))
        elif args and (base in LISTS or (base is tuple and args[-1] is Ellipsis)):
            found.append(args[0])
        elif base is tuple and key.isdigit() and int(key) < len(args):
            found.append(args[int(key)])
        elif base in DICTS and len(args) == 2:
            found.append(args[1])
    return Union[tuple(found)] if found else Any  # noqa: UP007 (built at run time)
