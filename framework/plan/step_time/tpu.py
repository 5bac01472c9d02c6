"""Time of a program on TPU, from the compiler's own cycles: the result of `count`, as parts that add up."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.framework.plan.hlo.module import Module
from plimsoll.framework.plan.step_time.count import Part, count
from plimsoll.framework.plan.step_time.rates import Rates

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


def tpu_time(module: Module, rates: Rates) -> ProgramTime:
    """Return the time of one run of a program that was compiled for TPU.

    Collectives use all links of a chip in the best case and two in the worst. The result is the middle of the two and
    includes the exposed part of asynchronous collectives.

    Raises:
        ValueError: the text has no compiler estimates.
    """
    counted = count([Part(module, 1)], rates)
    products = 0.0
    for operation in counted.operations:
        if operation.category in PRODUCTS:
            products += operation.runs * operation.seconds
    fast = counted.at_all_links
    slow = counted.at_two_links
    fast_links = fast.collectives + counted.not_hidden_at_all_links
    slow_links = slow.collectives + counted.not_hidden_at_two_links
    return ProgramTime(
        products=products,
        others=fast.compute - products,
        links=(fast_links + slow_links) / 2,
        host_waits=(fast.waits + slow.waits) / 2,
        host_seconds=max(fast.moved.values()) / rates.pcie,
    )
