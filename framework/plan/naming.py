"""What a buffer is: the group it counts to, and a name that a person understands.

Arguments are leaves of the layout, by name. A temporary is, in this order: a copy of an argument (XLA likes to hold one
in another tiling, and sharded weights are gathered); a gradient, if the backward pass made it in the shape of a
trainable parameter, of one layer of it, or of one that is not sharded yet; else what the operation that made it is
called, by layer and operation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from framework.layout import StateLayout
from framework.plan.buffers import Block, Buffers, Value
from framework.plan.hlo import Instruction, Module, arrays

# The layout's groups as the report (`report.KEYS`) calls them.
OF_LAYOUT = {"parameter": "parameters", "frozen": "frozen", "buffer": "buffers", "optimizer": "optimizer_state"}
OF_LAYOUT |= {"ema": "ema", "gradient": "gradients", "counter": "other"}
_MOVES = {"copy", "copy-start", "copy-done", "bitcast", "transpose", "reshape", "bitcast-convert", "convert", "slice"}
_MOVES |= {"dynamic-slice", "all-gather", "all-gather-start", "all-gather-done", "slice-start", "slice-done"}
_BESIDE = {"parameter", "constant", "compare", "select", "add", "get-tuple-element", "tuple", "custom-call"}  # indices
_KEPT = "/kept for each layer"
_NO_PLACE = {"while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "shard_map", "core_call"}
_Shapes = dict[tuple[int, ...], list[str]]


class Named(NamedTuple):
    """A buffer of the report: bytes per device."""

    name: str
    group: str
    bytes: int
    shape: str


def name_buffers(buffers: Buffers, layout: StateLayout) -> list[Named]:
    """Every buffer alive at the peak whose group is known, largest first."""
    module, shapes = buffers.module, _shapes(layout)
    hosted = {leaf.path for leaf in layout if leaf.spec.memory_kind != "device"}
    named = []
    for instruction, size in buffers.parameters.items():
        group, path = argument(module.parameters.get(instruction, ""))
        if group is not None and path not in hosted:
            named.append(Named(path, group, size, str(arrays(module.instructions[instruction].type)[0])))
    named += filter(None, (_name_block(module, block, *shapes) for block in buffers.blocks))
    return sorted(named, key=lambda one: -one.bytes)


def argument(op_name: str) -> tuple[str | None, str]:
    """(group, path) of an argument by jax's name for it: `state['optimizer']['embed']['token']`, `batch['tokens']`."""
    keys = re.findall(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)", op_name)
    path = "/".join(next(filter(None, key)) for key in keys)
    return ("batch", f"batch/{path}") if op_name.startswith("batch") else (OF_LAYOUT.get(path.split("/")[0]), path)


def _shapes(layout: StateLayout) -> tuple[_Shapes, _Shapes, _Shapes]:
    """{dimensions: paths}: trainable parameters as sharded, stacked or by layer; one layer of them not sharded; leaves
    in host memory."""
    summed, whole, hosted = {}, {}, {}
    for leaf in layout:
        own, path = layout.sharding(leaf.spec).shard_shape(leaf.spec.shape), leaf.path.partition("/")[2]
        if leaf.spec.memory_kind != "device":
            hosted.setdefault(_dims(own), []).append(leaf.path)
        if leaf.group == "parameter":
            layer = int(getattr(leaf.spec, "roles", ())[:1] == ("layer",))
            for shapes, shape in {(0, _dims(own)), (0, _dims(own[layer:])), (1, _dims(leaf.spec.shape[layer:]))}:
                if len(shape) >= 2:
                    (summed, whole)[shapes].setdefault(shape, []).append(path)
    return summed, whole, hosted


def _dims(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(d for d in dims if d > 1))


# --- temporaries -----------------------------------------------------------------------------------------------------


