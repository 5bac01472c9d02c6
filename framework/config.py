"""Configs: data that says what to build. The constructor's signature is the schema.

    cfg = config_for(Linear, out=8)     # reads Linear.__init__: names, types, ranges, defaults, what is required
    cfg.out = "8"                       # FieldTypeError: Linear.out: expected an integer > 0, given '8' (str)
    layer = cfg.instantiate(dim=4)      # late arguments; everything that is missing is listed in one error

A component is any class or function that takes keyword arguments with type hints; it needs no base class and no second
declaration of its fields. A parameter whose hint mentions `Config` receives the config itself, and the component builds
that child when it knows what to tell it (`attention.instantiate(dim=dim)`), so that a width is written once. A config
given to any other parameter (a schedule as optax's `learning_rate`) is built first and the object is passed.

A config owns its values: setting a child copies it, so two places never share one config by accident.
Imports nothing of Plimsoll but `framework.config_types`. The shape follows axlearn's configs (nested, strict, did-you-mean)
on ml_collections' ConfigDict (attribute access, iteration).
"""

import dataclasses
import functools
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from framework import config_names
from framework.config_types import (
    ConfigBase,
    ConfigError,
    DType,
    FieldRangeError,
    FieldTypeError,
    Fraction,
    Mismatch,
    MissingFieldError,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    UnknownFieldError,
    UntrustedNameError,
    accepts_config,
    convert,
    did_you_mean,
    element_hint,
    literal,
    mentions_config,
    nearest,
    parse_text,
)

__all__ = [
    "REQUIRED", "Config", "ConfigError", "DType", "FieldRangeError", "FieldTypeError", "Fraction", "MissingFieldError",
    "NonNegativeFloat", "NonNegativeInt", "PositiveFloat", "PositiveInt", "Probability", "UnknownFieldError", "UntrustedNameError",
    "config_for", "did_you_mean", "diff", "nearest", "reference", "schema", "target_of",
]  # fmt: skip


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = _Required()
"""How an unset field shows in `leaves()` and `diff()`. It is never a value: unset is what required means."""

_OWN_DEFAULT = (
    object()
)  # the constructor has a default that is not data (a dtype object, a function): it stays the constructor's


@dataclasses.dataclass
class Field:
    """One parameter of a constructor: its name, raw annotation, the globals that resolve it, and its default."""

    name: str
    annotation: Any
    globals: Mapping[str, Any]
    default: Any  # a value, REQUIRED or _OWN_DEFAULT
    parameter_default: Any

    @functools.cached_property
    def _resolved(self) -> Any:
        if self.annotation is inspect.Parameter.empty:
            return Any
        holder = types.SimpleNamespace(__annotations__={"hint": self.annotation})
        return typing.get_type_hints(holder, globalns=dict(self.globals), include_extras=True)["hint"]

    @property
    def hint(self) -> Any:
        """The resolved hint. One that cannot be resolved is left as it is, and then accepts any data; it is tried again next time,
        as a class may be configured above the one that its own hints name."""
        try:
            return self._resolved
        except (NameError, AttributeError, TypeError):
            return self.annotation

    @property
    def keeps_config(self) -> bool:
        """Whether the constructor wants configs un-instantiated."""
        hint = self.hint
        return bool(re.search(r"\bConfig\b", hint)) if isinstance(hint, str) else mentions_config(hint)


@dataclasses.dataclass(frozen=True)
class Schema:
    """The fields of a target in signature order, and which of them can only be passed by position."""

    fields: dict[str, Field]
    positional: tuple[str, ...]
    variadic: str | None


