"""Dotted paths and command-line text: reading by type, order, swapping components, lists and dicts."""

import enum
from collections.abc import Callable
from typing import Any, Literal

import optax
import pytest

from framework.config import (
    ABSENT,
    REQUIRED,
    Config,
    ConfigError,
    MissingFieldError,
    PositiveInt,
    UnknownFieldError,
    UntrustedNameError,
    config_for,
    diff,
    target_of,
)
from framework.config_text import literal


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


class Layer:
    def __init__(self, *, heads: PositiveInt = 4, dim: int, init: Callable | None = None):
        pass


class WideLayer:
    def __init__(self, *, heads: PositiveInt = 16):
        pass


class Everything:
    def __init__(
        self,
        *,
        i: int = 0,
        f: float = 0.0,
        b: bool = False,
        s: str = "",
        opt: int | None = None,
        text: str | None = None,
        lit: Literal["none", "full", 3] = "full",
        maybe: Literal["none", "full"] | None = None,
        auto: Literal["auto"] | bool | float = "auto",
        size: Size = Size.SMALL,
        ints: list[int] = [],  # noqa: B006
        words: tuple[str, ...] = (),
        pair: tuple[int, float] = (0, 0.0),
        table: dict[str, float] = {},  # noqa: B006
        loose: Any = None,
        optimizer: Config | None = None,
        layers: list[Config] = [config_for(Layer), config_for(Layer)],  # noqa: B006
        sources: dict[str, Config] = {},  # noqa: B006
        rules: dict[str, Any] = {},  # noqa: B006
        rate: float | Callable = 0.1,
        must: int,
    ):
        pass


TEXTS = [
    ("i", "12", 12),
    ("i", "-3", -3),
    ("i", "1_000_000", 1_000_000),
    ("f", "3e-4", 3e-4),
    ("f", "1", 1.0),
    ("f", "inf", float("inf")),
    ("b", "true", True),
    ("b", "False", False),
    ("s", "plain words = fine", "plain words = fine"),
    ("s", "12", "12"),
    ("s", "'quoted'", "quoted"),
    ("s", "none", "none"),
    ("s", "", ""),
    ("opt", "none", None),
    ("opt", "7", 7),
    ("text", "null", None),
    ("text", '"none"', "none"),
    ("lit", "none", "none"),
    ("lit", "3", 3),
    ("maybe", "none", "none"),  # a choice of that spelling goes before the absence of one
    ("auto", "true", True),
    ("auto", "0.5", 0.5),
    ("auto", "auto", "auto"),
    ("size", "LARGE", "LARGE"),
    ("ints", "[1, 2]", [1, 2]),
    ("ints", "1,2,3", [1, 2, 3]),
    ("ints", "4", [4]),
    ("ints", "", []),
    ("words", "a,b", ("a", "b")),
    ("words", '["a, b"]', ("a, b",)),
    ("pair", "(1, 2)", (1, 2.0)),
    ("pair", "1,5e-1", (1, 0.5)),
    ("pair.1", "2", (0, 2.0)),
    ("table", '{"a": 1}', {"a": 1.0}),
    ("table.new", "3", {"new": 3.0}),
    ("loose", "[1, {'a': none}]", "[1, {'a': none}]"),
    ("loose", "[1, {'a': None}]", [1, {"a": None}]),
    ("loose", "1e-3", 1e-3),
    ("loose", "word", "word"),
    ("rules", '{"a.b": "full"}', {"a.b": "full"}),
    ("rate", "1e-4", 1e-4),
    ("must", "1", 1),
]


@pytest.mark.parametrize(("path", "text", "value"), TEXTS)
def test_text_is_read_by_type(path, text, value):
    config = config_for(Everything)
    config.override(path, text)
    stored = config[path.split(".")[0]]
    assert stored == value
    assert type(stored) is type(value)


BAD_TEXTS = [
    ("i", "1.0", "i: expected an integer, given '1.0'"),
    ("i", "1e6", "i: expected an integer, given '1e6'"),
    ("i", "ten", "i: expected an integer, given 'ten'"),
    ("i", "", "i: expected an integer, given ''"),
    ("b", "1", "b: expected true or false, given '1'"),
    ("opt", "nil", "opt: expected an integer or none, given 'nil'"),
    ("lit", "ful", "did you mean 'full'?"),
    ("size", "MEDIUM", "size: expected one of 'SMALL', 'LARGE', given 'MEDIUM'"),
    ("ints", "1,x", "ints.1: expected an integer, given 'x'"),
    ("pair", "1", "pair: expected a tuple of 2"),
    ("table", "a=1", "table: expected a dict (each value: a number), given 'a=1'"),
    ("table.new", "lots", "table.new: expected a number, given 'lots'"),
    ("layers.0.heads", "0", "layers.0.heads: expected an integer > 0, given '0'"),
    ("layers.0", "3", "layers.0: expected a config, given '3'"),
    ("optimizer", "adamww", "optimizer: expected a config or none, given 'adamww'"),
    ("rate", "fast", "rate: expected a number or a config, given 'fast'"),
]


@pytest.mark.parametrize(("path", "text", "message"), BAD_TEXTS)
def test_text_that_does_not_fit(path, text, message):
    config = config_for(Everything)
    before = config.copy()
    with pytest.raises(ConfigError) as caught:
        config.override(path, text)
    assert message in str(caught.value)
    assert config == before


