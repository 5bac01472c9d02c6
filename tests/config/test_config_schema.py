"""The constructor's signature as schema: what is a field, what it defaults to, what may be set into it."""

import collections
import copy
import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NewType, Optional, Protocol, TypeVar, Union

import annotated_types as at
import numpy as np
import pytest

from framework.config import (
    REQUIRED,
    Config,
    ConfigError,
    DType,
    FieldRangeError,
    FieldTypeError,
    Fraction,
    MissingFieldError,
    PositiveInt,
    Probability,
    UnknownFieldError,
    config_for,
    target_of,
)
from framework.config_types import accepts_config, expected, mentions_config

if TYPE_CHECKING:
    from decimal import Decimal


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Shaped(Protocol):
    shape: tuple[int, ...]


class Base:
    def __init__(self, *, dim: PositiveInt, dropout: Fraction = 0.0):
        self.dim, self.dropout = dim, dropout


class Child(Base):
    def __init__(self, *, heads: int = 2, dropout: Probability = 0.5, **kwargs):
        super().__init__(dropout=dropout, **kwargs)
        self.heads = heads


class Closed(Base):
    def __init__(self, *, heads: int = 2):
        super().__init__(dim=heads)
        self.heads = heads


class GrandChild(Child):
    pass


@dataclasses.dataclass
class Options:
    rate: float
    names: list[str] = dataclasses.field(default_factory=lambda: ["a"])
    child: Config = dataclasses.field(default_factory=lambda: config_for(Base, dim=1))


class Pair(NamedTuple):
    left: int
    right: str = "r"


def build(*, size: int, ratio: float = 1.0, name: str = "n") -> tuple[int, float, str]:
    return size, ratio, name


def field_of(hint: Any, default: Any = REQUIRED) -> Config:
    """A config of a function with one parameter `x` of that hint."""

    def target(*, x=None):
        return x

    target.__annotations__["x"] = hint
    target.__kwdefaults__ = {} if default is REQUIRED else {"x": default}
    return config_for(target)


def accepted(hint: Any, value: Any) -> Any:
    config = field_of(hint)
    config.x = value
    return config.x


