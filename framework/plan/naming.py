"""What a buffer is: the group it counts to, and a name that a person understands.

Arguments are leaves of the layout, by name. A temporary is, in this order: a copy of an argument (XLA likes to hold one
in another tiling, and sharded weights are gathered); a gradient, if the backward pass made it in the shape of a
trainable parameter, of one layer of it, or of one that is not sharded yet; else what the operation that made it is
called, by layer and operation.
May import: framework.layout, framework.plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from framework.layout import StateLayout
from framework.plan.buffers import Block, Buffers, Value
from framework.plan.hlo import Instruction, Module, arrays

# The layout's groups as the report (`report.KEYS`) calls them.
OF_LAYOUT = {
    "parameter": "parameters",
    "frozen": "frozen",
    "buffer": "buffers",
    "optimizer": "optimizer_state",
    "ema": "ema",
    "counter": "other",
    "gradient": "gradients",
}
_MOVES = {"copy", "copy-start", "copy-done", "bitcast", "transpose", "reshape", "bitcast-convert", "convert", "slice"}
_MOVES |= {"dynamic-slice", "all-gather", "all-gather-start", "all-gather-done", "slice-start", "slice-done"}
_BESIDE = {"parameter", "constant", "compare", "select", "add", "get-tuple-element", "tuple", "custom-call"}  # indices
_FUSED = re.compile(r"calls=%([\w.\-]+)")
_KEPT = "/kept for each layer"
_Shapes = dict[tuple[int, ...], tuple[list[str], list[str]]]
_NO_PLACE = {"while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "shard_map", "core_call"}


@dataclass(frozen=True)
class Named:
    """A buffer of the report: bytes per device."""

    name: str
    group: str
    bytes: int
    shape: str


def name_buffers(buffers: Buffers, layout: StateLayout) -> list[Named]:
    """Every buffer alive at the peak whose group is known, largest first."""
    module, shapes, visitors = buffers.module, _gradient_shapes(layout), _hosted_shapes(layout)
    named = []
    for instruction, size in buffers.parameters.items():
        group, path = argument(module.parameters.get(instruction, ""))
        if group is not None and not _is_hosted(layout, path):
            named.append(Named(path, group, size, _shape(module.instructions[instruction].type)))
    for block in buffers.blocks:
        found = _name_block(module, block, shapes, visitors)
        if found is not None:
            named.append(found)
    return sorted(named, key=lambda one: -one.bytes)


def argument(op_name: str) -> tuple[str | None, str]:
    """(group, path) of an argument by jax's name for it: `state['optimizer']['embed']['token']`, `batch['tokens']`."""
    keys = re.findall(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)", op_name)
    path = "/".join(next(filter(None, key)) for key in keys)
    if op_name.startswith("batch"):
        return "batch", f"batch/{path}"
    return _group_of(path), path


def _group_of(path: str) -> str | None:
    return OF_LAYOUT.get(path.split("/", 1)[0])


def _is_hosted(layout: StateLayout, path: str) -> bool:
    return any(leaf.path == path and leaf.spec.memory_kind != "device" for leaf in layout)


def _shape(text: str) -> str:
    found = arrays(text)
    return str(found[0]) if found else text


# --- temporaries -----------------------------------------------------------------------------------------------------


