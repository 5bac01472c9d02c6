"""Value and gradient of a function with respect to the trainable parameters only.

A frozen parameter is not an argument of the differentiated function. So no part of its gradient is ever computed, and
no compiler has to find out that it is not needed. Imports jax and `framework.layout`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from plimsoll.extras.functions.leaves import is_float
from plimsoll.extras.functions.paths import find_leaves, matching_paths


class Partition(NamedTuple):
    """A tree split in two, both of the same structure, each with None for the leaves of the other.

    `jax.tree.map`, optax and `jax.jit` treat None as having no leaves. No array is copied.
    """

    trained: Any
    frozen: Any


def partition(params: Any, trainable: str) -> Partition:
    """Split a tree into the float leaves whose path matches a regex, and all other leaves.

    Args:
        params: any pytree, such as nested dicts, an equinox module or flax variables.
        trainable: a regex, searched in paths such as "layers/attention/query".

    Raises:
        ValueError: the regex matches no leaf, or none of a floating-point dtype.
    """
    leaf_by_path = find_leaves(params)
    matched = matching_paths(trainable, leaf_by_path, "trainable")
    trained_paths = {path for path in matched if is_float(leaf_by_path[path])}
    if not trained_paths:
        types = ", ".join(
            f"{path} ({getattr(leaf_by_path[path], 'dtype', type(leaf_by_path[path]).__name__)})"
            for path in matched[:3]
        )
        raise ValueError(f"trainable = {trainable!r} matches no leaf of a floating-point dtype, but {types}")
    leaves, structure = jax.tree.flatten(params)
    trained = [leaf if path in trained_paths else None for path, leaf in zip(leaf_by_path, leaves, strict=True)]
    frozen = [None if path in trained_paths else leaf for path, leaf in zip(leaf_by_path, leaves, strict=True)]
    return Partition(structure.unflatten(trained), structure.unflatten(frozen))


def combine(first: Any, second: Any) -> Any:
    """Merge the two parts of a `Partition`.

    Args:
        first: a tree with None for some leaves.
        second: a tree of the same structure that has those leaves.

    Raises:
        ValueError: the structures differ.
    """

    def is_none(node: Any) -> bool:
        return node is None

    return jax.tree.map(lambda left, right: right if left is None else left, first, second, is_leaf=is_none)


def differentiate(
    function: Callable[..., Any], *, trainable: str, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Make a function that returns the value and the gradient with respect to the trainable parameters only.

        loss_and_gradient = pl.differentiate(loss, trainable="lora|norm")
        trained, frozen = pl.partition(params, "lora|norm")
        loss, gradient = loss_and_gradient(pl.combine(trained, frozen), batch)
        updates, moments = optimizer.update(gradient, moments, trained)
        trained = optax.apply_updates(trained, updates)

    Complexity: that of `jax.value_and_grad` for the trainable leaves. Gradients of frozen leaves are neither computed
    nor stored, and only the activations that the trainable leaves' gradients need are saved.

    Args:
        function: `function(params, *arguments)` returns a float scalar, or (scalar, auxiliary results). `params` is any
            pytree; its leaves need not all be arrays.
        trainable: a regex, searched in leaf paths such as "layers/attention/query". The matching leaves of a
            floating-point dtype are trained.
        has_aux: whether the function returns auxiliary results too.

    Returns:
        A function of the same arguments that returns (value, gradient), or ((value, auxiliary), gradient). The gradient
        has the structure of `params`, with None for frozen leaves, and the shapes and dtypes of the trained leaves.

    Raises:
        ValueError: when called: the regex matches no leaf, or none of a floating-point dtype.
    """

    @functools.wraps(function)
    def value_and_gradient(params: Any, *arguments: Any, **named_arguments: Any) -> tuple[Any, Any]:
        split_params = partition(params, trainable)

        # The frozen leaves are closed over instead of passed in, so that nothing differentiates them.
        def call_with_trained(trained: Any) -> Any:
            return function(combine(trained, split_params.frozen), *arguments, **named_arguments)

        return jax.value_and_grad(call_with_trained, has_aux=has_aux)(split_params.trained)

    return value_and_gradient
