"""Optimizer instances: the optimizers that a config names, fitted to the parameters of each group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from plimsoll.framework.config import Config
from plimsoll.framework.layout import Nested
from plimsoll.framework.learner.rules import DEFAULT
from plimsoll.framework.optimizers.partition import PartitionedGradientTransformation, add_partition

# The learning rate as a function of the number of previous updates.
LearningRate = Callable[[Any], Any]
# A group's (stage, label): several stages may use the same label.
GroupKey = tuple[str, str]


class OptimizerInstance(NamedTuple):
    """An optimizer for the layers of a group.

    Attributes:
        optimizer: the optimizer, fitted to the parameters of one layer.
        config: the optimizer's config, as JSON.
        learning_rate: the learning rate in the config; None if it has none.
    """

    optimizer: PartitionedGradientTransformation
    config: str
    learning_rate: LearningRate | None


def make_instances(
    configs: dict[str, Config], learning_rates: dict[str, LearningRate | None], layer_specs: dict[GroupKey, Nested]
) -> dict[GroupKey, OptimizerInstance]:
    """Instantiate each optimizer, and fit it to each of its groups.

    Args:
        configs, learning_rates: configs and learning rates of the optimizers, by label.
        layer_specs: for each group, the parameters of one layer.

    Raises:
        ValueError: a config does not build an optax transformation, or it offloads state that none of its groups has.
    """
    instances = {}
    for label, config in configs.items():
        optimizer = _build(config)
        specs_by_stage = {stage: specs for (stage, group_label), specs in layer_specs.items() if group_label == label}
        _check_offload_pattern(optimizer, specs_by_stage)
        for stage, specs in specs_by_stage.items():
            fitted_optimizer = _fit_optimizer(optimizer, specs)
            instances[stage, label] = OptimizerInstance(fitted_optimizer, config.to_json(), learning_rates[label])
    return instances


def get_learning_rate(optimizer: Config) -> LearningRate | None:
    """Return the learning rate in an optimizer's config; None if it has none.

    It is shown in reports, and clip_mode update_rms multiplies its bound by it. The optimizer itself gets the rate
    from its own arguments.
    """
    rate = _learning_rate_field(optimizer)
    if isinstance(rate, Config):
        return rate.instantiate()
    if rate is None:
        return None
    return lambda count: jnp.asarray(rate, jnp.float32)


def distinct_learning_rates(
    configs: dict[str, Config], learning_rates: dict[str, LearningRate | None], labels: Iterable[str]
) -> dict[str, LearningRate]:
    """Return the learning rates to report, by label: the default one, and those of rules with a different rate.

    Args:
        configs, learning_rates: configs and learning rates of the optimizers, by label.
        labels: labels of the optimizers that update something.
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
    """Return the field `learning_rate` of an optimizer's config; None if it has none."""
    # A wrapper, such as offload_optimizer, holds the optimizer with the learning rate in its field `optimizer`.
    while "optimizer" in optimizer:
        optimizer = optimizer.optimizer
    return optimizer.get("learning_rate") if "learning_rate" in optimizer else None


def _build(config: Config) -> PartitionedGradientTransformation:
    """Build the optimizer of a config, with its partition.

    Raises:
        ValueError: the config does not build an optax transformation.
    """
    optimizer = config.instantiate()
    if not isinstance(optimizer, PartitionedGradientTransformation | optax.GradientTransformation):
        raise ValueError(f"learner.optimizer: expected an optax transformation, given {type(optimizer).__name__}")
    return add_partition(optimizer)


def _check_offload_pattern(optimizer: PartitionedGradientTransformation, layer_specs: dict[str, Nested]) -> None:
    """Check that an optimizer that offloads its state names state that at least one of its groups has.

    In the learner, the optimizer's `without_transfers` variant leaves transfers to the layout and does not check the
    pattern. The pattern is written for the whole model: it must match in at least one stage, not in each.

    Args:
        optimizer: the optimizer as its config builds it.
        layer_specs: by stage, the parameters of one layer of each group that it updates.

    Raises:
        ValueError: the pattern matches nothing in any stage.
    """
    if optimizer.without_transfers is not None and layer_specs:
        optimizer.partition(layer_specs)


def _fit_optimizer(
    optimizer: PartitionedGradientTransformation, layer_specs: Nested
) -> PartitionedGradientTransformation:
    """Return the optimizer for layers with these parameters; the layout, not the optimizer, moves its state."""
    layer_optimizer = optimizer
    if optimizer.fit_to_specs is not None:
        layer_optimizer = optimizer.fit_to_specs(layer_specs)
    return layer_optimizer.without_transfers or layer_optimizer
