"""Proposes settings, hears what the compiler says of them, and proposes again."""

from __future__ import annotations

import math
from collections.abc import Sequence

from framework.config import Config
from framework.plan.auto import allow, explain
from framework.plan.auto.choice import Choice, Machine
from framework.plan.auto.closed_forms import ClosedForms
from framework.plan.auto.room import HOST_ASIDE, Candidate, Limits, Room
from framework.plan.auto.search import AS_FAST, Search
from framework.plan.auto.settings import Settings
from framework.plan.auto.space import Space
from framework.plan.targets import Target
from framework.terminal.phases import SHORT, phase
from framework.terminal.tables import human_bytes

# A choice is improved so often by a step to a neighbor, which the search has not looked into.
_STEPS = 4


class Chooser:
    """Chooses settings of a config on a target.

    Args:
        config: resolved for the target.
        target: the machine.
        device_bytes: that a device may use; None where not known.
        host_bytes: of a process's host; None: what is known of the target.
        fixed: paths of fields that stay as they are.
        allowed: names of what may be changed of the training.
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
        """The fastest settings that fit by what is known; None where none do."""
        with phase("looking for the fastest settings that fit", patience=SHORT):
            best = Search(self.forms, self.space, self.room, self.variants).run()
            for _ in range(_STEPS):
                better = None if best is None else self._better(best)
                if better is None:
                    break
                best = better
        return best

    def _better(self, best: Candidate) -> Candidate | None:
        """The fastest neighbor that fits, where it is faster."""
        faster = []
        for rival in explain.rivals(self.forms, self.space, best):
            cost = self.forms.cost(rival.settings)
            if cost is not None and cost.seconds * AS_FAST < best.cost.seconds and self.room.fits(rival.settings, cost):
                faster.append(Candidate(rival.settings, cost, self.room.peak(rival.settings, cost)))
        return min(faster, key=lambda candidate: candidate.cost.seconds, default=None)

    def hear(self, candidate: Candidate, compiled: int) -> None:
        """Takes in how many bytes of a device the compiler gave to settings."""
        self.room.learn(candidate.settings, candidate.cost, compiled)

    def refuse(self, candidate: Candidate, reason: str) -> None:
        """Leaves out settings that no program can be made of."""
        self._refusal = reason.partition("\n")[0]
        self.forms.leave_out(candidate.settings)

    def is_settled(self, candidate: Candidate) -> bool:
        """Whether settings are known to fit."""
        return candidate.settings in self.room.compiled and self.room.fits(candidate.settings, candidate.cost)

    def choice(self, candidate: Candidate, notes: Sequence[str] = ()) -> Choice:
        """The choice of settings, with its neighbors."""
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
        """Why nothing fits, in one line."""
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
            processes = self.target.num_devices // self.target.num_processes
            needs += f", with {human_bytes(cost.host * processes)} of host memory, and a host has {self._host_has()}"
        advice = f"it takes more devices, or --allow={','.join(allow.ALLOWED)}"
        return f"no settings fit that compute the same: {needs}; {advice}"

    def _host_has(self) -> str:
        known_bytes = self.machine.host_bytes
        if known_bytes is not None:
            return f"{human_bytes(known_bytes)}, of which its system takes {human_bytes(HOST_ASIDE)}"
        return f"{human_bytes(self.room.limits.host)} for each device, as is assumed"

    def _least(self) -> tuple[Settings, explain.Cost] | None:
        """The settings with the least on a device, of those that were looked at."""
        costs = self.forms.known()
        if not costs:
            return None
        return min(
            costs.items(), key=lambda item: (self.room.over(*item) > 0, self.room.host_over(item[1]), item[1].peak)
        )
