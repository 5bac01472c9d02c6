"""The schema of a component, read from its constructor's signature: names, type hints, defaults, what is required.

Imports `framework.config_types` and `framework.config_names`.
"""

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, Union

from framework.config_errors import ConfigError, Mismatch
from framework.config_names import name_of
from framework.config_types import convert, mentions_config


class _Mark:
    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


REQUIRED: Any = _Mark("REQUIRED")
"""How an unset field shows in `leaves()` and `diff()`. Never a value of a field: being unset is what required means."""

ABSENT: Any = _Mark("ABSENT")
"""How `diff()` shows what one of the two configs does not have."""

OPAQUE: Any = _Mark("OPAQUE")
"""A default that is no data (a dtype object, a function). The field stays unset, and the constructor uses its own."""


@dataclasses.dataclass
class Field:
    """One parameter of a constructor."""

    name: str
    annotation: Any
    scope: Mapping[str, Any]  # the globals in which the annotation is resolved
    own_default: Any = REQUIRED  # as the signature has it
    default: Any = REQUIRED  # as a config stores it; REQUIRED or OPAQUE when it stores none
    widened: tuple[type, ...] = ()  # types that only the default shows: `x: int = None`

    @functools.cached_property
    def _resolved(self) -> Any:
        if self.annotation is inspect.Parameter.empty:
            return Any
        holder = types.SimpleNamespace(__annotations__={"hint": self.annotation})
        return typing.get_type_hints(holder, globalns=dict(self.scope), include_extras=True)["hint"]

    @property
    def hint(self) -> Any:
        """The resolved hint. What cannot be resolved stays as it is and accepts any data; it is tried again next time,
        since a class may be configured above the class that its own hints name."""
        try:
            hint = self._resolved
        except (NameError, AttributeError, TypeError, SyntaxError):
            hint = self.annotation
        return Union[(hint, *self.widened)] if self.widened else hint

    @property
    def keeps_config(self) -> bool:
        """Whether the constructor wants configs as they are, to instantiate them itself."""
        hint = self.hint
        return bool(re.search(r"\bConfig\b", hint)) if isinstance(hint, str) else mentions_config(hint)

    def set_default(self, owner: str, own_default: Any) -> None:
        """Takes the signature's default over, as data where it is data."""
        self.own_default = own_default
        try:
            self.default = convert(self.hint, own_default)
        except Mismatch as mismatch:
            if mismatch.right_type:
                raise mismatch.error(f"{owner}.{self.name}, by default") from None
            try:
                self.default = convert(Any, own_default)
                self.widened = (type(own_default),)
            except Mismatch:
                self.default = OPAQUE


@dataclasses.dataclass(frozen=True)
class Schema:
    """Fields in signature order; `positional` go by position: those before `variadic`, the name after `*`."""

    fields: dict[str, Field]
    positional: tuple[str, ...] = ()
    variadic: str | None = None


def schema(target: Callable[..., Any], reserved: Collection[str] = ()) -> Schema:
    """Reads a function, or a class: its `__init__`, and that of its bases for as long as `**kwargs` forwards to them.

    Parameters that start with an underscore and have a default are not fields.

    Raises:
        ConfigError: no readable signature, a parameter named as one of `reserved`, or a default out of its own range.
    """
    owner = name_of(target)
    fields: dict[str, Field] = {}
    positional: tuple[str, ...] = ()
    variadic = None
    for function, skipped in _constructors(target):
        try:
            parameters = list(inspect.signature(function).parameters.values())[skipped:]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{owner} cannot be configured: {error}") from error
        for parameter in parameters:
            private = parameter.name.startswith("_") and parameter.default is not parameter.empty
            if parameter.kind is parameter.VAR_KEYWORD or parameter.name in fields or private:
                continue
            if parameter.name in reserved or parameter.name.startswith("_"):
                renamed = f"{parameter.name.strip('_')}_"
                raise ConfigError(
                    f"{owner}: Config needs the name {parameter.name!r} itself; rename it, say {renamed!r}"
                )
            scope = getattr(inspect.unwrap(function), "__globals__", {})
            field = Field(parameter.name, parameter.annotation, scope)
            if parameter.kind is parameter.VAR_POSITIONAL:
                variadic, positional = parameter.name, tuple(fields)
                field.annotation = (
                    tuple if parameter.annotation is parameter.empty else tuple[parameter.annotation, ...]
                )
                field.set_default(owner, ())
            elif parameter.default is not parameter.empty:
                field.set_default(owner, _factory_default(target, parameter))
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional = (*positional, parameter.name)
            fields[parameter.name] = field
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    return Schema(fields, positional, variadic)


def _constructors(target: Callable[..., Any]) -> list[tuple[Callable[..., Any], int]]:
    """(function, number of leading parameters to skip), in the order in which `**kwargs` is forwarded."""
    if not isinstance(target, type):
        return [(target, 0)]
    own = [vars(cls).get("__init__") for cls in target.__mro__]
    # A class without an `__init__` in Python (a NamedTuple, say) still has a signature.
    return [(function, 1) for function in own if inspect.isfunction(function)] or [(target, 0)]


def _factory_default(target: Any, parameter: inspect.Parameter) -> Any:
    """The default of a parameter; for a dataclass field with a factory, what the factory makes."""
    field = getattr(target, "__dataclass_fields__", {}).get(parameter.name)
    if field is not None and field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return parameter.default