def _name_block(module: Module, block: Block, summed: _Shapes, whole: _Shapes, hosted: _Shapes) -> Named | None:
    values = [value for value in block.values if value.name in module.instructions]
    array = next(iter(arrays(block.values[0].shape)), None)
    shape, dims = (str(array), _dims(array.dims)) if array else (block.values[0].shape, ())
    source = next(filter(None, (_source(module, value) for value in values)), None)
    group, path = argument(module.parameters.get(source or "", ""))
    if group is not None:
        # State that lives on the host is here to be updated; a copy of what is here anyway is a temporary.
        return Named(f"copy of {path}", group if path in hosted.get(dims, []) else "activations", block.size, shape)
    op_names = [name for value in values for name in _op_names(module, value)]
    backward = [name for name in op_names if "transpose(" in name or "/gradient/" in name]
    products = any(name.endswith("dot_general") and "rematted" not in name for name in backward)
    owners = summed.get(dims, [])
    owners = owners + [path for path in whole.get(dims, []) if products and path not in owners]
    if backward and owners:
        owners = [path for path in owners if any(_layer(path) in name for name in backward)] or owners
        return Named(f"gradient of {_any_of(owners)}", "gradients", block.size, shape)
    if dims in hosted and all("/update/" in name for name in op_names):
        group = OF_LAYOUT[hosted[dims][0].split("/")[0]]
        return Named(f"new {_any_of(hosted[dims])}", group, block.size, shape)
    # The loop's own name says less than that of what is computed in it.
    best = min(op_names, key=lambda name: (name.endswith(("/while", "broadcast_in_dim")), -name.count("/")), default="")
    return Named(place(best), "activations", block.size, shape) if best else None


def _any_of(paths: list[str]) -> str:
    return paths[0] + (f" (or {len(paths) - 1} more of its shape)" if len(paths) > 1 else "")


def _layer(path: str) -> str:
    """stack/block0/attention/key/weight -> attention/key/, as the scopes inside of a loop over blocks are called."""
    return "/".join(path.split("/")[2:-1] or path.split("/")[:1]) + "/"


def _source(module: Module, value: Value) -> str | None:
    """The argument that a value is a copy of, followed through moves, tuples and loops; None if it is computed."""
    seen, step = set(), (value.name, value.index)
    while step and step not in seen and step[0] in module.instructions:
        if step[0] in module.parameters:
            return step[0]
        seen.add(step)
        step = _step_back(module, module.instructions[step[0]], step[1])
    return None


def _step_back(module: Module, i: Instruction, index: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    if i.opcode == "get-tuple-element":
        return i.operands[0], (int(i.attributes.partition("index=")[2].split(",")[0]), *index)
    if i.opcode == "tuple" and index:
        return i.operands[index[0]], index[1:]
    if i.opcode == "while":
        return i.operands[0], index
    if i.opcode == "parameter" and i.computation in module.loops:
        return module.loops[i.computation].operands[0], index
    if i.opcode == "fusion":
        fused = module.computations.get(i.called("calls"), [])
        if not fused or not i.operands or any(inner.opcode not in _MOVES | _BESIDE for inner in fused):
            return None
        return max(i.operands, key=lambda name: _largest(module, name)), ()
    return (i.operands[0], index[1:]) if i.opcode in _MOVES and i.operands else None


def _largest(module: Module, name: str) -> int:
    types = module.instructions[name].type if name in module.instructions else ""
    return max((array.num_bytes for array in arrays(types)), default=0)


def _op_names(module: Module, value: Value) -> Iterator[str]:
    """The names of the operations that write a value: its own, and, of a loop's carry, what the body makes of it."""
    instruction = module.instructions[value.name]
    yield from filter(None, [_saved(module, instruction) or _origin(module, value)])
    loop = instruction if instruction.opcode == "while" else module.loops.get(instruction.computation)
    if instruction.opcode in ("while", "parameter") and loop is not None and value.index:
        root = module.instructions[module.roots[loop.called("body")]]
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
    fused = module.computations.get(writer.called("calls"), []) if writer.opcode == "fusion" else []
    outer, i = writer, next((inner for inner in fused if inner.opcode == "dynamic-update-slice"), writer)
    row = module.instructions.get(i.operands[1]) if i.opcode == "dynamic-update-slice" else None
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
