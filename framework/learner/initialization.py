"""Initialization of trainable parameters with their optimizer state and averages, also for only some of them.

The model is initialized part by part, so that its initial values never all exist in full precision together.
"""

from __future__ import annotations

import jax

from plimsoll.framework.layout import Nested, flatten, unflatten
from plimsoll.framework.learner.groups import select
from plimsoll.framework.learner.precision import Precision
from plimsoll.framework.learner.state import GroupState


def init_part(
    precise: dict[str, jax.Array],
    states: list[GroupState],
    specs: Nested,
    precision: Precision,
    *,
    keeps_averages: bool,
    single_layer: bool,
) -> dict[str, dict[str, jax.Array]]:
    """Initialize some parameters with their optimizer state and averages; see `Learner.init_part`.

    Args:
        precise: initial values by path in the model, float32 or wider.
        states: states of the groups of these parameters, each restricted to these.
        specs: specs of all trainable parameters.
        precision: dtypes of their updates.
        keeps_averages: whether there are moving averages of the weights.
        single_layer: whether the arrays are one layer's, without the leading axis.
    """
    flat_specs = flatten(specs)
    weights = {path: x.astype(precision.update_dtype(flat_specs[path])) for path, x in precise.items()}
    optimizer = {}
    for state in states:
        group_weights = select(unflatten(weights), state.group, specs)
        is_stacked = state.group.length is not None and not single_layer
        optimizer |= state.init(group_weights, stacked=is_stacked)
    params = {path: x.astype(flat_specs[path].dtype) for path, x in precise.items()}
    averages = {}
    if keeps_averages:
        averages = {path: x.astype(precision.average_dtype(flat_specs[path])) for path, x in weights.items()}
    return {"parameter": params, "optimizer": optimizer, "ema": averages}


def init_parts(states: list[GroupState]) -> list[tuple[str, ...]]:
    """Return the paths of the parameters that `init_part` can be called with, in the smallest possible parts.

    Args:
        states: the states of all groups.
    """
    parts = []
    for state in states:
        paths = tuple(f"{state.group.path_prefix}{path}" for path in state.group.paths)
        if state.separable():
            parts += [(path,) for path in paths]
        else:
            parts.append(paths)
    return parts
