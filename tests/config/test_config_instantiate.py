"""Building from configs: late arguments, who builds a child, and which level an error names."""

import enum
from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest

from framework.config import (
    Config,
    ConfigError,
    FieldTypeError,
    MissingFieldError,
    PositiveInt,
    UnknownFieldError,
    config_for,
    reference,
)


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


class Leaf:
    def __init__(self, *, dim: PositiveInt, scale: float = 1.0):
        if dim % 2:
            raise ValueError(f"dim = {dim} is odd")
        self.dim, self.scale = dim, scale


class Node:
    def __init__(
        self,
        *,
        dim: PositiveInt,
        leaf: Config = config_for(Leaf),
        more: list[Config] = [],  # noqa: B006
        named: dict[str, Config] | None = None,
        activation: Callable[[Any], Any] = jax.nn.relu,
        mode: Mode = Mode.FAST,
    ):
        self.received = leaf
        self.leaf = leaf.instantiate(dim=dim)
        self.more = [one.instantiate(dim=dim) for one in more]
        self.named = {name: one.instantiate(dim=dim) for name, one in (named or {}).items()}
        self.activation, self.mode = activation, mode


class Tree:
    def __init__(self, *, node: Config, width: PositiveInt = 4):
        self.node = node.instantiate(dim=width)


def constant(*, value: float) -> Callable[[int], float]:
    return lambda step: value


def collect(*, parts: Any, arrays: list[Callable] | None = None) -> Any:
    return parts, arrays


def test_a_width_is_written_once():
    config = config_for(Tree, node=config_for(Node, more=[config_for(Leaf, scale=2)], named={"a": config_for(Leaf)}))
    tree = config.instantiate()
    assert (tree.node.leaf.dim, tree.node.more[0].dim, tree.node.named["a"].dim) == (4, 4, 4)
    assert tree.node.more[0].scale == 2.0
    assert config.instantiate(width=8).node.leaf.dim == 8
    assert config.width == 4


def test_late_arguments_override_and_are_any_objects():
    leaf = config_for(Leaf, dim=2)
    assert leaf.instantiate(dim=4).dim == 4
    node = config_for(Node, dim=2).instantiate(activation=len)
    assert node.activation is len
    with pytest.raises(UnknownFieldError, match=r"Leaf\.dmi: no such field in .*Leaf; did you mean 'dim'\?"):
        leaf.instantiate(dmi=4)


def test_all_missing_fields_of_a_level_are_listed():
    def target(*, alpha: int, beta: int, gamma: int = 0, delta: int):
        return alpha

    config = config_for(target, beta=1)
    assert config.missing() == ["alpha", "delta"]
    assert config.missing("delta") == ["alpha"]
    with pytest.raises(MissingFieldError, match=r"target: required, and not set: alpha, delta"):
        config.instantiate()
    with pytest.raises(MissingFieldError, match=r"not set: delta$"):
        config.instantiate(alpha=1)


def test_configs_for_other_parameters_are_built_first():
    schedule = config_for(constant, value=0.5)
    parts, arrays = config_for(collect, parts={"x": [schedule], "y": 1}, arrays=[schedule]).instantiate()
    assert parts["x"][0](3) == arrays[0](3) == 0.5
    assert parts["y"] == 1


def test_a_parent_may_change_the_config_it_is_given():
    class Greedy:
        def __init__(self, *, leaf: Config):
            leaf.dim = 6
            self.leaf = leaf.instantiate()

    config = config_for(Greedy, leaf=config_for(Leaf))
    assert config.instantiate().leaf.dim == 6
    assert config.leaf.missing() == ["dim"]


def test_enum_members_reach_the_constructor():
    node = config_for(Node, dim=2, mode="SLOW").instantiate()
    assert node.mode is Mode.SLOW
    assert config_for(Node, dim=2).instantiate().mode is Mode.FAST


