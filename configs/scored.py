"""Turns the config of published weights into that of a model that scores sequences: a reward model or a classifier."""

from __future__ import annotations

from typing import Any

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.scored import LabeledSource, RankedSource
from plimsoll.framework.families import scores
from plimsoll.framework.objectives.rewards import Classification, PairwiseReward

_FILE = "data/scored.jsonl"


def as_reward_model(config: Config, facts: dict[str, Any]) -> Config:
    """Turn the config of published weights into that of a reward model, in place, and return it.

    Pairs are read from data/scored.jsonl, a twentieth of them for validation. For a language model, the score head is
    initialized randomly.

    Args:
        config: config of a language model or of a reward model.
        facts: config.json of the published weights.

    Raises:
        ValueError: the weights belong to a classifier.
    """
    if scores.is_scored(facts) and len(scores.label_names(facts)) != 1:
        count = len(scores.label_names(facts))
        raise ValueError(f"config.json: its model has {count} labels; expected one, as in a reward model")
    _add_score_head(config, facts, num_labels=1)
    config.model.head.objective = config_for(PairwiseReward)
    _set_data(config, facts, config_for(RankedSource, paths=[_FILE]), "pairs")
    return config


def as_classifier(config: Config, facts: dict[str, Any]) -> Config:
    """Turn the config of published weights into that of a classifier, in place, and return it.

    Rows are read from data/scored.jsonl, a twentieth of them for validation. For a language model, the score head is
    initialized randomly, with two labels, 0 and 1; `--data` detects the labels of a file.

    Args:
        config: config of a language model or of a classifier.
        facts: config.json of the published weights.

    Raises:
        ValueError: the weights belong to a reward model.
    """
    names = scores.label_names(facts) if scores.is_scored(facts) else ["0", "1"]
    if len(names) < 2:
        raise ValueError("config.json: its model has one label; expected at least two, as in a classifier")
    _add_score_head(config, facts, num_labels=len(names))
    config.model.head.objective = config_for(Classification)
    _set_data(config, facts, config_for(LabeledSource, paths=[_FILE], classes=names), "labelled")
    return config


def as_published(config: Config, facts: dict[str, Any]) -> Config:
    """Apply `as_reward_model` or `as_classifier`, by the number of labels; a language model's config is unchanged."""
    if not scores.is_scored(facts):
        return config
    return as_reward_model(config, facts) if len(scores.label_names(facts)) == 1 else as_classifier(config, facts)


def _add_score_head(config: Config, facts: dict[str, Any], num_labels: int) -> None:
    """Put a score head into the config, unless the published weights already have one."""
    if not scores.is_scored(facts):
        config.model = scores.with_score_head(config.model, num_labels)
        config.pretrained.draws_head = True
    if config.model.lora is not None:
        # The head is trained in full, next to float32 adapters; in bfloat16 small steps would be lost.
        config.model.head.dtype = "float32"


def _set_data(config: Config, facts: dict[str, Any], source: Config, name: str) -> None:
    """Make the config read this source, with a part of it for validation."""
    source.pad_token_id = facts.get("pad_token_id")
    train_source, validation_source = source.copy(), source.copy()
    train_source.split, validation_source.split = "train", "validation"
    config.data.source = train_source
    config.data.validation = {name: validation_source}
