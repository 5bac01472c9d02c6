"""Compares the two ways in which devices along `seq` see each other's keys: a ring, and gathering them."""

from __future__ import annotations

import copy

from plimsoll.framework.layers.attention import KernelAttention
from plimsoll.framework.layers.kernels_call import ContextParallel
from plimsoll.framework.plan.estimate import Estimate
from plimsoll.framework.plan.step_time.estimated_time import estimate_time
from plimsoll.framework.plan.suggest import estimate_for_target
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.terminal.tables import human_bytes, human_duration

_WORDS: dict[ContextParallel, str] = {"ring": "keys in a ring", "gather": "gathered keys"}


def note_key_exchange(experiment: Experiment, need: Estimate, target: Target) -> list[str]:
    """Return a note with the memory and the time of both ways; [] if no attention is split over `seq`.

    Args:
        experiment: the experiment to train.
        need: its estimate for the target.
        target: the machine to plan for.
    """
    num_shards = experiment.mesh.resolve(target.num_devices)["seq"]
    if num_shards == 1 or not _list_attention(experiment):
        return []
    estimates: dict[ContextParallel, Estimate] = {}
    for way in _WORDS:
        variant = copy.copy(experiment)
        variant.model = copy.deepcopy(experiment.model)
        for layer in _list_attention(variant):
            layer.context_parallel = way
        try:
            estimates[way] = estimate_for_target(variant, target)
        except ValueError:
            # A row does not have two equal chunks for each device.
            continue
    ways = "; ".join(f"{_WORDS[way]} {_describe_cost(experiment, cost, target)}" for way, cost in estimates.items())
    chosen = [_WORDS[way] for way, cost in estimates.items() if cost.work == need.work]
    in_use = chosen[0] if chosen else f"both, by layer: {_describe_cost(experiment, need, target)}"
    return [f"attention over mesh.seq = {num_shards}, estimated: {ways}; in use: {in_use}"]


def _describe_cost(experiment: Experiment, need: Estimate, target: Target) -> str:
    cost = human_bytes(need.peak_bytes)
    time = estimate_time(need.work, target.spec, target.num_devices, str(experiment.model.compute_dtype))
    return cost if time is None else f"{cost} and {human_duration(time.seconds)} a step"


def _list_attention(experiment: Experiment) -> list[KernelAttention]:
    stacks = experiment.model.stacks.values()
    return [layer for stack in stacks for layer in stack.pattern.walk() if isinstance(layer, KernelAttention)]
