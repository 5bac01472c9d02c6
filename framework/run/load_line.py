"""Resolves `memory.auto` for a run before anything is compiled: process 0 decides, and all processes follow.

The choice is stored in the workdir and reused when the run resumes, unless the machine or the relevant config
changed.
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

from plimsoll.framework.config import Config
from plimsoll.framework.devices.accelerators import machine_memory_bytes
from plimsoll.framework.files.texts import parse_json
from plimsoll.framework.plan import guard, targets
from plimsoll.framework.plan.auto.choice import Choice, Machine
from plimsoll.framework.plan.auto.choosing import Chooser
from plimsoll.framework.plan.auto.confirm import NoProgramError, confirmed
from plimsoll.framework.plan.auto.room import Candidate
from plimsoll.framework.plan.auto.settings import BATCH, SEARCHED, Setting, Settings, fixed_paths, with_settings
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.processes import distributed
from plimsoll.framework.program.program import Program
from plimsoll.framework.run.job import Job
from plimsoll.framework.terminal.exit_codes import DoesNotFitError
from plimsoll.framework.terminal.tables import render

FILE = "auto.json"
# The sections that a choice depends on. Others, such as the length of a run, may change.
_SECTIONS = ("model", "learner", "mesh", "memory", "compiler")
_DATA = ("global_batch_size", "seq_len")


class Settled(NamedTuple):
    """The outcome of memory.auto for a run.

    Attributes:
        config: config with the chosen settings.
        lines: lines to show to the user.
        record: JSON record of the choice, for the workdir.
    """

    config: Config
    lines: list[str]
    record: dict[str, object]


def settled(job: Job, config: Config) -> Settled:
    """Choose the settings of a run, or reuse those stored in its workdir. Collective.

    Args:
        job: the training job.
        config: config resolved for the devices.

    Raises:
        DoesNotFitError: no settings that compute the same result fit.
    """
    target = targets.resolve("local")
    limit = target.limit_bytes if job.limit is None else job.limit
    # On a CPU, host memory is the device memory.
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
            return _apply_choice(config, choice, asked, [f"{choice.line()} (as {FILE} has it)"])
        what = "something else is asked for" if choice.machine == primary_machine else "the machine is another one"
        lines = [f"memory.auto: {what} than when {FILE} was written; chosen again"]
    choice = _chosen(Chooser(config, target, device_bytes=limit, host_bytes=host_bytes, fixed=fixed), target)
    return _apply_choice(config, choice, asked, [*lines, choice.line(), render(choice.sections())])


def _apply_choice(config: Config, choice: Choice, asked: str, lines: list[str]) -> Settled:
    record: dict[str, object] = {"asked": asked, "choice": choice.to_json()}
    return Settled(with_settings(config, choice.settings), lines, record)


def read_choice(path: Path, config: Config, fixed: frozenset[str]) -> dict[str, object] | None:
    """Read what an earlier start of the run chose.

    Reads untrusted data: a workdir may come from someone else, and a config field may name code. So only settings
    that the search itself could choose are accepted, with values that the config accepts.

    Args:
        path: auto.json of the workdir.
        config: config resolved for the devices.
        fixed: paths of the fields that the search does not change.

    Returns:
        The record. None if the file is missing, was written by another version, or holds settings that the search
        could not have chosen.
    """
    try:
        record = parse_json(path.read_text())
        choice = Choice.from_json(record["choice"])
        others = {str(one.path) for one in choice.settings} - (set(SEARCHED) - {BATCH} - fixed)
        if others:
            raise ValueError(f"sets {sorted(others)}, which memory.auto does not choose")
        # Building the section validates the policy and placement strings.
        with_settings(config, choice.settings).memory.instantiate()
        return {"asked": record["asked"], "choice": record["choice"]}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logging.warning("%s is ignored: %s", path, repr(str(error)))
        return None


def _digest(config: Config, fixed: frozenset[str]) -> str:
    """Return a hash of everything in the config that a choice depends on."""
    fields = config.to_dict()
    parts = [fields[section] for section in _SECTIONS]
    parts += [fields["data"].get(field) for field in _DATA]
    text = json.dumps([*parts, sorted(fixed)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- several processes -----------------------------------------------------------------------------------------------


def _chosen(chooser: Chooser, target: Target) -> Choice:
    """Return the choice of process 0, which has all processes compile its proposals."""
    devices = _Devices(chooser, target)
    if not distributed.is_primary():
        return devices.obey()
    try:
        candidate = confirmed(chooser, devices.ask)
        failure = chooser.failure() if candidate is None else ""
        choice = None if candidate is None else chooser.choice(candidate)
    except BaseException as error:
        # Without this order the other processes would wait forever.
        devices.end(None, f"the first process failed: {error}")
        raise
    return devices.end(choice, failure)


class _Order(NamedTuple):
    """An order from process 0 to all processes.

    Attributes:
        settings: settings to compile; None at the end.
        choice: the final choice, as JSON; None where nothing fits.
        failure: reason why nothing fits.
    """

    settings: Settings | None
    choice: Mapping[str, Any] | None = None
    failure: str = ""


class _Devices:
    """The devices of all processes, whose compiler determines which settings fit.

    Process 0 gives orders and the others follow: they do not know its measurements or how long those took.
    """

    def __init__(self, chooser: Chooser, target: Target):
        self._chooser = chooser
        self._target = target
        self._number = 0

    def ask(self, candidate: Candidate) -> int:
        """Have all processes compile settings; returns the bytes on the fullest device. Raises NoProgramError."""
        self._order(_Order(candidate.settings))
        return self._compiled(candidate.settings)

    def end(self, choice: Choice | None, failure: str) -> Choice:
        """Send the final choice to all processes. Raises DoesNotFitError if there is none."""
        self._order(_Order(None, choice.to_json() if choice else None, failure))
        if choice is None:
            raise DoesNotFitError(failure)
        return choice

    def obey(self) -> Choice:
        """Follow the orders of process 0 until it has chosen. Raises DoesNotFitError if it found nothing that fits."""
        while True:
            order = self._order(None)
            if order.settings is None:
                break
            # Compile failures are reported to process 0 by `_compiled`, so this process ignores them.
            with suppress(NoProgramError):
                self._compiled(order.settings)
        if order.choice is None:
            raise DoesNotFitError(order.failure)
        return Choice.from_json(order.choice)

    def _order(self, order: _Order | None) -> _Order:
        """Send the order of process 0 to every process."""
        # The barrier is needed because a search takes longer than a device collective waits.
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
        # Collective sums have 32 bits, so the bytes are sent as MiB.
        return distributed.greatest(mebibytes) << 20
