"""A check, usable in any test, that frozen weights cost a step no additional memory.

It reads the compiler's final program, for whichever device it was compiled. Imports jax, `framework.layout` and the
program reader `framework.plan.hlo`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.extras.functions.leaf_selection import is_array, matching_paths
from plimsoll.extras.functions.lora_adapters import ArrayNode, QuantizedMatrix, find_arrays
from plimsoll.framework.layout import PyTree
from plimsoll.framework.plan.hlo.arrays import VMEM, Array, parse_stored_arrays
from plimsoll.framework.plan.hlo.computations import Instruction
from plimsoll.framework.plan.hlo.module import Module

# Operations that return memory that exists already, or that an inner computation allocated.
_VIEWS = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "opt-barrier", "domain"}
_VIEWS |= {"after-all", "add-dependency"}
# Joins the slices that a TPU has prefetched into one array.
_JOINED = 'custom_call_target="ConcatBitcast"'
# Operations that bring the operand of an upcoming product into the on-chip memory of a TPU.
_PREFETCHES = {"copy", "copy-done", "slice-done", "async-done"}
_MAX_LISTED_BUFFERS = 8
# An operation farther away than this does not help to identify a buffer.
_NAME_DISTANCE = 8


@dataclass(frozen=True)
class FrozenBuffer:
    """A buffer as large as a frozen leaf.

    Attributes:
        leaves: paths of the frozen leaves of this size.
        array: dtype and dimensions on one device.
        operation: operation that allocates it, as named by JAX: `jit(step)/transpose(jvp())/dot_general`.
        source: line of Python code behind the operation, "train.py:17"; "" if unknown.
    """

    leaves: tuple[str, ...]
    array: Array
    operation: str
    source: str

    def __str__(self) -> str:
        num_others = len(self.leaves) - 1
        others = f" (and {num_others} more of its size)" if num_others else ""
        source = f", {self.source}" if self.source else ""
        size = f"{self.array.num_bytes:,} bytes"
        return f"{self.array}, {size}, as large as {self.leaves[0]}{others}: {self.operation}{source}"


class FrozenBufferError(AssertionError):
    """Raised if a step allocates buffers as large as frozen leaves; `buffers` lists them."""

    def __init__(self, buffers: list[FrozenBuffer]):
        lines = "\n".join(f"  {buffer}" for buffer in buffers[:_MAX_LISTED_BUFFERS])
        advice = "Other arrays with as many elements count too: try another batch size to tell them apart."
        super().__init__(f"the step allocates {len(buffers)} buffers as large as frozen leaves:\n{lines}\n{advice}")
        self.buffers = buffers


def check_frozen(step: Callable[..., PyTree], *arguments: PyTree, frozen: PyTree, target: str | None = None) -> None:
    """Compile a step, and raise an error if it allocates another buffer of the size of a frozen leaf.

    Such a buffer is a gradient, a cast, a transposed copy or a result. Nothing is run. Sizes are compared by number of
    elements, for any dtype. Many other arrays have the size of a vector, so only leaves with at least two axes longer
    than 1 are checked. One layer at a time of a stack [layers, in, out] may be copied, or dequantized if the stack is a
    `QuantizedMatrix`; only stacked QuantizedMatrix leaves are checked. A frozen leaf that a TPU prefetches into its
    on-chip memory does not count as a buffer.

    Complexity: the compile time for the target, and one pass over the text of the compiled program.

    Args:
        step: a jitted function (also from `equinox.filter_jit`), or any function, which is then jitted.
        arguments: its positional arguments: trees of arrays or of `jax.ShapeDtypeStruct`s.
        frozen: a regex, searched in the paths of the arguments' leaves, which begin with the parameter name,
            "params/layers/query"; or the frozen leaves themselves, a tree of arrays.
        target: None compiles for the devices of this process, or for those in the arguments' shardings. Otherwise the
            name of a machine such as "v5e-1", which need not be present; arguments are replicated on its devices.

    Raises:
        FrozenBufferError: an AssertionError that lists the buffers, the leaves and the operations.
        ValueError: the regex matches no leaf; no frozen leaf has two axes; or an argument that is not frozen has as
            many elements as a frozen one, so that the size of a buffer is ambiguous.
    """
    named_arguments = _flatten_arguments(step, arguments)
    frozen_leaves = _frozen_leaves(named_arguments, frozen)
    paths_by_elements = _paths_by_elements(frozen_leaves)
    _check_others(named_arguments, frozen_leaves, paths_by_elements)
    target_arguments = arguments if target is None else _on_target(arguments, target)
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
    compiled = jitted.lower(*target_arguments).compile()
    # Equinox wraps jax's compiled object in its own class.
    executable = getattr(compiled, "compiled", compiled)
    buffers = list(_buffers(Module(executable.as_text()), paths_by_elements))
    if buffers:
        raise FrozenBufferError(buffers)


def _flatten_arguments(step: Callable[..., PyTree], arguments: tuple[PyTree, ...]) -> dict[str, ArrayNode]:
    """Return {path: array} of all arguments; a path begins with the parameter's name, or its number if unknown."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in positional]
    leaves: dict[str, ArrayNode] = {}
    for number, argument in enumerate(arguments):
        name = names[number] if number < len(names) else str(number)
        for path, leaf in find_arrays(argument).items():
            leaves[f"{name}/{path}" if path else name] = leaf
    return leaves


