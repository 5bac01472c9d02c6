"""Counts the bytes that an instruction moves to and from memory, including tile padding.

Arrays that are read or written whole count fully; a slice of a larger array counts only the slice, and an in-place
update only the update. Fused intermediates count as 0, because they are never stored.
"""

from __future__ import annotations

from plimsoll.framework.plan.hlo.arrays import HBM, VMEM, bytes_in, parse_stored_arrays
from plimsoll.framework.plan.hlo.computations import Instruction
from plimsoll.framework.plan.hlo.module import Module

_SLICES = ("dynamic-slice", "gather", "slice")
_VIEWS = ("bitcast", "tuple")
# The instruction that reads a value, and the index of the value among its operands.
_Use = tuple[Instruction, int]


class Traffic:
    """The bytes that the instructions of a program read and write."""

    def __init__(self, module: Module):
        self._module = module
        self._uses: dict[str, dict[str, list[_Use]]] = {}

    def hbm_bytes(self, instruction: Instruction) -> int:
        """Return the bytes moved to and from the chip's main memory."""
        if instruction.opcode == "fusion":
            return self._count_fusion_reads(instruction) + self._count_fusion_writes(instruction)
        if instruction.opcode == "dynamic-update-slice":
            # The update is read and then written into the array.
            update = self._module.instructions[instruction.operands[1]]
            return 2 * _all_bytes(update.type)
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * bytes_in(instruction.type, HBM)
        operands = self._module.operands(instruction)
        return bytes_in(instruction.type, HBM) + sum(bytes_in(operand.type, HBM) for operand in operands)

    def vmem_bytes(self, instruction: Instruction) -> int:
        """Return the bytes moved to and from the on-chip vector memory."""
        operands = self._module.operands(instruction)
        return bytes_in(instruction.type, VMEM) + sum(bytes_in(operand.type, VMEM) for operand in operands)

    def _count_fusion_reads(self, fusion: Instruction) -> int:
        parameters = self._parameters(fusion)
        total = 0
        for index, name in enumerate(fusion.operands):
            operand = self._module.instructions.get(name)
            size = bytes_in(operand.type, HBM) if operand else 0
            if size and index in parameters:
                total += self._count_read_bytes(parameters[index], size)
        return total

    def _count_fusion_writes(self, fusion: Instruction) -> int:
        root = self._module.root(fusion.get_called_computation("calls"))
        results = parse_stored_arrays(fusion.type)
        if root is None:
            return 0
        if root.opcode != "tuple":
            if not results or results[0].space != HBM:
                return 0
            return min(bytes_in(fusion.type, HBM), self._count_written_bytes(root))
        total = 0
        for value, result in zip(self._module.operands(root), results, strict=False):
            if result.space == HBM:
                total += min(result.padded_bytes, self._count_written_bytes(value))
        return total

    def _parameters(self, fusion: Instruction) -> dict[int, Instruction]:
        """Return {operand index: the parameter that represents it inside the fusion}."""
        parameters = {}
        for inner in self._module.get_fused_instructions(fusion):
            if inner.opcode == "parameter":
                parameters[int(inner.operands[0])] = inner
        return parameters

    def _count_read_bytes(self, value: Instruction, size: int) -> int:
        """Return the bytes that a computation reads of a value with `size` bytes."""
        total = 0
        for reader, index in self._uses_in(value.computation).get(value.name, []):
            if reader.opcode in _SLICES and index == 0:
                total += _all_bytes(reader.type)
            elif reader.opcode == "dynamic-update-slice" and index == 0:
                # The value is updated in place, so none of it is read.
                continue
            elif reader.opcode in _VIEWS:
                total += self._count_read_bytes(reader, size)
            elif reader.opcode == "fusion" and index in (inner_parameters := self._parameters(reader)):
                total += self._count_read_bytes(inner_parameters[index], size)
            else:
                return size
        # Slices may overlap.
        return min(total, size)

    def _count_written_bytes(self, value: Instruction) -> int:
        """Return the bytes that are written to store a value."""
        operands = self._module.operands(value)
        if value.opcode == "dynamic-update-slice":
            return _all_bytes(operands[1].type)
        if value.opcode == "bitcast" and operands:
            return self._count_written_bytes(operands[0])
        root = self._module.root(value.get_called_computation("calls")) if value.opcode == "fusion" else None
        if root is None:
            return _all_bytes(value.type)
        return self._count_written_bytes(root)

    def _uses_in(self, computation: str) -> dict[str, list[_Use]]:
        if computation not in self._uses:
            uses: dict[str, list[_Use]] = {}
            for instruction in self._module.computations[computation]:
                # A parameter's operand is its number, not a name.
                if instruction.opcode != "parameter":
                    for index, name in enumerate(instruction.operands):
                        uses.setdefault(name, []).append((instruction, index))
            self._uses[computation] = uses
        return self._uses[computation]


def _all_bytes(text: str) -> int:
    return sum(array.padded_bytes for array in parse_stored_arrays(text))
