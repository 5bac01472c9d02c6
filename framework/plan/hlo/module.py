"""A parsed program, the run count of each of its computations, and the instructions that it executes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from plimsoll.framework.plan.grouped_products import count_further_rounds
from plimsoll.framework.plan.hlo.arrays import arrays
from plimsoll.framework.plan.hlo.computations import NAMES, Computations, Instruction
from plimsoll.framework.plan.hlo.trip_counts import infer_trip_count

_CALLED = re.compile(r"(calls|to_apply|called_computations|branch_computations|body)=(\{[^}]*\}|%[\w.\-]+)")
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


class Module(Computations):
    """A parsed program, with or without a schedule, and the run counts of its parts."""

    def trip_count(self, loop: Instruction) -> int:
        """Return the trip count of a loop; 1 if its text does not contain it."""
        rounds = count_further_rounds(loop.op_name)
        if rounds is not None:
            return rounds
        return infer_trip_count(self, loop) or 1

    @cached_property
    def unknown_loops(self) -> list[Instruction]:
        """Loops whose trip count is not known from the text; they count once."""
        loops = [loop for loop in self.loops.values() if count_further_rounds(loop.op_name) is None]
        return [loop for loop in loops if infer_trip_count(self, loop) is None]

    @cached_property
    def _runs(self) -> Counter[str]:
        return Counter({self.entry: 1})

    @cached_property
    def _callers(self) -> dict[str, list[tuple[str, int]]]:
        """{computation: [(calling computation, number of calls per run of it)]}."""
        callers: dict[str, list[tuple[str, int]]] = {}
        for i in self.instructions.values():
            for role, names in _CALLED.findall(i.attributes):
                for name in NAMES.findall(names):
                    times = self.trip_count(i) if role == "body" else 1
                    callers.setdefault(name, []).append((i.computation, times))
        return callers

    def runs(self, computation: str) -> int:
        """Return the number of times a computation runs in one execution of the program."""
        if computation not in self._runs:
            callers = self._callers.get(computation, [])
            self._runs[computation] = sum(self.runs(caller) * times for caller, times in callers)
        return self._runs[computation]

    def collective_bytes(self) -> dict[str, int]:
        """Return the bytes that a device exchanges, by kind of collective: the larger of operands and results."""
        bytes_by_channel: dict[tuple[str, str], int] = {}
        for instruction in self.instructions.values():
            kind = instruction.opcode.removesuffix("-start")
            runs = self.runs(instruction.computation) if kind in _COLLECTIVES else 0
            if runs:
                channel = re.search(r"channel_id=(\d+)", instruction.attributes)
                # An asynchronous collective may appear twice in the text, with the same channel.
                key = (kind, channel[1] if channel else instruction.name)
                operands = self.operands(instruction)
                # The operands of a ragged one are the rows, and the array that they are written to.
                if kind == "ragged-all-to-all":
                    operands = operands[:1]
                operand_bytes = sum(operand.num_bytes for operand in operands)
                result_bytes = instruction.num_bytes
                # An instruction that starts an asynchronous collective returns its operands too.
                if instruction.opcode.endswith("-start"):
                    result_bytes -= operand_bytes
                size = max(operand_bytes, result_bytes)
                bytes_by_channel[key] = max(bytes_by_channel.get(key, 0), size * runs)
        totals: Counter[str] = Counter()
        for (kind, _), size in bytes_by_channel.items():
            totals[kind] += size
        return dict(totals)

    def host_bytes(self) -> int:
        """Return the bytes moved between device and host memory, both ways; 0 if the text has no memory spaces."""
        total = 0
        for instruction in self.instructions.values():
            is_move = instruction.opcode in ("copy", "copy-start", "dynamic-update-slice", "dynamic-slice")
            if not is_move or not instruction.operands:
                continue
            source = self.instructions.get(instruction.operands[0])
            source_arrays = arrays(source.type) if source else []
            result_arrays = arrays(instruction.type)
            if not source_arrays or not result_arrays:
                continue
            # The first result of a copy-start is its destination.
            result = result_arrays[0]
            if result.on_host != source_arrays[0].on_host:
                total += result.num_bytes * self.runs(instruction.computation)
        return total


def iter_executed(module: Module, computation: str = "", runs: int = 1) -> Iterator[tuple[Instruction, int]]:
    """Yield (instruction, number of runs) for what a computation executes, in the order of the text.

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
            yield instruction, runs


def longest_branch(module: Module, conditional: Instruction) -> str:
    """Return the branch of a conditional with the most estimated cycles.

    Args:
        module: the program.
        conditional: a conditional in it.
    """
    cycles: Counter[str] = Counter()
    for branch in module.branches(conditional):
        # Instructions without an estimate, such as tuples, take no time.
        cycles[branch] = sum((one.estimated_cycles or 0) * runs for one, runs in iter_executed(module, branch))
    return max(cycles, key=lambda branch: cycles[branch])