def _name_block(
    module: Module, block: Block, gradients: _Shapes, visitors: dict[tuple[int, ...], list[str]]
) -> Named | None:
    values = [value for value in block.values if value.name in module.instructions]
    source = next(filter(None, (_source(module, value.name, value.index) for value in values)), None)
    shape = _shape(block.values[0].shape)
    dims = next((array.dims for array in arrays(block.values[0].shape)), ())
    if source is not None:
        group, path = argument(module.parameters[source])
        if group is not None:
            # State that lives on the host is here to be updated; a copy of what is here anyway is a temporary.
            group = group if path in visitors.get(_dims(dims), []) else "activations"
            return Named(f"copy of {path}", group, block.size, shape)
    op_names = [name for value in values for name in _op_names(module, value)]
    owners = _owners(op_names, dims, gradients)
    if owners:
        return Named(f"gradient of {_any_of(owners)}", "gradients", block.size, shape)
    leaving = visitors.get(_dims(dims), [])
    if leaving and all("/update/" in name for name in op_names):
        return Named(f"new {_any_of(leaving)}", _group_of(leaving[0]) or "activations", block.size, shape)
    # The loop's own name says less than that of what is computed in it.
    best = min(op_names, key=lambda name: (name.endswith(("/while", "broadcast_in_dim")), -name.count("/")), default="")
    return Named(place(best), "activations", block.size, shape) if best else None


def _any_of(paths: list[str]) -> str:
    return paths[0] + (f" (or {len(paths) - 1} more of its shape)" if len(paths) > 1 else "")


def _owners(op_names: list[str], dims: tuple[int, ...], gradients: _Shapes) -> list[str]:
    """The parameters whose gradient a temporary may be."""
    backward = [name for name in op_names if "transpose(" in name or "/gradient/" in name]
    if not backward:
        return []
    summed, whole = gradients.get(_dims(dims), ([], []))
    if any(name.endswith("dot_general") and "rematted" not in name for name in backward):
        summed = [*summed, *(path for path in whole if path not in summed)]
    by_layer = [path for path in summed if any(_layer(path) in name for name in backward)]
    return by_layer or summed


def _layer(path: str) -> str:
    """stack/block0/attention/key/weight -> attention/key/, as the scopes inside of a loop over blocks are called."""
    return "/".join(path.split("/")[2:-1] or path.split("/")[:1]) + "/"


def _gradient_shapes(layout: StateLayout) -> _Shapes:
    """{dimensions, sorted: (trainable parameters of this shape, stacked or by layer; those of it when unsharded)}"""
    shapes: _Shapes = {}
    for leaf in layout:
        if leaf.group != "parameter" or len(leaf.spec.shape) < 2:
            continue
        path = leaf.path.split("/", 1)[1]
        own = layout.sharding(leaf.spec).shard_shape(leaf.spec.shape)
        stacked = getattr(leaf.spec, "roles", ())[:1] == ("layer",)
        for dims in {_dims(own), _dims(own[1:] if stacked else own)}:
            shapes.setdefault(dims, ([], []))[0].append(path)
        whole = leaf.spec.shape[1:] if stacked else leaf.spec.shape
        shapes.setdefault(_dims(whole), ([], []))[1].append(path)
    return {dims: paths for dims, paths in shapes.items() if len(dims) >= 2}


def _hosted_shapes(layout: StateLayout) -> dict[tuple[int, ...], list[str]]:
    """{dimensions, sorted: leaves in host memory that have them}"""
    shapes: dict[tuple[int, ...], list[str]] = {}
    for leaf in layout:
        if leaf.spec.memory_kind != "device":
            own = layout.sharding(leaf.spec).shard_shape(leaf.spec.shape)
            shapes.setdefault(_dims(own), []).append(leaf.path)
    return shapes


def _dims(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(d for d in dims if d > 1))


