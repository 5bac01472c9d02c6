"""Finds the largest microbatch that fits under a config's own settings, and the largest batch for a single pass."""

from __future__ import annotations

from plimsoll.framework.layers.base import batch_shards
from plimsoll.framework.plan.auto.budget import Candidate
from plimsoll.framework.plan.auto.settings import (
    ACCUMULATE,
    BATCH,
    TUNED_FIELDS,
    Settings,
    get_text,
    select_changes,
    setting,
)
from plimsoll.framework.plan.auto.tuner import Tuner
from plimsoll.framework.program.experiment import Experiment

# All fields but the number of microbatches are fixed.
FIXED = frozenset(TUNED_FIELDS) - {ACCUMULATE}
_MOST_DOUBLINGS = 16


def describe_largest_batch(tuner: Tuner, chosen: Candidate) -> list[str]:
    """Return the two results of --auto=batch: the largest microbatch and the largest batch of one pass."""
    experiment: Experiment = tuner.cost_model.config.instantiate()
    text = get_text(chosen.settings, ACCUMULATE)
    accumulate = experiment.learner.accumulate if text is None else int(text)
    shards = _batch_shards(experiment, tuner)
    batch = experiment.data.global_batch_size
    rows = batch // (accumulate * shards)
    largest = shards * _most_rows(tuner, shards)
    return [
        f"the largest microbatch: {rows} rows per device and pass, as {BATCH}={batch} in {ACCUMULATE}={accumulate}",
        f"the largest batch of one pass: {BATCH}={largest} with {ACCUMULATE}=1, by the closed form",
    ]


def _batch_shards(experiment: Experiment, tuner: Tuner) -> int:
    sizes = experiment.mesh.resolve(tuner.target.num_devices)
    return batch_shards(sizes)


def _most_rows(tuner: Tuner, shards: int) -> int:
    """Return the number of rows that fit on a device in one pass; 0 if not even one fits."""

    def fits(rows: int) -> bool:
        settings = _one_pass(tuner, rows * shards)
        return tuner.budget.fits(settings, tuner.cost_model.cost(settings))

    most = 1
    for _ in range(_MOST_DOUBLINGS):
        if not fits(most):
            break
        most *= 2
    # `most // 2` is known to fit, or is 0.
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        if fits(middle):
            least = middle
        else:
            most = middle
    return least


def _one_pass(tuner: Tuner, batch: int) -> Settings:
    return select_changes(tuner.cost_model.config, (setting(BATCH, batch), setting(ACCUMULATE, 1)))
