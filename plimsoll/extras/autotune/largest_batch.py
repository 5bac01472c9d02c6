"""Finds the largest microbatch that fits under a config's own settings, and the largest batch for a single pass."""

from __future__ import annotations

from plimsoll.extras.autotune.budget import Candidate
from plimsoll.extras.autotune.settings import ACCUMULATE, BATCH, TUNED_FIELDS, get_text, select_changes, setting
from plimsoll.extras.autotune.tuner import Tuner
from plimsoll.framework.layers.base import batch_shards
from plimsoll.framework.program.experiment import Experiment

# All fields but the number of microbatches are fixed.
FIXED = frozenset(TUNED_FIELDS) - {ACCUMULATE}
_MOST_DOUBLINGS = 16


def describe_largest_batch(tuner: Tuner, chosen: Candidate) -> list[str]:
    """Return the two results of --auto=batch: the largest microbatch and the largest batch of one pass.

    Args:
        tuner: tuner of the config, in batch mode.
        chosen: the fastest candidate that fits.
    """
    experiment: Experiment = tuner.cost_model.config.instantiate()
    text = get_text(chosen.settings, ACCUMULATE)
    accumulate = experiment.learner.accumulate if text is None else int(text)
    shards = batch_shards(experiment.mesh.resolve(tuner.target.num_devices))
    batch = experiment.data.global_batch_size
    rows = batch // (accumulate * shards)
    largest = shards * _most_rows(tuner, shards)
    return [
        f"largest microbatch: {rows} rows per device and pass ({BATCH}={batch} with {ACCUMULATE}={accumulate})",
        f"largest batch of one pass: {BATCH}={largest} with {ACCUMULATE}=1 (estimate)",
    ]


def _most_rows(tuner: Tuner, shards: int) -> int:
    """Return the number of rows that fit on a device in one pass; 0 if not even one fits."""

    def fits(rows: int) -> bool:
        one_pass = (setting(BATCH, rows * shards), setting(ACCUMULATE, 1))
        settings = select_changes(tuner.cost_model.config, one_pass)
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
