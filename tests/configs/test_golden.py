"""Named configs: their resolved values have not changed unnoticed, and their shapes are the published ones."""

import json
import re

import jax
import numpy as np
import optax
import pytest

from plimsoll import configs
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.layout import StateLayout, flatten
from plimsoll.framework.program.program import Program
from tests.support import small
from tools import golden

NAMES = configs.names()

# Elements of the published checkpoints' tensors, tied ones counted once (Hugging Face's count_parameters).
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-350m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "deepseek-v2-lite": 15_706_484_224,
    # With the constant biases of the routers: 58 times 256, and 45 times 128.
    "deepseek-v3": 671_026_419_200,
    "glm-4.5-air": 106_852_251_264,
    "qwen3.6-27b": 26_895_998_464,
    "qwen3.6-35b-a3b": 34_660_610_688,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "granite-4.0-h-350m": 340_332_224,
    "olmo2-7b": 7_298_617_344,
    "olmoe-1b-7b": 6_919_161_856,
    "gemma3-12b": 11_766_034_176,
    "phi3-mini": 3_821_079_552,
    "phi4": 14_659_507_200,
}
FLOWS = {"digits-glow", "digits-realnvp", "digits-nice", "digits-residual", "images-glow"}
TOYS = {
    "moe-tiny", "qwen3-moe-tiny", "olmoe-tiny", "gpt-oss-tiny", "deepseek-tiny",
    "gemma3-tiny", "phi4-mini-tiny", "olmo2-tiny", "qwen3.5-tiny", "mamba2-tiny",
}  # fmt: skip
# Configs whose objective is not next-token prediction on text.
TUNED = {
    "dpo-tiny", "distil-tiny", "distil-tiny-alone", "distil-tiny-teacher", "grpo-tiny", "reward-tiny", "classify-tiny",
}  # fmt: skip
OURS = TOYS | TUNED | {"stdlib-tiny", "stdlib-tiny-reversible", "nanogpt-cpu", "lora-tiny"} | FLOWS
LARGE = sorted(set(NAMES) - OURS)


@pytest.fixture(scope="module")
def all_configs() -> dict[str, Config]:
    return {name: configs.load(name) for name in NAMES}


def test_every_config_resolves_to_its_golden_file():
    lines = golden.differences(golden.load_golden(), golden.golden())
    assert not lines, "\n".join([*lines, "if the change is intended, run python -m tools.golden --write"])


def test_golden_diff_shows_fields_components_and_defaults(all_configs):
    """Tests the comparison itself: each kind of change is one line."""
    before = golden.load_golden()
    config = all_configs["llama2-7b"].copy()
    config.model.stack.pattern[0].attention.window = 128
    config.model.stack.pattern[0].attention.rotary = None
    config.learner.optimizer = config_for(optax.lion, learning_rate=0.004)
    del config.learner.master_dtype
    after = {**before, "llama2-7b": json.loads(json.dumps({"parameters": 1, **golden.changes(config)}))}
    lines = [line.split(": ", 2)[1:] for line in golden.differences(before, after)]
    changed = dict(lines)
    assert changed["parameters"] == "6738415616 -> 1"
    assert changed["model.stack.pattern.0.attention.window"] == "nothing -> 128"
    assert changed["model.stack.pattern.0.attention.rotary"] == '"plimsoll.Rotary" -> nothing'
    assert changed["learner.optimizer"] == '"optax.adamw" -> "optax.lion"'
    assert changed["learner.optimizer.learning_rate"] == '"plimsoll.warmup_cosine" -> 0.004'
    assert changed["learner.master_dtype"] == '"float32" -> nothing'
    defaults = {**before["defaults"], "plimsoll.Linear.bias": True}
    (line,) = golden.differences(before, {**before, "defaults": defaults})
    assert line == "defaults: plimsoll.Linear.bias: false -> true"
    missing = golden.differences(before, {name: flat for name, flat in before.items() if name != "llama-33b"})
    assert len(missing) == len(before["llama-33b"])
    assert missing[0] == "llama-33b: parameters: 32528943616 -> nothing"


