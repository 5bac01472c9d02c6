"""Closure conversion for JAX's custom differentiation rules, which need every value as an argument.

`jax.custom_vjp` cannot differentiate with respect to values that a function closes over. So the function is traced
once, and the traced values that it closes over become its first argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import core

from plimsoll.extras.functions.leaves import is_array
from plimsoll.framework.layout import fill_none, floats


@dataclass(frozen=True)
class HoistedFunction:
    """A traced function with its closed-over values as the first argument.

    Attributes:
        call: (values, *arguments) -> result.
        values: traced values that the original function closes over.
        result: shapes and dtypes of the result, a tree of jax.ShapeDtypeStruct.
    """

    call: Callable[..., Any]
    values: list[Any]
    result: Any


def hoist_closure(function: Callable[..., Any], *examples: Any) -> HoistedFunction:
    """Trace `function` for arguments with the shapes and dtypes of `examples`, trees of jax.ShapeDtypeStruct."""
    closed, result = jax.make_jaxpr(function, return_shape=True)(*examples)
    structure = jax.tree.structure(result)
    # A value that is not a tracer depends on nothing that is differentiated or mapped, so it stays a constant.
    is_traced = [isinstance(value, core.Tracer) for value in closed.consts]

    def call(values: list[Any], *arguments: Any) -> Any:
        next_value = iter(values)
        consts = [next(next_value) if traced else const for traced, const in zip(is_traced, closed.consts, strict=True)]
        leaves = core.eval_jaxpr(closed.jaxpr, consts, *jax.tree.leaves(arguments))
        return jax.tree.unflatten(structure, leaves)

    values = [value for traced, value in zip(is_traced, closed.consts, strict=True) if traced]
    return HoistedFunction(call, values, result)


def compute_float_vjp(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """Apply `jax.vjp` to trees of any arrays, including integers, booleans and keys.

    Returns:
        (the float part of the result, a function from its cotangents to those of the arguments). All of them are trees
        with None for leaves that have no gradient, see `framework.layout.floats`.
    """

    def call_with_floats(*float_arguments: Any) -> Any:
        full_arguments = [fill_none(new, old) for new, old in zip(float_arguments, arguments, strict=True)]
        return floats(function(*full_arguments))

    return jax.vjp(call_with_floats, *(floats(argument) for argument in arguments))


def select_arrays(tree: Any) -> Any:
    """Return the tree with None for leaves that are not arrays, such as an activation function in an equinox module."""

    def array_or_none(leaf: Any) -> Any:
        return leaf if is_array(leaf) else None

    return jax.tree.map(array_or_none, tree)


def select_constants(tree: Any) -> Any:
    """Return the tree with None for its arrays."""

    def constant_or_none(leaf: Any) -> Any:
        return None if is_array(leaf) else leaf

    return jax.tree.map(constant_or_none, tree)
