"""How far an optimizer looks in the units of a group, tried out once in a process for each kind of unit.

The same experiment is built more than once in a process, to plan it and to run it, and a trial compiles programs.
"""

from __future__ import annotations

from typing import NamedTuple

from framework.layout import Nested, flatten
from framework.learner.instances import Instance
from framework.optimizers.dependence import keeps_apart
from framework.optimizers.reach import Reach, probe


class _Kind(NamedTuple):
    """What decides on a trial's result: the optimizer's config as JSON, paths and shapes of the unit's parameters."""

    config: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]


# The results of `probe` in this process.
_reaches: dict[_Kind, Reach] = {}


def reach_of(instance: Instance, unit_specs: Nested) -> Reach:
    """The smallest part of a unit that an optimizer can update by itself; tried out on first use.

    Args:
        instance: of the optimizer.
        unit_specs: the parameters of the unit.
    """
    shapes = tuple((path, spec.shape) for path, spec in flatten(unit_specs).items())
    kind = _Kind(instance.config, shapes)
    if kind not in _reaches:
        _reaches[kind] = probe(instance.optimizer, unit_specs)
    return _reaches[kind]


def check_parameters_apart(name: str, instance: Instance, unit_specs: Nested) -> None:
    """Checks that the update of one parameter depends on no gradient of another.

    Args:
        name: the label of the optimizer.
        instance: of the optimizer.
        unit_specs: the parameters of the unit.

    Raises:
        ValueError: it does.
    """
    # The trial compiles; most optimizers can be read.
    if keeps_apart(instance.optimizer, unit_specs):
        return
    if reach_of(instance, unit_specs) == "global":
        raise ValueError(
            f"learner.optimizer ({name}): the update of one parameter depends on the gradients of "
            "others (a global norm or finiteness test inside a chain, say). Each layer has an optimizer of its "
            "own, so this would not compute what it says. Use learner.clip and learner.nonfinite for that, or "
            "learner.scope = model, which has one optimizer for all (with memory.update = after_backward)"
        )
