"""Configs: data that says what to build. The constructor's signature is the schema.

    cfg = config_for(Linear, out=8)   # Linear.__init__ gives names, types, ranges, defaults, and what is required
    cfg.out = "8"                     # FieldTypeError: Linear.out: expected an integer > 0, given '8' (str)
    layer = cfg.instantiate(dim=4)    # late arguments; all that is missing is listed in one error

A component is any class or function that takes named arguments with type hints: no base class, no second declaration
of the fields. A parameter whose hint mentions `Config` receives the config itself, and the component builds that child
once it knows what to tell it (`attention.instantiate(dim=dim)`), so that a width is written once. A config given to any
other parameter (a schedule as optax's `learning_rate`) is built first, and the object is passed.

A config owns its values: what is set into it is copied, so no two places share one child by accident.

Imports the `framework.config_*` modules, whose names for users are re-exported here. Follows axlearn's configs (nested,
strict, did-you-mean) over ml_collections' ConfigDict (attribute access, iteration).
"""

import enum
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from framework import config_names
from framework.config_errors import (
    ConfigError,
    FieldRangeError,
    FieldTypeError,
    Mismatch,
    MissingFieldError,
    UnknownFieldError,
    UntrustedNameError,
    did_you_mean,
    nearest,
    show,
)
from framework.config_json import decode, encode, join
from framework.config_names import name_of
from framework.config_schema import ABSENT, OPAQUE, REQUIRED, Field, Schema, schema
from framework.config_text import literal, parse_text
from framework.config_types import (
    ConfigBase,
    DType,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    accepts_config,
    arms,
    convert,
    element_hint,
)

__all__ = [
    "ABSENT",
    "REQUIRED",
    "Config",
    "ConfigError",
    "DType",
    "FieldRangeError",
    "FieldTypeError",
    "Fraction",
    "MissingFieldError",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Probability",
    "UnknownFieldError",
    "UntrustedNameError",
    "config_for",
    "did_you_mean",
    "diff",
    "nearest",
    "reference",
    "target_of",
]


def config_for(target: Callable[..., Any], /, **fields: Any) -> "Config":
    """A config of a class or function: its defaults, and `fields` set.

    Raises:
        ConfigError: as when the fields are set one by one; or the target has no usable name or signature.
    """
    config_names.remember(target)
    config = Config(target)
    for name, value in fields.items():
        config[name] = value
    return config


def reference(name: str) -> Any:
    """The very object of a dotted name, not the result of a call: `config_for(reference, name="jax.nn.gelu")`."""
    return config_names.resolve(name)


def target_of(config: "Config") -> Callable[..., Any]:
    """The class or function that a config builds from."""
    return config._target


@functools.cache
def _schema_of(target: Callable[..., Any]) -> Schema:
    # `update` may be a field although ConfigDict has a method of that name: `memory.update` is a stable name of ours.
    return schema(target, reserved=[name for name in dir(Config) if name != "update"])


