"""Answers a tuning request: from disk, or by a search whose result is confirmed by compiling it."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.extras.autotune import largest_batch, tuning_cache
from plimsoll.extras.autotune.compile_candidates import CandidateCompiler, confirm_fastest
from plimsoll.extras.autotune.tuned_settings import TunedSettings
from plimsoll.extras.autotune.tuner import Tuner
from plimsoll.extras.autotune.tuning_cache import CompiledBytes, TuningRequest
from plimsoll.framework.plan.build_report import CompiledTrainStep
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.terminal import interrupts

MEMORY = "memory"
BATCH_MODE = "batch"


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
    stored_choice = None if fresh else tuning_cache.load(path)
    if stored_choice is not None:
        return TuningResult(stored_choice)
    if not request.estimate:
        # Report a missing compiler before the search. JAX starts only once, so it has to start with the CPU devices
        # that the target asks for.
        target.devices()
    is_batch = request.mode == BATCH_MODE
    tuner = Tuner(
        request.config,
        target,
        device_bytes=request.machine.device_bytes,
        host_bytes=host_bytes,
        fixed=largest_batch.FIXED if is_batch else frozenset(request.fixed),
        allowed=request.allowed,
    )
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
    notes = largest_batch.describe_largest_batch(tuner, candidate) if is_batch else []
    choice = tuner.build_choice(candidate, notes)
    if is_batch:
        # In this mode all fields but one are fixed, so the list of fixed fields tells the reader nothing.
        choice = choice.without_neighbors()
    tuning_cache.store(path, choice)
    return TuningResult(choice, compiled_step)


def _format_interrupt_message(number: int) -> str:
    stop_message = interrupts.format_stop_message(number)
    return f"{stop_message}; compile results are saved: run the same command again to continue the search"
