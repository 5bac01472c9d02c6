"""Configs: data that says what to build. The constructor's signature is the schema.

    cfg = config_for(Linear, out=8)   # Linear.__init__ gives names, types, ranges, defaults, and what is required
    cfg.out = "8"                     # FieldTypeError: Linear.out: expected an integer > 0, given '8' (str)
    layer = cfg.instantiate(dim=4)    # late arguments; all that is missing is listed in one error

A component is any class or function that takes named arguments with type hints: no base class, no second declaration
of the fields. A parameter whose hint mentions `Config` receives the config itself, and the component builds that child
once it knows what to tell it (`attention.instantiate(dim=dim)`), so that a width is written once. A config given to any
other parameter (a schedule as optax's `learning_rate`) is built first, and the object is passed.

A config owns its values: what is set into it is copied, so no two places share one child by accident. Follows axlearn's
configs (nested, strict, did-you-mean) over ml_collections' ConfigDict (attribute access, iteration).
"""

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

import annotated_types as at

from framework.config.components import component
from framework.config.names import (
    TRUSTED,
    ConfigError,
    FieldError,
    FieldTypeError,
    did_you_mean,
    is_trusted,
    join,
    name_of,
    remember,
    resolve,
    show,
)
from framework.config.schema import (
    ABSENT,
    REQUIRED,
    ConfigBase,
    Field,
    accepts_config,
    convert,
    element_hint,
    has_integer_keys,
    literal,
    mentions_config,
    parse_text,
    schema,
    short_names,
)

PositiveInt = Annotated[int, at.Gt(0)]
NonNegativeInt = Annotated[int, at.Ge(0)]
PositiveFloat = Annotated[float, at.Gt(0)]
NonNegativeFloat = Annotated[float, at.Ge(0)]
Fraction = Annotated[float, at.Interval(ge=0, lt=1)]
Probability = Annotated[float, at.Interval(ge=0, le=1)]
FiniteNonNegative = Annotated[float, at.Interval(ge=0, lt=math.inf)]
# What jax.random.key takes whole: it drops higher bits without a word.
Seed = Annotated[int, at.Interval(ge=0, lt=2**32)]
DType = Literal["float32", "bfloat16", "float16", "float64"]
_MAX_DEPTH = 100  # of JSON data


def config_for(target: Callable[..., Any], /, **fields: Any) -> "Config":
    """A config of a class or function: its defaults, and `fields` set one by one. Raises ConfigError, also for a target
    without a name to store or a signature to read."""
    remember(target)
    config = Config(target)
    for name, value in fields.items():
        config[name] = value
    return config


@component
def reference(name: str) -> Any:
    """The very object of a dotted name, not what it returns: `config_for(reference, name="jax.nn.gelu")`."""
    return resolve(name, passed=True)


def target_of(config: "Config") -> Callable[..., Any]:
    """The class or function that a config builds from."""
    return config._target


def schema_of(config: "Config") -> Mapping[str, Field]:
    """The fields that a config has, set or not: their type hints and defaults."""
    return config._schema


@functools.cache
def _schema_of(target: Callable[..., Any]) -> dict[str, Field]:
    # `update` may be a field although ConfigDict has a method of that name: `memory.update` is a stable name of ours.
    return schema(target, reserved=[name for name in dir(Config) if name != "update"])


