"""Time of a program on CPU: a roofline (Williams et al. 2009, doi 10.1145/1498765.1498785) of each operation.

An operation takes as long as its matrix products, its bytes, its elementwise arithmetic or its transcendental
functions, whichever takes longest, at rates that `plimsoll calibrate` measures. The speed of memory depends on the
working set: a loop over a few megabytes stays in the caches, a whole step does not.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from plimsoll.framework.plan.hlo.arrays import arrays
from plimsoll.framework.plan.hlo.computations import Instruction
from plimsoll.framework.plan.hlo.flops import Flops
from plimsoll.framework.plan.hlo.memory_traffic import Traffic
from plimsoll.framework.plan.hlo.module import Module, iter_executed
from plimsoll.framework.plan.step_time.device_rates import DeviceRates
from plimsoll.framework.plan.step_time.work_categories import is_work

_TRANSCENDENTAL = {
    "cosine", "divide", "erf", "exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "power",
    "rsqrt", "sine", "sqrt", "tanh",
}  # fmt: skip
_ARITHMETIC = {
    "abs", "add", "and", "clamp", "compare", "convert", "maximum", "minimum", "multiply", "negate", "not", "or",
    "reduce", "select", "subtract", "xor",
}  # fmt: skip
_BATCH = re.compile(r"lhs_batch_dims=\{([\d,]+)\}")
# Seconds that XLA needs to start an operation.
_START = 5e-7


@dataclass(frozen=True)
class CpuTime:
    """Seconds of a program, or of all programs of a step.

    Attributes:
        products: seconds of operations that contain matrix products.
        others: seconds of all other operations.
        collectives: seconds of exchanges between devices, which are copies on CPU.
    """

    products: float = 0.0
    others: float = 0.0
    collectives: float = 0.0


def cpu_time(module: Module, rates: DeviceRates, peak_bytes: int) -> CpuTime:
    """Return the time of one run of a program.

    Args:
        module: the program, compiled for CPU.
        rates: rates of the CPU.
        peak_bytes: peak memory of the program in bytes, an upper bound of every working set.
    """
    flops = Flops(module)
    traffic = Traffic(module)
    # The working set of each computation, in bytes.
    working_sets: dict[str, float] = {}
    products = 0.0
    others = 0.0
    collective_bytes = 0.0
    for instruction, runs in iter_executed(module):
        if not is_work(instruction):
            continue
        num_bytes = traffic.hbm_bytes(instruction)
        computation = instruction.computation
        if computation not in working_sets:
            working_sets[computation] = _measure_working_set(module, traffic, computation, peak_bytes)
        memory_rate = rates.curve("memory").rate(working_sets[computation])
        seconds = _START + num_bytes / memory_rate
        product_flops = flops.look_up(instruction)
        if product_flops:
            products += runs * max(seconds, _product_seconds(module, rates, instruction, product_flops))
        elif instruction.opcode.startswith(("all-", "reduce-scatter", "collective-")):
            collective_bytes += runs * seconds
        else:
            # Arithmetic and transcendental functions overlap, too.
            arithmetic = _operations(module, instruction, _ARITHMETIC)
            transcendental = _operations(module, instruction, _TRANSCENDENTAL)
            arithmetic_seconds = rates.curve("arithmetic").seconds(arithmetic)
            transcendental_seconds = rates.curve("transcendental").seconds(transcendental)
            others += runs * max(seconds, arithmetic_seconds, transcendental_seconds)
    return CpuTime(products, others, collective_bytes)


def _measure_working_set(module: Module, traffic: Traffic, computation: str, peak_bytes: int) -> float:
    """Return the bytes that a computation, which is a loop's body or the whole program, uses repeatedly."""
    moved = 0
    for instruction, runs in iter_executed(module, computation):
        if is_work(instruction):
            moved += runs * traffic.hbm_bytes(instruction)
    # Halve the traffic, because arrays are both written and read, at least once each.
    return max(1.0, min(moved / 2, peak_bytes))


def _product_seconds(module: Module, rates: DeviceRates, instruction: Instruction, product_flops: int) -> float:
    batch = _BATCH.search(instruction.attributes)
    if batch is None:
        return rates.curve("product f32").seconds(product_flops)
    left_dims = arrays(module.operands(instruction)[0].type)[0].dims
    count = math.prod(left_dims[int(axis)] for axis in batch[1].split(","))
    if count == 1:
        return rates.curve("product f32").seconds(product_flops)
    return product_flops / rates.curve("batched product").rate(product_flops / count)


def _operations(module: Module, instruction: Instruction, opcodes: set[str]) -> int:
    """Count the elements that an instruction, including everything fused into it, computes with the given opcodes."""
    if instruction.opcode == "fusion":
        return sum(_operations(module, inner, opcodes) for inner in module.get_fused_instructions(instruction))
    if instruction.opcode not in opcodes:
        return 0
    shaped = instruction
    if instruction.opcode == "reduce":
        # Each element of the operand is combined once.
        shaped = module.operands(instruction)[0]
    instruction_arrays = arrays(shaped.type)
    return math.prod(instruction_arrays[0].dims) if instruction_arrays else 0
