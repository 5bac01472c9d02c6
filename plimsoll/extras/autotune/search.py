"""Finds the fastest settings that fit, by branch and bound over analytical estimates.

Meshes are expanded in order of the time that a step would take if nothing had to be offloaded or recomputed. Most of
them are never expanded, because that lower bound already exceeds the best result.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from plimsoll.extras.autotune.cost_model import Candidate, CostModel, MemoryBudget, SettingsCost
from plimsoll.extras.autotune.search_space import OffloadLevels, RematMixtures, SearchSpace
from plimsoll.extras.autotune.settings import (
    ACCUMULATE,
    ACCUMULATE_BY,
    CLIP_MODE,
    DEVICE,
    HOST,
    MESH,
    PLACEMENT_FIELDS,
    REMAT,
    UPDATE,
    Neighbor,
    Settings,
    get_text,
    select_changes,
    setting,
    sort_settings,
)
from plimsoll.framework.layers.remat import parse_policies
from plimsoll.framework.plan.step_time.tpu_operations import PCIE_EFFICIENCY
from plimsoll.framework.schedules.traits import SCHEDULES
from plimsoll.framework.terminal.tables import human_bytes

# Settings within this factor count as equally fast; among those, the ones that change less win.
TIE_FACTOR = 1.01
# Expand only the meshes with the lowest bounds: the others were hardly ever better.
_MOST_MESHES = 3
# Numbers of microbatches of a pipeline that are searched, the largest ones.
_MOST_PIPELINE_COUNTS = 2
# Fetching state ahead is tried for this many of the settings that offload it.
_MOST_PREFETCHING = 8
# Number of times that smaller microbatches may fail to help before the search stops trying them.
_PATIENCE = 2


class _Branch(NamedTuple):
    """Partially decided settings, with a lower bound on the time of a step for all completions of them."""

    bound: float
    number: int
    expand: Callable[[], None]


class SettingsSearch:
    """A search for the fastest settings that fit.

    Args:
        cost_model: estimates the cost of settings of the config.
        space: search space.
        budget: decides whether settings fit.
        variants: allowed changes to the training itself, starting with no change.
    """

    def __init__(
        self, cost_model: CostModel, space: SearchSpace, budget: MemoryBudget, variants: Sequence[Settings] = ((),)
    ):
        self._cost_model = cost_model
        self._space = space
        self._budget = budget
        self._variants = variants
        self._heap: list[_Branch] = []
        self._numbers = itertools.count()
        self._canonical: dict[Settings, Settings] = {}
        self._num_meshes = 0
        # Whether to offload only as many layers as necessary.
        self._offloads_least = True
        self.found: list[Candidate] = []

    def run(self) -> Candidate | None:
        """Return the fastest settings that fit; None if none do."""
        for _ in self._iter_expanded():
            pass
        if not self.found:
            return None
        self.found += list(self._iter_prefetching())
        return self._mix_remat(self._select_preferred())

    def finds_any(self) -> bool:
        """Return whether any settings fit. This stops at the first ones."""
        self._offloads_least = False
        return any(self.found for _ in self._iter_expanded())

    def _iter_expanded(self) -> Iterator[None]:
        """Add settings that fit to `found`, branch by branch, and yield after each branch."""
        unchanged_cost = self._cost(())
        if unchanged_cost is not None and self._budget.fits((), unchanged_cost):
            self.found.append(Candidate((), unchanged_cost, self._budget.peak((), unchanged_cost)))
            yield
        for variant, mesh in itertools.product(self._variants, self._space.meshes()):
            self._push_mesh(variant, mesh)
        while self._heap:
            branch = heapq.heappop(self._heap)
            # The heap is ordered by bound, so the remaining branches cannot be faster.
            if branch.bound * TIE_FACTOR >= self._best_seconds:
                break
            branch.expand()
            yield

    def _iter_prefetching(self) -> Iterator[Candidate]:
        """Yield the fastest settings found so far with offloaded state fetched a layer ahead, where that fits."""
        offloading = [one for one in self.found if self._cost_model.experiment(one.settings).memory.offloads_state]
        for candidate in sorted(offloading, key=lambda one: one.cost.seconds)[:_MOST_PREFETCHING]:
            for addition in self._space.prefetching(candidate.settings):
                settings = self.canonical((*candidate.settings, *addition))
                cost = self._cost(settings)
                if cost is not None and self._budget.fits(settings, cost):
                    yield Candidate(settings, cost, self._budget.peak(settings, cost))

    def _mix_remat(self, best: Candidate) -> Candidate:
        """Return the settings with less recomputation in as many layers as there is room for."""
        mixtures = RematMixtures(self._cost_model, self._budget, self._space)
        fastest = min([best, *mixtures.iter_candidates(best)], key=lambda one: one.cost.seconds)
        return fastest if fastest.cost.seconds * TIE_FACTOR < best.cost.seconds else best

    @property
    def _best_seconds(self) -> float:
        return min((candidate.cost.seconds for candidate in self.found), default=math.inf)

    def _select_preferred(self) -> Candidate:
        """Return the candidate that moves and changes least, among those as fast as the fastest."""
        fast_enough = self._best_seconds * TIE_FACTOR
        rivals = [candidate for candidate in self.found if candidate.cost.seconds <= fast_enough]
        return min(rivals, key=_rank)

    # --- branches ----------------------------------------------------------------------------------------------------

    def _push(self, bound: float, expand: Callable[[], None]) -> None:
        heapq.heappush(self._heap, _Branch(bound, next(self._numbers), expand))

    def _push_mesh(self, variant: Settings, mesh: Settings) -> None:
        accumulations = self._space.accumulations(mesh)
        if not accumulations:
            return
        base = (*variant, *mesh)
        if self._space.is_pipeline(mesh):
            # The largest microbatch is not the fastest one: the fewer there are, the longer stages are idle.
            for count in accumulations[-_MOST_PIPELINE_COUNTS:]:
                pipeline_bound = self._lower_bound(base, self._space.remats()[0], (), [count])
                if pipeline_bound < math.inf:
                    self._push(pipeline_bound, functools.partial(self._expand_mesh, base, [count]))
            return
        bound = self._lower_bound(base, self._space.remats()[0], (), accumulations)
        if not mesh:
            # Expand the config's own mesh before others that are equally fast.
            bound /= TIE_FACTOR**2
        if bound < math.inf:
            self._push(bound, functools.partial(self._expand_mesh, base, accumulations))

    def _expand_mesh(self, base: Settings, accumulations: list[int]) -> None:
        self._num_meshes += 1
        if self._num_meshes > _MOST_MESHES and self.found:
            return
        for remat in self._space.remats():
            bound = self._lower_bound(base, remat, (), accumulations)
            if bound * TIE_FACTOR >= self._best_seconds:
                continue
            schedules = [schedule for count in accumulations for schedule in self._space.schedules(count)]
            for schedule in dict.fromkeys(schedules):
                # The recomputed residuals of a whole group of layers would exist for all microbatches.
                if remat.startswith("sqrt") and get_text(schedule, ACCUMULATE_BY) == "layer":
                    continue
                possible = [count for count in accumulations if schedule in self._space.schedules(count)]
                # `bound` is that of the simplest schedule, and no schedule computes less. But this one may hide less.
                schedule_bound = self._lower_bound(base, remat, schedule, possible)
                self._push(
                    max(bound, schedule_bound), functools.partial(self._explore, base, remat, schedule, possible)
                )

    def _lower_bound(self, base: Settings, remat: str, schedule: Settings, counts: list[int]) -> float:
        """Return a lower bound on the time of a step: the largest microbatch's time plus the smallest one's transfers.

        It is infinite if no microbatch is possible.
        """
        joined = [self._join_settings(base, remat, schedule, count) for count in counts]
        fastest = next(filter(None, map(self._cost, joined)), None)
        smallest = next(filter(None, map(self._cost, reversed(joined))), None)
        if fastest is None or smallest is None:
            return math.inf
        return fastest.seconds + self._seconds_to_move(joined[-1], smallest, schedule)

    def _seconds_to_move(self, settings: Settings, cost: SettingsCost, schedule: Settings) -> float:
        """Return a lower bound on the transfer time that is not hidden, for settings without offloading.

        It is zero if the settings fit without offloading, and infinite if there is no host memory to offload to.
        """
        over = self._budget.over(settings, cost)
        if over <= 0:
            return 0.0
        target = self._cost_model.target
        link = target.spec.pcie_bytes_per_second
        if target.platform == "cpu":
            # On a CPU, the device memory is the host memory.
            return math.inf
        if link is None or math.isinf(cost.seconds):
            return 0.0
        update = get_text(schedule, UPDATE)
        # If the schedule is still open, the bound has to hold for all of them.
        traits = [SCHEDULES[update]] if update else SCHEDULES.values()
        hidden = max(one.hidden_fraction for one in traits)
        return max(0.0, over / (PCIE_EFFICIENCY * link) - hidden * cost.seconds)

    # --- microbatches and placements ---------------------------------------------------------------------------------

    def _explore(self, base: Settings, remat: str, schedule: Settings, counts: list[int]) -> None:
        """Find microbatches and placements for a mesh, a remat policy and a schedule, and add them to `found`."""
        offload_levels = OffloadLevels(self._cost, self._budget, self._space)
        orders = self._space.offload_orders(schedule)

        def may_fit(index: int) -> bool:
            # All orders have the same first and last level, and `may_fit` looks only at those.
            return offload_levels.may_fit(self._join_settings(base, remat, schedule, counts[index]), orders[0])

        first = _find_first(len(counts), may_fit)
        patience = _PATIENCE
        fastest = math.inf
        for index in range(first, len(counts)):
            settings = self._join_settings(base, remat, schedule, counts[index])
            cost = self._cost(settings)
            if cost is None or cost.seconds >= self._best_seconds:
                break
            if cost.seconds + self._seconds_to_move(settings, cost, schedule) >= self._best_seconds:
                # This one is too slow, but a smaller microbatch may have less to move.
                continue
            cheapest_fits = [
                offload_levels.find_cheapest_fit(settings, levels, offloads_least=self._offloads_least)
                for levels in orders
            ]
            rivals = [candidate for candidate in cheapest_fits if candidate is not None]
            self.found += [one._replace(settings=self.canonical(one.settings)) for one in rivals]
            seconds = min((one.cost.seconds for one in rivals), default=math.inf)
            if self._budget.fits(settings, cost):
                # Nothing is offloaded, so smaller microbatches can only be slower.
                break
            if rivals:
                patience -= seconds >= fastest
            fastest = min(fastest, seconds)
            if patience == 0:
                break

    def _join_settings(self, base: Settings, remat: str, schedule: Settings, count: int) -> Settings:
        return (*base, setting(ACCUMULATE, count), *schedule, setting(REMAT, remat))

    def _cost(self, settings: Settings) -> SettingsCost | None:
        return self._cost_model.cost(self.canonical(settings))

    def canonical(self, settings: Settings) -> Settings:
        """Return the settings that change the config, in canonical order, so that equivalent settings are equal."""
        if settings not in self._canonical:
            self._canonical[settings] = select_changes(self._cost_model.config, settings)
        return self._canonical[settings]


def _rank(candidate: Candidate) -> tuple[float, bool, int, float, Settings]:
    """Return a sort key: the least traffic first, then the fewest changes."""
    settings = sort_settings(candidate.settings)
    clips_otherwise = any(path == CLIP_MODE for path, _ in settings)
    return candidate.cost.moved, clips_otherwise, len(settings), candidate.cost.seconds, settings


def _find_first(count: int, is_possible: Callable[[int], bool]) -> int:
    """Return the first possible index, by binary search, or `count`. All indices after a possible one are possible."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if is_possible(middle):
            high = middle
        else:
            low = middle + 1
    return low