@functools.cache
def schema(target: Callable[..., Any]) -> Schema:
    """Reads the signature of a class (its `__init__`, and the base's while `**kwargs` forwards to it) or a function.

    Raises:
        ConfigError: the target has no readable signature, or a parameter whose name a Config needs for itself.
    """
    fields: dict[str, Field] = {}
    positional: tuple[str, ...] = ()
    variadic = None
    for function, skip in _constructors(target):
        try:
            parameters = list(inspect.signature(function).parameters.values())[skip:]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{config_names.name_of(target)} cannot be configured: {error}") from error
        by_name = (
            {field.name: field for field in dataclasses.fields(target)} if dataclasses.is_dataclass(target) else {}
        )
        for parameter in parameters:
            if parameter.kind is parameter.VAR_KEYWORD or parameter.name in fields:
                continue
            annotation, default = parameter.annotation, parameter.default
            if parameter.kind is parameter.VAR_POSITIONAL:
                variadic, default = parameter.name, ()
                positional = tuple(fields)
                annotation = tuple if annotation is parameter.empty else tuple[annotation, ...]
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                positional = (*positional, parameter.name)
            if parameter.name in by_name and by_name[parameter.name].default_factory is not dataclasses.MISSING:
                default = by_name[parameter.name].default_factory()
            scope = getattr(inspect.unwrap(function), "__globals__", {})
            fields[parameter.name] = Field(parameter.name, annotation, scope, REQUIRED, default)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    for field in fields.values():
        # `update` is the one exception: `memory.update` is a stable name, so Config gives up ConfigDict's method of that name.
        if field.name in dir(Config) and field.name != "update":
            raise ConfigError(
                f"{config_names.name_of(target)}: the parameter {field.name!r} has the name of a method of Config; rename it "
                f"(for instance {field.name + '_'!r})"
            )
        if field.parameter_default is not inspect.Parameter.empty:
            try:
                field.default = convert(field.hint, field.parameter_default)
            except Mismatch:
                try:
                    field.default = convert(Any, field.parameter_default)
                except Mismatch:
                    field.default = _OWN_DEFAULT
    return Schema(fields, positional, variadic)


def _constructors(target: Callable[..., Any]) -> list[tuple[Callable[..., Any], int]]:
    """(function, leading parameters to skip), in the order in which `**kwargs` forwards."""
    if not isinstance(target, type):
        return [(target, 0)]
    own = [
        vars(cls)["__init__"]
        for cls in target.__mro__
        if cls is not object and inspect.isfunction(vars(cls).get("__init__"))
    ]
    return [(function, 1) for function in own] or [(target, 0)]


def config_for(target: Callable[..., Any], /, **fields: Any) -> "Config":
    """A config of a class or function, with its defaults, and `fields` set.

    Raises:
        UnknownFieldError, FieldTypeError, FieldRangeError: as when setting the fields one by one.
    """
    if not callable(target):
        raise FieldTypeError(f"config_for expects a class or a function, given {target!r} ({type(target).__name__})")
    config_names.remember(target)
    config = Config(target)
    for name, value in fields.items():
        config[name] = value
    return config


def reference(name: str) -> Any:
    """The object of that dotted name itself, not the result of calling it: `config_for(reference, name="jax.nn.gelu")`."""
    return config_names.resolve(name)


def target_of(config: "Config") -> Callable[..., Any]:
    """The class or function that the config instantiates."""
    return config._target


