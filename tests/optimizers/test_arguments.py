"""Arguments that an optimizer cannot work with are refused, with their path; every optimizer's defaults pass."""

import inspect
from typing import Any

import optax
import pytest
from optax import contrib

from plimsoll.framework.config import ConfigError, config_for
from plimsoll.framework.optimizers.arguments import RANGES, check_arguments
from plimsoll.framework.optimizers.named import OPTIMIZERS

INF, NAN = float("inf"), float("nan")


def optimizers() -> dict[str, Any]:
    """Return every public function of optax and optax.contrib that returns a gradient transformation, by name."""
    found = {}
    for module in (optax, contrib):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            returned = str(inspect.signature(function).return_annotation)
            if "GradientTransformation" in returned and not name.startswith("_") and "inject" not in name:
                found[name] = function
    return found


def config(function: Any) -> Any:
    """Return the optimizer's config, with a learning rate if it takes one."""
    made = config_for(function)
    if made.takes("learning_rate"):
        made.learning_rate = 1e-3
    return made


def check(made: Any, **fields: Any) -> None:
    """Set fields and check all: type hints refuse some values, ranges refuse others."""
    for name, value in fields.items():
        made[name] = value
    check_arguments(made, "learner.optimizer")


@pytest.mark.pairs
@pytest.mark.filterwarnings("ignore:optax.*deprecated")  # for the same names outside contrib
@pytest.mark.parametrize("name", [*optimizers(), *OPTIMIZERS])
def test_every_optimizer_accepts_its_defaults(name: str):
    check_arguments(config(optimizers().get(name) or OPTIMIZERS[name]), "learner.optimizer")


def test_argument_names_match_optax():
    functions = [*optimizers().values(), optax.linear_schedule, optax.warmup_constant_schedule, optax.constant_schedule]
    known = {name for function in functions for name in inspect.signature(function).parameters}
    assert set(RANGES) <= known


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_named_optimizer_numbers_reject_bool_and_nan(name: str):
    made = config(OPTIMIZERS[name])
    numbers = [field for field, value in made.items() if isinstance(value, int | float) and not isinstance(value, bool)]
    assert "learning_rate" in numbers
    for field in numbers:
        for value in (True, NAN):
            with pytest.raises(ConfigError, match=rf"{field}: expected a.* given {value}"):
                check(made.copy(), **{field: value})


@pytest.mark.parametrize(
    ("target", "fields", "message"),
    [
        (optax.adamw, {"b1": 1.5}, r"b1: expected a number >= 0 and < 1, given 1\.5 \(float\)"),
        (optax.adamw, {"b2": 1}, r"b2: expected a number >= 0 and < 1, given 1 \(int\)"),
        (optax.adamw, {"b2": -0.1}, r"b2: expected a number >= 0 and < 1"),
        (optax.adamw, {"learning_rate": NAN}, r"learning_rate: expected a finite number >= 0, given nan"),
        (optax.adamw, {"learning_rate": -1}, r"learning_rate: expected a finite number >= 0, given -1"),
        (optax.adamw, {"learning_rate": INF}, r"learning_rate: expected a finite number >= 0, given inf"),
        (optax.adamw, {"eps": -1e-8}, r"eps: expected a finite number >= 0"),
        (optax.adamw, {"weight_decay": INF}, r"weight_decay: expected a finite number >= 0"),
        (optax.rmsprop, {"decay": 1.0}, r"decay: expected a number >= 0 and < 1"),
        (optax.sgd, {"momentum": 1.1}, r"momentum: expected a number >= 0 and < 1"),
        (optax.adafactor, {"clipping_threshold": 0.0}, r"clipping_threshold: expected a finite number > 0"),
        (optax.sm3, {"learning_rate": 1e-3, "momentum": True}, r"momentum: expected a"),
        (contrib.prodigy, {"betas": [0.9, 1.5]}, r"betas: expected a number >= 0 and < 1"),
        (contrib.muon, {"ns_steps": True}, r"ns_steps: expected a"),
        (OPTIMIZERS["adalomo"], {"learning_rate": -1.0}, r"learning_rate: expected a finite number >= 0"),
    ],
)
def test_values_that_train_to_nothing_are_refused(target: Any, fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        check(config(target), **fields)


def test_what_is_inside_is_checked_under_its_path():
    schedule = config_for(optax.linear_schedule, init_value=1e-3, end_value=-1e-3, transition_steps=10)
    made = config_for(optax.adamw, learning_rate=schedule)
    with pytest.raises(
        ConfigError, match=r"^learner\.optimizer\.learning_rate\.end_value: expected a finite number >= 0"
    ):
        check_arguments(made, "learner.optimizer")
    chain = config_for(optax.masked, inner=config_for(optax.scale_by_adam, b1=2.0), mask=True)
    with pytest.raises(ConfigError, match=r"^learner\.optimizer\.inner\.b1: expected a number"):
        check_arguments(chain, "learner.optimizer")
