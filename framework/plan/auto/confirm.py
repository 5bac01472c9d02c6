"""The compiler's word on a few choices: the best one, and as many more as it takes until one fits."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

from framework.plan.auto.choosing import Chooser
from framework.plan.auto.room import Candidate
from framework.plan.auto.search import AS_FAST
from framework.plan.auto.settings import Settings
from framework.plan.auto.stored import CompiledBytes
from framework.plan.plan import Made
from framework.plan.rehearsal import compile_step
from framework.plan.targets import Target
from framework.program.program import Program

# So many programs are compiled until one fits, and so many if one does.
_MOST_COMPILED = 5
_COMPILED_IF_ONE_FITS = 3
# Seconds after which a choice that fits is not improved any more.
_PATIENCE = 150.0


class NoProgramError(ValueError):
    """There is no program of some settings: what a closed form knows nothing of does not go together."""


class Compiler:
    """Compiles the steps of candidates, and keeps them.

    Args:
        chooser: whose candidates.
        target: to compile for.
        limit: bytes of a device; None where not known.
        known: what was compiled earlier; hears of each new one.
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
        """The bytes of a device. Raises NoProgramError."""
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
    """The fastest settings that fit by the compiler; None where none were found.

    Args:
        chooser: proposes.
        compiled_bytes: compiles, and says how many bytes of a device that takes.
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
