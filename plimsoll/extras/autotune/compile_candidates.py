"""Confirms candidates by compiling them: the best one first, then others until one fits."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

from plimsoll.extras.autotune.branch_and_bound import TIE_FACTOR
from plimsoll.extras.autotune.budget import Candidate
from plimsoll.extras.autotune.settings import Settings
from plimsoll.extras.autotune.tuner import Tuner
from plimsoll.extras.autotune.tuning_cache import CompiledBytes
from plimsoll.framework.plan.build_report import CompiledTrainStep
from plimsoll.framework.plan.dry_run import compile_step
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program.program import Program

# Maximum number of programs to compile if none fits, and if one does.
_MOST_COMPILED = 5
_COMPILED_IF_ONE_FITS = 3
# Once a candidate fits, stop improving it after this many seconds.
_PATIENCE = 150.0


class NoProgramError(ValueError):
    """No program can be built from some settings: they are incompatible in a way that the estimate does not model."""


class CandidateCompiler:
    """Compiles the train steps of candidates and stores them in `compiled_step`, by settings.

    Args:
        tuner: the tuner that proposes the candidates.
        target: the machine to compile for.
        limit: bytes that one device may use; None if unknown.
        known: results of earlier compilations; each new result is added to it.
    """

    def __init__(self, tuner: Tuner, target: Target, limit: int | None, known: CompiledBytes):
        self._tuner = tuner
        self._target = target
        self._limit = limit
        self._known = known
        self.compiled_step: dict[Settings, CompiledTrainStep] = {}

    def __call__(self, candidate: Candidate) -> int:
        """Return the bytes that the compiled step needs on one device. Raises NoProgramError."""
        settings = candidate.settings
        compiled = self._known.get(settings)
        if compiled is not None:
            return compiled
        try:
            experiment = self._tuner.cost_model.experiment(settings)
            program = Program(experiment, self._target.devices())
            step = compile_step(program, self._target, self._limit)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            raise NoProgramError(str(error)) from error
        self.compiled_step[settings] = CompiledTrainStep(program, step)
        self._known.record(settings, step.allocated)
        return step.allocated


def confirm_fastest(tuner: Tuner, compile_candidate: Callable[[Candidate], int]) -> Candidate | None:
    """Return the fastest settings that fit according to the compiler; None if none were found.

    Args:
        tuner: the tuner that proposes candidates.
        compile_candidate: compiles a candidate and returns the bytes that it needs on one device.
    """
    start = time.monotonic()
    best: Candidate | None = None
    for number in range(_MOST_COMPILED):
        candidate = tuner.propose()
        if candidate is None or candidate.settings in tuner.budget.compiled:
            break
        if best is not None:
            is_faster = candidate.cost.seconds * TIE_FACTOR < best.cost.seconds
            is_late = time.monotonic() - start > _PATIENCE or number >= _COMPILED_IF_ONE_FITS
            if is_late or not is_faster:
                break
        try:
            tuner.record_compiled(candidate, compile_candidate(candidate))
        except NoProgramError as error:
            tuner.exclude_failed(candidate, str(error))
            continue
        if tuner.is_confirmed(candidate) and (best is None or candidate.cost.seconds < best.cost.seconds):
            best = candidate
    return best
