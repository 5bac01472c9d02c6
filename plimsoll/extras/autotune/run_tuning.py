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

from plimsoll.extras.autotune.cost_model import Candidate
from plimsoll.extras.autotune.settings import (
    BATCH,
    TUNED_FIELDS,
    Machine,
    Setting,
    Settings,
    TunedSettings,
    find_fixed_paths,
    with_settings,
)
from plimsoll.extras.autotune.tuner import NoProgramError, Tuner, confirm_fastest
from plimsoll.framework.config import Config
from plimsoll.framework.devices.host import get_machine_memory_bytes
from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.plan import memory_budget, targets
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.processes import distributed
from plimsoll.framework.program.program import Program
from plimsoll.framework.run.request import TUNING_FILE, RunRequest, TuneResult
from plimsoll.framework.terminal.exit_codes import DoesNotFitError
from plimsoll.framework.terminal.tables import render

# The sections that a choice depends on. Others, such as the length of a run, may change.
_CONFIG_SECTIONS = ("model", "learner", "mesh", "memory", "compiler")
_DATA_FIELDS = ("global_batch_size", "seq_len")


def tune_memory(request: RunRequest, config: Config, folder: Path) -> TuneResult:
    """Choose the settings of a run, or reuse those stored in its workdir. Collective.

    Args:
        request: what the run is asked to do.
        config: config resolved for the devices.
        folder: the workdir.

    Raises:
        DoesNotFitError: no settings that compute the same result fit.
    """
    target = targets.resolve("local")
    limit = target.limit_bytes if request.limit is None else request.limit
    # Not what is free now: a choice is stored for the machine, and a later start may find more or less of it free.
    host_bytes = request.host_limit or get_machine_memory_bytes()
    machine = Machine.derive(target, limit, host_bytes)
    fixed = find_fixed_paths(config, request.override_paths)
    request_digest = _digest(config, fixed)
    stored = read_choice(folder / TUNING_FILE, config, fixed) if distributed.is_primary() else None
    # All processes must compile the same settings, so the file that process 0 sees decides.
    stored_choice = distributed.broadcast_from_primary(stored)
    lines = []
    if stored_choice is not None:
        choice = TunedSettings.from_json(stored_choice["choice"])
        # The broadcast goes through JSON, which turns a named tuple into a list.
        primary_machine = Machine(*distributed.broadcast_from_primary(machine))
        if stored_choice["asked"] == request_digest and choice.machine == primary_machine:
            return _apply_choice(config, choice, request_digest, [f"{choice.line()} (from {TUNING_FILE})"])
        what = "the config" if choice.machine == primary_machine else "the machine"
        lines = [f"memory.auto: {what} changed since {TUNING_FILE} was written; tuning again"]
    choice = _choose(Tuner(config, target, device_bytes=limit, host_bytes=host_bytes, fixed=fixed), target)
    return _apply_choice(config, choice, request_digest, [*lines, choice.line(), render(choice.sections())])


def _apply_choice(config: Config, choice: TunedSettings, request_digest: str, lines: list[str]) -> TuneResult:
    record: dict[str, object] = {"asked": request_digest, "choice": choice.to_json()}
    return TuneResult(with_settings(config, choice.settings), lines, record)


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
        choice = TunedSettings.from_json(record["choice"])
        others = {str(one.path) for one in choice.settings} - (set(TUNED_FIELDS) - {BATCH} - fixed)
        if others:
            raise ValueError(f"sets {sorted(others)}, which memory.auto does not choose")
        # Building the section validates the policy and placement strings.
        with_settings(config, choice.settings).memory.instantiate()
        return {"asked": record["asked"], "choice": record["choice"]}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logging.warning("ignoring %s: %s", path, repr(str(error)))
        return None


def _digest(config: Config, fixed: frozenset[str]) -> str:
    """Return a hash of everything in the config that a choice depends on."""
    fields = config.to_dict()
    parts = [fields[section] for section in _CONFIG_SECTIONS]
    parts += [fields["data"].get(field) for field in _DATA_FIELDS]
    text = json.dumps([*parts, sorted(fixed)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- several processes -----------------------------------------------------------------------------------------------


def _choose(tuner: Tuner, target: Target) -> TunedSettings:
    """Return the choice of process 0, which has all processes compile its proposals."""
    devices = _TuningProcesses(tuner, target)
    if not distributed.is_primary():
        return devices.follow_process_0()
    try:
        candidate = confirm_fastest(tuner, devices.ask)
        failure = tuner.describe_failure() if candidate is None else ""
        choice = None if candidate is None else tuner.build_choice(candidate)
    except BaseException as error:
        # Without this instruction the other processes would wait forever.
        devices.end(None, f"process 0 failed: {error}")
        raise
    return devices.end(choice, failure)


class _Instruction(NamedTuple):
    """An order from process 0 to all processes.

    Attributes:
        settings: settings to compile; None at the end.
        choice: the final choice, as JSON; None where nothing fits.
        failure: reason why nothing fits.
    """

    settings: Settings | None
    choice: Mapping[str, Any] | None = None
    failure: str = ""


class _TuningProcesses:
    """The devices of all processes, whose compiler determines which settings fit.

    Process 0 gives orders and the others follow: they do not know its measurements or how long those took.
    """

    def __init__(self, tuner: Tuner, target: Target):
        self._tuner = tuner
        self._target = target
        self._number = 0

    def ask(self, candidate: Candidate) -> int:
        """Have all processes compile settings; returns the bytes on the fullest device. Raises NoProgramError."""
        self._send(_Instruction(candidate.settings))
        return self._compile(candidate.settings)

    def end(self, choice: TunedSettings | None, failure: str) -> TunedSettings:
        """Send the final choice to all processes. Raises DoesNotFitError if there is none."""
        self._send(_Instruction(None, choice.to_json() if choice else None, failure))
        if choice is None:
            raise DoesNotFitError(failure)
        return choice

    def follow_process_0(self) -> TunedSettings:
        """Follow the orders of process 0 until it has chosen. Raises DoesNotFitError if it found nothing that fits."""
        while True:
            order = self._send(None)
            if order.settings is None:
                break
            # Compile failures are reported to process 0 by `_compile`, so this process ignores them.
            with suppress(NoProgramError):
                self._compile(order.settings)
        if order.choice is None:
            raise DoesNotFitError(order.failure)
        return TunedSettings.from_json(order.choice)

    def _send(self, order: _Instruction | None) -> _Instruction:
        """Send the order of process 0 to every process."""
        # The barrier is needed because a search takes longer than a device collective waits.
        self._number += 1
        distributed.barrier(f"autotune {self._number}")
        settings, choice, failure = distributed.broadcast_from_primary(order)
        if settings is not None:
            # The broadcast goes through JSON, which turns named tuples into lists.
            settings = tuple(Setting(*pair) for pair in settings)
        return _Instruction(settings, choice, failure)

    def _compile(self, settings: Settings) -> int:
        problem = ""
        mebibytes = 0
        try:
            program = Program(self._tuner.cost_model.experiment(settings), self._target.devices())
            mebibytes = -(-memory_budget.measure_need(program).peak >> 20)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            problem = str(error)
        if not distributed.is_true_on_all(not problem):
            raise NoProgramError(problem or "another process of this run cannot compile it")
        # Collective sums have 32 bits, so the bytes are sent as MiB.
        return distributed.reduce_max(mebibytes) << 20
