"""Optimizer instances: the optimizers that a config names, fitted to the parameters of each group.

The update locality of an optimizer is measured once per process for each kind of layer: a process builds the same
experiment more than once, to plan it and to run it, and a measurement compiles programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from plimsoll.framework.config import Config
from plimsoll.framework.layout import Nested, flatten
from plimsoll.framework.learner.rules import DEFAULT
from plimsoll.framework.optimizers.partition import PartitionedGradientTransformation, add_partition
from plimsoll.framework.optimizers.update_locality import UpdateLocality, probe, proves_independence

# The learning rate as a function of the number of previous updates.
LearningRate = Callable[[ArrayLike], jax.Array]
# A group's (stage, label): several stages may use the same label.
GroupKey = tuple[str, str]
# Results of `probe` in this process, by the optimizer's config as JSON, and paths and shapes of a layer's parameters.
_localities: dict[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], UpdateLocality] = {}


@dataclass(frozen=True, eq=False)
class OptimizerInstance:
    """An optimizer for the layers of a group.

    Attributes:
        optimizer: the optimizer, fitted to the parameters of one layer.
        config: the optimizer's config, as JSON.
        learning_rate: the learning rate in the config; None if it has none.
        layer_specs: the parameters of one layer, in the dtype of their update.
    """

    optimizer: PartitionedGradientTransformation
    config: str
    learning_rate: LearningRate | None
    layer_specs: Nested

    def measure_locality(self) -> UpdateLocality:
        """Return the smallest part of a layer that the optimizer can update independently; measured on first use."""
        shapes = tuple((path, spec.shape) for path, spec in flatten(self.layer_specs).items())
        key = (self.config, shapes)
        if key not in _localities:
            _localities[key] = probe(self.optimizer, self.layer_specs)
        return _localities[key]

    def check_independent_updates(self, label: str) -> None:
        """Check that the update of one parameter does not depend on gradients of other parameters.

        Args:
            label: the label of the optimizer.

        Raises:
            ValueError: the update depends on them.
        """
        # The measurement compiles programs; for most optimizers, inspecting the update is enough.
        if proves_independence(self.optimizer, self.layer_specs):
            return
        if self.measure_locality() == "global":
            raise ValueError(
                f"learner.optimizer ({label}): the update of one parameter depends on the gradients of "
                "others, for example through a global norm or a finiteness test inside a chain. Each layer has its own "
                "optimizer instance, which would see only the gradients of that layer. Use learner.clip and "
                "learner.nonfinite for that, or learner.scope = model, which has one instance for all parameters (with "
                "memory.update = after_backward)"
            )


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
        built = config.instantiate()
        if not isinstance(built, PartitionedGradientTransformation | optax.GradientTransformation):
            raise ValueError(f"learner.optimizer: expected an optax transformation, given {type(built).__name__}")
        optimizer = add_partition(built)
        specs_by_stage = {stage: specs for (stage, group_label), specs in layer_specs.items() if group_label == label}
        # An optimizer that offloads its state checks its pattern in `partition`. The pattern is written for the whole
        # model: it must match in at least one stage, not in each. `without_transfers`, used below, does not check it.
        if optimizer.without_transfers is not None and specs_by_stage:
            optimizer.partition(specs_by_stage)
        for stage, specs in specs_by_stage.items():
            fitted = optimizer.fit_to_specs(specs) if optimizer.fit_to_specs is not None else optimizer
            # The layout, not the optimizer, moves the state.
            layer_optimizer = fitted.without_transfers or fitted
            instances[stage, label] = OptimizerInstance(layer_optimizer, config.to_json(), learning_rates[label], specs)
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


def _learning_rate_field(optimizer: Config) -> Config | float | None:
    """Return the field `learning_rate` of an optimizer's config; None if it has none."""
    # A wrapper, such as offload_optimizer, holds the optimizer with the learning rate in its field `optimizer`.
    while "optimizer" in optimizer:
        optimizer = optimizer.optimizer
    return optimizer.get("learning_rate") if "learning_rate" in optimizer else None
