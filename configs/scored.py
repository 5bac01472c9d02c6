"""What a config of published weights becomes where the model scores sequences: a reward model, or a classifier."""

from __future__ import annotations

from typing import Any

from configs.families import scores
from framework.config import Config, config_for
from framework.data.scored import LabelledSource, RankedSource
from framework.objectives.rewards import Classification, PairwiseReward

_FILE = "data/scored.jsonl"


def as_reward_model(config: Config, facts: dict[str, Any]) -> Config:
    """Changes the config of published weights into that of a reward model, and returns it.

    Pairs are read from data/scored.jsonl, a twentieth of them for validation. The score head of a language model is
    drawn.

    Args:
        config: of a language model, or of a reward model.
        facts: config.json of the published weights.

    Raises:
        ValueError: the weights are of a classifier.
    """
    if scores.is_scored(facts) and len(scores.label_names(facts)) != 1:
        count = len(scores.label_names(facts))
        raise ValueError(f"config.json: its model has {count} labels; expected one, that of a reward model")
    _give_head(config, facts, num_labels=1)
    config.model.head.objective = config_for(PairwiseReward)
    _give_data(config, facts, config_for(RankedSource, paths=[_FILE]), "pairs")
    return config


def as_classifier(config: Config, facts: dict[str, Any]) -> Config:
    """Changes the config of published weights into that of a classifier, and returns it.

    Rows are read from data/scored.jsonl, a twentieth of them for validation. The score head of a language model is
    drawn, with two labels, 0 and 1; `--data` finds those of a file.

    Args:
        config: of a language model, or of a classifier.
        facts: config.json of the published weights.

    Raises:
        ValueError: the weights are of a reward model.
    """
    names = scores.label_names(facts) if scores.is_scored(facts) else ["0", "1"]
    if len(names) < 2:
        raise ValueError("config.json: its model has one label; expected those of a classifier")
    _give_head(config, facts, num_labels=len(names))
    config.model.head.objective = config_for(Classification)
    _give_data(config, facts, config_for(LabelledSource, paths=[_FILE], classes=names), "labelled")
    return config


def as_published(config: Config, facts: dict[str, Any]) -> Config:
    """As `as_reward_model` or `as_classifier`, by the number of labels; a language model's config stays."""
    if not scores.is_scored(facts):
        return config
    return as_reward_model(config, facts) if len(scores.label_names(facts)) == 1 else as_classifier(config, facts)


def _give_head(config: Config, facts: dict[str, Any], num_labels: int) -> None:
    """Puts a score head into the config; that of published weights is there already."""
    if not scores.is_scored(facts):
        config.model = scores.with_score_head(config.model, num_labels)
        config.pretrained.draws_head = True
    if config.model.lora is not None:
        # It learns whole, beside adapters in float32: in bfloat16 small steps would be lost.
        config.model.head.dtype = "float32"


def _give_data(config: Config, facts: dict[str, Any], source: Config, name: str) -> None:
    """Has the config read such a source, a part of it for validation."""
    source.pad_token_id = facts.get("pad_token_id")
    train_source, validation_source = source.copy(), source.copy()
    train_source.split, validation_source.split = "train", "validation"
    config.data.source = train_source
    config.data.validation = {name: validation_source}
