"""The compiler's final program, read from its text: `HloModule::ToString`, the same for TPU, GPU and CPU.

arrays.py       array types: bytes, memory space, padding of tiles
computations.py instructions, and the computations that they are in
module.py       how often each computation runs
source.py       the line of Python that an instruction comes from
trips.py        how often a loop runs
flops.py        floating-point operations of matrix products
traffic.py      bytes that an instruction moves to and from memory
collectives.py  bytes that a chip receives from others
host.py         transfers between device and host memory
"""

from framework.plan.hlo.arrays import Array, arrays
from framework.plan.hlo.computations import Instruction
from framework.plan.hlo.module import Module

__all__ = ["Array", "Instruction", "Module", "arrays"]
