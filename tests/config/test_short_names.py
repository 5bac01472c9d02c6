"""Every component that a config can hold is found by its short name, in every field, whatever its current value."""

import importlib
import pkgutil

import optax
import pytest

from plimsoll import configs, framework
from plimsoll.framework.config import Config, ConfigError, config_for, target_of
from plimsoll.framework.config.components import is_component
from plimsoll.framework.config.names import name_of
from plimsoll.framework.config.short_names import short_named
from plimsoll.framework.optimizers.named import OPTIMIZERS


def test_the_table_has_every_component_that_is_marked():
    for module_info in pkgutil.walk_packages(framework.__path__, "plimsoll.framework."):
        module = importlib.import_module(module_info.name)
        for name, value in vars(module).items():
            if is_component(value) and value.__module__ == module.__name__:
                assert short_named(name, [])[0] is value, f"{name} of {module.__name__}"


@pytest.mark.pairs
def test_what_stands_in_a_named_config_can_be_named_there():
    targets = {}
    for name in configs.names():
        config = configs.load(name)
        for path, value in config.walk():
            if not isinstance(value, Config) or not path:
                continue
            target = target_of(value)
            if OPTIMIZERS.get(target.__name__, target) is not target:
                # optax and we both have a function with this name; the short name means ours.
                assert name_of(target) == "optax.contrib.muon"
                continue
            # Pass no modules of this config: the name would be found in them anyway.
            assert short_named(target.__name__, [])[0] is target, f"{path} of {name}"
            config.override(path, target.__name__)
            assert target_of(config.get_path(path)) is target, f"{path} of {name}"
            config.set_path(path, value)
            targets[name_of(target)] = path
        assert config == configs.load(name)
    assert len(targets) > 20


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("path", "name", "dotted_name"),
    [
        ("learner.optimizer.learning_rate", "cosine_decay_schedule", "optax.cosine_decay_schedule"),
        ("learner.optimizer.learning_rate", "warmup_stable_decay", None),
        ("model", "Flow", "plimsoll.Flow"),
        ("model.lora", "LoRA", "plimsoll.LoRA"),
        ("model.stack.pattern.0.norm", "RMSNorm", "plimsoll.RMSNorm"),
        ("data", "ImagePipeline", "plimsoll.ImagePipeline"),
        ("data.source", "ChatSource", "plimsoll.ChatSource"),
        ("data.tokenizer", "PretrainedTokenizer", "plimsoll.PretrainedTokenizer"),
        ("memory", "Memory", "plimsoll.Memory"),
    ],
)
def test_a_name_of_a_module_that_the_config_does_not_use(path: str, name: str, dotted_name: str | None):
    dotted_name = dotted_name or f"plimsoll.framework.optimizers.learning_rates.{name}"
    short, dotted = configs.load("gpt2-124m"), configs.load("gpt2-124m")
    short.override(path, name)
    dotted.override(path, dotted_name)
    assert short == dotted
    assert name_of(target_of(short.get_path(path))) == dotted_name


def test_a_name_that_is_nearly_one():
    for path, name, meant in [
        ("data.tokenizer", "PretrainTokenizer", "PretrainedTokenizer"),
        ("learner.optimizer.learning_rate", "cosine_schedule", "cosine_decay_schedule"),
        ("model.stack.pattern.0.norm", "layernorm", "LayerNorm"),
        ("model", "CausalLm", "CausalLM"),
    ]:
        with pytest.raises(ConfigError, match=f"given '{name}' .*; did you mean '{meant}'"):
            configs.load("gpt2-124m").override(path, name)


def test_what_is_no_component_has_no_short_name():
    for name in ("write_json", "Config", "os", "numerics", "GradientTransformation"):
        assert short_named(name, [name_of(config_for(optax.lion)._target)])[0] is None
