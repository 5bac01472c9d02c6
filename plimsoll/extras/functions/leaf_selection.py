"""Selects leaves of any pytree by their kind and by their path, and differentiates by the trainable ones only.

A path such as "layers/attention/query" is matched by a regex, as in `framework.learner.rules`. A frozen parameter is
not an argument of the differentiated function. So no part of its gradient is ever computed, and no compiler has to find
out that it is not needed.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.layout import PyTree, fill_none, flatten

_Array = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct


def is_array(leaf: object) -> bool:
    """Return whether a leaf is an array or the shape of one; Python's own numbers are neither."""
    return isinstance(leaf, _Array)


def is_float(leaf: object) -> bool:
    """Return whether a leaf is an array of real or complex floats, which has a gradient."""
    return isinstance(leaf, _Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_real_float(leaf: object) -> bool:
    """Return whether a leaf is an array of real floats."""
    return isinstance(leaf, _Array) and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_key(leaf: object) -> bool:
    """Return whether a leaf is an array of typed keys (jax.random.key), or the spec of one."""
    return isinstance(leaf, _Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# --- paths -----------------------------------------------------------------------------------------------------------


def matching_paths(pattern: str, paths: Iterable[str], argument: str) -> list[str]:
    """Return the paths in which a regex is found (`re.search`).

    Args:
        pattern: the regex.
        paths: paths of all leaves that it may match.
        argument: name of the argument that holds the pattern, for error messages.

    Raises:
        ValueError: the pattern is not a valid regex, or matches no path; the message lists the closest paths.
    """
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{argument} = {pattern!r} is not a regular expression: {error}") from error
    all_paths = list(paths)
    matched = [path for path in all_paths if regex.search(path)]
    if not matched:
        nearest = ", ".join(map(repr, nearest_paths(pattern, all_paths)))
        raise ValueError(f"{argument} = {pattern!r} matches none of {len(all_paths)} leaves; nearest: {nearest}")
    return matched


def nearest_paths(pattern: str, paths: list[str], count: int = 3) -> list[str]:
    """Return up to `count` of the paths that are most similar to a pattern, best match first."""
    # Parts are compared, because a pattern is often one part of a path and much shorter than the whole path.
    words = re.findall(r"\w+", pattern.lower())

    def similarity(path: str) -> float:
        parts = re.findall(r"\w+", path.lower())
        total = 0.0
        for word in words:
            total += max((difflib.SequenceMatcher(None, word, part).ratio() for part in parts), default=0.0)
        return total

    return sorted(paths, key=similarity, reverse=True)[:count]


# --- trainable and frozen parameters ---------------------------------------------------------------------------------


class Partition(NamedTuple):
    """A tree split in two, both of the same structure, each with None for the leaves of the other.

    `jax.tree.map`, optax and `jax.jit` treat None as having no leaves. No array is copied. It is a tuple, because users
    unpack it.
    """

    trained: PyTree
    frozen: PyTree


def partition(params: PyTree, trainable: str) -> Partition:
    """Split a tree into the float leaves whose path matches a regex, and all other leaves.

    Args:
        params: any pytree, such as nested dicts, an equinox module or flax variables.
        trainable: a regex, searched in paths such as "layers/attention/query".

    Raises:
        ValueError: the regex matches no leaf, or none of a floating-point dtype.
    """
    leaf_by_path = flatten(params)
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


def combine(first: PyTree, second: PyTree) -> PyTree:
    """Merge the two parts of a `Partition`.

    Args:
        first: a tree with None for some leaves.
        second: a tree of the same structure that has those leaves.

    Raises:
        ValueError: the structures differ.
    """

    return fill_none(first, second)


def differentiate(
    function: Callable[..., PyTree], *, trainable: str, has_aux: bool = False
) -> Callable[..., tuple[PyTree, PyTree]]:
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
    def value_and_gradient(params: PyTree, *arguments: PyTree, **named_arguments: PyTree) -> tuple[PyTree, PyTree]:
        split_params = partition(params, trainable)

        # The frozen leaves are closed over instead of passed in, so that nothing differentiates them.
        def call_with_trained(trained: PyTree) -> PyTree:
            return function(combine(trained, split_params.frozen), *arguments, **named_arguments)

        return jax.value_and_grad(call_with_trained, has_aux=has_aux)(split_params.trained)

    return value_and_gradient
