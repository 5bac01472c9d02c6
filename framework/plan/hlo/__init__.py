"""Parses the compiler's final program from its text: `HloModule::ToString`, the same format for TPU, GPU and CPU.

arrays.py                 array types: bytes, memory space, tile padding
computations.py           instructions, and the computations that contain them
module.py                 run count of each computation
executed_instructions.py  the executed instructions, with their run counts
source_lines.py           the line of Python that an instruction comes from
trip_counts.py            trip counts of loops
flops.py                  FLOPs of matrix products
memory_traffic.py         bytes that an instruction moves to and from memory
collectives.py            bytes that a chip receives from other chips
host_transfers.py         transfers between device and host memory
"""

from plimsoll.framework.plan.hlo.arrays import Array, arrays
from plimsoll.framework.plan.hlo.computations import Instruction
from plimsoll.framework.plan.hlo.module import Module

__all__ = ["Array", "Instruction", "Module", "arrays"]
