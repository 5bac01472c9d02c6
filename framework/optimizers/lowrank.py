"""APOLLO and APOLLO-Mini: AdamW's step sizes, estimated in a few random directions (Zhu et al. 2024, arXiv 2412.05270).

From the paper alone. Of a matrix, two moments of a random projection of its gradient are kept; the projection is drawn
again in each step, from the step's number. What is no matrix gets Adam with the same learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

import annotated_types as at
import jax
import jax.numpy as jnp
import optax

from framework.config import FiniteNonNegative, Fraction, PositiveFloat, PositiveInt, component
from framework.layout import Nested, OptStateSpec, flatten, fold_in_name, path_name, unflatten
from framework.optimizers.clipping import limit_norm_growth
from framework.optimizers.kinds import Kind, kind_of, kinds
from framework.optimizers.partition import PartitionedGradientTransformation, partitioned


class ApolloState(NamedTuple):
    """`adam`: of projected gradients [r, larger side], and of the rest's; `norm`: of each matrix's last update."""

    adam: Any
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
    """For each matrix W with gradient G [m, n], m <= n (else transposed), at step t, with P [r, m] ~ N(0, 1/r):

        R = P G,  R~ = Adam's direction for R (its moments are [r, n]),
        s_j = |R~_j| / |R_j| for each of the n channels (or one s = |R~| / |R| for the tensor),
        U = sqrt(scale) G diag(s), whose norm is at most norm_growth (over 1) times that of the step before,
        W = W - learning_rate (U + weight_decay W).

    Args:
        learning_rate: the paper has 0.01 at widths over 512 where AdamW has 0.001; see `scale`.
        rank: r; where m is smaller, m.
        scale: the square of the paper's factor alpha. A step is sqrt(r scale / m) times AdamW's in size (per = tensor:
            sqrt(scale / m)); None makes it AdamW's, so that the same learning rate does.
        update_interval: steps with the same P.
        b1, b2: Adam's.
        weight_decay: decoupled, as in optax.adamw.
        per: what has a scale of its own.
        tables: what embedding and head, tables with a row for each token or position, get: "adam", as in the paper;
            "factored", Adafactor's second moment (a number per row and column) and no first; "same" as matrices.
    """
    core = _Apollo(rank, scale, update_interval, norm_growth, per, tables, optax.scale_by_adam(b1, b2))

    def of_kinds(found: dict[str, Kind]) -> PartitionedGradientTransformation:
        own = replace(core, found=found)
        scale_by_apollo = optax.GradientTransformationExtraArgs(own.init, own.update)
        if tables == "factored":
            factored = optax.scale_by_factored_rms(min_dim_size_to_factor=1), optax.clip_by_block_rms(1.0)
            label = lambda k, p: "table" if kind_of(found, path_name(k), len(p.shape)) == "table" else "apollo"  # noqa: E731
            parts: Any = {"apollo": scale_by_apollo, "table": optax.chain(*factored)}
            scale_by_apollo = optax.partition(parts, lambda tree: jax.tree_util.tree_map_with_path(label, tree))
        rest = optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(learning_rate)
        derived = partitioned(optax.chain(scale_by_apollo, *rest))
        return derived._replace(
            partition=lambda specs: own.partition(derived.partition(specs), specs),
            of_specs=lambda specs: of_kinds(kinds(specs)),
            draws=True,
        )

    return of_kinds({})


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
        scale: 128 as in the paper (alpha = sqrt(128)): at width 128 steps are as large as AdamW's, and smaller above.
        tables: see `apollo`. As matrices they learn slowly: rare tokens share one scale with frequent ones.
    """
    return apollo(rank=1, per="tensor", **locals())


@dataclass(frozen=True)
class _Apollo:
    """The update before weight decay and learning rate, for parameters of the `found` kinds."""

    rank: int
    scale: float | None
    update_interval: int
    norm_growth: float
    per: str
    tables: str
    adam: optax.GradientTransformation
    found: dict[str, Kind] = field(default_factory=dict)

    def axis(self, path: str, shape: tuple[int, ...]) -> int | None:
        """The axis that is projected away; None where all of the gradient goes through Adam."""
        kind = kind_of(self.found, path, len(shape))
        if len(shape) != 2 or kind == "other" or (kind == "table" and self.tables == "adam"):
            return None
        return int(shape[0] > shape[1])

    def init(self, params: Any) -> ApolloState:
        small, norms = {}, {}
        for path, p in flatten(params).items():
            axis, wide = self.axis(path, p.shape), jnp.promote_types(p.dtype, jnp.float32)
            shape = p.shape if axis is None else (min(self.rank, p.shape[axis]), p.shape[1 - axis])
            small[path] = jnp.zeros(shape, wide)
            norms |= {} if axis is None else {path: jnp.zeros((), wide)}
        low = jax.tree.unflatten(jax.tree.structure(params), [*small.values()])
        return ApolloState(self.adam.init(low), unflatten(norms))

    def partition(self, state: Any, specs: Nested) -> Any:
        """The projected side keeps its parameter's mesh axes: r is cut as that was, where the mesh divides it."""

        def cut(leaf: OptStateSpec) -> OptStateSpec:
            if leaf.owner is None or len(leaf.shape) != 2:
                return leaf
            owner = flatten(specs)[leaf.owner]
            return replace(leaf, mesh_axes=owner.mesh_axes[:: -1 if self.axis(leaf.owner, owner.shape) else 1])

        return jax.tree.map(cut, state)

    def update(self, updates: Any, state: Any, params: Any = None, *, seed: Any = None, **_: Any) -> Any:
        key = jax.random.key(0 if seed is None else seed, impl="threefry2x32")
        period = state.adam.count // self.update_interval
        grads = {path: g.astype(jnp.promote_types(g.dtype, jnp.float32)) for path, g in flatten(updates).items()}
        axes = {path: axis for path, g in grads.items() if (axis := self.axis(path, g.shape)) is not None}
        low = dict(grads)
        for path, axis in axes.items():
            g, drawn = grads[path], jax.random.fold_in(fold_in_name(key, path), period)
            rank = min(self.rank, g.shape[axis])
            projection = jax.random.normal(drawn, (rank, g.shape[axis]), g.dtype) * rank**-0.5
            low[path] = jnp.tensordot(projection, g, axes=(1, axis))
        structure = jax.tree.structure(updates)
        adams, adam = self.adam.update(jax.tree.unflatten(structure, [*low.values()]), state.adam)
        new = dict(zip(low, jax.tree.leaves(adams), strict=True))
        scaled = {path: self._scaled(axis, grads[path], low[path], new[path]) for path, axis in axes.items()}
        norms = {path: flatten(state.norm)[path] for path in axes}
        limited, norms = limit_norm_growth(scaled, norms, self.norm_growth)
        new = jax.tree.unflatten(structure, [*(new | limited).values()])
        return jax.tree.map(lambda u, g: u.astype(g.dtype), new, updates), ApolloState(adam, unflatten(norms))

    def _scaled(self, axis: int, g: jax.Array, low: jax.Array, adam: jax.Array) -> jax.Array:
        """The raw gradient, as large as Adam's direction is in the projection."""
        whole = self.per == "tensor"
        before, after = (jnp.sqrt(jnp.sum(jnp.square(x), None if whole else 0)) for x in (low, adam))
        s = jnp.where(before > 0, after / jnp.where(before > 0, before, 1), 0)
        scale = g.shape[axis] / (1 if whole else low.shape[0]) if self.scale is None else self.scale
        return g * (s if whole else jnp.expand_dims(s, axis)) * scale**0.5
