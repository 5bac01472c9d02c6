"""Every component that a config can hold is found by its short name, in every field, whatever its current value."""

import importlib
import pkgutil

import optax
import pytest

from plimsoll import configs, framework
from plimsoll.framework.config import Config, ConfigError, config_for, get_target
from plimsoll.framework.config.components import is_component
from plimsoll.framework.config.names import get_dotted_name, resolve_short_name
from plimsoll.framework.optimizers.named import OPTIMIZERS


def test_the_table_has_every_component_that_is_marked():
    for module_info in pkgutil.walk_packages(framework.__path__, "plimsoll.framework."):
        module = importlib.import_module(module_info.name)
        for name, value in vars(module).items():
            if is_component(value) and value.__module__ == module.__name__:
                assert resolve_short_name(name, [])[0] is value, f"{name} of {module.__name__}"


@pytest.mark.pairs
def test_components_in_named_configs_have_usable_names():
    targets = {}
    for name in configs.names():
        config = configs.load(name)
        for path, value in config.walk():
            if not isinstance(value, Config) or not path:
                continue
            target = get_target(value)
            if OPTIMIZERS.get(target.__name__, target) is not target:
                # optax and we both have a function with this name; the short name means ours.
                assert get_dotted_name(target) == "optax.contrib.muon"
                continue
            # Pass no modules of this config: the name would be found in them anyway.
            assert resolve_short_name(target.__name__, [])[0] is target, f"{path} of {name}"
            config.override(path, target.__name__)
            assert get_target(config.get_path(path)) is target, f"{path} of {name}"
            config.set_path(path, value)
            targets[get_dotted_name(target)] = path
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
def test_short_name_from_a_module_the_config_does_not_use(path: str, name: str, dotted_name: str | None):
    dotted_name = dotted_name or f"plimsoll.{name}"
    short, dotted = configs.load("gpt2-124m"), configs.load("gpt2-124m")
    short.override(path, name)
    dotted.override(path, dotted_name)
    assert short == dotted
    assert get_dotted_name(get_target(short.get_path(path))) == dotted_name


def test_misspelled_name_gets_a_suggestion():
    for path, name, meant in [
        ("data.tokenizer", "PretrainTokenizer", "PretrainedTokenizer"),
        ("learner.optimizer.learning_rate", "cosine_schedule", "cosine_decay_schedule"),
        ("model.stack.pattern.0.norm", "layernorm", "LayerNorm"),
        ("model", "CausalLm", "CausalLM"),
    ]:
        with pytest.raises(ConfigError, match=f"given '{name}' .*; did you mean '{meant}'"):
            configs.load("gpt2-124m").override(path, name)


def test_non_components_have_no_short_name():
    for name in ("write_json", "Config", "os", "numerics", "GradientTransformation"):
        assert resolve_short_name(name, [get_dotted_name(config_for(optax.lion)._target)])[0] is None
