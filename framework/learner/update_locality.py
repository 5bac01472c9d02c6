"""The update locality of a group's optimizer, measured once per process for each kind of layer.

A process builds the same experiment more than once, to plan it and to run it, and a measurement compiles programs.
"""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.framework.layout import Nested, flatten
from plimsoll.framework.learner.optimizer_instances import OptimizerInstance
from plimsoll.framework.optimizers.update_dependence import proves_independence
from plimsoll.framework.optimizers.update_locality import UpdateLocality, probe


class _CacheKey(NamedTuple):
    """Cache key of a measurement: the optimizer's config as JSON, and paths and shapes of the layer's parameters."""

    config: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]


# Results of `probe` in this process.
_localities: dict[_CacheKey, UpdateLocality] = {}


def measure_update_locality(instance: OptimizerInstance, layer_specs: Nested) -> UpdateLocality:
    """Return the smallest part of a layer that an optimizer can update independently; measured on first use.

    Args:
        instance: the optimizer instance.
        layer_specs: the parameters of the layer.
    """
    shapes = tuple((path, spec.shape) for path, spec in flatten(layer_specs).items())
    kind = _CacheKey(instance.config, shapes)
    if kind not in _localities:
        _localities[kind] = probe(instance.optimizer, layer_specs)
    return _localities[kind]


def check_independent_updates(name: str, instance: OptimizerInstance, layer_specs: Nested) -> None:
    """Check that the update of one parameter does not depend on gradients of other parameters.

    Args:
        name: the label of the optimizer.
        instance: the optimizer instance.
        layer_specs: the parameters of the layer.

    Raises:
        ValueError: the update depends on them.
    """
    # The measurement compiles programs; for most optimizers, inspecting the update is enough.
    if proves_independence(instance.optimizer, layer_specs):
        return
    if measure_update_locality(instance, layer_specs) == "global":
        raise ValueError(
            f"learner.optimizer ({name}): the update of one parameter depends on the gradients of "
            "others, for example through a global norm or a finiteness test inside a chain. Each layer has its own "
            "optimizer instance, which would see only the gradients of that layer. Use learner.clip and "
            "learner.nonfinite for that, or learner.scope = model, which has one instance for all parameters (with "
            "memory.update = after_backward)"
        )
