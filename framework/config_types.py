"""What a type hint means for a config field: checking a Python value, parsing command-line text, describing both in words.

Imports nothing of Plimsoll. `framework.config` is the door to all of it; the names below that users need are re-exported there.
Only data may sit in a config (bool, int, float, str, None, list, tuple, dict with text keys, Config), so a hint is read
as the set of data it allows. Coercion is narrow on purpose: int -> float and list <-> tuple, nothing else, because
`"1e-3"` that silently becomes a number in one place and stays text in another is how typos reach step 1.
"""

import ast
import collections.abc
import difflib
import enum
import json
import re
import types
import typing
from typing import Annotated, Any, Literal, Union

import annotated_types as at
import ml_collections

PositiveInt = Annotated[int, at.Gt(0)]
NonNegativeInt = Annotated[int, at.Ge(0)]
PositiveFloat = Annotated[float, at.Gt(0)]
NonNegativeFloat = Annotated[float, at.Ge(0)]
Fraction = Annotated[float, at.Interval(ge=0, lt=1)]
Probability = Annotated[float, at.Interval(ge=0, le=1)]
DType = Literal["float32", "bfloat16", "float16", "float64"]

_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_RANGES = ((at.Gt, "gt", ">"), (at.Ge, "ge", ">="), (at.Lt, "lt", "<"), (at.Le, "le", "<="))
_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "none"}


class ConfigBase(ml_collections.ConfigDict):
    """What `Config` derives from; it exists so that this module can recognise a Config without importing it."""


class ConfigError(ValueError):
    """A mistake in a config. The message says where (dotted path), what was expected, what was given, and the nearest valid choice.

    Attributes:
        path: dotted path of the field or component at fault, "" when it concerns the whole config.
    """

    def __init__(self, message: str, *, path: str = ""):
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path

    # KeyError.__str__ would otherwise print the repr of the message in the subclasses below.
    def __str__(self) -> str:
        return str(self.args[0])


class UnknownFieldError(ConfigError, AttributeError, KeyError):
    """A name that the constructor does not take, or a path that leads nowhere."""


class FieldTypeError(ConfigError, TypeError):
    """A value of the wrong type."""


class FieldRangeError(ConfigError):
    """A value of the right type but outside of what the field allows."""


class MissingFieldError(ConfigError, AttributeError, KeyError):
    """Required fields that were never set; all those of one level are listed."""


class UntrustedNameError(ConfigError):
    """A dotted name that a saved config or the command line may not resolve."""


class Mismatch(Exception):
    """Internal: a value does not fit a hint. `where` is the path inside the value, outermost first."""

    def __init__(
        self, expected: str, given: Any, where: tuple[str, ...] = (), *, in_range: bool = True, near: str = ""
    ):
        super().__init__(expected)
        self.expected, self.given, self.where, self.in_range, self.near = expected, given, where, in_range, near

    def at(self, key: Any) -> "Mismatch":
        return Mismatch(self.expected, self.given, (str(key), *self.where), in_range=self.in_range, near=self.near)

    def error(self, path: str) -> ConfigError:
        kind = FieldTypeError if self.in_range else FieldRangeError
        message = f"expected {self.expected}, given {show(self.given)}{self.near}"
        return kind(message, path=".".join((path, *self.where)))


def show(value: Any) -> str:
    """A value as it appears in an error: its repr, cut at 80 characters, and its type."""
    if isinstance(value, ConfigBase):
        return f"a config of {value!r}".splitlines()[0][:80]
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def nearest(name: str, names: collections.abc.Iterable[str], count: int = 1) -> list[str]:
    """The closest of `names`, best first; empty when nothing is close."""
    names = list(names)
    lower = {n.lower(): n for n in names}
    return [lower[m] for m in difflib.get_close_matches(name.lower(), list(lower), count, 0.6)]


def did_you_mean(name: str, names: collections.abc.Iterable[str]) -> str:
    """The end of an error message: `; did you mean 'x'?`, else the whole list of valid names when it is short."""
    names = list(names)
    close = nearest(name, names)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid: {', '.join(names)}" if 0 < len(names) <= 40 else ""


