"""Base classes of the layers of normalizing flows, `Invertible` and `Bijection`, and how the layers form a chain.

A flow maps an image x to a latent z of the same size; log p(x) = log p(z) + log |det dz/dx|. The carry between layers
is {"x": [B, H, W, C], "log_det": [B], "log_prior": [B]}, float32. A layer adds the logarithm of its Jacobian's
determinant to log_det; log_prior accumulates the log-density of what leaves the flow early
(plimsoll.Split).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.framework.layers.base import Context, Layer, Out, prepare_params
from plimsoll.framework.layers.reversible import ReversedLayer, Reversible
from plimsoll.framework.layout import Nested, fold_in_name

# x [B, H, W, C], log_det [B] and log_prior [B], float32 or wider.
Carry = dict[str, jax.Array]


class Invertible(Layer):
    """A layer with an inverse and a log-determinant, which may be expensive: use memory.remat = sqrt, full or none.

    Its own weights are prepared in float32 or wider, so that forward and inverse agree; a net inside it uses the
    compute dtype.
    """

    def forward(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """Map x_BHWC to (y, log |det dy/dx|): f32[B], or as wide as x."""
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def inverse(self, weights: Nested, y_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """Map y to (x_BHWC, log |det dy/dx|): the log-determinant that `forward` returns at x, not its negative."""
        raise NotImplementedError(f"{type(self).__name__}.inverse")

    def prepare(self, params: Nested, ctx: Context) -> Nested:
        """Prepare the layer's own parameters in float32 or wider, and those of children in the compute dtype."""
        weights = super().prepare(params, ctx)
        wide_weights = prepare_params(self.param_specs(), params, widen_context(ctx))
        return {**weights, **wide_weights}

    def apply(self, weights: Nested, carry: Carry, ctx: Context, layer_state: Nested) -> tuple[Carry, Out]:
        """Apply `forward` and add the log-determinant to the carry's.

        Raise ValueError if the log-determinant does not have the shape and dtype that `forward` promises.
        """
        x = carry["x"]
        y, log_det = self.forward(weights, x, ctx)
        y, log_det = check_outputs(self, x, y, log_det)
        log_det_sum = carry["log_det"] + log_det
        return {**carry, "x": y, "log_det": log_det_sum}, Out()


class Bijection(Invertible, Reversible):
    """An Invertible whose inverse is about as cheap as `forward`, so memory.remat = invert can use it."""

    def reverse(
        self, weights: Nested, carry: Carry, cts: tuple[Any, Any], ctx: Context, layer_state: Nested
    ) -> ReversedLayer:
        """Compute the inverse, then the gradient of `forward` there; see `Reversible.reverse`."""
        carry_ct, _ = cts
        x, _ = self.inverse(weights, carry["x"], ctx)

        def forward(weights: Nested, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.forward(weights, x, ctx)

        (_, log_det), pull = jax.vjp(forward, weights, x)
        # The layer adds to log_det, so its term has the same cotangent as the sum.
        grads, x_ct = pull((carry_ct["x"], carry_ct["log_det"]))
        input_carry = {**carry, "x": x, "log_det": carry["log_det"] - log_det}
        input_ct = {**carry_ct, "x": x_ct}
        return ReversedLayer(input_carry, grads, input_ct)


def check_outputs(layer: Layer, x: jax.Array, y: jax.Array, log_det: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (y, log_det) if a carry can hold them; otherwise raise ValueError, while tracing.

    Both must be float32, or float64 if x is (with JAX's x64 mode, in tests).
    """
    # A log-determinant is often a thousand nats, and bfloat16 has only three digits. One that is summed over the
    # batch would train something else.
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    has_log_det_shape = log_det.shape == x.shape[:1]
    has_y_size = y.size == x.size
    expectations = (
        ("log_det", log_det, has_log_det_shape, f"[{x.shape[0]}]"),
        ("y", y, has_y_size, f" of {x.size} values"),
    )
    for name, value, fits, shape in expectations:
        if value.dtype != dtype or not fits:
            actual = f"{value.dtype.name}{list(value.shape)}"
            raise ValueError(f"{type(layer).__name__}.forward: expected {name} {dtype.name}{shape}, given {actual}")
    return y, log_det


def widen_context(ctx: Context) -> Context:
    """Return the same context with a compute dtype of float32 or wider."""
    dtype = jnp.promote_types(ctx.compute_dtype, jnp.float32)
    return replace(ctx, compute_dtype=dtype)


def row_keys(ctx: Context, name: str, batch: int) -> jax.Array:
    """Return a key for each of the batch's rows.

    In training it depends on the row's index in the global batch; otherwise it is always the same.

    Args:
        ctx: the layer's context.
        name: name of the random draw, folded into the keys.
        batch: number of rows.
    """
    # The noise of an evaluation is fixed, so that it gives the same figures each time.
    key = ctx.rng if ctx.training and ctx.rng is not None else jax.random.key(0)
    rows = jnp.arange(batch) if ctx.rows is None or not ctx.training else ctx.rows

    def row_key(row: jax.Array) -> jax.Array:
        return jax.random.fold_in(fold_in_name(key, name), row)

    return jax.vmap(row_key)(rows)


def sum_each(x: jax.Array) -> jax.Array:
    """Sum over all axes but the first: [B, ...] -> [B]."""
    inner_axes = tuple(range(1, x.ndim))
    return jnp.sum(x, axis=inner_axes)


def log_normal(x: jax.Array, mean: jax.Array, log_std: jax.Array) -> jax.Array:
    """Return the log-density of each x [B, ...] under independent Gaussians, [B], in nats."""
    standardized = (x - mean) * jnp.exp(-log_std)
    log_density = -0.5 * jnp.square(standardized) - 0.5 * math.log(2.0 * math.pi) - log_std
    return sum_each(log_density)
