"""Coupling layers: half of the channels stay, and a net of them says what becomes of the other half.

Additive: Dinh et al. 2014 (NICE, arXiv 1410.8516). Affine: Dinh et al. 2016 (RealNVP, arXiv 1605.08803).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from framework.config import Config, PositiveFloat, PositiveInt, component, config_for
from framework.layers.base import Context, Layer
from framework.layers.flow.base import Bijection, Carry, sum_each
from framework.layers.flow.nets import ConvNet
from framework.layout import Nested


@component
class AdditiveCoupling(Bijection):
    """(a, b) -> (a, b + t(a)); its log-determinant is 0.

    Args:
        dim: C, given by the parent; the channels are halved.
        net: config of t: from the channels that stay to `outputs_each` times those that change.
        flip: whether the first half changes instead of the second.
    """

    outputs_each = 1

    def __init__(self, *, dim: PositiveInt, net: Config = config_for(ConvNet), flip: bool = False):
        if dim < 2:
            raise ValueError(f"a coupling halves the channels: expected 2 or more, given {dim}; squeeze first")
        self.half, self.flip = dim // 2, flip
        kept, changed = (dim - self.half, self.half) if flip else (self.half, dim - self.half)
        self.net = net.instantiate(inputs=kept, outputs=self.outputs_each * changed)

    def children(self) -> dict[str, Layer]:
        """The net."""
        return {"net": self.net}

    def change(self, raw: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What becomes of the half x, given the net's output, and log_det [B]."""
        return x + raw, jnp.zeros_like(x[:, 0, 0, 0])

    def restore(self, raw: jax.Array, y: jax.Array) -> jax.Array:
        """The inverse of `change`."""
        return y - raw

    def _halves(self, x_BHWC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(what stays, what changes)."""
        first, second = x_BHWC[..., : self.half], x_BHWC[..., self.half :]
        return (second, first) if self.flip else (first, second)

    def _joined(self, kept: jax.Array, changed: jax.Array) -> jax.Array:
        return jnp.concatenate((changed, kept) if self.flip else (kept, changed), axis=-1)

    def _raw(self, net_weights: Nested, kept: jax.Array, ctx: Context) -> jax.Array:
        return self.net(net_weights, kept.astype(ctx.compute_dtype), ctx.fold("net")).astype(kept.dtype)

    def forward(self, weights: Nested, x_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """See Invertible."""
        kept, changed = self._halves(x_BHWC)
        y, log_det = self.change(self._raw(weights["net"], kept, ctx), changed)
        return self._joined(kept, y), log_det

    def inverse(self, weights: Nested, y_BHWC: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """See Invertible."""
        kept, changed = self._halves(y_BHWC)
        raw = self._raw(weights["net"], kept, ctx)
        x = self.restore(raw, changed)
        return self._joined(kept, x), self.change(raw, x)[1]

    def reverse(
        self, weights: Nested, carry: Carry, cts: tuple[Any, Any], ctx: Context, layer_state: Nested
    ) -> tuple[Carry, Nested, Carry]:
        """See Reversible. The net is evaluated once: what stays is the same before and after, so one pass gives both
        the inverse and what the gradient needs."""
        kept, changed = self._halves(carry["x"])
        raw, pull_net = jax.vjp(lambda net_weights, kept: self._raw(net_weights, kept, ctx), weights["net"], kept)
        x = self.restore(raw, changed)
        (_, log_det), pull = jax.vjp(self.change, raw, x)
        ct_kept, ct_changed = self._halves(cts[0]["x"])
        ct_raw, ct_x = pull((ct_changed, cts[0]["log_det"]))
        grads, more = pull_net(ct_raw)
        before = {**carry, "x": self._joined(kept, x), "log_det": carry["log_det"] - log_det}
        return before, {"net": grads}, {**cts[0], "x": self._joined(ct_kept + more, ct_x)}


@component
class AffineCoupling(AdditiveCoupling):
    """(a, b) -> (a, b * exp(s(a)) + t(a)), s = bound * tanh(. / bound); log_det = sum of s.

    Args:
        dim, net, flip: as for AdditiveCoupling.
        bound: of |s|: without one, a single step could scale by more than the inverse recovers from in float32.
    """

    outputs_each = 2

    def __init__(
        self,
        *,
        dim: PositiveInt,
        net: Config = config_for(ConvNet),
        flip: bool = False,
        bound: PositiveFloat = 2.0,
    ):
        super().__init__(dim=dim, net=net, flip=flip)
        self.bound = bound

    def _shift_and_log_scale(self, raw: jax.Array) -> tuple[jax.Array, jax.Array]:
        shift, free = jnp.split(raw, 2, axis=-1)
        return shift, self.bound * jnp.tanh(free / self.bound)

    def change(self, raw: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See AdditiveCoupling."""
        shift, log_scale = self._shift_and_log_scale(raw)
        return x * jnp.exp(log_scale) + shift, sum_each(log_scale)

    def restore(self, raw: jax.Array, y: jax.Array) -> jax.Array:
        """See AdditiveCoupling."""
        shift, log_scale = self._shift_and_log_scale(raw)
        return (y - shift) * jnp.exp(-log_scale)
