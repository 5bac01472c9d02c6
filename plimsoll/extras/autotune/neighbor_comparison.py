"""The cost of each neighbor of the chosen settings: less recomputation, less offloading, another mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from plimsoll.extras.autotune.budget import Candidate, MemoryBudget
from plimsoll.extras.autotune.cost_model import CostModel, SettingsCost
from plimsoll.extras.autotune.search_space import SearchSpace
from plimsoll.extras.autotune.settings import (
    ACCUMULATE,
    DEVICE,
    HOST,
    MESH,
    PLACEMENT_FIELDS,
    REMAT,
    UPDATE,
    Settings,
    select_changes,
    setting,
)
from plimsoll.extras.autotune.tuned_settings import Neighbor
from plimsoll.framework.layers.remat import parse_policies
from plimsoll.framework.terminal.tables import human_bytes

# Compare only the first meshes: a large machine has hundreds.
_MOST_MESHES = 4
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
    yield from meshes[:_MOST_MESHES]


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
        return f"{human_bytes(host_over)} over the host memory per device"
    if cost.seconds > chosen.seconds * _SLOWER:
        return f"{100 * (cost.seconds / chosen.seconds - 1):.1f}% slower"
    if cost.moved > chosen.moved:
        return f"not faster, and moves {human_bytes(cost.moved - chosen.moved)} more per step"
    return "at most 1% faster, and changes more settings"
