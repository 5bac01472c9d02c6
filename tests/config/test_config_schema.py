"""The constructor's signature as schema, and building from it: fields, defaults, late arguments, who builds a child."""

import abc
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import annotated_types as at
import jax
import numpy as np
import optax
import pytest

from plimsoll.framework.config import (
    Config,
    ConfigError,
    FieldError,
    FieldTypeError,
    PositiveInt,
    Probability,
    config_for,
    get_target,
    reference,
)

if TYPE_CHECKING:
    from decimal import Decimal


class LeafConfig:
    def __init__(self, *, dim: PositiveInt, scale: float = 1.0):
        if dim % 2:
            raise ValueError(f"dim = {dim} is odd")
        self.dim, self.scale = dim, scale


class Scaled(LeafConfig):
    def __init__(self, *args, heads: int = 2, scale: Probability = 0.5, **kwargs):
        super().__init__(*args, scale=scale, **kwargs)


class Node:
    def __init__(
        self,
        *,
        dim: PositiveInt,
        leaf: Config = config_for(LeafConfig),
        more: list[Config] = [],  # noqa: B006
        named: dict[str, Config] = {},  # noqa: B006
        activation: Callable[[Any], Any] = jax.nn.relu,
    ):
        leaf.dim = dim  # a parent's changes to the config it is given do not leak
        self.leaf, self.activation = leaf.instantiate(), activation
        self.children = [one.instantiate(dim=dim) for one in [*more, *named.values()]]


class Tree:
    def __init__(self, *, node: Config, width: PositiveInt = 4):
        self.node = node.instantiate(dim=width)


class Pair(NamedTuple):
    left: int
    right: str = "r"


def constant(*, value: float) -> Callable[[int], float]:
    return lambda step: value


def collect(*, parts: Any, arrays: list[Callable] | None = None) -> Any:
    return parts, arrays


def make_field_config(hint: Any, *default: Any) -> Config:
    """Return the config of a function with one parameter `x` with this hint."""

    def target(*, x):
        return x

    target.__annotations__["x"] = hint
    target.__kwdefaults__ = {"x": default[0]} if default else {}
    return config_for(target)


def test_the_signature_is_the_schema():
    config = config_for(LeafConfig)
    assert dict(config.items()) == {"scale": 1.0}
    assert config.missing() == ["dim"]
    assert list(config_for(LeafConfig, scale=2, dim=3)) == ["dim", "scale"]  # signature order, not set order
    assert get_target(config) is LeafConfig
    assert config_for(Pair, left=1).instantiate() == (1, "r")


def test_forwarded_keywords_come_from_the_bases():
    config = config_for(Scaled, dim=8)
    assert list(config) == ["heads", "scale", "dim"]
    assert config.instantiate().scale == 0.5  # the nearest class decides
    with pytest.raises(ConfigError, match="expected a number >= 0 and <= 1"):
        config.scale = 2.0
    with pytest.raises(FieldError, match=r"LeafConfig\.heads: no such field"):
        config_for(LeafConfig, heads=3)


def test_values_are_not_shared_between_configs():
    def target(
        *,
        child: Config = config_for(LeafConfig, dim=2),
        entries: list[int] = [1],  # noqa: B006
        table: dict[str, int] = {},  # noqa: B006
    ): ...

    child = config_for(LeafConfig, dim=1)
    one, two = config_for(target, child=child), config_for(target)
    one.child.dim = 7
    one.entries.append(2)
    one.table["k"] = 1
    assert (child.dim, two.child.dim, two.entries, two.table) == (1, 2, [1], {})
    for other in (one.copy(), copy.copy(one), copy.deepcopy(one)):
        assert other == one
        other.child.dim = 9
        assert other != one
    assert config_for(LeafConfig, dim=1) != config_for(Scaled, dim=1)


def test_unset_required_field_is_named():
    config = config_for(LeafConfig)
    with pytest.raises(FieldError, match=r"LeafConfig\.dim: required, and not set"):
        _ = config.dim
    assert not hasattr(config, "dim")
    assert "dim" not in config
    assert config.get("dim", 3) == 3
    with pytest.raises(FieldError, match="did you mean 'dim'"):
        config.get("din", 3)  # a default must not hide a typo
    config.dim, config.scale = 4, 2.0
    del config.dim, config["scale"]
    assert config == config_for(LeafConfig)


