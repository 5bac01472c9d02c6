"""Values by dotted path: wording of errors, command-line text by type, swaps in order, differences, JSON."""

import gc
import json
import math
import weakref
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
import optax
import pytest

from plimsoll.framework.config import (
    ABSENT,
    REQUIRED,
    Config,
    ConfigError,
    DType,
    FieldError,
    FieldTypeError,
    Fraction,
    PositiveFloat,
    PositiveInt,
    config_for,
    diff,
)
from plimsoll.framework.config.value_parsing import parse_text


class Layer:
    def __init__(self, *, heads: PositiveInt = 4, dim: int, dropout: Fraction = 0.0): ...


class All:
    def __init__(
        self,
        *,
        i: int = 0,
        f: float = 0.0,
        b: bool = False,
        s: str = "",
        opt: PositiveFloat | None = None,
        text: str | None = None,
        dtype: DType = "float32",
        lit: Literal["none", "full", 3] = "full",
        maybe: Literal["none", "full"] | None = None,
        auto: Literal["auto"] | bool | float = "auto",
        ints: list[int] = [-1],  # noqa: B006
        words: tuple[str, ...] = (),
        pair: tuple[int, float] = (0, 0.0),
        table: dict[str, PositiveFloat] = {"a": 1.0},  # noqa: B006
        loose: Any = 0,
        optimizer: Config | None = None,
        layers: list[Config] = [config_for(Layer), config_for(Layer)],  # noqa: B006
        rate: float | Callable = 0.1,
        must: int,
    ): ...


def root(*, all: Config) -> None: ...


TYPE, RANGE = FieldTypeError, ConfigError
# (path below `all`, value, kind of error, expected, given)
BAD: list[tuple[str, Any, type[Exception], str, str]] = [
    ("layers.0.heads", "12", TYPE, "an integer > 0", "'12' (str)"),
    ("layers.0.heads", 12.0, TYPE, "an integer > 0", "12.0 (float)"),
    ("layers.0.heads", True, TYPE, "an integer > 0", "True (bool)"),
    ("layers.0.heads", None, TYPE, "an integer > 0", "None (NoneType)"),
    ("layers.0.heads", np.int64(12), TYPE, "an integer > 0", "np.int64(12) (int64)"),
    ("layers.0.heads", -4, RANGE, "an integer > 0", "-4 (int)"),
    ("layers.0.dropout", 1.0, RANGE, "a number >= 0 and < 1", "1.0 (float)"),
    ("layers.0.dropout", math.nan, RANGE, "a number >= 0 and < 1", "nan (float)"),
    ("layers.0", "Layer", TYPE, "a config", "'Layer' (str)"),
    ("layers", config_for(Layer), TYPE, "a list (each: a config)", "config_for("),
    ("optimizer", {"learning_rate": 3}, TYPE, "a config or none", "{'learning_rate': 3} (dict)"),
    ("b", "yes", TYPE, "true or false", "'yes' (str)"),
    ("b", 1, TYPE, "true or false", "1 (int)"),
    ("f", "0.1", TYPE, "a number", "'0.1' (str)"),
    ("dtype", "bf16", RANGE, "one of 'float32', 'bfloat16', 'float16', 'float64'", "'bf16' (str)"),
    ("s", 3, TYPE, "text", "3 (int)"),
    ("table.a", 0, RANGE, "a number > 0", "0 (int)"),
    ("table.new", "much", TYPE, "a number > 0", "'much' (str)"),
    ("table", [1.0], TYPE, "a dict with text keys (each value: a number > 0)", "[1.0] (list)"),
    ("table", {"$class": 1.0}, TYPE, "a dict with text keys (each value: a number > 0)", "{'$class': 1.0}"),
    ("pair", (1, 2, 3), RANGE, "a tuple of 2 (an integer, a number)", "(1, 2, 3) (tuple)"),
    ("pair.0", 0.1, TYPE, "an integer", "0.1 (float)"),
    ("lit", "ful", RANGE, "one of 'none', 'full', 3", "'ful' (str); did you mean 'full'?"),
    ("lit", None, TYPE, "one of 'none', 'full', 3", "None (NoneType)"),
    ("opt", 0.0, RANGE, "a number > 0 or none", "0.0 (float)"),
    ("opt", "16GiB", TYPE, "a number > 0 or none", "'16GiB' (str)"),
    ("ints", "1,2", TYPE, "a list (each: an integer)", "'1,2' (str)"),
    ("rate", "jax.nn.gelu", TYPE, "a number or a config", "'jax.nn.gelu' (str)"),
    ("rate", len, TYPE, "a number or a config", "<built-in function len>"),
    ("loose", {1, 2}, TYPE, "data or a config", "{1, 2} (set)"),
]


