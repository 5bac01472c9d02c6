"""APOLLO and APOLLO-Mini: AdamW's step sizes, estimated in a few random directions (Zhu et al. 2024, arXiv 2412.05270).

Implemented from the paper only. For a matrix, the state keeps two moments of a random projection of its gradient. The
projection is not stored but regenerated in each step from the step's number. Each expert of a mixture is a matrix.
Other parameters get Adam with the same learning rate.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal, NamedTuple

import annotated_types as at
import jax
import jax.numpy as jnp
import optax

from plimsoll.framework.config import FiniteNonNegative, Fraction, PositiveFloat, PositiveInt, component
from plimsoll.framework.layout import Nested, PyTree, flatten, fold_in_name, unflatten
from plimsoll.framework.optimizers.clipping import limit_norm_growth
from plimsoll.framework.optimizers.parameter_kinds import (
    ParameterKind,
    classify_parameters,
    get_kind,
    label_by_kind,
    shard_factors,
)
from plimsoll.framework.optimizers.partition import PartitionedGradientTransformation, add_partition
from plimsoll.framework.optimizers.per_matrix import per_matrix


class ApolloState(NamedTuple):
    """Optimizer state of APOLLO.

    Attributes:
        adam: Adam's moments of projected gradients [r, larger side], and of full gradients for parameters that are not
            projected.
        norm: norm of each matrix's last update, a scalar, used to limit its growth.
    """

    adam: PyTree
    norm: Nested


@component
def apollo(
    *,
    learning_rate: optax.ScalarOrSchedule,
    rank: PositiveInt = 256,
    scale: PositiveFloat | None = 1.0,
    update_interval: PositiveInt = 200,
    b1: Fraction = 0.9,
    b2: Fraction = 0.999,
    weight_decay: FiniteNonNegative = 0.0,
    norm_growth: Annotated[float, at.Gt(1)] = 1.01,
    per: Literal["channel", "tensor"] = "channel",
    tables: Literal["adam", "factored", "same"] = "adam",
) -> PartitionedGradientTransformation:
    """APOLLO. For each matrix W with gradient G [m, n], m <= n (else transposed), and P [r, m] ~ N(0, 1/r), at step t:

        R = P G,  R~ = Adam's direction for R (its moments are [r, n]),
        s_j = |R~_j| / |R_j| for each of the n channels (or one s = |R~| / |R| for the tensor),
        U = sqrt(scale) G diag(s), whose norm is at most norm_growth (over 1) times that of the step before,
        W = W - learning_rate (U + weight_decay W).

    Args:
        learning_rate: the paper uses 0.01 at widths over 512 where AdamW uses 0.001; see `scale`.
        rank: rank r of the projection; m if m is smaller.
        scale: square of the paper's factor alpha. A step is sqrt(r scale / m) times as large as AdamW's (per = tensor:
            sqrt(scale / m)). None makes it as large as AdamW's, so that the same learning rate works.
        update_interval: number of steps with the same P.
        b1, b2: Adam's decay rates.
        weight_decay: decoupled, as in optax.adamw.
        norm_growth: how much larger, as a factor over 1, the norm of a matrix's update may be than in the step before.
        per: whether each channel or each tensor has its own scale s.
        tables: optimizer for tables (embedding and head), which have a row for each token or position: "adam", as in
            the paper; "factored", Adafactor's second moment (a number per row and column) without a first; "same" as
            matrices.
    """
    decay = optax.add_decayed_weights(weight_decay)
    rate = optax.scale_by_learning_rate(learning_rate)
    adam = optax.scale_by_adam(b1, b2)
    return _Apollo(rank, scale, update_interval, norm_growth, per, tables, adam, after=(decay, rate)).build()


@component
def apollo_mini(
    *,
    learning_rate: optax.ScalarOrSchedule,
    scale: PositiveFloat | None = 128.0,
    update_interval: PositiveInt = 200,
    b1: Fraction = 0.9,
    b2: Fraction = 0.999,
    weight_decay: FiniteNonNegative = 0.0,
    norm_growth: Annotated[float, at.Gt(1)] = 1.01,
    tables: Literal["adam", "factored", "same"] = "factored",
) -> PartitionedGradientTransformation:
    """`apollo` with rank 1 and one scale per matrix: two numbers for each channel, less than 0.1 bytes per parameter.

    Args:
        learning_rate, update_interval, b1, b2, weight_decay, norm_growth: see `apollo`.
        scale: 128 as in the paper (alpha = sqrt(128)): steps are as large as AdamW's at width 128, and smaller above.
        tables: see `apollo`. Treated as matrices they learn slowly, because rare and frequent tokens share one scale.
    """
    return apollo(rank=1, per="tensor", **locals())


@dataclass(frozen=True)
class _Apollo:
    """APOLLO for parameters of the kinds in `kind_by_path`.

    Attributes:
        rank, scale, update_interval, norm_growth, per, tables: see `apollo`.
        adam: Adam's update, for projected gradients and for parameters that are not projected.
        after: the transformations after the update: weight decay and learning rate.
        kind_by_path: kinds of the parameters; for a missing path, the number of axes decides.
    """

    rank: int
    scale: float | None
    update_interval: int
    norm_growth: float
    per: str
    tables: str
    adam: optax.GradientTransformation
    after: tuple[optax.GradientTransformation, ...]
    kind_by_path: dict[str, ParameterKind] = field(default_factory=dict)

    def build(self) -> PartitionedGradientTransformation:
        """Return the transformation: APOLLO's update, applied to each expert's matrix separately, and what follows.

        Factored tables get Adafactor's update, with a second moment of one number per row and column.
        """
        parts: dict[Hashable, optax.GradientTransformation] = {}
        # The type of the state is narrower than optax's.
        parts["apollo"] = optax.GradientTransformationExtraArgs(self.init, self.update)  # pyright: ignore[reportArgumentType]
        labels: dict[ParameterKind, str] = {}
        if self.tables == "factored":
            labels["table"] = "table"
            parts["table"] = optax.chain(
                # optax's default would not factor tables with a side under 128.
                optax.scale_by_factored_rms(min_dim_size_to_factor=1),
                optax.clip_by_block_rms(1.0),
            )
        expert_paths = [path for path, kind in self.kind_by_path.items() if kind == "experts"]
        if expert_paths:
            core = replace(self, kind_by_path=dict.fromkeys(expert_paths, "matrix"))
            experts = optax.GradientTransformationExtraArgs(core.init, core.update)  # pyright: ignore[reportArgumentType]
            labels["experts"] = "experts"
            parts["experts"] = per_matrix(experts)
        scaled = parts["apollo"]
        if labels:
            scaled = optax.partition(parts, partial(label_by_kind, self.kind_by_path, labels, "apollo"))
        derived = add_partition(optax.chain(scaled, *self.after))
        # Moments have r first, so those of a matrix whose second axis is projected are transposed.
        partition = partial(
            shard_factors, derived, lambda _, leaf, owner: self.axis(leaf.owner or "", owner.shape) == 1
        )
        return replace(
            derived,
            partition=partition,
            fit_to_specs=lambda specs: replace(self, kind_by_path=classify_parameters(specs)).build(),
            draws=True,
        )

    def axis(self, path: str, shape: tuple[int, ...]) -> int | None:
        """Return the axis to project, the shorter one; None if the full gradient goes through Adam."""
        kind = get_kind(self.kind_by_path, path, len(shape))
        if len(shape) != 2 or kind == "other" or (kind == "table" and self.tables == "adam"):
            return None
        return int(shape[0] > shape[1])

    def init(self, params: PyTree) -> ApolloState:
        """Return zero moments of the projection [r, larger side], and a zero norm, for each matrix."""
        moments = {}
        norms = {}
        for path, param in flatten(params).items():
            axis = self.axis(path, param.shape)
            dtype = jnp.promote_types(param.dtype, jnp.float32)
            if axis is None:
                moments[path] = jnp.zeros(param.shape, dtype)
                continue
            rank = min(self.rank, param.shape[axis])
            moments[path] = jnp.zeros((rank, param.shape[1 - axis]), dtype)
            norms[path] = jnp.zeros((), dtype)
        structure = jax.tree.structure(params)
        projected = jax.tree.unflatten(structure, list(moments.values()))
        return ApolloState(self.adam.init(projected), unflatten(norms))

    def update(
        self,
        updates: PyTree,
        state: ApolloState,
        params: PyTree = None,
        *,
        seed: jax.typing.ArrayLike | None = None,
        **_: object,
    ) -> tuple[PyTree, ApolloState]:
        """Return (the direction, the new state), as in optax."""
        # An explicit generator, so that the projections do not depend on JAX's configuration.
        key = jax.random.key(0 if seed is None else seed, impl="threefry2x32")
        # P is not stored: it is regenerated from the number of the interval, the same for all steps in it.
        period = state.adam.count // self.update_interval
        grads = {}
        projected_axes = {}
        for path, g in flatten(updates).items():
            grads[path] = g.astype(jnp.promote_types(g.dtype, jnp.float32))
            axis = self.axis(path, g.shape)
            if axis is not None:
                projected_axes[path] = axis
        # Parameters that are not projected keep their position, because the order must be that of the tree's leaves.
        projected = dict(grads)
        for path, axis in projected_axes.items():
            # R = P G, [r, larger side], with P [r, m] ~ N(0, 1/r) for this parameter and interval.
            g = grads[path]
            size = g.shape[axis]
            rank = min(self.rank, size)
            sample_key = jax.random.fold_in(fold_in_name(key, path), period)
            projection = jax.random.normal(sample_key, (rank, size), g.dtype) * rank**-0.5
            projected[path] = jnp.tensordot(projection, g, axes=(1, axis))
        structure = jax.tree.structure(updates)
        projected_tree = jax.tree.unflatten(structure, list(projected.values()))
        adam_updates, adam_state = self.adam.update(projected_tree, state.adam)
        directions = dict(zip(projected, jax.tree.leaves(adam_updates), strict=True))
        scaled = {}
        for path, axis in projected_axes.items():
            scaled[path] = self._scale_gradient(axis, grads[path], projected[path], directions[path])
        old_norms = flatten(state.norm)
        # The state's norms in the order of `scaled`, because the limiter needs both in one structure.
        norms = {path: old_norms[path] for path in projected_axes}
        limited, new_norms = limit_norm_growth(scaled, norms, self.norm_growth)
        new_leaves = directions | limited
        new_updates = jax.tree.unflatten(structure, list(new_leaves.values()))
        new_updates = jax.tree.map(lambda u, g: u.astype(g.dtype), new_updates, updates)
        return new_updates, ApolloState(adam_state, unflatten(new_norms))

    def _scale_gradient(self, axis: int, g: jax.Array, projected: jax.Array, direction: jax.Array) -> jax.Array:
        """Return U = sqrt(scale) G diag(s): the raw gradient, rescaled by the size of Adam's direction for R.

        Args:
            axis: axis of g that is projected.
            g: gradient G, [m, n] or [n, m].
            projected: projected gradient R, [r, n].
            direction: Adam's direction for R, [r, n].
        """
        is_per_tensor = self.per == "tensor"
        summed_axes = None if is_per_tensor else 0
        projected_norm = jnp.sqrt(jnp.sum(jnp.square(projected), summed_axes))
        direction_norm = jnp.sqrt(jnp.sum(jnp.square(direction), summed_axes))
        # The inner `where` avoids 0 / 0 in channels without a gradient, whose scale is zero.
        s = jnp.where(projected_norm > 0, direction_norm / jnp.where(projected_norm > 0, projected_norm, 1), 0)
        if self.scale is not None:
            scale = self.scale
        elif is_per_tensor:
            scale = float(g.shape[axis])
        else:
            scale = g.shape[axis] / projected.shape[0]
        if not is_per_tensor:
            s = jnp.expand_dims(s, axis)
        return g * s * scale**0.5
