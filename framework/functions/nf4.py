"""Frozen matrices in 4 bits, as QLoRA stores them (Dettmers et al. 2023, arXiv 2305.14314).

Imports jax, `framework.layout` and the storage itself, `framework.layers.quantize`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from framework.functions.leaves import is_array, is_float
from framework.functions.paths import matching_paths
from framework.layers.quantize import BLOCK, dequantize, quantize
from framework.layout import path_name

View = Callable[[jax.Array], jax.Array]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scales"), meta_fields=("dtype", "views"))
@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [*stack, inputs, outputs] that is stored in NF4, in the place of an array of a tree.

    Attributes:
        codes: uint32 [*stack, inputs / 8, outputs], eight values in a word.
        scales: float32 [*stack, inputs / 64, outputs].
        dtype: of the matrix when it is dequantized.
        views: what has been done with the matrix since (a transposition, say), in order; done when it is dequantized.
    """

    codes: jax.Array
    scales: jax.Array
    dtype: Any
    views: tuple[View, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix, after its views."""
        return jax.eval_shape(QuantizedMatrix.dense, self).shape

    @property
    def num_stack_axes(self) -> int:
        """The leading axes along which codes and scales can be sliced as the matrix is; 0 where there are views."""
        return 0 if self.views else self.codes.ndim - 2

    def dense(self) -> jax.Array:
        """The matrix itself: an array as large as the one that was quantized."""
        matrix = dequantize({"codes": self.codes, "scales": self.scales}, "nf4", self.dtype)
        for view in self.views:
            matrix = view(matrix)
        return matrix

    def viewed(self, view: View) -> QuantizedMatrix:
        """The same matrix, of which `view` is taken when it is dequantized."""
        return replace(self, views=(*self.views, view))

    def sliced(self, view: View) -> QuantizedMatrix:
        """The same matrix, with `view` taken of codes and scales: what changes leading axes of the stack alone."""
        return replace(self, codes=view(self.codes), scales=view(self.scales))


def is_quantized(node: Any) -> bool:
    """Whether a node of a tree is a QuantizedMatrix."""
    return isinstance(node, QuantizedMatrix)


def named_arrays(tree: Any) -> dict[str, Any]:
    """Returns {path: array, or its shape, or a QuantizedMatrix} of any pytree, in its own order."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantized)
    return {path_name(keypath): node for keypath, node in nodes if is_array(node) or is_quantized(node)}


def lora_quantize(params: Any, target: str) -> Any:
    """Stores the matrices whose path matches in NF4, for `with_lora`; all other leaves come back as they are.

    Complexity: 4.5 bits for each weight, half a byte and a float32 for 64 of them. It is compared with 15 numbers, in
    float32: outside of `jax.jit` there are several arrays of a matrix's size while it is stored.

    Args:
        params: any pytree. A leaf of two axes or more is a matrix, or a stack of them, [*stack, inputs, outputs].
        target: a regex, searched in paths such as "layers/attention/query".

    Raises:
        ValueError: the regex matches no matrix, or one whose `inputs` (the last axis but one) 64 does not divide.
    """
    leaves = named_arrays(params)
    matrices = [path for path, leaf in leaves.items() if is_float(leaf) and leaf.ndim >= 2]
    targets = set(matching_paths(target, matrices, "target"))
    for path in targets:
        if leaves[path].shape[-2] % BLOCK:
            raise ValueError(
                f"{path} {list(leaves[path].shape)}: nf4 has blocks of {BLOCK} rows, which do not divide the last axis "
                "but one; expected a target without it"
            )

    def stored(keypath: tuple[Any, ...], leaf: Any) -> Any:
        if path_name(keypath) not in targets:
            return leaf
        parts = quantize(leaf, "nf4")
        return QuantizedMatrix(parts["codes"], parts["scales"], jnp.dtype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(stored, params)
