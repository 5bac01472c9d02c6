"""How long a run is, and whether its learning rates fit that.

A run ends with `trainer.max_steps` or `trainer.max_epochs`, whichever comes first; epochs are known once the data was
read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from framework.config import Config, ConfigError, diff, target_of
from framework.config.names import join
from framework.learner.instances import LearningRate
from framework.optimizers.learning_rates import warmup_cosine, warmup_linear, warmup_stable_decay
from framework.optimizers.schedule_steps import (
    following,
    own_length,
    scale,
    schedules,
    step_arguments,
    with_run_length,
)

# Rates are looked at in at most so many steps of a run.
_SAMPLES = 1024
# The peak of a run of at most so many steps is told to the step.
_PEAK_SAMPLES = 1 << 20
# A run that ends at 99% of the peak, or with 1% of its steps at a rate of zero, is one that
# somebody meant.
_NEARLY = 0.99


def set_length(config: Config, epoch_steps: int) -> list[str]:
    """Makes an experiment's config one of as many steps as will really run, in place, and returns what to tell.

    Schedules that follow the run do so by themselves; others were written for `trainer.max_steps`, and are scaled in
    proportion where epochs end the run earlier.

    Args:
        config: has trainer.max_epochs.
        epoch_steps: the steps that those epochs take.
    """
    config_before = config.copy()
    written = config.trainer.max_steps
    epochs = f"trainer.max_epochs = {config.trainer.max_epochs:g}"
    if written is not None and written <= epoch_steps:
        if written == epoch_steps:
            return []
        return [f"{epochs} would be {epoch_steps} steps: trainer.max_steps = {written} ends the run before"]
    config.trainer.max_steps = epoch_steps
    # Without `trainer.max_steps`, no schedule was written for another length than that of the run.
    unscaled_lines = []
    if written is not None:
        unscaled_lines = scale(config.learner, epoch_steps, written)
    messages = []
    for path, old, new in diff(config_before, config):
        messages.append(f"{epochs}: {path} {_text(old)} -> {_text(new)}")
    for line in unscaled_lines:
        messages.append(f"{epochs}: learner.{line}")
    return messages


def changed_length(stored: dict[str, Any], config: Config) -> list[str]:
    """What to tell when a run goes on with another length than its checkpoint's: the rates that follow it change.

    Args:
        stored: the config of the checkpoint, as JSON.
        config: of the run that goes on.
    """
    old = stored["trainer"].get("max_steps")
    new = config.trainer.max_steps
    if old is None or old == new:
        return []
    consequence = f"none, so the rates from here on are those of a run of {new} steps; {old} keeps those of before"
    return [f"learner.{path}: {consequence}" for path in following(config.learner)]


def _text(value: Any) -> str:
    return "none" if value is None else str(value)


def rate_notes(learner: Config, steps: int) -> list[str]:
    """What to tell about schedules that do not fit a run of so many steps: the peak is never reached, or the rate is
    zero long before the end. Evaluates them, so JAX must have started.

    Raises:
        ConfigError: a rate is negative, or not finite.
    """
    notes = []
    for inner_path, schedule in schedules(with_run_length(learner, steps)):
        path = join("learner", inner_path)
        function = schedule.instantiate()
        length = own_length(schedule)
        # The peak of a schedule that is longer than the run may lie behind the run's end.
        schedule_steps = max(steps, (length or 0) + 1)
        _, schedule_rates = _rates(function, schedule_steps)
        counts, rates = _rates(function, steps)
        valid = np.isfinite(rates) & (rates >= 0)
        invalid_indices = np.flatnonzero(~valid)
        if invalid_indices.size:
            first = invalid_indices[0]
            step = counts[first]
            raise ConfigError(
                f"expected finite rates >= 0, given {rates[first]} before step {step + 1}",
                path=path,
            )
        if rates.max() < _NEARLY * schedule_rates.max():
            notes.append(
                f"{path}: the rate gets to {rates.max():.3g} in {steps} steps, and never to its peak of "
                f"{schedule_rates.max():.3g}; {_remedy(schedule, path, steps)}"
            )
        positive_indices = np.flatnonzero(rates > 0)
        last_above = steps
        if positive_indices.size:
            last_above = counts[positive_indices[-1]] + 1
        # A schedule without a length of its own (a constant zero, say) is zero on purpose.
        if length is not None and last_above < _NEARLY * steps:
            notes.append(
                f"{path}: the rate is 0 after about {last_above} of {steps} steps; {_remedy(schedule, path, steps)}"
            )
    return notes


def rate_course(rate: LearningRate, steps: int) -> str:
    """The learning rate over a run of so many steps, read from the schedule: "first -> peak -> last", as far as they
    differ. Evaluates the schedule, so JAX must have started."""
    counts, rates = _rates(rate, steps, _PEAK_SAMPLES)
    peak_index = int(np.argmax(rates))
    # A schedule that ends at zero may leave the rounding of float32 there.
    shown_rates = np.where(rates < 1e-6 * rates.max(), 0.0, rates)
    first, peak, last = (f"{shown_rates[index]:.3g}" for index in (0, peak_index, -1))
    # A peak at either end is that end.
    if peak in (first, last):
        return " -> ".join(dict.fromkeys([first, last]))
    return f"{first} -> {peak} (step {counts[peak_index] + 1:,}) -> {last}"


def _rates(
    function: Callable[[Any], Any],
    steps: int,
    num_samples: int = _SAMPLES,
) -> tuple[np.ndarray, np.ndarray]:
    """(int32[N] counts of updates before a step, float32[N] rates of these steps) over a run, evenly spaced."""
    samples = np.linspace(0, steps - 1, min(steps, num_samples)).round()
    # Rounding may give a step twice.
    counts = np.unique(samples.astype(np.int32))
    rates_of = jax.jit(jax.vmap(lambda count: jnp.asarray(function(count), jnp.float32)))
    rates = rates_of(counts)
    return counts, np.asarray(rates)


def _remedy(schedule: Config, path: str, steps: int) -> str:
    """What to set so that a schedule fits the run."""
    if target_of(schedule) in (warmup_cosine, warmup_linear, warmup_stable_decay):
        length = ""
        if schedule.steps != steps:
            length = f", and {path}.steps=none"
        return f"set {path}.warmup below {steps}, or to a fraction of the run (0.05, say){length}"
    names = [f"{path}.{name}" for name in step_arguments(schedule) or {}]
    fields = " and ".join(names) or path
    return f"set {fields} for {steps} steps, or {path}=framework.optimizers.learning_rates.warmup_cosine"
