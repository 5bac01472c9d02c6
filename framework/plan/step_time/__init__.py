"""Estimates the time of a training step from its final program, without the device.

    time_breakdown.py  the estimate: seconds by bound
    compiled_time.py   time of a compiled step on any target
    tpu_time.py        time of a program on TPU, from the compiler's cycles; it uses:
        tpu_rates.py            speeds of a chip, and assumptions for those that are neither published nor measured
        work_categories.py      kinds of work
        attention_flops.py      FLOPs of attention kernels
        tpu_operations.py       time of each operation: the compiler's estimate, adjusted, and its roofline bound
        schedule_simulation.py  how much of the transfers to and from the host compute hides
        step_count.py           combines all of these
    gpu_time.py        time of a program on a GPU, from a roofline of its kernels, which gpu_kernels.py reads
    cpu_time.py        time of a program on CPU, from a roofline of its operations
    estimated_time.py  analytical estimate of a step that was not compiled, from the work that traced_work.py counts

These are estimates, not measurements: docs/plan.md and docs/speed.md explain how to read them.
"""

from plimsoll.framework.plan.step_time.tpu_operations import TpuRates
from plimsoll.framework.plan.step_time.tpu_time import StepCount, count

__all__ = ["StepCount", "TpuRates", "count"]
