"""Decisions about a step that depend on all gradients: how much they are clipped, and whether the step counts.

`framework.optimizers.clipping` implements the bounds of a tensor; this module decides which bound applies where in an
update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import Nested, TensorSpec
from plimsoll.framework.learner.rules import LearningRate
from plimsoll.framework.optimizers.clipping import limit_norm_growth, limit_update_rms
from plimsoll.framework.optimizers.rounding import BlockOrigin
from plimsoll.framework.optimizers.update_locality import UpdateLocality

ClipMode = Literal["global_norm", "two_pass", "previous_norm", "update_rms", "norm_growth"]
# Modes that clip a layer with values known during its update. All other modes first need the norm of all gradients.
_LAYERWISE_MODES: tuple[ClipMode, ...] = ("previous_norm", "update_rms", "norm_growth")
# Names of the counters that hold the moving averages of the loss and of its square.
_MEAN = "loss_mean"
_SQUARE = "loss_square"
# The averages of the loss cover about 1 / (1 - 0.99) = 100 updates.
_LOSS_DECAY = 0.99
# The first updates are never skipped as spikes, because the averages are not meaningful yet.
_SPIKE_FREE = 20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decision:
    """The decision that depends on all gradients, and the position of a layer, which random rounding depends on.

    All fields except `origin` are scalars on the device.

    Attributes:
        norm: f32 or wider, norm of all gradients together.
        factor: in the dtype of `norm`, factor that clips the gradients.
        ok: bool, whether the step counts.
        count: int32, number of updates before this one.
        seed: uint32, the run's seed; 0 if no update draws noise.
        layer: int32, index of the first layer to update.
        origin: a block's position in its tensor; None for the whole tensor.
    """

    norm: jax.Array
    factor: jax.Array
    ok: jax.Array
    count: jax.Array
    seed: jax.Array
    layer: jax.Array
    origin: BlockOrigin | None = None


@dataclass(frozen=True)
class Clipping:
    """The clip mode and its bound.

    Attributes:
        bound, mode: see `Learner`; both are None if nothing is clipped.
    """

    bound: float | None
    mode: ClipMode | None

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

    def clip_gradients(self, grads: Nested, norms: Nested, factor: jax.Array) -> tuple[Nested, Nested | None]:
        """Clip a layer's gradients.

        Args:
            grads: gradients in the dtype of the update.
            norms: norms of the layer's tensors in the previous step, f32 scalars; {} if the state does not hold them.
            factor: the factor for all gradients, see `factor`.

        Returns:
            (clipped gradients, the new norms of their tensors; None in all modes but norm_growth).
        """
        if self.bound is not None and self.mode == "norm_growth":
            return limit_norm_growth(grads, norms, self.bound)
        if self.mode in ("global_norm", "two_pass", "previous_norm"):
            # The factor is cast for each leaf: a wider factor would widen the gradients too.
            grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        return grads, None

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


@dataclass(frozen=True)
class SpikeDetector:
    """Detection of losses far above the average of previous updates.

    Attributes:
        bound: number of standard deviations above the average; None disables the detection.
    """

    bound: float | None

    def counter_specs(self) -> dict[str, TensorSpec]:
        """Return the specs of the moving averages of the loss and of its square, f32; {} if detection is disabled."""
        if self.bound is None:
            return {}
        return {name: TensorSpec((), "float32") for name in (_MEAN, _SQUARE)}

    def count_loss(self, counter: Nested, loss: jax.Array, ok: jax.Array) -> Nested:
        """Return the averages after a step; a skipped step leaves them unchanged.

        Args:
            counter: the state's counters before the step.
            loss: f32 scalar, the step's loss.
            ok: bool scalar, whether the step counts.
        """
        if self.bound is None:
            return {}
        averages = {}
        for name, value in ((_MEAN, loss), (_SQUARE, jnp.square(loss))):
            average = _LOSS_DECAY * counter[name] + (1 - _LOSS_DECAY) * value
            averages[name] = jnp.where(ok, average, counter[name])
        return averages

    def check_spike(self, ok: jax.Array, loss: jax.Array, counter: Nested, count: jax.Array) -> jax.Array:
        """Return whether a step still counts after the check of its loss: false for a spike.

        Args:
            ok: bool scalar, whether the step counts otherwise.
            loss: f32 scalar.
            counter: the state's counters.
            count: the number of updates before this one.
        """
        if self.bound is None:
            return ok
        # The averages start at zero, so they are divided by 1 - decay**count, as in Adam. Before the first update the
        # divisor would be zero; the result is not used then (see _SPIKE_FREE).
        mean = counter[_MEAN] / jnp.maximum(1.0 - _LOSS_DECAY ** count.astype(jnp.float32), 1e-6)
        square = counter[_SQUARE] / jnp.maximum(1.0 - _LOSS_DECAY ** count.astype(jnp.float32), 1e-6)
        # Because of rounding, the variance of nearly equal losses may be slightly negative.
        deviation = jnp.sqrt(jnp.maximum(square - mean**2, 0.0))
        return ok & ((count < _SPIKE_FREE) | (loss <= mean + self.bound * deviation))
