"""Layers of normalizing flows: what `Invertible` and `Bijection` ask of them, and how they join a chain.

A flow maps an image x to a latent z of the same size; log p(x) = log p(z) + log |det dz/dx|. Between layers flows the
carry: {"x": [B, H, W, C], "log_det": [B], "log_prior": [B]}, float32. A layer adds the logarithm of its Jacobian's
determinant to log_det; what leaves the flow early (framework.layers.flow.ends.Split) is counted in log_prior.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from framework.layers.base import Context, Layer, Out, prepare_own
from framework.layers.reversible import Reversible
from framework.layout import Nested, fold_in_name

Carry = dict[str, jax.Array]


class Invertible(Layer):
    """A layer with an inverse and a log-determinant, whatever they cost: memory.remat = sqrt, full or none.

    Its own weights are prepared in float32 at least (a net inside it has the compute dtype): forward and inverse are to
    agree.
    """

    def forward(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """x_BHWC -> (y, log |det dy/dx|): f32[B], or as wide as x."""
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def inverse(self, weights: Nested, y_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """y -> (x_BHWC, log |det dy/dx|): the log-determinant that `forward` returns at x, not its negative."""
        raise NotImplementedError(f"{type(self).__name__}.inverse")

    def prepare(self, params: Nested, ctx: Context) -> Nested:
        """Own parameters in float32, those of children in the compute dtype."""
        return {**super().prepare(params, ctx), **prepare_own(self.own_specs(), params, wide(ctx))}

    def apply(self, weights: Nested, carry: Carry, ctx: Context, layer_state: Nested) -> tuple[Carry, Out]:
        """Adds the log-determinant to the carry's. Raises ValueError when it is not what `forward` promises."""
        y, log_det = checked(self, carry["x"], *self.forward(weights, carry["x"], ctx))
        return {**carry, "x": y, "log_det": carry["log_det"] + log_det}, Out()


class Bijection(Invertible, Reversible):
    """An Invertible whose inverse is about as cheap as `forward`: memory.remat = invert may use it."""

    def reverse(
        self, weights: Nested, carry: Carry, cts: tuple[Any, Any], ctx: Context, layer_state: Nested
    ) -> tuple[Carry, Nested, Carry]:
        """The inverse, then the gradient of `forward` there; see Reversible."""
        x, _ = self.inverse(weights, carry["x"], ctx)
        (_, log_det), pull = jax.vjp(lambda weights, x: self.forward(weights, x, ctx), weights, x)
        grads, ct_x = pull((cts[0]["x"], cts[0]["log_det"]))
        return {**carry, "x": x, "log_det": carry["log_det"] - log_det}, grads, {**cts[0], "x": ct_x}


def checked(layer: Layer, x: jax.Array, y: jax.Array, log_det: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(y, log_det) if these are what a carry holds; ValueError, while tracing, if not.

    Expected is float32, or float64 where x is that (with JAX's x64 mode, in tests): a log-determinant in bfloat16 has
    three digits of what is often a thousand nats, and one that was summed over the batch trains something else.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    for name, value, good, shape in (
        ("log_det", log_det, log_det.shape == x.shape[:1], f"[{x.shape[0]}]"),
        ("y", y, y.size == x.size, f" of {x.size} values"),
    ):
        if value.dtype != dtype or not good:
            given = f"{value.dtype.name}{list(value.shape)}"
            raise ValueError(f"{type(layer).__name__}.forward: expected {name} {dtype.name}{shape}, given {given}")
    return y, log_det


def wide(ctx: Context) -> Context:
    """The same context with a compute dtype of float32 at least."""
    return replace(ctx, compute_dtype=jnp.promote_types(ctx.compute_dtype, jnp.float32))


def row_keys(ctx: Context, name: str, batch: int) -> jax.Array:
    """A key for each of the batch's rows: by its number in the global batch in training, else always the same."""
    key = ctx.rng if ctx.training and ctx.rng is not None else jax.random.key(0)
    rows = jnp.arange(batch) if ctx.rows is None or not ctx.training else ctx.rows
    return jax.vmap(lambda row: jax.random.fold_in(fold_in_name(key, name), row))(rows)


def sum_each(x: jax.Array) -> jax.Array:
    """[B, ...] -> [B]: the sum over all other axes."""
    return jnp.sum(x, axis=tuple(range(1, x.ndim)))


def log_normal(x: jax.Array, mean: jax.Array, log_std: jax.Array) -> jax.Array:
    """The log-density of each x [B, ...] under independent Gaussians, [B], nats."""
    return sum_each(-0.5 * jnp.square((x - mean) * jnp.exp(-log_std)) - 0.5 * math.log(2.0 * math.pi) - log_std)
