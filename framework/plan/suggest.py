"""Suggests settings that fit when a config does not."""

from __future__ import annotations

import time
from collections.abc import Iterator

from jax.sharding import AbstractMesh

from plimsoll.framework.config import Config
from plimsoll.framework.layers.remat import check_platform
from plimsoll.framework.plan.buffer_names import REPORT_GROUPS
from plimsoll.framework.plan.device_trace import TraceCache, trace
from plimsoll.framework.plan.dry_run import compile_step
from plimsoll.framework.plan.estimate import Estimate, estimate, least_bytes
from plimsoll.framework.plan.plan_report import Suggestion
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.traits import SCHEDULES, find_offloading_schedule
from plimsoll.framework.terminal.phases import SHORT, phase

# Settings to change together, by config path.
Settings = dict[str, str | int]
# Settings that do not affect `least_bytes`, because they move neither state nor gradients.
_MOVES_NO_STATE = ("memory.remat", "memory.activations", "learner.accumulate")


def check_target(experiment: Experiment, target: Target) -> dict[str, int]:
    """Check that an experiment is valid for a target, and return {mesh axis: size}.

    Args:
        experiment: the experiment to train.
        target: the machine to plan for.

    Raises:
        ValueError: the experiment is not valid for the target.
    """
    sizes = experiment.mesh.resolve(target.num_devices)
    experiment.mesh.split(sizes, target.num_slices)
    experiment.check(AbstractMesh(tuple(sizes.values()), tuple(sizes)), update_locality=False)
    experiment.model.check_platform(target.platform, target.spec.compute_capability)
    check_platform(experiment.memory.remat, target.platform)
    return sizes


def estimate_for_target(experiment: Experiment, target: Target, traces: TraceCache | None = None) -> Estimate:
    """Return the analytical estimate for a target.

    Args:
        experiment: the experiment to train.
        target: the machine to plan for.
        traces: traces of experiments that differ only in settings of memory and batch; None for no others.

    Raises:
        ValueError: the experiment is not valid for the target.
    """
    trace_fn = trace if traces is None else traces
    return estimate(experiment, check_target(experiment, target), target.spec, trace_fn, num_slices=target.num_slices)


def state_bytes(need: Estimate) -> int:
    """Return the estimated bytes that stay on the device between steps."""
    return sum(size for key, size in need.breakdown.items() if key in REPORT_GROUPS.values())


def suggestions(
    config: Config,
    target: Target,
    limit: int,
    peak: int,
    *,
    present: Estimate | None = None,
    seconds: float = 300.0,
    traces: TraceCache | None = None,
) -> list[Suggestion]:
    """Return up to three settings that fit, cheapest first; none of them changes what is computed.

    The analytical estimate selects candidates and the compiler decides whether they fit. After `seconds` of searching,
    the remaining candidates are returned with their estimates and `compiled` False.

    Args:
        config: config that does not fit.
        target: machine on which it does not fit.
        limit: device memory in bytes.
        peak: bytes that the config needs; the part beyond the state is assumed to scale like its estimate.
        present: estimate of the current settings, if there is one already.
        seconds: time limit for compiling.
        traces: traces of the config, if there are any already.
    """
    traces = TraceCache() if traces is None else traces
    present = present or estimate_for_target(config.instantiate(), target, traces)
    present_state = state_bytes(present)
    # The factor for the bytes other than state that makes the estimate of the current settings match their peak.
    scale = max(peak - present_state, 0) / max(present.peak_bytes - present_state, 1)
    start = time.monotonic()
    fitting: list[Suggestion] = []
    least_by_placement: dict[frozenset[tuple[str, str | int]], int] = {}
    tried: set[frozenset[tuple[str, str | int]]] = set()
    for choice in _choices(config, target.platform):
        # Combinations with an empty building block repeat others.
        if frozenset(choice.items()) in tried:
            continue
        tried.add(frozenset(choice.items()))
        # The settings that `least_bytes` depends on: if it exceeds the limit, no choice with these settings fits.
        placement = frozenset(pair for pair in choice.items() if pair[0] not in _MOVES_NO_STATE)
        if least_by_placement.get(placement, 0) > limit:
            continue
        setting = " ".join(f"--config.{path}={value}" for path, value in choice.items())
        try:
            with phase(f"trying {setting}", patience=SHORT):
                trial = config.copy()
                for path, value in sorted(choice.items()):
                    trial.set_path(path, value)
                experiment = trial.instantiate()
                least_by_placement[placement] = least_bytes(experiment, check_target(experiment, target))
                if least_by_placement[placement] > limit:
                    continue
                need = estimate_for_target(experiment, target, traces)
                state = state_bytes(need)
                trial_peak = int(state + scale * (need.peak_bytes - state))
                compiled = trial_peak <= limit and time.monotonic() - start < seconds
                if compiled:
                    trial_peak = compile_step(Program(experiment, target.devices()), target, limit).allocated
        except ValueError:
            # The batch does not divide into the microbatches, or the target does not support the schedule.
            continue
        if trial_peak <= limit:
            fitting.append(Suggestion(setting, trial_peak, compiled))
        if len(fitting) == 3:
            return fitting
    return fitting


def _choices(config: Config, platform: str) -> Iterator[Settings]:
    """Yield settings to change together on this platform, cheapest first.

    They recompute, split into microbatches, offload state, shard it instead of replicating it, and finally offload
    everything.
    """
    memory = config.memory
    # The building blocks; one is empty if the config has its settings already.
    recompute: list[Settings] = []
    if memory.remat in ("none", "dots"):
        recompute = [{"memory.remat": name} for name in ("dots", "full") if name != memory.remat]
    microbatches: list[Settings] = []
    for doublings in range(1, 7):
        # Two to 64 times the current number of microbatches, up to one row in each.
        count = config.learner.accumulate * 2**doublings
        if count <= config.data.global_batch_size:
            microbatches.append({"learner.accumulate": count})
    offload: Settings = {}
    if memory.optimizer_state == "device":
        offload = {"memory.optimizer_state": "pinned_host"}
    streamed: Settings = {}
    offload_gradients: Settings = {}
    if not SCHEDULES[memory.update].updates_in_chunks:
        streamed = offload | {"memory.update": find_offloading_schedule(platform)}
        # Gradients are offloaded only together with a streamed update, which loads a part of them at a time.
        if memory.gradients == "device":
            offload_gradients = {"memory.gradients": "pinned_host"}
    sharded: Settings = {}
    if config.mesh.data != 1:
        sharded = {"mesh.data": 1, "mesh.fsdp": -1}
    # The last remat setting needs the least memory.
    recompute_most = recompute[-1] if recompute else {}
    offload_all = recompute_most | (streamed or offload)

    yield from recompute
    yield from microbatches[:3]
    combinations = [offload, streamed, sharded, recompute_most | offload, offload_all]
    if offload_gradients:
        combinations.append(offload_all | offload_gradients)
    yield from filter(None, combinations)
    for microbatch in microbatches:
        yield offload_all | microbatch
    if sharded:
        yield offload_all | sharded
        for microbatch in microbatches:
            yield offload_all | sharded | microbatch
    # Sharding along the sequence is for the case that each device has only one sequence left.
    split_sequences: Settings = {"mesh.fsdp": -1, "mesh.seq": 2 * config.mesh.seq}
    for microbatch in microbatches[:2]:
        yield offload_all | split_sequences | microbatch
    offload_weights: Settings = {}
    for field in ("parameters", "activations"):
        if memory[field] == "device":
            offload_weights[f"memory.{field}"] = "pinned_host"
    yield offload_all | offload_gradients | offload_weights
