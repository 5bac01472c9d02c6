"""The tuner: proposes settings and refines the proposal with the compiled peak."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plimsoll.framework.config import Config
from plimsoll.framework.plan.auto import allow, explain
from plimsoll.framework.plan.auto.choice import Choice, Machine
from plimsoll.framework.plan.auto.closed_forms import ClosedForms
from plimsoll.framework.plan.auto.room import HOST_ASIDE, Candidate, Limits, Room
from plimsoll.framework.plan.auto.search import AS_FAST, Search
from plimsoll.framework.plan.auto.settings import Settings
from plimsoll.framework.plan.auto.space import Space
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.terminal.phases import SHORT, phase
from plimsoll.framework.terminal.tables import human_bytes

# Maximum number of steps to a better neighbor after the search, which does not look at all of them.
_STEPS = 4


class Chooser:
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
        self.machine = Machine.of(target, device_bytes, host_bytes)
        self.forms = ClosedForms(config, target)
        self.space = Space(config, target, fixed)
        self.room = Room(Limits.of(target, device_bytes, host_bytes))
        self._refusal = ""
        self.variants = allow.variants(config, allowed, fixed)

    def propose(self) -> Candidate | None:
        """Return the fastest settings that fit, given the compilations so far; None if none do."""
        with phase("looking for the fastest settings that fit", patience=SHORT):
            best = Search(self.forms, self.space, self.room, self.variants).run()
            for _ in range(_STEPS):
                better = None if best is None else self._better(best)
                if better is None:
                    break
                best = better
        return best

    def _better(self, best: Candidate) -> Candidate | None:
        """Return the fastest neighbor that fits; None if none is faster than `best`."""
        faster = []
        for rival in explain.rivals(self.forms, self.space, best):
            cost = self.forms.cost(rival.settings)
            if cost is not None and cost.seconds * AS_FAST < best.cost.seconds and self.room.fits(rival.settings, cost):
                faster.append(Candidate(rival.settings, cost, self.room.peak(rival.settings, cost)))
        return min(faster, key=lambda candidate: candidate.cost.seconds, default=None)

    def hear(self, candidate: Candidate, compiled: int) -> None:
        """Record the bytes of one device that a candidate needs when compiled."""
        self.room.learn(candidate.settings, candidate.cost, compiled)

    def refuse(self, candidate: Candidate, reason: str) -> None:
        """Exclude settings that cannot be built into a program."""
        self._refusal = reason.partition("\n")[0]
        self.forms.leave_out(candidate.settings)

    def is_settled(self, candidate: Candidate) -> bool:
        """Return whether settings were compiled and fit."""
        return candidate.settings in self.room.compiled and self.room.fits(candidate.settings, candidate.cost)

    def choice(self, candidate: Candidate, notes: Sequence[str] = ()) -> Choice:
        """Turn a candidate into a choice, with its neighbors."""
        cost = candidate.cost
        with phase("looking at what was not chosen", patience=SHORT):
            neighbors = explain.neighbors(self.forms, self.space, self.room, candidate)
        return Choice(
            machine=self.machine,
            settings=candidate.settings,
            kept=self._kept(),
            allowed=self.allowed,
            peak=self.room.peak(candidate.settings, cost),
            host=cost.host,
            seconds=None if math.isinf(cost.seconds) else cost.seconds,
            moved=cost.moved,
            compiled=candidate.settings in self.room.compiled,
            neighbors=neighbors,
            notes=(*notes, *self._host_note(cost.host)),
        )

    def _kept(self) -> tuple[str, ...]:
        return tuple(f"{path}={self.forms.config.get_path(path)}" for path in sorted(self.fixed))

    def _host_note(self, host: int) -> list[str]:
        if not host or self.machine.host_bytes is not None or self.room.limits.host is None:
            return []
        share = human_bytes(self.room.limits.host)
        return [f"nobody says what this host has: {share} for each device are assumed; --host_memory_gib says more"]

    def failure(self) -> str:
        """Return the reason why nothing fits, in one line."""
        if self._refusal and not self.room.compiled:
            return f"no program could be made of the best settings: {self._refusal}"
        limits = self.room.limits
        least = self._least()
        device = human_bytes(limits.device)
        if least is None:
            return "no settings go with this config and target: see `plimsoll plan` without --auto"
        settings, cost = least
        peak = self.room.peak(settings, cost)
        needs = f"the least that was found is {human_bytes(peak)} per device of {device}"
        if self.room.host_over(cost) > 0:
            devices_per_host = self.target.num_devices // self.target.num_processes
            host_bytes = cost.host * devices_per_host
            needs += f", with {human_bytes(host_bytes)} of host memory, and a host has {self._host_has()}"
        advice = f"it takes more devices, or --allow={','.join(allow.ALLOWED)}"
        return f"no settings fit that compute the same: {needs}; {advice}"

    def _host_has(self) -> str:
        known_bytes = self.machine.host_bytes
        if known_bytes is not None:
            return f"{human_bytes(known_bytes)}, of which its system takes {human_bytes(HOST_ASIDE)}"
        return f"{human_bytes(self.room.limits.host)} for each device, as is assumed"

    def _least(self) -> tuple[Settings, explain.Cost] | None:
        """Return the settings that come closest to fitting, among those estimated; None if there are none."""
        costs = self.forms.known()
        if not costs:
            return None
        return min(
            costs.items(), key=lambda item: (self.room.over(*item) > 0, self.room.host_over(item[1]), item[1].peak)
        )
