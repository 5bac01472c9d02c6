"""What moves to the host, and how many layers of it, so that the rest fits."""

from __future__ import annotations

import math
from collections.abc import Callable

from framework.plan.auto.closed_forms import Cost
from framework.plan.auto.room import Candidate, Room
from framework.plan.auto.settings import HOST, PLACES, Settings, ordered, setting
from framework.plan.auto.space import Level, Space, placed

# Peaks are nearly linear in the number of layers: hardly ever does one more not suffice.
_CORRECTIONS = 4


class Ladder:
    """The placements of some settings, from nothing on the host to everything.

    Args:
        cost_of: the closed form; None for settings that cannot be.
        room: what fits.
        space: knows the units of the stack.
    """

    def __init__(self, cost_of: Callable[[Settings], Cost | None], room: Room, space: Space):
        self._cost_of = cost_of
        self._room = room
        self._num_units = space.num_units
        self._unit_layers = space.unit_layers

    def climb(self, settings: Settings, levels: list[Level]) -> Candidate | None:
        """The settings with the least that has to move; None where that does not help.

        Args:
            settings: without placements.
            levels: the order in which things move.
        """
        below: Level | None = None
        for level in levels:
            candidate = self._candidate((*settings, *placed(level)))
            # A rung may be impossible, where the next ones are not: gradients without their schedule.
            if candidate is None:
                continue
            if self._room.over(candidate.settings, candidate.cost) <= 0:
                by_layers = None if below is None else self._by_layers(settings, below, candidate)
                return self._if_host_has_room(by_layers or candidate)
            if self._room.host_over(candidate.cost) > 0:
                return None
            below = level
        return None

    def may_fit(self, settings: Settings, levels: list[Level]) -> bool:
        """Whether nothing or everything on the host fits the device."""
        for level in dict.fromkeys((levels[0], levels[-1])):
            end = self._candidate((*settings, *placed(level)))
            if end is not None and self._room.over(end.settings, end.cost) <= 0:
                return True
        return False

    def _by_layers(self, settings: Settings, below: Level, above: Candidate) -> Candidate | None:
        """Between two rungs, with the fewest layers that suffice; None where all have to move.

        How many they are is read off the line between the rungs, as bytes are linear in them. Seconds are not: the
        link costs nothing until products no longer hide it. So the closed form is asked for what the layers come to.

        Args:
            settings: without placements.
            below: the rung that does not suffice.
            above: what the next one comes to.
        """
        nothing = self._candidate((*settings, *placed(below)))
        if nothing is None or not self._num_units:
            return None
        over = self._room.over(nothing.settings, nothing.cost)
        room_left = -self._room.over(above.settings, above.cost)
        num_units = max(1, math.ceil(over / max((over + room_left) / self._num_units, 1)))
        if num_units >= self._num_units:
            return None
        return self._first_that_fits((*settings, *placed(below, num_units * self._unit_layers)))

    def _first_that_fits(self, settings: Settings) -> Candidate | None:
        """The settings, with a few layers more on the host if it takes them; None if that fails."""
        for _ in range(_CORRECTIONS):
            candidate = self._candidate(settings)
            if candidate is None or self._room.fits(candidate.settings, candidate.cost):
                return candidate
            more = self._with_more_layers(settings)
            if more is None:
                return None
            settings = more
        return None

    def _with_more_layers(self, settings: Settings) -> Settings | None:
        """The settings with one more unit of what is partly on the host; None where nothing is."""
        for path in PLACES:
            text = dict(settings).get(path, "")
            kind, _, count = text.partition(":")
            if kind == HOST and count.isdecimal():
                num_layers = int(count) + self._unit_layers
                if num_layers >= self._num_units * self._unit_layers:
                    return ordered((*settings, setting(path, HOST)))
                return ordered((*settings, setting(path, f"{HOST}:{num_layers}")))
        return None

    def _if_host_has_room(self, candidate: Candidate) -> Candidate | None:
        return candidate if self._room.host_over(candidate.cost) <= 0 else None

    def _candidate(self, settings: Settings) -> Candidate | None:
        cost = self._cost_of(settings)
        if cost is None:
            return None
        return Candidate(settings, cost, self._room.peak(settings, cost))
