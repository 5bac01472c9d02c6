"""Instances of optimizers: what a config names, fitted to the parameters of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from framework.config import Config
from framework.layout import Nested
from framework.learner.rules import DEFAULT
from framework.optimizers.partition import PartitionedGradientTransformation, partitioned

# The learning rate by the number of updates before.
LearningRate = Callable[[Any], Any]
# A group's (stage, label): one label may be used in several stages.
GroupKey = tuple[str, str]


class Instance(NamedTuple):
    """An optimizer for the units of a group.

    Attributes:
      optimizer: fitted to the parameters of a unit.
      config: the optimizer's config, as JSON.
      learning_rate: that the config names; None where it names none.
    """

    optimizer: PartitionedGradientTransformation
    config: str
    learning_rate: LearningRate | None


def instances_of(
    configs: dict[str, Config],
    learning_rates: dict[str, LearningRate | None],
    unit_specs: dict[GroupKey, Nested],
) -> dict[GroupKey, Instance]:
    """Instantiates each optimizer, and fits it to each of its groups.

    Args:
        configs, learning_rates: of the optimizers, by label.
        unit_specs: for each group, the parameters of one unit.

    Raises:
        ValueError: a config is of no optax transformation, or it moves state that none of its groups has.
    """
    instances = {}
    for label, config in configs.items():
        optimizer = _build(config)
        specs_by_stage = {stage: specs for (stage, group_label), specs in unit_specs.items() if group_label == label}
        _check_moves(optimizer, specs_by_stage)
        for stage, specs in specs_by_stage.items():
            fitted_optimizer = _fitted(optimizer, specs)
            instances[stage, label] = Instance(fitted_optimizer, config.to_json(), learning_rates[label])
    return instances


def learning_rate_of(optimizer: Config) -> LearningRate | None:
    """The learning rate that an optimizer's config names; None where it names none.

    Reports show it, and clip_mode update_rms multiplies its bound by it: the optimizer itself has the rate from its
    own arguments.
    """
    rate = _learning_rate_field(optimizer)
    if isinstance(rate, Config):
        return rate.instantiate()
    if rate is None:
        return None
    return lambda count: jnp.asarray(rate, jnp.float32)


def distinct_learning_rates(
    configs: dict[str, Config],
    learning_rates: dict[str, LearningRate | None],
    labels: Iterable[str],
) -> dict[str, LearningRate]:
    """The learning rates that reports show, by label: the default optimizer's, and those of rules that have another.

    Args:
        configs, learning_rates: of the optimizers, by label.
        labels: of the optimizers that update something.
    """
    default_field = _learning_rate_field(configs[DEFAULT])
    rates = {}
    for label in (DEFAULT, *sorted(set(labels) - {DEFAULT})):
        rate = learning_rates[label]
        # Most rules set another field, such as the weight decay.
        is_same = label != DEFAULT and _learning_rate_field(configs[label]) == default_field
        if rate is not None and not is_same:
            rates[label] = rate
    return rates


def _learning_rate_field(optimizer: Config) -> Any:
    """The field `learning_rate` of an optimizer's config; None where there is none."""
    # A wrapper, such as offload_optimizer, has the optimizer with the learning rate in its field `optimizer`.
    while "optimizer" in optimizer:
        optimizer = optimizer.optimizer
    return optimizer.get("learning_rate") if "learning_rate" in optimizer else None


def _build(config: Config) -> PartitionedGradientTransformation:
    """The optimizer of a config, with its partition. Raises ValueError for what is no optax transformation."""
    optimizer = config.instantiate()
    if not isinstance(optimizer, PartitionedGradientTransformation | optax.GradientTransformation):
        raise ValueError(f"learner.optimizer: expected an optax transformation, given {type(optimizer).__name__}")
    return partitioned(optimizer)


def _check_moves(optimizer: PartitionedGradientTransformation, unit_specs: dict[str, Nested]) -> None:
    """Raises ValueError where an optimizer that moves its state names what none of its groups has.

    In the learner `at_rest` leaves the moves to the layout, and checks no pattern. The optimizer's pattern is of the
    whole model: it must match in one of the stages, not in each.

    Args:
        optimizer: as its config builds it.
        unit_specs: by stage, the parameters of one unit of each group that it updates.
    """
    if optimizer.at_rest is not None and unit_specs:
        optimizer.partition(unit_specs)


def _fitted(optimizer: PartitionedGradientTransformation, unit_specs: Nested) -> PartitionedGradientTransformation:
    """The optimizer for units with these parameters, which leaves the moves of its state to the layout."""
    optimizer_of_unit = optimizer
    if optimizer.of_specs is not None:
        optimizer_of_unit = optimizer.of_specs(unit_specs)
    return optimizer_of_unit.at_rest or optimizer_of_unit