def test_unknown_names_suggest_the_nearest():
    config = config_for(LeafConfig)
    with pytest.raises(FieldError, match=r"LeafConfig\.sclae: no such field in .*LeafConfig; did you mean 'scale'\?"):
        config.sclae = 0.1
    with pytest.raises(FieldError, match=r"valid: dim, scale"):
        _ = config.zzzzzz
    for kind in (AttributeError, KeyError, ValueError):
        with pytest.raises(kind):
            _ = config["zzz"]
    with pytest.raises(FieldError):
        config.update_from_flattened_dict({"haeds": 3})  # ConfigDict's own API is checked too


def test_names_that_cannot_be_fields_are_refused():
    namespace: dict[str, Any] = {"__name__": __name__}
    for parameters in ("*, get: int", "*, items: int", "*, instantiate: int = 3", "*, _own: int", "x, /"):
        exec(f"def target({parameters}): ...", namespace)
        with pytest.raises(ConfigError, match=r"target: parameter '\w+' cannot be a field"):
            config_for(namespace["target"])
    for target in (lambda x: x, functools.partial(collect, parts=1), 3, "optax.adamw"):
        with pytest.raises(ConfigError, match="expects a class or a named function"):
            config_for(target)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="cannot be configured"):
        config_for(dict)  # a builtin without a signature that Python can read


def test_update_is_a_field_where_the_target_has_it():
    def memory(*, update: Literal["after_backward", "streamed"] = "after_backward", _cache: Any = None):
        return update

    config = config_for(memory)
    assert list(config) == ["update"]
    assert config.update == "after_backward"
    assert config_for(memory, update="streamed").instantiate() == "streamed"
    with pytest.raises(AttributeError):
        _ = config_for(LeafConfig).update


def test_defaults():
    with pytest.raises(ConfigError, match="by default: expected an integer > 0, given 0"):
        make_field_config(PositiveInt, 0)  # a bug in the component
    config = make_field_config(int, None)  # implicit Optional, common in third-party code
    config.x = 3
    config.x = None
    with pytest.raises(FieldTypeError, match="expected an integer or none"):
        config.x = "3"
    for own in (object(), {1, 2}, np.zeros(1).dtype):  # not data: left to the constructor
        config = make_field_config(Any, own)
        assert config.x is own
        assert config.instantiate() is own
        assert "x" not in config.to_dict()


def test_hints_that_cannot_be_resolved_accept_any_data():
    def target(*, amount: "Decimal", child: "Config | Decimal"):  # only type checkers import Decimal
        return amount, child

    config = config_for(target, amount=3, child=config_for(LeafConfig, dim=1))
    assert config.amount == 3
    assert isinstance(config.instantiate()[1], Config)  # the text of the hint still asks for configs
    with pytest.raises(FieldTypeError, match="expected data"):
        config.amount = object()
    with pytest.raises(ConfigError, match=r"MultipleOf.* is not supported in a type hint"):
        make_field_config(Annotated[int, at.MultipleOf(8)]).x = 8


ACCEPTED = [
    (float, np.float64(2.5), 2.5),
    (float | int, 3, 3),
    (Literal["a", 1], 1, 1),
    (list[float], (1, 2), [1.0, 2.0]),
    (Sequence[int], (1, 2), [1, 2]),
    (tuple[int, str], [1, "a"], (1, "a")),
    (Mapping[str, float], {"a": 1}, {"a": 1.0}),
    (Annotated[int, at.Interval(ge=0, le=3)], 3, 3),
    (Any, {"a": (1, None)}, {"a": [1, None]}),  # JSON could not restore this tuple
    (Callable[[int], int] | float, 0.5, 0.5),
]


@pytest.mark.parametrize(("hint", "value", "stored"), ACCEPTED, ids=str)
def test_accepted_values(hint, value, stored):
    config = make_field_config(hint)
    config.x = value
    assert repr(config.x) == repr(stored)


