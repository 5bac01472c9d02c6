"""Frozen matrices in 4 bits, as QLoRA stores them (Dettmers et al. 2023, arXiv 2305.14314).

Imports jax, `framework.layout` and the quantizer, `framework.layers.quantize`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.extras.functions.leaves import is_array, is_float
from plimsoll.extras.functions.paths import matching_paths
from plimsoll.framework.layers.quantize import BLOCK, dequantize, quantize
from plimsoll.framework.layout import path_name

View = Callable[[jax.Array], jax.Array]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scales"), meta_fields=("dtype", "views"))
@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [*stack, inputs, outputs] that is stored in NF4 and replaces an array of a tree.

    Attributes:
        codes: uint32 [*stack, inputs / 8, outputs], eight values per word.
        scales: float32 [*stack, inputs / 64, outputs].
        dtype: dtype of the dequantized matrix.
        views: operations (such as a transposition) applied to the matrix, in order, each time it is dequantized.
    """

    codes: jax.Array
    scales: jax.Array
    dtype: Any
    views: tuple[View, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, after its views."""
        # Views are arbitrary functions, so their shape is found by tracing; nothing is dequantized.
        return jax.eval_shape(QuantizedMatrix.dense, self).shape

    @property
    def num_stack_axes(self) -> int:
        """Number of leading axes along which codes and scales can be sliced like the matrix; 0 if there are views."""
        return 0 if self.views else self.codes.ndim - 2

    def dense(self) -> jax.Array:
        """Return the dequantized matrix: an array as large as the one that was quantized."""
        matrix = dequantize({"codes": self.codes, "scales": self.scales}, "nf4", self.dtype)
        for view in self.views:
            matrix = view(matrix)
        return matrix

    def apply_view(self, view: View) -> QuantizedMatrix:
        """Return the same matrix with `view` applied after dequantization."""
        return replace(self, views=(*self.views, view))

    def slice_stack(self, view: View) -> QuantizedMatrix:
        """Return the same matrix with `view` applied to codes and scales; only for views of leading stack axes."""
        return replace(self, codes=view(self.codes), scales=view(self.scales))


def is_quantized(node: Any) -> bool:
    """Return whether a node of a tree is a QuantizedMatrix."""
    return isinstance(node, QuantizedMatrix)


def find_arrays(tree: Any) -> dict[str, Any]:
    """Return {path: array, or its shape, or a QuantizedMatrix} for any pytree, in its own order."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantized)
    return {path_name(keypath): node for keypath, node in nodes if is_array(node) or is_quantized(node)}


def lora_quantize(params: Any, target: str) -> Any:
    """Quantize the matrices whose path matches to NF4, for `with_lora`; all other leaves stay as they are.

    Complexity: 4.5 bits per weight: half a byte, and a float32 scale for every 64 weights. Each weight is compared with
    15 numbers in float32, so outside of `jax.jit` several arrays of a matrix's size exist during quantization.

    Args:
        params: any pytree. A leaf of two axes or more is a matrix, or a stack of them, [*stack, inputs, outputs].
        target: a regex, searched in paths such as "layers/attention/query".

    Raises:
        ValueError: the regex matches no matrix, or one whose `inputs` (the second-to-last axis) is not divisible by 64.
    """
    leaves = find_arrays(params)
    matrices = [path for path, leaf in leaves.items() if is_float(leaf) and leaf.ndim >= 2]
    targets = set(matching_paths(target, matrices, "target"))
    for path in targets:
        if leaves[path].shape[-2] % BLOCK:
            raise ValueError(
                f"{path} {list(leaves[path].shape)}: nf4 has blocks of {BLOCK} rows, which do not divide the "
                "second-to-last axis; exclude it from target"
            )

    def quantize_leaf(keypath: tuple[Any, ...], leaf: Any) -> Any:
        if path_name(keypath) not in targets:
            return leaf
        quantized = quantize(leaf, "nf4")
        return QuantizedMatrix(quantized["codes"], quantized["scales"], jnp.dtype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(quantize_leaf, params)
