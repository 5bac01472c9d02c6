"""Bytes that an instruction moves to and from memory, tiles padded.

What counts: the arrays that it reads and writes whole; of a slice taken from a larger array the slice; of an update in
place the update. Fused intermediates count nothing: they are never stored.
"""

from __future__ import annotations

from framework.plan.hlo.arrays import HBM, VMEM, bytes_in, placed
from framework.plan.hlo.computations import Instruction
from framework.plan.hlo.module import Module

_SLICES = ("dynamic-slice", "gather", "slice")
_VIEWS = ("bitcast", "tuple")
_Use = tuple[Instruction, int]  # who reads a value, as which of its operands


class Traffic:
    """What the instructions of a program read and write."""

    def __init__(self, module: Module):
        self._module = module
        self._uses: dict[str, dict[str, list[_Use]]] = {}

    def hbm_bytes(self, instruction: Instruction) -> int:
        """Of the chip's main memory."""
        if instruction.opcode == "fusion":
            return self._of_fusion(instruction)
        if instruction.opcode == "dynamic-update-slice":
            update = self._module.instructions[instruction.operands[1]]
            return 2 * _all_bytes(update.type)  # it is read, and written into its place
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * bytes_in(instruction.type, HBM)
        return bytes_in(instruction.type, HBM) + sum(bytes_in(i.type, HBM) for i in self._module.operands(instruction))

    def vmem_bytes(self, instruction: Instruction) -> int:
        """Of the vector memory on the chip."""
        operands = self._module.operands(instruction)
        return bytes_in(instruction.type, VMEM) + sum(bytes_in(i.type, VMEM) for i in operands)

    def _of_fusion(self, fusion: Instruction) -> int:
        parameters = self._parameters(fusion)
        total = 0
        for index, name in enumerate(fusion.operands):
            operand = self._module.instructions.get(name)
            whole = bytes_in(operand.type, HBM) if operand else 0
            if whole and index in parameters:
                total += self._read(parameters[index], whole)
        root, results = self._module.root(fusion.called("calls")), placed(fusion.type)
        if root is not None and root.opcode == "tuple":
            for value, result in zip(self._module.operands(root), results, strict=False):
                total += min(result.padded_bytes, self._written(value)) if result.space == HBM else 0
        elif root is not None and results and results[0].space == HBM:
            total += min(bytes_in(fusion.type, HBM), self._written(root))
        return total

    def _parameters(self, fusion: Instruction) -> dict[int, Instruction]:
        """{index of the operand: the parameter that stands for it inside}"""
        inner = self._module.fused(fusion)
        return {int(i.operands[0]): i for i in inner if i.opcode == "parameter"}

    def _read(self, value: Instruction, whole: int) -> int:
        """Bytes that a computation reads of a value that is `whole` bytes large."""
        total = 0
        for reader, index in self._uses_in(value.computation).get(value.name, []):
            if reader.opcode in _SLICES and index == 0:
                total += _all_bytes(reader.type)
            elif reader.opcode == "dynamic-update-slice" and index == 0:
                continue  # updated in place: nothing of it is read
            elif reader.opcode in _VIEWS:
                total += self._read(reader, whole)
            elif reader.opcode == "fusion" and index in (inside := self._parameters(reader)):
                total += self._read(inside[index], whole)
            else:
                return whole
        return min(total, whole)

    def _written(self, value: Instruction) -> int:
        """Bytes that storing a value costs."""
        operands = self._module.operands(value)
        if value.opcode == "dynamic-update-slice":
            return _all_bytes(operands[1].type)
        if value.opcode == "bitcast" and operands:
            return self._written(operands[0])
        root = self._module.root(value.called("calls")) if value.opcode == "fusion" else None
        return self._written(root) if root is not None else _all_bytes(value.type)

    def _uses_in(self, computation: str) -> dict[str, list[_Use]]:
        if computation not in self._uses:
            uses: dict[str, list[_Use]] = {}
            for instruction in self._module.computations[computation]:
                if instruction.opcode != "parameter":
                    for index, name in enumerate(instruction.operands):
                        uses.setdefault(name, []).append((instruction, index))
            self._uses[computation] = uses
        return self._uses[computation]


def _all_bytes(text: str) -> int:
    return sum(one.padded_bytes for one in placed(text))