def _source(module: Module, name: str, index: tuple[int, ...]) -> str | None:
    """The argument that a value is a copy of, followed through moves, tuples and loops; None if it is computed."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    while (name, index) not in seen and name in module.instructions:
        seen.add((name, index))
        instruction = module.instructions[name]
        if name in module.parameters:
            return name
        step = _step_back(module, instruction, index)
        if step is None:
            return None
        name, index = step
    return None


def _step_back(module: Module, i: Instruction, index: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    if i.opcode == "get-tuple-element":
        return i.operands[0], (int(re.search(r"index=(\d+)", i.attributes)[1]), *index)  # type: ignore[index]
    if i.opcode == "tuple" and index:
        return i.operands[index[0]], index[1:]
    if i.opcode == "while":
        return i.operands[0], index
    if i.opcode == "parameter" and i.computation in module.loops:
        return module.loops[i.computation].operands[0], index
    if i.opcode == "fusion":
        fused = module.computations.get((_FUSED.search(i.attributes) or ["", ""])[1], [])
        if not fused or not i.operands or any(inner.opcode not in _MOVES | _BESIDE for inner in fused):
            return None
        return max(i.operands, key=lambda name: _largest(module, name)), ()
    return (i.operands[0], index[1:]) if i.opcode in _MOVES and i.operands else None


def _largest(module: Module, name: str) -> int:
    found = module.instructions.get(name)
    return max((array.num_bytes for array in arrays(found.type)), default=0) if found else 0


def _op_names(module: Module, value: Value) -> Iterator[str]:
    """The names of the operations that write a value: its own, and, of a loop's carry, what the body makes of it."""
    instruction = module.instructions[value.name]
    yield from filter(None, [_saved(module, instruction) or _origin(module, value)])
    loop = instruction if instruction.opcode == "while" else module.loops.get(instruction.computation)
    if instruction.opcode in ("while", "parameter") and loop is not None and value.index:
        root = module.instructions[module.roots[loop.called("body") or ""]]
        if root.opcode == "tuple" and root.operands[value.index[0]] in module.instructions:
            last = module.instructions[root.operands[value.index[0]]]
            yield _saved(module, last) or last.op_name or loop.op_name


def _origin(module: Module, value: Value) -> str:
    """The name of the operation that made a value, or of the nearest before it that has one."""
    name, index = value.name, value.index
    for _ in range(8):
        instruction = module.instructions.get(name)
        if instruction is None or instruction.op_name:
            return instruction.op_name if instruction else ""
        name, index = _step_back(module, instruction, index) or ((*instruction.operands, "")[0], ())
    return ""


def _saved(module: Module, writer: Instruction) -> str | None:
    """What a loop writes into a row of a stacked array: the operation that made the row."""
    outer, i = writer, writer
    if writer.opcode == "fusion":
        fused = module.computations.get((_FUSED.search(writer.attributes) or ["", ""])[1], [])
        i = next((inner for inner in fused if inner.opcode == "dynamic-update-slice"), writer)
    if i.opcode != "dynamic-update-slice":
        return None
    row = module.instructions.get(i.operands[1])
    while row is not None and not _tells(row.op_name):
        if row.opcode == "parameter" and outer is not i and row.operands[0].isdigit():
            row, outer = module.instructions.get(outer.operands[int(row.operands[0])]), i
        else:
            row = module.instructions.get(row.operands[0]) if row.opcode in _MOVES and row.operands else None
    return f"{row.op_name}{_KEPT}" if row is not None else None


def _tells(op_name: str) -> bool:
    return op_name.count("/") > 1 and not op_name.endswith(("dynamic_update_slice", "broadcast_in_dim", "/while"))


def place(op_name: str) -> str:
    """`jit(step)/transpose(jvp(stack))/while/body/mlp/up/dot_general` -> `stack/mlp/up/dot_general, backward`."""
    if op_name.startswith(("state[", "batch[")):
        return f"copy of {argument(op_name)[1]}"
    when = "update" if "/update/" in op_name else "backward" if "transpose(" in op_name else "forward"
    if "rematted_computation" in op_name:
        when = "backward, recomputed"
    plain = re.sub(r"\b(?:jit|pjit)\([^()]*\)", "", op_name)
    while plain != (plain := re.sub(r"\b(?:jvp|transpose|vmap|checkpoint|remat)\(([^()]*)\)", r"\1", plain)):
        pass
    parts = [part for part in plain.split("/") if part and part not in _NO_PLACE and part != "update"]
    if op_name.endswith("/while"):
        parts.append("carried through the loop")
    elif parts[-1:] == ["dynamic_update_slice"] and when == "forward":
        parts[-1] = _KEPT.strip("/")
    return f"{'/'.join(parts) or 'step'}, {when}"