# Compare only the first meshes: a large machine has hundreds.
_MOST_COMPARED_MESHES = 4
_MOST_COMPARED_PIPELINES = 2
# A neighbor is reported as slower only beyond this ratio of the times.
_SLOWER = 1.005


class NeighborSettings(NamedTuple):
    """A neighbor that has not been evaluated yet.

    Attributes:
        difference: settings that differ from the chosen ones.
        settings: all settings of the neighbor, in the order of `select_changes`.
    """

    difference: Settings
    settings: Settings


def iter_neighbors(cost_model: CostModel, space: SearchSpace, chosen: Candidate) -> Iterator[NeighborSettings]:
    """Yield the neighbors of the chosen settings, without duplicates and without the chosen settings themselves.

    Args:
        cost_model: cost model of the config that the settings override.
        space: search space, which defines the neighbors.
        chosen: the chosen settings with their cost.
    """
    known = {chosen.settings}
    for difference in _iter_differences(cost_model, space, chosen.settings):
        settings = select_changes(cost_model.config, (*chosen.settings, *difference))
        if settings not in known:
            known.add(settings)
            yield NeighborSettings(difference, settings)


def compare_neighbors(
    cost_model: CostModel, space: SearchSpace, budget: MemoryBudget, chosen: Candidate
) -> tuple[Neighbor, ...]:
    """Return the neighbors of the chosen settings, each with the reason why it was not chosen.

    Args:
        cost_model: estimates the cost of each neighbor.
        space: search space, which defines the neighbors.
        budget: decides whether a neighbor fits.
        chosen: the chosen settings with their cost.
    """
    compared = []
    for rival in iter_neighbors(cost_model, space, chosen):
        # Show only what differs from the config, unless that is nothing: then the neighbor undoes a chosen setting.
        visible = select_changes(cost_model.config, rival.difference) or rival.difference
        text = " ".join(f"{path}={value}" for path, value in visible)
        cost = cost_model.cost(rival.settings)
        if cost is None:
            continue
        peak = budget.peak(rival.settings, cost)
        reason = _explain_rejection(budget, rival.settings, cost, chosen.cost)
        compared.append(Neighbor(text, peak, cost.seconds, reason))
    return tuple(compared)


