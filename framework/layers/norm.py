"""LayerNorm (Ba et al. 2016, arXiv 1607.06450) and RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467).

Both compute in float32 regardless of the input's dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from plimsoll.framework.config import PositiveFloat, PositiveInt, component
from plimsoll.framework.layers.base import Context, Layer
from plimsoll.framework.layers.custom_gradients import save_inputs
from plimsoll.framework.layout import ParameterSpec


@component
class RMSNorm(Layer):
    """Computes x / sqrt(mean(x^2) + eps) * scale, over the last axis.

    Args:
        dim: size of the last axis.
        eps: added under the root.
        zero_centered: whether scale - 1 is stored instead of scale, as in Gemma; weight decay then pulls to the
            identity.
    """

    def __init__(self, *, dim: PositiveInt, eps: PositiveFloat = 1e-6, zero_centered: bool = False):
        self.dim = dim
        self.eps = eps
        # The amount to add to the stored scale.
        self.offset = int(zero_centered)

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the spec of scale [dim]: initially ones, or zeros if zero_centered."""
        initializer = jax.nn.initializers.constant(1 - self.offset)
        return {"scale": ParameterSpec((self.dim,), "float32", initializer=initializer, roles=("channel",))}

    def __call__(self, weights: dict[str, jax.Array], x: jax.Array, ctx: Context) -> jax.Array:
        """Normalize x [..., dim]; the result has the same shape and dtype."""
        return save_inputs(self._normalize)(x, weights["scale"])

    def _normalize(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        y = x32 * jax.lax.rsqrt(mean_square + self.eps)
        # The scale is also applied in float32, and the result is rounded once.
        full_scale = self.offset + scale.astype(y.dtype)
        return (y * full_scale).astype(x.dtype)


@component
class LayerNorm(Layer):
    """Computes (x - mean) / sqrt(var + eps) * scale + bias, over the last axis.

    Args:
        dim: size of the last axis.
        eps: added under the root.
        bias: whether there is an additive bias.
    """

    def __init__(self, *, dim: PositiveInt, eps: PositiveFloat = 1e-5, bias: bool = True):
        self.dim = dim
        self.eps = eps
        self.bias = bias

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the specs of scale [dim], ones, and bias [dim], zeros."""
        ones = jax.nn.initializers.ones
        scale = ParameterSpec((self.dim,), "float32", initializer=ones, roles=("channel",))
        if not self.bias:
            return {"scale": scale}
        bias = ParameterSpec((self.dim,), "float32", roles=("channel",))
        return {"scale": scale, "bias": bias}

    def __call__(self, weights: dict[str, jax.Array], x: jax.Array, ctx: Context) -> jax.Array:
        """Normalize x [..., dim]; the result has the same shape and dtype."""
        normalize = save_inputs(self._normalize)
        if not self.bias:
            return normalize(x, weights["scale"])
        return normalize(x, weights["scale"], weights["bias"])

    def _normalize(self, x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        # The variance is computed from centered values: mean(x^2) - mean(x)^2 would suffer from cancellation.
        centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
        y = centered * jax.lax.rsqrt(variance + self.eps)
        y = y * scale.astype(y.dtype)
        if bias is not None:
            y = y + bias.astype(y.dtype)
        return y.astype(x.dtype)
