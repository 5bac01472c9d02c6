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
from framework.optimizers.learning_rates import warmup_cosine, warmup_linear, warmup_stable_decay
from framework.optimizers.schedule_steps import following, own_length, scale, schedules, step_arguments, with_run_length

# Rates are looked at in at most so many steps of a run.
_SAMPLES = 1024
# A run that ends at 99% of the peak, or with 1% of its steps at a rate of zero, is one that somebody meant.
_NEARLY = 0.99


def set_length(config: Config, epoch_steps: int) -> list[str]:
    """Makes an experiment's config one of as many steps as will really run, in place, and returns what to tell.

    Schedules that follow the run do so by themselves; others were written for `trainer.max_steps`, and are scaled in
    proportion where epochs end the run earlier.

    Args:
        config: has trainer.max_epochs.
        epoch_steps: the steps that those epochs take.
    """
    before = config.copy()
    written, epochs = config.trainer.max_steps, f"trainer.max_epochs = {config.trainer.max_epochs:g}"
    if written is not None and written <= epoch_steps:
        if written == epoch_steps:
            return []
        return [f"{epochs} would be {epoch_steps} steps: trainer.max_steps = {written} ends the run before"]
    config.trainer.max_steps = epoch_steps
    unknown = [] if written is None else scale(config.learner, epoch_steps, written)
    changes = [f"{epochs}: {path} {_text(old)} -> {_text(new)}" for path, old, new in diff(before, config)]
    return changes + [f"{epochs}: learner.{line}" for line in unknown]


def changed_length(stored: dict[str, Any], config: Config) -> list[str]:
    """What to tell when a run goes on with another length than its checkpoint's: the rates that follow it change.

    Args:
        stored: the config of the checkpoint, as JSON.
        config: of the run that goes on.
    """
    old, new = stored["trainer"].get("max_steps"), config.trainer.max_steps
    if old is None or old == new:
        return []
    told = f"none, so the rates from here on are those of a run of {new} steps; {old} keeps those of before"
    return [f"learner.{path}: {told}" for path in following(config.learner)]


def _text(value: Any) -> str:
    return "none" if value is None else str(value)


def rate_notes(learner: Config, steps: int) -> list[str]:
    """What to tell about schedules that do not fit a run of so many steps: the peak is never reached, or the rate is
    zero long before the end. Evaluates them, so JAX must have started.

    Raises:
        ConfigError: a rate is negative, or not finite.
    """
    notes = []
    for inner, schedule in schedules(with_run_length(learner, steps)):
        path, function = join("learner", inner), schedule.instantiate()
        length = own_length(schedule)
        _, whole = _rates(function, max(steps, (length or 0) + 1))
        places, rates = _rates(function, steps)
        if (bad := np.flatnonzero(~(np.isfinite(rates) & (rates >= 0)))).size:
            step = places[bad[0]]
            raise ConfigError(f"expected finite rates >= 0, given {rates[bad[0]]} before step {step + 1}", path=path)
        if rates.max() < _NEARLY * whole.max():
            notes.append(
                f"{path}: the rate gets to {rates.max():.3g} in {steps} steps, and never to its peak of "
                f"{whole.max():.3g}; {_remedy(schedule, path, steps)}"
            )
        above = np.flatnonzero(rates > 0)
        last_above = places[above[-1]] + 1 if above.size else steps
        if length is not None and last_above < _NEARLY * steps:
            notes.append(
                f"{path}: the rate is 0 after about {last_above} of {steps} steps; {_remedy(schedule, path, steps)}"
            )
    return notes


def _rates(function: Callable[[Any], Any], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """(counts of updates before a step, the rate of that step) over a run, evenly spaced."""
    places = np.unique(np.linspace(0, steps - 1, _SAMPLES).round().astype(np.int32))
    rates = jax.jit(jax.vmap(lambda count: jnp.asarray(function(count), jnp.float32)))(places)
    return places, np.asarray(rates)


def _remedy(schedule: Config, path: str, steps: int) -> str:
    """What to set so that a schedule fits the run."""
    if target_of(schedule) in (warmup_cosine, warmup_linear, warmup_stable_decay):
        length = "" if schedule.steps == steps else f", and {path}.steps=none"
        return f"set {path}.warmup below {steps}, or to a fraction of the run (0.05, say){length}"
    names = [f"{path}.{name}" for name in step_arguments(schedule) or {}]
    fields = " and ".join(names) or path
    return f"set {fields} for {steps} steps, or {path}=framework.optimizers.learning_rates.warmup_cosine"
