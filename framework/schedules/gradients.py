"""What becomes of the gradients of a stage, or of one unit, in every schedule: ties, shardings, and the tally."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from framework.layout import MeshAxes, Nested, flatten, unflatten
from framework.learner.learner import Learner
from framework.learner.units import Decision

# --- ties ------------------------------------------------------------------------------------------------------------


def with_tied_weights(
    ties: Mapping[str, str],
    stage: str,
    params: Nested,
    homes: Mapping[str, Any],
) -> Nested:
    """A stage's parameters, and those that it reads by ties.

    Args:
        ties: see `Chain`.
        stage: the name of the reader.
        params: its own parameters of a group, "parameter" or "frozen".
        homes: parameters of that group by path. A tie is trained or frozen as the parameter is that it reads.
    """
    weights = dict(params)
    for reader, home in ties.items():
        reader_stage, key = reader.split("/", 1)
        if reader_stage == stage and home in homes:
            weights[key] = homes[home]
    return weights


class TiedGradients(NamedTuple):
    """A stage's gradients, those of ties apart.

    Attributes:
      grads: of the stage's own parameters.
      ties: sums of gradients of parameters that live in other stages, by the path of the parameter.
    """

    grads: Nested
    ties: dict[str, jax.Array]


def split_tied(
    ties: Mapping[str, str],
    stage: str,
    grads: Nested,
    tie_grads: Mapping[str, jax.Array],
) -> TiedGradients:
    """Takes the gradients of ties out of those of the stage that reads them, and adds them to `tie_grads`, the sums of
    stages before; see `TiedGradients`."""
    grad_by_path = flatten(grads)
    tie_sums = dict(tie_grads)
    for reader, home in ties.items():
        reader_stage, key = reader.split("/", 1)
        if reader_stage == stage and key in grad_by_path:
            grad = grad_by_path.pop(key)
            # Several stages may read one parameter.
            tie_sums[home] = tie_sums[home] + grad if home in tie_sums else grad
    return TiedGradients(unflatten(grad_by_path), tie_sums)


def add_tied(stage: str, tied: TiedGradients) -> TiedGradients:
    """Adds the gradients of ties whose parameters live in `stage` to its own."""
    grad_by_path = flatten(tied.grads)
    tie_sums = dict(tied.ties)
    for home, grad in tied.ties.items():
        home_stage, key = home.split("/", 1)
        if home_stage == stage:
            grad_by_path[key] = grad_by_path[key] + grad
            del tie_sums[home]
    return TiedGradients(unflatten(grad_by_path), tie_sums)


# --- where gradients are ---------------------------------------------------------------------------------------------


def sharded_as_parameter(grad: jax.Array, axes: MeshAxes, mesh: Mesh) -> jax.Array:
    """The gradient where its parameter's shards are, which is where partial sums of devices are added up.

    Args:
        grad: of a parameter, or of one unit of a stacked one.
        axes: the mesh axes of the parameter's dimensions.
        mesh: of the layout.
    """
    # On one device there is nothing to lay out, and the program stays that of no mesh at all.
    if mesh.size == 1:
        return grad
    # A unit's gradient has no leading axis of units, its stacked parameter has one.
    num_leading = len(axes) - grad.ndim
    sharding = NamedSharding(mesh, PartitionSpec(*axes[num_leading:]))
    return jax.lax.with_sharding_constraint(grad, sharding)


# --- the tally -------------------------------------------------------------------------------------------------------


class Tally(TypedDict):
    """What is known of the gradients so far; scalars on the device.

    Attributes:
      ok: whether all were finite, and the step counts.
      squares: the sum of their squares, f32 or wider.
      updated: int32, how many stages and units had finite gradients, those before them included.
    """

    ok: jax.Array
    squares: jax.Array
    updated: jax.Array


class Judged(NamedTuple):
    """The sum of squares of one stage's or unit's gradients; whether these and all before them were finite."""

    squares: jax.Array
    ok: jax.Array


def judge(learner: Learner, ok: jax.Array, grads: Nested) -> Judged:
    """Judges gradients; `ok` is of those before them."""
    squares = jnp.square(learner.norm(grads))
    # Once not ok, always not ok: what comes later in the backward pass is made of the same cotangents.
    return Judged(squares, ok & jnp.isfinite(squares))


def counted(tally: Tally, judged: Judged) -> Tally:
    """The tally with one more stage or unit. The squares of units' norms add up to that of the whole norm."""
    squares = tally["squares"] + judged.squares
    updated = tally["updated"] + judged.ok
    return Tally(ok=judged.ok, squares=squares, updated=updated)


def with_tally(decision: Decision, tally: Tally) -> Decision:
    """The decision of a step whose updates went with the backward pass: norm and verdict are those of the tally."""
    return decision._replace(norm=jnp.sqrt(tally["squares"]), ok=tally["ok"])
