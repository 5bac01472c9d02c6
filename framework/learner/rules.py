"""Which parameters learn, and with which optimizer: rules by path, and the groups that follow from them."""

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
FROZEN, DEFAULT = "frozen", "default"


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
        self.freeze, self.optimizer, self.set = freeze, optimizer, set


def label(specs: Nested, optimizer: Config, rules: list[Rule]) -> tuple[dict[str, str], dict[str, Config]]:
    """({path: label of the optimizer that it gets, or FROZEN}, {label: config of the optimizer}).

    Raises:
        ValueError: a pattern matches nothing, or only what earlier rules decide. ConfigError: a field that the
            optimizer does not have, or a value that it cannot work with.
    """
    check_arguments(optimizer, "learner.optimizer")
    flat, configs = flatten(specs), {DEFAULT: optimizer}
    labels = {path: DEFAULT if spec.trainable else FROZEN for path, spec in flat.items()}
    decided_by: dict[str, int] = {}  # the index of the rule that took a parameter
    for index, rule in enumerate(rules):
        matched = [path for path in flat if rule.pattern.search(path)]
        if not matched:
            raise ValueError(
                f"learner.rules.{index}.pattern: {rule.pattern.pattern!r} matches none of {len(flat)} parameters, "
                f"such as {list(flat)[:3]}"
            )
        # Weights that adapters have frozen count for nothing: a rule for them (no decay of norms) has nothing to do.
        trained = [path for path in matched if flat[path].trainable]
        taken = [path for path in trained if path not in decided_by]
        if trained and not taken:
            raise ValueError(_shadowed(index, rules, trained, decided_by))
        if not rule.freeze:
            configs[f"rule{index}"] = _optimizer_of(rule, optimizer, f"learner.rules.{index}")
        labels |= dict.fromkeys(taken, FROZEN if rule.freeze else f"rule{index}")
        decided_by |= dict.fromkeys(taken, index)
    return labels, configs


def _optimizer_of(rule: Rule, default: Config, path: str) -> Config:
    """The config of the optimizer that a rule gives. Raises ConfigError."""
    if rule.optimizer is not None:
        check_arguments(rule.optimizer, f"{path}.optimizer")
        return rule.optimizer
    changed = default.copy()
    for field, value in rule.set.items():
        changed.set_path(field, value)
    check_arguments(changed, f"{path}.set")
    return changed


def _shadowed(index: int, rules: list[Rule], matched: list[str], decided_by: dict[str, int]) -> str:
    """What is wrong with a rule that decides nothing: earlier ones have all that it matches."""
    earlier = sorted({decided_by[path] for path in matched})
    names = ", ".join(f"rules.{one} ({rules[one].pattern.pattern!r})" for one in earlier)
    return (
        f"learner.rules.{index}.pattern: {rules[index].pattern.pattern!r} decides nothing: all that it matches "
        f"({len(matched)} parameters, such as {matched[0]}) has been taken by {names}, as the first rule that matches "
        "decides; expected the narrower rule first"
    )


def groups(trained: Nested, labels: dict[str, str], *, whole: bool) -> list[Group]:
    """The groups of the parameters that learn: by stage and label, or, if `whole`, by label alone."""
    flat = flatten(trained)
    if whole:
        names = dict.fromkeys(labels[path] for path in labels if path in flat)
        return [Group("model", one, tuple(p for p in labels if labels[p] == one), None) for one in names]
    paths: dict[tuple[str, str], list[str]] = {}
    for path, one in labels.items():
        if path in flat:
            stage, rest = path.split("/", 1)
            paths.setdefault((stage, one), []).append(rest)
    found = []
    for (stage, one), rest in paths.items():
        lengths = {flat[f"{stage}/{path}"].num_layers for path in rest}
        assert len(lengths) == 1, f"stage {stage} mixes stacked and single parameters"
        found.append(Group(stage, one, tuple(rest), lengths.pop()))
    return found
