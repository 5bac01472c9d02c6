"""Processing of the gradients of a stage or layer in every schedule: tied weights, shardings, and statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.layout import MeshAxes, Nested, TensorSpec, flatten, unflatten
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.learner import Learner

# --- tied weights ----------------------------------------------------------------------------------------------------


def with_tied_weights(ties: Mapping[str, str], stage: str, params: Nested, homes: Mapping[str, jax.Array]) -> Nested:
    """Add the tied weights that a stage reads to its own parameters.

    Args:
        ties: see `Chain`.
        stage: name of the stage that reads the weights.
        params: its own parameters in one group, "parameter" or "frozen".
        homes: parameters of that group by path. A tie is trained or frozen like the parameter that it refers to.
    """
    weights = dict(params)
    for reader, home in ties.items():
        reader_stage, key = reader.split("/", 1)
        if reader_stage == stage and home in homes:
            weights[key] = homes[home]
    return weights


@dataclass(frozen=True)
class TiedGradients:
    """A stage's gradients, with those of tied weights kept separate.

    Attributes:
        grads: gradients of the stage's own parameters.
        ties: sums of gradients of parameters that belong to other stages, by the parameter's path.
    """

    grads: Nested
    ties: dict[str, jax.Array]


def split_tied(ties: Mapping[str, str], stage: str, grads: Nested, tie_grads: Mapping[str, jax.Array]) -> TiedGradients:
    """Move the gradients of tied weights from the gradients of the stage that reads them to the sums in `tie_grads`.

    Args:
        ties: see `Chain`.
        stage: name of the stage that reads the weights.
        grads: the stage's gradients, including those of tied weights.
        tie_grads: sums over the stages processed so far, by the home parameter's path.
    """
    grad_by_path = flatten(grads)
    tie_sums = dict(tie_grads)
    for reader, home in ties.items():
        reader_stage, key = reader.split("/", 1)
        if reader_stage == stage and key in grad_by_path:
            grad = grad_by_path.pop(key)
            # Several stages may read the same parameter.
            tie_sums[home] = tie_sums[home] + grad if home in tie_sums else grad
    return TiedGradients(unflatten(grad_by_path), tie_sums)


def add_tied(stage: str, tied: TiedGradients) -> TiedGradients:
    """Add the gradients of tied weights whose parameters belong to `stage` to its own gradients."""
    grad_by_path = flatten(tied.grads)
    tie_sums = dict(tied.ties)
    for home, grad in tied.ties.items():
        home_stage, key = home.split("/", 1)
        if home_stage == stage:
            grad_by_path[key] = grad_by_path[key] + grad
            del tie_sums[home]
    return TiedGradients(unflatten(grad_by_path), tie_sums)


# --- sharding --------------------------------------------------------------------------------------------------------


def shard_as_parameter(grad: jax.Array, axes: MeshAxes, mesh: Mesh) -> jax.Array:
    """Constrain a gradient to its parameter's sharding, where the devices' partial sums are added up.

    Args:
        grad: gradient of a parameter, or of one layer of a stacked parameter.
        axes: the mesh axes of the parameter's dimensions.
        mesh: the device mesh of the layout.
    """
    # On one device there is nothing to shard, and the program stays the same as without a mesh.
    if mesh.size == 1:
        return grad
    # A layer's gradient lacks the leading layer axis of its stacked parameter.
    num_leading = len(axes) - grad.ndim
    sharding = NamedSharding(mesh, PartitionSpec(*axes[num_leading:]))
    return jax.lax.with_sharding_constraint(grad, sharding)


def shard_gradients(grads: Nested, specs: Mapping[str, TensorSpec], mesh: Mesh) -> Nested:
    """Constrain gradients of a stage, or of one layer of a stack, to the shardings of their parameters.

    Args:
        grads: the gradients.
        specs: specs of the parameters by path; of a stack, those of the stacked ones.
        mesh: the device mesh of the layout.
    """
    sharded_grads = {}
    for path, grad in flatten(grads).items():
        sharded_grads[path] = shard_as_parameter(grad, specs[path].mesh_axes, mesh)
    return unflatten(sharded_grads)


# --- statistics ------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GradStats:
    """Statistics of the gradients so far; scalars on the device.

    Attributes:
        ok: whether all gradients were finite, and the step counts.
        squares: sum of their squares, f32 or wider.
        updated: int32, number of stages and layers whose gradients were finite, as were all gradients before them.
    """

    ok: jax.Array
    squares: jax.Array
    updated: jax.Array


@dataclass(frozen=True)
class FiniteCheck:
    """Result of a finiteness check of one stage's or layer's gradients.

    Attributes:
        squares: sum of the squares of these gradients.
        ok: whether these and all gradients before them were finite.
    """

    squares: jax.Array
    ok: jax.Array


def check_finite(learner: Learner, ok: jax.Array, grads: Nested) -> FiniteCheck:
    """Check whether gradients are finite, and sum up their squares.

    Args:
        learner: the learner, which computes norms.
        ok: bool scalar, whether all gradients before these were finite.
        grads: gradients of one stage or layer.
    """
    squares = jnp.square(learner.norm(grads))
    # Once not ok, it stays not ok: later gradients of the backward pass depend on the same cotangents.
    return FiniteCheck(squares, ok & jnp.isfinite(squares))


def add_grad_stats(grad_stats: GradStats, finite_check: FiniteCheck) -> GradStats:
    """Add one more stage or layer to the statistics.

    The squared norms of the layers add up to the square of the global norm.
    """
    squares = grad_stats.squares + finite_check.squares
    updated = grad_stats.updated + finite_check.ok
    return GradStats(ok=finite_check.ok, squares=squares, updated=updated)


def with_grad_stats(decision: Decision, grad_stats: GradStats) -> Decision:
    """Return the decision of a step that updates during its backward pass, with the norm and `ok` of the statistics."""
    return replace(decision, norm=jnp.sqrt(grad_stats.squares), ok=grad_stats.ok)
