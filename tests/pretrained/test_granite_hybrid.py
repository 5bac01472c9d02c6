"""Fields of config.json of Granite 4.0-H that the shapes of tools/peers/families.py do not have."""

from typing import Any

import pytest

from plimsoll import configs
from plimsoll.framework import families
from plimsoll.framework.config import Config
from plimsoll.framework.families.granite_hybrid import GraniteHybrid
from tools.peers.families import FAMILIES

FACTS = FAMILIES["granite-hybrid-dense"].facts
INFINITY = {"__float__": "Infinity"}


def build(**fields: Any) -> Config:
    return GraniteHybrid().model({**FACTS, **fields})


@pytest.mark.parametrize(
    ("limits", "expected"),
    [([0.0, INFINITY], (0.0, None)), ([0.0, float("inf")], (0.0, None)), ([0.01, INFINITY], (0.01, None)),
     ([0, 2.5], (0.0, 2.5))],
)  # fmt: skip
def test_step_limits_round_trip(limits: list[Any], expected: tuple[float, float | None]):
    model = build(time_step_limit=limits)
    mixer = model.stack.pattern[0].attention
    assert (mixer.min_step, mixer.max_step) == expected
    facts, family = families.export_config(model)
    assert isinstance(family, GraniteHybrid)
    assert family.model(facts) == model


@pytest.mark.parametrize("kinds", [["attention"] * 3, ["mamba"] * 3, ["linear_attention", "full_attention", "mamba"]])
def test_kinds_of_layers_round_trip(kinds: list[str]):
    model = build(layer_types=kinds)
    assert len(model.stack.pattern) == (1 if len(set(kinds)) == 1 else 3)
    facts, family = families.export_config(model)
    assert family.model(facts) == model


def test_a_model_without_its_features_is_not_exported_as_granite():
    facts, _ = families.export_config(configs.load("llama2-7b").model)
    assert facts["architectures"] == ["LlamaForCausalLM"]
    facts, _ = families.export_config(configs.load("mamba2-tiny").model)
    assert facts["architectures"] == ["GraniteMoeHybridForCausalLM"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("time_step_limit", [0.1]),
        ("time_step_limit", [2.0, 1.0]),
        ("time_step_limit", None),
        ("mamba_d_head", 9),
        ("mamba_n_groups", 3),
        ("position_embedding_type", "alibi"),
        ("layer_types", ["mamba", "sliding_attention", "mamba"]),
        ("hidden_act", "gelu"),
        ("residual_multiplier", None),
        ("output_router_logits", True),
    ],
)
def test_fields_that_would_compute_something_else_are_refused(field: str, value: Any):
    with pytest.raises(ValueError, match=f"config.json: {field} = "):
        build(**{field: value})
