"""Determines the length of a run, and checks that its learning rate schedules fit.

A run ends at `trainer.max_steps` or `trainer.max_epochs`, whichever comes first. The steps of an epoch are known only
once the data has been read.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.config import Config, ConfigError, diff, get_target
from plimsoll.framework.config.names import join
from plimsoll.framework.learner.rules import LearningRate
from plimsoll.framework.optimizers.learning_rates import warmup_cosine, warmup_linear, warmup_stable_decay
from plimsoll.framework.optimizers.schedule_steps import (
    following,
    get_schedule_length,
    scale,
    schedules,
    step_arguments,
    with_run_length,
)

# Maximum number of steps at which a rate is evaluated.
_SAMPLES = 1024
# In runs up to this many steps, the step of the peak is exact.
_PEAK_SAMPLES = 1 << 20
# Ending at 99% of the peak, or with 1% of the steps at a rate of zero, counts as intended.
_NEARLY = 0.99


def set_length(config: Config, epoch_steps: int) -> list[str]:
    """Set an experiment's config to the number of steps that will run, in place, and return the lines to show.

    Schedules that follow the run adjust by themselves. Others were written for `trainer.max_steps`, and are scaled in
    proportion if epochs end the run earlier.

    Args:
        config: config with trainer.max_epochs set.
        epoch_steps: number of steps in those epochs.
    """
    config_before = config.copy()
    written = config.trainer.max_steps
    epochs = f"trainer.max_epochs = {config.trainer.max_epochs:g}"
    if written is not None and written <= epoch_steps:
        if written == epoch_steps:
            return []
        return [f"{epochs} would be {epoch_steps} steps: trainer.max_steps = {written} ends the run earlier"]
    config.trainer.max_steps = epoch_steps
    # Without `trainer.max_steps`, every schedule already has the length of the run.
    unscaled_lines = []
    if written is not None:
        unscaled_lines = scale(config.learner, epoch_steps, written)
    messages = []
    for path, old, new in diff(config_before, config):
        shown = ["none" if value is None else str(value) for value in (old, new)]
        messages.append(f"{epochs}: {path} {' -> '.join(shown)}")
    for line in unscaled_lines:
        messages.append(f"{epochs}: learner.{line}")
    return messages


def report_length_change(stored: dict[str, Any], config: Config) -> list[str]:
    """Return the lines to show if a resumed run has another length than its checkpoint, which changes its rates.

    Args:
        stored: config of the checkpoint, as JSON.
        config: config of the resumed run.
    """
    old = stored["trainer"].get("max_steps")
    new = config.trainer.max_steps
    if old is None or old == new:
        return []
    consequence = f"none, so the rates now follow a run of {new} steps; set it to {old} to keep the previous rates"
    return [f"learner.{path}: {consequence}" for path in following(config.learner)]


def rate_notes(learner: Config, steps: int) -> list[str]:
    """Return warnings about schedules that do not fit a run of `steps` steps.

    Such a schedule never reaches its peak, or is zero long before the end. The schedules are evaluated, so JAX must
    have started.

    Args:
        learner: the learner's config.
        steps: length of the run.

    Raises:
        ConfigError: a rate is negative or not finite.
    """
    notes = []
    for inner_path, schedule in schedules(with_run_length(learner, steps)):
        path = join("learner", inner_path)
        function = schedule.instantiate()
        length = get_schedule_length(schedule)
        # If the schedule is longer than the run, its peak may come after the run's end.
        schedule_steps = max(steps, (length or 0) + 1)
        _, schedule_rates = _rates(function, schedule_steps)
        counts, rates = _rates(function, steps)
        valid = np.isfinite(rates) & (rates >= 0)
        invalid_indices = np.flatnonzero(~valid)
        if invalid_indices.size:
            first = invalid_indices[0]
            step = counts[first]
            raise ConfigError(f"expected finite rates >= 0, given {rates[first]} before step {step + 1}", path=path)
        if rates.max() < _NEARLY * schedule_rates.max():
            notes.append(
                f"{path}: the rate reaches only {rates.max():.3g} in {steps} steps, not its peak of "
                f"{schedule_rates.max():.3g}; {_remedy(schedule, path, steps)}"
            )
        positive_indices = np.flatnonzero(rates > 0)
        last_above = steps
        if positive_indices.size:
            last_above = counts[positive_indices[-1]] + 1
        # A schedule without its own length, such as a constant zero, is zero on purpose.
        if length is not None and last_above < _NEARLY * steps:
            notes.append(
                f"{path}: the rate is 0 after about {last_above} of {steps} steps; {_remedy(schedule, path, steps)}"
            )
    return notes


def rate_course(rate: LearningRate, steps: int) -> str:
    """Summarize the learning rate over a run of `steps` steps as "first -> peak -> last", omitting repeated values.

    Evaluates the schedule, so JAX must have started.
    """
    counts, rates = _rates(rate, steps, _PEAK_SAMPLES)
    peak_index = int(np.argmax(rates))
    # A schedule that ends at zero may leave a float32 rounding error there.
    shown_rates = np.where(rates < 1e-6 * rates.max(), 0.0, rates)
    first, peak, last = (f"{shown_rates[index]:.3g}" for index in (0, peak_index, -1))
    # Do not show the peak separately if it is at either end.
    if peak in (first, last):
        return " -> ".join(dict.fromkeys([first, last]))
    return f"{first} -> {peak} (step {counts[peak_index] + 1:,}) -> {last}"


def _rates(function: LearningRate, steps: int, num_samples: int = _SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Return (int32[N] update counts before a step, float32[N] rates of these steps), evenly spaced over a run."""
    samples = np.linspace(0, steps - 1, min(steps, num_samples)).round()
    # Rounding may yield the same step twice.
    counts = np.unique(samples.astype(np.int32))
    compute_rates = jax.jit(jax.vmap(lambda count: jnp.asarray(function(count), jnp.float32)))
    rates = compute_rates(counts)
    return counts, np.asarray(rates)


def _remedy(schedule: Config, path: str, steps: int) -> str:
    """Suggest settings that make a schedule fit the run."""
    if get_target(schedule) in (warmup_cosine, warmup_linear, warmup_stable_decay):
        length = ""
        if schedule.steps != steps:
            length = f", and {path}.steps=none"
        return f"set {path}.warmup below {steps}, or to a fraction of the run (for example 0.05){length}"
    names = [f"{path}.{name}" for name in step_arguments(schedule) or {}]
    fields = " and ".join(names) or path
    return f"set {fields} for {steps} steps, or {path}=plimsoll.warmup_cosine"
