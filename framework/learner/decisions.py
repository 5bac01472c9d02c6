"""Decisions that depend on all gradients: how much they are clipped, and whether the step counts."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from plimsoll.framework.layout import Nested, TensorSpec
from plimsoll.framework.learner.clipping import Clipping
from plimsoll.framework.learner.update_types import Decision
from plimsoll.framework.optimizers.rounding import fold

# Names of the counters that hold the moving averages of the loss and of its square.
_MEAN = "loss_mean"
_SQUARE = "loss_square"
# The averages of the loss cover about 1 / (1 - 0.99) = 100 updates.
_LOSS_DECAY = 0.99
# The first updates are never skipped as spikes, because the averages are not meaningful yet.
_SPIKE_FREE = 20


def global_norm(grads: Nested) -> jax.Array:
    """Return the norm of all gradients together, f32 or wider."""
    wide_grads = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
    return optax.tree.norm(wide_grads)


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
        mean = counter[_MEAN] / _bias_correction(count)
        square = counter[_SQUARE] / _bias_correction(count)
        # Because of rounding, the variance of nearly equal losses may be slightly negative.
        deviation = jnp.sqrt(jnp.maximum(square - mean**2, 0.0))
        return ok & ((count < _SPIKE_FREE) | (loss <= mean + self.bound * deviation))


def decide(
    loss: jax.Array, norm: jax.Array, counter: Nested, *, clipping: Clipping, spikes: SpikeDetector, draws: bool
) -> Decision:
    """Make the decision that depends on all gradients; see `Learner.decide`.

    Args:
        loss, norm: f32 scalars.
        counter: the state's counters.
        clipping, spikes: how gradients are clipped, and which losses are skipped.
        draws: whether updates draw noise, and need a seed.
    """
    factor = clipping.factor(norm, counter)
    ok = jnp.isfinite(norm) & jnp.isfinite(loss)
    count = counter["step"] - counter["skipped"]
    ok = spikes.check_spike(ok, loss, counter, count)
    seed = fold(*counter["rng"]) if draws else jnp.uint32(0)
    return Decision(norm, factor, ok, count, seed, jnp.int32(0))


def _bias_correction(count: jax.Array) -> jax.Array:
    """Return the divisor of the losses' moving averages, which start at zero: 1 - decay**count, as in Adam."""
    # Before the first update the divisor would be zero; the result is not used then (see _SPIKE_FREE).
    return jnp.maximum(1.0 - _LOSS_DECAY ** count.astype(jnp.float32), 1e-6)
