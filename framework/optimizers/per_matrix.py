"""Applies a matrix transformation to stacks of matrices: each expert of a mixture is a matrix with its own state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from plimsoll.framework.layout import flatten, unflatten


def per_matrix(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Apply the transformation to each matrix of leaves [E, m, n], as if that matrix were the only parameter.

    Each leaf has a state in which per-matrix values have a leading axis E. Counters, which are integer scalars, are the
    same for all matrices and stay scalars. Random draws depend on the path and the seed, so all matrices of a leaf get
    the same ones.
    """
    each = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> dict[str, Any]:
        states = {}
        for path, leaf in flatten(params).items():
            state = jax.vmap(lambda matrix, path=path: each.init(unflatten({path: matrix})))(leaf)
            states[_key(path)] = _share_counters(state, _counter_axes(each, path, leaf))
        return states

    def update(updates: Any, states: Any, params: Any = None, **extra: Any) -> Any:
        params_by_path = {} if params is None else flatten(params)
        new_states = {}
        new_leaves = []
        for path, leaf in flatten(updates).items():
            state = states[_key(path)]
            axes = _counter_axes(each, path, leaf)

            def update_matrix(gradient: jax.Array, state: Any, param: Any, path: str = path) -> Any:
                given = None if param is None else unflatten({path: param})
                new_updates, new_state = each.update(unflatten({path: gradient}), state, given, **extra)
                return flatten(new_updates)[path], new_state

            param = params_by_path.get(path)
            in_axes = (0, axes, None if param is None else 0)
            new_leaf, new_state = jax.vmap(update_matrix, in_axes)(leaf, state, param)
            new_leaves.append(new_leaf)
            new_states[_key(path)] = _share_counters(new_state, axes)
        return jax.tree.unflatten(jax.tree.structure(updates), new_leaves), new_states

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _key(path: str) -> str:
    """Return the name of a leaf's state. It differs from the parameter's path, which would own its counters."""
    return f"each.{path.replace('/', '.')}"


def _counter_axes(each: Any, path: str, leaf: Any) -> Any:
    """Return the vmap axes for the state of one matrix: 0 for each leaf, None for counters."""
    matrix = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    state = jax.eval_shape(each.init, unflatten({path: matrix}))

    def axis(part: Any) -> int | None:
        is_counter = part.shape == () and jnp.issubdtype(part.dtype, jnp.integer)
        return None if is_counter else 0

    return jax.tree.map(axis, state)


def _share_counters(state: Any, axes: Any) -> Any:
    """Return the states of all matrices, with the counters of the first one."""
    return jax.tree.map(
        lambda axis, part: part[0] if axis is None else part, axes, state, is_leaf=lambda axis: axis is None
    )
