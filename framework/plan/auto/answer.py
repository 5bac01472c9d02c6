"""An answer to a question: from disk, or by a search that the compiler confirms."""

from __future__ import annotations

from typing import NamedTuple

from framework.plan.auto import batch, stored
from framework.plan.auto.choice import Choice
from framework.plan.auto.choosing import Chooser
from framework.plan.auto.confirm import Compiler, confirmed
from framework.plan.auto.stored import CompiledBytes, Question
from framework.plan.plan import Made
from framework.plan.targets import Target
from framework.terminal import interrupts

MEMORY = "memory"
BATCH_MODE = "batch"


class Answer(NamedTuple):
    """What a search came to.

    Attributes:
        choice: None where nothing fits.
        made: the compiled step of the choice, where it was compiled just now.
        failure: why nothing fits, in one line.
    """

    choice: Choice | None
    made: Made | None = None
    failure: str = ""


def answer(question: Question, target: Target, *, host_bytes: int | None = None, fresh: bool = False) -> Answer:
    """The fastest settings that fit, or why there are none.

    Args:
        question: what is asked for.
        target: the machine, whose compiler is asked unless the closed form is enough.
        host_bytes: of a process's host; None: what is known of the target.
        fresh: search again although nothing has changed.
    """
    # Asked before anything is compiled: compilers set variables of the environment, on which the name depends.
    path = question.path("choice")
    kept_choice = None if fresh else stored.load(path)
    if kept_choice is not None:
        return Answer(kept_choice)
    if not question.estimate:
        # A missing compiler is told before the search; and JAX starts once, with the CPU devices that it then has.
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
        # Everything is kept there, and nobody wants to read it.
        choice = choice.without_neighbors()
    stored.store(path, choice)
    return Answer(choice, made)


def _stopped(number: int) -> str:
    return f"{interrupts.stopped_by(number)}; what was compiled is kept, and the same command goes on from there"
