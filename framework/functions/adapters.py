"""LoRA's adapters for the matrices of any pytree (Hu et al. 2021, arXiv 2106.09685): made, merged, taken out again.

    W + (alpha / rank) A B,    W [*stack, in, out] frozen, A [*stack, in, rank] random, B [*stack, rank, out] zeros

Imports jax and `framework.layout`. `with_lora.py` computes with adapters that are not merged.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from framework.functions.nf4 import is_quantized
from framework.functions.paths import is_array, is_float, matching_paths, nearest_paths
from framework.layout import fold_in_name, path_name


@functools.partial(jax.tree_util.register_dataclass, data_fields=("a", "b"), meta_fields=("scale",))
@dataclass(frozen=True)
class Adapter:
    """What is added to one matrix [*stack, in, out], or to each of a stack.

    Attributes:
        a: [*stack, in, rank].
        b: [*stack, rank, out].
        scale: alpha / rank, which multiplies their product; it is no leaf, so no optimizer changes it.
    """

    a: jax.Array
    b: jax.Array
    scale: float

    def product(self) -> jax.Array:
        """scale * A B, [*stack, in, out], in float32 at least."""
        dtype = jnp.promote_types(self.a.dtype, jnp.float32)
        return self.scale * (self.a.astype(dtype) @ self.b.astype(dtype))


Adapters = dict[str, Adapter]


def named_matrices(params: Any) -> dict[str, Any]:
    """{path: float array of two axes or more, or a QuantizedMatrix}."""
    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    named_nodes = {path_name(keypath): node for keypath, node in nodes}
    return {path: node for path, node in named_nodes.items() if _is_matrix(node)}


def _is_matrix(node: Any) -> bool:
    return is_quantized(node) or (is_float(node) and len(node.shape) >= 2)


def lora_init(
    key: jax.Array,
    params: Any,
    target: str,
    *,
    rank: int = 16,
    alpha: float = 32.0,
    dtype: Any = "float32",
    in_axis: Literal[-2, -1] = -2,
) -> Adapters:
    """Draws adapters for the matrices whose path matches. The product of each is zero at first.

    Args:
        key: of jax.random; each adapter's own key is folded with its path, so that another target changes none.
        params: any pytree, of arrays or of their shapes. Its float leaves of two axes or more are matrices, and those
            of three axes or more stacks of matrices, [*stack, in, out]; an embedding [vocabulary, dim] is a matrix.
        target: a regex, searched in paths such as "layers/attention/query".
        rank: of each product A B.
        alpha: the product is multiplied by alpha / rank.
        dtype: of A and B.
        in_axis: the axis of a matrix that its input meets, -2 as in flax and in x @ W, -1 as in equinox and torch. The
            factor on that side is uniform in +-1/sqrt(in), as the authors' code has it, and the other one is zero.

    Returns:
        {path: Adapter}, a pytree for optax.

    Raises:
        ValueError: the regex matches no matrix; rank is less than 1, or in_axis another one.
    """
    if rank < 1:
        raise ValueError(f"rank = {rank}: expected at least 1")
    if in_axis not in (-2, -1):
        raise ValueError(f"in_axis = {in_axis}: expected -2, as in x @ W, or -1, as in W @ x")
    matrices = named_matrices(params)
    adapters = {}
    for path in matching_paths(target, matrices, "target"):
        *stack, rows, columns = matrices[path].shape
        bound = matrices[path].shape[in_axis] ** -0.5
        a_shape = (*stack, rows, rank)
        b_shape = (*stack, rank, columns)
        random_shape = a_shape if in_axis == -2 else b_shape
        random = jax.random.uniform(fold_in_name(key, path), random_shape, dtype, -bound, bound)
        a = random if in_axis == -2 else jnp.zeros(a_shape, dtype)
        b = random if in_axis == -1 else jnp.zeros(b_shape, dtype)
        adapters[path] = Adapter(a, b, alpha / rank)
    return adapters


def lora_merge(params: Any, adapters: Adapters) -> Any:
    """The parameters with W + scale * A B in the place of each W that has an adapter.

    This is computed in float32, or in float64 where W is, and cast to W's dtype. A QuantizedMatrix with an adapter
    becomes an array of the dtype that it had; one without an adapter stays.

    Raises:
        ValueError: an adapter's path is that of no matrix, or its factors do not have the matrix's shape.
    """
    return _with_products(params, adapters, 1.0)


def lora_unmerge(params: Any, adapters: Adapters) -> Any:
    """The inverse of `lora_merge`, up to rounding: W - scale * A B. What was in NF4 stays an array.

    Raises:
        ValueError: as `lora_merge` does.
    """
    return _with_products(params, adapters, -1.0)


def _with_products(params: Any, adapters: Adapters, sign: float) -> Any:
    check_adapters(params, adapters)

    def changed(keypath: tuple[Any, ...], node: Any) -> Any:
        adapter = adapters.get(path_name(keypath))
        if adapter is None:
            return node
        matrix = node.dense() if is_quantized(node) else jnp.asarray(node)
        dtype = jnp.promote_types(matrix.dtype, jnp.float32)
        return (matrix.astype(dtype) + sign * adapter.product().astype(dtype)).astype(matrix.dtype)

    return jax.tree_util.tree_map_with_path(changed, params, is_leaf=is_quantized)


def check_adapters(params: Any, adapters: Adapters) -> None:
    """Raises ValueError: an adapter's path is that of no matrix, or its factors do not have the matrix's shape."""
    matrices = named_matrices(params)
    for path, adapter in adapters.items():
        if path not in matrices:
            nearest = ", ".join(map(repr, nearest_paths(path, list(matrices))))
            raise ValueError(f"adapters: {path!r} is none of {len(matrices)} matrices; nearest: {nearest}")
        if not is_array(adapter.a) or not is_array(adapter.b):
            raise ValueError(f"adapters: {path!r} has no arrays, but {adapter}")
        *stack, rows, columns = matrices[path].shape
        rank = adapter.a.shape[-1]
        expected = ((*stack, rows, rank), (*stack, rank, columns))
        given = (adapter.a.shape, adapter.b.shape)
        if given != expected:
            raise ValueError(f"adapters: {path!r} has factors of {given}; expected {expected}")
