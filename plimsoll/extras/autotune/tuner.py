"""The tuner: proposes settings and refines the proposal with the compiled peak."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plimsoll.extras.autotune import allowed_changes, neighbor_comparison
from plimsoll.extras.autotune.branch_and_bound import TIE_FACTOR, SettingsSearch
from plimsoll.extras.autotune.budget import HOST_RESERVE, Candidate, MemoryBudget, MemoryLimits
from plimsoll.extras.autotune.cost_model import CostModel, SettingsCost
from plimsoll.extras.autotune.search_space import SearchSpace
from plimsoll.extras.autotune.settings import Settings
from plimsoll.extras.autotune.tuned_settings import Machine, TunedSettings
from plimsoll.framework.config import Config
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.terminal.phases import SHORT, phase
from plimsoll.framework.terminal.tables import human_bytes

# Maximum number of steps to a better neighbor after the search, which does not look at all of them.
_MOST_STEPS = 4


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
        self.target = target
        self.fixed = fixed
        self.allowed = tuple(allowed)
        self.machine = Machine.derive(target, device_bytes, host_bytes)
        self.cost_model = CostModel(config, target)
        self.space = SearchSpace(config, target, fixed)
        self.budget = MemoryBudget(MemoryLimits.derive(target, device_bytes, host_bytes))
        self._refusal = ""
        self.variants = allowed_changes.list_variants(config, allowed, fixed)

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

    def _find_better_neighbor(self, best: Candidate) -> Candidate | None:
        """Return the fastest neighbor that fits; None if none is faster than `best`."""
        faster = []
        for rival in neighbor_comparison.iter_neighbors(self.cost_model, self.space, best):
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
            neighbors = neighbor_comparison.compare_neighbors(self.cost_model, self.space, self.budget, candidate)
        return TunedSettings(
            machine=self.machine,
            settings=candidate.settings,
            kept=tuple(f"{path}={self.cost_model.config.get_path(path)}" for path in sorted(self.fixed)),
            allowed=self.allowed,
            peak=self.budget.peak(candidate.settings, cost),
            host=cost.host,
            seconds=None if math.isinf(cost.seconds) else cost.seconds,
            moved=cost.moved,
            compiled=candidate.settings in self.budget.compiled,
            neighbors=neighbors,
            notes=(*notes, *self._host_note(cost.host)),
        )

    def _host_note(self, host: int) -> list[str]:
        if not host or self.machine.host_bytes is not None or self.budget.limits.host is None:
            return []
        share = human_bytes(self.budget.limits.host)
        return [f"host memory unknown: assuming {share} per device; set it with --host_memory_gib"]

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
            devices_per_host = self.target.num_devices // self.target.num_processes
            host_bytes = cost.host * devices_per_host
            needs += f", and {human_bytes(host_bytes)} per host, which has {self._describe_host()}"
        advice = f"use more devices, or --allow={','.join(allowed_changes.ALLOWED)}"
        return f"no settings with the same result fit: {needs}; {advice}"

    def _describe_host(self) -> str:
        known_bytes = self.machine.host_bytes
        if known_bytes is not None:
            return f"{human_bytes(known_bytes)}, with {human_bytes(HOST_RESERVE)} reserved for the system"
        return f"{human_bytes(self.budget.limits.host)} per device (assumed)"

    def _find_closest_fit(self) -> tuple[Settings, SettingsCost] | None:
        """Return the settings that come closest to fitting, among those estimated; None if there are none."""
        costs = self.cost_model.get_possible_costs()
        if not costs:
            return None
        return min(
            costs.items(), key=lambda item: (self.budget.over(*item) > 0, self.budget.host_over(item[1]), item[1].peak)
        )