def arms(hint: Any) -> list[Any]:
    """The alternatives of a hint, with Optional, Union, aliases and new types opened; `[hint]` when it has just one."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [arm for part in typing.get_args(hint) for arm in arms(part)]
    if hasattr(hint, "__supertype__"):
        return arms(hint.__supertype__)
    if isinstance(hint, typing.TypeVar):
        return arms(hint.__bound__) if hint.__bound__ is not None else [Any]
    if type(hint).__name__ == "TypeAliasType":
        return arms(hint.__value__)
    if hint is None:
        return [type(None)]
    # An annotation that nobody can resolve must not refuse a good value.
    return [Any] if hint in (Any, object) or isinstance(hint, str | typing.ForwardRef) else [hint]


def mentions_config(hint: Any) -> bool:
    """Whether the parameter wants configs as they are: `Config`, `Config | None`, `list[Config]`, `dict[str, Config]`..."""
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return issubclass(hint, ConfigBase)
    return any(mentions_config(arg) for arg in typing.get_args(hint) if not isinstance(arg, str | list))


def accepts_config(hint: Any) -> bool:
    """Whether a Config may stand here: the hint says so, or says something that is not data (an array, a callable)."""
    return any(arm is Any or mentions_config(arm) or _is_opaque(arm) for arm in arms(hint))


def _is_opaque(arm: Any) -> bool:
    base = typing.get_origin(arm) or arm
    if base is Annotated:
        return _is_opaque(typing.get_args(arm)[0])
    if arm is Any or base is Literal or base in _WORDS or base in _LISTS or base in _DICTS or base is tuple:
        return False
    return not (isinstance(base, type) and issubclass(base, enum.Enum | ConfigBase))


def expected(hint: Any) -> str:
    """The hint in words, for errors and listings: `an integer > 0 or none`."""
    words = list(dict.fromkeys(_expected_arm(arm) for arm in arms(hint)))
    return " or ".join(words)


def _expected_arm(arm: Any) -> str:
    origin, args = typing.get_origin(arm), typing.get_args(arm)
    if arm is Any:
        return "any data"
    if origin is Annotated:
        limits = [text for text, _ in _limits(arm)]
        return " ".join([expected(args[0]), " and ".join(limits)]).strip()
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in args)
    if arm in _WORDS:
        return _WORDS[arm]
    base = origin or arm
    if base in _LISTS:
        return f"a list (each: {expected(args[0])})" if args else "a list"
    if base is tuple:
        if not args:
            return "a tuple"
        if args[-1] is Ellipsis:
            return f"a tuple (each: {expected(args[0])})"
        return f"a tuple of {len(args)} ({', '.join(expected(arg) for arg in args)})"
    if base in _DICTS:
        return f"a dict (each value: {expected(args[1])})" if len(args) == 2 else "a dict"
    if isinstance(base, type) and issubclass(base, enum.Enum):
        return "one of " + ", ".join(repr(member.name) for member in base)
    if isinstance(base, type) and issubclass(base, ConfigBase):
        return "a config"
    return f"a config that builds {'a function' if base is collections.abc.Callable else getattr(base, '__name__', str(base))}"


def _limits(arm: Any) -> list[tuple[str, typing.Callable[[Any], bool]]]:
    """(words, test) for each annotated-types constraint of an Annotated hint. Other metadata is documentation, not a constraint."""
    found: list[tuple[str, typing.Callable[[Any], bool]]] = []
    tests = {">": lambda v, b: v > b, ">=": lambda v, b: v >= b, "<": lambda v, b: v < b, "<=": lambda v, b: v <= b}
    pending = list(typing.get_args(arm)[1:])
    while pending:
        meta = pending.pop(0)
        for kind, attribute, sign in _RANGES:
            if isinstance(meta, kind):
                found.append(
                    (f"{sign} {getattr(meta, attribute)}", lambda v, s=sign, b=getattr(meta, attribute): tests[s](v, b))
                )
        if isinstance(meta, at.MultipleOf):
            found.append((f"a multiple of {meta.multiple_of}", lambda v, m=meta.multiple_of: v % m == 0))
        elif isinstance(meta, at.MinLen):
            found.append((f"at least {meta.min_length} long", lambda v, n=meta.min_length: len(v) >= n))
        elif isinstance(meta, at.MaxLen):
            found.append((f"at most {meta.max_length} long", lambda v, n=meta.max_length: len(v) <= n))
        elif isinstance(meta, at.GroupedMetadata):
            pending = [*meta, *pending]
    return found


def convert(hint: Any, value: Any) -> Any:
    """`value` as the field stores it. Lists, dicts and configs come back as copies: a config owns what it holds.

    Raises:
        Mismatch: the value does not fit; `where` leads to the inner element at fault.
    """
    choices = arms(hint)
    # Exact matches go first, so that 3 under `float | int` stays an integer.
    choices.sort(key=lambda arm: not (arm is type(value) or typing.get_origin(arm) in (Annotated, Literal)))
    failures = []
    for arm in choices:
        try:
            return _convert_arm(arm, value)
        except Mismatch as mismatch:
            failures.append(mismatch)
    deep = [failure for failure in failures if failure.where]
    if len(failures) == 1 or len(deep) == 1:
        raise (deep or failures)[0]
    near = next((f.near for f in failures if f.near), "")
    raise Mismatch(expected(hint), value, in_range=all(f.in_range for f in failures), near=near)


def _convert_arm(arm: Any, value: Any) -> Any:
    origin, args = typing.get_origin(arm), typing.get_args(arm)
    base = origin or arm
    if arm is Any:
        return as_data(value)
    if origin is Annotated:
        result = convert(args[0], value)
        if not isinstance(result, ConfigBase) and not all(test(result) for _, test in _limits(arm)):
            raise Mismatch(expected(arm), value, in_range=False)
        return result
    if origin is Literal:
        for choice in args:
            if choice == value and type(choice) is type(value):
                return value
        texts = [choice for choice in args if isinstance(choice, str)]
        close = nearest(value, texts) if isinstance(value, str) else []
        in_range = not isinstance(value, tuple({type(choice) for choice in args}))
        raise Mismatch(expected(arm), value, in_range=in_range, near=f"; did you mean {close[0]!r}?" if close else "")
    if isinstance(value, ConfigBase):
        if (isinstance(base, type) and issubclass(base, ConfigBase)) or _is_opaque(arm):
            return as_data(value)
    elif base in _LISTS and isinstance(value, list | tuple):
        # A Sequence keeps a tuple; only an explicit `list` turns it into one.
        items = _each(args[0] if args else Any, value)
        return tuple(items) if isinstance(value, tuple) and base is not list else items
    elif base is tuple and isinstance(value, list | tuple):
        if not args or args[-1] is Ellipsis:
            return tuple(_each(args[0] if args else Any, value))
        if len(args) != len(value):
            raise Mismatch(expected(arm), value, in_range=False)
        return tuple(item for hint, one in zip(args, enumerate(value), strict=True) for item in [_inner(hint, *one)])
    elif base in _DICTS and isinstance(value, dict):
        _check_keys(value)
        return {key: _inner(args[1] if len(args) == 2 else Any, key, item) for key, item in value.items()}
    elif isinstance(base, type) and issubclass(base, enum.Enum):
        for member in base:
            if value is member or (isinstance(value, str) and value in (member.name, member.value)):
                return member.name
        near = did_you_mean(value, [m.name for m in base]) if isinstance(value, str) else ""
        raise Mismatch(expected(arm), value, in_range=not isinstance(value, str), near=near)
    elif base is bool and isinstance(value, bool) or base is type(None) and value is None:
        return value
    elif base is int and isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    elif base is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif base is str and isinstance(value, str):
        return str.__str__(value)
    raise Mismatch(expected(arm), value)


def _inner(hint: Any, key: Any, value: Any) -> Any:
    try:
        return convert(hint, value)
    except Mismatch as mismatch:
        raise mismatch.at(key) from None


def _each(hint: Any, values: collections.abc.Iterable[Any]) -> list[Any]:
    return [_inner(hint, index, value) for index, value in enumerate(values)]


def _check_keys(value: dict[Any, Any]) -> None:
    for key in value:
        if not isinstance(key, str) or key.startswith("$") or not key:
            raise Mismatch("text keys that do not start with '$'", key)


def as_data(value: Any) -> Any:
    """A copy of any data; raises Mismatch for what a config cannot hold (arrays, functions, sets, objects)."""
    if isinstance(value, ConfigBase) and hasattr(value, "instantiate"):
        return value.copy_and_resolve_references()
    if isinstance(value, bool) or value is None:
        return value
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, str):
        return str.__str__(value)
    if type(value) in (list, tuple):
        return type(value)(_each(Any, value))
    if type(value) is dict:
        _check_keys(value)
        return {key: _inner(Any, key, item) for key, item in value.items()}
    raise Mismatch("data (bool, int, float, str, None, list, tuple, dict) or a config", value)


def element_hint(hint: Any, key: str) -> Any:
    """The hint of `value[key]` when `value` has the given hint; Any when the hint does not say."""
    found = []
    for arm in arms(hint):
        origin, args = typing.get_origin(arm), typing.get_args(arm)
        if origin is Annotated:
            found.append(element_hint(args[0], key))
        elif origin in _LISTS or origin is tuple and args[-1] is Ellipsis:
            found.append(args[0])
        elif origin is tuple and key.isdigit() and int(key) < len(args):
            found.append(args[int(key)])
        elif origin in _DICTS and len(args) == 2:
            found.append(args[1])
    return Union[tuple(found)] if found else Any


_INTEGER = re.compile(r"[+-]?\d+(_\d+)*\Z")
# Text that settles the question goes first; `str` takes anything, so it comes last but for Any, which guesses.
_ORDER = {Literal: 0, type(None): 1, bool: 2, int: 3, float: 4, str: 8, Any: 9}


def parse_text(hint: Any, text: str) -> Any:
    """Command-line text as a value of this hint. A dotted class name is not handled here: that needs `framework.config`.

    Raises:
        Mismatch: no reading of the text fits.
    """
    choices = sorted(
        arms(hint), key=lambda arm: _ORDER.get(arm, _ORDER.get(typing.get_origin(_bare(arm)) or _bare(arm), 6))
    )
    failures = []
    for arm in choices:
        try:
            return _convert_arm(arm, _read(_bare(arm), text))
        except Mismatch as mismatch:
            failures.append(mismatch)
    out_of_range = [failure for failure in failures if not failure.in_range or failure.where]
    if len(out_of_range) == 1 or len(failures) == 1:
        raise (out_of_range or failures)[0]
    raise Mismatch(expected(hint), text, in_range=not out_of_range)


def _bare(arm: Any) -> Any:
    while typing.get_origin(arm) is Annotated:
        arm = typing.get_args(arm)[0]
    return arm


def _read(arm: Any, text: str) -> Any:
    """The most natural Python value of `text` for one alternative; the text itself when there is none (and the check then fails)."""
    origin, args = typing.get_origin(arm), typing.get_args(arm)
    base = origin or arm
    if base is Literal:
        return next((choice for choice in args if _same_text(choice, text)), text)
    if base is type(None):
        return None if text.lower() in ("none", "null") else text
    if base is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if base is int:
        return int(text) if _INTEGER.match(text) else text
    if base is float:
        try:
            return float(text)
        except ValueError:
            return text
    if base is str:
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'"
        return text[1:-1] if quoted else text
    if base in _LISTS or base is tuple:
        value = literal(text)
        if isinstance(value, list | tuple):
            return value
        parts = [part.strip() for part in text.split(",")] if text else []
        return [_read_element(element_hint(arm, str(index)), part) for index, part in enumerate(parts)]
    if base in _DICTS or arm is Any:
        return literal(text)
    return text


def _read_element(hint: Any, text: str) -> Any:
    try:
        return parse_text(hint, text)
    except Mismatch:
        return text


def _same_text(choice: Any, text: str) -> bool:
    return str(choice) == text or (not isinstance(choice, str) and str(choice).lower() == text.lower())


def literal(text: str) -> Any:
    """JSON, else a Python literal, else none/true/false in any case, else the text itself. Nothing is evaluated."""
    lowered = text.lower()
    if lowered in ("none", "null", "true", "false"):
        return {"true": True, "false": False}.get(lowered)
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
