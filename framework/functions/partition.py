"""The value and the gradient of a function, with respect to the parameters that are trained and to no others.

A frozen parameter is no argument of the function that is differentiated. So nothing of its gradient is ever computed,
and no compiler has to find out that it is not needed. Imports jax and `framework.layout`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from framework.functions.leaves import is_float
from framework.functions.paths import matching_paths, named_leaves


class Partition(NamedTuple):
    """A tree in two, both of its structure, with None in the place of each leaf that is in the other.

    `jax.tree.map`, optax and `jax.jit` see no leaf in a None. No array is copied.
    """

    trained: Any
    frozen: Any


def partition(params: Any, trainable: str) -> Partition:
    """Parts a tree into the float leaves whose path matches a regex, and all others.

    Args:
        params: any pytree: nested dicts, an equinox module, the variables of flax.
        trainable: a regex, searched in paths such as "layers/attention/query".

    Raises:
        ValueError: the regex matches no leaf, or none of a floating-point dtype.
    """
    trained_paths = _trained_paths(params, trainable)
    leaves, structure = jax.tree.flatten(params)
    paths = list(named_leaves(params))
    trained = [leaf if path in trained_paths else None for path, leaf in zip(paths, leaves, strict=True)]
    frozen = [None if path in trained_paths else leaf for path, leaf in zip(paths, leaves, strict=True)]
    return Partition(structure.unflatten(trained), structure.unflatten(frozen))


def _trained_paths(params: Any, trainable: str) -> set[str]:
    leaves = named_leaves(params)
    matched = matching_paths(trainable, leaves, "trainable")
    trained_paths = {path for path in matched if is_float(leaves[path])}
    if not trained_paths:
        kinds = ", ".join(f"{path} ({_kind(leaves[path])})" for path in matched[:3])
        raise ValueError(f"trainable = {trainable!r} matches no leaf of a floating-point dtype, but {kinds}")
    return trained_paths


def _kind(leaf: Any) -> str:
    return str(getattr(leaf, "dtype", type(leaf).__name__))


def combine(first: Any, second: Any) -> Any:
    """Puts the two parts of a `Partition` together again.

    Args:
        first: a tree with None in some places.
        second: a tree of the same structure; it gives the leaves in those places.

    Raises:
        ValueError: the structures differ.
    """

    def is_none(node: Any) -> bool:
        return node is None

    return jax.tree.map(lambda left, right: right if left is None else left, first, second, is_leaf=is_none)


def differentiate(
    function: Callable[..., Any],
    *,
    trainable: str,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """The value of a function and its gradient with respect to the trained parameters alone.

        loss_and_gradient = pl.differentiate(loss, trainable="lora|norm")
        trained, frozen = pl.partition(params, "lora|norm")
        loss, gradient = loss_and_gradient(pl.combine(trained, frozen), batch)
        updates, moments = optimizer.update(gradient, moments, trained)
        trained = optax.apply_updates(trained, updates)

    Complexity: that of `jax.value_and_grad` of the trained leaves. Nothing is computed or held of the frozen leaves'
    gradients, and of the activations what the trained leaves' gradients need.

    Args:
        function: `function(params, *arguments)` returns a scalar of a float dtype, or (scalar, auxiliary results).
            `params` is any pytree; its leaves need not all be arrays.
        trainable: a regex, searched in paths of leaves such as "layers/attention/query"; of what it matches, the
            leaves of a floating-point dtype are trained.
        has_aux: whether the function returns auxiliary results, too.

    Returns:
        A function of the same arguments that returns (value, gradient), or ((value, auxiliary), gradient). The gradient
        has the structure of `params`, with None for each frozen leaf; a trained leaf's has its shape and dtype.

    Raises:
        ValueError: when it is called: the regex matches no leaf, or none of a floating-point dtype.
    """

    @functools.wraps(function)
    def value_and_gradient(params: Any, *arguments: Any, **named_arguments: Any) -> tuple[Any, Any]:
        parts = partition(params, trainable)

        def of_trained(trained: Any) -> Any:
            return function(combine(trained, parts.frozen), *arguments, **named_arguments)

        return jax.value_and_grad(of_trained, has_aux=has_aux)(parts.trained)

    return value_and_gradient
