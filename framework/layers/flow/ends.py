"""Where a flow begins and ends: integers to real numbers, halves that leave on the way, the prior, the loss.

Dequantization: Theis et al. 2015 (arXiv 1511.01844). Logit and multi-scale structure: Dinh et al. 2016 (RealNVP, arXiv
1605.08803).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from framework.config import Fraction, PositiveInt, component
from framework.layers.base import BATCH_AXES, Context, Layer, Out
from framework.layers.flow.base import Carry, Invertible, log_normal, row_keys, sum_each, wide
from framework.layers.flow.nets import Conv
from framework.layout import Nested, ParameterSpec


@component
class Preprocess(Invertible):
    """Integers x in 0..levels-1 -> logit(alpha + (1 - 2 alpha) (x + u) / levels), u uniform in [0, 1).

    The log-determinant is that of the map from [0, levels): so log p counts the original integers, of which a unit cube
    each is filled.

    Args:
        levels: given by the model.
        alpha: how far from 0 and 1 the logit's argument stays; 0 leaves the logit out: (x + u) / levels - 1/2.
    """

    def __init__(self, *, levels: PositiveInt, alpha: Fraction = 0.05):
        if alpha >= 0.5:
            raise ValueError(f"alpha: expected less than 0.5, given {alpha}")
        self.levels, self.alpha = levels, alpha

    def apply(self, weights: Nested, carry: None, ctx: Context, layer_state: Nested) -> tuple[Carry, Out]:
        """ctx.batch["images"] -> the carry; u depends on the image's row and, in training, on the step."""
        images = ctx.batch["images"]
        images = ctx.constrain(images, BATCH_AXES, *(None,) * (images.ndim - 1))
        dtype = wide(ctx).compute_dtype
        keys = row_keys(ctx, "dequantize", images.shape[0])
        noise = jax.vmap(lambda key: jax.random.uniform(key, images.shape[1:], dtype))(keys)
        x, log_det = self.forward(weights, images.astype(dtype) + noise, ctx)
        return {"x": x, "log_det": log_det, "log_prior": jnp.zeros_like(log_det)}, Out()

    def forward(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """x_BHWC in [0, levels], dequantized."""
        unit = x_BHWC / self.levels
        levels = jnp.full_like(x_BHWC[:, 0, 0, 0], -math.prod(x_BHWC.shape[1:]) * math.log(self.levels))
        if not self.alpha:
            return unit - 0.5, levels
        unit = self.alpha + (1.0 - 2.0 * self.alpha) * unit
        slopes = math.log(1.0 - 2.0 * self.alpha) - jnp.log(unit) - jnp.log1p(-unit)
        return jnp.log(unit) - jnp.log1p(-unit), levels + sum_each(slopes)

    def inverse(self, weights: Nested, y_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """x_BHWC: within [0, levels] where y is the image of such an x."""
        unit = (jax.nn.sigmoid(y_BHWC) - self.alpha) / (1.0 - 2.0 * self.alpha) if self.alpha else y_BHWC + 0.5
        x = unit * self.levels
        return x, self.forward(weights, x, ctx)[1]


class Gaussian(Layer):
    """A stage at which some or all of x leaves for its prior, a Gaussian; standardized by that it is a latent."""

    def moments(self, weights: Nested, kept: Any, ctx: Context) -> tuple[Any, Any]:
        """Mean and log_std of what leaves, given what stays."""
        raise NotImplementedError

    def halves(self, x_BHWC: jax.Array) -> tuple[Any, jax.Array]:
        """(what stays, what leaves)."""
        return None, x_BHWC

    def prepare(self, params: Nested, ctx: Context) -> Nested:
        """In float32: the density is computed with these."""
        return super().prepare(params, wide(ctx))

    def log_prior(self, weights: Nested, carry: Carry, ctx: Context) -> tuple[Any, jax.Array]:
        """(what stays, the carry's log_prior [B] and the log-density of what leaves)."""
        kept, gone = self.halves(carry["x"])
        return kept, carry["log_prior"] + log_normal(gone, *self.moments(weights, kept, ctx))

    def encode(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> tuple[Any, jax.Array]:
        """x -> (what stays, latent)."""
        kept, gone = self.halves(x_BHWC)
        mean, log_std = self.moments(weights, kept, ctx)
        return kept, (gone - mean) * jnp.exp(-log_std)

    def decode(self, weights: Nested, kept: Any, latent: jax.Array, ctx: Context) -> jax.Array:
        """The inverse of `encode`."""
        mean, log_std = self.moments(weights, kept, ctx)
        gone = mean + jnp.exp(log_std) * latent
        return gone if kept is None else jnp.concatenate([kept, gone], axis=-1)


@component
class Split(Gaussian):
    """Half of the channels leave; log_prior grows by their log-density.

    Args:
        dim: C, given by the model; the first C // 2 stay.
        learned: mean and log_std are a convolution of what stays (Glow); else 0.
    """

    def __init__(self, *, dim: PositiveInt, learned: bool = True):
        if dim < 2:
            raise ValueError(f"a split halves the channels: expected 2 or more, given {dim}")
        self.kept = dim // 2
        self.conv = Conv(inputs=self.kept, outputs=2 * (dim - self.kept), zero=True) if learned else None

    def children(self) -> dict[str, Layer]:
        """The learned prior's convolution."""
        return {} if self.conv is None else {"conv": self.conv}

    def moments(self, weights: Nested, kept: Any, ctx: Context) -> tuple[Any, Any]:
        """See Gaussian."""
        raw = jnp.zeros(2, kept.dtype) if self.conv is None else self.conv(weights["conv"], kept, ctx)
        mean, log_std = jnp.split(raw, 2, axis=-1)
        return mean, log_std

    def halves(self, x_BHWC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See Gaussian."""
        return x_BHWC[..., : self.kept], x_BHWC[..., self.kept :]

    def apply(self, weights: Nested, carry: Carry, ctx: Context, layer_state: Nested) -> tuple[Carry, Out]:
        """The carry with half the channels."""
        kept, log_prior = self.log_prior(weights, carry, ctx)
        return {**carry, "x": kept, "log_prior": log_prior}, Out()


@component
class Prior(Gaussian):
    """All that is left leaves, and the loss is made.

    Args:
        shape: (H, W, C), given by the model.
        dims: how many values an image has, given by the model: what the loss is divided by.
        learned: whether mean and log_std of each value are learned; else they are 0.
    """

    def __init__(self, *, shape: tuple[int, int, int], dims: PositiveInt, learned: bool = True):
        self.shape, self.dims, self.learned = tuple(shape), dims, learned

    def own_specs(self) -> dict[str, ParameterSpec]:
        """mean and log_std [H, W, C]."""
        spec = ParameterSpec(self.shape, "float32", roles=("position", "position", "channel"))
        return {"mean": spec, "log_std": spec} if self.learned else {}

    def moments(self, weights: Nested, kept: None, ctx: Context) -> tuple[Any, Any]:
        """See Gaussian."""
        zero = jnp.zeros((), wide(ctx).compute_dtype)
        return (weights["mean"], weights["log_std"]) if self.learned else (zero, zero)

    def apply(self, weights: Nested, carry: Carry, ctx: Context, layer_state: Nested) -> tuple[None, Out]:
        """loss = sum_b weights * nll / ctx.num_targets / dims: nats per dimension in training. So are the metrics
        nll = -(log_det + log_prior), log_det and log_prior; in evaluation (num_targets = 1) they are sums over images.
        """
        assert ctx.num_targets is not None
        _, log_prior = self.log_prior(weights, carry, ctx)
        each = {"nll": -(carry["log_det"] + log_prior), "log_det": carry["log_det"], "log_prior": log_prior}
        share = ctx.batch["weights"] / (ctx.num_targets * self.dims)
        metrics = {name: jnp.sum(share * value) for name, value in each.items()}
        return None, Out(loss=metrics["nll"], metrics=metrics)
