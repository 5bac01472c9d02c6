"""Parses the compiler's final program from its text: `HloModule::ToString`, the same format for TPU, GPU and CPU.

arrays.py          array types: bytes, memory space, tile padding
computations.py    instructions with the line of Python of each, and the computations that contain them
module.py          run count of each computation, and the executed instructions with their run counts
trip_counts.py     trip counts of loops
flops.py           FLOPs of matrix products
memory_traffic.py  bytes that an instruction moves to and from memory
transfers.py       collectives, with the bytes that a chip receives from others, and transfers to and from the host
"""

from plimsoll.framework.plan.hlo.arrays import Array, arrays
from plimsoll.framework.plan.hlo.computations import Instruction
from plimsoll.framework.plan.hlo.module import Module

__all__ = ["Array", "Instruction", "Module", "arrays"]