def _iter_differences(cost_model: CostModel, space: SearchSpace, settings: Settings) -> Iterator[Settings]:
    """Yield the overrides of each neighbor: one setting each, or one mesh."""
    effective = _EffectiveValues(cost_model, settings)
    yield from _reduce_remat(space, effective)
    yield from _reduce_offload(space, effective)
    counts = space.accumulations(tuple(one for one in settings if one.path in MESH))
    present = int(effective.text(ACCUMULATE))
    if present in counts:
        index = counts.index(present)
        for other in counts[max(0, index - 1) : index + 2]:
            if other != present:
                yield (setting(ACCUMULATE, other),)
    for schedule in space.schedules(present):
        update = dict(schedule).get(UPDATE)
        if update is not None and update != effective.text(UPDATE):
            yield (setting(UPDATE, update),)
    meshes = [mesh for mesh in space.meshes() if mesh]
    yield from meshes[:_MOST_COMPARED_MESHES]
    pipelines = [mesh for mesh in meshes if space.is_pipeline(mesh)]
    for mesh in pipelines[:_MOST_COMPARED_PIPELINES]:
        # The more microbatches, the less are stages idle.
        yield from ((*mesh, setting(ACCUMULATE, count)) for count in space.accumulations(mesh)[-1:])


class _EffectiveValues:
    """The effective values of config fields: those of some settings, else the config's own."""

    def __init__(self, cost_model: CostModel, settings: Settings):
        self._cost_model = cost_model
        self._texts = dict(settings)

    def text(self, path: str) -> str:
        """Return a field's value as text."""
        return self._texts.get(path, str(self._cost_model.config.get_path(path)))


