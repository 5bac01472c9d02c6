"""Adam-mini: Adam with one second moment per block of the Hessian (Zhang et al. 2024, arXiv 2406.16793, algorithms 1
to 3). A block is a token's row of a table, a head of queries or keys, or an output neuron of any other matrix. Other
parameters (norms, biases) are one block each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_map_with_path

from plimsoll.framework.config import FiniteNonNegative, Fraction, component
from plimsoll.framework.layout import Nested, OptStateSpec, ParameterSpec, PyTree, flatten, path_name
from plimsoll.framework.optimizers.offload import partitioned_chain
from plimsoll.framework.optimizers.parameter_kinds import TABLE_ROLES, classify_parameter
from plimsoll.framework.optimizers.partition import NUMBER_OF_UPDATES, PartitionedGradientTransformation


@dataclass(frozen=True)
class _Blocks:
    """The blocks of a parameter.

    Attributes:
        axes: one block per index of these axes.
        heads: if given, one block per equal part of the single axis in `axes`.
    """

    axes: tuple[int, ...]
    heads: int | None = None

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an array with one number per block, for a parameter of this shape."""
        # One entry per head. The tiny arrays on which optimizers are probed (see update_locality.py) need not be
        # divisible by the number of heads, hence gcd. gcd(0, n) is n: without heads, each index of an axis is a block.
        return tuple(math.gcd(self.heads or 0, shape[axis]) for axis in self.axes)

    def mean(self, x: jax.Array) -> jax.Array:
        """Return the mean of each block."""
        mean = jnp.mean(x, axis=tuple(axis for axis in range(x.ndim) if axis not in self.axes))
        if self.heads is None:
            return mean
        per_head = mean.reshape(*self.shape(x.shape), -1)
        return jnp.mean(per_head, axis=1)

    def spread(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Expand each block's number to its elements, in a shape that broadcasts to `shape`."""
        if self.heads is not None:
            x = jnp.repeat(x, shape[self.axes[0]] // x.size)
        return jnp.expand_dims(x, tuple(axis for axis in range(len(shape)) if axis not in self.axes))


def _divide_into_blocks(spec: ParameterSpec) -> _Blocks:
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
    return partitioned_chain([_AdamMini(b1, b2, eps, blocks_by_path={}).build(), decay, rate])


@dataclass(frozen=True)
class _AdamMini:
    """Adam-mini's update direction.

    Attributes:
        b1, b2, eps: as in `optax.scale_by_adam`.
        blocks_by_path: blocks of the parameters; for a missing path, the number of axes decides.
    """

    b1: float
    b2: float
    eps: float
    blocks_by_path: dict[str, _Blocks]

    def build(self) -> PartitionedGradientTransformation:
        """Return the transformation."""
        return PartitionedGradientTransformation(
            self.init,
            self.update,
            self.partition,
            fit_to_specs=lambda specs: replace(
                self, blocks_by_path={path: _divide_into_blocks(spec) for path, spec in flatten(specs).items()}
            ).build(),
        )

    def get_blocks(self, path: str, ndim: int) -> _Blocks:
        """Return the blocks of a parameter with this path and number of axes."""
        return self.blocks_by_path.get(path, _Blocks((1,) if ndim == 2 else ()))

    def init(self, params: PyTree) -> optax.ScaleByAdamState:
        """Return zero moments: the first one in the parameter's shape, the second one with a number per block."""
        nu = []
        for path, param in flatten(params).items():
            shape = self.get_blocks(path, param.ndim).shape(param.shape)
            nu.append(jnp.zeros(shape, param.dtype))
        count = jnp.zeros([], jnp.int32)
        mu = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(count, mu, jax.tree.unflatten(jax.tree.structure(params), nu))

    def partition(self, specs: Nested) -> optax.ScaleByAdamState:
        """Return the specs of the state."""
        mu = []
        nu = []
        for path, spec in flatten(specs).items():
            blocks = self.get_blocks(path, len(spec.shape))
            mesh_axes = tuple(spec.mesh_axes[axis] for axis in blocks.axes)
            mu.append(OptStateSpec(spec.shape, spec.dtype, spec.mesh_axes, owner=path))
            nu.append(OptStateSpec(blocks.shape(spec.shape), spec.dtype, mesh_axes, owner=path))
        structure = jax.tree.structure(specs)
        return optax.ScaleByAdamState(
            NUMBER_OF_UPDATES,  # pyright: ignore[reportArgumentType]
            jax.tree.unflatten(structure, mu),
            jax.tree.unflatten(structure, nu),
        )

    def update(
        self, updates: PyTree, state: optax.ScaleByAdamState, params: PyTree = None, **extra: object
    ) -> tuple[PyTree, optax.ScaleByAdamState]:
        """Return (the direction, the new state), as in optax."""
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, self.b1, 1)
        mean_squares = tree_map_with_path(
            lambda keypath, g: self.get_blocks(path_name(keypath), g.ndim).mean(jnp.square(g)), updates
        )
        # Order 1, because the squares are taken already, before the mean of each block.
        nu = optax.tree.update_moment(mean_squares, state.nu, self.b2, 1)
        means = optax.tree.bias_correction(mu, self.b1, count)
        squares = jax.tree.leaves(optax.tree.bias_correction(nu, self.b2, count))
        directions = []
        for (path, mean), square in zip(flatten(means).items(), squares, strict=True):
            # The root is taken of one number per block, before expanding it to the elements.
            denominator = jnp.sqrt(square) + self.eps
            directions.append(mean / self.get_blocks(path, mean.ndim).spread(denominator, mean.shape))
        directions = jax.tree.unflatten(jax.tree.structure(updates), directions)
        return directions, optax.ScaleByAdamState(count, mu, nu)
