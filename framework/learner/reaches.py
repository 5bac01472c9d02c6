"""The update locality of a group's optimizer, measured once per process for each kind of layer.

A process builds the same experiment more than once, to plan it and to run it, and a measurement compiles programs.
"""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.framework.layout import Nested, flatten
from plimsoll.framework.learner.instances import Instance
from plimsoll.framework.optimizers.dependence import keeps_apart
from plimsoll.framework.optimizers.reach import Reach, probe


class _Kind(NamedTuple):
    """Cache key of a measurement: the optimizer's config as JSON, and paths and shapes of the layer's parameters."""

    config: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]


# Results of `probe` in this process.
_reaches: dict[_Kind, Reach] = {}


def reach_of(instance: Instance, unit_specs: Nested) -> Reach:
    """Return the smallest part of a layer that an optimizer can update independently; measured on first use.

    Args:
        instance: the optimizer instance.
        unit_specs: the parameters of the layer.
    """
    shapes = tuple((path, spec.shape) for path, spec in flatten(unit_specs).items())
    kind = _Kind(instance.config, shapes)
    if kind not in _reaches:
        _reaches[kind] = probe(instance.optimizer, unit_specs)
    return _reaches[kind]


def check_parameters_apart(name: str, instance: Instance, unit_specs: Nested) -> None:
    """Check that the update of one parameter does not depend on gradients of other parameters.

    Args:
        name: the label of the optimizer.
        instance: the optimizer instance.
        unit_specs: the parameters of the layer.

    Raises:
        ValueError: it does.
    """
    # The measurement compiles programs; for most optimizers, inspecting the update is enough.
    if keeps_apart(instance.optimizer, unit_specs):
        return
    if reach_of(instance, unit_specs) == "global":
        raise ValueError(
            f"learner.optimizer ({name}): the update of one parameter depends on the gradients of "
            "others (a global norm or finiteness test inside a chain, say). Each layer has an optimizer of its "
            "own, so this would not compute what it says. Use learner.clip and learner.nonfinite for that, or "
            "learner.scope = model, which has one optimizer for all (with memory.update = after_backward)"
        )
