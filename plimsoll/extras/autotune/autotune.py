"""Answers a tuning request: from disk, or by a search whose result is confirmed by compiling it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from plimsoll.extras.autotune.cost_model import Candidate, thawing_traces
from plimsoll.extras.autotune.settings import (
    ACCUMULATE,
    BATCH,
    TUNED_FIELDS,
    TunedSettings,
    TuningRequest,
    get_text,
    select_changes,
    setting,
)
from plimsoll.extras.autotune.tuner import CandidateCompiler, CompiledBytes, Tuner, confirm_fastest
from plimsoll.framework.layers.base import batch_shards
from plimsoll.framework.plan import cache
from plimsoll.framework.plan.build_report import CompiledTrainStep
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.terminal import interrupts

MEMORY = "memory"
BATCH_MODE = "batch"
# All fields but the number of microbatches are fixed.
BATCH_MODE_FIXED = frozenset(TUNED_FIELDS) - {ACCUMULATE}
_MOST_DOUBLINGS = 16


def load(path: Path) -> TunedSettings | None:
    """Load a choice from a file; None if the file does not exist or has the format of another version."""
    stored = cache.load(path)
    try:
        return None if stored is None else TunedSettings.from_json(stored)
    except (KeyError, TypeError, ValueError):
        # Another version wrote the file. Tuning again replaces it.
        return None


def store(path: Path, choice: TunedSettings) -> None:
    """Write a choice to a file.

    Args:
        path: file to write.
        choice: the chosen settings.
    """
    cache.store(path, choice.to_json())


class TuningResult(NamedTuple):
    """Result of a search.

    Attributes:
        choice: the chosen settings; None if nothing fits.
        compiled_step: the compiled step of the chosen settings, if this call compiled it.
        failure: the reason why nothing fits, in one line.
    """

    choice: TunedSettings | None
    compiled_step: CompiledTrainStep | None = None
    failure: str = ""


@thawing_traces()
def autotune(
    request: TuningRequest, target: Target, *, host_bytes: int | None = None, fresh: bool = False
) -> TuningResult:
    """Return the fastest settings that fit, or the reason why there are none.

    Args:
        request: config, machine and mode to tune for.
        target: the machine. Candidates are compiled for it unless the request asks for an estimate only.
        host_bytes: memory of one process's host, in bytes; None takes the target's known value.
        fresh: search again even if the result is already on disk.
    """
    # Compute the path before compiling: compilers set environment variables, and the file name depends on those.
    path = request.path("choice")
    stored_choice = None if fresh else load(path)
    if stored_choice is not None:
        return TuningResult(stored_choice)
    if not request.estimate:
        # Report a missing compiler before the search. JAX starts only once, so it has to start with the CPU devices
        # that the target asks for.
        target.devices()
    tuner = _build_tuner(request, target, host_bytes)
    if request.estimate:
        candidate, compiled_step = tuner.propose(), None
    else:
        known = CompiledBytes(request, fresh=fresh)
        compiler = CandidateCompiler(tuner, target, request.machine.device_bytes, known)
        with interrupts.listen_for_signals(_format_interrupt_message):
            candidate = confirm_fastest(tuner, compiler)
        compiled_step = None if candidate is None else compiler.compiled_step.get(candidate.settings)
    if candidate is None:
        return TuningResult(None, failure=tuner.describe_failure())
    is_batch = request.mode == BATCH_MODE
    notes = describe_largest_batch(tuner, candidate) if is_batch else []
    choice = tuner.build_choice(candidate, notes)
    if is_batch:
        # In this mode all fields but one are fixed, so the list of fixed fields tells the reader nothing.
        choice = choice.without_neighbors()
    store(path, choice)
    return TuningResult(choice, compiled_step)


@thawing_traces()
def explain_misfit(request: TuningRequest, target: Target, host_bytes: int | None = None) -> str:
    """Return the reason why no settings fit by the estimate, in one line; "" if some do.

    Args:
        request, target, host_bytes: as for `autotune`.
    """
    if load(request.path("choice")) is not None:
        return ""
    tuner = _build_tuner(request, target, host_bytes)
    return "" if tuner.finds_any() else tuner.describe_failure()


def _build_tuner(request: TuningRequest, target: Target, host_bytes: int | None) -> Tuner:
    return Tuner(
        request.config,
        target,
        device_bytes=request.machine.device_bytes,
        host_bytes=host_bytes,
        fixed=BATCH_MODE_FIXED if request.mode == BATCH_MODE else frozenset(request.fixed),
        allowed=request.allowed,
    )


def _format_interrupt_message(number: int) -> str:
    stop_message = interrupts.format_stop_message(number)
    return f"{stop_message}; compile results are saved: run the same command again to continue the search"


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
