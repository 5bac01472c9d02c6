"""Names that files may use: exactly those marked at their definition; building a component touches no file."""

import ast
import functools
import importlib
import inspect
import pkgutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plimsoll import configs, extras, framework, launch
from plimsoll.extras.flows import image_source as images
from plimsoll.extras.flows.linear import ActNorm
from plimsoll.framework.config import Config, ConfigError, config_for, reference
from plimsoll.framework.config import components as config_components
from plimsoll.framework.config import names as config_names
from plimsoll.framework.config.components import is_component
from plimsoll.framework.data import prompts, sources, tokenizers
from plimsoll.framework.families.llama import Llama
from plimsoll.framework.layers.attention import Attention
from plimsoll.framework.layers.block import Block
from plimsoll.framework.layers.experts.experts import Experts
from plimsoll.framework.layers.experts.router import Router
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layers.stack import Stack
from tests.support.audit_events import record_audit_events

ROOT = Path(__file__).parents[2]


def _modules() -> list[str]:
    """Return every module of ours that could be named, including `launch`."""
    found = ["plimsoll.framework", "plimsoll.configs", "plimsoll.launch"]
    for package in (framework, extras, configs, launch):
        found += [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return [name for name in found if not name.endswith("__main__")]


def _find_marked_in_source() -> set[str]:
    """Return the dotted names of definitions under `@component`, as they appear in the source files."""
    names = set()
    for package in ("framework", "extras", "configs", "launch"):
        for file in (ROOT / "plimsoll" / package).rglob("*.py"):
            if "@component" not in (source := file.read_text()):
                continue
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for node in ast.parse(source).body:
                decorators = [ast.unparse(one) for one in getattr(node, "decorator_list", [])]
                if "component" in decorators:
                    names.add(f"{module}.{node.name}")  # pyright: ignore[reportAttributeAccessIssue]
    return names


MARKED = sorted(_find_marked_in_source())


def test_only_marked_public_names_resolve():
    resolved = {}
    for module_name in _modules():
        for attribute in vars(importlib.import_module(module_name)):
            try:
                target = config_names.resolve(f"{module_name}.{attribute}", passed=True)
            except ConfigError:
                continue
            resolved[f"{target.__module__}.{target.__qualname__}"] = target  # a re-export resolves to the same object
    assert sorted(resolved) == MARKED
    assert all(is_component(target) for target in resolved.values())


def test_the_mark_is_neither_inherited_nor_copied():
    class Wider(Linear): ...

    @functools.wraps(reference)
    def wrapper(name: str): ...

    assert is_component(Linear)
    assert is_component(reference)
    assert not is_component(Wider)
    assert not is_component(wrapper)


# Values for required fields, by name. `_build` passes `specs`, which only a parent knows, at instantiation.
DATA = config_for(sources.TextFiles, paths=["not/there.txt"])
FIELDS: dict[str, Any] = {
    "classes": ["a", "b"],
    "dim": 8,
    "dims": 32,
    "factor": 2.0,
    "family": config_for(Llama),
    "global_batch_size": 2,
    "head_dim": 4,
    "hidden": 16,
    "image_shape": [8, 8, 1],
    "inputs": 4,
    "kv_rank": 4,
    "learning_rate": 0.1,
    "levels": 17,
    "long_factor": [2.0, 4.0],
    "max_steps": 3,
    "name": "jax.nn.gelu",
    "num_experts": 8,
    "num_heads": 2,
    "num_layers": 1,
    "optimizer": config_for(optax.adam, learning_rate=0.1),
    "original_length": 64,
    "outputs": 4,
    "path": "not/there",
    "paths": ["not/there"],
    "peak_value": 0.1,
    "reason": "unknown architecture",
    "pattern": "x",
    "seq_len": 8,
    "set": {"memory.remat": "full"},
    "shape": [4, 4, 2],
    "short_factor": [1.0, 2.0],
    "source": DATA,
    "sources": [DATA, DATA],
    "stacks": [config_for(Stack, num_layers=1, pattern=[config_for(ActNorm)])],
    "tokenizer": config_for(tokenizers.ByteTokenizer),
    "top_k": 2,
    "transformations": [config_for(optax.scale, step_size=1.0), config_for(optax.adam, learning_rate=0.1)],
    "vocab_size": 300,
    "weights": [1.0, 2.0],
}
# Components where a field name has a different meaning, or that need a different kind of part.
BLOCK = config_for(Block, attention=config_for(Attention, num_heads=2), mlp=config_for(MLP, hidden=16))
SCHEDULES = ("warmup_cosine", "warmup_linear", "warmup_stable_decay")
SPECIAL: dict[str, dict[str, Any]] = {
    "ImageFiles": {"image_size": 8},
    "ImagePipeline": {"source": config_for(images.DigitsSource)},
    "Rollouts": {"reward": "plimsoll.framework.batch_transforms.rewards.exact"},
    "Prompts": {"source": config_for(prompts.Arithmetic), "answer_tokens": 4, "global_batch_size": 16},
    "Stack": {"pattern": [BLOCK]},
    "MoE": {"experts": config_for(Experts, hidden=16), "router": config_for(Router, top_k=2)},
    "Block": {"attention": BLOCK.attention, "mlp": BLOCK.mlp},
    "CausalLM": {"stack": config_for(Stack, num_layers=1, pattern=[BLOCK])},
    "Learner": {"specs": {"embed": {"token": Linear(inputs=4, outputs=4).parameter_specs()["weight"]}}},
    "Rule": {"freeze": True, "optimizer": None},
    "TrainerOptions": {"max_steps": 3},
    "top_k_accuracy": {"logits": np.zeros((1, 2, 3)), "targets": np.zeros((1, 2), np.int32)},
    **{name: {"steps": 10} for name in SCHEDULES},
}


def _build(target: Any, name: str) -> Any:
    config, special = config_for(target), SPECIAL.get(target.__name__, {})
    late = {key: special.get(key, FIELDS.get(key)) for key in {*config.missing(), *special}}
    # Arrays and specs are not values of a config.
    for key in [key for key in late if key not in ("specs", "logits", "targets")]:
        config[key] = late.pop(key)
    return config.instantiate(**late)


@pytest.mark.parametrize("name", [name for name in MARKED if not name.endswith(".Experiment")])
def test_building_a_component_touches_no_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = config_names.resolve(name)
    if inspect.signature(target).parameters:
        _build(target, name)  # triggers imports and JAX's first compilations
    with record_audit_events() as events:
        _build(target, name)
    assert events == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["nanogpt-cpu", "digits-glow"])
