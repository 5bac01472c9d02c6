"""How long a training step takes, by the final program, without the device.

    parts.py          the estimate: seconds by what bounds them
    compiled_time.py  of a compiled step, for whatever it was compiled for
    tpu.py            of a program on TPU, by the compiler's cycles, which these count:
        rates.py        what a chip can do, and what is assumed where nothing is published or measured
        categories.py   what kind of work an instruction is
        attention.py    floating-point operations of attention kernels
        operations.py   each operation's time: the compiler's estimate, adjusted; its roof
        timeline.py     the schedule played through: what compute hides of transfers to and from the host
        count.py        all of it together
    gpu.py            of a program on a GPU, by a roofline of its kernels, which gpu_kernels.py reads
    cpu.py            of a program on CPU, by a roofline of its operations
    closed_form.py    of a step that was never compiled, by the work that traced.py reads off the traced program

These are no measurements: docs/plan.md and docs/speed.md tell how to read them.
"""

from framework.plan.step_time.count import StepCount, count
from framework.plan.step_time.rates import Rates

__all__ = ["Rates", "StepCount", "count"]
