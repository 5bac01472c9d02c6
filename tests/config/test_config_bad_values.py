"""Thirty bad values, set at depth: each error names the dotted path, what was expected, and what was given."""

import enum
from typing import Any, Literal

import optax
import pytest

from framework.config import (
    Config,
    ConfigError,
    DType,
    FieldRangeError,
    FieldTypeError,
    Fraction,
    PositiveFloat,
    PositiveInt,
    UnknownFieldError,
    config_for,
)


class Kind(enum.Enum):
    CAUSAL = 1
    FULL = 2


class Attention:
    def __init__(
        self, *, num_heads: PositiveInt = 4, dropout: Fraction = 0.0, kind: Kind = Kind.CAUSAL, rope: bool = True
    ):
        pass


class Stack:
    def __init__(self, *, num_layers: PositiveInt = 2, pattern: list[Config] = [config_for(Attention)]):  # noqa: B006
        pass


class Model:
    def __init__(self, *, stack: Config = config_for(Stack), param_dtype: DType = "float32", name: str = "m"):
        pass


class Data:
    def __init__(self, *, weights: dict[str, PositiveFloat] = {"a": 1.0}, splits: tuple[int, int] = (9, 1)):  # noqa: B006
        pass


class Root:
    def __init__(
        self,
        *,
        model: Config = config_for(Model),
        data: Config = config_for(Data),
        optimizer: Config = config_for(optax.adamw, learning_rate=1e-3),
        remat: Literal["none", "full", "sqrt"] = "none",
        budget: PositiveFloat | None = None,
        mesh: list[int] = [-1],  # noqa: B006
    ):
        pass


A = "model.stack.pattern.0"
# (path, value, kind of error, expected, given)
ROWS: list[tuple[str, Any, type[ConfigError], str, str]] = [
    ("model.stack.num_layers", "12", FieldTypeError, "an integer > 0", "'12' (str)"),
    ("model.stack.num_layers", 12.0, FieldTypeError, "an integer > 0", "12.0 (float)"),
    ("model.stack.num_layers", True, FieldTypeError, "an integer > 0", "True (bool)"),
    ("model.stack.num_layers", 0, FieldRangeError, "an integer > 0", "0 (int)"),
    ("model.stack.num_layers", None, FieldTypeError, "an integer > 0", "None (NoneType)"),
    ("model.stack.num_layers", [12], FieldTypeError, "an integer > 0", "[12] (list)"),
    (f"{A}.num_heads", -4, FieldRangeError, "an integer > 0", "-4 (int)"),
    (f"{A}.dropout", 1.0, FieldRangeError, "a number >= 0 and < 1", "1.0 (float)"),
    (f"{A}.dropout", -0.1, FieldRangeError, "a number >= 0 and < 1", "-0.1 (float)"),
    (f"{A}.dropout", "0.1", FieldTypeError, "a number >= 0 and < 1", "'0.1' (str)"),
    (f"{A}.kind", "causel", FieldRangeError, "one of 'CAUSAL', 'FULL'", "'causel' (str)"),
    (f"{A}.kind", 3, FieldTypeError, "one of 'CAUSAL', 'FULL'", "3 (int)"),
    (f"{A}.rope", "yes", FieldTypeError, "true or false", "'yes' (str)"),
    (f"{A}.rope", 1, FieldTypeError, "true or false", "1 (int)"),
    (A, "Attention", FieldTypeError, "a config", "'Attention' (str)"),
    ("model.stack.pattern", config_for(Attention), FieldTypeError, "a list (each: a config)", "config_for("),
    ("model.stack", None, FieldTypeError, "a config", "None (NoneType)"),
    ("model.stack", {"num_layers": 3}, FieldTypeError, "a config", "{'num_layers': 3} (dict)"),
    (
        "model.param_dtype",
        "bf16",
        FieldRangeError,
        "one of 'float32', 'bfloat16', 'float16', 'float64'",
        "'bf16' (str)",
    ),
    ("model.name", 3, FieldTypeError, "text", "3 (int)"),
    ("data.weights.a", 0, FieldRangeError, "a number > 0", "0 (int)"),
    ("data.weights.new", "much", FieldTypeError, "a number > 0", "'much' (str)"),
    ("data.weights", [1.0], FieldTypeError, "a dict (each value: a number > 0)", "[1.0] (list)"),
    ("data.splits", (1, 2, 3), FieldRangeError, "a tuple of 2 (an integer, an integer)", "(1, 2, 3) (tuple)"),
    ("data.splits.1", 0.1, FieldTypeError, "an integer", "0.1 (float)"),
    ("optimizer.learning_rate", "3e-4", FieldTypeError, "a number or a config", "'3e-4' (str)"),
    ("optimizer.learning_rate", None, FieldTypeError, "a number or a config", "None (NoneType)"),
    ("optimizer.nesterov", 1, FieldTypeError, "true or false", "1 (int)"),
    ("remat", "ful", FieldRangeError, "one of 'none', 'full', 'sqrt'", "'ful' (str)"),
    ("remat", None, FieldTypeError, "one of 'none', 'full', 'sqrt'", "None (NoneType)"),
    ("budget", 0.0, FieldRangeError, "a number > 0 or none", "0.0 (float)"),
    ("budget", "16GiB", FieldTypeError, "a number > 0 or none", "'16GiB' (str)"),
    ("mesh", "1,2", FieldTypeError, "a list (each: an integer)", "'1,2' (str)"),
    ("mesh.0", 2.0, FieldTypeError, "an integer", "2.0 (float)"),
]


@pytest.mark.parametrize(("path", "value", "kind", "expected", "given"), ROWS, ids=lambda value: str(value)[:30])
def test_path_expected_and_given_are_named(path, value, kind, expected, given):
    config = config_for(Root)
    before = config.copy()
    with pytest.raises(kind) as caught:
        config.set_path(path, value)
    message = str(caught.value)
    assert message.startswith(f"{path}: expected {expected}, given {given}"), message
    assert caught.value.path == path
    assert isinstance(caught.value, ValueError)
    assert config == before  # a refused value changes nothing


def test_there_are_thirty_of_them():
    assert len(ROWS) >= 30


PATHS = [
    ("modle.stack", "modle", "did you mean 'model'?"),
    ("model.stak.num_layers", "model.stak", "did you mean 'stack'?"),
    ("model.stack.pattern.1.num_heads", "model.stack.pattern.1", "no such index; valid: 0 to 0"),
    ("model.stack.pattern.first.num_heads", "model.stack.pattern.first", "no such index; valid: 0 to 0"),
    ("model.stack.pattern.0.heads", "model.stack.pattern.0.heads", "did you mean 'num_heads'?"),
    ("model.name.first", "model.name.first", "model.name is 'm' (str), and has no fields"),
    ("budget.gib", "budget.gib", "budget is None (NoneType), and has no fields"),
    ("data.weights.b.c", "data.weights.b", "no such key"),
    ("optimizer.lr", "optimizer.lr", "no such field in optax.adamw"),
]


@pytest.mark.parametrize(("path", "at", "message"), PATHS)
def test_paths_that_lead_nowhere(path, at, message):
    config = config_for(Root)
    for attempt in (
        lambda: config.set_path(path, 1),
        lambda: config.override(path, "1"),
        lambda: config.get_path(path),
    ):
        with pytest.raises(UnknownFieldError) as caught:
            attempt()
        assert caught.value.path == at
        assert str(caught.value).startswith(f"{at}: ")
        assert message in str(caught.value)
