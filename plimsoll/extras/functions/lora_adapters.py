"""LoRA adapters for the matrices of any pytree (Hu et al. 2021, arXiv 2106.09685): create, merge and unmerge them.

    W + (alpha / rank) A B,    W [*stack, in, out] frozen, A [*stack, in, rank] random, B [*stack, rank, out] zeros

The frozen matrices may be stored in 4 bits, as QLoRA does (Dettmers et al. 2023, arXiv 2305.14314); the quantizer is
`framework.layers.quantize`. `with_lora.py` computes with adapters that are not merged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.extras.functions.leaf_selection import is_array, is_float, matching_paths, nearest_paths
from plimsoll.framework.layers.quantize import BLOCK, dequantize, quantize
from plimsoll.framework.layout import PyTree, fold_in_name, path_name


@functools.partial(jax.tree_util.register_dataclass, data_fields=("a", "b"), meta_fields=("scale",))
@dataclass(frozen=True)
class Adapter:
    """Low-rank update of one matrix [*stack, *in, *out]; `in` and `out` are one axis each by default.

    Attributes:
        a: factor A, [*stack, *in, rank].
        b: factor B, [*stack, rank, *out].
        scale: alpha / rank, which multiplies the product A B. It is not a leaf, so no optimizer changes it.
    """

    a: jax.Array
    b: jax.Array
    scale: float

    def num_stack_axes(self, matrix_ndim: int) -> int:
        """Return the number of leading axes that both factors share with a matrix of `matrix_ndim` axes."""
        # Each factor has the rank axis in addition to its own axes of the matrix.
        return self.a.ndim + self.b.ndim - 2 - matrix_ndim

    def factors(self, matrix_ndim: int) -> tuple[jax.Array, jax.Array]:
        """Return A and B in shapes that broadcast: [*stack, *in, 1..., rank] and [*stack, 1..., *out, rank]."""
        num_stack = self.num_stack_axes(matrix_ndim)
        num_in = self.a.ndim - 1 - num_stack
        num_out = self.b.ndim - 1 - num_stack
        *a_sizes, rank = self.a.shape
        b_last = jnp.moveaxis(self.b, num_stack, -1)
        left = self.a.reshape(*a_sizes, *[1] * num_out, rank)
        right = b_last.reshape(*b_last.shape[:num_stack], *[1] * num_in, *b_last.shape[num_stack:])
        return left, right

    def product(self, matrix_ndim: int) -> jax.Array:
        """Return scale * A B, [*stack, *in, *out], in float32 or wider."""
        dtype = jnp.promote_types(self.a.dtype, jnp.float32)
        num_stack = self.num_stack_axes(matrix_ndim)
        stack_shape = self.a.shape[:num_stack]
        rank = self.a.shape[-1]
        a = self.a.astype(dtype).reshape(*stack_shape, -1, rank)
        b = self.b.astype(dtype).reshape(*stack_shape, rank, -1)
        return self.scale * (a @ b).reshape(*self.a.shape[:-1], *self.b.shape[num_stack + 1 :])


Adapters = dict[str, Adapter]


def find_matrices(params: PyTree) -> dict[str, ArrayNode]:
    """Return {path: float array of two or more axes, or QuantizedMatrix}."""
    matrices = {}
    for path, node in find_arrays(params).items():
        if is_quantized(node) or (is_float(node) and len(node.shape) >= 2):
            matrices[path] = node
    return matrices


def lora_init(
    key: jax.Array,
    params: PyTree,
    target: str,
    *,
    rank: int = 16,
    alpha: float = 32.0,
    dtype: jax.typing.DTypeLike = "float32",
    inputs_first: bool = True,
    matrix_axes: tuple[int, int] = (1, 1),
) -> Adapters:
    """Initialize adapters for the matrices whose path matches. The product A B of each is zero at first.

    Complexity: rank (n + m) numbers for each matrix [n, m], also within a stack.

    Args:
        key: a jax.random key. Each adapter folds its path into it, so a different target does not change the others.
        params: any pytree of arrays or of their shapes. Float leaves with two axes are matrices; those with three or
            more axes are stacks of matrices, [*stack, in, out]. An embedding [vocabulary, dim] is a matrix.
        target: a regex, searched in paths such as "layers/attention/query".
        rank: rank of each product A B.
        alpha: the product is multiplied by alpha / rank.
        dtype: dtype of A and B.
        inputs_first: whether a matrix has its inputs before its outputs, as in flax and in x @ W, or after them, as in
            equinox and torch. The factor on the input side is uniform in +-1/sqrt(inputs), as in the authors' code;
            the other factor is zero.
        matrix_axes: number of axes on each side of a matrix: (1, 2) for flax's [inputs, heads, head size]. Any axes
            before them form a stack.

    Returns:
        {path: Adapter}, a pytree for optax. The dicts of several calls can be merged:
        `lora_init(...) | lora_init(...)`.

    Raises:
        ValueError: the regex matches no matrix, or one with too few axes; rank or one of `matrix_axes` is less than 1.
    """
    if min(rank, *matrix_axes) < 1:
        raise ValueError(f"rank = {rank}, matrix_axes = {matrix_axes}: expected at least 1 of each")
    matrices = find_matrices(params)
    num_first, num_last = matrix_axes
    adapters = {}
    for path in matching_paths(target, matrices, "target"):
        shape = tuple(matrices[path].shape)
        num_stack = len(shape) - num_first - num_last
        if num_stack < 0:
            raise ValueError(f"{path} {list(shape)} has fewer axes than matrix_axes = {matrix_axes}")
        stack = shape[:num_stack]
        first = shape[num_stack : num_stack + num_first]
        last = shape[num_stack + num_first :]
        a_shape = (*stack, *first, rank)
        b_shape = (*stack, rank, *last)
        bound = math.prod(first if inputs_first else last) ** -0.5
        # One factor is zero, so the adapters change nothing at first; the other one is random, so that they get a
        # gradient.
        random_shape = a_shape if inputs_first else b_shape
        random = jax.random.uniform(fold_in_name(key, path), random_shape, dtype, -bound, bound)
        a = random if inputs_first else jnp.zeros(a_shape, dtype)
        b = jnp.zeros(b_shape, dtype) if inputs_first else random
        adapters[path] = Adapter(a, b, alpha / rank)
    return adapters


def lora_merge(params: PyTree, adapters: Adapters) -> PyTree:
    """Return the parameters with W + scale * A B for each W that has an adapter.

    The sum is computed in float32 (float64 if W is float64) and cast to W's dtype. It takes 2 rank n m operations for
    a matrix [n, m] and allocates a second array of its size, two while it is computed. A QuantizedMatrix with an
    adapter becomes an array of its original dtype; one without an adapter stays quantized.

    Raises:
        ValueError: an adapter's path names no matrix, or its factors do not fit the matrix's shape.
    """
    return _with_products(params, adapters, 1.0)


def lora_unmerge(params: PyTree, adapters: Adapters) -> PyTree:
    """Undo `lora_merge`, up to rounding: W - scale * A B. A matrix that was in NF4 stays a plain array.

    Raises:
        ValueError: see `lora_merge`.
    """
    return _with_products(params, adapters, -1.0)


def _with_products(params: PyTree, adapters: Adapters, sign: float) -> PyTree:
    check_adapters(params, adapters)

    def merge(keypath: tuple[object, ...], node: PyTree) -> PyTree:
        adapter = adapters.get(path_name(keypath))
        if adapter is None:
            return node
        matrix = node.dense() if isinstance(node, QuantizedMatrix) else jnp.asarray(node)
        dtype = jnp.promote_types(matrix.dtype, jnp.float32)
        return (matrix.astype(dtype) + sign * adapter.product(matrix.ndim).astype(dtype)).astype(matrix.dtype)

    return jax.tree_util.tree_map_with_path(merge, params, is_leaf=is_quantized)


def check_adapters(params: PyTree, adapters: Adapters) -> None:
    """Raise ValueError if an adapter's path names no matrix, or its factors do not fit the matrix's shape."""
    matrices = find_matrices(params)
    for path, adapter in adapters.items():
        if path not in matrices:
            nearest = ", ".join(map(repr, nearest_paths(path, list(matrices))))
            raise ValueError(f"adapters: {path!r} is none of {len(matrices)} matrices; nearest: {nearest}")
        if not is_array(adapter.a) or not is_array(adapter.b):
            raise ValueError(f"adapters: {path!r} has no arrays, but {adapter}")
        shape = tuple(matrices[path].shape)
        if not _fits(adapter, shape):
            raise ValueError(
                f"adapters: {path!r} has factors of {adapter.a.shape} and {adapter.b.shape}; "
                f"expected (*stack, *in, rank) and (*stack, rank, *out) of the matrix {shape}"
            )


def _fits(adapter: Adapter, shape: tuple[int, ...]) -> bool:
    """Return whether the product of the factors has the shape of the matrix."""
    num_stack = adapter.num_stack_axes(len(shape))
    if not 0 <= num_stack < adapter.b.ndim:
        return False
    has_stack = adapter.b.shape[:num_stack] == shape[:num_stack]
    has_rank = adapter.b.shape[num_stack] == adapter.a.shape[-1]
    return has_stack and has_rank and (*adapter.a.shape[:-1], *adapter.b.shape[num_stack + 1 :]) == shape


# --- matrices in 4 bits ----------------------------------------------------------------------------------------------

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
    dtype: np.dtype
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


def is_quantized(node: object) -> bool:
    """Return whether a node of a tree is a QuantizedMatrix."""
    return isinstance(node, QuantizedMatrix)


# An array, the shape of one, or a matrix in 4 bits.
ArrayNode = jax.Array | jax.ShapeDtypeStruct | QuantizedMatrix


def find_arrays(tree: PyTree) -> dict[str, ArrayNode]:
    """Return {path: array, or its shape, or a QuantizedMatrix} for any pytree, in its own order."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantized)
    return {path_name(keypath): node for keypath, node in nodes if is_array(node) or is_quantized(node)}


def lora_quantize(params: PyTree, target: str) -> PyTree:
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
    matrices = [path for path, leaf in leaves.items() if is_float(leaf) and len(leaf.shape) >= 2]
    targets = set(matching_paths(target, matrices, "target"))
    for path in targets:
        if leaves[path].shape[-2] % BLOCK:
            raise ValueError(
                f"{path} {list(leaves[path].shape)}: nf4 has blocks of {BLOCK} rows, which do not divide the "
                "second-to-last axis; exclude it from target"
            )

    def quantize_leaf(keypath: tuple[object, ...], leaf: PyTree) -> PyTree:
        if path_name(keypath) not in targets:
            return leaf
        quantized = quantize(leaf, "nf4")
        return QuantizedMatrix(quantized["codes"], quantized["scales"], jnp.dtype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(quantize_leaf, params)