def test_building_an_experiment_touches_no_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = configs.load(name)
    config.instantiate()
    with record_audit_events() as events:
        config.instantiate()
    assert events == []
    assert list(tmp_path.iterdir()) == []


def test_audit_hook_detects_file_access(tmp_path):
    with record_audit_events() as events:
        (tmp_path / "x").write_text("y")
        (tmp_path / "d").mkdir()
        subprocess.run(["true"], check=True)
        socket.socket().close()
    assert {event.split()[0] for event in events} >= {"open", "os.mkdir", "subprocess.Popen", "socket.__new__"}


OPTIMIZER = optax.adam(0.1)
# Arguments for every optax function that may be named, by the names of parameters without a default.
ARGUMENTS: dict[str, Any] = {
    "adv_optimizer": OPTIMIZER,
    "cosine_kwargs": [{"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 1, "decay_steps": 3}],
    "interpolate_type": "linear",
    "tx": OPTIMIZER,
    "accumulation_steps": 2,
    "alpha": 0.5,
    "base_optimizer": OPTIMIZER,
    "beta": 0.9,
    "boundaries": [3],
    "boundaries_and_scales": {3: 0.5},
    "clipping": 1.0,
    "condition": lambda **_: True,
    "decay": 0.9,
    "decay_rate": 0.9,
    "decay_steps": 10,
    "end_value": 0.1,
    "eta": 0.01,
    "every": 2,
    "fast_optimizer": OPTIMIZER,
    "freeze_mask": {"x": True},
    "gamma": 0.5,
    "init_value": 1.0,
    "inner": OPTIMIZER,
    "key": 0,
    "k": 2,
    "l2_norm_clip": 1.0,
    "label_fn": lambda params: params,
    "learning_rate": 0.1,
    "mask": {"x": True},
    "max_backtracking_steps": 3,
    "max_consecutive_errors": 2,
    "max_delta": 1.0,
    "max_linesearch_steps": 3,
    "max_norm": 1.0,
    "measure": lambda updates: updates,
    "measure_name": "norm",
    "measures": {"norm": lambda updates: updates},
    "momentum": 0.9,
    "noise_multiplier": 1.0,
    "opt": OPTIMIZER,
    "optimize_mask": {"x": True},
    "optimizer": OPTIMIZER,
    "param_labels": {"x": "a"},
    "peak_value": 1.0,
    "power": 1.0,
    "should_transform_fn": lambda **_: True,
    "f": lambda *_: 0.0,
    "schedules": [optax.constant_schedule(1.0)] * 2,
    "seed": 0,
    "step_size": 0.1,
    "step_size_fn": optax.constant_schedule(1.0),
    "sync_period": 2,
    "slow_step_size": 0.5,
    "threshold": 1.0,
    "transforms": {"a": OPTIMIZER},
    "transition_steps": 10,
    "update_fn": lambda updates, params: updates,
    "value": 1.0,
    "warmup_steps": 2,
    "weight_decay": 0.1,
}


def _list_public_optax() -> list[tuple[str, str, Any]]:
    modules = [(name, importlib.import_module(name)) for name in config_components.OPTAX]
    return [(name, key, target) for name, module in modules for key, target in sorted(vars(module).items())]


@pytest.mark.pairs
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_only_optax_transformations_and_schedules_resolve():
    accepted, refused = 0, 0
    for module_name, key, target in _list_public_optax():
        try:
            assert config_names.resolve(f"{module_name}.{key}") is target
        except ConfigError:
            refused += 1
            continue
        accepted += 1
        parameters = inspect.signature(target).parameters.values()
        needed = [one for one in parameters if one.default is one.empty or one.name == "key"]
        needed = [one for one in needed if one.kind is not one.VAR_KEYWORD]
        part = ("name", OPTIMIZER) if key == "named_chain" else OPTIMIZER
        positional = [part for one in needed if one.kind is one.VAR_POSITIONAL]
        named = {one.name: ARGUMENTS[one.name] for one in needed if one.kind is not one.VAR_POSITIONAL}
        with record_audit_events() as events:
            product = target(*positional, **named)
        assert events == [], key
        is_transformation = isinstance(product, optax.GradientTransformation)
        assert is_transformation or jnp.shape(product(0)) == (), f"{module_name}.{key} is neither"
    assert accepted > 120, "most of optax"
    assert refused > 50


def test_other_optax_names_are_refused():
    for name in [
        *("optax.inject_hyperparams", "optax.apply_updates", "optax.microbatch", "optax.MultiSteps", "optax.nnls"),
        *("optax.GradientTransformation", "optax.tree_utils.tree_map_params", "optax.second_order.hvp"),
        *("optax.losses.l2_loss", "optax.contrib.schedule_free_eval_params", "optax.value_and_grad_from_state"),
        *("optax._src.alias.adamw", "optax.perturbations.make_perturbed_fun", "optax.ScalarOrSchedule"),
    ]:
        with pytest.raises(ConfigError, match="is refused"):
            config_names.resolve(name, passed=True)


@pytest.mark.pairs
def test_initializers_build_and_functions_are_passed():
    key = jax.random.key(0)
    for name in ("normal", "truncated_normal", "lecun_normal", "he_uniform", "orthogonal"):
        initializer = Config.from_dict({"$class": f"jax.nn.initializers.{name}"}).instantiate()
        assert initializer(key, (4, 4), jnp.float32).shape == (4, 4)
    assert config_for(reference, name="jax.nn.gelu").instantiate() is jax.nn.gelu
    assert config_for(reference, name="jax.nn.initializers.zeros").instantiate() is jax.nn.initializers.zeros
    for name in ("jax.nn.gelu", "jax.nn.one_hot", "jax.nn.initializers.zeros", "jax.nn.initializers.Initializer"):
        with pytest.raises(ConfigError, match="is refused"):
            Config.from_dict({"$class": name})


def test_config_for_does_not_open_a_target_to_files():
    config_for(configs.load, spec="nanogpt-cpu")  # as any code of ours, or a user's, may do
    with pytest.raises(ConfigError, match=r"'configs\.load' is refused: it is not a component"):
        Config.from_dict({"$class": "configs.load", "spec": "nanogpt-cpu"})


@pytest.mark.pairs
def test_our_code_configures_only_marked_components():
    """Foreign names that this process configures become loadable, so our own code must not add any to the list."""
    named = set()
    for package in ("framework", "extras", "configs", "launch"):
        for file in (ROOT / "plimsoll" / package).rglob("*.py"):
            calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call) and node.args]
            named |= {ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "config_for"}
    foreign = {name for name in named if name.startswith(("optax.", "jax."))}
    assert foreign >= {"optax.adamw", "jax.nn.initializers.normal"}
    assert not {name for name in named if name.startswith(("os.", "np.", "subprocess.", "pathlib."))}
    for name in foreign:
        config_names.resolve(name)
