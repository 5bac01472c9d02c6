"""config.json of models that score sequences: labels as transformers reads them, and fields refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from plimsoll import configs
from plimsoll.framework import families
from plimsoll.framework.families import scores
from tests.support import small

LLAMA = {
    "architectures": ["LlamaForSequenceClassification"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "dtype": "float32",
}


def directory(tmp_path: Path, **fields: Any) -> Path:
    """Write a directory that contains only a config.json."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **fields}))
    return tmp_path


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        # transformers writes no labels if there are two without names.
        ({}, ["LABEL_0", "LABEL_1"]),
        ({"num_labels": 3}, ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ({"id2label": {"1": "yes", "0": "no"}}, ["no", "yes"]),
        ({"id2label": {"0": "LABEL_0"}, "problem_type": "regression"}, ["LABEL_0"]),
        ({"id2label": {"0": "a", "1": "b"}, "problem_type": "single_label_classification"}, ["a", "b"]),
    ],
)
def test_labels(tmp_path: Path, fields: dict[str, Any], names: list[str]):
    config = configs.load(f"hf:{directory(tmp_path, **fields)}")
    assert config.model.head.num_labels == len(names)
    objective = "PairwiseReward" if len(names) == 1 else "Classification"
    assert type(config.instantiate().model.head.objective).__name__ == objective
    if len(names) > 1:
        assert config.data.source.classes == names


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label = .*; expected the numbers 0, 1, ... as keys"),
        ({"id2label": {"0": "a", "1": "a"}}, "id2label = .*; expected different names"),
        ({"id2label": {"0": 1}}, "id2label = .*; expected an object of names"),
        ({"id2label": ["a", "b"]}, "id2label = .*; expected an object of names"),
        ({"id2label": {"0": "a", "1": "b"}, "num_labels": 3}, "num_labels = 3; expected 2"),
        ({"num_labels": 0}, "num_labels = 0; expected an integer"),
        ({"problem_type": "multi_label_classification"}, "problem_type = 'multi_label_class.*'; expected null or"),
        ({"problem_type": "regression"}, "problem_type = 'regression'; expected null or single_label_classification"),
        ({"model_type": "qwen2"}, "model_type = 'qwen2'; expected 'llama', that of LlamaForCausalLM"),
        ({"architectures": ["BertForSequenceClassification"]}, "unknown architecture BertForSequenceClassification"),
    ],
)
def test_labels_that_are_refused(tmp_path: Path, fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        configs.load(f"hf:{directory(tmp_path, **fields)}")


@pytest.mark.parametrize("kind", ["reward", "classify", "lora-reward", "qlora-classify"])
def test_a_language_model_gets_a_head_that_learns(tmp_path: Path, kind: str):
    config = configs.load(f"{kind}:{directory(tmp_path, architectures=['LlamaForCausalLM'], pad_token_id=3)}")
    assert config.pretrained.draws_head
    assert config.data.source.pad_token_id == 3
    experiment = config.instantiate()
    assert experiment.model.head.num_labels == (1 if "reward" in kind else 2)
    assert "score" in experiment.learner.specs["head"]


def test_adapters_on_a_published_classifier(tmp_path: Path):
    config = configs.load(f"lora:{directory(tmp_path)}")
    assert not config.pretrained.draws_head
    assert config.model.head.dtype == "float32"
    assert "score" in config.instantiate().learner.specs["head"]


def test_models_unknown_to_transformers_are_not_exported():
    model = small.llama()
    scored = scores.with_score_head(model, 2)
    facts, _ = families.export_config(scored)
    assert facts["architectures"] == ["LlamaForSequenceClassification"]
    scored.head.bias = True
    with pytest.raises(ValueError, match=r"head\.bias = True"):
        families.export_config(scored)
    with pytest.raises(ValueError, match="no OlmoeForCausalLM that scores"):
        scores.add_score_head_facts({"architectures": ["OlmoeForCausalLM"]}, 2)
