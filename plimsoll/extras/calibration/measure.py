"""Measures the rates that the local devices achieve."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.extras.calibration.workloads import Workload, workloads
from plimsoll.framework.devices.accelerators import AcceleratorSpec, spec_for
from plimsoll.framework.devices.allocator import keep_freed_memory
from plimsoll.framework.plan.cache import versions
from plimsoll.framework.plan.step_time.device_rates import DeviceRates, TimeCurve, WorkKind
from plimsoll.framework.terminal.phases import phase

# A measurement takes at least this many seconds, and the shortest of the repeats counts: other load on the machine can
# only add time.
_SECONDS = 0.02
_REPEATS = 3
_LINK_BYTES = 1 << 27
_PROGRAM_RUNS = 100
_STATE_LEAVES = 60


def measure_rates(devices: Sequence[Any]) -> DeviceRates:
    """Measure the rates of the first of several devices of one kind, while the others are idle.

    Args:
        devices: all local devices. The links between them are measured, too, if there are several.
    """
    device = devices[0]
    spec = spec_for(devices)
    if spec.platform == "cpu":
        # As in training. Otherwise the operating system allocates the memory again in each step, and the measurement
        # includes that time.
        keep_freed_memory()
    points: dict[WorkKind, list[tuple[float, float]]] = {}
    for workload in workloads(spec.platform):
        with phase(f"measuring {workload.kind}"):
            seconds = _measure_iteration(workload, spec, device)
        # A curve maps a size to the seconds for an amount equal to that size.
        point = (workload.size, seconds * workload.size / workload.amount)
        points.setdefault(workload.kind, []).append(point)
    on_host = spec.platform == "cpu"
    return DeviceRates(
        device=spec.name,
        curves={kind: TimeCurve(tuple(sorted(kind_points))) for kind, kind_points in points.items()},
        program_start=_measure_program_start(device),
        host_link=None if on_host else _measure_host_link(device),
        links=None if on_host or len(devices) < 2 else _measure_links(devices),
        measured=f"{date.today()}, {os.cpu_count()} cores" if on_host else str(date.today()),
        versions=versions("jax", "jaxlib"),
    )


def _measure_iteration(workload: Workload, spec: AcceleratorSpec, device: Any) -> float:
    """Measure the seconds of one iteration of a workload, in a program that loops over iterations."""
    start, *others = (jax.device_put(array, device) for array in (workload.start, *workload.others))

    def run(value: Any, iterations: Any, others: Any) -> Any:
        return jax.lax.fori_loop(
            0, iterations, lambda _, carried_value: workload.iteration(carried_value, *others), value
        )

    options: dict[str, Any] = dict(spec.compiler_options)
    program = jax.jit(run).lower(start, jnp.int32(1), others).compile(compiler_options=options)

    def time_iterations(iterations: int) -> float:
        num_iterations = jnp.int32(iterations)
        return _time_fastest(lambda: program(start, num_iterations, others))

    start_seconds = time_iterations(0)
    iterations = 1
    while True:
        # Subtract the time to start the program, so that only the iterations count.
        seconds = time_iterations(iterations) - start_seconds
        if seconds > _SECONDS:
            return seconds / iterations
        iterations *= 4


def _measure_program_start(device: Any) -> float:
    """Measure the seconds that Python takes to start a small program with as many arrays as a train step."""
    values = [jax.device_put(jnp.ones(8), device) for _ in range(_STATE_LEAVES)]
    program = jax.jit(lambda values: [value + 1.0 for value in values])

    def run() -> Any:
        result = values
        for _ in range(_PROGRAM_RUNS):
            result = program(result)
        return result

    return _time_fastest(run) / _PROGRAM_RUNS


def _measure_host_link(device: Any) -> float:
    """Measure the bytes per second between device and host memory, in the slower direction."""
    on_device = jax.device_put(jnp.ones(_LINK_BYTES // 4, jnp.float32), device)
    host_sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    device_sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    on_host = jax.device_put(on_device, host_sharding)
    seconds_out = _time_fastest(lambda: jax.device_put(on_device, host_sharding))
    seconds_in = _time_fastest(lambda: jax.device_put(on_host, device_sharding))
    return _LINK_BYTES / max(seconds_out, seconds_in)


def _measure_links(devices: Sequence[Any]) -> float:
    """Measure the bytes per second that each device receives during an all-gather."""
    mesh = Mesh(np.array(devices), ("all",))
    sharded = NamedSharding(mesh, PartitionSpec("all"))
    replicated = NamedSharding(mesh, PartitionSpec())
    length = _LINK_BYTES // 4 // len(devices) * len(devices)
    array = jax.device_put(jnp.ones(length, jnp.float32), sharded)
    gather = jax.jit(lambda value: value + 0.0, out_shardings=replicated)
    seconds = _time_fastest(lambda: gather(array))
    # Each device already has its own shard, and receives those of the others.
    return 4 * length * (len(devices) - 1) / len(devices) / seconds


def _time_fastest(run: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of several runs, after an untimed warm-up."""
    jax.block_until_ready(run())
    all_seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        all_seconds.append(time.perf_counter() - start)
    return min(all_seconds)
