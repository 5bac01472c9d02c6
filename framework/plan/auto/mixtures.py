"""Mixes two remat policies in one stack: as many layers as fit use the faster one."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.framework.plan.auto.closed_forms import ClosedForms
from plimsoll.framework.plan.auto.room import Candidate, Room
from plimsoll.framework.plan.auto.settings import REMAT, Setting, changed, setting
from plimsoll.framework.plan.auto.space import Space


class Mixtures:
    """Derives mixtures of two remat policies from settings that use one policy for all layers.

    Args:
        forms: estimates the cost of settings.
        room: decides whether settings fit.
        space: search space, with the policies and the number of layers.
    """

    def __init__(self, forms: ClosedForms, room: Room, space: Space):
        self._forms = forms
        self._room = room
        self._space = space

    def of(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield, for each faster policy, the settings with as many layers of it as fit."""
        remats = self._space.remats()
        present = dict(candidate.settings).get(REMAT, self._forms.config.memory.remat)
        # For sqrt, the number after the colon is the group size, not a layer count.
        if present not in remats or present.startswith("sqrt") or self._space.num_units < 2:
            return
        for fast in remats[: remats.index(present)]:
            mixture = self._with_most(candidate, present, fast)
            if mixture is not None:
                yield mixture

    def _with_most(self, candidate: Candidate, cheap: str, fast: str) -> Candidate | None:
        """Return the settings with as many layers of the fast policy as fit; None if none fits."""
        least, most = 0, self._space.num_units
        mixture: Candidate | None = None
        while most - least > 1:
            middle = (least + most) // 2
            settings = changed(self._forms.config, (*candidate.settings, self._mixed(cheap, fast, middle)))
            cost = self._forms.cost(settings)
            if cost is not None and self._room.fits(settings, cost):
                least = middle
                mixture = Candidate(settings, cost, self._room.peak(settings, cost))
            else:
                most = middle
        return mixture

    def _mixed(self, cheap: str, fast: str, num_fast: int) -> Setting:
        """Return a remat setting with two policies, where the last `num_fast` units of the stack use the fast one."""
        unit_layers = self._space.unit_layers
        fast_layers = num_fast * unit_layers
        cheap_layers = self._space.num_units * unit_layers - fast_layers
        return setting(REMAT, f"{cheap}:{cheap_layers},{fast}:{fast_layers}")
