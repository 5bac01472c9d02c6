"""Approximate shapes: any decoder's config.json can be planned, also one that cannot be trained."""

import json
import math

import pytest

import plimsoll as pl
from plimsoll.framework import families
from plimsoll.framework.config import Config
from plimsoll.framework.families.approximate import ApproximateDecoder
from plimsoll.framework.families.published import load_published_models

# They leave out fields whose default depends on the family, such as a tied head, or have layers without attention.
INCOMPLETE = ("gemma2", "gemma3_text", "gpt2", "smollm3", "granitemoehybrid", "qwen3_next", "qwen3_5")

NEMOTRON = {
    "architectures": ["NemotronForCausalLM"],
    "model_type": "nemotron",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 256,
    "vocab_size": 512,
    "hidden_act": "relu2",
}


def count_params(model: Config) -> int:
    return sum(math.prod(spec.shape) for spec in model.instantiate().base_specs.values())


def write(folder, facts: dict) -> str:
    (folder / "config.json").write_text(json.dumps(facts))
    return f"hf:{folder}"


def test_parameters_of_published_models_agree_with_their_families():
    differences = {}
    for hub_id, model in load_published_models().items():
        if model.config["model_type"].startswith(INCOMPLETE):
            continue
        exact = families.build_model_config(families.find_family(model.config)(), model.config)
        approximate = ApproximateDecoder(reason="").model(model.config)
        differences[hub_id] = count_params(approximate) / count_params(exact) - 1
    assert len(differences) > 100
    wrong = {hub_id: f"{difference:.2%}" for hub_id, difference in differences.items() if abs(difference) > 0.005}
    assert not wrong


def test_an_unknown_architecture_is_planned(tmp_path):
    spec = write(tmp_path, NEMOTRON)
    config = pl.load_config(spec, {"data.global_batch_size": 8, "data.seq_len": 128}, shape_only=True)
    # Two tables, and for each of two layers attention with half as many key heads, and an MLP of two matrices; norms.
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 64 * 256 * 2
    assert count_params(config.model) == 2 * 512 * 64 + 2 * layer + 5 * 64
    report = pl.plan(config, "v5e-1", estimate=False)
    assert report.fits
    assert "not trained: unknown architecture NemotronForCausalLM" in str(report)
    assert "without --estimate" not in str(report)
    with pytest.raises(ValueError, match="unknown architecture NemotronForCausalLM"):
        pl.load_config(spec)


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        # A mixture: a router and four experts of three matrices instead of each MLP, and a shared expert.
        (
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
            2 * (64 * 4 + 5 * 3 * 64 * 32),
        ),
        # The first of two layers is dense.
        (
            {"n_routed_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
            64 * 4 + 4 * 3 * 64 * 32 + 2 * 64 * 256,
        ),
        # One width per layer.
        ({"intermediate_size": [128, 384]}, 2 * 2 * 64 * 256),
        ({"hidden_act": "silu"}, 2 * 3 * 64 * 256),
    ],
    ids=["experts", "dense_first", "width_per_layer", "gated"],
)
def test_sizes_have_many_names(changes, parameters):
    plain = count_params(ApproximateDecoder(reason="").model(NEMOTRON)) - 2 * 2 * 64 * 256
    assert count_params(ApproximateDecoder(reason="").model({**NEMOTRON, **changes})) - plain == parameters


def test_the_language_model_of_a_multimodal_one_is_planned(tmp_path):
    spec = write(tmp_path, {"architectures": ["SeesForConditionalGeneration"], "text_config": NEMOTRON})
    config = pl.load_config(spec, shape_only=True)
    assert count_params(config.model) == count_params(ApproximateDecoder(reason="").model(NEMOTRON))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "no field 'hidden_size'"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers = 'two'"),
        ({"num_key_value_heads": 3}, "a divisor of num_attention_heads = 4"),
    ],
    ids=["no_width", "text", "heads"],
)
def test_a_config_without_a_size_is_refused(tmp_path, changes, message):
    spec = write(tmp_path, {**NEMOTRON, **changes})
    with pytest.raises(ValueError, match=message):
        pl.load_config(spec, shape_only=True)