def _frozen_leaves(named_arguments: dict[str, ArrayNode], frozen: PyTree) -> dict[str, ArrayNode]:
    """Return {path: frozen leaf} for the leaves that can be identified by their size."""
    if isinstance(frozen, str):
        paths = matching_paths(frozen, named_arguments, "frozen")
        leaves = {path: named_arguments[path] for path in paths}
    else:
        leaves = find_arrays(frozen)
    matrices = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, QuantizedMatrix):
            # Without a stack, the whole matrix is dequantized, which is allowed.
            is_identifiable = leaf.num_stack_axes > 0
        else:
            # Many other arrays have the size of a vector.
            is_identifiable = sum(size > 1 for size in leaf.shape) >= 2
        if is_identifiable:
            matrices[path] = leaf
    if not matrices:
        shapes = ", ".join(f"{path} {list(leaf.shape)}" for path, leaf in list(leaves.items())[:3])
        raise ValueError(
            f"frozen: none of the {len(leaves)} leaves has two axes longer than 1 or is a 4-bit stack: "
            f"{shapes or 'no arrays'}"
        )
    return matrices


def _check_others(
    named_arguments: dict[str, ArrayNode], frozen_leaves: dict[str, ArrayNode], paths_by_elements: dict[int, list[str]]
) -> None:
    """Raise ValueError if an argument that is not frozen has the size of a frozen one."""
    frozen_ids = {id(array) for leaf in frozen_leaves.values() for array in jax.tree.leaves(leaf)}
    for path, leaf in named_arguments.items():
        for array in jax.tree.leaves(leaf):
            equal_paths = paths_by_elements.get(math.prod(array.shape), [])
            if equal_paths and path not in frozen_leaves and id(array) not in frozen_ids:
                raise ValueError(
                    f"{path} {list(array.shape)} is not frozen and has as many elements as {equal_paths[0]}, which is: "
                    "a buffer of this size could be either; use another batch size, rank or width"
                )


def _paths_by_elements(frozen_leaves: dict[str, ArrayNode]) -> dict[int, list[str]]:
    """Return {number of elements: paths of the frozen leaves that have as many, whole or on one device}."""
    paths: dict[int, list[str]] = {}
    for path, leaf in frozen_leaves.items():
        # The scales of a quantized matrix are left out: many other arrays have their size.
        array = leaf.codes if isinstance(leaf, QuantizedMatrix) else leaf
        # A set, because an unsharded array is its own shard.
        sharding = getattr(array, "sharding", None)
        shard_shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
        counts = {math.prod(array.shape), math.prod(shard_shape)}
        if isinstance(leaf, QuantizedMatrix):
            # One matrix at a time may be dequantized, not the stack.
            counts.add(math.prod(leaf.shape))
        for count in counts:
            paths.setdefault(count, []).append(path)
    return paths


def _on_target(arguments: tuple[PyTree, ...], target: str) -> tuple[PyTree, ...]:
    """Return the arguments as shapes, replicated on each device of a machine."""
    # Imported here because only a call with a target needs the machine tables.
    from plimsoll.framework.plan.targets import resolve, set_environment

    set_environment(target)
    devices = np.array(resolve(target).devices())
    replicated = NamedSharding(Mesh(devices, ("devices",)), PartitionSpec())

    def shape(leaf: PyTree) -> PyTree:
        if not is_array(leaf):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

    return jax.tree.map(shape, arguments)


# --- the program -----------------------------------------------------------------------------------------------------


def _buffers(module: Module, paths_by_elements: dict[int, list[str]]) -> Iterator[FrozenBuffer]:
    """Yield the buffers as large as a frozen leaf, in the order of the program's text."""
    # Computations whose values are not buffers: fusions, and the scalar functions of reductions.
    inner_computations = set()
    for instruction in module.instructions.values():
        if instruction.opcode == "fusion":
            inner_computations.add(instruction.get_called_computation("calls"))
        elif instruction.opcode != "call":
            inner_computations.add(instruction.get_called_computation("to_apply"))
    for instruction in module.instructions.values():
        # The start of an asynchronous transfer returns its operand as well; its end returns only the result.
        is_async_start = instruction.opcode.endswith(("-start", "-update"))
        is_view = instruction.opcode in _VIEWS or _JOINED in instruction.attributes
        if is_async_start or is_view or instruction.computation in inner_computations:
            continue
        for placed_array in parse_stored_arrays(instruction.type):
            leaves = tuple(paths_by_elements.get(math.prod(placed_array.array.dims), ()))
            is_prefetch = placed_array.space == VMEM and instruction.opcode in _PREFETCHES
            if leaves and not is_prefetch:
                line = module.source(instruction)
                # This file compiles the step but computes nothing in it.
                source = "" if line is None or line.file == __file__ else f"{Path(line.file).name}:{line.line}"
                yield FrozenBuffer(leaves, placed_array.array, _operation(module, instruction), source)


def _operation(module: Module, instruction: Instruction) -> str:
    """Return JAX's name of an operation. One that the compiler added is named after its nearest named operand."""
    operand: Instruction | None = instruction
    for _ in range(_NAME_DISTANCE):
        if operand is None or operand.op_name:
            break
        operand = next(iter(module.operands(operand)), None)
    name = operand.op_name if operand is not None else ""
    if operand is instruction and name:
        return name
    return f"{instruction.opcode} of {name}" if name else instruction.opcode
