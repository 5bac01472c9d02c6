"""Stacked layers: trees of arrays [L, ...] for L layers."""

from __future__ import annotations

from typing import Any

import jax

from plimsoll.extras.functions.trained import Trained


def num_layers(name: str, stack: Any) -> int:
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


def layer_at(stack: Any, index: Any) -> Any:
    """Return one layer of a stack, [...] for each array."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), stack)


def weights_at(stack: Trained, index: Any) -> Trained:
    """Return the weights of one layer of a stack, without its state."""
    return Trained(layer_at(stack.encoded_weights, index), (), stack.name)


def with_layer(stack: Any, layer: Any, index: Any) -> Any:
    """Return the stack with one layer replaced."""

    def write_layer(stack_leaf: jax.Array, leaf: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack_leaf, leaf, index, 0)

    return jax.tree.map(write_layer, stack, layer)
