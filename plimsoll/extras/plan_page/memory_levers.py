"""Settings that shrink or move each group of a plan's breakdown without changing what is computed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plimsoll.framework.config import Config
from plimsoll.framework.plan.plan_report import PlanReport
from plimsoll.framework.plan.suggest import Settings, estimate_for_target
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.schedules.traits import SCHEDULES, find_offloading_schedule
from plimsoll.framework.terminal.phases import SHORT, phase

_STATE = ("parameters", "frozen", "optimizer_state", "ema")


@dataclass(frozen=True)
class Lever:
    """Settings to change together, and their effect on a group of the breakdown.

    Attributes:
        group: key of the breakdown.
        settings: {config path: value}.
        effect: description of the effect.
        group_bytes: estimated bytes of the group at the peak with these settings; None if not estimated.
        peak_bytes: estimated bytes of the whole peak with these settings; None if not estimated.
    """

    group: str
    settings: Settings
    effect: str
    group_bytes: int | None = None
    peak_bytes: int | None = None

    @property
    def text(self) -> str:
        """The settings in command-line syntax."""
        return " ".join(f"{path}={value}" for path, value in self.settings.items())


def levers(report: PlanReport) -> list[Lever]:
    """Return levers for the groups that a report has, without settings that are already in effect."""
    in_effect = report.in_effect
    if not in_effect:
        return []
    # Activations.
    remat = in_effect["memory.remat"]
    possible: list[Lever] = []
    if remat == "none":
        effect = "shrinks activations: recomputes all but matrix products"
        possible.append(Lever("activations", {"memory.remat": "dots"}, effect))
    if remat in ("none", "dots"):
        possible.append(Lever("activations", {"memory.remat": "full"}, "shrinks activations to each layer's input"))
    if remat == "full":
        possible.append(Lever("activations", {"memory.remat": "sqrt"}, "saves only the inputs of groups of layers"))
    count = 2 * in_effect["learner.accumulate"]
    if count <= in_effect["data.global_batch_size"]:
        effect = f"{count} microbatches, one after the other"
        possible.append(Lever("activations", {"learner.accumulate": count}, effect))

    # Offloading. Offloaded state needs an update schedule that supports it.
    streamed: Settings = {}
    if not SCHEDULES[in_effect["memory.update"]].updates_in_chunks:
        streamed = {"memory.update": find_offloading_schedule(report.platform)}
    if in_effect["memory.optimizer_state"] == "device":
        offload: Settings = {"memory.optimizer_state": "pinned_host"}
        possible.append(Lever("optimizer_state", offload, "offloads optimizer state to the host"))
        possible.append(Lever("ema", offload, "offloads averages to the host"))
        if streamed:
            effect = "offloads it to the host; the update fetches one chunk at a time"
            possible.append(Lever("optimizer_state", offload | streamed, effect))
    elif streamed:
        possible.append(Lever("optimizer_state", streamed, "the update fetches one chunk at a time"))
    offloadable_groups = {
        "gradients": ("memory.gradients", "offloads gradients to the host"),
        "parameters": ("memory.parameters", "offloads weights to the host; fetches one layer at a time"),
        "frozen": ("memory.parameters", "offloads weights to the host; fetches one layer at a time"),
        "activations": ("memory.activations", "offloads each layer's saved activations to the host"),
    }
    for group, (path, effect) in offloadable_groups.items():
        if in_effect[path] == "device":
            possible.append(Lever(group, {path: "pinned_host"} | streamed, effect))
    # Reports of older versions lack the field.
    if in_effect.get("memory.experts") == "device":
        # A model without experts refuses it.
        effect = "offloads the experts, with their gradients and state, to the host; fetches one layer at a time"
        experts: Settings = {"memory.experts": "pinned_host"} | streamed
        possible += [Lever(group, experts, effect) for group in ("optimizer_state", "parameters", "frozen")]

    # Sharding.
    if report.mesh.get("data", 1) > 1:
        for group in _STATE:
            possible.append(Lever(group, {"mesh.data": 1, "mesh.fsdp": -1}, "shards it over all devices"))
    return [lever for lever in possible if report.breakdown.get(lever.group)]


def estimate_levers(
    config: Config, target: Target, report: PlanReport, candidates: Sequence[Lever], *, seconds: float = 2.0
) -> list[Lever]:
    """Return the levers that are valid for a config on a target and help, with their estimated bytes.

    A lever helps if it lowers the peak by more than 0.5% or its group by more than 5%.

    Args:
        config: config resolved for the target.
        target: the machine to plan for.
        report: the plan of the config.
        candidates: levers to try, in this order.
        seconds: time limit; no further lever is tried after it.
    """
    present = report.estimate
    assert present is not None
    start = time.monotonic()
    helpful: list[Lever] = []
    with phase("trying settings that shrink each group", patience=SHORT):
        for lever in candidates:
            if time.monotonic() - start > seconds:
                break
            trial = config.copy()
            try:
                for path, value in sorted(lever.settings.items()):
                    trial.set_path(path, value)
                need = estimate_for_target(trial.instantiate(), target)
            except ValueError:
                # The lever is invalid for this schedule, platform or batch.
                continue
            size = need.breakdown[lever.group]
            tried = replace(lever, group_bytes=size, peak_bytes=need.peak_bytes)
            # Of two levers with the same result, keep the first, which changes less.
            is_new = all(replace(tried, settings=other.settings, effect=other.effect) != other for other in helpful)
            if is_new and (
                need.peak_bytes < 0.995 * present.device_peak_bytes or size < 0.95 * present.breakdown[lever.group]
            ):
                helpful.append(tried)
    return helpful
