"""Learning rates whose lengths follow the run: a warm-up to a peak, and a decay, made of optax's parts.

    learning_rate=config_for(warmup_cosine, peak_value=3e-4, warmup=0.05)   # warms up for a twentieth of the run

The experiment fills in `steps`, the run's (trainer.max_steps, or what trainer.max_epochs comes to); setting it keeps a
schedule as it is when runs are cut short or go on. Rates are those before an update, counted from 0.
"""

from __future__ import annotations

import optax

from framework.config import (
    FiniteNonNegative,
    Fraction,
    Probability,
    component,
)
from framework.optimizers.schedule_steps import RunSteps, TrainingSteps


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
        warmup: steps until the peak, 100 say, or a fraction of the run, 0.05.
        end_fraction: of the peak, what is left at the end.
        steps: length in steps; None: the run's.
    """
    total = _length(steps)
    warmup_steps = _part(warmup, total)
    if warmup_steps >= total:
        return _cut_warmup(peak_value, warmup_steps)
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
        peak_value, warmup, steps: as of `warmup_cosine`.
        end_fraction: of the peak, what is left at the end.
    """
    total = _length(steps)
    warmup_steps = _part(warmup, total)
    if warmup_steps >= total:
        return _cut_warmup(peak_value, warmup_steps)
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
    """A linear warm-up from zero, the peak, and at the end a line down to a fraction of it (WSD, Hu et al. 2024, arXiv
    2404.06395).

    Args:
        peak_value, warmup, steps: as of `warmup_cosine`.
        decay: the last steps, or the last fraction of the run; 0 keeps the peak to the end.
        end_fraction: of the peak, what is left at the end.
    """
    total = _length(steps)
    warmup_steps = _part(warmup, total)
    if warmup_steps >= total:
        return _cut_warmup(peak_value, warmup_steps)
    # In a short run warm-up and decay may overlap: the warm-up goes first.
    decay_steps = min(_part(decay, total), total - warmup_steps)
    rise = optax.linear_schedule(0.0, peak_value, warmup_steps)
    plateau = optax.constant_schedule(peak_value)
    if decay_steps == 0:
        # A line of no steps, which optax would log a message about.
        return optax.join_schedules([rise, plateau], [warmup_steps])
    fall = optax.linear_schedule(peak_value, end_fraction * peak_value, decay_steps)
    return optax.join_schedules([rise, plateau, fall], [warmup_steps, total - decay_steps])


def _length(steps: int | None) -> int:
    """The length of the schedule in steps. Raises ValueError where neither a config nor an experiment gave it."""
    if steps is None:
        raise ValueError("steps: expected the run's length, which an experiment fills in, or a number > 0, given none")
    return steps


def _part(part: float, total: int) -> int:
    """The number of steps of a part of the schedule, which may be given as a fraction of all steps."""
    # By type, as in the config: 1 is one step, and a fraction is below 1.
    return part if isinstance(part, int) else round(part * total)


def _cut_warmup(peak_value: float, warmup_steps: int) -> optax.Schedule:
    """The warm-up alone, of a run that ends before the peak; `plimsoll train` says so in a line."""
    return optax.linear_schedule(0.0, peak_value, warmup_steps)