class Config(ConfigBase):
    """The dotted name of a class or function and its named arguments, checked against its signature as they are set."""

    _schema: dict[str, Field]
    _path: str | None  # known once an enclosing config hands this one to its constructor

    def __init__(self, target: Callable[..., Any], fields: Mapping[str, Any] | None = None, path: str | None = None):
        super().__init__(type_safe=False, convert_dict=False, sort_keys=False)
        known = _schema_of(target)
        if fields is None:
            fields = {name: field.default for name, field in known.items() if field.is_data}
        own = {name: convert(known[name].hint, value, name) for name, value in fields.items()}
        for name, value in (("_target", target), ("_schema", known), ("_path", path), ("_fields", own)):
            object.__setattr__(self, name, value)

    @property
    def update(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The field of that name. ConfigDict's method `update` is given up for it."""
        return self["update"]

    def _at(self, name: str) -> str:
        """The path of a field, as an error names it: from the root when it is known, else from the class."""
        return join(self._target.__name__ if self._path is None else self._path, name)

    def _field(self, name: str, path: str | None = None) -> Field:
        if name not in self._schema:
            message = f"no such field in {name_of(self._target)}{did_you_mean(str(name), self._schema)}"
            raise FieldError(message, path=path or self._at(name))
        return self._schema[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # copy, pickle and inspect probe for such names; they are never fields
        return self[name]

    def __getitem__(self, key: str) -> Any:
        value = self._fields.get(key, self._field(key).default)
        if value is REQUIRED:
            raise FieldError("required, and not set", path=self._at(key))
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The field, or `default` while it is unset. Unlike a dict's, it refuses names that are no field."""
        self._field(key)
        return self._fields.get(key, default)

    def takes(self, name: str) -> bool:
        """Whether there is a field of that name."""
        return name in self._schema

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        self._fields[key] = self._checked(key, value)

    def _checked(self, name: str, value: Any, path: str | None = None) -> Any:
        return convert(self._field(name, path).hint, value, path or self._at(name))

    def __delitem__(self, key: str) -> None:
        """Back to the default; a field without one is unset again."""
        field = self._field(key)
        self._fields.pop(key, None)
        if field.is_data:
            self[key] = field.default

    @property
    def _ordered_fields(self) -> dict[str, Any]:
        return {name: self._fields[name] for name in self._schema if name in self._fields}

    def copy(self) -> "Config":
        """A deep copy."""
        return Config(self._target, self._fields, self._path)

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> "Config":
        return self.copy()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._target is other._target and self._fields == other._fields

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"config_for({', '.join([name_of(self._target), *(f'{k}={v!r}' for k, v in self.items())])})"

    __str__ = __repr__

    def missing(self, *given: str) -> list[str]:
        """Required fields that are neither set nor in `given`. This level only: a parent fills in its children."""
        required = [name for name, field in self._schema.items() if field.default is REQUIRED]
        return [name for name in required if name not in self._fields and name not in given]

    def instantiate(self, **late: Any) -> Any:
        """Builds the object. `late` completes or overrides the fields, with any Python objects. Raises ConfigError:
        required fields of this level are still unset (it lists all), or a constructor raised ValueError: the dotted
        path precedes its text, and it is the cause."""
        name, path, known = name_of(self._target), self._path or "", self._schema
        for key in late:
            self._field(key)
        if missing := self.missing(*late):
            raise FieldError(f"{name}: required, and not set: {', '.join(missing)}", path=path)
        values = {
            # Checked again, since a list or dict can be changed in place.
            key: _build(self._checked(key, value), join(path, key), mentions_config(known[key].hint))
            for key, value in self._ordered_fields.items()
            if key not in late
        }
        for key, value in values.items():
            if isinstance(value, dict) and has_integer_keys(known[key].hint):
                values[key] = {int(step): item for step, item in value.items()}
        try:
            return self._target(**values, **late)
        except ValueError as error:
            if isinstance(error, ConfigError) and error.path:
                raise
            raise ConfigError(f"{name}: {error}", path=path) from error

    def _walk_to(self, path: str) -> tuple["Config", str, list[Any], Any]:
        """(the innermost config on the path, its field, the keys into that field's lists and dicts, the value)."""
        node, name, keys, done = self, "", [], ""
        value: Any = self
        for part in path.split("."):
            outer, done = done, join(done, part)
            if isinstance(value, Config):
                node, name, keys = value, part, []
                value = node._fields.get(name, node._field(name, done).default)
            elif isinstance(value, dict):
                keys.append(part)
                value = value.get(part, REQUIRED)
            elif isinstance(value, list | tuple):
                if not part.isdecimal() or int(part) >= len(value):
                    raise FieldError(f"no such index; {outer} has {len(value)} elements", path=done)
                keys.append(int(part))
                value = value[int(part)]
            else:
                state = "is not set" if value is REQUIRED else f"is {show(value)}"
                raise FieldError(f"{outer} {state}, and has no fields", path=done)
        return node, name, keys, value

    def get_path(self, path: str) -> Any:
        """The value at `"model.stack.pattern.0.num_heads"`: names lead into configs and dicts, numbers into lists."""
        value = self._walk_to(path)[-1]
        if value is REQUIRED:
            raise FieldError("not set", path=path)
        return value

    def set_path(self, path: str, value: Any) -> None:
        """Sets the value at a dotted path, checked as an attribute is. Dicts take new keys; lists keep their length."""
        node, name, keys, _ = self._walk_to(path)
        field_path = path.removesuffix("".join(f".{key}" for key in keys))
        node._fields[name] = node._checked(name, _replaced(node._fields.get(name), keys, value), field_path)

    def override(self, path: str, text: str) -> None:
        """Sets the value at a dotted path from command-line text, read by the field's type (see `parse_text`). Where a
        config may stand, the dotted name of a class or function (`optax.lion`) puts that component there, with fresh
        defaults; so do its short name, where the field has such (`lion`), and JSON with a "$class"."""
        node, name, keys, _ = self._walk_to(path)
        hint = functools.reduce(element_hint, keys, node._field(name).hint)
        short = short_names(hint)
        if '"$class"' in text:
            value = _decode(literal(text), path)  # components alone, as in a file
        elif text in short:
            value = config_for(short[text])
        elif accepts_config(hint) and is_trusted(text):
            value = config_for(resolve(text, path))
        else:
            try:
                value = parse_text(hint, text, path)
            except FieldTypeError as error:
                if accepts_config(hint):
                    inside = ", ".join(TRUSTED)
                    known = f", or is one of {', '.join(short)}" if short else ""
                    error.args = (f"{error.args[0]}; a component goes by its dotted name, inside {inside}{known}",)
                raise
        self.set_path(path, value)

    def to_dict(self, visit_map: Any = None, preserve_field_references: bool = False) -> dict[str, Any]:
        """Plain JSON data: {"$class": "framework.layers.linear.Linear", "out": 8, ...}, in signature order."""
        fields = {name: self._checked(name, value) for name, value in self._ordered_fields.items()}
        return {"$class": name_of(self._target), **json.loads(json.dumps(fields, default=Config.to_dict))}

    def to_json(self, json_encoder_cls: Any = None, **options: Any) -> str:
        """`to_dict` as text, indented by 2, the same for equal configs. `options` go to json.dumps."""
        return json.dumps(self.to_dict(), **{"indent": 2, **options})

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Config":
        """The config of what `to_dict` returned, every field checked. Nothing is called, and nothing untrusted is
        imported: a "$class" that is no component (see `framework.config.components`) raises ConfigError."""
        config = _decode(data, "")
        if not isinstance(config, Config):
            raise FieldTypeError(f"expected a dict with a '$class', given {show(data)}")
        return config

    @staticmethod
    def from_json(text: str | bytes) -> "Config":
        """`from_dict` of JSON text."""
        try:
            data = json.loads(text, object_pairs_hook=_without_duplicates)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not valid JSON: {error}") from error
        return Config.from_dict(data)

    def walk(self) -> Iterator[tuple[str, Any]]:
        """(dotted path, value), depth first in signature order, and each config, this one included, before what is in
        it. Unset is REQUIRED; a list of plain values is one value."""
        return _walk("", self)

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """As `walk`, without the configs."""
        return ((path, value) for path, value in self.walk() if not isinstance(value, Config))


def diff(left: Config, right: Config) -> list[tuple[str, Any, Any]]:
    """(path, left, right) wherever two configs differ; ABSENT for what one side does not have. A component of another
    class is listed by both names, at its own path."""
    one, two = (
        {path: name_of(v._target) if isinstance(v, Config) else v for path, v in config.walk()}
        for config in (left, right)
    )
    rows = [(path, one.get(path, ABSENT), two.get(path, ABSENT)) for path in one | two]
    return [(path, a, b) for path, a, b in rows if a != b or type(a) is not type(b)]


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Config):
        yield path, value
        there = {name: value._fields.get(name, field.default) for name, field in value._schema.items()}
        items = [(name, item) for name, item in there.items() if name in value._fields or item is REQUIRED]
    elif isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list | tuple) and any(isinstance(item, Config | dict) for item in value):
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, item in items:
        yield from _walk(join(path, key), item)


