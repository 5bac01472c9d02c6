"""Determines the trip count of a loop.

The CPU and GPU compilers write it into the text. In a TPU program it has to be inferred: the condition compares a
counter in the loop's carry with a bound, the body adds a step to the counter, and the counter has an initial value. Not
every loop counts from 0 by 1: loops of collective matrix products advance by 2, and loops whose first iteration was
peeled off start at 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from plimsoll.framework.plan.hlo.computations import Computations, Instruction

_MOVES = ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start")
# Longest chain of instructions that is followed to a value.
_DEPTH = 32


@dataclass(frozen=True)
class _Affine:
    """A carry element plus a constant; only the constant if `index` is None."""

    index: int | None
    offset: int


@dataclass(frozen=True)
class _Comparison:
    """A loop's condition: compares a counter in the carry with a bound; `inclusive` if it also runs at the bound."""

    counter: _Affine
    bound: _Affine
    inclusive: bool


def infer_trip_count(program: Computations, loop: Instruction) -> int | None:
    """Return the trip count of a loop; None if it cannot be inferred from the text.

    A counter whose initial value or step cannot be read is assumed to start at 0 and to advance by 1.

    Args:
        program: the program.
        loop: a while instruction in it.
    """
    if noted := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(noted[1])
    comparison = _comparison(program, loop.get_called_computation("condition"))
    if comparison is None or comparison.counter.index is None:
        return None
    counter = comparison.counter.index
    bound = comparison.bound
    # A bound in the carry is assumed to be constant during the loop.
    last = bound.offset if bound.index is None else _initial(program, loop, bound.index)
    if last is None:
        return None
    first = _initial(program, loop, counter) or 0
    distance = last - first - comparison.counter.offset
    step = _step(program, loop, counter)
    if distance * step < 0:
        return None
    iterations, remainder = divmod(abs(distance), abs(step))
    return iterations + (1 if remainder or comparison.inclusive else 0)


def _comparison(program: Computations, condition: str) -> _Comparison | None:
    root = program.root(condition)
    arguments = ()
    if root is not None and root.opcode == "fusion":
        # The comparison is inside the fusion, whose parameters represent its operands.
        arguments = root.operands
        root = program.root(root.get_called_computation("calls"))
    if root is None or root.opcode != "compare":
        return None
    left, right = (_affine(program, name, arguments) for name in root.operands)
    if left is None or right is None:
        return None
    inclusive = root.attribute("direction") in ("LE", "GE")
    # The counter is the side that is not a constant.
    if left.index is None:
        return _Comparison(right, left, inclusive)
    return _Comparison(left, right, inclusive)


def _step(program: Computations, loop: Instruction, counter: int) -> int:
    """Return the amount that one iteration adds to a counter in the carry; 1 if it cannot be read."""
    body = program.root(loop.get_called_computation("body"))
    if body is None or body.opcode != "tuple" or counter >= len(body.operands):
        return 1
    next_value = _affine(program, body.operands[counter])
    if next_value is None or next_value.index != counter:
        return 1
    # A step of 0 must be misread, because the loop would never end.
    return next_value.offset or 1


def _initial(program: Computations, loop: Instruction, index: int) -> int | None:
    """Return the constant initial value of a carry element; None if it is not a known constant."""
    start = program.instructions.get(loop.operands[0]) if loop.operands else None
    if start is None or start.opcode != "tuple" or index >= len(start.operands):
        return None
    value = _affine(program, start.operands[index])
    if value is None:
        return None
    if value.index is None:
        return value.offset
    # The loop is in the body of another loop, which passes the value on. If the value never changes, the outer loop's
    # initial value applies.
    outer = program.loops.get(loop.computation)
    root = program.root(loop.computation)
    if outer is None or root is None or root.opcode != "tuple":
        return None
    passed_on = _affine(program, root.operands[value.index])
    if passed_on != _Affine(value.index, 0):
        return None
    outer_value = _initial(program, outer, value.index)
    return None if outer_value is None else outer_value + value.offset


def _affine(program: Computations, name: str, arguments: tuple[str, ...] = (), depth: int = 0) -> _Affine | None:
    """Express a scalar in terms of the carry of its computation; None if that is not possible.

    Args:
        program: the program.
        name: name of the instruction that computes the scalar.
        arguments: inside a fusion, the names of the fusion's operands.
        depth: recursion depth.
    """
    instruction = program.instructions.get(name)
    if instruction is None or depth > _DEPTH:
        return None
    if instruction.opcode == "constant":
        text = instruction.operands[0]
        return _Affine(None, int(text)) if re.fullmatch(r"-?\d+", text) else None
    if instruction.opcode == "parameter" and arguments:
        return _affine(program, arguments[int(instruction.operands[0])], (), depth + 1)
    if instruction.opcode == "get-tuple-element":
        return _element(program, instruction, arguments, depth)
    if instruction.opcode in _MOVES:
        return _affine(program, instruction.operands[0], arguments, depth + 1)
    if instruction.opcode == "fusion" and not arguments:
        root = program.roots.get(instruction.get_called_computation("calls"), "")
        return _affine(program, root, instruction.operands, depth + 1)
    if instruction.opcode in ("add", "subtract"):
        left, right = (_affine(program, operand, arguments, depth + 1) for operand in instruction.operands)
        if left is None or right is None:
            return None
        sign = 1 if instruction.opcode == "add" else -1
        # The sum of two carry elements, or a negative one, is not a carry element plus a constant.
        if right.index is not None and (sign < 0 or left.index is not None):
            return None
        index = left.index if left.index is not None else right.index
        return _Affine(index, left.offset + sign * right.offset)
    return None


def _element(program: Computations, element: Instruction, arguments: tuple[str, ...], depth: int) -> _Affine | None:
    """Express an element of a tuple: of the carry, of a fusion with several results, or of a tuple instruction."""
    index = int(element.attribute("index"))
    source = program.instructions.get(element.operands[0])
    while source is not None and source.opcode == "opt-barrier":
        source = program.instructions.get(source.operands[0])
    if source is None or arguments:
        return None
    if source.opcode == "parameter":
        return _Affine(index, 0)
    if source.opcode == "tuple":
        return _affine(program, source.operands[index], arguments, depth + 1)
    if source.opcode == "fusion":
        root = program.root(source.get_called_computation("calls"))
        if root is not None and root.opcode == "tuple":
            return _affine(program, root.operands[index], source.operands, depth + 1)
    return None
