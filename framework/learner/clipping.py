"""Gradient clipping: one factor for all gradients, or a bound per tensor.

`framework.optimizers.clipping` implements the bounds of a tensor; this module decides which bound applies where in an
update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import Nested
from plimsoll.framework.learner.optimizer_instances import LearningRate
from plimsoll.framework.optimizers.clipping import limit_norm_growth, limit_update_rms
from plimsoll.framework.optimizers.update_locality import UpdateLocality

ClipMode = Literal["global_norm", "two_pass", "previous_norm", "update_rms", "norm_growth"]
# Modes that clip a layer with values known during its update. All other modes first need the norm of all gradients.
_LAYERWISE_MODES: tuple[ClipMode, ...] = ("previous_norm", "update_rms", "norm_growth")


class ClippedGradients(NamedTuple):
    """A layer's gradients after clipping, and the new norms of its tensors (None in all modes but norm_growth)."""

    grads: Nested
    norms: Nested | None


@dataclass(frozen=True)
class Clipping:
    """The clip mode and its bound.

    Attributes:
        bound, mode: see `Learner`; both are None if nothing is clipped.
    """

    bound: float | None
    mode: ClipMode | None

    @property
    def keeps_norms(self) -> bool:
        """Return whether the optimizer state has each tensor's gradient norm of the previous step."""
        return self.mode == "norm_growth"

    @property
    def needs_all_gradients(self) -> bool:
        """Return whether no layer can be clipped before the gradients of all layers are known."""
        return self.mode is not None and self.mode not in _LAYERWISE_MODES

    def adjust_locality(self, update_locality: UpdateLocality) -> UpdateLocality:
        """Return the smallest part of a layer that can be updated independently.

        Args:
            update_locality: update locality of the optimizer itself, without clipping.
        """
        # These two modes bound a norm of a tensor, which a smaller part of the tensor cannot compute.
        if self.mode in ("update_rms", "norm_growth") and update_locality in ("element", "row"):
            return "tensor"
        return update_locality

    def factor(self, norm: jax.Array, counter: Nested) -> jax.Array:
        """Return the factor that multiplies all gradients; 1 in the modes that clip each tensor separately.

        Args:
            norm: f32 scalar, of all gradients together.
            counter: the state's counters.
        """
        factor = jnp.ones_like(norm)
        if self.bound is None:
            return factor
        if self.mode in ("global_norm", "two_pass"):
            return jnp.minimum(1.0, self.bound / norm)
        if self.mode == "previous_norm":
            previous_norm = counter["grad_norm"].astype(norm.dtype)
            # The norm is zero before the first step, which is not clipped.
            return jnp.where(previous_norm > 0, jnp.minimum(1.0, self.bound / previous_norm), 1.0)
        return factor

    def clip_gradients(self, grads: Nested, norms: Nested, factor: jax.Array) -> ClippedGradients:
        """Clip a layer's gradients.

        Args:
            grads: gradients in the dtype of the update.
            norms: norms of the layer's tensors in the previous step, f32 scalars; {} if the state does not hold them.
            factor: the factor for all gradients, see `factor`.
        """
        if self.bound is not None and self.mode == "norm_growth":
            limited_grads, new_norms = limit_norm_growth(grads, norms, self.bound)
            return ClippedGradients(limited_grads, new_norms)
        if self.mode in ("global_norm", "two_pass", "previous_norm"):
            # The factor is cast for each leaf: a wider factor would widen the gradients too.
            grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        return ClippedGradients(grads, None)

    def clip_updates(self, updates: Nested, learning_rate: LearningRate | None, count: jax.Array) -> Nested:
        """In mode update_rms, bound the root mean square of each tensor's update in a layer.

        Args:
            updates: the updates of one layer.
            learning_rate: multiplies the bound; None if the optimizer has no learning rate.
            count: the number of updates before this one.
        """
        if self.bound is None or self.mode != "update_rms":
            return updates
        rate = 1.0 if learning_rate is None else learning_rate(count)
        return limit_update_rms(updates, self.bound, rate)
