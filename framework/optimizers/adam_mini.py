"""Adam-mini: Adam with one second moment per block of the Hessian (Zhang et al. 2024, arXiv 2406.16793, algorithms 1
to 3). A block is a token's row of a table, a head of queries or keys, or an output neuron of any other matrix. Other
parameters (norms, biases) are one block each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_map_with_path

from plimsoll.framework.config import FiniteNonNegative, Fraction, component
from plimsoll.framework.layout import Nested, OptStateSpec, ParameterSpec, flatten, path_name
from plimsoll.framework.optimizers.offload import partitioned_chain
from plimsoll.framework.optimizers.parameter_kinds import TABLE_ROLES, classify_parameter
from plimsoll.framework.optimizers.partition import NUMBER_OF_UPDATES, PartitionedGradientTransformation


class _Blocks(NamedTuple):
    """One block per index of some axes or, with `heads`, one block per equal part of a single axis."""

    axes: tuple[int, ...]
    heads: int | None = None

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an array with one number per block, for a parameter of this shape."""
        # One entry per head. The tiny arrays on which optimizers are probed (see update_locality.py) need not be
        # divisible by the number of heads, hence gcd. gcd(0, n) is n: without heads, each index of an axis is a block.
        return tuple(math.gcd(self.heads or 0, shape[axis]) for axis in self.axes)

    def mean(self, x: jax.Array) -> jax.Array:
        """Return the mean of each block."""
        mean = jnp.mean(x, axis=self._mean_axes(x.ndim))
        if self.heads is None:
            return mean
        per_head = mean.reshape(*self.shape(x.shape), -1)
        return jnp.mean(per_head, axis=1)

    def spread(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Expand each block's number to its elements, in a shape that broadcasts to `shape`."""
        if self.heads is not None:
            x = jnp.repeat(x, shape[self.axes[0]] // x.size)
        return jnp.expand_dims(x, self._mean_axes(len(shape)))

    def _mean_axes(self, ndim: int) -> tuple[int, ...]:
        return tuple(axis for axis in range(ndim) if axis not in self.axes)


def _blocks(spec: ParameterSpec) -> _Blocks:
    """Return the blocks of a parameter, based on the roles of its axes."""
    roles = spec.roles
    if classify_parameter(spec) == "table":
        table_axes = tuple(axis for axis, role in enumerate(roles) if role in TABLE_ROLES)
        return _Blocks(table_axes)
    if spec.num_heads is not None:
        return _Blocks((roles.index("heads"),), spec.num_heads)
    if classify_parameter(spec) in ("matrix", "experts"):
        # Weights are [in, out] here. Without roles, an output neuron is a column.
        output_axis = roles.index("out") if "out" in roles else len(roles) - 1
        # Each expert has its own output neurons.
        return _Blocks((*range(len(roles) - 2), output_axis))
    return _Blocks(())


@component
def adam_mini(
    *,
    learning_rate: optax.ScalarOrSchedule,
    b1: Fraction = 0.9,
    b2: Fraction = 0.999,
    eps: FiniteNonNegative = 1e-8,
    weight_decay: FiniteNonNegative = 1e-4,
) -> PartitionedGradientTransformation:
    """`optax.adamw` with half the state: one second moment per block, a moving average of its mean squared gradient.

    Hyperparameters that suit AdamW suit it too. If the axes have no roles, the blocks of a matrix are its columns.

    Args:
        learning_rate, b1, b2, eps, weight_decay: as in `optax.adamw`.
    """
    decay = optax.add_decayed_weights(weight_decay)
    rate = optax.scale_by_learning_rate(learning_rate)
    return partitioned_chain([_scale_by_adam_mini(b1, b2, eps, {}), decay, rate])


def _scale_by_adam_mini(
    b1: float, b2: float, eps: float, blocks_by_path: dict[str, _Blocks]
) -> PartitionedGradientTransformation:
    """Adam-mini's update direction; if `blocks_by_path` lacks a path, the number of axes determines the blocks."""

    def get_blocks(keypath: Any, ndim: int) -> _Blocks:
        default = _Blocks((1,) if ndim == 2 else ())
        return blocks_by_path.get(path_name(keypath), default)

    def init(params: Any) -> optax.ScaleByAdamState:
        return _zero_state(params, get_blocks)

    def partition(specs: Nested) -> optax.ScaleByAdamState:
        return _state_specs(specs, get_blocks)

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None, **extra: Any) -> Any:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        mean_squares = tree_map_with_path(lambda k, g: get_blocks(k, g.ndim).mean(jnp.square(g)), updates)
        # Order 1, because the squares are taken already, before the mean of each block.
        nu = optax.tree.update_moment(mean_squares, state.nu, b2, 1)
        means = optax.tree.bias_correction(mu, b1, count)
        squares = optax.tree.bias_correction(nu, b2, count)

        def scale_leaf(keypath: Any, mean: jax.Array, square: jax.Array) -> jax.Array:
            # The root is taken of one number per block, before expanding it to the elements.
            denominator = jnp.sqrt(square) + eps
            return mean / get_blocks(keypath, mean.ndim).spread(denominator, mean.shape)

        return tree_map_with_path(scale_leaf, means, squares), optax.ScaleByAdamState(count, mu, nu)

    def fit_to_specs(specs: Nested) -> PartitionedGradientTransformation:
        layer_blocks = {path: _blocks(spec) for path, spec in flatten(specs).items()}
        return _scale_by_adam_mini(b1, b2, eps, layer_blocks)

    return PartitionedGradientTransformation(init, update, partition, fit_to_specs=fit_to_specs)


def _zero_state(params: Any, get_blocks: Callable[[Any, int], _Blocks]) -> optax.ScaleByAdamState:
    """Return the initial state; `get_blocks` returns the blocks for a parameter's keypath and number of axes."""

    def zeros(keypath: Any, param: jax.Array) -> jax.Array:
        shape = get_blocks(keypath, param.ndim).shape(param.shape)
        return jnp.zeros(shape, param.dtype)

    nu = tree_map_with_path(zeros, params)
    count = jnp.zeros([], jnp.int32)
    mu = jax.tree.map(jnp.zeros_like, params)
    return optax.ScaleByAdamState(count, mu, nu)


def _state_specs(specs: Nested, get_blocks: Callable[[Any, int], _Blocks]) -> optax.ScaleByAdamState:
    """Return the specs of the state; `get_blocks` returns the blocks for a parameter's keypath and number of axes."""

    def moment_spec(keypath: Any, spec: ParameterSpec, blocks: _Blocks) -> OptStateSpec:
        mesh_axes = tuple(spec.mesh_axes[axis] for axis in blocks.axes)
        return OptStateSpec(blocks.shape(spec.shape), spec.dtype, mesh_axes, owner=path_name(keypath))

    def mu_spec(keypath: Any, spec: ParameterSpec) -> OptStateSpec:
        # The first moment has the parameter's shape, so each element is a block.
        axes = tuple(range(len(spec.shape)))
        return moment_spec(keypath, spec, _Blocks(axes))

    def nu_spec(keypath: Any, spec: ParameterSpec) -> OptStateSpec:
        blocks = get_blocks(keypath, len(spec.shape))
        return moment_spec(keypath, spec, blocks)

    mu = tree_map_with_path(mu_spec, specs)
    nu = tree_map_with_path(nu_spec, specs)
    return optax.ScaleByAdamState(NUMBER_OF_UPDATES, mu, nu)  # pyright: ignore[reportArgumentType]
