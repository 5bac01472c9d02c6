"""Finds which fields to offload, and how many of their layers, so that the rest fits on the device."""

from __future__ import annotations

import math
from collections.abc import Callable

from plimsoll.extras.autotune.budget import Candidate, MemoryBudget
from plimsoll.extras.autotune.cost_model import SettingsCost
from plimsoll.extras.autotune.search_space import OffloadLevel, SearchSpace, offload_settings
from plimsoll.extras.autotune.settings import HOST, PLACEMENT_FIELDS, Settings, setting, sort_settings

# Maximum number of tries with more layers. Peaks are nearly linear in their number, so one is usually enough.
_CORRECTIONS = 4


class OffloadLevels:
    """Offload levels for some settings, from nothing offloaded to everything.

    Args:
        estimate_cost: returns the estimated cost of settings; None if they are not possible.
        budget: decides whether settings fit.
        space: search space, with the number of repeats of the stack's pattern and the layers of each.
    """

    def __init__(
        self, estimate_cost: Callable[[Settings], SettingsCost | None], budget: MemoryBudget, space: SearchSpace
    ):
        self._estimate_cost = estimate_cost
        self._budget = budget
        self._num_repeats = space.num_repeats
        self._pattern_length = space.pattern_length

    def find_cheapest_fit(self, settings: Settings, levels: list[OffloadLevel]) -> Candidate | None:
        """Return the settings that fit with the least offloading; None if none fit.

        Args:
            settings: settings that offload nothing.
            levels: offload levels, in order.
        """
        below: OffloadLevel | None = None
        for level in levels:
            candidate = self._evaluate((*settings, *offload_settings(level)))
            # A level can be impossible although later ones are possible: offloaded gradients need a certain schedule.
            if candidate is None:
                continue
            if self._budget.over(candidate.settings, candidate.cost) <= 0:
                by_layers = None if below is None else self._interpolate_layers(settings, below, candidate)
                fit = by_layers or candidate
                return fit if self._budget.host_over(fit.cost) <= 0 else None
            # Later levels need even more host memory.
            if self._budget.host_over(candidate.cost) > 0:
                return None
            below = level
        return None

    def may_fit(self, settings: Settings, levels: list[OffloadLevel]) -> bool:
        """Return whether the device has room at the first level (nothing offloaded) or at the last (everything).

        Args:
            settings: settings that offload nothing.
            levels: offload levels, in order.
        """
        for level in dict.fromkeys((levels[0], levels[-1])):
            end = self._evaluate((*settings, *offload_settings(level)))
            if end is not None and self._budget.over(end.settings, end.cost) <= 0:
                return True
        return False

    def _interpolate_layers(self, settings: Settings, below: OffloadLevel, above: Candidate) -> Candidate | None:
        """Return a candidate between two levels, with the fewest layers that suffice; None if all layers have to move.

        The number of layers is interpolated between the levels, because bytes are linear in it. Seconds are not
        linear: transfers cost nothing until matmuls no longer hide them. So the result gets its own estimate.

        Args:
            settings: settings that offload nothing.
            below: the level that does not suffice.
            above: candidate of the next level, which suffices.
        """
        nothing = self._evaluate((*settings, *offload_settings(below)))
        if nothing is None or not self._num_repeats:
            return None
        over = self._budget.over(nothing.settings, nothing.cost)
        headroom = -self._budget.over(above.settings, above.cost)
        num_repeats = max(1, math.ceil(over / max((over + headroom) / self._num_repeats, 1)))
        if num_repeats >= self._num_repeats:
            return None
        return self._find_first_fit((*settings, *offload_settings(below, num_repeats * self._pattern_length)))

    def _find_first_fit(self, settings: Settings) -> Candidate | None:
        """Return the settings, with a few more offloaded layers if necessary; None if that fails."""
        for _ in range(_CORRECTIONS):
            candidate = self._evaluate(settings)
            if candidate is None or self._budget.fits(candidate.settings, candidate.cost):
                return candidate
            more = self._add_layers(settings)
            if more is None:
                return None
            settings = more
        return None

    def _add_layers(self, settings: Settings) -> Settings | None:
        """Return the settings with one more repeat of the partially offloaded field; None if there is no such field."""
        for path in PLACEMENT_FIELDS:
            text = dict(settings).get(path, "")
            kind, _, count = text.partition(":")
            if kind == HOST and count.isdecimal():
                num_layers = int(count) + self._pattern_length
                if num_layers >= self._num_repeats * self._pattern_length:
                    return sort_settings((*settings, setting(path, HOST)))
                return sort_settings((*settings, setting(path, f"{HOST}:{num_layers}")))
        return None

    def _evaluate(self, settings: Settings) -> Candidate | None:
        cost = self._estimate_cost(settings)
        if cost is None:
            return None
        return Candidate(settings, cost, self._budget.peak(settings, cost))
