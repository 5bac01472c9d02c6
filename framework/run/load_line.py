"""What `memory.auto` chooses for a run, before anything is compiled: one process decides, and all do the same.

The choice is kept in the workdir, and taken again when the run goes on, unless the machine is another one or something
else is asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import logging

from framework.config import Config
from framework.devices.accelerators import machine_memory_bytes
from framework.files.texts import parse_json
from framework.plan import guard, targets
from framework.plan.auto.choice import Choice, Machine
from framework.plan.auto.choosing import Chooser
from framework.plan.auto.confirm import NoProgramError, confirmed
from framework.plan.auto.room import Candidate
from framework.plan.auto.settings import BATCH, SEARCHED, Setting, Settings, fixed_paths, with_settings
from framework.plan.targets import Target
from framework.processes import distributed
from framework.program.program import Program
from framework.run.job import Job
from framework.terminal.exit_codes import DoesNotFitError
from framework.terminal.tables import render

FILE = "auto.json"
# What a choice depends on; the length of a run, say, may change.
_SECTIONS = ("model", "learner", "mesh", "memory", "compiler")
_DATA = ("global_batch_size", "seq_len")


class Settled(NamedTuple):
    """What a run does about memory.auto.

    Attributes:
        config: with the chosen settings.
        lines: what a person is told.
        record: for the workdir, as JSON.
    """

    config: Config
    lines: list[str]
    record: dict[str, object]


def settled(job: Job, config: Config) -> Settled:
    """Chooses the settings of a run, or takes those that its workdir holds. Collective.

    Args:
        job: what is asked for.
        config: resolved for the devices.

    Raises:
        DoesNotFitError: no settings fit that compute the same.
    """
    target = targets.resolve("local")
    limit = target.limit_bytes if job.limit is None else job.limit
    # On a CPU the host's memory is the device's.
    host_bytes = None if target.platform == "cpu" else machine_memory_bytes()
    machine = Machine.of(target, limit, host_bytes)
    fixed = fixed_paths(config, job.request.chosen)
    asked = _digest(config, fixed)
    stored = read_choice(job.workdir.path / FILE, config, fixed) if distributed.is_primary() else None
    kept = distributed.from_primary(stored)
    lines = []
    if kept is not None:
        choice = Choice.from_json(kept["choice"])
        primary_machine = Machine(*distributed.from_primary(machine))
        if kept["asked"] == asked and choice.machine == primary_machine:
            return _settled(config, choice, asked, [f"{choice.line()} (as {FILE} has it)"])
        what = "something else is asked for" if choice.machine == primary_machine else "the machine is another one"
        lines = [f"memory.auto: {what} than when {FILE} was written; chosen again"]
    choice = _chosen(Chooser(config, target, device_bytes=limit, host_bytes=host_bytes, fixed=fixed), target)
    return _settled(config, choice, asked, [*lines, choice.line(), render(choice.sections())])


def _settled(config: Config, choice: Choice, asked: str, lines: list[str]) -> Settled:
    record: dict[str, object] = {"asked": asked, "choice": choice.to_json()}
    return Settled(with_settings(config, choice.settings), lines, record)


def read_choice(path: Path, config: Config, fixed: frozenset[str]) -> dict[str, object] | None:
    """Read what an earlier start of the run chose.

    A workdir may come from someone else, and a field of a config may name code. So only settings that the search
    itself could choose are accepted, with values that the config takes.

    Args:
        path: auto.json of the workdir.
        config: resolved for the devices.
        fixed: fields that the search does not change.

    Returns:
        The record; None where there is none, another version wrote it, or the search could not have chosen it.
    """
    try:
        record = parse_json(path.read_text())
        choice = Choice.from_json(record["choice"])
        others = {str(one.path) for one in choice.settings} - (set(SEARCHED) - {BATCH} - fixed)
        if others:
            raise ValueError(f"sets {sorted(others)}, which memory.auto does not choose")
        # Building the section checks the texts of policies and placements.
        with_settings(config, choice.settings).memory.instantiate()
        return {"asked": record["asked"], "choice": record["choice"]}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logging.warning("%s is ignored: %s", path, repr(str(error)))
        return None


def _digest(config: Config, fixed: frozenset[str]) -> str:
    """A name for everything that is asked for, and that a choice depends on."""
    fields = config.to_dict()
    parts = [fields[section] for section in _SECTIONS]
    parts += [fields["data"].get(field) for field in _DATA]
    text = json.dumps([*parts, sorted(fixed)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- several processes -----------------------------------------------------------------------------------------------


def _chosen(chooser: Chooser, target: Target) -> Choice:
    """The choice of the first process, which asks all of them to compile what it proposes."""
    devices = _Devices(chooser, target)
    if not distributed.is_primary():
        return devices.obey()
    try:
        candidate = confirmed(chooser, devices.ask)
        failure = chooser.failure() if candidate is None else ""
        choice = None if candidate is None else chooser.choice(candidate)
    except BaseException as error:
        # The others wait for an order, and would wait for ever.
        devices.end(None, f"the first process failed: {error}")
        raise
    return devices.end(choice, failure)


class _Order(NamedTuple):
    """What the first process has all do.

    Attributes:
        settings: to be compiled; None at the end.
        choice: at the end, as JSON; None where nothing fits.
        failure: why.
    """

    settings: Settings | None
    choice: Mapping[str, Any] | None = None
    failure: str = ""


class _Devices:
    """The devices of all processes, whose compiler says what fits.

    The first process orders and all obey: the others do not know what it has measured or how long that took.
    """

    def __init__(self, chooser: Chooser, target: Target):
        self._chooser = chooser
        self._target = target
        self._number = 0

    def ask(self, candidate: Candidate) -> int:
        """Has all processes compile settings: the bytes of the fullest device. Raises NoProgramError."""
        self._order(_Order(candidate.settings))
        return self._compiled(candidate.settings)

    def end(self, choice: Choice | None, failure: str) -> Choice:
        """Tells all processes what was chosen. Raises DoesNotFitError: nothing was."""
        self._order(_Order(None, choice.to_json() if choice else None, failure))
        if choice is None:
            raise DoesNotFitError(failure)
        return choice

    def obey(self) -> Choice:
        """Does what the first process orders, until that has chosen. Raises DoesNotFitError: it found nothing."""
        while True:
            order = self._order(None)
            if order.settings is None:
                break
            # The first process hears of what cannot be compiled, too.
            with suppress(NoProgramError):
                self._compiled(order.settings)
        if order.choice is None:
            raise DoesNotFitError(order.failure)
        return Choice.from_json(order.choice)

    def _order(self, order: _Order | None) -> _Order:
        """The first process's order, in every process."""
        # A search takes longer than a collective of the devices waits.
        self._number += 1
        distributed.barrier(f"load line {self._number}")
        settings, choice, failure = distributed.from_primary(order)
        if settings is not None:
            settings = tuple(Setting(*pair) for pair in settings)
        return _Order(settings, choice, failure)

    def _compiled(self, settings: Settings) -> int:
        problem = ""
        mebibytes = 0
        try:
            program = Program(self._chooser.forms.experiment(settings), self._target.devices())
            mebibytes = -(-guard.need(program).peak >> 20)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            problem = str(error)
        if not distributed.everywhere(not problem):
            raise NoProgramError(problem or "another process of this run cannot compile it")
        # Collective sums have 32 bits.
        return distributed.greatest(mebibytes) << 20
