"""Residual flow blocks: y = x + g(x), g a contraction (Chen et al. 2019, Residual Flows, arXiv 1906.02735).

There is no cheap inverse, so this is no Reversible: memory.remat = sqrt.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp

from framework.config import Fraction, PositiveFloat, PositiveInt, component
from framework.layers.base import Context, Layer
from framework.layers.flow.base import Invertible, row_keys, sum_each, wide
from framework.layers.flow.nets import Conv, convolve, with_coordinates
from framework.layout import Nested, fold_in_name


@component
class ResidualBlock(Invertible):
    """x + g(x); g is three convolutions with LipSwish, x sigmoid(x) / 1.1, between them.

    The spectral norm of each convolution is at most `coefficient`: weights are divided by what a power iteration finds
    too much on a grid of `size` x `size`, of which smaller images have less. So g contracts by coefficient^3.

    log |det(I + J)| comes from dense Jacobians with log_det = exact, and in evaluation of at most `exact_dims` values.
    Else it is the power series sum_k (-1)^(k+1) / k tr(J^k) with Hutchinson's estimate of the traces. In training the
    first `terms` are always there, each later one with probability 1/2 after the one before, weighted so that value and
    gradient are unbiased (Russian roulette); the gradient is that of the Neumann series, for which nothing is kept but
    one evaluation of g. In evaluation there are EVALUATION_TERMS.

    Args:
        dim: C, given by the parent.
        hidden: channels inside g.
        kernel: side of the first and the last kernel.
        coefficient: bound of each spectral norm.
        size: a bound of H and W.
        power_iterations: how many, from a fixed start, each time that weights are prepared.
        log_det: in training, see above.
        terms: always computed, in training.
        exact_dims: see above.
        tolerance: of the inverse, in x: it iterates x = y - g(x) until nothing changes by more.
        max_iterations: of the inverse.
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
        self.coefficient, self.size, self.power_iterations = coefficient, size, power_iterations
        self.exact, self.terms, self.exact_dims = log_det == "exact", terms, exact_dims
        self.tolerance, self.max_iterations = tolerance, max_iterations
        self.convs = {
            "first": Conv(inputs=dim + 2, outputs=hidden, kernel=kernel),
            "middle": Conv(inputs=hidden, outputs=hidden, kernel=1),
            "last": Conv(inputs=hidden, outputs=dim, kernel=kernel),
        }

    def children(self) -> dict[str, Layer]:
        """The three convolutions. Their count of operations is that of g once, without the series."""
        return dict(self.convs)

    def prepare(self, params: Nested, ctx: Context) -> Nested:
        """Weights in float32, divided by what their spectral norm has too much."""
        weights = super().prepare(params, wide(ctx))
        return {name: {**own, "weight": self._contracting(own["weight"])} for name, own in weights.items()}

    def _contracting(self, weight: jax.Array) -> jax.Array:
        fixed = jax.lax.stop_gradient(weight)
        start = jax.random.normal(jax.random.key(0), (1, self.size, self.size, weight.shape[2]), weight.dtype)

        def step(v: jax.Array, _: None) -> tuple[jax.Array, None]:
            u, pull = jax.vjp(lambda v: convolve(fixed, v), v)
            (v,) = pull(u)
            return v / jnp.linalg.norm(v), None

        v, _ = jax.lax.scan(step, start / jnp.linalg.norm(start), length=self.power_iterations)
        u = convolve(fixed, v)
        norm = jnp.vdot(u / (jnp.linalg.norm(u) + 1e-12), convolve(weight, v))
        return weight / jnp.maximum(1.0, norm / self.coefficient)

    def residual(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> jax.Array:
        """g(x)."""
        h = self.convs["first"](weights["first"], with_coordinates(x_BHWC), ctx)
        h = self.convs["middle"](weights["middle"], jax.nn.silu(h) / 1.1, ctx)
        return self.convs["last"](weights["last"], jax.nn.silu(h) / 1.1, ctx)

    def forward(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """See the class. Raises ValueError when the image is larger than `size`."""
        if max(x_BHWC.shape[1:3]) > self.size:
            raise ValueError(f"size = {self.size}: given an image of {x_BHWC.shape[1]} x {x_BHWC.shape[2]}")
        if self.exact or (not ctx.training and math.prod(x_BHWC.shape[1:]) <= self.exact_dims):
            log_det = self._exact(weights, x_BHWC, ctx)
        else:
            log_det = self._series(weights, x_BHWC, ctx)
        return x_BHWC + self.residual(weights, x_BHWC, ctx), log_det

    def _exact(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> jax.Array:
        size = math.prod(x_BHWC.shape[1:])

        def flat(x: jax.Array) -> jax.Array:
            return self.residual(weights, x.reshape(1, *x_BHWC.shape[1:]), ctx).reshape(size)

        jacobians = jax.vmap(jax.jacrev(flat))(x_BHWC.reshape(-1, size))
        return jnp.linalg.slogdet(jnp.eye(size, dtype=x_BHWC.dtype) + jacobians)[1]

    def _series(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> jax.Array:
        keys = row_keys(ctx, "noise", x_BHWC.shape[0])
        noise = jax.vmap(lambda key: jax.random.rademacher(key, x_BHWC.shape[1:], x_BHWC.dtype))(keys)
        count, likely = jnp.int32(self.EVALUATION_TERMS), self.EVALUATION_TERMS
        if ctx.training:
            assert ctx.rng is not None, "roulette needs a key"
            uniform = jax.random.uniform(fold_in_name(ctx.rng, "terms"), minval=jnp.finfo(jnp.float32).tiny)
            count, likely = self.terms + jnp.floor(-jnp.log2(uniform)).astype(jnp.int32), self.terms
        fixed = jax.lax.stop_gradient((weights, x_BHWC))
        _, pull = jax.vjp(lambda x: self.residual(fixed[0], x, ctx), fixed[1])

        def term(k: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            value, neumann, power = sums  # power = (J^T)^(k-1) noise
            (power,) = pull(power)
            sign = jnp.where(k % 2 == 1, 1.0, -1.0) * 2.0 ** jnp.maximum(k - likely, 0)  # over the term's probability
            sign = sign.astype(x_BHWC.dtype)
            return value + sign / k * sum_each(power * noise), neumann - sign * power, power

        start = (jnp.zeros_like(x_BHWC[:, 0, 0, 0]), noise, noise)
        value, neumann, _ = jax.lax.fori_loop(1, count + 1, term, start)
        # (I + J)^-T noise stands in `neumann`: its product with dJ noise has the gradient's mean.
        _, tangent = jax.jvp(lambda x: self.residual(weights, x, ctx), (x_BHWC,), (noise,))
        slope = sum_each(neumann * tangent)
        return value + slope - jax.lax.stop_gradient(slope)

    def inverse(self, weights: Nested, y_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """By fixed-point iteration; log_det as `forward` has it."""

        def unfinished(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            _, change, count = state
            return (change > self.tolerance) & (count < self.max_iterations)

        def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            x, _, count = state
            new = y_BHWC - self.residual(weights, x, ctx)
            return new, jnp.max(jnp.abs(new - x)), count + 1

        start = (y_BHWC, jnp.asarray(jnp.inf, y_BHWC.dtype), jnp.int32(0))
        x, _, _ = jax.lax.while_loop(unfinished, step, start)
        return x, self.forward(weights, x, ctx)[1]
