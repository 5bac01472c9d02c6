"""Estimates the time of a training step from its final program, without the device.

    parts.py          the estimate: seconds by what bounds them
    compiled_time.py  time of a compiled step on any target
    tpu.py            time of a program on TPU, from the compiler's cycles; it uses:
        rates.py        speeds of a chip, and assumptions for those that are neither published nor measured
        categories.py   kinds of work
        attention.py    FLOPs of attention kernels
        operations.py   time of each operation: the compiler's estimate, adjusted, and its roofline bound
        timeline.py     simulation of the schedule: how much of the transfers to and from the host compute hides
        count.py        combines all of these
    gpu.py            time of a program on a GPU, from a roofline of its kernels, which gpu_kernels.py reads
    cpu.py            time of a program on CPU, from a roofline of its operations
    estimate_for_target.py    analytical estimate of a step that was not compiled, from the work that traced.py counts

These are estimates, not measurements: docs/plan.md and docs/speed.md explain how to read them.
"""

from plimsoll.framework.plan.step_time.step_count import StepCount, count
from plimsoll.framework.plan.step_time.tpu_rates import TpuRates

__all__ = ["StepCount", "TpuRates", "count"]