def refused(hint: Any, value: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        accepted(hint, value)
    return str(caught.value)


def test_function_signature_is_the_schema():
    config = config_for(build)
    assert dict(config.items()) == {"ratio": 1.0, "name": "n"}
    assert config.missing() == ["size"]
    assert list(config_for(build, name="z", size=3)) == ["size", "ratio", "name"]  # signature order, not set order
    assert target_of(config) is build


def test_forwarded_keywords_come_from_the_bases():
    config = config_for(Child, dim=8)
    assert set(config.keys()) == {"heads", "dropout", "dim"}
    assert config.dropout == 0.5  # the nearest class decides
    config.dropout = 1.0  # Probability, not the base's Fraction
    assert config.instantiate().dim == 8
    assert config_for(GrandChild, dim=3).instantiate().heads == 2


def test_a_class_that_forwards_nothing_closes_the_schema():
    with pytest.raises(UnknownFieldError, match=r"Closed\.dim: no such field"):
        config_for(Closed, dim=3)


def test_dataclass_factories_and_named_tuples():
    config = config_for(Options, rate=1)
    config.names.append("b")
    assert config_for(Options).names == ["a"]
    assert config.instantiate() == Options(1.0, ["a", "b"], config_for(Base, dim=1))
    assert config_for(Pair, left=1).instantiate() == (1, "r")


def test_defaults_are_not_shared_between_configs():
    def target(*, child: Config = config_for(Base, dim=2), entries: list[int] = [1], table: dict[str, int] = {}):  # noqa: B006
        return child, entries, table

    one, two = config_for(target), config_for(target)
    one.child.dim = 7
    one.entries.append(2)
    one.table["k"] = 1
    assert (two.child.dim, two.entries, two.table) == (2, [1], {})
    assert config_for(target) == two


def test_what_is_set_is_copied():
    child = config_for(Base, dim=1)

    def target(*, a: Config, b: Config, pattern: list[Config]):
        return a, b, pattern

    config = config_for(target, a=child, b=child, pattern=[child] * 2)
    config.pattern[0].dim = 5
    config.a.dim = 3
    assert (config.b.dim, config.pattern[1].dim, child.dim) == (1, 1, 1)


def test_copies_are_deep_and_equal():
    config = config_for(Options, rate=1.0)
    for other in (config.copy(), copy.copy(config), copy.deepcopy(config), config.copy_and_resolve_references()):
        assert other == config
        other.child.dim = 9
        assert other != config
    assert config.child.dim == 1
    assert config_for(Base, dim=1) != config_for(Child, dim=1)


def test_unset_is_required_and_says_so():
    config = config_for(Base)
    with pytest.raises(MissingFieldError, match=r"Base\.dim: required, and not set"):
        _ = config.dim
    assert not hasattr(config, "dim")
    assert "dim" not in config
    assert config.get("dim", 3) == 3
    assert dict(config.leaves())["dim"] is REQUIRED
    with pytest.raises(UnknownFieldError, match="did you mean 'dim'"):
        config.get("din", 3)  # a default must not hide a typo
    config.dim = 4
    del config.dim
    del config.dropout
    assert config == config_for(Base)


def test_unknown_names_suggest_the_nearest():
    config = config_for(Child)
    with pytest.raises(UnknownFieldError, match=r"Child\.dropuot: no such field in .*Child; did you mean 'dropout'\?"):
        config.dropuot = 0.1
    with pytest.raises(UnknownFieldError, match=r"valid: heads, dropout, dim"):
        _ = config.zzzzzz
    for kind in (AttributeError, KeyError, ValueError):
        with pytest.raises(kind):
            _ = config["zzz"]
    with pytest.raises(UnknownFieldError):
        config_for(Child, haeds=3)


@pytest.mark.parametrize(
    "name", ["get", "items", "keys", "values", "copy", "lock", "instantiate", "override", "leaves"]
)
def test_names_that_config_needs_are_refused(name):
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(f"def target(*, {name}: int = 0): ...", namespace)
    with pytest.raises(ConfigError, match=f"target: Config needs the name '{name}' itself; rename it, say '{name}_'"):
        config_for(namespace["target"])


def test_update_is_a_field_where_the_target_has_it():
    def memory(*, update: Literal["after_backward", "streamed"] = "after_backward"):
        return update

    config = config_for(memory)
    assert config.update == "after_backward"
    config.update = "streamed"
    assert config.instantiate() == "streamed"
    with pytest.raises(AttributeError):
        _ = config_for(Base).update


def test_private_parameters_with_a_default_are_no_fields():
    def target(*, x: int = 0, _cache: Any = None):
        return x

    assert list(config_for(target)) == ["x"]


def test_targets_without_a_name_are_refused():
    for target in (lambda x: x, functools.partial(build, size=1), 3, "optax.adamw"):
        with pytest.raises(ConfigError, match="expects a class or a named function"):
            config_for(target)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="cannot be configured"):
        config_for(map)


def test_a_default_outside_of_its_own_range_is_a_bug_of_the_component():
    with pytest.raises(FieldRangeError, match="by default: expected an integer > 0, given 0"):
        field_of(PositiveInt, default=0)


def test_a_default_widens_its_hint():
    config = field_of(int, default=None)  # implicit Optional, common in other people's code
    assert config.x is None
    config.x = 3
    config.x = None
    with pytest.raises(FieldTypeError, match="expected an integer or none"):
        config.x = "3"


def test_defaults_that_are_no_data_stay_the_constructors():
    marker = object()
    config = field_of(Any, default=marker)
    assert config.x is marker
    assert config.instantiate() is marker
    assert "x" not in config.to_dict()


def test_positional_and_starred_parameters():
    def target(first: int, /, second: int, *rest: str, last: bool = False):
        return first, second, rest, last

    config = config_for(target, first=1, second=2, rest=["a", "b"])
    assert config.instantiate() == (1, 2, ("a", "b"), False)
    assert config_for(target, first=1).instantiate(second=5, last=True) == (1, 5, (), True)
    with pytest.raises(FieldTypeError, match=r"target\.rest\.1: expected text, given 3"):
        config.rest = ["a", 3]


