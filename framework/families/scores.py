"""Models that score sequences: transformers' ...ForSequenceClassification of a family's language model.

They have the language model's tensors except lm_head.weight, plus score.weight. Their config.json has the names of
the labels; a reward model has one label.
"""

from __future__ import annotations

from plimsoll.framework.config import Config, config_for, get_target
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.registry import FAMILIES
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layers.score_head import ScoreHead

# The language model architecture of each scoring architecture.
LANGUAGE_MODELS = {scored: language for family in FAMILIES for scored, language in family.scored.items()}


def is_scored(facts: dict[str, object]) -> bool:
    """Return whether a config.json describes a model that scores sequences."""
    architectures = facts.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        return False
    return isinstance(architectures[0], str) and architectures[0] in LANGUAGE_MODELS


def language_facts(facts: dict[str, object]) -> dict[str, object]:
    """Return the config.json of the underlying language model; that of a language model is returned unchanged."""
    if not is_scored(facts):
        return facts
    (architecture,) = ConfigFacts(facts).any("architectures")
    return {**facts, "architectures": [LANGUAGE_MODELS[architecture]]}


def add_score_head_facts(facts: dict[str, object], num_labels: int) -> dict[str, object]:
    """Return the config.json of a model with a score head, given that of its language model or of such a model.

    Raises:
        ValueError: transformers has no such model.
    """
    if is_scored(facts):
        return facts
    (architecture,) = ConfigFacts(facts).any("architectures")
    for scored, language in LANGUAGE_MODELS.items():
        if language == architecture:
            return {**facts, "architectures": [scored], **label_facts([f"LABEL_{i}" for i in range(num_labels)])}
    raise ValueError(f"head.num_labels = {num_labels}: transformers has no {architecture} that scores sequences")


def label_facts(names: list[str]) -> dict[str, object]:
    """Return the fields of config.json for labels with these names."""
    id2label = {str(number): name for number, name in enumerate(names)}
    return {"id2label": id2label, "label2id": {name: number for number, name in enumerate(names)}}


def label_names(facts: dict[str, object]) -> list[str]:
    """Return the names of the labels in a config.json, as transformers reads it.

    Raises:
        ValueError: numbers and names contradict each other, or the labels are not mutually exclusive.
    """
    fields = ConfigFacts(facts)
    part = fields.any("id2label", None)
    if part is None:
        # transformers' default, which it does not write to the file.
        names = [f"LABEL_{number}" for number in range(fields.size("num_labels", 2))]
    else:
        if not isinstance(part, dict) or not all(isinstance(name, str) for name in part.values()):
            raise fields.error("id2label", "an object of names by number")
        if sorted(part) != sorted(str(number) for number in range(len(part))) or not part:
            raise fields.error("id2label", "the numbers 0, 1, ... as keys")
        names = [part[str(number)] for number in range(len(part))]
        if fields.any("num_labels", None) not in (None, len(names)):
            raise fields.error("num_labels", f"{len(names)}, as many as id2label has")
        if len(set(names)) < len(names):
            raise fields.error("id2label", "different names")
    kind = fields.any("problem_type", None)
    allowed = (None, "regression") if len(names) == 1 else (None, "single_label_classification")
    if kind not in allowed:
        raise fields.error("problem_type", " or ".join("null" if one is None else one for one in allowed))
    return names


def has_score_head(model: Config) -> bool:
    """Return whether a model's config has a score head."""
    return get_target(model.head) is ScoreHead


def with_score_head(model: Config, num_labels: int) -> Config:
    """Return a copy of a language model's config with a score head instead of its head."""
    scored = model.copy()
    scored.head = config_for(ScoreHead, num_labels=num_labels, norm=model.head.norm)
    return scored


def with_language_head(model: Config) -> Config:
    """Return a copy of the config of a model with a score head, with a language model head instead."""
    language = model.copy()
    language.head = config_for(LMHead, norm=model.head.norm)
    return language
