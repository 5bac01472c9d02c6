"""Time of a program on TPU, from the compiler's own cycles: the result of `count`, as parts that add up."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.framework.plan.hlo.module import Module
from plimsoll.framework.plan.step_time.step_count import StepProgram, count
from plimsoll.framework.plan.step_time.tpu_rates import TpuRates

# Categories whose time is attributed to the matrix units.
PRODUCTS = ("matmul", "collective matmul", "attention")


class ProgramTime(NamedTuple):
    """Seconds of one run of a program on an accelerator.

    Attributes:
        products: seconds of matrix products and attention kernels.
        others: seconds of everything else that the cores do.
        links: seconds of collectives that compute does not hide.
        host_waits: seconds of waiting for host transfers that the program itself does not hide.
        host_seconds: seconds that the host link is busy in the busier direction, hidden or not.
    """

    products: float
    others: float
    links: float
    host_waits: float
    host_seconds: float


def tpu_time(module: Module, rates: TpuRates) -> ProgramTime:
    """Return the time of one run of a program that was compiled for TPU.

    Collectives use all links of a chip in the best case and two in the worst. The result is the middle of the two and
    includes the exposed part of asynchronous collectives.

    Args:
        module: the program.
        rates: rates of the chip.

    Raises:
        ValueError: the text has no compiler estimates.
    """
    step_count = count([StepProgram(module, 1)], rates)
    products = 0.0
    for operation in step_count.operations:
        if operation.category in PRODUCTS:
            products += operation.runs * operation.seconds
    fast = step_count.at_all_links
    slow = step_count.at_two_links
    fast_links = fast.collectives + step_count.not_hidden_at_all_links
    slow_links = slow.collectives + step_count.not_hidden_at_two_links
    return ProgramTime(
        products=products,
        others=fast.compute - products,
        links=(fast_links + slow_links) / 2,
        host_waits=(fast.waits + slow.waits) / 2,
        host_seconds=max(fast.moved.values()) / rates.pcie,
    )
