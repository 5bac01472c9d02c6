"""A user's own config file, as the command-line tests load it."""

from pathlib import Path

import pytest

SOURCE = '''
"""A user's own file."""

import optax
from plimsoll.framework.config import Config, PositiveInt, config_for


class Rule:
    def __init__(self, *, pattern: str, set: dict): ...


class Layer:
    """One layer of it. More of that.

    Args:
        dim: its width, from the parent. And more.
        heads (int): how many heads,
            over two lines.
    """

    def __init__(self, *, dim: PositiveInt, heads: PositiveInt = 4): ...


class Exp:
    """The experiment.

    Args:
        optimizer: what updates.
    """

    def __init__(
        self,
        *,
        optimizer: Config,
        layers: list[Config],
        remat: str | None = None,
        steps: int = 10,
        accelerator_rules: list[Config] = [],
        note: str = "a b",
    ): ...


def mine() -> Config:
    """My first config."""
    return config_for(
        Exp,
        optimizer=config_for(optax.adamw, learning_rate=3e-4),
        layers=[config_for(Layer), config_for(Layer, heads=2)],
        accelerator_rules=[
            config_for(Rule, pattern="v5e-*", set={"remat": "full", "layers.0.heads": 8, "steps": 20}),
            config_for(Rule, pattern="v5e-8", set={"steps": 30}),
        ],
    )


def other():
    config = mine()
    config.optimizer = config_for(optax.lion, learning_rate=1e-4)
    config.layers[1].heads = 4
    return config


def broken():
    config = mine()
    config.layers[1].haeds = 4
    return config


def no_config():
    return 3


CONFIGS = {"mine-again": mine}
'''


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    """path/to/my.py, with the configs mine, other and mine-again, and several broken ones."""
    path = tmp_path / "my.py"
    path.write_text(SOURCE)
    return path
