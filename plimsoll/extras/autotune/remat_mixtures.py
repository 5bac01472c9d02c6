"""Mixes two remat policies in one stack: as many layers as fit use the faster one."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.extras.autotune.budget import Candidate, MemoryBudget
from plimsoll.extras.autotune.cost_model import CostModel
from plimsoll.extras.autotune.search_space import SearchSpace
from plimsoll.extras.autotune.settings import REMAT, Setting, select_changes, setting


class RematMixtures:
    """Derives mixtures of two remat policies from settings that use one policy for all layers.

    Args:
        cost_model: estimates the cost of settings.
        budget: decides whether settings fit.
        space: search space, with the policies and the number of layers.
    """

    def __init__(self, cost_model: CostModel, budget: MemoryBudget, space: SearchSpace):
        self._cost_model = cost_model
        self._budget = budget
        self._space = space

    def iter_candidates(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield, for each faster policy, the settings with as many layers of it as fit."""
        remats = self._space.remats()
        present = dict(candidate.settings).get(REMAT, self._cost_model.config.memory.remat)
        # For sqrt, the number after the colon is the group size, not a layer count.
        if present not in remats or present.startswith("sqrt") or self._space.num_repeats < 2:
            return
        for fast in remats[: remats.index(present)]:
            mixture = self._maximize_fast_layers(candidate, present, fast)
            if mixture is not None:
                yield mixture

    def _maximize_fast_layers(self, candidate: Candidate, cheap: str, fast: str) -> Candidate | None:
        """Return the settings with as many layers of the fast policy as fit; None if none fits."""
        # Binary search: `least` repeats are known to fit, `most` are not. All of them would be no mixture.
        least, most = 0, self._space.num_repeats
        mixture: Candidate | None = None
        while most - least > 1:
            middle = (least + most) // 2
            settings = select_changes(
                self._cost_model.config, (*candidate.settings, self._mix_policies(cheap, fast, middle))
            )
            cost = self._cost_model.cost(settings)
            if cost is not None and self._budget.fits(settings, cost):
                least = middle
                mixture = Candidate(settings, cost, self._budget.peak(settings, cost))
            else:
                most = middle
        return mixture

    def _mix_policies(self, cheap: str, fast: str, num_fast: int) -> Setting:
        """Return a remat setting with two policies: the last `num_fast` repeats of the pattern use the fast one."""
        pattern_length = self._space.pattern_length
        fast_layers = num_fast * pattern_length
        cheap_layers = self._space.num_repeats * pattern_length - fast_layers
        return setting(REMAT, f"{cheap}:{cheap_layers},{fast}:{fast_layers}")
