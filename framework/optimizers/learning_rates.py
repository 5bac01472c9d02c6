"""Learning-rate schedules that scale with the run: a warm-up to a peak, then a decay, built from optax's parts.

    learning_rate=config_for(warmup_cosine, peak_value=3e-4, warmup=0.05)   # warms up for a twentieth of the run

The experiment fills in `steps`, the length of the run (trainer.max_steps, or the number of steps in
trainer.max_epochs). Set it to keep a schedule unchanged when runs are shortened or extended. Rates are those before an
update, counted from 0.
"""

from __future__ import annotations

import optax

from plimsoll.framework.config import FiniteNonNegative, Fraction, Probability, component
from plimsoll.framework.optimizers.schedule_steps import RunSteps, TrainingSteps


@component
def warmup_cosine(
    *,
    peak_value: FiniteNonNegative,
    warmup: TrainingSteps | Fraction = 0.05,
    end_fraction: Probability = 0.1,
    steps: RunSteps | None = None,
) -> optax.Schedule:
    """A linear warm-up from zero, then half a cosine down to a fraction of the peak.

    Args:
        peak_value: the highest rate.
        warmup: number of steps until the peak, such as 100, or a fraction of the run, such as 0.05.
        end_fraction: final rate as a fraction of the peak.
        steps: length in steps; None for the length of the run.
    """
    total = _length(steps)
    warmup_steps = _part(warmup, total)
    if warmup_steps >= total:
        # Only the warm-up, for a run that ends before the peak; `plimsoll train` reports it in a line.
        return optax.linear_schedule(0.0, peak_value, warmup_steps)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=peak_value,
        warmup_steps=warmup_steps,
        decay_steps=total,
        end_value=end_fraction * peak_value,
    )


@component
def warmup_linear(
    *,
    peak_value: FiniteNonNegative,
    warmup: TrainingSteps | Fraction = 0.05,
    end_fraction: Probability = 0.0,
    steps: RunSteps | None = None,
) -> optax.Schedule:
    """A linear warm-up from zero, then a line down to a fraction of the peak.

    Args:
        peak_value, warmup, steps: see `warmup_cosine`.
        end_fraction: final rate as a fraction of the peak.
    """
    total = _length(steps)
    warmup_steps = _part(warmup, total)
    if warmup_steps >= total:
        return optax.linear_schedule(0.0, peak_value, warmup_steps)
    rise = optax.linear_schedule(0.0, peak_value, warmup_steps)
    fall = optax.linear_schedule(peak_value, end_fraction * peak_value, total - warmup_steps)
    return optax.join_schedules([rise, fall], [warmup_steps])


@component
def warmup_stable_decay(
    *,
    peak_value: FiniteNonNegative,
    warmup: TrainingSteps | Fraction = 0.05,
    decay: TrainingSteps | Fraction = 0.2,
    end_fraction: Probability = 0.0,
    steps: RunSteps | None = None,
) -> optax.Schedule:
    """A linear warm-up from zero, the peak, and at the end a linear decay to a fraction of it (WSD, Hu et al. 2024,
    arXiv 2404.06395).

    Args:
        peak_value, warmup, steps: see `warmup_cosine`.
        decay: length of the final decay in steps, or as a fraction of the run; 0 keeps the peak to the end.
        end_fraction: final rate as a fraction of the peak.
    """
    total = _length(steps)
    warmup_steps = _part(warmup, total)
    if warmup_steps >= total:
        return optax.linear_schedule(0.0, peak_value, warmup_steps)
    # In a short run warm-up and decay may overlap; the warm-up takes precedence.
    decay_steps = min(_part(decay, total), total - warmup_steps)
    rise = optax.linear_schedule(0.0, peak_value, warmup_steps)
    plateau = optax.constant_schedule(peak_value)
    if decay_steps == 0:
        # Without this, a decay of zero steps would make optax log a message.
        return optax.join_schedules([rise, plateau], [warmup_steps])
    fall = optax.linear_schedule(peak_value, end_fraction * peak_value, decay_steps)
    return optax.join_schedules([rise, plateau, fall], [warmup_steps, total - decay_steps])


def _length(steps: int | None) -> int:
    """Return the schedule's length in steps. Raise ValueError if neither a config nor an experiment sets it."""
    if steps is None:
        raise ValueError("steps: expected the run's length, which an experiment fills in, or a number > 0, given none")
    return steps


def _part(part: float, total: int) -> int:
    """Return the number of steps of a part of the schedule, which may be a fraction of all steps."""
    # The type decides, as in the config: 1 is one step, and a fraction is below 1.
    return part if isinstance(part, int) else round(part * total)
