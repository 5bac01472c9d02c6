"""Configs: data that describes objects to build. The constructor's signature is the schema.

    cfg = config_for(Linear, out=8)   # Linear.__init__ gives names, types, ranges, defaults, and what is required
    cfg.out = "8"                     # FieldTypeError: Linear.out: expected an integer > 0, given '8' (str)
    layer = cfg.instantiate(dim=4)    # late arguments; one error lists everything that is missing

A component is any class or function that takes named arguments with type hints: it needs no base class and no second
declaration of its fields. A parameter whose hint mentions `Config` receives the config itself. The component then
builds that child once it knows the late arguments (`attention.instantiate(dim=dim)`), so a width is written only once.
A config given to any other parameter (such as a schedule for optax's `learning_rate`) is built first, and the object is
passed. A config owns its values: they are copied when set, so no two places share a child by accident. The design
follows axlearn's configs (nested, strict, did-you-mean) on top of ml_collections' ConfigDict.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll.framework.config.components import Target, component
from plimsoll.framework.config.migrations import find_current_field, find_current_value, migrate_fields
from plimsoll.framework.config.names import (
    TRUSTED,
    ConfigError,
    FieldError,
    FieldTypeError,
    did_you_mean,
    get_dotted_name,
    is_trusted,
    join,
    remember,
    resolve,
    resolve_short_name,
    show,
)
from plimsoll.framework.config.nested import replace_value_at
from plimsoll.framework.config.schema import (
    REQUIRED,
    ConfigBase,
    Field,
    accepts_config,
    convert,
    element_hint,
    has_integer_keys,
    mentions_config,
    schema,
    short_names,
)
from plimsoll.framework.config.value_parsing import parse_literal, parse_text, reject_duplicate_keys

# Maximum depth of JSON data to decode; reached before Python's own recursion limit.
_MAX_DEPTH = 100


def config_for(target: Target, /, **fields: object) -> "Config":
    """Returns a config of a class or function: its defaults, with `fields` set one by one.

    Args:
        target: the class or function that the config builds from.
        **fields: values of its parameters.

    Raises:
        ConfigError: a field is invalid, or the target has no name to store or no readable signature.
    """
    remember(target)
    config = Config(target)
    for name, value in fields.items():
        config[name] = value
    return config


@component
def reference(name: str) -> Target:
    """Return the object with a dotted name, without calling it: `config_for(reference, name="jax.nn.gelu")`."""
    return resolve(name, passed=True)


def get_target(config: "Config") -> Target:
    """Returns the class or function that a config builds from."""
    return config._target


def get_schema(config: "Config") -> Mapping[str, Field]:
    """Returns all fields of a config, set or not, with their type hints and defaults."""
    return config._schema


@functools.cache
def _build_schema(target: Target) -> dict[str, Field]:
    # `update` may be a field although ConfigDict has a method of that name, because `memory.update` is a public option
    # of Plimsoll.
    reserved = [name for name in dir(Config) if name != "update"]
    return schema(target, reserved=reserved)


@dataclass(frozen=True)
class _FieldLocation:
    """The end of a dotted path, as returned by `Config._walk_to`."""

    config: "Config"  # the innermost config on the path
    field: str  # the field of that config
    keys: list[str | int]  # keys and indices inside that field's lists and dicts
    value: object


class Config(ConfigBase):
    """A class or function together with its named arguments: a mapping of the fields that are set.

    Every argument is checked against the signature of the class or function when it is set. The mapping's order is that
    of the signature, not of the assignments, so that equal configs print the same JSON.
    """

    _schema: dict[str, Field]
    _path: str | None  # set when an enclosing config passes this one to its constructor

    def __init__(self, target: Target, fields: Mapping[str, object] | None = None, path: str | None = None):
        super().__init__(type_safe=False, convert_dict=False, sort_keys=False)
        target_schema = _build_schema(target)
        if fields is None:
            fields = {name: field.default for name, field in target_schema.items() if field.is_data}
        # Converting also copies, so no container or child config is shared with the caller.
        values = {}
        for name, value in fields.items():
            values[name] = convert(target_schema[name].hint, value, name)
        # The `__setattr__` of this class would treat these attributes as fields.
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_schema", target_schema)
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_fields", values)

    @property
    def update(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The field `update`. It replaces ConfigDict's method of that name."""
        return self["update"]

    @property
    def _ordered_fields(self) -> dict[str, object]:
        # ConfigDict iterates over this: the order of the signature, not of the assignments.
        return {name: self._fields[name] for name in self._schema if name in self._fields}

    def _at(self, name: str) -> str:
        """Returns a field's path for error messages: from the root if known, else from the class."""
        parent = self._target.__name__ if self._path is None else self._path
        return join(parent, name)

    def _current(self, name: str) -> str:
        """Returns the current name of a field, which the caller may know by an older name."""
        return name if name in self._schema else find_current_field(self._target, name)

    def current_path(self, path: str) -> str:
        """Returns a dotted path with the current name of its first field, which a user may know by an older name."""
        first, dot, rest = path.partition(".")
        return f"{self._current(first)}{dot}{rest}"

    def _field(self, name: str, path: str | None = None) -> Field:
        if name not in self._schema:
            suggestion = did_you_mean(str(name), self._schema)
            message = f"no such field in {get_dotted_name(self._target)}{suggestion}"
            raise FieldError(message, path=path or self._at(name))
        return self._schema[name]

    def __getattr__(self, name: str) -> Any:
        # copy, pickle and inspect probe for names with a leading underscore, which are never fields.
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, key: str) -> Any:
        key = self._current(key)
        default = self._field(key).default
        value = self._fields.get(key, default)
        if value is REQUIRED:
            raise FieldError("required, and not set", path=self._at(key))
        return value

    def get(self, key: str, default: object = None) -> Any:
        """Returns the field, or `default` if it is unset.

        Unlike a dict's `get`, it raises FieldError for an unknown field.
        """
        key = self._current(key)
        self._field(key)
        return self._fields.get(key, default)

    def takes(self, name: str) -> bool:
        """Returns whether there is a field of that name."""
        return name in self._schema

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def __setitem__(self, key: str, value: object) -> None:
        key = self._current(key)
        self._fields[key] = self._convert_value(key, value)

    def _convert_value(self, name: str, value: object, path: str | None = None) -> object:
        hint = self._field(name, path).hint
        return convert(hint, find_current_value(self._target, name, value), path or self._at(name))

    def __delitem__(self, key: str) -> None:
        """Resets the field to its default; a field without a default becomes unset."""
        key = self._current(key)
        field = self._field(key)
        self._fields.pop(key, None)
        if field.is_data:
            self[key] = field.default

    def copy(self) -> "Config":
        """Returns a deep copy."""
        return Config(self._target, self._fields, self._path)

    __copy__ = copy

    def __deepcopy__(self, memo: object) -> "Config":
        return self.copy()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Config):
            return False
        return self._target is other._target and self._fields == other._fields

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        arguments = [get_dotted_name(self._target)]
        for name, value in self.items():
            arguments.append(f"{name}={value!r}")
        return f"config_for({', '.join(arguments)})"

    __str__ = __repr__

    def missing(self, *late_names: str) -> list[str]:
        """Returns the required fields that are neither set nor among `late_names`.

        Only fields of this level are listed, because a parent fills in its children.
        """
        required = [name for name, field in self._schema.items() if field.default is REQUIRED]
        return [name for name in required if name not in self._fields and name not in late_names]

    def instantiate(self, **late: object) -> Any:
        """Builds the object.

        Args:
            **late: arguments that are known only now. They add to the fields or override them, and may be arbitrary
                Python objects.

        Raises:
            ConfigError: required fields of this level are still unset (the error lists all of them), or a constructor
                raised ValueError. In that case the message starts with the dotted path, and the original error is
                chained as the cause.
        """
        target_name = get_dotted_name(self._target)
        path = self._path or ""
        for name in late:
            self._field(name)
        missing = self.missing(*late)
        if missing:
            message = f"{target_name}: required, and not set: {', '.join(missing)}"
            raise FieldError(message, path=path)
        abstract = sorted(getattr(self._target, "__abstractmethods__", ()))
        if abstract:
            raise ConfigError(f"{target_name} does not define {', '.join(abstract)}", path=path)
        arguments = {}
        for name in self:
            if name in late:
                continue
            hint = self._schema[name].hint
            # Check again, because a list or dict can be changed in place.
            value = self._convert_value(name, self._fields[name])
            value = _build(value, join(path, name), keeps_config=mentions_config(hint))
            if isinstance(value, dict) and has_integer_keys(hint):
                # JSON has no integer keys, so a config stores them as strings.
                value = {int(key): item for key, item in value.items()}
            arguments[name] = value
        try:
            return self._target(**arguments, **late)
        except ValueError as error:
            # An error of a child already has the child's path, which is more precise than this one.
            if isinstance(error, ConfigError) and error.path:
                raise
            raise ConfigError(f"{target_name}: {error}", path=path) from error

    def _walk_to(self, path: str) -> _FieldLocation:
        """Follows a dotted path. Raises FieldError at the first part that does not exist."""
        config = self
        field = ""
        keys: list[str | int] = []
        value: object = self
        walked = ""
        for part in path.split("."):
            outer = walked
            walked = join(outer, part)
            if isinstance(value, Config):
                config = value
                field = config._current(part)
                keys = []
                default = config._field(field, walked).default
                value = config._fields.get(field, default)
            elif isinstance(value, dict):
                # A missing key is not an error here: `set_path` may add it.
                keys.append(part)
                value = value.get(part, REQUIRED)
            elif isinstance(value, list | tuple):
                if not part.isdecimal() or int(part) >= len(value):
                    message = f"no such index; {outer} has {len(value)} elements"
                    raise FieldError(message, path=walked)
                keys.append(int(part))
                value = value[int(part)]
            else:
                state = "is not set" if value is REQUIRED else f"is {show(value)}"
                raise FieldError(f"{outer} {state}, and has no fields", path=walked)
        return _FieldLocation(config, field, keys, value)

    def get_path(self, path: str) -> Any:
        """Returns the value at a dotted path such as `"model.stack.pattern.0.num_heads"`.

        Names index configs and dicts, numbers index lists. Raises FieldError if the path does not exist or is not set.
        """
        value = self._walk_to(path).value
        if value is REQUIRED:
            raise FieldError("not set", path=path)
        return value

    def set_path(self, path: str, value: object) -> None:
        """Sets the value at a dotted path, with the same checks as setting an attribute.

        Dicts accept new keys; lists keep their length. Raises ConfigError.
        """
        location = self._walk_to(path)
        # The whole field is checked, so an error names the path of the element below the field.
        below_field = "".join(f".{key}" for key in location.keys)
        field_path = path.removesuffix(below_field)
        config = location.config
        old_value = config._fields.get(location.field)
        new_value = replace_value_at(old_value, location.keys, value)
        config._fields[location.field] = config._convert_value(location.field, new_value, field_path)

    def override(self, path: str, text: str) -> None:
        """Sets the value at a dotted path from command-line text.

        The field's type determines how the text is parsed (see `parse_text`). If the field accepts a config, the text
        may name a component, which is set with its default values. It can be given as

        - the dotted name of a class or function (`optax.lion`),
        - a short name that the field defines (`lion`),
        - JSON with a "$class",
        - a name without its module (`JsonLines`, `cosine_decay_schedule`), which is looked up in the modules that this
          config uses, in Plimsoll's components, and in those of optax and jax.nn.

        Raises ConfigError.
        """
        location = self._walk_to(path)
        text = str(find_current_value(location.config._target, location.field, text))
        hint = location.config._field(location.field).hint
        for key in location.keys:
            hint = element_hint(hint, key)
        components = short_names(hint)
        if '"$class"' in text:
            # As in a file, names may only refer to components.
            value = _decode(parse_literal(text), path)
        elif text in components:
            value = config_for(components[text])
        elif accepts_config(hint) and is_trusted(text):
            value = config_for(resolve(text, path))
        else:
            try:
                value = parse_text(hint, text, path)
            except FieldTypeError as error:
                if not accepts_config(hint):
                    raise
                # The text may be a name without its module. The component at `path` comes first, because the modules of
                # this config's components are searched in order.
                configs = {at: value for at, value in self.walk() if isinstance(value, Config)}
                ordered_paths = sorted(configs, key=lambda at: at != path)
                neighbors = [get_dotted_name(configs[at]._target) for at in ordered_paths]
                component, suggestion = resolve_short_name(text, neighbors)
                if component is None:
                    packages = ", ".join(TRUSTED)
                    choices = f", or is one of {', '.join(components)}" if components else ""
                    advice = f"name a component by its own name, or by its dotted name inside {packages}{choices}"
                    error.args = (f"{error.args[0]}; {advice}{suggestion}",)
                    raise
                value = config_for(component)
        # An element may be valid by itself but not together with the others, so the whole field is checked.
        self.set_path(path, value)

    def to_dict(self, visit_map: object = None, preserve_field_references: bool = False) -> dict[str, Any]:
        """Returns plain JSON data in signature order.

        It has the form {"$class": "plimsoll.Linear", "out": 8, ...}. The name of a component has no module, so it stays
        valid when the class moves (see `framework.config.names`). The parameters exist only for compatibility with
        ConfigDict's method, and are ignored.
        """
        # Check again, because a list or dict can be changed in place.
        fields = {name: self._convert_value(name, self._fields[name]) for name in self}
        # The round trip through text converts child configs and tuples to what a JSON file would contain.
        text = json.dumps(fields, default=Config.to_dict)
        return {"$class": get_dotted_name(self._target), **json.loads(text)}

    def to_json(self, json_encoder_cls: object = None, **options: Any) -> str:
        """Returns `to_dict` as text, indented by 2; the text is the same for equal configs.

        `options` are passed to json.dumps.
        """
        return json.dumps(self.to_dict(), **{"indent": 2, **options})

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> "Config":
        """Returns the config for data that `to_dict` returned, with every field checked.

        Nothing is called, and nothing untrusted is imported: a "$class" that is not a component (see
        `framework.config.components`) raises ConfigError.
        """
        config = _decode(data, "")
        if not isinstance(config, Config):
            raise FieldTypeError(f"expected a dict with a '$class', given {show(data)}")
        return config

    @staticmethod
    def from_json(text: str | bytes) -> "Config":
        """Returns `from_dict` of JSON text. Also raises ConfigError if the text is not valid JSON."""
        try:
            data = json.loads(text, object_pairs_hook=reject_duplicate_keys)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not valid JSON: {error}") from error
        return Config.from_dict(data)

    def walk(self) -> Iterator[tuple[str, Any]]:
        """Yields (dotted path, value), depth first in signature order.

        Each config, including this one, comes before its own values. An unset required field has the value REQUIRED; a
        list of plain values counts as one value. Other unset fields are left out: the constructor uses its own default.
        """
        remaining: list[tuple[str, object]] = [("", self)]
        while remaining:
            path, value = remaining.pop()
            items: list[tuple[str | int, object]] = []
            if isinstance(value, Config):
                yield path, value
                for name, field in value._schema.items():
                    item = value._fields.get(name, field.default)
                    if name in value._fields or item is REQUIRED:
                        items.append((name, item))
            elif isinstance(value, dict) and value:
                items += value.items()
            elif isinstance(value, list | tuple) and any(isinstance(item, Config | dict) for item in value):
                items += enumerate(value)
            else:
                yield path, value
            # The last one is popped first.
            remaining += [(join(path, key), item) for key, item in reversed(items)]

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Yields the same items as `walk`, without the configs."""
        return ((path, value) for path, value in self.walk() if not isinstance(value, Config))


def _build(value: object, path: str, keeps_config: bool) -> object:
    """Returns a config's value as the constructor receives it.

    `value` must be a copy owned by the caller, because this sets the paths of its configs in place.
    """
    if isinstance(value, Config):
        object.__setattr__(value, "_path", path)
        return value if keeps_config else value.instantiate()
    if isinstance(value, list | tuple):
        elements = (_build(item, join(path, i), keeps_config) for i, item in enumerate(value))
        return type(value)(elements)
    if isinstance(value, dict):
        return {key: _build(item, join(path, key), keeps_config) for key, item in value.items()}
    return value


def _decode(data: object, path: str, depth: int = 0) -> object:
    """Decodes JSON data; a dict with a "$class" becomes a config with checked fields."""
    if depth > _MAX_DEPTH:
        raise ConfigError(f"expected at most {_MAX_DEPTH} nested levels, given more", path=path[:80])
    if isinstance(data, list):
        return [_decode(item, join(path, i), depth + 1) for i, item in enumerate(data)]
    if not isinstance(data, dict):
        return data
    # Resolve the class first: importing its module registers the names that the module configures itself.
    config = Config(resolve(data["$class"], path)) if "$class" in data else None
    values = {}
    for key, item in data.items():
        if key != "$class":
            values[key] = _decode(item, join(path, key), depth + 1)
    if config is None:
        return values
    for name, value in migrate_fields(get_dotted_name(config._target), values).items():
        config._fields[name] = config._convert_value(name, value, join(path, name))
    return config
