"""The tuner: proposes settings and refines the proposal with the compiled peak."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Sequence

import jax

from plimsoll.extras.autotune import ALLOWED
from plimsoll.extras.autotune.cost_model import (
    Candidate,
    CostModel,
    MemoryBudget,
    MemoryLimits,
    SettingsCost,
    with_host_memory,
)
from plimsoll.extras.autotune.search import TIE_FACTOR, SettingsSearch, compare_neighbors, iter_neighbors
from plimsoll.extras.autotune.search_space import SearchSpace
from plimsoll.extras.autotune.settings import (
    Machine,
    Setting,
    Settings,
    TunedSettings,
    TuningRequest,
    flags,
    list_changes,
    list_variants,
)
from plimsoll.framework.config import Config
from plimsoll.framework.plan import cache
from plimsoll.framework.plan.build_report import CompiledTrainStep
from plimsoll.framework.plan.dry_run import compile_step
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program.program import Program
from plimsoll.framework.terminal.phases import SHORT, phase
from plimsoll.framework.terminal.tables import human_bytes

# Maximum number of steps to a better neighbor after the search, which does not look at all of them.
_MOST_STEPS = 4


class CompiledBytes:
    """Compiled sizes of candidates, written to disk after each compilation.

    Args:
        request: request that the search answers.
        fresh: whether to ignore the results of earlier searches.
    """

    def __init__(self, request: TuningRequest, *, fresh: bool):
        self._path = request.path("compiled")
        self._bytes: dict[str, int] = {}
        if not fresh:
            self._bytes = cache.load(self._path) or {}

    def get(self, settings: Settings) -> int | None:
        """Return the bytes that settings need on one device; None if they were not compiled."""
        return self._bytes.get(flags(settings))

    def items(self) -> list[tuple[Settings, int]]:
        """Return all compiled settings with their bytes, in the order of compilation."""
        # The keys are command-line flags, because keys of JSON are strings.
        compiled_settings = []
        for text, compiled in self._bytes.items():
            pairs = [word.removeprefix("--config.").partition("=") for word in shlex.split(text)]
            settings = tuple(Setting(path, value) for path, _, value in pairs)
            compiled_settings.append((settings, compiled))
        return compiled_settings

    def record(self, settings: Settings, compiled: int) -> None:
        """Store the compiled size of settings.

        Args:
            settings: settings that were compiled.
            compiled: bytes that they need on one device.
        """
        self._bytes[flags(settings)] = compiled
        cache.store(self._path, self._bytes)


class Tuner:
    """Tunes the settings of a config for a target.

    Args:
        config: config, resolved for the target.
        target: the machine.
        device_bytes: bytes that one device may use; None if unknown.
        host_bytes: memory of one process's host, in bytes; None takes the target's known value.
        fixed: paths of fields that must not change.
        allowed: names of changes to the training that are allowed.
    """

    def __init__(
        self,
        config: Config,
        target: Target,
        *,
        device_bytes: int | None,
        host_bytes: int | None = None,
        fixed: frozenset[str] = frozenset(),
        allowed: Sequence[str] = (),
    ):
        self.machine = Machine.derive(target, device_bytes, host_bytes)
        self.target = target = with_host_memory(target, device_bytes, host_bytes)
        self.fixed = fixed
        self.allowed = tuple(allowed)
        self.cost_model = CostModel(config, target)
        self.space = SearchSpace(config, target, fixed)
        self.budget = MemoryBudget(MemoryLimits.derive(target, device_bytes))
        self._refusal = ""
        changes = list_changes(config, allowed, fixed, target.spec)
        self.variants = list_variants(changes)
        self._impossible_changes = [name for name in allowed if name not in changes]

    def propose(self) -> Candidate | None:
        """Return the fastest settings that fit, given the compilations so far; None if none do."""
        with phase("searching for the fastest settings that fit", patience=SHORT):
            best = SettingsSearch(self.cost_model, self.space, self.budget, self.variants).run()
            for _ in range(_MOST_STEPS):
                better = None if best is None else self._find_better_neighbor(best)
                if better is None:
                    break
                best = better
        return best

    def finds_any(self) -> bool:
        """Return whether any settings fit by the estimate. This takes less time than finding the fastest."""
        return SettingsSearch(self.cost_model, self.space, self.budget, self.variants).finds_any()

    def _find_better_neighbor(self, best: Candidate) -> Candidate | None:
        """Return the fastest neighbor that fits; None if none is faster than `best`."""
        faster = []
        for rival in iter_neighbors(self.cost_model, self.space, best):
            cost = self.cost_model.cost(rival.settings)
            if (
                cost is not None
                and cost.seconds * TIE_FACTOR < best.cost.seconds
                and self.budget.fits(rival.settings, cost)
            ):
                faster.append(Candidate(rival.settings, cost, self.budget.peak(rival.settings, cost)))
        return min(faster, key=lambda candidate: candidate.cost.seconds, default=None)

    def record_compiled(self, candidate: Candidate, compiled: int) -> None:
        """Record the compiled size of a candidate.

        Args:
            candidate: the candidate that was compiled.
            compiled: bytes that it needs on one device.
        """
        self.budget.learn(candidate.settings, candidate.cost, compiled)

    def exclude_failed(self, candidate: Candidate, reason: str) -> None:
        """Exclude settings that cannot be built into a program.

        Args:
            candidate: the candidate to exclude.
            reason: error message.
        """
        # Compilers append details on further lines, but a failure is reported in one.
        self._refusal = reason.partition("\n")[0]
        self.cost_model.exclude(candidate.settings)

    def is_confirmed(self, candidate: Candidate) -> bool:
        """Return whether settings were compiled and fit."""
        return candidate.settings in self.budget.compiled and self.budget.fits(candidate.settings, candidate.cost)

    def build_choice(self, candidate: Candidate, notes: Sequence[str] = ()) -> TunedSettings:
        """Turn a candidate into a choice, with its neighbors.

        Args:
            candidate: the settings to choose.
            notes: additional lines for the report.
        """
        cost = candidate.cost
        with phase("comparing with similar settings", patience=SHORT):
            neighbors = compare_neighbors(self.cost_model, self.space, self.budget, candidate)
        return TunedSettings(
            machine=self.machine,
            settings=candidate.settings,
            kept=tuple(f"{path}={self.cost_model.config.get_path(path)}" for path in sorted(self.fixed)),
            allowed=self.allowed,
            peak=self.budget.peak(candidate.settings, cost),
            host=cost.host,
            host_need=cost.host_need,
            seconds=None if math.isinf(cost.seconds) else cost.seconds,
            moved=cost.moved,
            compiled=candidate.settings in self.budget.compiled,
            neighbors=neighbors,
            notes=(*notes, *self._change_note(), *self._host_note(cost.host)),
        )

    def _change_note(self) -> list[str]:
        if not self._impossible_changes:
            return []
        names = ", ".join(self._impossible_changes)
        return [
            f"--allow={names}: not possible, or of no use, for this config, its fixed fields, and {self.target.name}"
        ]

    def _host_note(self, host: int) -> list[str]:
        if not host or self.machine.host_bytes is not None or self.budget.limits.host is None:
            return []
        assumed = human_bytes(self.budget.limits.host)
        return [f"host memory unknown: assuming {assumed} per host; set it with --host_memory_gib"]

    def describe_failure(self) -> str:
        """Return the reason why nothing fits, in one line."""
        if self._refusal and not self.budget.compiled:
            return f"could not build a program with the best settings: {self._refusal}"
        limits = self.budget.limits
        closest = self._find_closest_fit()
        device = human_bytes(limits.device)
        if closest is None:
            return "no valid settings for this config and target; run `plimsoll plan` without --auto to see the error"
        settings, cost = closest
        peak = self.budget.peak(settings, cost)
        needs = f"the smallest found need {human_bytes(peak)} per device of {device}"
        if self.budget.host_over(cost) > 0:
            assumed = "" if self.machine.host_bytes is not None else " (assumed)"
            needs += f", and {human_bytes(cost.host_need)} per host, which has {human_bytes(limits.host)}{assumed}"
        advice = f"use more devices, or --allow={','.join(ALLOWED)}"
        return f"no settings with the same result fit: {needs}; {advice}"

    def _find_closest_fit(self) -> tuple[Settings, SettingsCost] | None:
        """Return the settings that come closest to fitting, among those estimated; None if there are none."""
        costs = self.cost_model.get_possible_costs()
        if not costs:
            return None
        return min(
            costs.items(), key=lambda item: (self.budget.over(*item) > 0, self.budget.host_over(item[1]), item[1].peak)
        )


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
