"""Residual flow blocks: y = x + g(x), g a contraction (Chen et al. 2019, Residual Flows, arXiv 1906.02735).

They have no cheap inverse, so they are not Reversible: use memory.remat = sqrt.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp

from plimsoll.extras.flows.base import Invertible, row_keys, sum_each, widen_context
from plimsoll.extras.flows.nets import Conv, convolve, with_coordinates
from plimsoll.framework.config import Fraction, PositiveFloat, PositiveInt, component
from plimsoll.framework.layers.base import Context, Layer
from plimsoll.framework.layout import Nested, fold_in_name

# The state of a loop.
Arrays3 = tuple[jax.Array, jax.Array, jax.Array]


@component
class ResidualBlock(Invertible):
    """Computes x + g(x); g is three convolutions with LipSwish, x sigmoid(x) / 1.1, in between.

    The spectral norm of each convolution is at most `coefficient`: a power iteration on a grid of `size` x `size`
    estimates it, and the weights are divided by the factor by which it exceeds `coefficient`. On smaller images the
    norm is smaller. So g contracts by coefficient^3.

    With log_det = exact, and in evaluation for at most `exact_dims` values, log |det(I + J)| is computed from dense
    Jacobians. Otherwise it is the power series sum_k (-1)^(k+1) / k tr(J^k) with Hutchinson's estimate of the traces.
    In training, the first `terms` terms are always computed and each later one with probability 1/2 after the
    previous one, weighted so that value and gradient are unbiased (Russian roulette). The gradient is that of the
    Neumann series, which saves only one evaluation of g. An evaluation uses EVALUATION_TERMS terms.

    Args:
        dim: C, the number of channels; set by the parent.
        hidden: number of channels inside g.
        kernel: side length of the first and the last kernel.
        coefficient: bound of each spectral norm.
        size: upper bound of H and W.
        power_iterations: number of power iterations, from a fixed start, each time the weights are prepared.
        log_det: how training computes the log-determinant, see above.
        terms: number of terms that training always computes.
        exact_dims: maximum number of values for dense Jacobians in evaluation, see above.
        tolerance: tolerance of the inverse, in x: it iterates x = y - g(x) until no value changes by more.
        max_iterations: maximum number of iterations of the inverse.
    """

    EVALUATION_TERMS = 20

    def __init__(
        self,
        *,
        dim: PositiveInt,
        hidden: PositiveInt = 64,
        kernel: PositiveInt = 3,
        coefficient: Fraction = 0.9,
        size: PositiveInt = 8,
        power_iterations: PositiveInt = 10,
        log_det: Literal["series", "exact"] = "series",
        terms: PositiveInt = 4,
        exact_dims: int = 64,
        tolerance: PositiveFloat = 1e-6,
        max_iterations: PositiveInt = 200,
    ):
        self.coefficient = coefficient
        self.size = size
        self.power_iterations = power_iterations
        self.exact = log_det == "exact"
        self.terms = terms
        self.exact_dims = exact_dims
        self.tolerance = tolerance
        self.max_iterations = max_iterations
        self.convs = {
            "first": Conv(inputs=dim + 2, outputs=hidden, kernel=kernel),
            "middle": Conv(inputs=hidden, outputs=hidden, kernel=1),
            "last": Conv(inputs=hidden, outputs=dim, kernel=kernel),
        }

    def children(self) -> dict[str, Layer]:
        """Return the three convolutions. Their operation count is that of g once, without the series."""
        return dict(self.convs)

    def prepare(self, params: Nested, ctx: Context) -> Nested:
        """Prepare the weights in float32 or wider, divided where their spectral norm is too large."""
        weights = super().prepare(params, widen_context(ctx))
        contracting = {}
        for name, conv_weights in weights.items():
            weight = self._limit_norm(conv_weights["weight"])
            contracting[name] = {**conv_weights, "weight": weight}
        return contracting

    def _limit_norm(self, weight: jax.Array) -> jax.Array:
        """Return the kernel [K, K, C, D], divided so that its spectral norm is at most `coefficient`."""
        # The iteration is not differentiated: the gradient of the norm is that of u^T W v at the vectors that it finds.
        constant_weight = jax.lax.stop_gradient(weight)
        shape = (1, self.size, self.size, weight.shape[2])
        start = jax.random.normal(jax.random.key(0), shape, weight.dtype)

        def step(v: jax.Array, _: None) -> tuple[jax.Array, None]:
            # The transpose of a linear map is its pullback.
            u, pull = jax.vjp(lambda v: convolve(constant_weight, v), v)
            (v,) = pull(u)
            return v / jnp.linalg.norm(v), None

        unit_start = start / jnp.linalg.norm(start)
        v, _ = jax.lax.scan(step, unit_start, length=self.power_iterations)
        u = convolve(constant_weight, v)
        # The small number avoids 0 / 0 for a kernel of zeros.
        unit_u = u / (jnp.linalg.norm(u) + 1e-12)
        norm = jnp.vdot(unit_u, convolve(weight, v))
        divisor = jnp.maximum(1.0, norm / self.coefficient)
        return weight / divisor

    def residual(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> jax.Array:
        """Return g(x)."""
        h = self.convs["first"](weights["first"], with_coordinates(x_BHWC), ctx)
        h = self.convs["middle"](weights["middle"], jax.nn.silu(h) / 1.1, ctx)
        return self.convs["last"](weights["last"], jax.nn.silu(h) / 1.1, ctx)

    def forward(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """Return x + g(x) and log |det(I + J)|, see the class. Raise ValueError if the image exceeds `size`."""
        image_shape = x_BHWC.shape[1:]
        # The spectral norm is bounded on a grid of size x size; on a larger grid it could be larger.
        if max(x_BHWC.shape[1:3]) > self.size:
            raise ValueError(f"size = {self.size}: given an image of {x_BHWC.shape[1]} x {x_BHWC.shape[2]}")
        if self.exact or (not ctx.training and math.prod(image_shape) <= self.exact_dims):
            log_det = self._exact_log_det(weights, x_BHWC, ctx)
        else:
            log_det = self._series_log_det(weights, x_BHWC, ctx)
        return x_BHWC + self.residual(weights, x_BHWC, ctx), log_det

    def _exact_log_det(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> jax.Array:
        """Compute log |det(I + J)|, [B], from dense Jacobians."""
        image_shape = x_BHWC.shape[1:]
        size = math.prod(image_shape)

        def flat(x: jax.Array) -> jax.Array:
            image = x.reshape(1, *image_shape)
            return self.residual(weights, image, ctx).reshape(size)

        jacobians = jax.vmap(jax.jacrev(flat))(x_BHWC.reshape(-1, size))
        identity = jnp.eye(size, dtype=x_BHWC.dtype)
        # The sign is not needed: for a contraction, I + J has a positive determinant.
        _, log_det = jnp.linalg.slogdet(identity + jacobians)
        return log_det

    def _series_log_det(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> jax.Array:
        """Estimate log |det(I + J)|, [B], by the power series; in training, value and gradient are unbiased."""
        keys = row_keys(ctx, "noise", x_BHWC.shape[0])

        def draw_signs(key: jax.Array) -> jax.Array:
            return jax.random.rademacher(key, x_BHWC.shape[1:], x_BHWC.dtype)

        noise = jax.vmap(draw_signs)(keys)
        count, certain_terms = self._num_terms(ctx)
        # The terms are not differentiated: the gradient comes only from the Neumann series.
        constant_weights, constant_x = jax.lax.stop_gradient((weights, x_BHWC))
        _, pull = jax.vjp(lambda x: self.residual(constant_weights, x, ctx), constant_x)

        def term(k: jax.Array, sums: Arrays3) -> Arrays3:
            # power = (J^T)^(k-1) noise
            value, neumann, power = sums
            (power,) = pull(power)
            # Divided by the term's probability, which halves with each term after the certain ones.
            sign = jnp.where(k % 2 == 1, 1.0, -1.0) * 2.0 ** jnp.maximum(k - certain_terms, 0)
            sign = sign.astype(x_BHWC.dtype)
            value = value + sign / k * sum_each(power * noise)
            neumann = neumann - sign * power
            return value, neumann, power

        start = (jnp.zeros_like(x_BHWC[:, 0, 0, 0]), noise, noise)
        value, neumann, _ = jax.lax.fori_loop(1, count + 1, term, start)
        # `neumann` estimates (I + J)^-T noise: its product with dJ noise has the expected gradient.
        _, tangent = jax.jvp(lambda x: self.residual(weights, x, ctx), (x_BHWC,), (noise,))
        slope = sum_each(neumann * tangent)
        # This adds 0 to the value, and the slope's gradient to the gradient.
        return value + slope - jax.lax.stop_gradient(slope)

    def _num_terms(self, ctx: Context) -> tuple[jax.Array, int]:
        """Return (the number of terms of the series, int32; the number of terms that are certain)."""
        if not ctx.training:
            return jnp.int32(self.EVALUATION_TERMS), self.EVALUATION_TERMS
        assert ctx.rng is not None, "roulette needs a key"
        key = fold_in_name(ctx.rng, "terms")
        uniform = jax.random.uniform(key, minval=jnp.finfo(jnp.float32).tiny)
        # -log2 of a uniform number is n or more with probability 2^-n.
        extra_terms = jnp.floor(-jnp.log2(uniform)).astype(jnp.int32)
        return self.terms + extra_terms, self.terms

    def inverse(self, weights: Nested, y_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """Compute the inverse by fixed-point iteration, and log_det as `forward` returns it."""

        def needs_iteration(state: Arrays3) -> jax.Array:
            _, change, count = state
            return (change > self.tolerance) & (count < self.max_iterations)

        def step(state: Arrays3) -> Arrays3:
            x, _, count = state
            new_x = y_BHWC - self.residual(weights, x, ctx)
            change = jnp.max(jnp.abs(new_x - x))
            return new_x, change, count + 1

        # Infinity: no change has been measured before the first step.
        first_change = jnp.asarray(jnp.inf, y_BHWC.dtype)
        start = (y_BHWC, first_change, jnp.int32(0))
        x, _, _ = jax.lax.while_loop(needs_iteration, step, start)
        _, log_det = self.forward(weights, x, ctx)
        return x, log_det