def test_published_parameter_counts():
    assert set(PUBLISHED) | OURS == set(NAMES)
    assert {name: golden.load_golden()[name]["parameters"] for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize("name", NAMES)
def test_docstrings_state_the_parameter_count(name):
    text = configs.find(name).__doc__
    assert text is not None
    number, unit = re.search(r"([\d.]+)([MB])(?:-parameter| parameters)", text).groups()
    decimals = len(number.partition(".")[2])
    count = golden.load_golden()[name]["parameters"] / {"M": 1e6, "B": 1e9}[unit]
    assert round(count, decimals) == float(number), f"{count} {unit}"


@pytest.mark.pairs
@pytest.mark.parametrize("name", NAMES)
def test_every_config_builds_and_survives_json(all_configs, name):
    """Rules match, widths fit, and no required field is missing; no device or file is touched."""
    config = all_configs[name]
    experiment = config.instantiate()
    assert Config.from_json(config.to_json()) == config
    experiment.model.check(Program(experiment, jax.devices()[:1]).mesh, experiment.data)
    assert name in FLOWS or experiment.model.vocab_size >= experiment.data.tokenizer.vocab_size


@pytest.mark.pairs
@pytest.mark.parametrize("name", LARGE)
def test_large_configs_keep_14_bytes_per_parameter(all_configs, name):
    """bf16 parameters, f32 master weights and two f32 moments, plus AdamW's counters; a clip of 1; 8-fold sharding."""
    experiment = all_configs[name].instantiate()
    assert experiment.learner.clip == 1.0
    layout = Program(experiment, jax.devices()[:1]).layout
    # Frozen parameters, in float32, have no state.
    count = PUBLISHED[name] - layout.bytes_per_device("frozen") // 4
    assert layout.bytes_per_device("parameter") == 2 * count
    counters = sum(leaf.bytes_per_device for leaf in layout if leaf.path.endswith("/count"))
    assert layout.bytes_per_device("optimizer") - counters == 12 * count
    sharded = StateLayout(experiment.state_specs(), experiment.mesh.build(jax.devices()))
    assert sharded.bytes_per_device() <= 1.02 * layout.bytes_per_device() / 8


@pytest.mark.pairs
@pytest.mark.parametrize("name", [*LARGE, "nanogpt-cpu"])
def test_norms_biases_and_positions_do_not_decay(all_configs, name):
    experiment = all_configs[name].instantiate()
    groups = {label: set() for label in ("default", "rule0")}
    for group in experiment.learner.groups:
        groups[group.label] |= {f"{group.stage}/{path}" for path in group.paths}
    decaying = groups["default"]
    # Expert matrices have no layer of their own below the mixture, so their paths do not end in weight.
    experts = ("experts/gate", "experts/up", "experts/down")
    assert all(path.endswith(("weight", "token", "table", "_conv", *experts)) for path in decaying)
    specs = flatten(experiment.model.parameter_specs())
    rest = {path for path, spec in specs.items() if spec.trainable} - decaying
    assert groups["rule0"] == rest
    assert all(path.endswith(("scale", "bias", "position", "sinks", "log_rate", "skip")) for path in rest)


@pytest.mark.pairs
def test_the_smallest_config_takes_a_step(all_configs):
    config = all_configs["nanogpt-cpu"].copy()
    config.model.stack.num_layers = 2
    config.model.dim, config.data.seq_len = 32, 16
    program = Program(config.instantiate(), jax.devices()[:1])
    state, metrics = small.run(program, 2)
    program.layout.check(state)
    np.testing.assert_allclose(metrics[0]["loss"], np.log(257), rtol=0.01)
    assert metrics[0]["learning_rate"] == 0.0
