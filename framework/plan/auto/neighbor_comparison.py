"""The cost of each neighbor of the chosen settings: less recomputation, less offloading, another mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from plimsoll.framework.layers.remat import parse_policies
from plimsoll.framework.plan.auto.budget import Candidate, MemoryBudget
from plimsoll.framework.plan.auto.cost_model import CostModel, SettingsCost
from plimsoll.framework.plan.auto.search_space import SearchSpace
from plimsoll.framework.plan.auto.settings import (
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
from plimsoll.framework.plan.auto.tuned_settings import Neighbor
from plimsoll.framework.terminal.tables import human_bytes

_MOST_MESHES = 4
_MORE = 1.005


class NeighborSettings(NamedTuple):
    """A neighbor that has not been evaluated yet.

    Attributes:
        difference: settings that differ from the chosen ones.
        settings: all settings of the neighbor, in the order of `changed`.
    """

    difference: Settings
    settings: Settings


def iter_neighbors(cost_model: CostModel, space: SearchSpace, chosen: Candidate) -> Iterator[NeighborSettings]:
    """Yield the neighbors of the chosen settings, without duplicates and without the chosen settings themselves."""
    known = {chosen.settings}
    for difference in _differences(cost_model, space, chosen.settings):
        settings = select_changes(cost_model.config, (*chosen.settings, *difference))
        if settings not in known:
            known.add(settings)
            yield NeighborSettings(difference, settings)


def compare_neighbors(
    cost_model: CostModel, space: SearchSpace, budget: MemoryBudget, chosen: Candidate
) -> tuple[Neighbor, ...]:
    """Return the neighbors of the chosen settings, each with the reason why it was not chosen."""
    compared = []
    for rival in iter_neighbors(cost_model, space, chosen):
        visible = select_changes(cost_model.config, rival.difference) or rival.difference
        text = " ".join(f"{path}={value}" for path, value in visible)
        cost = cost_model.cost(rival.settings)
        if cost is None:
            continue
        peak = budget.peak(rival.settings, cost)
        compared.append(Neighbor(text, peak, cost.seconds, _reason(budget, rival.settings, cost, chosen.cost)))
    return tuple(compared)


def _differences(cost_model: CostModel, space: SearchSpace, settings: Settings) -> Iterator[Settings]:
    in_effect = _InEffect(cost_model, settings)
    yield from _reduce_remat(space, in_effect)
    yield from _reduce_offload(space, in_effect)
    counts = space.accumulations(tuple(one for one in settings if one.path in MESH))
    present = int(in_effect.text(ACCUMULATE))
    if present in counts:
        index = counts.index(present)
        for other in counts[max(0, index - 1) : index + 2]:
            if other != present:
                yield (setting(ACCUMULATE, other),)
    yield from ((setting(UPDATE, text),) for text in _other_updates(space, in_effect))
    meshes = [mesh for mesh in space.meshes() if mesh]
    yield from meshes[:_MOST_MESHES]


class _InEffect:
    """The effective values of config fields: those of some settings, else the config's own."""

    def __init__(self, cost_model: CostModel, settings: Settings):
        self._cost_model = cost_model
        self._texts = dict(settings)

    def text(self, path: str) -> str:
        """Return a field's value as text."""
        return self._texts.get(path, str(self._cost_model.config.get_path(path)))


def _reduce_remat(space: SearchSpace, in_effect: _InEffect) -> Iterator[Settings]:
    remats = space.remats()
    present = in_effect.text(REMAT)
    if present in remats:
        index = remats.index(present)
        for remat in remats[max(0, index - 1) : index + 2]:
            yield (setting(REMAT, remat),)
        return
    # A mixture of two policies: use either one for all layers.
    for span in parse_policies(present):
        yield (setting(REMAT, span.policy),)


def _reduce_offload(space: SearchSpace, in_effect: _InEffect) -> Iterator[Settings]:
    """Yield, for each offloaded field, the setting that keeps it on the device.

    For a partially offloaded field, also yield the setting that offloads one unit of the stack less.
    """
    for path in PLACEMENT_FIELDS:
        kind, _, count = in_effect.text(path).partition(":")
        if kind != HOST:
            continue
        yield (setting(path, DEVICE),)
        num_layers = int(count) - space.pattern_length if count.isdecimal() else 0
        if num_layers > 0:
            yield (setting(path, f"{HOST}:{num_layers}"),)


def _other_updates(space: SearchSpace, in_effect: _InEffect) -> list[str]:
    updates = [dict(schedule).get(UPDATE) for schedule in space.schedules(int(in_effect.text(ACCUMULATE)))]
    return [update for update in updates if update is not None and update != in_effect.text(UPDATE)]


def _reason(budget: MemoryBudget, settings: Settings, cost: SettingsCost, chosen: SettingsCost) -> str:
    over = budget.over(settings, cost)
    if over > 0:
        return f"{human_bytes(over)} too much for a device"
    host_over = budget.host_over(cost)
    if host_over > 0:
        return f"{human_bytes(host_over)} too much for each device's share of the host"
    if cost.seconds > chosen.seconds * _MORE:
        return f"{100 * (cost.seconds / chosen.seconds - 1):.1f}% slower"
    if cost.moved > chosen.moved:
        return f"as fast, and {human_bytes(cost.moved - chosen.moved)} more move in a step"
    return "no faster by more than 1%, and changes more"
