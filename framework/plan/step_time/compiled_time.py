"""Estimates the time of a compiled step on any target."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from plimsoll.framework.plan.compilation import CompiledProgram
from plimsoll.framework.plan.hlo.module import Module
from plimsoll.framework.plan.step_time.cpu_time import cpu_time
from plimsoll.framework.plan.step_time.device_rates import (
    MEMORY_EFFICIENCY,
    PROGRAM_START,
    get_product_efficiency,
    load_measured_rates,
    load_rates,
)
from plimsoll.framework.plan.step_time.gpu_time import gpu_time
from plimsoll.framework.plan.step_time.schedule_simulation import share_busy
from plimsoll.framework.plan.step_time.time_breakdown import ProgramTime, StepTime
from plimsoll.framework.plan.step_time.tpu_operations import TpuRates
from plimsoll.framework.plan.step_time.tpu_time import tpu_time
from plimsoll.framework.plan.targets import Target

_UNVALIDATED = "not validated by a run"
# Number of intervals of a step whose activity is reported: as many as a drawing can show.
_NUM_INTERVALS = 240


def estimate_compiled_time(calls: Sequence[CompiledProgram], target: Target, peak_bytes: int) -> StepTime | None:
    """Return the time of a step; None if the rates of the target are unknown or there is no program text.

    Args:
        calls: programs of the step in order, one entry per run.
        target: the machine that they were compiled for.
        peak_bytes: peak memory per device.
    """
    # A program that the compiler refused, or that came from a compilation cache, has no buffers.
    if any(compiled.buffers is None for compiled in calls):
        return None
    # Runs of the same program are the same object, so each program is analyzed only once.
    program_by_id = {id(compiled): compiled for compiled in calls}
    counts = Counter(map(id, calls))
    programs = list(program_by_id.values())
    runs = [counts[key] for key in program_by_id]
    spec = target.spec
    if target.platform == "cpu":
        return _on_cpu(programs, runs, target, peak_bytes)
    try:
        if target.platform == "tpu":
            tpu_rates = TpuRates.look_up(spec)
            measured = load_measured_rates(spec.name)
            if measured is not None and measured.host_link is not None:
                tpu_rates = replace(tpu_rates, pcie=measured.host_link)
            times = [tpu_time(Module(compiled.text), tpu_rates) for compiled in programs]
            program_start = PROGRAM_START if measured is None else measured.program_start
            basis = f"the TPU compiler's cycles for each operation of the final program; {_UNVALIDATED}"
            return _sum_times(times, runs, program_start, basis, _share_lanes(calls, programs, times))
        rates = load_rates(spec, cores=0)
        if rates is None:
            return None
        times = [gpu_time(Module(compiled.text), spec, rates) for compiled in programs]
    except ValueError:
        return None
    if rates.measured:
        basis = f"roofline of the program's kernels, by rates measured on {rates.measured} (plimsoll calibrate)"
    else:
        reached = f"{get_product_efficiency(spec):.0%} of peak FLOP/s and {MEMORY_EFFICIENCY:.0%} of peak bandwidth"
        basis = f"roofline of the program's kernels, at {reached}; {_UNVALIDATED}"
    return _sum_times(times, runs, rates.program_start, basis, _share_lanes(calls, programs, times))


def _on_cpu(programs: Sequence[CompiledProgram], runs: Sequence[int], target: Target, peak_bytes: int) -> StepTime:
    rates = load_rates(target.spec, os.cpu_count() or 1)
    assert rates is not None
    products = 0.0
    others = 0.0
    copies = 0.0
    for compiled, count in zip(programs, runs, strict=True):
        assert compiled.buffers is not None
        program_time = cpu_time(compiled.buffers.module, rates, peak_bytes)
        products += count * program_time.products
        others += count * program_time.others
        copies += count * program_time.collectives
    # CPU devices are threads that share the cores, and the rates were measured with all cores together.
    num_devices = target.num_devices
    if rates.measured:
        basis = f"roofline of the program's operations, by rates measured on {rates.measured} (plimsoll calibrate)"
    else:
        basis = (
            "roofline of the program's operations, by assumed CPU rates, which may be far off: "
            "`plimsoll calibrate` measures this machine in half a minute"
        )
    return StepTime(
        matrix_units=num_devices * products,
        memory=num_devices * others,
        links=num_devices * copies,
        host_link=0.0,
        python=sum(runs) * rates.program_start,
        basis=basis,
    )


def _share_lanes(
    calls: Sequence[CompiledProgram], programs: Sequence[CompiledProgram], times: Sequence[ProgramTime]
) -> dict[str, list[float]]:
    """Return `TimeReport.lanes` of a step.

    Args:
        calls: programs of the step in order, one entry per run.
        programs, times: the different programs among them, and their times.
    """
    activity_by_id = {id(program): time.activity for program, time in zip(programs, times, strict=True)}
    shares = share_busy([activity_by_id[id(call)] for call in calls], _NUM_INTERVALS)
    return {name: [round(share, 3) for share in intervals] for name, intervals in shares.items()}


def _sum_times(
    times: Sequence[ProgramTime],
    runs: Sequence[int],
    program_start: float,
    basis: str,
    lanes: Mapping[str, Sequence[float]],
) -> StepTime:
    """Add up the times of a step's programs on an accelerator.

    Args:
        times: time of one run of each program.
        runs: number of runs of each program.
        program_start: seconds that Python needs to start a program.
        basis: sentence that describes the estimate.
        lanes: see `TimeReport`.
    """
    programs = list(zip(times, runs, strict=True))
    products = sum(count * program.products for program, count in programs)
    others = sum(count * program.others for program, count in programs)
    links = sum(count * program.links for program, count in programs)
    other_slices = sum(count * program.other_slices for program, count in programs)
    device_seconds = products + others + links + other_slices
    starts = sum(runs)
    # The devices run one program after the other, so only a program's own computation hides its transfers.
    host_waits = sum(count * program.host_waits for program, count in programs)
    return StepTime(
        matrix_units=products,
        memory=others,
        links=links,
        other_slices=other_slices,
        host_link=host_waits,
        # Python starts programs while the device is still running earlier ones.
        python=max(0.0, starts * program_start - device_seconds - host_waits),
        basis=basis,
        lanes=lanes,
    )
