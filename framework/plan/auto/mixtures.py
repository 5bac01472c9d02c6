"""Layers that are recomputed otherwise than the others: of two policies, as many with the faster one as fit."""

from __future__ import annotations

from collections.abc import Iterator

from framework.plan.auto.closed_forms import ClosedForms
from framework.plan.auto.room import Candidate, Room
from framework.plan.auto.settings import REMAT, Setting, changed, setting
from framework.plan.auto.space import Space


class Mixtures:
    """The mixtures of two policies that are left of settings whose layers have one.

    Args:
        forms: say what settings cost.
        room: what fits.
        space: knows the policies and the layers.
    """

    def __init__(self, forms: ClosedForms, room: Room, space: Space):
        self._forms = forms
        self._room = room
        self._space = space

    def of(self, candidate: Candidate) -> Iterator[Candidate]:
        """For each policy that is faster, the settings with as many layers of it as fit."""
        remats = self._space.remats()
        present = dict(candidate.settings).get(REMAT, self._forms.config.memory.remat)
        # Of sqrt a number says how large its groups are.
        if present not in remats or present == "sqrt" or self._space.num_units < 2:
            return
        for fast in remats[: remats.index(present)]:
            mixture = self._with_most(candidate, present, fast)
            if mixture is not None:
                yield mixture

    def _with_most(self, candidate: Candidate, cheap: str, fast: str) -> Candidate | None:
        """The settings with as many layers of the fast policy as fit; None where not one does."""
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
        """A remat of two policies: the last `num_fast` units have the fast one."""
        unit_layers = self._space.unit_layers
        fast_layers = num_fast * unit_layers
        cheap_layers = self._space.num_units * unit_layers - fast_layers
        return setting(REMAT, f"{cheap}:{cheap_layers},{fast}:{fast_layers}")