def test_hints_that_cannot_be_resolved_accept_any_data():
    def target(*, amount: "Decimal", child: "Config | Decimal"):  # Decimal is imported for type checkers only
        return amount, child

    config = config_for(target, amount=3, child=config_for(Base, dim=1))
    assert config.amount == 3
    assert isinstance(config.instantiate()[1], Config)  # the text of the hint still says that configs are wanted
    with pytest.raises(FieldTypeError, match="expected data"):
        config.amount = object()

    def prose(*, shape: "a list of sizes" = 3):  # noqa: F722
        return shape

    assert config_for(prose, shape=[1]).instantiate() == [1]


def test_hints_resolve_once_their_names_exist():
    namespace: dict[str, Any] = {"__name__": __name__}
    exec("def target(*, x: 'Later'): return x", namespace)
    config = config_for(namespace["target"])
    config.x = "anything"
    namespace["Later"] = int
    with pytest.raises(FieldTypeError, match="expected an integer"):
        config.x = "anything"


Width = NewType("Width", int)
T = TypeVar("T")
B = TypeVar("B", bound=int)

ACCEPTED = [
    (int, 3, 3),
    (float, 3, 3.0),
    (float, 1e-4, 1e-4),
    (float, np.float64(2.5), 2.5),
    (bool, True, True),
    (str, "x", "x"),
    (None, None, None),
    (Optional[int], None, None),  # noqa: UP045
    (int | None, 4, 4),
    (Union[float, int], 3, 3),  # noqa: UP007
    (float | str, "auto", "auto"),
    (Literal["a", 1], 1, 1),
    (DType, "bfloat16", "bfloat16"),
    (Color, Color.RED, "RED"),
    (Color, "RED", "RED"),
    (Color, "blue", "BLUE"),
    (list[int], [1, 2], [1, 2]),
    (list[int], (1, 2), [1, 2]),
    (list[float], [1], [1.0]),
    (Sequence[int], (1, 2), (1, 2)),
    (tuple[int, str], [1, "a"], (1, "a")),
    (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
    (tuple, [1, "a"], (1, "a")),
    (dict[str, float], {"a": 1}, {"a": 1.0}),
    (Mapping[str, Any], {"a": [1]}, {"a": [1]}),
    (dict, {}, {}),
    (list[list[int]], [[1], []], [[1], []]),
    (PositiveInt, 1, 1),
    (Annotated[int, at.Interval(ge=0, le=3)], 3, 3),
    (Annotated[int, at.MultipleOf(8)], 16, 16),
    (Annotated[list[int], at.Len(1, 2)], [1], [1]),
    (Annotated[int, "a remark"], -1, -1),
    (PositiveInt | None, None, None),
    (Width, 3, 3),
    (T, "x", "x"),
    (B, 3, 3),
    (object, "x", "x"),
    (Any, {"a": (1, None)}, {"a": (1, None)}),
    (Callable[[int], int] | float, 0.5, 0.5),
    (float, math.inf, math.inf),
]


@pytest.mark.parametrize(("hint", "value", "stored"), ACCEPTED, ids=str)
def test_accepted_values(hint, value, stored):
    result = accepted(hint, value)
    assert result == stored
    assert type(result) is type(stored)


REFUSED = [
    (int, True, "expected an integer, given True (bool)"),
    (int, 3.0, "expected an integer, given 3.0 (float)"),
    (int, "3", "expected an integer, given '3' (str)"),
    (float, "1e-4", "expected a number, given '1e-4' (str)"),
    (float, True, "expected a number, given True (bool)"),
    (float, None, "expected a number, given None (NoneType)"),
    (bool, 1, "expected true or false, given 1 (int)"),
    (bool, "true", "expected true or false"),
    (str, 3, "expected text, given 3 (int)"),
    (str, None, "expected text"),
    (int | None, "none", "expected an integer or none"),
    (Literal["full", "none"], "ful", "expected one of 'full', 'none', given 'ful' (str); did you mean 'full'?"),
    (Literal["a", 1], True, "expected one of 'a', 1"),
    (Color, "green", "expected one of 'RED', 'BLUE'"),
    (Color, 3, "expected one of 'RED', 'BLUE', given 3 (int)"),
    (list[int], 3, "expected a list (each: an integer)"),
    (list[int], "12", "expected a list"),
    (list[int], [1, "2"], "target.x.1: expected an integer, given '2'"),
    (list[list[int]], [[1], [None]], "target.x.1.0: expected an integer"),
    (tuple[int, int], [1], "expected a tuple of 2 (an integer, an integer), given [1] (list)"),
    (dict[str, int], {"a": {}}, "target.x.a: expected an integer, given {} (dict)"),
    (dict[str, int], {3: 4}, "expected keys that are text"),
    (dict[str, int], {"$class": 4}, "do not start with '$'"),
    (dict[str, int], [("a", 1)], "expected a dict (each value: an integer)"),
    (PositiveInt, 0, "expected an integer > 0, given 0 (int)"),
    (PositiveInt | None, -3, "expected an integer > 0 or none, given -3 (int)"),
    (Fraction, 1.0, "expected a number >= 0 and < 1, given 1.0 (float)"),
    (Annotated[int, at.MultipleOf(8)], 12, "expected an integer a multiple of 8"),
    (Annotated[list[int], at.MinLen(1)], [], "at least 1 long, given [] (list)"),
    (Probability, math.nan, "expected a number >= 0 and <= 1, given nan"),
    (np.ndarray, 3, "expected a config that builds ndarray, given 3 (int)"),
    (Callable[[int], int], "jax.nn.gelu", "expected a config that builds a function"),
    (Callable[[int], int] | float, "fast", "expected a number or a config, given 'fast'"),
    (Shaped, {"shape": [1]}, "expected a config that builds Shaped"),
    (Config, {"a": 1}, "expected a config, given {'a': 1} (dict)"),
    (Config, Base, "expected a config, given <class"),
    (list[Config], [3], "target.x.0: expected a config, given 3"),
    (Any, {1, 2}, "expected data (bool, int, float, str, None, list, tuple, dict) or a config"),
    (Any, [np.zeros(2)], "target.x.0: expected data"),
    (Any, collections.OrderedDict(a=1), "expected data"),
    (int, np.int64(3), "(int64)"),
    (str, config_for(build), "expected text, given config_for("),
]


@pytest.mark.parametrize(("hint", "value", "message"), REFUSED, ids=str)
def test_refused_values(hint, value, message):
    assert message in refused(hint, value)


def test_opaque_hints_accept_a_config_and_get_what_it_builds():
    for hint in (np.ndarray, Callable[[int], int], Shaped, float | Callable, Any, list[np.ndarray]):
        child = config_for(build, size=1)
        config = field_of(hint)
        config.x = [child] if hint == list[np.ndarray] else child
        built = config.instantiate
        assert isinstance(config.x[0] if hint == list[np.ndarray] else config.x, Config)
        assert callable(built)
        assert accepts_config(hint) or hint == list[np.ndarray]


def test_kinds_of_hints():
    wanting = (Config, Config | None, list[Config], dict[str, Config], tuple[Config, ...], Annotated[Config, "x"])
    assert all(map(mentions_config, wanting))
    assert not any(map(mentions_config, (Any, int, Literal["Config"], Callable[[int], int], list[str], np.ndarray)))
    assert expected(dict[str, list[PositiveInt]]) == "a dict (each value: a list (each: an integer > 0))"


def test_shadowing_config_dict_api_stays_checked():
    config = config_for(build, size=1)
    with pytest.raises(FieldTypeError):
        config["size"] = "1"
    with pytest.raises(UnknownFieldError):
        config.update_from_flattened_dict({"sise": 1})
    with pytest.raises(ConfigError):
        config.get_ref("size")  # a FieldReference is no data
    assert config.size == 1
