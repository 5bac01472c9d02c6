"""Confirms candidates by compiling them: the best one first, then others until one fits."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

from plimsoll.framework.plan.auto.choosing import Chooser
from plimsoll.framework.plan.auto.room import Candidate
from plimsoll.framework.plan.auto.search import AS_FAST
from plimsoll.framework.plan.auto.settings import Settings
from plimsoll.framework.plan.auto.stored import CompiledBytes
from plimsoll.framework.plan.plan import Made
from plimsoll.framework.plan.rehearsal import compile_step
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program.program import Program

# Maximum number of programs to compile if none fits, and if one does.
_MOST_COMPILED = 5
_COMPILED_IF_ONE_FITS = 3
# Once a candidate fits, stop improving it after this many seconds.
_PATIENCE = 150.0


class NoProgramError(ValueError):
    """No program can be built from some settings: they are incompatible in a way that the estimate does not model."""


class Compiler:
    """Compiles the train steps of candidates and stores them in `made`.

    Args:
        chooser: the tuner that proposes the candidates.
        target: the machine to compile for.
        limit: bytes that one device may use; None if unknown.
        known: results of earlier compilations; each new result is added to it.
    """

    def __init__(
        self,
        chooser: Chooser,
        target: Target,
        limit: int | None,
        known: CompiledBytes,
    ):
        self._chooser = chooser
        self._target = target
        self._limit = limit
        self._known = known
        self.made: dict[Settings, Made] = {}

    def __call__(self, candidate: Candidate) -> int:
        """Return the bytes that the compiled step needs on one device. Raises NoProgramError."""
        settings = candidate.settings
        compiled = self._known.get(settings)
        if compiled is not None:
            return compiled
        try:
            experiment = self._chooser.forms.experiment(settings)
            program = Program(experiment, self._target.devices())
            step = compile_step(program, self._target, self._limit)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            raise NoProgramError(str(error)) from error
        self.made[settings] = Made(program, step)
        self._known.keep(settings, step.allocated)
        return step.allocated


def confirmed(chooser: Chooser, compiled_bytes: Callable[[Candidate], int]) -> Candidate | None:
    """Return the fastest settings that fit according to the compiler; None if none were found.

    Args:
        chooser: the tuner that proposes candidates.
        compiled_bytes: compiles a candidate and returns the bytes that it needs on one device.
    """
    start = time.monotonic()
    best: Candidate | None = None
    for number in range(_MOST_COMPILED):
        candidate = chooser.propose()
        if candidate is None or candidate.settings in chooser.room.compiled:
            break
        if best is not None:
            is_faster = candidate.cost.seconds * AS_FAST < best.cost.seconds
            is_late = time.monotonic() - start > _PATIENCE or number >= _COMPILED_IF_ONE_FITS
            if is_late or not is_faster:
                break
        try:
            chooser.hear(candidate, compiled_bytes(candidate))
        except NoProgramError as error:
            chooser.refuse(candidate, str(error))
            continue
        if chooser.is_settled(candidate) and (best is None or candidate.cost.seconds < best.cost.seconds):
            best = candidate
    return best
