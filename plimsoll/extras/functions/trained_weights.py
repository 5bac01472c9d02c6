"""`Trained`: weights with the state of their optimizer, as a tree of floats that `jax.grad` can return after an update.

JAX requires that the cotangent of a float array has its shape and dtype. The cotangent of any other array is `float0`,
which holds nothing. An optimizer state also has counters and keys, so these are stored as floats of the same value.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from plimsoll.extras.functions.leaf_selection import is_array, is_key, is_real_float
from plimsoll.framework.layout import PyTree
from plimsoll.framework.learner.update import slice_layer


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
    key_impl: Hashable = field(metadata={"static": True})

    def decode(self) -> jax.Array:
        """Return the original array."""
        dtype = jnp.dtype(self.dtype)
        if dtype.itemsize > 2:
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

    value: Hashable


def is_encoded_leaf(node: object) -> bool:
    """Return whether a node represents one leaf of the tree that was encoded."""
    return isinstance(node, (EncodedArray, Static))


def encode(tree: PyTree) -> PyTree:
    """Wrap each non-float array of the tree in an `EncodedArray`, and each leaf that is not an array in a `Static`.

    Raises:
        ValueError: an array is complex.
    """
    return jax.tree.map(_encode_leaf, tree)


def decode(tree: PyTree) -> PyTree:
    """Invert `encode`."""

    def leaf(node: PyTree) -> PyTree:
        if isinstance(node, EncodedArray):
            return node.decode()
        return node.value if isinstance(node, Static) else node

    return jax.tree.map(leaf, tree, is_leaf=is_encoded_leaf)


def wrap_static(tree: PyTree) -> PyTree:
    """Wrap each leaf that is not an array in a `Static`; arrays of any dtype stay. `decode` is the inverse."""
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else Static(leaf), tree)


def select_floats(encoded_tree: PyTree) -> PyTree:
    """Return the floats of an encoded tree, with None, a node without leaves, for everything else."""
    return jax.tree.map(lambda node: None if is_encoded_leaf(node) else node, encoded_tree, is_leaf=is_encoded_leaf)


def with_floats(encoded_tree: PyTree, floats: PyTree) -> PyTree:
    """Return the encoded tree with its floats replaced by those of a tree like the result of `select_floats`."""
    new_floats = iter(jax.tree.leaves(floats))
    return jax.tree.map(
        lambda node: node if is_encoded_leaf(node) else next(new_floats), encoded_tree, is_leaf=is_encoded_leaf
    )


def _encode_leaf(leaf: PyTree) -> jax.Array | EncodedArray | Static:
    if not is_array(leaf):
        return Static(leaf)
    if is_real_float(leaf):
        return jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        raise ValueError(f"an array of {leaf.dtype}: expected floats, integers, bools or PRNG keys")
    key_impl = jax.random.key_impl(leaf) if is_key(leaf) else None
    array = jnp.asarray(leaf) if key_impl is None else jax.random.key_data(leaf)
    if array.dtype.itemsize > 2:
        floats = jax.lax.bitcast_convert_type(array, jnp.uint16).astype(jnp.float32)
    else:
        # float32 holds every 16-bit integer exactly, and bfloat16 every 8-bit one.
        floats = array.astype(jnp.float32 if array.dtype.itemsize == 2 else jnp.bfloat16)
    return EncodedArray(floats, str(array.dtype), key_impl)


# --- weights and state -----------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trained:
    """The weights of a module and the state of their optimizer: a pytree whose leaves are all floats.

    So it can be an argument of `jax.grad`, whose result for it is the `Trained` after the update. It can be jitted,
    donated, sharded and saved like any pytree. Read its contents through `weights` and `state`.

    Attributes:
        encoded_weights: the weights as floats, see `encode`.
        encoded_state: the optimizer state as floats, see `encode`.
        name: name of the module.
    """

    encoded_weights: PyTree
    encoded_state: PyTree
    name: str = field(metadata={"static": True})

    @property
    def weights(self) -> PyTree:
        """The weights, in their original structure and dtypes."""
        return decode(self.encoded_weights)

    @property
    def state(self) -> PyTree:
        """The optimizer state, in its original structure and dtypes."""
        return decode(self.encoded_state)

    @property
    def floats(self) -> PyTree:
        """The float weights, which gradients are taken of; None for all other leaves."""
        return select_floats(self.encoded_weights)

    def weights_with(self, floats: PyTree) -> PyTree:
        """Return the weights with the float leaves replaced."""
        return decode(with_floats(self.encoded_weights, floats))

    def slice_weights(self, index: jax.Array) -> Trained:
        """Return the weights of one layer of a stack, without its state."""
        return Trained(slice_layer(self.encoded_weights, index), (), self.name)


# --- stacked layers --------------------------------------------------------------------------------------------------


def num_layers(name: str, stack: PyTree) -> int:
    """Return the number of layers of a stack.

    Args:
        name: name of the stack, for the message.
        stack: any pytree whose arrays are [L, ...].

    Raises:
        ValueError: the arrays have different numbers of layers, or one is a scalar.
    """
    leaves = jax.tree.leaves(stack)
    lengths = {leaf.shape[:1] for leaf in leaves}
    if len(lengths) != 1 or () in lengths:
        shapes = [leaf.shape for leaf in leaves]
        raise ValueError(
            f"{name}: expected arrays [L, ...] with the same number of layers L, given the shapes {shapes[:8]}"
        )
    return leaves[0].shape[0]


# --- uses ------------------------------------------------------------------------------------------------------------

# Array classes that a differentiated function sees. A jitted function sees others, in which a second use may be
# correct (an evaluation), so those are not checked.
_DIFFERENTIATED = {"JVPTracer", "LinearizeTracer"}


# {id of a traced array: (the array, name of the module that used it)}. By identity, because traced arrays are not
# hashable. Entries disappear with their trace.
_user_by_array: dict[int, tuple[weakref.ref[jax.Array], str]] = {}


def record_use(trained: Trained, name: str) -> None:
    """Record that a module uses weights, and refuse a second use in a function that is being differentiated.

    Raises:
        TypeError: `trained` does not come from `init`.
        ValueError: the same weights were used before in the same differentiated function.
    """
    if not isinstance(trained, Trained):
        raise TypeError(f"{name}: expected the Trained of `init`, given {type(trained).__name__}")
    for leaf in jax.tree.leaves(trained):
        if type(leaf).__name__ not in _DIFFERENTIATED:
            continue
        key = id(leaf)
        reference, first_name = _user_by_array.get(key, (None, ""))
        if reference is not None and reference() is leaf:
            raise ValueError(describe_double_use(trained.name, {first_name, name}))

        def forget(reference: weakref.ref[jax.Array], key: int = key) -> None:
            # The id may have been reused for another array.
            if _user_by_array.get(key, (None, ""))[0] is reference:
                del _user_by_array[key]

        _user_by_array[key] = (weakref.ref(leaf, forget), name)


def describe_double_use(name: str, modules: set[str]) -> str:
    """Return the error message for weights that are used more than once."""
    by = "" if modules == {name} else f", by {', '.join(sorted(modules))}"
    return (
        f"the module {name!r} is used twice{by}: each use would update the weights by its own part of the gradient, "
        "and JAX would add the results; get the weights once from eager_weights, and use them as often as you like"
    )
