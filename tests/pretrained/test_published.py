"""The shapes of published models: each has a source, our reader accepts it, and its parameter count is right."""

import json
import math
import re

import pytest

from plimsoll.framework import families
from plimsoll.framework.families.facts import ConfigFacts, refuse_unread
from plimsoll.framework.families.published import NAME, find_published_model, load_published_models, load_sources

MODELS = load_published_models()
# Maximum relative difference between the published number and ours, because sources round.
TOLERANCE = 0.01
# Names round their sizes down or up, such as gemma-2-2b (2.6B) and CodeLlama-7b (6.7B).
NAME_BOUNDS = (0.95, 1.32)
# Small models whose names count their vision encoder, which the table leaves out: only the upper bound applies.
WITH_VISION = {"Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-2B"}


def count_params(hub_id: str) -> int:
    """Return the parameter count of our config of the model, from specs, without arrays."""
    config = MODELS[hub_id].config
    refuse_unread(ConfigFacts(config))
    family = families.find_family(config)()
    model = family.model(config).instantiate()
    return sum(math.prod(spec.shape) for spec in model.base_specs.values())


def parse_size_in_name(hub_id: str) -> float | None:
    """Return the largest size in a name: 7B in Qwen/Qwen2.5-7B-Instruct-1M and in OLMoE-1B-7B (1B active)."""
    sizes = re.findall(r"-(\d+(?:\.\d+)?)([bBmM])(?=-|$)", hub_id)
    if not sizes:
        return None
    return max(float(number) * {"b": 1e9, "m": 1e6}[unit.lower()] for number, unit in sizes)


@pytest.mark.pairs
def test_every_model_has_its_published_parameter_count():
    wrong = []
    for hub_id, model in MODELS.items():
        count = count_params(hub_id)
        if model.parameters is not None and abs(count / model.parameters - 1) > TOLERANCE:
            wrong.append(f"{hub_id}: {count}, published {model.parameters} ({model.parameters_source})")
        named = parse_size_in_name(hub_id)
        lower = 0.0 if hub_id in WITH_VISION else NAME_BOUNDS[0]
        if named is not None and not lower < count / named < NAME_BOUNDS[1]:
            wrong.append(f"{hub_id}: {count}, by its name {named:.0f}")
    assert not wrong, "\n".join(wrong)


def test_many_models_from_every_family_exist():
    architectures = {model.config["architectures"][0] for model in MODELS.values()}
    known = {name for family in families.FAMILIES for name in family.architectures}
    assert architectures == known
    assert len(MODELS) >= 60
    assert sum(model.parameters is not None for model in MODELS.values()) >= 30


def test_every_fact_has_a_source_and_every_source_is_used():
    used = set()
    for model in MODELS.values():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", model.hub_id)
        assert model.entry
        assert (model.parameters is None) == (model.parameters_source is None), model.hub_id
        keys = {model.source, *model.confirmed_by, model.tie_source, model.parameters_source}
        used |= keys - {None, NAME}
    assert used == set(load_sources())
    for source in load_sources().values():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", source.repository)
        assert re.fullmatch(r"[0-9a-f]{40}", source.commit)
        assert source.path
        assert source.states


@pytest.mark.parametrize(
    ("hub_id", "rope_theta", "window", "tied"),
    [
        ("meta-llama/Llama-3.2-1B", 500_000.0, None, True),
        ("mistralai/Mistral-7B-v0.1", 10_000.0, 4096, False),
        ("mistralai/Mistral-7B-Instruct-v0.3", 1_000_000.0, None, False),
        ("Qwen/Qwen2.5-7B", 1_000_000.0, None, False),
        ("google/gemma-2-9b", 10_000.0, 4096, True),
    ],
)
def test_memory_relevant_fields_are_read(hub_id, rope_theta, window, tied):
    config = MODELS[hub_id].config
    model = families.find_family(config)().model(config)
    attention = model.stack.pattern[0].attention
    assert attention.rotary.theta == rope_theta
    assert attention.window == window
    assert model.head.tied is tied


def test_a_model_is_a_directory_for_our_reader(tmp_path):
    """`hf:DIR` accepts the dictionary unchanged."""
    model = find_published_model("qwen/qwen3-8b")
    assert model.hub_id == "Qwen/Qwen3-8B"
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    config, family = families.load_model_config(tmp_path)
    assert config.param_dtype == "bfloat16"
    assert "Qwen3ForCausalLM" in family.instantiate().architectures


def test_an_unknown_id_names_the_nearest():
    with pytest.raises(ValueError, match=r"no shape of 'Qwen/Qwen3-7B' .* did you mean .*Qwen/Qwen3-"):
        find_published_model("Qwen/Qwen3-7B")
    with pytest.raises(ValueError, match=rf"no shape of 'x' in .*published.json, which has {len(MODELS)} models$"):
        find_published_model("x")
