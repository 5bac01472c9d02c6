"""The storage of a matrix under `model.lora`: in few bits, with an adapter, or both; and the products of experts.

    row n of expert e:  y_n = x_n W_e + (alpha / rank) x_n A_e B_e,   W [E, in, out], A [E, in, rank], B [E, rank, out]

This is LoRA (arXiv 2106.09685) for each expert's matrix separately. A product with W dequantizes W, forward and
backward, and saves nothing of it; `Multiply` determines how much of W exists at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from plimsoll.framework.layers.quantize import Storage, dequantize, make_quantized_specs
from plimsoll.framework.layout import Nested, ParameterSpec

# Converts stored weights, a tree of arrays such as codes and scales, to floats [..., in, out].
Dense = Callable[[Nested], jax.Array]


class Multiply(Protocol):
    """Multiplies rows by their experts' weights, in x's dtype."""

    def __call__(
        self, x: jax.Array, weights: Nested, dense: Dense, transpose: bool, sizes: jax.Array | None
    ) -> jax.Array:
        """Return the product.

        Args:
            x: rows [..., in], or with `transpose` [..., out].
            weights: a tree of arrays with a leading expert axis.
            dense: converts such a tree to the weights [..., in, out].
            transpose: multiply by the transposed weights.
            sizes: int32[E], the number of rows of each expert, if the rows are sorted.
        """
        ...


@dataclass(frozen=True)
class StoredMatrix:
    """The storage of one matrix of the experts, or of a linear layer.

    Attributes:
        path: path of the matrix, for messages.
        base: the dtype of the weights, or a quantized format; None means the model's param_dtype.
        rank: rank of the adapter; None for no adapter.
        scale: alpha / rank.
        dtype: dtype of the adapter.
    """

    path: str
    base: str | None
    rank: int | None
    scale: float
    dtype: DTypeLike

    @property
    def storage(self) -> Storage | None:
        """The quantized format of the weights; None for floats."""
        return self.base if self.base in ("int8", "nf4") else None

    def specs(self, name: str, weight: ParameterSpec) -> Nested:
        """Return {name: spec}, with an adapter also NAME_lora_a [E, in, rank] and NAME_lora_b [E, rank, out].

        For a quantized weight, the value under `name` is a dict of specs. Only adapters have an axis with the role
        "rank". A linear layer, whose matrix is called "weight", has no axis E and no prefix NAME_.

        Raise ValueError like `make_quantized_specs`.
        """
        specs: Nested = {name: weight}
        if self.storage is not None:
            specs[name] = make_quantized_specs(weight, self.storage, self.path)
        elif self.base is not None:
            specs[name] = replace(weight, dtype=self.base, keeps_dtype=True)
        if self.rank is None:
            return specs
        *experts, inputs, outputs = weight.shape
        *expert_axes, in_axis, out_axis = weight.mesh_axes
        *expert_roles, in_role, out_role = weight.roles
        prefix = "" if name == "weight" else f"{name}_"
        # U(-1/sqrt(in), 1/sqrt(in)) for each matrix, as in the authors' code.
        batch_axes = range(len(experts))
        uniform = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", batch_axis=batch_axes)
        specs[f"{prefix}lora_a"] = ParameterSpec(
            (*experts, inputs, self.rank),
            dtype=self.dtype,
            mesh_axes=(*expert_axes, in_axis, None),
            initializer=uniform,
            roles=(*expert_roles, in_role, "rank"),
            keeps_dtype=True,
        )
        # Without an initializer, B starts at zero, and so does the adapter's product.
        specs[f"{prefix}lora_b"] = ParameterSpec(
            (*experts, self.rank, outputs),
            dtype=self.dtype,
            mesh_axes=(*expert_axes, None, out_axis),
            roles=(*expert_roles, "rank", out_role),
            keeps_dtype=True,
        )
        return specs

    def product(
        self,
        x: jax.Array,
        weights: Nested,
        name: str,
        dot: Callable[[jax.Array, jax.Array], jax.Array],
        multiply: Multiply,
        sizes: jax.Array | None,
    ) -> jax.Array:
        """Return x W + scale x A B in x's dtype.

        Args:
            x: rows.
            weights: weights of all local experts, with the names of `specs`.
            name: name of the matrix.
            dot: multiplies rows by weights that are arrays.
            multiply, sizes: for stored weights.
        """
        if self.storage is None:
            y = dot(x, weights[name])
        else:
            y = _matmul_stored(multiply, self.storage, x, weights[name], sizes)
        if self.rank is None:
            return y
        low = dot(x, weights[f"{name}_lora_a"])
        # Scaled in float32: the compute dtype would round a scale that is not a power of two.
        wide = jnp.promote_types(low.dtype, jnp.float32)
        scaled = (self.scale * low.astype(wide)).astype(low.dtype)
        return y + dot(scaled, weights[f"{name}_lora_b"])


def dense_experts(dense: Dense, weights: Nested, x: jax.Array, num_elements: int = 1 << 24) -> jax.Array:
    """Return the dense weights [E, in, out] of stored experts, converting some experts at a time.

    The intermediates take 32 bits per weight or more, so they exist for only `num_elements` weights, or for one expert.

    Args:
        dense: converts stored weights to dense ones.
        weights: stored weights, with a leading expert axis.
        x: the rows to be multiplied. The result takes no memory before they are computed.
        num_elements: the number of weights that are converted at a time.
    """
    num_experts = jax.tree.leaves(weights)[0].shape[0]
    one = jax.eval_shape(dense, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), weights))
    group = max(1, num_elements // one.size)
    if group >= num_experts:
        return dense(weights)
    while num_experts % group:
        group -= 1

    def convert(start: jax.Array, weight_EIO: jax.Array) -> jax.Array:
        part = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start * group, group), weights)
        return jax.lax.dynamic_update_slice_in_dim(weight_EIO, dense(part), start * group, axis=0)

    # Always 0, which the compiler does not know. XLA computes constants, such as the initial result of a loop, at the
    # start of a program: the dense weights of all of its layers would take memory at once.
    zero = (x[(0,) * x.ndim] > jnp.inf).astype(one.dtype)
    initial = jnp.broadcast_to(zero, (num_experts, *one.shape))
    return jax.lax.fori_loop(0, num_experts // group, convert, initial)


def _multiply_quantized(
    multiply: Multiply, storage: Storage, x: jax.Array, quantized: Nested, sizes: jax.Array | None
) -> jax.Array:
    return multiply(x, quantized, partial(dequantize, storage=storage, dtype=x.dtype), False, sizes)


def _matmul_stored_backward(
    multiply: Multiply, storage: Storage, residuals: tuple[Nested, jax.Array | None], y_grad: jax.Array
) -> tuple[jax.Array, None, None]:
    quantized, sizes = residuals
    dense = partial(dequantize, storage=storage, dtype=y_grad.dtype)
    return multiply(y_grad, quantized, dense, True, sizes), None, None


_matmul_stored = jax.custom_vjp(_multiply_quantized, nondiff_argnums=(0, 1))
_matmul_stored.defvjp(
    lambda multiply, storage, x, quantized, sizes: (
        _matmul_stored(multiply, storage, x, quantized, sizes),
        (quantized, sizes),
    ),
    _matmul_stored_backward,
)
