"""The ends of a flow: dequantization of integers, channels that leave early, the prior, and the loss.

Dequantization: Theis et al. 2015 (arXiv 1511.01844). Logit and multi-scale structure: Dinh et al. 2016 (RealNVP,
arXiv 1605.08803).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.extras.flows.base import Carry, Invertible, log_normal, row_keys, sum_each, widen_context
from plimsoll.extras.flows.nets import Conv
from plimsoll.framework.config import Fraction, PositiveInt, component
from plimsoll.framework.layers.base import BATCH_AXES, Context, Layer, Out
from plimsoll.framework.layout import Nested, ParameterSpec


@component
class Preprocess(Invertible):
    """Maps integers x in 0..levels-1 to logit(alpha + (1 - 2 alpha) (x + u) / levels), u uniform in [0, 1).

    The log-determinant is that of the map from [0, levels), so log p refers to the original integers: each one fills
    a unit cube.

    Args:
        levels: number of values of a channel; set by the model.
        alpha: distance of the logit's argument from 0 and 1; 0 omits the logit: (x + u) / levels - 1/2.
    """

    def __init__(self, *, levels: PositiveInt, alpha: Fraction = 0.05):
        if alpha >= 0.5:
            raise ValueError(f"alpha: expected less than 0.5, given {alpha}")
        self.levels = levels
        self.alpha = alpha

    def apply(self, weights: Nested, carry: Carry | None, ctx: Context, layer_state: Nested) -> tuple[Carry, Out]:
        """Dequantize ctx.batch["images"] and return the carry.

        The noise u depends on the image's row and, in training, on the step.
        """
        images = ctx.batch["images"]
        inner_axes = (None,) * (images.ndim - 1)
        images = ctx.constrain(images, BATCH_AXES, *inner_axes)
        # float32 even if the nets compute in bfloat16, whose 8 bits cannot hold the noise.
        dtype = widen_context(ctx).compute_dtype
        keys = row_keys(ctx, "dequantize", images.shape[0])

        def draw_noise(key: jax.Array) -> jax.Array:
            return jax.random.uniform(key, images.shape[1:], dtype)

        noise = jax.vmap(draw_noise)(keys)
        dequantized = images.astype(dtype) + noise
        x, log_det = self.forward(weights, dequantized, ctx)
        return {"x": x, "log_det": log_det, "log_prior": jnp.zeros_like(log_det)}, Out()

    def forward(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """Map dequantized x_BHWC in [0, levels]; see `Invertible.forward`."""
        unit = x_BHWC / self.levels
        num_values = math.prod(x_BHWC.shape[1:])
        # The division by the number of levels contributes this for each value.
        scale_log_det = jnp.full_like(x_BHWC[:, 0, 0, 0], -num_values * math.log(self.levels))
        if not self.alpha:
            return unit - 0.5, scale_log_det
        unit = self.alpha + (1.0 - 2.0 * self.alpha) * unit
        # logit'(u) = 1 / (u (1 - u)).
        slopes = math.log(1.0 - 2.0 * self.alpha) - jnp.log(unit) - jnp.log1p(-unit)
        logit = jnp.log(unit) - jnp.log1p(-unit)
        return logit, scale_log_det + sum_each(slopes)

    def inverse(self, weights: Nested, y_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """Return x_BHWC: within [0, levels] if y is the image of such an x."""
        if self.alpha:
            unit = (jax.nn.sigmoid(y_BHWC) - self.alpha) / (1.0 - 2.0 * self.alpha)
        else:
            unit = y_BHWC + 0.5
        x = unit * self.levels
        _, log_det = self.forward(weights, x, ctx)
        return x, log_det


class Gaussian(Layer):
    """A stage at which some or all of x leaves for a Gaussian prior. Standardized by the prior, it is a latent."""

    def moments(self, weights: Nested, remaining: Any, ctx: Context) -> tuple[Any, Any]:
        """Return mean and log_std of the part that leaves, given the part that stays."""
        raise NotImplementedError

    def halves(self, x_BHWC: jax.Array) -> tuple[Any, jax.Array]:
        """Return (the part that stays, the part that leaves)."""
        return None, x_BHWC

    def prepare(self, params: Nested, ctx: Context) -> Nested:
        """Prepare the weights in float32 or wider: the density is computed with them."""
        return super().prepare(params, widen_context(ctx))

    def log_prior(self, weights: Nested, carry: Carry, ctx: Context) -> tuple[Any, jax.Array]:
        """Return (the part that stays, the carry's log_prior [B] plus the log-density of the part that leaves)."""
        remaining, leaving = self.halves(carry["x"])
        prior_sum = carry["log_prior"]
        mean, log_std = self.moments(weights, remaining, ctx)
        return remaining, prior_sum + log_normal(leaving, mean, log_std)

    def encode(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> tuple[Any, jax.Array]:
        """Map x to (the part that stays, latent)."""
        remaining, leaving = self.halves(x_BHWC)
        mean, log_std = self.moments(weights, remaining, ctx)
        latent = (leaving - mean) * jnp.exp(-log_std)
        return remaining, latent

    def decode(self, weights: Nested, remaining: Any, latent: jax.Array, ctx: Context) -> jax.Array:
        """Inverse of `encode`."""
        mean, log_std = self.moments(weights, remaining, ctx)
        leaving = mean + jnp.exp(log_std) * latent
        if remaining is None:
            return leaving
        return jnp.concatenate([remaining, leaving], axis=-1)


@component
class Split(Gaussian):
    """Removes half of the channels and adds their log-density to log_prior.

    Args:
        dim: C, the number of channels; the first C // 2 stay. Set by the model.
        learned: whether mean and log_std are a convolution of the part that stays (Glow); otherwise they are 0.
    """

    def __init__(self, *, dim: PositiveInt, learned: bool = True):
        if dim < 2:
            raise ValueError(f"a split halves the channels: expected 2 or more, given {dim}")
        self.kept = dim // 2
        num_leaving = dim - self.kept
        # Starts at zero, so that the prior starts as a standard Gaussian.
        self.conv = Conv(inputs=self.kept, outputs=2 * num_leaving, zero=True) if learned else None

    def children(self) -> dict[str, Layer]:
        """Return the learned prior's convolution."""
        return {} if self.conv is None else {"conv": self.conv}

    def moments(self, weights: Nested, remaining: Any, ctx: Context) -> tuple[Any, Any]:
        """See `Gaussian.moments`."""
        # Two zeros are split into a mean and a log_std, which broadcast over all channels.
        if self.conv is None:
            raw = jnp.zeros(2, remaining.dtype)
        else:
            raw = self.conv(weights["conv"], remaining, ctx)
        mean, log_std = jnp.split(raw, 2, axis=-1)
        return mean, log_std

    def halves(self, x_BHWC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Gaussian.halves`."""
        remaining = x_BHWC[..., : self.kept]
        leaving = x_BHWC[..., self.kept :]
        return remaining, leaving

    def apply(self, weights: Nested, carry: Carry, ctx: Context, layer_state: Nested) -> tuple[Carry, Out]:
        """Return the carry with half the channels."""
        x, log_prior = self.log_prior(weights, carry, ctx)
        return {**carry, "x": x, "log_prior": log_prior}, Out()


@component
class Prior(Gaussian):
    """The last stage: everything that is left leaves, and the loss is computed.

    Args:
        shape: (H, W, C), the shape of the remaining x; set by the model.
        dims: number of values of an image, by which the loss is divided; set by the model.
        learned: whether mean and log_std of each value are learned; otherwise they are 0.
    """

    def __init__(self, *, shape: tuple[int, int, int], dims: PositiveInt, learned: bool = True):
        self.shape = tuple(shape)
        self.dims = dims
        self.learned = learned

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the specs of mean and log_std [H, W, C]."""
        if not self.learned:
            return {}
        spec = ParameterSpec(self.shape, "float32", roles=("position", "position", "channel"))
        return {"mean": spec, "log_std": spec}

    def moments(self, weights: Nested, remaining: None, ctx: Context) -> tuple[Any, Any]:
        """See `Gaussian.moments`."""
        zero = jnp.zeros((), widen_context(ctx).compute_dtype)
        if not self.learned:
            return zero, zero
        return weights["mean"], weights["log_std"]

    def apply(self, weights: Nested, carry: Carry, ctx: Context, layer_state: Nested) -> tuple[None, Out]:
        """Return loss = sum_b weights * nll / ctx.num_targets / dims, in training nats per dimension.

        The metrics nll = -(log_det + log_prior), log_det and log_prior have the same unit; in evaluation (num_targets
        = 1) they are sums over images.
        """
        assert ctx.num_targets is not None
        _, log_prior = self.log_prior(weights, carry, ctx)
        image_values = {"nll": -(carry["log_det"] + log_prior), "log_det": carry["log_det"], "log_prior": log_prior}
        # Padding images have the weight 0.
        share = ctx.batch["weights"] / (ctx.num_targets * self.dims)
        metrics = {name: jnp.sum(share * value) for name, value in image_values.items()}
        return None, Out(loss=metrics["nll"], metrics=metrics)
