"""Adam-mini: Adam with one second moment per block of the Hessian (Zhang et al. 2024, arXiv 2406.16793, algorithms 1
to 3). A block is a token's row of a table, a head of queries or keys, an output neuron of any other matrix, and the
whole of what else there is (norms, biases).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_map_with_path

from framework.config import FiniteNonNegative, Fraction, component
from framework.layout import Nested, OptStateSpec, ParameterSpec, flatten, path_name
from framework.optimizers.kinds import TABLE_ROLES, kind
from framework.optimizers.offload import partitioned_chain
from framework.optimizers.partition import PartitionedGradientTransformation


class _Blocks(NamedTuple):
    """A block for each index of some axes; or, with `heads`, for each of so many equal parts of one axis."""

    axes: tuple[int, ...]
    heads: int | None = None

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of what is one number per block."""
        # All heads, but for the toys that optimizers are tried out on (see reach), which they need not divide.
        return tuple(math.gcd(self.heads or 0, shape[axis]) for axis in self.axes)

    def mean(self, x: jax.Array) -> jax.Array:
        """Of each block."""
        mean = jnp.mean(x, axis=self._others(x.ndim))
        return mean if self.heads is None else jnp.mean(mean.reshape(*self.shape(x.shape), -1), axis=1)

    def spread(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Each block's number for its elements: broadcasts to that shape."""
        x = x if self.heads is None else jnp.repeat(x, shape[self.axes[0]] // x.size)
        return jnp.expand_dims(x, self._others(len(shape)))

    def _others(self, ndim: int) -> tuple[int, ...]:
        return tuple(axis for axis in range(ndim) if axis not in self.axes)


def _blocks(spec: ParameterSpec) -> _Blocks:
    roles = spec.roles
    if kind(spec) == "table":
        return _Blocks(tuple(axis for axis, role in enumerate(roles) if role in TABLE_ROLES))
    if spec.num_heads is not None:
        return _Blocks((roles.index("heads"),), spec.num_heads)
    return _Blocks((roles.index("out") if "out" in roles else 1,)) if kind(spec) == "matrix" else _Blocks(())


@component
def adam_mini(
    *,
    learning_rate: optax.ScalarOrSchedule,
    b1: Fraction = 0.9,
    b2: Fraction = 0.999,
    eps: FiniteNonNegative = 1e-8,
    weight_decay: FiniteNonNegative = 1e-4,
) -> PartitionedGradientTransformation:
    """`optax.adamw` with half its state: the second moment of a block is a moving average of its mean square gradient.
    Values that suit AdamW suit it. Without the roles of axes, the blocks of a matrix are its columns."""
    decay, rate = optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(learning_rate)
    return partitioned_chain([_scale_by_adam_mini(b1, b2, eps, {}), decay, rate])


def _scale_by_adam_mini(
    b1: float, b2: float, eps: float, found: dict[str, _Blocks]
) -> PartitionedGradientTransformation:
    def blocks_of(keypath: Any, ndim: int) -> _Blocks:
        return found.get(path_name(keypath)) or _Blocks((1,) if ndim == 2 else ())

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = lambda k, p: jnp.zeros(blocks_of(k, p.ndim).shape(p.shape), p.dtype)  # noqa: E731
        nu = tree_map_with_path(zeros, params)
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params), nu)

    def partition(specs: Nested) -> optax.ScaleByAdamState:
        def of(keypath: Any, spec: ParameterSpec, blocks: _Blocks) -> OptStateSpec:
            axes = tuple(spec.mesh_axes[axis] for axis in blocks.axes)
            return OptStateSpec(blocks.shape(spec.shape), spec.dtype, axes, owner=path_name(keypath))

        mu = tree_map_with_path(lambda k, s: of(k, s, _Blocks(tuple(range(len(s.shape))))), specs)
        nu = tree_map_with_path(lambda k, s: of(k, s, blocks_of(k, len(s.shape))), specs)
        return optax.ScaleByAdamState(OptStateSpec((), "int32"), mu, nu)  # pyright: ignore[reportArgumentType]

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None, **extra: Any) -> Any:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        square = tree_map_with_path(lambda k, g: blocks_of(k, g.ndim).mean(jnp.square(g)), updates)
        nu = optax.tree.update_moment(square, state.nu, b2, 1)
        means, squares = optax.tree.bias_correction(mu, b1, count), optax.tree.bias_correction(nu, b2, count)

        def scaled(keypath: Any, mean: jax.Array, square: jax.Array) -> jax.Array:
            return mean / blocks_of(keypath, mean.ndim).spread(jnp.sqrt(square) + eps, mean.shape)

        return tree_map_with_path(scaled, means, squares), optax.ScaleByAdamState(count, mu, nu)

    def of_specs(specs: Nested) -> PartitionedGradientTransformation:
        return _scale_by_adam_mini(b1, b2, eps, {path: _blocks(spec) for path, spec in flatten(specs).items()})

    return PartitionedGradientTransformation(init, update, partition, of_specs=of_specs)
