"""Estimates the time of a compiled step on any target."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.framework.devices.accelerators import AcceleratorSpec
from plimsoll.framework.plan.compilation import CompiledProgram
from plimsoll.framework.plan.hlo.module import Module
from plimsoll.framework.plan.step_time import rates_store
from plimsoll.framework.plan.step_time.cpu_time import cpu_time
from plimsoll.framework.plan.step_time.device_rates import (
    PROGRAM_START,
    DeviceRates,
    assume_cpu_rates,
    assume_gpu_rates,
)
from plimsoll.framework.plan.step_time.gpu_time import gpu_time
from plimsoll.framework.plan.step_time.time_breakdown import StepTime
from plimsoll.framework.plan.step_time.tpu_rates import TpuRates
from plimsoll.framework.plan.step_time.tpu_time import ProgramTime, tpu_time
from plimsoll.framework.plan.targets import Target

_UNVALIDATED = "not validated by a run"


class _Run(NamedTuple):
    """A program of a step, and the number of times it runs."""

    compiled: CompiledProgram
    runs: int


def estimate_compiled_time(calls: Sequence[CompiledProgram], target: Target, peak_bytes: int) -> StepTime | None:
    """Return the time of a step; None if the rates of the target are unknown or there is no program text.

    Args:
        calls: programs of the step in order, one entry per run.
        target: the machine that they were compiled for.
        peak_bytes: peak memory per device.
    """
    # Runs of the same program are the same object, so each program is analyzed only once.
    counts = Counter(map(id, calls))
    programs = [_Run(compiled, counts[id(compiled)]) for compiled in {id(call): call for call in calls}.values()]
    # A program that the compiler refused, or that came from a compilation cache, has no buffers.
    if any(program.compiled.buffers is None for program in programs):
        return None
    if target.platform == "cpu":
        return _on_cpu(programs, target, peak_bytes)
    try:
        if target.platform == "tpu":
            return _on_tpu(programs, target)
        return _on_gpu(programs, target.spec)
    except ValueError:
        return None


def load_rates(spec: AcceleratorSpec, cores: int) -> DeviceRates | None:
    """Return the measured rates of a device, else assumed ones.

    Args:
        spec: the device.
        cores: number of cores, for the assumed rates of a CPU.
    """
    measured = rates_store.load(spec.name)
    if measured is not None:
        return measured
    return assume_cpu_rates(cores) if spec.platform == "cpu" else assume_gpu_rates(spec)


def _on_cpu(programs: Sequence[_Run], target: Target, peak_bytes: int) -> StepTime:
    rates = load_rates(target.spec, os.cpu_count() or 1)
    assert rates is not None
    products = 0.0
    others = 0.0
    copies = 0.0
    starts = 0
    for compiled, runs in programs:
        assert compiled.buffers is not None
        program_time = cpu_time(compiled.buffers.module, rates, peak_bytes)
        products += runs * program_time.products
        others += runs * program_time.others
        copies += runs * program_time.collectives
        starts += runs
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
        python=starts * rates.program_start,
        basis=basis,
    )


def _on_tpu(programs: Sequence[_Run], target: Target) -> StepTime:
    rates = TpuRates.look_up(target.spec)
    measured = rates_store.load(target.spec.name)
    if measured is not None and measured.host_link is not None:
        rates = rates._replace(pcie=measured.host_link)
    times = [(tpu_time(Module(compiled.text), rates), runs) for compiled, runs in programs]
    start = PROGRAM_START if measured is None else measured.program_start
    return _sum_times(
        times, start, f"the TPU compiler's cycles for each operation of the final program; {_UNVALIDATED}"
    )


def _on_gpu(programs: Sequence[_Run], spec: AcceleratorSpec) -> StepTime | None:
    rates = load_rates(spec, cores=0)
    if rates is None:
        return None
    times = [(gpu_time(Module(compiled.text), spec, rates), runs) for compiled, runs in programs]
    if rates.measured:
        basis = f"roofline of the program's kernels, by rates measured on {rates.measured} (plimsoll calibrate)"
    else:
        basis = f"roofline of the program's kernels, at 70% of peak FLOP/s and 85% of peak bandwidth; {_UNVALIDATED}"
    return _sum_times(times, rates.program_start, basis)


def _sum_times(times: Sequence[tuple[ProgramTime, int]], program_start: float, basis: str) -> StepTime:
    """Add up the times of a step's programs on an accelerator.

    Args:
        times: (time of one run, number of runs) of each program.
        program_start: seconds that Python needs to start a program.
        basis: sentence that describes the estimate.
    """
    products = sum(runs * program.products for program, runs in times)
    others = sum(runs * program.others for program, runs in times)
    links = sum(runs * program.links for program, runs in times)
    device_seconds = products + others + links
    starts = sum(runs for _, runs in times)
    if starts == 1:
        host_waits = times[0][0].host_waits
    else:
        # The schedule prefetches state, so programs that move it overlap with those that compute.
        host_seconds = sum(runs * program.host_seconds for program, runs in times)
        host_waits = max(0.0, host_seconds - device_seconds)
    return StepTime(
        matrix_units=products,
        memory=others,
        links=links,
        host_link=host_waits,
        # Python starts programs while the device is still running earlier ones.
        python=max(0.0, starts * program_start - device_seconds - host_waits),
        basis=basis,
    )
