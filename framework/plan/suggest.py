"""Settings that fit where a config does not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from jax.sharding import AbstractMesh

from framework.config import Config
from framework.devices.executables import HostBytes
from framework.layers.remat import check_platform
from framework.plan.compiled import Compiled, compile_for
from framework.plan.estimate import Estimate, estimate
from framework.plan.layers import compile_layers
from framework.plan.naming import OF_LAYOUT
from framework.plan.targets import Target
from framework.program.experiment import Experiment
from framework.program.program import Program


def check(experiment: Experiment, target: Target) -> dict[str, int]:
    """The sizes of the mesh's axes. Raises ValueError when experiment and target do not fit each other."""
    sizes = experiment.mesh.resolve(target.num_devices)
    experiment.mesh.cut(sizes, target.num_slices)
    experiment.check(AbstractMesh(tuple(sizes.values()), tuple(sizes)), reach=False)
    check_platform(experiment.memory.remat, target.platform)
    return sizes


def closed_form(experiment: Experiment, target: Target) -> Estimate:
    """The estimate for a target; ValueError as for `check`."""
    return estimate(experiment, check(experiment, target), target.spec)


def compile_step(program: Program, target: Target, limit: int | None) -> Compiled:
    """The training step. Of a limit (bytes) the compiler is told when it is less than what the target has."""
    mib = None if limit is None or limit >= (target.limit_bytes or 0) else limit >> 20
    if program.in_parts:
        return compile_layers(program, target, mib)
    hosted = program.layout.bytes_per_device(memory_kind="pinned_host")
    return compile_for(program.traced_step.lower(), target.platform, HostBytes.in_place(hosted), mib)


def state_bytes(need: Estimate) -> int:
    """Of the estimate, what lives on the device between steps."""
    return sum(size for key, size in need.breakdown.items() if key in OF_LAYOUT.values())


def suggestions(
    config: Config, target: Target, limit: int, peak: int, *, seconds: float = 300.0
) -> list[dict[str, Any]]:
    """Settings that fit, the mildest first: none of them changes what is computed.

    The closed form says which are worth a try, and the compiler whether they fit; when it has taken `seconds`, those
    that are left are told as the closed form has them, with `compiled` False.

    Args:
        config, target: what does not fit, and where.
        limit: device memory in bytes.
        peak: what it needs. What this is beyond the closed form is taken to grow and shrink with the activations.
        seconds: for compiling.
    """
    whole = closed_form(config.instantiate(), target)
    scale = max(peak - state_bytes(whole), 0) / max(whole.peak_bytes - state_bytes(whole), 1)
    start = time.monotonic()
    found: list[dict[str, Any]] = []
    for choice in _choices(config):
        trial = config.copy()
        for path, value in sorted(choice):
            trial.set_path(path, value)
        try:
            need = closed_form(trial.instantiate(), target)
            about = int(state_bytes(need) + scale * (need.peak_bytes - state_bytes(need)))
            compiled = about <= limit and time.monotonic() - start < seconds
            if compiled:
                about = compile_step(Program(trial.instantiate(), target.devices()), target, limit).allocated
        except ValueError:
            continue  # the microbatches do not divide, or the schedule is not for this target
        if about <= limit:
            setting = " ".join(f"--config.{path}={value}" for path, value in choice)
            found.append({"setting": setting, "device_peak_bytes": about, "compiled": compiled})
        if len(found) == 3:
            break
    return found


def _choices(config: Config) -> Iterator[list[tuple[str, Any]]]:
    """What to change, the mildest first: recompute, smaller microbatches, hosted state, sharded instead of copied, all
    on the host."""
    memory, count = config.memory, config.learner.accumulate
    milder = [
        ("memory.remat", name) for name in ("dots", "full") if memory.remat in ("none", "dots") and name != memory.remat
    ]
    micro = [("learner.accumulate", count * 2**i) for i in range(1, 7) if count * 2**i <= config.data.global_batch_size]
    hosted = [("memory.optimizer_state", "pinned_host")] if memory.optimizer_state == "device" else []
    streamed = [*hosted, ("memory.update", "streamed")] if memory.update == "after_backward" else []
    away = [("memory.gradients", "pinned_host")] if streamed and memory.gradients == "device" else []
    sharded = [("mesh.data", 1), ("mesh.fsdp", -1)] if config.mesh.data != 1 else []
    long = [("mesh.fsdp", -1), ("mesh.seq", 2 * config.mesh.seq)]
    most = [*milder[-1:], *(streamed or hosted)]
    yield from ([one] for one in [*milder, *micro[:3]])
    yield from filter(None, [hosted, streamed, sharded, [*milder[-1:], *hosted], most, away and [*most, *away]])
    yield from ([*most, one] for one in micro)
    if sharded:
        yield from ([*most, *sharded, *rest] for rest in [[], *([one] for one in micro)])
    yield from ([*most, *long, one] for one in micro[:2])  # a sequence is split when there is but one for each device
    rest = [(f"memory.{field}", "pinned_host") for field in ("parameters", "activations") if memory[field] == "device"]
    yield [*most, *away, *rest]