def test_a_width_is_written_once():
    config = config_for(
        Tree, node=config_for(Node, more=[config_for(LeafConfig, scale=2)], named={"a": config_for(LeafConfig)})
    )
    node = config.instantiate().node
    assert [leaf.dim for leaf in (node.leaf, *node.children)] == [4, 4, 4]
    assert node.children[0].scale == 2.0
    assert config.instantiate(width=8).node.leaf.dim == 8
    assert config.width == 4
    assert config.node.leaf.missing() == ["dim"]


def test_late_arguments_and_missing_fields():
    assert config_for(LeafConfig, dim=2).instantiate(dim=4).dim == 4
    assert config_for(Node, dim=2).instantiate(activation=len).activation is len
    with pytest.raises(FieldError, match=r"LeafConfig\.dmi: no such field in .*LeafConfig; did you mean 'dim'\?"):
        config_for(LeafConfig).instantiate(dmi=4)

    def target(*, alpha: int, beta: int, gamma: int = 0, delta: int): ...

    config = config_for(target, beta=1)
    assert (config.missing(), config.missing("delta")) == (["alpha", "delta"], ["alpha"])
    with pytest.raises(FieldError, match=r"target: required, and not set: alpha, delta$"):
        config.instantiate()


def test_configs_for_other_parameters_are_built_first():
    schedule = config_for(constant, value=0.5)
    parts, arrays = config_for(collect, parts={"x": [schedule], "y": 1}, arrays=[schedule]).instantiate()
    assert parts["x"][0](3) == arrays[0](3) == 0.5
    assert parts["y"] == 1


def test_errors_while_building_name_the_dotted_path():
    def parent(*, parts: list[Config]):
        return [part.instantiate(dimm=3) for part in parts]

    leaves = [config_for(LeafConfig, dim=2), config_for(LeafConfig, dim=3)]
    for config, message in (
        (config_for(Tree, width=3, node=config_for(Node)), r"^node\.leaf: .*LeafConfig: dim = 3 is odd$"),
        (config_for(collect, parts=leaves), r"^parts\.1: .*LeafConfig: dim = 3 is odd"),
        (config_for(parent, parts=leaves), r"^parts\.0\.dimm: no such field"),
        (
            config_for(collect, parts={"a": config_for(LeafConfig)}),
            r"^parts\.a: .*LeafConfig: required, and not set: dim",
        ),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            config.instantiate()
        assert "odd" not in message or type(caught.value.__cause__) is ValueError


def test_values_changed_in_place_are_checked_before_use():
    config = config_for(Node, dim=2, more=[config_for(LeafConfig)])
    config.more.append("leaf")
    for use in (config.instantiate, config.to_dict):
        with pytest.raises(FieldTypeError, match=r"Node\.more\.1: expected a config"):
            use()


def test_references_are_values_not_calls():
    config = config_for(Node, dim=2, activation=config_for(reference, name="jax.nn.gelu"))
    assert config.instantiate().activation is jax.nn.gelu
    with pytest.raises(ConfigError, match=r"reference: 'os\.system' is refused"):
        config_for(reference, name="os.system").instantiate()


@pytest.mark.pairs
def test_optax_transformations_and_schedules_are_components():
    schedule = config_for(
        optax.warmup_cosine_decay_schedule, init_value=0.0, peak_value=1e-3, warmup_steps=10, decay_steps=100
    )
    assert float(schedule.instantiate()(10)) == pytest.approx(1e-3)
    with pytest.raises(FieldTypeError, match=r"expected an integer, given 10\.0"):
        schedule.warmup_steps = 10.0
    for target in (optax.adamw, optax.sgd, optax.adafactor, optax.contrib.muon):
        config = config_for(target, learning_rate=schedule)
        assert callable(config.instantiate().update)
        assert Config.from_json(config.to_json()) == config
        assert "_src" not in config.to_json()


class Reads(abc.ABC):
    @abc.abstractmethod
    def read(self) -> str: ...


class ReadsNothing(Reads):
    pass


def test_a_class_that_lacks_a_method_is_named():
    with pytest.raises(ConfigError, match=r"ReadsNothing does not define read$"):
        config_for(ReadsNothing).instantiate()
