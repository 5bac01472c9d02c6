"""Lists the instructions that a program executes, with run counts: loops by trip count, and only the longest branch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from plimsoll.framework.plan.hlo.computations import Instruction
from plimsoll.framework.plan.hlo.module import Module


class ExecutedInstruction(NamedTuple):
    """An instruction, and the number of times it runs in one execution of the program."""

    instruction: Instruction
    runs: int


def iter_executed(module: Module, computation: str = "", runs: int = 1) -> Iterator[ExecutedInstruction]:
    """Yield the instructions that a computation executes, in the order of the text.

    Loops, branches and calls are replaced by the instructions that they execute; fusions are single instructions. Loop
    conditions are ignored, because their cost is negligible.

    Args:
        module: the program.
        computation: name of the computation; "" means the whole program.
        runs: number of times the computation runs.
    """
    for instruction in module.computations.get(computation or module.entry, []):
        if instruction.opcode == "while":
            yield from iter_executed(
                module, instruction.get_called_computation("body"), runs * module.trip_count(instruction)
            )
        elif instruction.opcode == "conditional":
            yield from iter_executed(module, longest_branch(module, instruction), runs)
        elif instruction.opcode == "call":
            yield from iter_executed(module, instruction.get_called_computation("to_apply"), runs)
        else:
            yield ExecutedInstruction(instruction, runs)


def longest_branch(module: Module, conditional: Instruction) -> str:
    """Return the branch of a conditional with the most estimated cycles.

    Args:
        module: the program.
        conditional: a conditional in it.
    """

    def cycles(branch: str) -> int:
        total = 0
        for instruction, runs in iter_executed(module, branch):
            # Instructions without an estimate, such as tuples, take no time.
            total += (instruction.estimated_cycles or 0) * runs
        return total

    return max(module.branches(conditional), key=cycles)