@pytest.mark.parametrize(("path", "value", "kind", "expected", "given"), BAD, ids=lambda value: str(value)[:30])
def test_thirty_bad_values(path, value, kind, expected, given):
    config = config_for(root, all=config_for(All))
    before = config.copy()
    with pytest.raises(kind) as caught:
        config.set_path(f"all.{path}", value)
    assert str(caught.value).startswith(f"all.{path}: expected {expected}, given {given}")
    assert caught.value.path == f"all.{path}"
    assert isinstance(caught.value, ValueError)
    assert config == before  # a refused value changes nothing


def test_elements_are_named():
    for path, value, message in (
        ("ints", [1, "2"], r"^All\.ints\.1: expected an integer, given '2' \(str\)"),
        ("layers", [config_for(Layer), 3], r"^All\.layers\.1: expected a config"),
        ("loose", {"a": [1, np.zeros(2)]}, r"^All\.loose\.a\.1: expected data or a config, given array"),
    ):
        with pytest.raises(FieldTypeError, match=message):
            config_for(All)[path] = value


PATHS = [
    ("lyers.0.heads", "lyers", "did you mean 'layers'?"),
    ("layers.2.heads", "layers.2", "no such index; layers has 2 elements"),
    ("layers.0.head", "layers.0.head", "did you mean 'heads'?"),
    ("s.first", "s.first", "s is '' (str), and has no fields"),
    ("optimizer.b1", "optimizer.b1", "optimizer is None (NoneType), and has no fields"),
    ("table.b.c", "table.b.c", "table.b is not set, and has no fields"),
]


@pytest.mark.parametrize(("path", "at", "message"), PATHS)
def test_unknown_paths_are_refused(path, at, message):
    config = config_for(All)
    for attempt in (
        lambda: config.set_path(path, 1),
        lambda: config.override(path, "1"),
        lambda: config.get_path(path),
    ):
        with pytest.raises(FieldError) as caught:
            attempt()
        assert caught.value.path == at
        assert message in str(caught.value)


TEXTS = [
    ("i", "1_000_000", 1_000_000),
    ("f", "3e-4", 3e-4),
    ("f", "inf", math.inf),
    ("b", "True", True),
    ("s", "12", "12"),
    ("s", "'quoted'", "quoted"),
    ("s", "none", "none"),
    ("opt", "none", None),
    ("text", '"none"', "none"),
    ("lit", "none", "none"),
    ("lit", "3", 3),
    ("maybe", "none", "none"),  # a choice with that spelling takes precedence over None
    ("auto", "0.5", 0.5),
    ("ints", "1,2,3", [1, 2, 3]),
    ("ints", "4", [4]),
    ("ints", "", []),
    ("words", "a, b", ("a", "b")),
    ("words", "1,2", ("1", "2")),
    ("words", '["a, b"]', ("a, b",)),
    ("pair", "1,5e-1", (1, 0.5)),
    ("table", '{"a": 1}', {"a": 1.0}),
    ("table.new", "3", {"a": 1.0, "new": 3.0}),
    ("loose", "[1, {'a': None}]", [1, {"a": None}]),
    ("loose", "os.system", "os.system"),  # just text, where any data is allowed
]


@pytest.mark.parametrize(("path", "text", "value"), TEXTS)
def test_text_is_read_by_type(path, text, value):
    config = config_for(All)
    config.override(path, text)
    stored = config[path.split(".")[0]]
    assert stored == value
    assert type(stored) is type(value)


BAD_TEXTS = [
    ("i", "1.0", "i: expected an integer, given 1.0 (float)"),
    ("lit", "ful", "did you mean 'full'?"),
    ("ints", "1,x", "ints.1: expected an integer, given 'x'"),
    ("pair", "1", "pair: expected a tuple of 2"),
    ("table", "a=1", "table: expected a dict with text keys (each value: a number > 0), given 'a=1'"),
    ("layers.0.heads", "0", "layers.0.heads: expected an integer > 0, given 0"),
    (
        "optimizer",
        "no_such",
        "expected a config or none, given 'no_such' (str); name a component by its own name, or by",
    ),
    (
        "optimizer",
        "plimsoll.framework.config.names.sys.exit",
        "optimizer: 'plimsoll.framework.config.names.sys.exit' is refused",
    ),
    ("loose", "optax.adamww", "'optax.adamww' does not exist; did you mean 'adamw'?"),
    ("layers", '[{"$class": "optax.sgd", "rate": 1}]', "layers.0.rate: no such field in optax.sgd"),
    ("layers", '[{"$class": "os.system"}]', "layers.0: 'os.system' is refused"),
]


