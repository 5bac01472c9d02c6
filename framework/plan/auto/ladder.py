"""Finds which fields to offload, and how many of their layers, so that the rest fits on the device."""

from __future__ import annotations

import math
from collections.abc import Callable

from plimsoll.framework.plan.auto.closed_forms import Cost
from plimsoll.framework.plan.auto.room import Candidate, Room
from plimsoll.framework.plan.auto.settings import HOST, PLACES, Settings, ordered, setting
from plimsoll.framework.plan.auto.space import Level, Space, placed

# Maximum number of tries with one more unit. Peaks are nearly linear in the number of layers, so one is usually enough.
_CORRECTIONS = 4


class Ladder:
    """Offload levels for some settings, from nothing offloaded to everything.

    Args:
        cost_of: returns the estimated cost of settings; None if they are not possible.
        room: decides whether settings fit.
        space: search space, with the number of units in the stack and their layers.
    """

    def __init__(self, cost_of: Callable[[Settings], Cost | None], room: Room, space: Space):
        self._cost_of = cost_of
        self._room = room
        self._num_units = space.num_units
        self._unit_layers = space.unit_layers

    def climb(self, settings: Settings, levels: list[Level]) -> Candidate | None:
        """Return the settings that fit with the least offloading; None if none fit.

        Args:
            settings: settings without placements.
            levels: offload levels, in order.
        """
        below: Level | None = None
        for level in levels:
            candidate = self._candidate((*settings, *placed(level)))
            # A level can be impossible although later ones are possible: offloaded gradients need a certain schedule.
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
        """Return whether the device has room at the first level (nothing offloaded) or at the last (everything)."""
        for level in dict.fromkeys((levels[0], levels[-1])):
            end = self._candidate((*settings, *placed(level)))
            if end is not None and self._room.over(end.settings, end.cost) <= 0:
                return True
        return False

    def _by_layers(self, settings: Settings, below: Level, above: Candidate) -> Candidate | None:
        """Return a candidate between two levels, with the fewest layers that suffice; None if all have to move.

        The number of layers is interpolated between the levels, because bytes are linear in it. Seconds are not
        linear: transfers cost nothing until matmuls no longer hide them. So the result gets its own estimate.

        Args:
            settings: settings without placements.
            below: the level that does not suffice.
            above: candidate of the next level.
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
        """Return the settings, with a few more offloaded layers if necessary; None if that fails."""
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
        """Return the settings with one more unit of the partially offloaded field; None if there is no such field."""
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
