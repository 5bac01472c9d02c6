"""Trees whose arrays are all floats, so that a new value can be returned as a cotangent.

JAX requires that the cotangent of a float array has its shape and dtype. The cotangent of any other array is `float0`,
which holds nothing. An optimizer state also has counters and keys, so these are stored as floats of the same value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.extras.functions.leaves import is_array, is_key, is_real_float

# Any pytree.
Tree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EncodedArray:
    """An array of bools, integers or PRNG keys, stored as floats.

    Attributes:
        floats: the values. 32- and 64-bit numbers are split into 16-bit words along a new last axis, in float32. 16-bit
            numbers are in float32. Smaller ones are in bfloat16, which holds integers up to 256 exactly.
        dtype: dtype of the array; for keys, that of their words.
        key_impl: implementation of the keys; None for other arrays.
    """

    floats: jax.Array
    dtype: str = field(metadata={"static": True})
    key_impl: Any = field(metadata={"static": True})

    def decode(self) -> jax.Array:
        """Return the original array."""
        dtype = jnp.dtype(self.dtype)
        if _is_split(dtype):
            words16 = self.floats.astype(jnp.uint16)
            array = jax.lax.bitcast_convert_type(words16, dtype)
        else:
            array = self.floats.astype(dtype)
        if self.key_impl is None:
            return array
        return jax.random.wrap_key_data(array, impl=self.key_impl)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """A leaf that is not an array, such as the activation function in an equinox module; it must be hashable."""

    value: Any


def is_encoded_leaf(node: Any) -> bool:
    """Return whether a node represents one leaf of the tree that was encoded."""
    return isinstance(node, (EncodedArray, Static))


def encode(tree: Tree) -> Tree:
    """Wrap each non-float array of the tree in an `EncodedArray`, and each leaf that is not an array in a `Static`.

    Raises:
        ValueError: an array is complex.
    """
    return jax.tree.map(_encode_leaf, tree)


def decode(tree: Tree) -> Tree:
    """Invert `encode`."""

    def leaf(node: Any) -> Any:
        if isinstance(node, EncodedArray):
            return node.decode()
        return node.value if isinstance(node, Static) else node

    return jax.tree.map(leaf, tree, is_leaf=is_encoded_leaf)


def wrap_static(tree: Tree) -> Tree:
    """Wrap each leaf that is not an array in a `Static`; arrays of any dtype stay. `decode` is the inverse."""
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else Static(leaf), tree)


def select_floats(encoded_tree: Tree) -> Tree:
    """Return the floats of an encoded tree, with None, a node without leaves, for everything else."""
    return jax.tree.map(lambda node: None if is_encoded_leaf(node) else node, encoded_tree, is_leaf=is_encoded_leaf)


def with_floats(encoded_tree: Tree, floats: Tree) -> Tree:
    """Return the encoded tree with its floats replaced by those of a tree like the result of `select_floats`."""
    new_floats = iter(jax.tree.leaves(floats))
    return jax.tree.map(
        lambda node: node if is_encoded_leaf(node) else next(new_floats), encoded_tree, is_leaf=is_encoded_leaf
    )


def _encode_leaf(leaf: Any) -> Any:
    if not is_array(leaf):
        return Static(leaf)
    if is_real_float(leaf):
        return jnp.asarray(leaf)
    if is_key(leaf):
        words = jax.random.key_data(leaf)
        return EncodedArray(_as_floats(words), str(words.dtype), jax.random.key_impl(leaf))
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        raise ValueError(f"an array of {leaf.dtype}: expected floats, integers, bools or PRNG keys")
    array = jnp.asarray(leaf)
    return EncodedArray(_as_floats(array), str(array.dtype), None)


def _as_floats(array: jax.Array) -> jax.Array:
    if _is_split(array.dtype):
        words16 = jax.lax.bitcast_convert_type(array, jnp.uint16)
        return words16.astype(jnp.float32)
    # float32 holds every 16-bit integer exactly, and bfloat16 every 8-bit one.
    return array.astype(jnp.float32 if array.dtype.itemsize == 2 else jnp.bfloat16)


def _is_split(dtype: Any) -> bool:
    """Return whether arrays of a dtype are split into 16-bit words."""
    return dtype.itemsize > 2
