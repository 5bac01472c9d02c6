"""Applies a matrix transformation to stacks of matrices: each expert of a mixture is a matrix with its own state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax

from plimsoll.framework.layout import Nested, PyTree, flatten, unflatten


def per_matrix(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Apply the transformation to each matrix of leaves [E, m, n], as if that matrix were the only parameter.

    Each leaf has a state in which per-matrix values have a leading axis E. Counters, which are integer scalars, are the
    same for all matrices and stay scalars. Random draws depend on the path and the seed, so all matrices of a leaf get
    the same ones.
    """
    each = _EachMatrix(optax.with_extra_args_support(optimizer))
    return optax.GradientTransformationExtraArgs(each.init, each.update)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class _EachMatrix:
    """A transformation of single matrices, applied to stacks of them; the state has an entry for each leaf."""

    matrix_optimizer: optax.GradientTransformationExtraArgs

    def init(self, params: PyTree) -> Nested:
        """Return the initial state by leaf."""
        states = {}
        for path, leaf in flatten(params).items():
            state = jax.vmap(self.matrix_optimizer.init)(unflatten({path: leaf}))
            states[_key(path)] = _share_counters(state, self._find_state_axes(path, leaf))
        return states

    def update(self, updates: PyTree, states: Nested, params: PyTree = None, **extra: object) -> tuple[PyTree, Nested]:
        """Return (updates, new state by leaf), as in optax."""
        params_by_path = {} if params is None else flatten(params)
        new_states = {}
        new_leaves = []
        for path, leaf in flatten(updates).items():
            axes = self._find_state_axes(path, leaf)
            leaf_params = unflatten({path: params_by_path[path]}) if path in params_by_path else None
            in_axes = (0, axes, None if leaf_params is None else 0)
            update_matrices = jax.vmap(partial(self.matrix_optimizer.update, **extra), in_axes)
            new_leaf, new_state = update_matrices(unflatten({path: leaf}), states[_key(path)], leaf_params)
            new_leaves += jax.tree.leaves(new_leaf)
            new_states[_key(path)] = _share_counters(new_state, axes)
        return jax.tree.unflatten(jax.tree.structure(updates), new_leaves), new_states

    def _find_state_axes(self, path: str, leaf: jax.Array) -> PyTree:
        """Return the vmap axes for the state of one matrix: 0 for each leaf, None for counters."""
        matrix = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        state = jax.eval_shape(self.matrix_optimizer.init, unflatten({path: matrix}))
        return jax.tree.map(
            lambda part: None if part.shape == () and jnp.issubdtype(part.dtype, jnp.integer) else 0, state
        )


def _key(path: str) -> str:
    """Return the name of a leaf's state. It differs from the parameter's path, which would own its counters."""
    return f"each.{path.replace('/', '.')}"


def _share_counters(state: PyTree, axes: PyTree) -> PyTree:
    """Return the states of all matrices, with the counters of the first one."""
    return jax.tree.map(
        lambda axis, part: part[0] if axis is None else part, axes, state, is_leaf=lambda axis: axis is None
    )
