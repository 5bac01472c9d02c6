"""Invertible linear maps of the channels and of the grid: ActNorm, 1x1 convolution, permutations, squeeze.

Kingma and Dhariwal 2018 (Glow, arXiv 1807.03039); Dinh et al. 2016 (RealNVP, arXiv 1605.08803) for squeeze.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.extras.flows.base import Bijection
from plimsoll.framework.config import PositiveInt, Seed, component
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layout import Nested, ParameterSpec

# Lower bound on a channel's standard deviation: a channel that is constant in the first batch would otherwise be
# scaled without bound.
SMALLEST_STD = 1e-3


@component
class ActNorm(Bijection):
    """Computes y = (x + bias) * exp(log_scale) per channel.

    Calibration sets the parameters so that the first batch leaves with mean 0 and variance 1.

    Args:
        dim: C, the number of channels; set by the parent.
    """

    def __init__(self, *, dim: PositiveInt):
        self.dim = dim

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the specs of bias and log_scale [C], zeros before calibration."""
        spec = ParameterSpec((self.dim,), "float32", roles=("channel",))
        return {"bias": spec, "log_scale": spec}

    def forward(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """See `Invertible.forward`; log_det = H W sum(log_scale)."""
        log_scale = weights["log_scale"]
        y = (x_BHWC + weights["bias"]) * jnp.exp(log_scale)
        return y, _scale_log_det(x_BHWC, log_scale)

    def inverse(self, weights: Nested, y_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """See `Invertible.inverse`."""
        log_scale = weights["log_scale"]
        x = y_BHWC * jnp.exp(-log_scale) - weights["bias"]
        return x, _scale_log_det(x, log_scale)

    def calibrate(self, params: Nested, x_BHWC: jax.Array) -> Nested:
        """Return parameters for which this x leaves with mean 0 and variance 1."""
        mean = jnp.mean(x_BHWC, axis=(0, 1, 2))
        std = jnp.std(x_BHWC, axis=(0, 1, 2))
        bias = -mean
        log_scale = -jnp.log(jnp.maximum(std, SMALLEST_STD))
        return {"bias": bias, "log_scale": log_scale}


@component
class InvertibleConv(Bijection):
    """A 1x1 convolution: y = W x at each position, W = R L (U + diag(exp(log_scale))).

    L is lower triangular with ones on its diagonal and U is strictly upper triangular, so the determinant costs C
    operations and the inverse takes two triangular solves. Glow decomposes a random rotation and fixes its
    permutation. Here R itself is fixed, and L and U start at the identity: the initial W and the determinant are the
    same, and weight decay pulls to R.

    Args:
        dim: C, the number of channels; set by the parent.
        fixed: type of R, which is drawn once and frozen: a "rotation" or a "permutation".
    """

    def __init__(self, *, dim: PositiveInt, fixed: Literal["rotation", "permutation"] = "rotation"):
        self.dim = dim
        self.fixed = fixed

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the specs of lower and upper [C, C], log_scale [C], and fixed [C, C], which is frozen.

        Only the triangles of lower and upper are used.
        """

        def permutation(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            return jax.random.permutation(key, jnp.eye(self.dim, dtype=dtype))

        rotation = jax.nn.initializers.orthogonal()
        draw = rotation if self.fixed == "rotation" else permutation
        square = ParameterSpec((self.dim, self.dim), "float32", roles=("out", "in"))
        log_scale = ParameterSpec((self.dim,), "float32", roles=("channel",))
        # An optimizer step would not keep R orthogonal, and its inverse is computed as its transpose.
        frozen = replace(square, initializer=draw, trainable=False)
        return {"lower": square, "upper": square, "log_scale": log_scale, "fixed": frozen}

    def _factors(self, weights: Nested) -> tuple[jax.Array, jax.Array]:
        """Return L and U + diag(exp(log_scale)), [C, C] each."""
        eye = jnp.eye(self.dim, dtype=weights["lower"].dtype)
        lower = jnp.tril(weights["lower"], -1) + eye
        upper = jnp.triu(weights["upper"], 1) + eye * jnp.exp(weights["log_scale"])
        return lower, upper

    def forward(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """See `Invertible.forward`; log_det = H W sum(log_scale).

        Products have full float32 precision, like the inverse.
        """
        lower, upper = self._factors(weights)
        matrix = jnp.linalg.multi_dot([weights["fixed"], lower, upper], precision="highest")
        y = jnp.einsum("bhwc,dc->bhwd", x_BHWC, matrix, precision="highest")
        return y, _scale_log_det(x_BHWC, weights["log_scale"])

    def inverse(self, weights: Nested, y_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """See `Invertible.inverse`."""
        lower, upper = self._factors(weights)
        rotation_inverse = weights["fixed"].T
        half_solved = jax.scipy.linalg.solve_triangular(lower, rotation_inverse, lower=True, unit_diagonal=True)
        matrix = jax.scipy.linalg.solve_triangular(upper, half_solved)
        # In full float32 precision, which TPUs and GPUs do not use by default.
        x = jnp.einsum("bhwc,dc->bhwd", y_BHWC, matrix, precision="highest")
        return x, _scale_log_det(x, weights["log_scale"])

    def flops_per_token(self, seq_len: int) -> float:
        """Count 2 C^2 operations per position."""
        return 2.0 * self.dim**2


@component
class Permutation(Bijection):
    """A fixed order of the channels, the same in all layers of a stack.

    Args:
        dim: C, the number of channels; set by the parent.
        kind: "reverse", or "shuffle": a random order that depends on the seed.
        seed: seed of the shuffle.
    """

    def __init__(self, *, dim: PositiveInt, kind: Literal["reverse", "shuffle"] = "reverse", seed: Seed = 0):
        # A numpy array is a constant of the program: it has no gradient and is not saved.
        if kind == "reverse":
            self.order = np.arange(dim)[::-1]
        else:
            self.order = np.random.default_rng(seed).permutation(dim)

    def forward(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """See `Invertible.forward`; log_det = 0."""
        y = x_BHWC[..., self.order]
        return y, jnp.zeros_like(x_BHWC[:, 0, 0, 0])

    def inverse(self, weights: Nested, y_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """See `Invertible.inverse`."""
        x = y_BHWC[..., np.argsort(self.order)]
        return x, jnp.zeros_like(y_BHWC[:, 0, 0, 0])


@component
class Squeeze(Bijection):
    """Maps [B, H, W, C] to [B, H/2, W/2, 4C]: squares of 2 x 2 become channels."""

    def forward(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """See `Invertible.forward`; log_det = 0. Raises ValueError if H or W is odd."""
        batch, height, width, channels = x_BHWC.shape
        if height % 2 or width % 2:
            raise ValueError(f"squeeze: expected an even height and width, given {height} x {width}")
        squares = x_BHWC.reshape(batch, height // 2, 2, width // 2, 2, channels)
        squares = squares.transpose(0, 1, 3, 2, 4, 5)
        y = squares.reshape(batch, height // 2, width // 2, 4 * channels)
        return y, jnp.zeros_like(x_BHWC[:, 0, 0, 0])

    def inverse(self, weights: Nested, y_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """See `Invertible.inverse`."""
        batch, height, width, channels = y_BHWC.shape
        squares = y_BHWC.reshape(batch, height, width, 2, 2, channels // 4)
        squares = squares.transpose(0, 1, 3, 2, 4, 5)
        x = squares.reshape(batch, 2 * height, 2 * width, channels // 4)
        return x, jnp.zeros_like(y_BHWC[:, 0, 0, 0])


def _scale_log_det(x_BHWC: jax.Array, log_scale_C: jax.Array) -> jax.Array:
    """Return the log-determinant [B] of a scale per channel that is applied at each position."""
    batch, height, width, _ = x_BHWC.shape
    log_det = height * width * jnp.sum(log_scale_C)
    return jnp.broadcast_to(log_det, (batch,))