@pytest.mark.parametrize(("path", "text", "message"), BAD_TEXTS)
def test_text_that_does_not_fit(path, text, message):
    with pytest.raises(ConfigError) as caught:
        config_for(All).override(path, text)
    assert message in str(caught.value)


def test_overrides_apply_in_order_and_swap_components():
    config = config_for(All)
    for path, text in [
        ("optimizer", "optax.adamw"),
        ("optimizer.weight_decay", "0.5"),
        ("optimizer", "optax.lion"),
        ("optimizer.learning_rate", "1e-4"),
        ("optimizer.learning_rate", "2e-4"),
        ("rate", "optax.constant_schedule"),
        ("rate.value", "0.3"),
        ("layers.1", f"{__name__}.Layer"),
        ("layers.0", '{"$class": "optax.clip", "max_delta": 1}'),
        ("layers.0.max_delta", "2"),
    ]:
        config.override(path, text)
    assert config.optimizer == config_for(optax.lion, learning_rate=2e-4)  # with fresh defaults
    assert config.rate == config_for(optax.constant_schedule, value=0.3)
    assert config.layers == [config_for(optax.clip, max_delta=2.0), config_for(Layer)]
    config.override("optimizer", "none")
    assert config.optimizer is None


def test_component_can_be_set_by_name_only():
    config = config_for(All, optimizer=config_for(optax.adamw, learning_rate=1.0))
    config.override("optimizer", "lion")
    assert config.optimizer == config_for(optax.lion)
    with pytest.raises(ConfigError, match=r"expected a config or none, given 'lin' .*; did you mean 'lion'\?"):
        config.override("optimizer", "lin")


def test_get_and_set_path():
    config = config_for(All, loose={"plain": {"x": 1}})
    assert (config.get_path("layers.1.heads"), config.get_path("loose.plain.x")) == (4, 1)
    for path in ("layers.0.dim", "loose.nothing", "must"):
        with pytest.raises(FieldError, match=f"{path}: not set"):
            config.get_path(path)
    config.set_path("loose.plain.x", 2)
    config.set_path("pair.00", 3)
    assert (config.loose, config.pair) == ({"plain": {"x": 2}}, (3, 0.0))


def test_leaves_and_diff():
    left = config_for(All, optimizer=config_for(optax.scale, step_size=1.0), must=1)
    leaves = dict(left.leaves())
    assert (leaves["layers.0.dim"], leaves["layers.1.heads"], leaves["table.a"]) == (REQUIRED, 4, 1.0)
    right = left.copy()
    assert diff(left, right) == []
    right.layers[1].heads, right.layers[0].dim = 8, 3
    right.i = 5
    right.table["b"] = 2.0
    right.optimizer = config_for(optax.clip, max_delta=1.0)
    del right.must
    assert diff(left, right) == [
        ("i", 0, 5),
        ("optimizer", "optax.scale", "optax.clip"),
        ("optimizer.step_size", 1.0, ABSENT),
        ("layers.0.dim", REQUIRED, 3),
        ("layers.1.heads", 4, 8),
        ("must", 1, REQUIRED),
        ("table.b", ABSENT, 2.0),
        ("optimizer.max_delta", ABSENT, 1.0),
    ]


def test_json_round_trip_is_exact():
    init = config_for(jax.nn.initializers.normal, stddev=0.02)
    loose = {"t": [1, [2, [3]]], "n": None, "big": 2**70, "text": "\u00e9\n", "x": 0.1, "y": {"b.c": init}}
    config = config_for(All, f=math.inf, words=("a",), pair=(1, 2), loose=loose, optimizer=config_for(optax.lion))
    again = Config.from_json(config.to_json())
    assert again == config
    assert again.to_json() == config.to_json()
    assert again.missing() == ["must"]
    data = json.loads(config.to_json())
    assert data == config.to_dict()
    assert (data["$class"], *list(data)[:3]) == (f"{__name__}.All", "$class", "i", "f")
    assert (data["pair"], data["words"]) == ([1, 2.0], ["a"])
    assert data["layers"][0] == {"$class": f"{__name__}.Layer", "heads": 4, "dropout": 0.0}
    assert data["loose"]["y"]["b.c"]["$class"] == "jax.nn.initializers.normal"
    config.f = math.nan
    assert math.isnan(Config.from_json(config.to_json()).f)


def test_a_conversion_does_not_keep_its_callers_alive():
    """An alternative that fails must not leave its traceback behind: a frame above it may refer to a whole model."""

    class Model: ...

    def set_values() -> weakref.ref:
        model = Model()
        config = config_for(All, optimizer=None, dtype="bfloat16")
        parse_text(bool | float, "0.5", "rate")
        config.to_json()
        return weakref.ref(model)

    gc.collect()
    gc.disable()
    try:
        assert set_values()() is None
    finally:
        gc.enable()
