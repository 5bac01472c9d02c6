"""Coupling layers: one half of the channels stays, and a net computes from it how the other half changes.

Additive: Dinh et al. 2014 (NICE, arXiv 1410.8516). Affine: Dinh et al. 2016 (RealNVP, arXiv 1605.08803).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.extras.flows.base import Bijection, Carry, sum_each
from plimsoll.extras.flows.nets import ConvNet
from plimsoll.framework.config import Config, PositiveFloat, PositiveInt, component, config_for
from plimsoll.framework.layers.base import Context, Layer
from plimsoll.framework.layers.reversible import ReversedLayer
from plimsoll.framework.layout import Nested


@component
class AdditiveCoupling(Bijection):
    """Maps (a, b) to (a, b + t(a)); the log-determinant is 0.

    Args:
        dim: C, the number of channels, which are halved; set by the parent.
        net: config of t, which maps the channels that stay to `outputs_each` times those that change.
        flip: whether the first half changes instead of the second.
    """

    outputs_each = 1

    def __init__(self, *, dim: PositiveInt, net: Config = config_for(ConvNet), flip: bool = False):
        if dim < 2:
            raise ValueError(f"a coupling halves the channels: expected 2 or more, given {dim}; squeeze first")
        self.half = dim // 2
        self.flip = flip
        # With an odd number of channels, the second half is larger.
        num_fixed = dim - self.half if flip else self.half
        num_changed = dim - num_fixed
        self.net = net.instantiate(inputs=num_fixed, outputs=self.outputs_each * num_changed)

    def children(self) -> dict[str, Layer]:
        """Return the net."""
        return {"net": self.net}

    def change(self, raw: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the new value of the half x, given the net's output, and log_det [B]."""
        y = x + raw
        return y, jnp.zeros_like(x[:, 0, 0, 0])

    def restore(self, raw: jax.Array, y: jax.Array) -> jax.Array:
        """Inverse of `change`."""
        return y - raw

    def _halves(self, x_BHWC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (the half that stays, the half that changes)."""
        first = x_BHWC[..., : self.half]
        second = x_BHWC[..., self.half :]
        return (second, first) if self.flip else (first, second)

    def _join(self, fixed: jax.Array, changed: jax.Array) -> jax.Array:
        """Inverse of `_halves`."""
        halves = (changed, fixed) if self.flip else (fixed, changed)
        return jnp.concatenate(halves, axis=-1)

    def _run_net(self, net_weights: Nested, fixed: jax.Array, ctx: Context) -> jax.Array:
        """Return the net's output for the half that stays, in the dtype of that half."""
        # The net uses the compute dtype, while x is float32 or wider.
        net_input = fixed.astype(ctx.compute_dtype)
        raw = self.net(net_weights, net_input, ctx.fold("net"))
        return raw.astype(fixed.dtype)

    def forward(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """See `Invertible.forward`."""
        fixed, changed = self._halves(x_BHWC)
        raw = self._run_net(weights["net"], fixed, ctx)
        y, log_det = self.change(raw, changed)
        return self._join(fixed, y), log_det

    def inverse(self, weights: Nested, y_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """See `Invertible.inverse`."""
        fixed, changed = self._halves(y_BHWC)
        raw = self._run_net(weights["net"], fixed, ctx)
        x = self.restore(raw, changed)
        x_BHWC = self._join(fixed, x)
        _, log_det = self.change(raw, x)
        return x_BHWC, log_det

    def reverse(
        self, weights: Nested, carry: Carry, cts: tuple[Any, Any], ctx: Context, layer_state: Nested
    ) -> ReversedLayer:
        """See `Reversible.reverse`. The net is evaluated once."""
        # The net's input is the same before and after the layer, so one pass through the net gives both the inverse
        # and the residuals of the gradient.
        carry_ct, _ = cts
        fixed, changed = self._halves(carry["x"])

        def net(net_weights: Nested, fixed: jax.Array) -> jax.Array:
            return self._run_net(net_weights, fixed, ctx)

        raw, pull_net = jax.vjp(net, weights["net"], fixed)
        x = self.restore(raw, changed)
        (_, log_det), pull = jax.vjp(self.change, raw, x)
        fixed_ct, changed_ct = self._halves(carry_ct["x"])
        raw_ct, x_ct = pull((changed_ct, carry_ct["log_det"]))
        net_grads, net_input_ct = pull_net(raw_ct)
        input_x = self._join(fixed, x)
        input_carry = {**carry, "x": input_x, "log_det": carry["log_det"] - log_det}
        # The half that stays is both returned and read by the net.
        input_x_ct = self._join(fixed_ct + net_input_ct, x_ct)
        input_ct = {**carry_ct, "x": input_x_ct}
        return ReversedLayer(input_carry, {"net": net_grads}, input_ct)


@component
class AffineCoupling(AdditiveCoupling):
    """Maps (a, b) to (a, b * exp(s(a)) + t(a)), s = bound * tanh(. / bound); log_det = sum of s.

    Args:
        dim, net, flip: see `AdditiveCoupling`.
        bound: bound of |s|. Without one, a single step could scale by more than the inverse can recover from in
            float32.
    """

    outputs_each = 2

    def __init__(
        self, *, dim: PositiveInt, net: Config = config_for(ConvNet), flip: bool = False, bound: PositiveFloat = 2.0
    ):
        super().__init__(dim=dim, net=net, flip=flip)
        self.bound = bound

    def _shift_and_log_scale(self, raw: jax.Array) -> tuple[jax.Array, jax.Array]:
        shift, unbounded = jnp.split(raw, 2, axis=-1)
        log_scale = self.bound * jnp.tanh(unbounded / self.bound)
        return shift, log_scale

    def change(self, raw: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `AdditiveCoupling.change`."""
        shift, log_scale = self._shift_and_log_scale(raw)
        y = x * jnp.exp(log_scale) + shift
        return y, sum_each(log_scale)

    def restore(self, raw: jax.Array, y: jax.Array) -> jax.Array:
        """See `AdditiveCoupling.restore`."""
        shift, log_scale = self._shift_and_log_scale(raw)
        return (y - shift) * jnp.exp(-log_scale)