class Config(ConfigBase):
    """The dotted name of a class or function plus its keyword arguments, checked against its signature as they are set."""

    _target: Callable[..., Any]
    _schema: Schema
    _path: str | None

    def __init__(self, target: Callable[..., Any]):
        super().__init__(type_safe=False, convert_dict=False, sort_keys=False)
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_schema", schema(target))
        object.__setattr__(self, "_path", None)  # known once an enclosing config hands this one to its constructor
        for field in self._schema.fields.values():
            if field.default is not REQUIRED and field.default is not _OWN_DEFAULT:
                self._fields[field.name] = convert(Any, field.default)

    # -- reading and setting fields

    @property
    def update(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The field `update` of the targets that have one (`memory.update`). ConfigDict's method is given up for it."""
        return self["update"]

    def _at(self, name: str) -> str:
        if self._path is None:
            return f"{getattr(self._target, '__name__', 'config')}.{name}"
        return f"{self._path}.{name}".lstrip(".")

    def _known(self, name: str, path: str | None = None) -> Field:
        fields = self._schema.fields
        if name in fields:
            return fields[name]
        hint = did_you_mean(str(name), fields)
        raise UnknownFieldError(
            f"no such field in {config_names.name_of(self._target)}{hint}", path=path or self._at(name)
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # copy, pickle and inspect probe for these; they are never fields
        return self[name]

    def __getitem__(self, key: str) -> Any:
        field = self._known(key)
        if key in self._fields:
            return self._fields[key]
        if field.default is _OWN_DEFAULT:
            return field.parameter_default
        raise MissingFieldError("required, and not set", path=self._at(key))

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        self._store(key, value, self._at(key))

    def _store(self, name: str, value: Any, path: str) -> None:
        field = self._known(name, path)
        try:
            self._fields[name] = convert(field.hint, value)
        except Mismatch as mismatch:
            raise mismatch.error(path) from None

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __delitem__(self, key: str) -> None:
        """Back to the default; a field without one is unset again."""
        default = self._known(key).default
        self._fields.pop(key, None)
        if default is not REQUIRED and default is not _OWN_DEFAULT:
            self._fields[key] = convert(Any, default)

    @property
    def _ordered_fields(self) -> dict[str, Any]:
        return {name: self._fields[name] for name in self._schema.fields if name in self._fields}

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._schema.fields})

    # -- value semantics

    def copy(self) -> "Config":
        """A deep copy."""
        other = Config(self._target)
        other._fields.clear()
        other._fields.update({name: convert(Any, value) for name, value in self._ordered_fields.items()})
        object.__setattr__(other, "_path", self._path)
        return other

    def copy_and_resolve_references(self, visit_map: Any = None) -> "Config":
        return self.copy()

    def __copy__(self) -> "Config":
        return self.copy()

    def __deepcopy__(self, memo: Any) -> "Config":
        return self.copy()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._target is other._target and self._fields == other._fields

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"config_for({config_names.name_of(self._target)}, {', '.join(f'{k}={v!r}' for k, v in self.items())})"

    __str__ = __repr__

    # -- building

    def missing(self, *given: str) -> list[str]:
        """Names of the required fields that are neither set nor among `given`. This level only: a parent fills in its children."""
        fields = self._schema.fields.values()
        return [f.name for f in fields if f.default is REQUIRED and f.name not in self._fields and f.name not in given]

    def instantiate(self, **late: Any) -> Any:
        """Builds the object. `late` completes or overrides fields with any Python objects.

        Raises:
            MissingFieldError: lists every required field of this level that is still unset.
            UnknownFieldError: a late argument that the constructor does not take.
            ConfigError: the constructor (or a child's) raised a ValueError; its text follows the dotted path, itself the cause.
        """
        name = config_names.name_of(self._target)
        for key in late:
            self._known(key)
        missing = self.missing(*late)
        if missing:
            paths = ", ".join(self._at(field) for field in missing)
            raise MissingFieldError(f"{name} needs {'fields that are' if len(missing) > 1 else 'a field that is'} not set: {paths}",
                                    path=self._path or "")  # fmt: skip
        values = {}
        for key, value in self._ordered_fields.items():
            if key in late:
                continue
            field, path = self._schema.fields[key], self._at(key) if self._path is not None else key
            self._store(key, value, self._at(key))  # a list changed in place has not been checked yet
            values[key] = _build(self._fields[key], path, field)
        values.update(late)
        positional = (
            [values.pop(key) for key in self._schema.positional if key in values]
            if self._variadic_or_positional(values)
            else []
        )
        extra = values.pop(self._schema.variadic, ()) if self._schema.variadic else ()
        try:
            return self._target(*positional, *extra, **values)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{name}: {error}", path=self._path or "") from error
        except Exception as error:
            if not getattr(error, "__notes__", None):
                error.add_note(f"while building {self._path or 'the config'} ({name})")
            raise

    def _variadic_or_positional(self, values: dict[str, Any]) -> bool:
        return bool(self._schema.positional) and (
            self._schema.variadic is None or bool(values.get(self._schema.variadic))
        )

    # -- paths

    def _walk(self, path: str) -> tuple["Config", str, list[str]]:
        """(the innermost config on the path, its field, keys into that field's lists and dicts)."""
        node, parts, done = self, path.split("."), ""
        while True:
            name, inner = parts.pop(0), []
            here = f"{done}.{name}".lstrip(".")
            node._known(name, here)
            value = node._fields.get(name, REQUIRED)
            done = here
            while parts and isinstance(value, list | tuple | dict):
                key = _key(value, parts, done)
                inner.append(key)
                done = f"{done}.{key}"
                del parts[: key.count(".") + 1]
                value = _item(value, key, REQUIRED)
            if not parts:
                return node, name, inner
            if not isinstance(value, Config):
                given = "is not set" if value is REQUIRED else f"is {value!r}"
                raise UnknownFieldError(
                    f"cannot be reached: {done} {given}, which has no fields", path=f"{done}.{'.'.join(parts)}"
                )
            node = value

    def get_path(self, path: str) -> Any:
        """The value at a dotted path: `cfg.get_path("model.stack.pattern.0.num_heads")`. Numbers index lists, names index dicts."""
        node, name, inner = self._walk(path)
        value = node._fields.get(name, REQUIRED) if name not in node else node[name]
        for key in inner:
            value = _item(value, key, REQUIRED)
        if value is REQUIRED:
            field = node._known(name, path)
            if field.default is _OWN_DEFAULT and not inner:
                return field.parameter_default
            raise MissingFieldError("required, and not set", path=path)
        return value

    def set_path(self, path: str, value: Any) -> None:
        """Sets the value at a dotted path, checked like an attribute. A new key is added to a dict; a list keeps its length."""
        node, name, inner = self._walk(path)
        if inner:
            head = path[: len(path) - len(".".join(inner)) - 1]
            node._store(name, _replaced(node._fields[name], inner, value), head)
        else:
            node._store(name, value, path)

    def override(self, path: str, text: str) -> None:
        """Sets the value at a dotted path from command-line text, read by the field's type.

        A dotted class or function name, where a config may stand, puts that component there with fresh defaults.

        Raises:
            ConfigError: unknown path, text that does not fit, or a name that may not be resolved.
        """
        node, name, inner = self._walk(path)
        hint = node._schema.fields[name].hint
        for key in inner:
            hint = element_hint(hint, key)
        self.set_path(path, _value_from_text(hint, text, path))

    # -- as data

    def to_dict(self, visit_map: Any = None, preserve_field_references: bool = False) -> dict[str, Any]:
        """Plain JSON data: {"$class": "framework.layers.linear.Linear", "out": 8, ...}, fields in signature order."""
        result: dict[str, Any] = {"$class": config_names.name_of(self._target)}
        for name, value in self._ordered_fields.items():
            self._store(name, value, self._at(name))
            plain = _encode(value, tuples=False)
            hint = self._schema.fields[name].hint
            # A tuple is written as a list where the hint turns it back into a tuple, else with its kind.
            result[name] = plain if _restores(hint, plain, value) else _encode(value, tuples=True)
        return result

    def to_json(self, json_encoder_cls: Any = None, **kwargs: Any) -> str:
        """The config as JSON text, indented by 2; stable, so that two files can be compared line by line."""
        return json.dumps(self.to_dict(), **{"indent": 2, "allow_nan": False, **kwargs})

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Config":
        """The config of a `to_dict` result. Nothing is called, and nothing outside the trusted packages is imported.

        Raises:
            UntrustedNameError: a "$class" outside of what `framework.config_names` trusts.
            ConfigError: fields that the class does not take, or values that do not fit.
        """
        config = _decode(data, "")
        if not isinstance(config, Config):
            raise FieldTypeError(f"expected a dict with a '$class', given {str(data)[:80]}")
        return config

    @staticmethod
    def from_json(text: str | bytes) -> "Config":
        """`from_dict` of JSON text."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not valid JSON: {error}") from error
        return Config.from_dict(data)

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """(dotted path, value) of every field, depth first in signature order; unset ones as REQUIRED. A list of plain values is one leaf."""
        for name, field in self._schema.fields.items():
            if name in self._fields:
                yield from _leaves(f"{prefix}{name}", self._fields[name])
            elif field.default is REQUIRED:
                yield f"{prefix}{name}", REQUIRED

    def classes(self) -> dict[str, str]:
        """Dotted path -> dotted class name of this config ("") and of every config inside it."""
        found = {"": config_names.name_of(self._target)}
        for path, node in _configs(self):
            found[path] = config_names.name_of(node._target)
        return found


def diff(left: Config, right: Config) -> list[tuple[str, Any, Any]]:
    """(path, left value, right value) wherever two configs differ; a field that one side does not have shows as None there.

    Where the classes differ, the path of the component itself is listed with both dotted names.
    """
    rows = []
    sides = []
    for config in (left, right):
        sides.append(
            {**{f"{path}.$class".lstrip("."): name for path, name in config.classes().items()}, **dict(config.leaves())}
        )
    for path in dict.fromkeys([*sides[0], *sides[1]]):
        a, b = sides[0].get(path), sides[1].get(path)
        if a != b or type(a) is not type(b):
            if not path.endswith("$class") or None not in (a, b):
                rows.append((path, a, b))
    return rows


def _build(value: Any, path: str, field: Field) -> Any:
    """A stored value as the constructor receives it."""
    if isinstance(value, Config):
        located = value.copy()
        object.__setattr__(located, "_path", path)
        return located if field.keeps_config else located.instantiate()
    if isinstance(value, list | tuple):
        return type(value)(_build(item, f"{path}.{index}", field) for index, item in enumerate(value))
    if isinstance(value, dict):
        return {key: _build(item, f"{path}.{key}", field) for key, item in value.items()}
    return config_names.enum_member(field.hint, value) if isinstance(value, str) else value


def _value_from_text(hint: Any, text: str, path: str) -> Any:
    if '"$class"' in text and isinstance(data := literal(text), list | dict):
        return _decode(data, path)
    if accepts_config(hint):
        if config_names.looks_dotted(text):
            try:
                return config_for(config_names.resolve(text))
            except UntrustedNameError as error:
                if not any(kind in (str, Any) for kind in typing.get_args(hint) or (hint,)):
                    raise ConfigError(str(error), path=path) from None
    try:
        return parse_text(hint, text)
    except Mismatch as mismatch:
        raise mismatch.error(path) from None


def _key(value: Any, parts: list[str], path: str) -> str:
    """The next key of the path into a list or dict. Dict keys may hold dots, so the longest one that is there wins."""
    if isinstance(value, dict):
        for count in range(len(parts), 0, -1):
            if ".".join(parts[:count]) in value:
                return ".".join(parts[:count])
        if len(parts) == 1:
            return parts[0]
        raise UnknownFieldError(f"no such key{did_you_mean(parts[0], value)}", path=f"{path}.{parts[0]}")
    if not parts[0].isdigit() or int(parts[0]) >= len(value):
        valid = f"0 to {len(value) - 1}" if value else "none: the list is empty"
        raise UnknownFieldError(f"no such index; valid: {valid}", path=f"{path}.{parts[0]}")
    return parts[0]


def _item(value: Any, key: str, default: Any) -> Any:
    return value.get(key, default) if isinstance(value, dict) else value[int(key)]


def _replaced(value: Any, keys: list[str], new: Any) -> Any:
    """A copy of nested lists and dicts with one element replaced."""
    if not keys:
        return new
    key, rest = keys[0], keys[1:]
    if isinstance(value, dict):
        return {**value, key: _replaced(value.get(key), rest, new)}
    items = list(value)
    items[int(key)] = _replaced(items[int(key)], rest, new)
    return type(value)(items)


def _encode(value: Any, *, tuples: bool) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, list | tuple):
        items = [_encode(item, tuples=tuples) for item in value]
        return {"$tuple": items} if tuples and isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: _encode(item, tuples=tuples) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}  # JSON has no inf and no nan
    return value


def _restores(hint: Any, plain: Any, value: Any) -> bool:
    try:
        return convert(hint, _decode(plain, "")) == value
    except Mismatch:
        return False


def _decode(data: Any, path: str) -> Any:
    if isinstance(data, list):
        return [_decode(item, f"{path}.{index}".lstrip(".")) for index, item in enumerate(data)]
    if not isinstance(data, dict):
        return data
    if "$class" in data:
        try:
            config = Config(config_names.resolve(data["$class"]))
        except UntrustedNameError as error:
            raise UntrustedNameError(str(error), path=path) from None
        for name, value in data.items():
            if name != "$class":
                here = f"{path}.{name}".lstrip(".")
                config._store(name, _decode(value, here), here)
        return config
    if set(data) == {"$tuple"} and isinstance(data["$tuple"], list):
        return tuple(_decode(item, path) for item in data["$tuple"])
    if set(data) == {"$float"} and data["$float"] in ("inf", "-inf", "nan"):
        return float(data["$float"])
    return {key: _decode(item, f"{path}.{key}".lstrip(".")) for key, item in data.items()}


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Config):
        yield from value.leaves(f"{path}.")
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    elif isinstance(value, list | tuple) and any(isinstance(item, Config | dict) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}.{index}", item)
    else:
        yield path, value


def _configs(value: Any, path: str = "") -> Iterator[tuple[str, Config]]:
    if isinstance(value, list | tuple):
        pairs = [(str(index), item) for index, item in enumerate(value)]
    elif isinstance(value, Config | dict):
        pairs = list(value.items())
    else:
        return
    for key, item in pairs:
        here = f"{path}.{key}".lstrip(".")
        if isinstance(item, Config):
            yield here, item
        yield from _configs(item, here)
