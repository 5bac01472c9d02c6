"""Which parameters learn, and with which optimizer: rules by path, and the groups that follow from them.

May import: framework.config, framework.layout, framework.optimizers, framework.units.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from framework.config import Config
from framework.config_schema import ShortNames
from framework.layout import Nested, flatten
from framework.optimizers.named import OPTIMIZERS
from framework.units import Group

Optimizer = Annotated[Config, ShortNames(OPTIMIZERS)]
FROZEN, DEFAULT = "frozen", "default"


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
        ValueError: a pattern matches nothing. ConfigError: a field that the optimizer does not have.
    """
    flat, configs = flatten(specs), {DEFAULT: optimizer}
    labels = {path: DEFAULT if spec.trainable else FROZEN for path, spec in flat.items()}
    taken = {path for path, spec in flat.items() if not spec.trainable}
    for index, rule in enumerate(rules):
        matched = [path for path in flat if rule.pattern.search(path)]
        if not matched:
            raise ValueError(
                f"learner.rules.{index}.pattern: {rule.pattern.pattern!r} matches none of {len(flat)} parameters, "
                f"such as {list(flat)[:3]}"
            )
        if not rule.freeze:
            own = optimizer.copy() if rule.optimizer is None else rule.optimizer
            for field, value in rule.set.items():
                own.set_path(field, value)
            configs[f"rule{index}"] = own
        labels |= {path: FROZEN if rule.freeze else f"rule{index}" for path in matched if path not in taken}
        taken.update(matched)
    return labels, configs


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
