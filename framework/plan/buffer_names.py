"""Assigns each buffer a breakdown group and a readable name.

Arguments are leaves of the layout and are found by name. The first match names a temporary: a copy of an argument (XLA
often keeps one in another tiling, and sharded weights are gathered); a gradient, if the backward pass made it in the
shape of a trainable parameter, of one layer of it, or of its unsharded form; otherwise the layer and operation that
made it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.framework.layout import StateLayout
from plimsoll.framework.plan.buffers import Buffers, BufferValue, PeakBlock
from plimsoll.framework.plan.hlo import Instruction, Module, arrays

# Maps the layout's groups to the report's groups (`plan_report.BREAKDOWN_KEYS`).
REPORT_GROUPS = {"parameter": "parameters", "frozen": "frozen", "buffer": "buffers", "optimizer": "optimizer_state"}
REPORT_GROUPS |= {"ema": "ema", "gradient": "gradients", "counter": "other", "pending": "other"}
REPORT_GROUPS |= {"spare": "optimizer_state", "spare_ema": "ema"}
_MOVES = {"copy", "copy-start", "copy-done", "bitcast", "transpose", "reshape", "bitcast-convert", "convert", "slice"}
_MOVES |= {"dynamic-slice", "all-gather", "all-gather-start", "all-gather-done", "slice-start", "slice-done"}
# A fusion that only moves an array may also contain these, which compute the indices.
_INDEX_OPCODES = {"parameter", "constant", "compare", "select", "add", "get-tuple-element", "tuple", "custom-call"}
_PER_LAYER_SUFFIX = "/saved per layer"
_IGNORED_SCOPES = {
    "while",
    "body",
    "cond",
    "closed_call",
    "checkpoint",
    "rematted_computation",
    "shard_map",
    "core_call",
}
_Dims = tuple[int, ...]
_PathsByDims = dict[_Dims, list[str]]
# The name of an instruction and the index into the tuple that it returns; () if it returns an array.
_TupleElement = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class NamedBuffer:
    """A buffer in the report; `bytes` are per device."""

    name: str
    group: str
    bytes: int
    shape: str


@dataclass(frozen=True)
class _PathsByShape:
    """Paths of leaves by their dimensions, which are sorted and exclude those of size 1.

    Attributes:
        sharded: shards of trainable parameters, stacked or of one layer.
        unsharded: one layer of trainable parameters, unsharded.
        offloaded: shards of offloaded leaves.
    """

    sharded: _PathsByDims
    unsharded: _PathsByDims
    offloaded: _PathsByDims


def name_buffers(buffers: Buffers, layout: StateLayout) -> list[NamedBuffer]:
    """Return every buffer alive at the peak whose group is known, largest first.

    Args:
        buffers: buffers of the compiled program.
        layout: layout of the state, whose leaves are the program's arguments.
    """
    module = buffers.module
    shapes = _group_paths(layout)
    offloaded_paths = {leaf.path for leaf in layout if leaf.spec.is_offloaded}
    named_buffers = []
    for name, size in buffers.parameters.items():
        group, path = parse_argument(module.parameters.get(name, ""))
        if group is not None and path not in offloaded_paths:
            array = arrays(module.instructions[name].type)[0]
            named_buffers.append(NamedBuffer(path, group, size, str(array)))
    for block in buffers.blocks:
        named_block = _name_block(module, block, shapes)
        if named_block:
            named_buffers.append(named_block)
    return sorted(named_buffers, key=lambda buffer: -buffer.bytes)


def parse_argument(op_name: str) -> tuple[str | None, str]:
    """Return (group, path) of an argument from jax's name: `state.optimizer['embed']['token']`, `batch['tokens']`.

    The group is None if the name is not that of an argument.
    """
    keys = re.findall(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)", op_name)
    # Each match fills exactly one of the three alternatives.
    path = "/".join(next(filter(None, key)) for key in keys)
    if op_name.startswith("batch"):
        return "batch", f"batch/{path}"
    return REPORT_GROUPS.get(path.split("/")[0]), path


def _group_paths(layout: StateLayout) -> _PathsByShape:
    shapes = _PathsByShape({}, {}, {})
    for leaf in layout:
        shard_shape = layout.sharding(leaf.spec).shard_shape(leaf.spec.shape)
        shard_dims = _dims(shard_shape)
        path = leaf.path.partition("/")[2]
        if leaf.spec.is_offloaded:
            shapes.offloaded.setdefault(shard_dims, []).append(leaf.path)
        if leaf.group == "parameter":
            is_stacked = getattr(leaf.spec, "roles", ())[:1] == ("layer",)
            first_axis = int(is_stacked)
            layer_dims = _dims(shard_shape[first_axis:])
            # For a leaf that is not stacked, both shapes are equal and must be added only once.
            for dims in {shard_dims, layer_dims}:
                _add_path(shapes.sharded, dims, path)
            _add_path(shapes.unsharded, _dims(leaf.spec.shape[first_axis:]), path)
    return shapes


def _add_path(paths_by_dims: _PathsByDims, dims: _Dims, path: str) -> None:
    # Vectors are skipped, because many unrelated arrays have their size.
    if len(dims) >= 2:
        paths_by_dims.setdefault(dims, []).append(path)


def _dims(shape: tuple[int, ...]) -> _Dims:
    # XLA may transpose arrays, and add or drop dimensions of size 1.
    return tuple(sorted(size for size in shape if size > 1))


# --- temporaries -----------------------------------------------------------------------------------------------------


def _name_block(module: Module, block: PeakBlock, shapes: _PathsByShape) -> NamedBuffer | None:
    values = [value for value in block.values if value.name in module.instructions]
    shape = block.values[0].shape
    dims: _Dims = ()
    block_arrays = arrays(shape)
    if block_arrays:
        shape = str(block_arrays[0])
        dims = _dims(block_arrays[0].dims)
    group, path = parse_argument(module.parameters.get(find_source_argument(module, values), ""))
    if group is not None:
        # A device copy of offloaded state is there to be updated and counts as state; a copy of an
        # array that is on the device anyway is a temporary.
        is_offloaded = path in shapes.offloaded.get(dims, [])
        return NamedBuffer(f"copy of {path}", group if is_offloaded else "activations", block.size, shape)
    op_names = list_writer_names(module, values)
    gradient_paths = _gradient_paths(op_names, dims, shapes)
    if gradient_paths:
        return NamedBuffer(f"gradient of {_summarize_paths(gradient_paths)}", "gradients", block.size, shape)
    if dims in shapes.offloaded and all("/update/" in name for name in op_names):
        offloaded_paths = shapes.offloaded[dims]
        group = REPORT_GROUPS[offloaded_paths[0].split("/")[0]]
        return NamedBuffer(f"new {_summarize_paths(offloaded_paths)}", group, block.size, shape)
    clearest = describe_clearest_operation(op_names)
    return NamedBuffer(clearest, "activations", block.size, shape) if clearest else None


def list_writer_names(module: Module, values: list[BufferValue]) -> list[str]:
    """Return the JAX names of the operations that write the values.

    Args:
        module: the program.
        values: values that share a buffer.
    """
    return [name for value in values for name in _op_names(module, value)]


def describe_clearest_operation(op_names: list[str]) -> str:
    """Return the `describe_operation` of the operation with the most specific name; "" if there is none."""

    def vagueness(name: str) -> tuple[bool, int]:
        # The name of a loop is less specific than those of the operations inside it.
        return name.endswith(("/while", "broadcast_in_dim")), -name.count("/")

    best_name = min(op_names, key=vagueness, default="")
    return describe_operation(best_name) if best_name else ""


def find_source_argument(module: Module, values: list[BufferValue]) -> str:
    """Return the argument that one of the values is a copy of; "" if there is none.

    Args:
        module: the program.
        values: values that share a buffer.
    """
    for value in values:
        source = _trace_source(module, value)
        if source:
            return source
    return ""


def _gradient_paths(op_names: list[str], dims: _Dims, shapes: _PathsByShape) -> list[str]:
    """Return the parameters whose gradient an array may be, judging by its dimensions and the writing operations."""
    backward_names = [name for name in op_names if "transpose(" in name or "/gradient/" in name]
    if not backward_names:
        return []
    paths = list(shapes.sharded.get(dims, []))
    # Activations may have such unsharded shapes too, but only a matrix product makes a gradient.
    if any(name.endswith("dot_general") and "rematted" not in name for name in backward_names):
        paths += [path for path in shapes.unsharded.get(dims, []) if path not in paths]
    paths_of_layer = []
    for path in paths:
        # The scope name inside a loop over blocks is attention/key/ for stack/block0/attention/key/weight.
        keys = path.split("/")
        scope = "/".join(keys[2:-1] or keys[:1]) + "/"
        if any(scope in name for name in backward_names):
            paths_of_layer.append(path)
    return paths_of_layer or paths


def _summarize_paths(paths: list[str]) -> str:
    num_others = len(paths) - 1
    return paths[0] + (f" (or {num_others} more of its shape)" if num_others else "")


def _trace_source(module: Module, value: BufferValue) -> str | None:
    """Return the argument that a value is a copy of, through moves, tuples and loops; None if it is computed."""
    visited: set[_TupleElement] = set()
    position: _TupleElement | None = (value.name, value.index)
    while position and position not in visited:
        name, index = position
        if name not in module.instructions:
            return None
        if name in module.parameters:
            return name
        visited.add(position)
        position = _step_back(module, module.instructions[name], index)
    return None


def _step_back(module: Module, instruction: Instruction, index: tuple[int, ...]) -> _TupleElement | None:
    """Return the source of the value that an instruction returns at an index; None if the instruction computes it."""
    opcode = instruction.opcode
    operands = instruction.operands
    if opcode == "get-tuple-element":
        element = instruction.attributes.partition("index=")[2].split(",")[0]
        return operands[0], (int(element), *index)
    if opcode == "tuple" and index:
        return operands[index[0]], index[1:]
    if opcode == "while":
        return operands[0], index
    if opcode == "parameter" and instruction.computation in module.loops:
        return module.loops[instruction.computation].operands[0], index
    if opcode == "fusion":
        fused = module.computations.get(instruction.get_called_computation("calls"), [])
        if not fused or not operands or any(inner.opcode not in _MOVES | _INDEX_OPCODES for inner in fused):
            return None
        # The largest operand is the moved array; the small ones are indices.
        sizes = {}
        for name in operands:
            operand_arrays = arrays(module.instructions[name].type) if name in module.instructions else []
            sizes[name] = max((array.num_bytes for array in operand_arrays), default=0)
        return max(sizes, key=lambda name: sizes[name]), ()
    if opcode in _MOVES and operands:
        return operands[0], index[1:]
    return None


def _op_names(module: Module, value: BufferValue) -> Iterator[str]:
    """Yield the names of the operations that write a value: its own and, for a loop's carry, the body's."""
    instruction = module.instructions[value.name]
    writer_name = _find_stacked_row(module, instruction) or _find_op_name(module, value)
    if writer_name:
        yield writer_name
    is_loop = instruction.opcode == "while"
    loop = instruction if is_loop else module.loops.get(instruction.computation)
    if instruction.opcode in ("while", "parameter") and loop is not None and value.index:
        root = module.instructions[module.roots[loop.get_called_computation("body")]]
        if root.opcode == "tuple" and root.operands[value.index[0]] in module.instructions:
            body_result = module.instructions[root.operands[value.index[0]]]
            yield _find_stacked_row(module, body_result) or body_result.op_name or loop.op_name


def _find_op_name(module: Module, value: BufferValue) -> str:
    """Return the name of the operation that made a value, or of the nearest earlier operation that has a name."""
    name = value.name
    index = value.index
    # A name from farther away would say little about the value.
    for _ in range(8):
        instruction = module.instructions.get(name)
        if instruction is None:
            return ""
        if instruction.op_name:
            return instruction.op_name
        first_operand = (*instruction.operands, "")[0]
        name, index = _step_back(module, instruction, index) or (first_operand, ())
    return ""


def _find_stacked_row(module: Module, writer: Instruction) -> str | None:
    """Return the operation that made the row that a loop writes into a stacked array; None if it writes no row."""
    fused = module.computations.get(writer.get_called_computation("calls"), []) if writer.opcode == "fusion" else []
    updates = (inner for inner in fused if inner.opcode == "dynamic-update-slice")
    update = next(updates, writer)
    if update.opcode != "dynamic-update-slice":
        return None
    row = module.instructions.get(update.operands[1])
    # While the row is inside the fusion, parameters refer to the operands of the fusion.
    caller = writer
    while row is not None:
        # Stop at the name of a layer's operation, instead of the bookkeeping of a loop.
        is_bookkeeping = row.op_name.endswith(("dynamic_update_slice", "broadcast_in_dim", "/while"))
        if row.op_name.count("/") > 1 and not is_bookkeeping:
            return f"{row.op_name}{_PER_LAYER_SUFFIX}"
        if row.opcode == "parameter" and caller is not update and row.operands[0].isdigit():
            row = module.instructions.get(caller.operands[int(row.operands[0])])
            caller = update
        elif row.opcode in _MOVES and row.operands:
            row = module.instructions.get(row.operands[0])
        else:
            row = None
    return None


def describe_operation(op_name: str) -> str:
    """Shorten an operation's name to its scope and phase.

    `jit(step)/transpose(jvp(stack))/while/body/mlp/up/dot_general` becomes `stack/mlp/up/dot_general, backward`.
    """
    if op_name.startswith(("state.", "batch[")):
        return f"copy of {parse_argument(op_name)[1]}"
    phase = "forward"
    if "rematted_computation" in op_name:
        phase = "backward, recomputed"
    elif "/update/" in op_name:
        phase = "update"
    elif "transpose(" in op_name:
        phase = "backward"
    # Strip JAX transformations: `jit(step)/transpose(jvp(stack))/mul` becomes `/stack/mul`. They are nested, and the
    # pattern matches only the innermost ones.
    plain_name = re.sub(r"\b(?:jit|pjit)\([^()]*\)", "", op_name)
    num_unwrapped = 1
    while num_unwrapped:
        plain_name, num_unwrapped = re.subn(r"\b(?:jvp|transpose|vmap|checkpoint|remat)\(([^()]*)\)", r"\1", plain_name)
    parts = []
    for part in plain_name.split("/"):
        if part and part not in _IGNORED_SCOPES and part != "update":
            parts.append(part)
    if op_name.endswith("/while"):
        parts.append("carried through the loop")
    elif parts[-1:] == ["dynamic_update_slice"] and phase == "forward":
        parts[-1] = _PER_LAYER_SUFFIX.strip("/")
    path = "/".join(parts) or "step"
    return f"{path}, {phase}"
