"""The product of hidden states and the output table, in the compute dtype or with 8-bit numbers, and its gradients.

    logits_tv = sum_d h_td W_vd,     dh_td = sum_v g_tv W_vd,     dW_vd = sum_t g_tv h_td

These are the products of `framework.layers.low_precision`, for a table W [V, D] and the gradient g of the logits. The
head computes them for one chunk of positions at a time, so h and W are rounded before the loop over chunks, and g is
rounded inside it. The scale of an array that is rounded covers

    recipe       h                W           g, for dh       g, for dW
    fp8_tensor   all positions    the table   a chunk         a chunk
    fp8_row      a position       a row       a position      an entry of the vocabulary, over a group of chunks
    int8_row     the same

A chunk's scale of fp8_tensor is a power of two, so another division into chunks changes only those numbers of g that
are less than 2^-30 of the largest one in their chunk (subnormal numbers of e5m2), and the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from plimsoll.framework.layers.custom_gradients import dense_cotangent, zero_cotangent
from plimsoll.framework.layers.low_precision import Recipe, Rounded, multiply_rounded, round_to

# A factor of the product: an array in the compute dtype, or 8-bit numbers.
Factor: TypeAlias = jax.Array | Rounded

_OVER_WIDTH = (((2,), (1,)), ((), ()))
_OVER_VOCABULARY = (((2,), (0,)), ((), ()))
_OVER_VOCABULARY_TRANSPOSED = (((2,), (1,)), ((), ()))
_OVER_POSITIONS = (((0, 1, 2), (0, 1, 2)), ((), ()))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Factors:
    """The factors of the product, in the form in which the product reads them.

    Attributes:
        hidden: normed hidden states [B, S, D].
        table: the output table [V, D].
        hidden_dtype: dtype of the hidden states before rounding, and of their gradient.
        table_dtype: dtype of the table before rounding, and of its gradient.
    """

    hidden: Factor
    table: Factor
    hidden_dtype: np.dtype = field(metadata={"static": True})
    table_dtype: np.dtype = field(metadata={"static": True})

    @property
    def table_shape(self) -> tuple[int, ...]:
        """The shape of the table, (V, D)."""
        table = self.table
        return table.values.shape if isinstance(table, Rounded) else table.shape


@dataclass(frozen=True)
class LogitsProduct:
    """The product in one precision.

    Attributes:
        recipe: formats and scales of 8-bit numbers; None computes in the dtype of the factors.
        platform: tpu, gpu or cpu.
    """

    recipe: Recipe | None = None
    platform: str = "cpu"

    def prepare(self, h_BSD: jax.Array, table_VD: jax.Array) -> Factors:
        """Round both factors; not differentiable."""
        if self.recipe is None:
            return Factors(h_BSD, table_VD, h_BSD.dtype, table_VD.dtype)
        axes = (2, 1) if self.recipe.by_row else (None, None)
        hidden, table = (
            round_to(x, self.recipe.forward, None if axis is None else (axis,))
            for x, axis in zip((h_BSD, table_VD), axes, strict=True)
        )
        return Factors(hidden, table, h_BSD.dtype, table_VD.dtype)

    def multiply(self, hidden: Factor, table: Factor) -> jax.Array:
        """Return the logits [B, S, V], float32 or wider."""
        if isinstance(hidden, Rounded):
            assert isinstance(table, Rounded)
            assert self.recipe is not None
            scale = hidden.scale * table.scale.reshape(-1)
            return multiply_rounded(
                hidden.values, table.values, _OVER_WIDTH, scale, jnp.float32, self.recipe, self.platform, fast=True
            )
        assert not isinstance(table, Rounded)
        # The sum is in float32: bfloat16 has too few digits for a softmax over the vocabulary.
        dtype = jnp.promote_types(hidden.dtype, jnp.float32)
        return jnp.einsum("bsd,vd->bsv", hidden, table, preferred_element_type=dtype)

    @property
    def _transposes_table(self) -> bool:
        # cuBLAS multiplies 8-bit floats only if the summed axis is the minor one of both factors. XLA would transpose
        # the table in each iteration of a loop over chunks.
        is_float = self.recipe is not None and not jnp.issubdtype(self.recipe.forward, jnp.integer)
        return self.platform == "gpu" and is_float

    def arrange_table(self, table: Factor) -> Factor:
        """Return the table as `compute_hidden_grad` reads it; call it outside of loops."""
        if not self._transposes_table:
            return table
        assert isinstance(table, Rounded)
        values_DV = with_layout_constraint(table.values.T, Layout(major_to_minor=(0, 1)))
        return Rounded(values_DV, table.scale)

    def compute_hidden_grad(
        self, grad_BSV: jax.Array, table: Factor, dtype: DTypeLike, key: jax.Array | None
    ) -> tuple[jax.Array, Factor]:
        """Return the gradient of hidden states, and what `compute_table_grad` needs of the logits' gradient.

        Args:
            grad_BSV: gradient of the logits of a chunk, float32 or wider.
            table: the result of `arrange_table`.
            dtype: dtype of the hidden states' gradient.
            key: key for stochastic rounding; None rounds to the nearest number.
        """
        # In the compute dtype, like the gradients of all activations.
        narrow_BSV = grad_BSV.astype(dtype)
        if self.recipe is None:
            assert not isinstance(table, Rounded)
            return jnp.einsum("bsv,vd->bsd", narrow_BSV, table), narrow_BSV
        assert isinstance(table, Rounded)
        saved: Factor
        if self.recipe.by_row:
            rounded = round_to(narrow_BSV * table.scale.reshape(-1), self.recipe.backward, (2,), key)
            scale = rounded.scale
            # The rounding for the table's gradient has a scale over all positions of the group, so it comes later.
            saved = narrow_BSV
        else:
            rounded = round_to(grad_BSV, self.recipe.backward, None)
            scale = rounded.scale * table.scale
            # Without a gradient, as in a chunk of padding, the scale is 1, which may be far larger than all others.
            is_zero = jnp.max(jnp.abs(grad_BSV), keepdims=True) == 0
            saved = _to_bits(Rounded(rounded.values, jnp.where(is_zero, 0.0, rounded.scale)))
        dimensions = _OVER_VOCABULARY_TRANSPOSED if self._transposes_table else _OVER_VOCABULARY
        h_grad = multiply_rounded(rounded.values, table.values, dimensions, scale, dtype, self.recipe, self.platform)
        return h_grad, saved

    def compute_table_grad(self, grads: Factor, hidden: Factor, dtype: DTypeLike, key: jax.Array | None) -> jax.Array:
        """Return the gradient of the table [V, D] of a group of chunks, as one product.

        Args:
            grads: the chunks' results of `compute_hidden_grad`, stacked.
            hidden: the hidden states of the chunks, [chunks, B, S / chunks, D].
            dtype: dtype of the result.
            key: key for stochastic rounding; None rounds to the nearest number.
        """
        if self.recipe is None:
            return jnp.einsum("cbsv,cbsd->vd", grads, hidden, preferred_element_type=dtype)
        assert isinstance(hidden, Rounded)
        h_values = hidden.values
        if isinstance(grads, Rounded):
            rounded = _from_bits(grads, self.recipe.backward)
            scale = jnp.max(rounded.scale)
            if rounded.scale.shape[0] > 1:
                # One product needs one scale. The ratios are powers of two; multiplying the hidden states by them
                # changes only numbers that become subnormal, and these arrays are smaller than the gradients.
                ratios = jnp.where(scale == 0, 0.0, rounded.scale / jnp.where(scale == 0, 1.0, scale))
                h_values = (h_values.astype(jnp.float32) * ratios).astype(h_values.dtype)
            scale = (scale * hidden.scale[0]).reshape(1, 1)
        else:
            rounded = round_to(grads * hidden.scale, self.recipe.backward, (0, 1, 2), key)
            scale = rounded.scale.reshape(-1, 1)
        return multiply_rounded(rounded.values, h_values, _OVER_POSITIONS, scale, dtype, self.recipe, self.platform)

    def save(self, factors: Factors) -> Factors:
        """Return the factors in the form in which a backward pass may find them; `load` is the inverse.

        `jax.checkpoint` passes saved floats through `reduce_precision`, which has no e4m3 without infinities, so bits
        are saved.
        """
        if self.recipe is None:
            return factors
        hidden, table = (_to_bits(x) if isinstance(x, Rounded) else x for x in (factors.hidden, factors.table))
        return Factors(hidden, table, factors.hidden_dtype, factors.table_dtype)

    def load(self, saved: Factors) -> Factors:
        """Inverse of `save`."""
        if self.recipe is None:
            return saved
        dtype = self.recipe.forward
        hidden, table = (_from_bits(x, dtype) if isinstance(x, Rounded) else x for x in (saved.hidden, saved.table))
        return Factors(hidden, table, saved.hidden_dtype, saved.table_dtype)


def compute_logits(
    product: LogitsProduct, h_BSD: jax.Array, table_VD: jax.Array, key: jax.Array | None = None
) -> jax.Array:
    """Return all logits [B, S, V] at once, float32 or wider; differentiable.

    Args:
        product: precision of the product.
        h_BSD: normed hidden states.
        table_VD: the output table.
        key: key for stochastic rounding in the backward pass; None rounds to the nearest number.
    """
    if product.recipe is None:
        return product.multiply(h_BSD, table_VD)
    # custom_vjp keeps these functions after the trace, so they may hold no traced arrays.

    def plain(h: jax.Array, table: jax.Array, key: jax.Array | None) -> jax.Array:
        factors = product.prepare(h, table)
        return product.multiply(factors.hidden, factors.table)

    def forward(
        h: CustomVJPPrimal, table: CustomVJPPrimal, key: CustomVJPPrimal | None
    ) -> tuple[jax.Array, tuple[Factors, jax.Array | None]]:
        # With symbolic_zeros, each argument is a value with a flag.
        factors = product.prepare(h.value, table.value)
        key_value = None if key is None else key.value
        return product.multiply(factors.hidden, factors.table), (product.save(factors), key_value)

    def backward(
        saved: tuple[Factors, jax.Array | None], logits_grad: jax.Array | SymbolicZero
    ) -> tuple[jax.Array, jax.Array, jax.Array | np.ndarray | None]:
        factors, key = product.load(saved[0]), saved[1]
        h_key, table_key = split_key(key)
        h_grad, grad = product.compute_hidden_grad(
            dense_cotangent(logits_grad), product.arrange_table(factors.table), factors.hidden_dtype, h_key
        )
        grads, hidden = jax.tree.map(lambda x: x[None], (grad, factors.hidden))
        table_grad = product.compute_table_grad(grads, hidden, factors.table_dtype, table_key)
        return h_grad, table_grad, None if key is None else zero_cotangent(key)

    logits = jax.custom_vjp(plain)
    logits.defvjp(forward, backward, symbolic_zeros=True)
    return logits(h_BSD, table_VD, key)


def split_key(key: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the keys of the roundings for the gradients of hidden states and of the table."""
    if key is None:
        return None, None
    h_key, table_key = jax.random.split(key)
    return h_key, table_key


def _to_bits(rounded: Rounded) -> Rounded:
    return Rounded(jax.lax.bitcast_convert_type(rounded.values, jnp.uint8), rounded.scale)


def _from_bits(rounded: Rounded, dtype: DTypeLike) -> Rounded:
    return Rounded(jax.lax.bitcast_convert_type(rounded.values, dtype), rounded.scale)
