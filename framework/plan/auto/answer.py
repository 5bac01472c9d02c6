"""Answers a tuning question: from disk, or by a search whose result is confirmed by compiling it."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.framework.plan.auto import batch, stored
from plimsoll.framework.plan.auto.choice import Choice
from plimsoll.framework.plan.auto.choosing import Chooser
from plimsoll.framework.plan.auto.confirm import Compiler, confirmed
from plimsoll.framework.plan.auto.stored import CompiledBytes, Question
from plimsoll.framework.plan.plan import Made
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.terminal import interrupts

MEMORY = "memory"
BATCH_MODE = "batch"


class Answer(NamedTuple):
    """Result of a search.

    Attributes:
        choice: the chosen settings; None if nothing fits.
        made: the compiled step of the chosen settings, if this call compiled it.
        failure: the reason why nothing fits, in one line.
    """

    choice: Choice | None
    made: Made | None = None
    failure: str = ""


def answer(question: Question, target: Target, *, host_bytes: int | None = None, fresh: bool = False) -> Answer:
    """Return the fastest settings that fit, or the reason why there are none.

    Args:
        question: config, machine and mode to tune for.
        target: the machine. Candidates are compiled for it unless the question asks for an estimate only.
        host_bytes: memory of one process's host, in bytes; None takes the target's known value.
        fresh: search again even if the answer is already on disk.
    """
    # Compute the path before compiling: compilers set environment variables, and the file name depends on those.
    path = question.path("choice")
    kept_choice = None if fresh else stored.load(path)
    if kept_choice is not None:
        return Answer(kept_choice)
    if not question.estimate:
        # Report a missing compiler before the search. JAX starts only once, so it has to start with the CPU devices
        # that the target asks for.
        target.devices()
    is_batch = question.mode == BATCH_MODE
    chooser = Chooser(
        question.config,
        target,
        device_bytes=question.machine.device_bytes,
        host_bytes=host_bytes,
        fixed=batch.FIXED if is_batch else frozenset(question.fixed),
        allowed=question.allowed,
    )
    if question.estimate:
        candidate, made = chooser.propose(), None
    else:
        known = CompiledBytes(question, fresh=fresh)
        compiler = Compiler(chooser, target, question.machine.device_bytes, known)
        with interrupts.heard_by(_stopped):
            candidate = confirmed(chooser, compiler)
        made = None if candidate is None else compiler.made.get(candidate.settings)
    if candidate is None:
        return Answer(None, failure=chooser.failure())
    notes = batch.notes(chooser, candidate) if is_batch else []
    choice = chooser.choice(candidate, notes)
    if is_batch:
        # In this mode all fields but one are fixed, so the list of fixed fields tells the reader nothing.
        choice = choice.without_neighbors()
    stored.store(path, choice)
    return Answer(choice, made)


def _stopped(number: int) -> str:
    return f"{interrupts.stopped_by(number)}; what was compiled is kept, and the same command goes on from there"
