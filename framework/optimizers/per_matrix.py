"""A transformation for matrices, for stacks of them: each expert of a mixture is a matrix with a state of its own.

Imports jax, optax and framework.layout.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from framework.layout import flatten, unflatten


def per_matrix(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The transformation of each matrix of leaves [E, m, n], as if that matrix were the only parameter.

    Each leaf has a state in which what belongs to matrices has a leading axis E. Counters, which are integer scalars,
    are the same for all matrices and stay scalars. What the transformation draws goes by the path and the seed, so all
    matrices of a leaf have it in common.
    """
    each = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> dict[str, Any]:
        states = {}
        for path, leaf in flatten(params).items():
            state = jax.vmap(lambda matrix, path=path: each.init(unflatten({path: matrix})))(leaf)
            states[_key(path)] = _with_shared_counters(state, _counter_axes(each, path, leaf))
        return states

    def update(updates: Any, states: Any, params: Any = None, **extra: Any) -> Any:
        params_by_path = {} if params is None else flatten(params)
        new_states = {}
        new_leaves = []
        for path, leaf in flatten(updates).items():
            state = states[_key(path)]
            axes = _counter_axes(each, path, leaf)

            def of_one(gradient: jax.Array, state: Any, param: Any, path: str = path) -> Any:
                given = None if param is None else unflatten({path: param})
                new_updates, new_state = each.update(unflatten({path: gradient}), state, given, **extra)
                return flatten(new_updates)[path], new_state

            param = params_by_path.get(path)
            in_axes = (0, axes, None if param is None else 0)
            new_leaf, new_state = jax.vmap(of_one, in_axes)(leaf, state, param)
            new_leaves.append(new_leaf)
            new_states[_key(path)] = _with_shared_counters(new_state, axes)
        return jax.tree.unflatten(jax.tree.structure(updates), new_leaves), new_states

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _key(path: str) -> str:
    """The name of a leaf's state: not that of the parameter, or its counters would be taken for the parameter's own."""
    return f"each.{path.replace('/', '.')}"


def _counter_axes(each: Any, path: str, leaf: Any) -> Any:
    """The state of one matrix with the axis of the matrices in the place of its leaves; None for counters."""
    matrix = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    state = jax.eval_shape(each.init, unflatten({path: matrix}))

    def axis(part: Any) -> int | None:
        is_counter = part.shape == () and jnp.issubdtype(part.dtype, jnp.integer)
        return None if is_counter else 0

    return jax.tree.map(axis, state)


def _with_shared_counters(state: Any, axes: Any) -> Any:
    """The states of all matrices, with the first one's counters."""
    return jax.tree.map(
        lambda axis, part: part[0] if axis is None else part, axes, state, is_leaf=lambda axis: axis is None
    )