def _build(value: Any, path: str, keeps_config: bool) -> Any:
    """A value of a config as its constructor receives it. `value` is ours to hand out: it is a copy."""
    if isinstance(value, Config):
        object.__setattr__(value, "_path", path)
        return value if keeps_config else value.instantiate()
    if isinstance(value, list | tuple):
        return type(value)(_build(item, join(path, index), keeps_config) for index, item in enumerate(value))
    if isinstance(value, dict):
        return {key: _build(item, join(path, key), keeps_config) for key, item in value.items()}
    return value


def _replaced(value: Any, keys: list[Any], new: Any) -> Any:
    """A copy of nested lists and dicts with one element replaced."""
    if not keys:
        return new
    if isinstance(value, dict):
        return {**value, keys[0]: _replaced(value.get(keys[0]), keys[1:], new)}
    return [_replaced(item, keys[1:], new) if index == keys[0] else item for index, item in enumerate(value)]


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Of a key that stands there twice, the one that a person read might not be the one that counts."""
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:80]!r} stands twice in one object")
    return data


def _decode(data: Any, path: str, depth: int = 0) -> Any:
    """The value of JSON data; a dict with a "$class" is a config, every field checked."""
    if depth > _MAX_DEPTH:
        raise ConfigError(f"expected at most {_MAX_DEPTH} levels, and there are more", path=path[:80])
    if isinstance(data, list):
        return [_decode(item, join(path, index), depth + 1) for index, item in enumerate(data)]
    if not isinstance(data, dict):
        return data
    # The class first: importing its module is what makes the names loadable that it configures itself.
    config = Config(resolve(data["$class"], path)) if "$class" in data else None
    values = {key: _decode(item, join(path, key), depth + 1) for key, item in data.items() if key != "$class"}
    if config is None:
        return values
    for name, value in values.items():
        config._fields[name] = config._checked(name, value, join(path, name))
    return config