class Config(ConfigBase):
    """The dotted name of a class or function and its named arguments, checked against its signature as they are set."""

    _target: Callable[..., Any]
    _schema: Schema
    _path: str | None  # known once an enclosing config hands this one to its constructor

    def __init__(self, target: Callable[..., Any]):
        super().__init__(type_safe=False, convert_dict=False, sort_keys=False)
        self._init(target, None, {})
        for name, field in self._schema.fields.items():
            if field.default is not REQUIRED and field.default is not OPAQUE:
                self._fields[name] = convert(Any, field.default)

    def _init(self, target: Callable[..., Any], path: str | None, fields: dict[str, Any]) -> None:
        for name, value in (("_target", target), ("_schema", _schema_of(target)), ("_path", path), ("_fields", fields)):
            object.__setattr__(self, name, value)

    # -- fields

    @property
    def update(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The field of that name, where the target has one. ConfigDict's method `update` is given up for it."""
        return self["update"]

    def _at(self, name: str) -> str:
        """The path of a field, as an error names it: from the root when it is known, else from the class."""
        return join(self._target.__name__ if self._path is None else self._path, name)

    def _field(self, name: str, path: str | None = None) -> Field:
        fields = self._schema.fields
        if name not in fields:
            message = f"no such field in {name_of(self._target)}{did_you_mean(str(name), fields)}"
            raise UnknownFieldError(message, path=path or self._at(name))
        return fields[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # copy, pickle and inspect probe for such names; they are never fields
        return self[name]

    def __getitem__(self, key: str) -> Any:
        field = self._field(key)
        if key in self._fields:
            return self._fields[key]
        if field.default is OPAQUE:
            return field.own_default
        raise MissingFieldError("required, and not set", path=self._at(key))

    def get(self, key: str, default: Any = None) -> Any:
        """The field, or `default` while it is unset. Unlike a dict's, it refuses names that are no field."""
        self._field(key)
        return self._fields.get(key, default)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        self._fields[key] = self._checked(key, value, self._at(key))

    def _checked(self, name: str, value: Any, path: str) -> Any:
        field = self._field(name, path)
        try:
            return convert(field.hint, value)
        except Mismatch as mismatch:
            raise mismatch.error(path) from None

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __delitem__(self, key: str) -> None:
        """Back to the default; a field without one is unset again."""
        default = self._field(key).default
        self._fields.pop(key, None)
        if default is not REQUIRED and default is not OPAQUE:
            self._fields[key] = convert(Any, default)

    @property
    def _ordered_fields(self) -> dict[str, Any]:
        return {name: self._fields[name] for name in self._schema.fields if name in self._fields}

    # -- value semantics

    def copy(self) -> "Config":
        """A deep copy."""
        other = ConfigBase.__new__(Config)
        ConfigBase.__init__(other, type_safe=False, convert_dict=False, sort_keys=False)
        other._init(self._target, self._path, {name: convert(Any, value) for name, value in self._fields.items()})
        return other

    def copy_and_resolve_references(self, visit_map: Any = None) -> "Config":
        return self.copy()  # ConfigDict's own would drop the target

    def __copy__(self) -> "Config":
        return self.copy()

    def __deepcopy__(self, memo: Any) -> "Config":
        return self.copy()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._target is other._target and self._fields == other._fields

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"config_for({', '.join([name_of(self._target), *(f'{k}={v!r}' for k, v in self.items())])})"

    __str__ = __repr__

    # -- building

    def missing(self, *given: str) -> list[str]:
        """Required fields that are neither set nor in `given`. This level only: a parent fills in its children."""
        fields = self._schema.fields.items()
        return [name for name, f in fields if f.default is REQUIRED and name not in self._fields and name not in given]

    def instantiate(self, **late: Any) -> Any:
        """Builds the object. `late` completes or overrides the fields, with any Python objects.

        Raises:
            MissingFieldError: lists all required fields of this level that are still unset.
            UnknownFieldError: a late argument that the constructor does not take.
            ConfigError: a constructor raised ValueError; the dotted path precedes its text, and it is the cause.
        """
        name = name_of(self._target)
        for key in late:
            self._field(key)
        if missing := self.missing(*late):
            raise MissingFieldError(f"{name}: required, and not set: {', '.join(missing)}", path=self._path or "")
        values = dict(late)
        for key, value in self._ordered_fields.items():
            if key not in late:
                # Checked again, since a list or dict can be changed in place.
                checked, field = self._checked(key, value, self._at(key)), self._schema.fields[key]
                values[key] = _build(checked, join(self._path or "", key), field)
        spread = values.pop(self._schema.variadic, ()) if self._schema.variadic else ()
        positional = [values.pop(key, self._schema.fields[key].own_default) for key in self._schema.positional]
        try:
            return self._target(*positional, *spread, **values)
        except ValueError as error:
            if isinstance(error, ConfigError) and error.path:
                raise
            raise ConfigError(f"{name}: {error}", path=self._path or "") from error
        except Exception as error:
            if not getattr(error, "__notes__", None):
                error.add_note(f"while building {join(self._path or '', name)}")
            raise

    # -- dotted paths

    def _walk(self, path: str) -> tuple["Config", str, list[str]]:
        """(the innermost config on the path, its field, the keys into that field's lists and dicts)."""
        node, parts, done = self, path.split("."), ""
        while True:
            name, keys = parts.pop(0), []
            done = join(done, name)
            node._field(name, done)
            value = node._fields.get(name, REQUIRED)
            while parts and isinstance(value, list | tuple | dict):
                key = _next_key(value, parts, done)
                del parts[: key.count(".") + 1]
                keys.append(key)
                done = join(done, key)
                value = value.get(key, REQUIRED) if isinstance(value, dict) else value[int(key)]
            if not parts:
                return node, name, keys
            if not isinstance(value, Config):
                state = "is not set" if value is REQUIRED else f"is {show(value)}"
                raise UnknownFieldError(f"{done} {state}, and has no fields", path=join(done, ".".join(parts)))
            node = value

    def get_path(self, path: str) -> Any:
        """The value at `"model.stack.pattern.0.num_heads"`: names lead into configs and dicts, numbers into lists."""
        node, name, keys = self._walk(path)
        value = node[name] if name in node or node._field(name).default is OPAQUE else REQUIRED
        for key in keys:
            value = value.get(key, REQUIRED) if isinstance(value, dict) else value[int(key)]
        if value is REQUIRED:
            raise MissingFieldError("not set", path=path)
        return value

    def set_path(self, path: str, value: Any) -> None:
        """Sets the value at a dotted path, checked as an attribute is. Dicts take new keys; lists keep their length."""
        node, name, keys = self._walk(path)
        if keys:
            path = path.removesuffix("." + ".".join(keys))
            value = _replaced(node._fields[name], keys, value)
        node._fields[name] = node._checked(name, value, path)

    def override(self, path: str, text: str) -> None:
        """Sets the value at a dotted path from command-line text, read by the field's type (see `parse_text`).

        Where a config may stand, the name of a class or function puts that component there, with fresh defaults: dotted
        (`optax.lion`), or bare (`lion`) when it lies beside the present one.

        Raises:
            ConfigError: unknown path, text that does not fit, or a name that may not be resolved.
        """
        node, name, keys = self._walk(path)
        hint, present = node._field(name).hint, node._fields.get(name)
        for key in keys:
            hint = element_hint(hint, key)
            present = present.get(key) if isinstance(present, dict) else present[int(key)] if present else None
        self.set_path(path, _from_text(hint, text, path, present))

    # -- as data

    def to_dict(self, visit_map: Any = None, preserve_field_references: bool = False) -> dict[str, Any]:
        """Plain JSON data: {"$class": "framework.layers.linear.Linear", "out": 8, ...}, in signature order."""
        result: dict[str, Any] = {"$class": name_of(self._target)}
        for name, value in self._ordered_fields.items():
            result[name] = encode(
                self._schema.fields[name].hint, self._checked(name, value, self._at(name)), _component
            )
        return result

    def to_json(self, json_encoder_cls: Any = None, **options: Any) -> str:
        """`to_dict` as text, indented by 2, the same for equal configs. `options` go to json.dumps."""
        return json.dumps(self.to_dict(), **{"indent": 2, "allow_nan": False, **options})

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Config":
        """The config of what `to_dict` returned. Nothing is called; nothing untrusted is imported.

        Raises:
            UntrustedNameError: a "$class" outside of what `framework.config_names` trusts.
            ConfigError: a field that the class does not take, or a value that does not fit it.
        """
        try:
            config = decode(data, "", _component)
        except RecursionError as error:
            raise ConfigError("nested too deeply for a config") from error
        if not isinstance(config, Config):
            raise FieldTypeError(f"expected a dict with a '$class', given {show(data)}")
        return config

    @staticmethod
    def from_json(text: str | bytes) -> "Config":
        """`from_dict` of JSON text."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not valid JSON: {error}") from error
        return Config.from_dict(data)

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """(dotted path, value), depth first in signature order. Unset is REQUIRED; a list of plain values is one."""
        yield from ((path, value) for path, value in self.walk() if not isinstance(value, Config))

    def walk(self, path: str = "") -> Iterator[tuple[str, Any]]:
        """As `leaves`, and each config, this one included, before what is in it."""
        yield path, self
        for name, field in self._schema.fields.items():
            if name in self._fields:
                yield from _walk_value(join(path, name), self._fields[name])
            elif field.default is REQUIRED:
                yield join(path, name), REQUIRED


def diff(left: Config, right: Config) -> list[tuple[str, Any, Any]]:
    """(path, left, right) wherever two configs differ; ABSENT for what one side does not have.

    A component of another class is listed by both names, at its own path.
    """
    sides = []
    for config in (left, right):
        sides.append({path: name_of(v._target) if isinstance(v, Config) else v for path, v in config.walk()})
    paths = dict.fromkeys([*sides[0], *sides[1]])
    rows = [(path, sides[0].get(path, ABSENT), sides[1].get(path, ABSENT)) for path in paths]
    return [(path, a, b) for path, a, b in rows if a != b or type(a) is not type(b)]


def _walk_value(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Config):
        yield from value.walk(path)
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _walk_value(join(path, key), item)
    elif isinstance(value, list | tuple) and any(isinstance(item, Config | dict) for item in value):
        for index, item in enumerate(value):
            yield from _walk_value(join(path, str(index)), item)
    else:
        yield path, value


def _build(value: Any, path: str, field: Field) -> Any:
    """A value of a config as its constructor receives it. `value` is ours to hand out: it is a copy."""
    if isinstance(value, Config):
        object.__setattr__(value, "_path", path)
        return value if field.keeps_config else value.instantiate()
    if isinstance(value, list | tuple):
        return type(value)(_build(item, join(path, str(index)), field) for index, item in enumerate(value))
    if isinstance(value, dict):
        return {key: _build(item, join(path, key), field) for key, item in value.items()}
    if isinstance(value, str):
        for arm in arms(field.hint):
            if isinstance(arm, type) and issubclass(arm, enum.Enum) and value in arm.__members__:
                return arm[value]
    return value


def _from_text(hint: Any, text: str, path: str, present: Any) -> Any:
    if '"$class"' in text and isinstance(data := literal(text), list | dict):
        return decode(data, path, _component)
    try:
        value, mismatch = parse_text(hint, text), None
    except Mismatch as error:
        value, mismatch = None, error
    # Text that fits as data is a component's name only if it could not be mistaken: dotted, in a trusted package.
    beside = name_of(present._target) if isinstance(present, Config) else ""
    named = config_names.is_name(text) and ("." in text or beside)
    if accepts_config(hint) and named and (mismatch or config_names.is_trusted(text)):
        try:
            return config_for(config_names.resolve(text) if "." in text else config_names.resolve_beside(beside, text))
        except UntrustedNameError as error:
            raise UntrustedNameError(f"expected a component: {error}", path=path) from None
    if mismatch:
        raise mismatch.error(path, text)
    return value


def _next_key(value: Any, parts: list[str], path: str) -> str:
    """The next key of a path into a list or dict. Dict keys may hold dots, so the longest that is there wins."""
    if isinstance(value, dict):
        there = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        found = next((key for key in there if key in value), parts[0])
        if found in value or len(parts) == 1:
            return found
        message = f"no such key{did_you_mean(found, value)}"
    elif parts[0].isdecimal() and int(parts[0]) < len(value):
        return str(int(parts[0]))
    else:
        message = f"no such index; valid: 0 to {len(value) - 1}" if value else "no such index: it is empty"
    raise UnknownFieldError(message, path=join(path, parts[0]))


def _replaced(value: Any, keys: list[str], new: Any) -> Any:
    """A copy of nested lists and dicts with one element replaced."""
    if not keys:
        return new
    key, rest = keys[0], keys[1:]
    if isinstance(value, dict):
        return {**value, key: _replaced(value.get(key), rest, new)}
    return type(value)(_replaced(item, rest, new) if str(i) == key else item for i, item in enumerate(value))


def _component(data: dict[str, Any], path: str) -> Config:
    """The config of a dict with a "$class", every field checked."""
    try:
        config = Config(config_names.resolve(data["$class"]))
    except UntrustedNameError as error:
        raise UntrustedNameError(str(error), path=path) from None
    for name, value in data.items():
        if name != "$class":
            here = join(path, name)
            config._fields[name] = config._checked(name, decode(value, here, _component), here)
    return config