def test_overrides_apply_in_order():
    config = config_for(Everything)
    for path, text in [
        ("optimizer", "optax.adamw"),
        ("optimizer.weight_decay", "0.5"),
        ("optimizer", "optax.lion"),
        ("optimizer.learning_rate", "1e-4"),
        ("optimizer.learning_rate", "2e-4"),
    ]:
        config.override(path, text)
    assert target_of(config.optimizer) is optax.lion
    assert config.optimizer.learning_rate == 2e-4
    assert config.optimizer.weight_decay == config_for(optax.lion).weight_decay  # fresh defaults
    config.override("optimizer", "none")
    assert config.optimizer is None


def test_a_component_is_swapped_by_dotted_or_neighbouring_name():
    config = config_for(Everything, optimizer=config_for(optax.adamw, learning_rate=1.0))
    config.override("optimizer", "sgd")
    assert target_of(config.optimizer) is optax.sgd
    config_for(WideLayer)
    config.override("layers.1", f"{WideLayer.__module__}.WideLayer")
    config.override("layers.0", "WideLayer")  # beside Layer
    assert [target_of(layer) for layer in config.layers] == [WideLayer, WideLayer]
    config.override("optimizer", "optax.contrib.muon")
    config.override("optimizer", "lion")  # in the package around optax.contrib
    assert target_of(config.optimizer) is optax.lion
    with pytest.raises(UntrustedNameError, match=r"'optax\.lionn' does not exist; did you mean 'lion'"):
        config.override("optimizer", "lionn")
    config.override("rate", "optax.constant_schedule")
    config.override("rate.value", "0.3")
    assert config.get_path("rate.value") == 0.3
    config.override("rate", "0.2")
    assert config.rate == 0.2


def test_components_as_json_text():
    config = config_for(Everything)
    config.override("layers", '[{"$class": "optax.sgd", "learning_rate": 1}]')
    assert [target_of(layer) for layer in config.layers] == [optax.sgd]
    config.override("sources.web", '{"$class": "optax.clip", "max_delta": 1}')
    config.override("sources.web.max_delta", "2")
    assert config.sources["web"].max_delta == 2.0
    with pytest.raises(UnknownFieldError, match=r"layers\.0\.rate: no such field in optax\.sgd"):
        config.override("layers", '[{"$class": "optax.sgd", "rate": 1}]')


@pytest.mark.parametrize("text", ["os.system", "subprocess.Popen", "framework.config_names.importlib.import_module"])
def test_text_never_names_an_untrusted_component(text):
    config = config_for(Everything, optimizer=config_for(optax.adamw))
    with pytest.raises(UntrustedNameError, match="optimizer: expected a component"):
        config.override("optimizer", text)
    if not text.startswith("framework."):
        config.override("loose", text)
        assert config.loose == text  # no more than text, where any data goes


def test_a_misspelled_trusted_name_is_no_text():
    with pytest.raises(UntrustedNameError, match=r"'optax\.adamww' does not exist; did you mean 'adamw'"):
        config_for(Everything).override("loose", "optax.adamww")


def test_get_path():
    config = config_for(Everything, rules={"memory.remat": "full", "plain": {"x": 1}}, must=3)
    assert config.get_path("layers.1.heads") == 4
    assert config.get_path("rules.memory.remat") == "full"  # a key may hold dots
    assert config.get_path("rules.plain.x") == 1
    assert config.get_path("must") == 3
    for path in ("layers.0.dim", "rules.nothing"):
        with pytest.raises(MissingFieldError, match=f"{path}: not set"):
            config.get_path(path)
    config.set_path("rules.memory.remat", "none")
    assert config.rules == {"memory.remat": "none", "plain": {"x": 1}}


def test_set_path_checks_the_whole_value():
    config = config_for(Everything)
    config.set_path("pair.00", 3)
    assert config.pair == (3, 0.0)
    config.set_path("layers.0", config_for(WideLayer))
    assert config.get_path("layers.0.heads") == 16
    with pytest.raises(UnknownFieldError, match="no such index; valid: 0 to 1"):
        config.set_path("layers.2", config_for(WideLayer))
    with pytest.raises(UnknownFieldError, match="no such index: it is empty"):
        config.set_path("ints.0", 1)


def test_leaves_and_diff():
    left = config_for(Everything, optimizer=config_for(optax.sgd, learning_rate=1.0), must=1, table={"a": 1.0})
    right = left.copy()
    assert diff(left, right) == []
    leaves = dict(left.leaves())
    assert leaves["layers.0.dim"] is REQUIRED
    assert leaves["layers.1.heads"] == 4
    assert leaves["table.a"] == 1.0
    assert leaves["ints"] == []
    assert next(iter(leaves)) == "i"
    right.layers[1].heads = 8
    right.i = 5
    right.table["b"] = 2.0
    right.optimizer = config_for(optax.clip, max_delta=1.0)
    right.layers[0].dim = 3
    del right.must
    assert diff(left, right) == [
        ("i", 0, 5),
        ("optimizer", "optax.sgd", "optax.clip"),
        ("optimizer.learning_rate", 1.0, ABSENT),
        ("optimizer.momentum", None, ABSENT),
        ("optimizer.nesterov", False, ABSENT),
        ("optimizer.accumulator_dtype", None, ABSENT),
        ("layers.0.dim", REQUIRED, 3),
        ("layers.1.heads", 4, 8),
        ("must", 1, REQUIRED),
        ("table.b", ABSENT, 2.0),
        ("optimizer.max_delta", ABSENT, 1.0),
    ]


def test_literals():
    cases = {"None": None, "TRUE": True, "[1,2]": [1, 2], "(1,)": (1,), "{'a': 1}": {"a": 1}, "x+1": "x+1", "1_0": 10}
    assert {text: literal(text) for text in cases} == cases
    assert literal("__import__('os').getcwd()") == "__import__('os').getcwd()"
    assert literal("[" * 5000) == "[" * 5000