def _reduce_remat(space: SearchSpace, effective: _EffectiveValues) -> Iterator[Settings]:
    remats = space.remats()
    present = effective.text(REMAT)
    if present in remats:
        index = remats.index(present)
        for remat in remats[max(0, index - 1) : index + 2]:
            yield (setting(REMAT, remat),)
        return
    # A mixture of two policies: use either one for all layers.
    for span in parse_policies(present):
        yield (setting(REMAT, span.policy),)


def _reduce_offload(space: SearchSpace, effective: _EffectiveValues) -> Iterator[Settings]:
    """Yield, for each offloaded field, the setting that keeps it on the device.

    For a partially offloaded field, also yield the setting that offloads one repeat of the stack's pattern less.
    """
    for path in PLACEMENT_FIELDS:
        kind, _, count = effective.text(path).partition(":")
        if kind != HOST:
            continue
        yield (setting(path, DEVICE),)
        num_layers = int(count) - space.pattern_length if count.isdecimal() else 0
        if num_layers > 0:
            yield (setting(path, f"{HOST}:{num_layers}"),)


def _explain_rejection(budget: MemoryBudget, settings: Settings, cost: SettingsCost, chosen: SettingsCost) -> str:
    over = budget.over(settings, cost)
    if over > 0:
        return f"{human_bytes(over)} over the device limit"
    host_over = budget.host_over(cost)
    if host_over > 0:
        return f"{human_bytes(host_over)} over the memory of a host"
    if cost.seconds > chosen.seconds * _SLOWER:
        return f"{100 * (cost.seconds / chosen.seconds - 1):.1f}% slower"
    if cost.moved > chosen.moved:
        return f"not faster, and moves {human_bytes(cost.moved - chosen.moved)} more per step"
    return "at most 1% faster, and changes more settings"
