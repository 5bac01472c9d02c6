"""The time of a program on TPU, by the compiler's own cycles: what `count` finds, as parts that add up."""

from __future__ import annotations

from typing import NamedTuple

from framework.plan.hlo.module import Module
from framework.plan.step_time.count import Part, count
from framework.plan.step_time.rates import Rates

# Operations whose time is that of the matrix units.
PRODUCTS = ("matmul", "collective matmul", "attention")


class ProgramTime(NamedTuple):
    """Seconds of one run of a program on an accelerator.

    Attributes:
        products: of matrix products and attention kernels.
        others: of everything else that the cores do.
        links: of collectives that nothing hides.
        host_waits: for transfers to and from the host that the program itself does not hide.
        host_seconds: of the host link in the busier direction, hidden or not.
    """

    products: float
    others: float
    links: float
    host_waits: float
    host_seconds: float


def tpu_time(module: Module, rates: Rates) -> ProgramTime:
    """The time of one run of a program that was compiled for TPU.

    Collectives have all links of a chip at best, and two at worst; the middle is taken, with what is not hidden of the
    asynchronous ones.

    Raises:
        ValueError: the text has no estimates of the compiler.
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