def test_constructor_errors_name_the_dotted_path_and_keep_the_cause():
    config = config_for(Tree, width=3, node=config_for(Node))
    with pytest.raises(ConfigError, match=r"^node\.leaf: .*Leaf: dim = 3 is odd$") as caught:
        config.instantiate()
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.path == "node.leaf"
    config.node = config_for(Node, more=[config_for(Leaf), config_for(Leaf)])
    config.node.leaf = config_for(Leaf)
    config.width = 2

    def broken(*, parts: list[Config]):
        return [part.instantiate() for part in parts]

    outer = config_for(broken, parts=[config_for(Leaf, dim=2), config_for(Leaf, dim=5)])
    with pytest.raises(ConfigError, match=r"^parts\.1: .*dim = 5 is odd"):
        outer.instantiate()


def test_paths_of_missing_fields_are_rootward():
    def root(*, node: Config):
        return node.instantiate()

    with pytest.raises(MissingFieldError, match=r"^node: .*Leaf: required, and not set: dim"):
        config_for(root, node=config_for(Leaf)).instantiate()
    with pytest.raises(MissingFieldError, match=r"^parts\.a: .*Leaf: required"):
        config_for(collect, parts={"a": config_for(Leaf)}).instantiate()


def test_a_child_that_is_told_a_bad_value_by_name():
    def root(*, node: Config):
        return node.instantiate(dimm=3)

    with pytest.raises(UnknownFieldError, match=r"^node\.dimm: no such field"):
        config_for(root, node=config_for(Leaf)).instantiate()


def test_other_errors_keep_their_type_and_say_where():
    def fails(*, x: int):
        raise RuntimeError("boom")

    def root(*, child: Config):
        return child.instantiate()

    with pytest.raises(RuntimeError, match="boom") as caught:
        config_for(root, child=config_for(fails, x=1)).instantiate()
    assert caught.value.__notes__ == [f"while building child.{fails.__module__}.{fails.__qualname__}"]


def test_values_changed_in_place_are_checked_before_use():
    config = config_for(Node, dim=2, more=[config_for(Leaf)])
    config.more.append("leaf")
    with pytest.raises(FieldTypeError, match=r"Node\.more\.1: expected a config"):
        config.instantiate()
    with pytest.raises(FieldTypeError, match=r"Node\.more\.1: expected a config"):
        config.to_dict()


def test_to_dict_and_instantiate_leave_live_children_alone():
    config = config_for(Tree, node=config_for(Node))
    node = config.node
    config.to_dict()
    config.instantiate()
    node.leaf.scale = 3.0
    assert config.node.leaf.scale == 3.0


def test_references_are_values_not_calls():
    config = config_for(Node, dim=2, activation=config_for(reference, name="jax.nn.gelu"))
    assert config.instantiate().activation is jax.nn.gelu
    assert Config.from_json(config.to_json()) == config
    with pytest.raises(ConfigError, match=r"reference: 'os\.system' is refused"):
        config_for(reference, name="os.system").instantiate()


OPTIMIZERS = [
    config_for(optax.adamw, learning_rate=1e-3),
    config_for(optax.lion, learning_rate=1e-3),
    config_for(optax.sgd, learning_rate=0.1, momentum=0.9),
    config_for(optax.adafactor, learning_rate=1e-3),
    config_for(optax.contrib.muon, learning_rate=1e-3, ns_steps=5),
    config_for(optax.chain, args=[config_for(optax.clip, max_delta=1.0), config_for(optax.adamw, learning_rate=1e-3)]),
    config_for(
        optax.adamw,
        learning_rate=config_for(
            optax.warmup_cosine_decay_schedule, init_value=0.0, peak_value=1e-3, warmup_steps=10, decay_steps=100
        ),
    ),
]


@pytest.mark.parametrize("config", OPTIMIZERS, ids=lambda config: str(config)[:40])
def test_optax_transformations_are_components(config):
    built = config.instantiate()
    assert callable(built.init)
    assert callable(built.update)
    assert Config.from_json(config.to_json()) == config
    assert config.to_dict()["$class"].startswith("optax.")
    assert "_src" not in config.to_json()


def test_optax_schedules_are_values():
    schedule = OPTIMIZERS[-1].learning_rate.instantiate()
    assert float(schedule(10)) == pytest.approx(1e-3)
    with pytest.raises(FieldTypeError, match=r"expected an integer, given 10\.0"):
        OPTIMIZERS[-1].learning_rate.warmup_steps = 10.0
