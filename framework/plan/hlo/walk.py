"""The instructions that a program executes, with how often: loops by their trip counts, of branches the longest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from framework.plan.hlo.computations import Instruction
from framework.plan.hlo.module import Module


class Executed(NamedTuple):
    """An instruction, and how often it runs in one execution of the program."""

    instruction: Instruction
    runs: int


def executed(module: Module, computation: str = "", runs: int = 1) -> Iterator[Executed]:
    """The instructions that a computation (without a name: the program) executes, in the order of the text.

    Loops, branches and calls are replaced by what they execute; fusions are single instructions. A loop's condition
    costs nothing worth counting.
    """
    for instruction in module.computations.get(computation or module.entry, []):
        if instruction.opcode == "while":
            yield from executed(module, instruction.called("body"), runs * module.trip_count(instruction))
        elif instruction.opcode == "conditional":
            yield from executed(module, longest_branch(module, instruction), runs)
        elif instruction.opcode == "call":
            yield from executed(module, instruction.called("to_apply"), runs)
        else:
            yield Executed(instruction, runs)


def longest_branch(module: Module, conditional: Instruction) -> str:
    """The branch with the most estimated cycles."""

    def cycles(branch: str) -> int:
        total = 0
        for instruction, runs in executed(module, branch):
            # Instructions without an estimate, such as tuples, take no time.
            total += (instruction.estimated_cycles or 0) * runs
        return total

    return max(module.branches(conditional), key=cycles)
