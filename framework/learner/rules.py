"""Rules by path say which parameters learn, and with which optimizer; groups of parameters follow from them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from framework.config import Config, component
from framework.config.schema import ShortNames
from framework.layout import Nested, flatten
from framework.learner.units import Group
from framework.optimizers.arguments import check_arguments
from framework.optimizers.named import OPTIMIZERS

Optimizer = Annotated[Config, ShortNames(OPTIMIZERS)]
# Labels of parameters: those that do not learn, and those of the learner's optimizer, which no rule changes.
FROZEN = "frozen"
DEFAULT = "default"


@component
class Rule:
    """What differs for the parameters whose path matches; the first matching rule decides.

    Args:
        pattern: a regex, searched in paths such as "stack/block0/attention/query/weight".
        freeze: no gradient, no optimizer state, no average.
        optimizer: another optimizer for these parameters.
        set: fields of the learner's optimizer that differ, {"weight_decay": 0.0} say.
    """

    def __init__(
        self,
        *,
        pattern: str,
        freeze: bool = False,
        optimizer: Optimizer | None = None,
        set: dict[str, Any] = {},  # noqa: B006  (a config's default is copied)
    ):
        if freeze + (optimizer is not None) + bool(set) != 1:
            raise ValueError(f"rule {pattern!r}: expected exactly one of freeze, optimizer and set")
        try:
            self.pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"rule pattern {pattern!r} is no regular expression: {error}") from error
        self.freeze = freeze
        self.optimizer = optimizer
        self.set = set


def label(
    specs: Nested,
    optimizer: Config,
    rules: list[Rule],
) -> tuple[dict[str, str], dict[str, Config]]:
    """Applies the rules to all parameters.

    Returns:
        ({path: label of the parameter's optimizer, or FROZEN}, {label: config of the optimizer}).

    Raises:
        ValueError: a pattern matches nothing, or only what earlier rules decide. ConfigError: a field that the
            optimizer does not have, or a value that it cannot work with.
    """
    check_arguments(optimizer, "learner.optimizer")
    flat_specs = flatten(specs)
    configs = {DEFAULT: optimizer}
    labels = {}
    for path, spec in flat_specs.items():
        labels[path] = DEFAULT if spec.trainable else FROZEN
    # The index of the rule that decides on a parameter.
    decided_by: dict[str, int] = {}
    for index, rule in enumerate(rules):
        matched = [path for path in flat_specs if rule.pattern.search(path)]
        if not matched:
            raise ValueError(
                f"learner.rules.{index}.pattern: {rule.pattern.pattern!r} matches none of {len(flat_specs)} "
                f"parameters, such as {list(flat_specs)[:3]}"
            )
        # Weights that adapters have frozen count for nothing: a rule for them (no decay of norms) has nothing to do.
        trained = [path for path in matched if flat_specs[path].trainable]
        taken = [path for path in trained if path not in decided_by]
        if trained and not taken:
            raise ValueError(_shadowed(index, rules, trained, decided_by))
        rule_label = FROZEN
        if not rule.freeze:
            rule_label = f"rule{index}"
            configs[rule_label] = _optimizer_of(rule, optimizer, f"learner.rules.{index}")
        labels |= dict.fromkeys(taken, rule_label)
        decided_by |= dict.fromkeys(taken, index)
    return labels, configs


def _optimizer_of(rule: Rule, default: Config, path: str) -> Config:
    """The config of the optimizer that a rule gives. Raises ConfigError."""
    if rule.optimizer is not None:
        check_arguments(rule.optimizer, f"{path}.optimizer")
        return rule.optimizer
    config = default.copy()
    for field, value in rule.set.items():
        config.set_path(field, value)
    check_arguments(config, f"{path}.set")
    return config


def _shadowed(
    index: int,
    rules: list[Rule],
    matched: list[str],
    decided_by: dict[str, int],
) -> str:
    """The error message for a rule that decides nothing, because earlier ones decide on all that it matches."""
    earlier = sorted({decided_by[path] for path in matched})
    names = ", ".join(f"rules.{number} ({rules[number].pattern.pattern!r})" for number in earlier)
    return (
        f"learner.rules.{index}.pattern: {rules[index].pattern.pattern!r} decides nothing: all that it matches "
        f"({len(matched)} parameters, such as {matched[0]}) has been taken by {names}, as the first rule that matches "
        "decides; expected the narrower rule first"
    )


def groups(
    trained: Nested,
    labels: dict[str, str],
    *,
    across_stages: bool,
) -> list[Group]:
    """The groups of the parameters that learn.

    Args:
        trained: the specs of the parameters that learn.
        labels: by path, the label of each parameter of the model.
        across_stages: group by label alone, not by stage and label.
    """
    flat_specs = flatten(trained)
    if across_stages:
        return _groups_across_stages(flat_specs, labels)
    paths_by_group: dict[tuple[str, str], list[str]] = {}
    for path, group_label in labels.items():
        if path in flat_specs:
            stage, path_in_stage = path.split("/", 1)
            paths_by_group.setdefault((stage, group_label), []).append(path_in_stage)
    stage_groups = []
    for (stage, group_label), paths in paths_by_group.items():
        lengths = {flat_specs[f"{stage}/{path}"].num_layers for path in paths}
        # One vmap over the layers updates the group, so its parameters must be stacked alike.
        assert len(lengths) == 1, f"stage {stage} mixes stacked and single parameters"
        stage_groups.append(Group(stage, group_label, tuple(paths), lengths.pop()))
    return stage_groups


def _groups_across_stages(flat_specs: Nested, labels: dict[str, str]) -> list[Group]:
    """A group for each label, of the parameters of all stages."""
    # A dict keeps the order of the labels, where a set would not.
    group_labels = dict.fromkeys(labels[path] for path in labels if path in flat_specs)
    model_groups = []
    for group_label in group_labels:
        paths = tuple(path for path in labels if labels[path] == group_label)
        model_groups.append(Group("model", group_label, paths, None))
    return model_groups
