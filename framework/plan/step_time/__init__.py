"""How long a training step takes on TPU, by what the compiler says of the final program; no TPU is needed.

    rates.py        what a chip can do, and what is assumed where nothing is published or measured
    categories.py   what kind of work an instruction is
    attention.py    floating-point operations of attention kernels
    operations.py   each operation's time: the compiler's estimate, adjusted; its roof
    timeline.py     the schedule played through: what compute hides of the transfers to and from the host
    count.py        all of it together

These are no measurements: docs/speed.md tells how to read them.
"""

from framework.plan.step_time.count import StepCount, count
from framework.plan.step_time.rates import Rates

__all__ = ["Rates", "StepCount", "count"]
