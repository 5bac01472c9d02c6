"""Clipping as the learner is told to: one factor for all gradients, or a bound of each tensor.

What bounds a tensor is in `framework.optimizers.clipping`; here is which bound is applied where in an update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from framework.layout import Nested
from framework.learner.instances import LearningRate
from framework.optimizers.clipping import limit_norm_growth, limit_update_rms
from framework.optimizers.reach import Reach

ClipMode = Literal["global_norm", "two_pass", "previous_norm", "update_rms", "norm_growth"]
# Modes that clip a unit by what is known while it is updated. Any other mode needs the norm of all gradients first.
_MODES_OF_ONE_UNIT: tuple[ClipMode, ...] = ("previous_norm", "update_rms", "norm_growth")


class ClippedGradients(NamedTuple):
    """A unit's gradients after clipping, and the new norms of its tensors (None in all modes but norm_growth)."""

    grads: Nested
    norms: Nested | None


@dataclass(frozen=True)
class Clipping:
    """What is bounded, and by how much.

    Attributes:
      bound, mode: see `Learner`; both are None where nothing is clipped.
    """

    bound: float | None
    mode: ClipMode | None

    @property
    def keeps_norms(self) -> bool:
        """Whether the optimizer state holds the norm that each tensor's gradient had in the step before."""
        return self.mode == "norm_growth"

    @property
    def needs_all_gradients(self) -> bool:
        """Whether no unit can be clipped before the gradients of all units were seen."""
        return self.mode is not None and self.mode not in _MODES_OF_ONE_UNIT

    def widened(self, reach: Reach) -> Reach:
        """The smallest part of a unit that can be updated by itself, where an optimizer alone needs `reach`."""
        # These two bound a norm of a tensor, which no smaller part of it knows.
        if self.mode in ("update_rms", "norm_growth") and reach in ("element", "row"):
            return "tensor"
        return reach

    def factor(self, norm: jax.Array, counter: Nested) -> jax.Array:
        """The factor that all gradients are multiplied by; 1 in the modes that clip each tensor by itself.

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

    def clip_gradients(
        self,
        grads: Nested,
        norms: Nested,
        factor: jax.Array,
    ) -> ClippedGradients:
        """Clips a unit's gradients.

        Args:
            grads: in the dtype of the update.
            norms: those of its tensors in the step before, f32 scalars; {} where they are not kept.
            factor: that of all gradients, see `factor`.
        """
        if self.bound is not None and self.mode == "norm_growth":
            limited_grads, new_norms = limit_norm_growth(grads, norms, self.bound)
            return ClippedGradients(limited_grads, new_norms)
        if self.mode in ("global_norm", "two_pass", "previous_norm"):
            # The factor is cast for each leaf: a wider one would make the gradients wider, too.
            grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        return ClippedGradients(grads, None)

    def clip_updates(
        self,
        updates: Nested,
        learning_rate: LearningRate | None,
        count: jax.Array,
    ) -> Nested:
        """Bounds the root mean square of what an optimizer adds to each tensor of a unit, where that is the mode.

        Args:
            updates: of one unit.
            learning_rate: which the bound is multiplied by; None where the optimizer names none.
            count: the number of updates before this one.
        """
        if self.bound is None or self.mode != "update_rms":
            return updates
        rate = 1.0 if learning_rate is None else learning_rate(count)
        return limit_update_rms(updates, self.bound, rate)
