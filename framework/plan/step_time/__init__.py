"""Estimates the time of a training step from its final program, without the device.

    time_breakdown.py       the estimate: seconds by bound
    compiled_time.py        time of a compiled step on any target
    tpu_time.py             time of a program on TPU, from the compiler's cycles
    tpu_operations.py       speeds of a TPU, and time of each operation: the compiler's estimate, adjusted
    gpu_time.py             kernels of a program on a GPU, and its time from a roofline of each kernel
    cpu_time.py             time of a program on CPU, from a roofline of its operations
    work_categories.py      kinds of work, and FLOPs of attention kernels
    schedule_simulation.py  how much of the transfers to and from the host compute hides
    device_rates.py         rates that a device reaches, measured or assumed
    estimated_time.py       analytical estimate of a step that was not compiled, from its traced work

These are estimates, not measurements: docs/plan.md and docs/speed.md explain how to read them.
"""

from plimsoll.framework.plan.step_time.tpu_operations import TpuRates
from plimsoll.framework.plan.step_time.tpu_time import StepCount, count

__all__ = ["StepCount", "TpuRates", "count"]
