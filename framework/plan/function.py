"""The plan of any JAX function: what one call needs on a target, by the target's compiler."""

from __future__ import annotations

import functools
import inspect
import math
import re
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from framework.devices.executables import HostBytes
from framework.plan.buffers import Block, Buffers
from framework.plan.cache import versions
from framework.plan.compiled import Compiled, compile_for
from framework.plan.hlo import arrays
from framework.plan.jaxprs import FlopCount, flops
from framework.plan.naming import Named, clearest_place, names_of_writers, source_of
from framework.plan.plan import COMPILERS, device_bytes, largest
from framework.plan.report import Report
from framework.plan.targets import Target
from framework.terminal.phases import phase

# Groups of what is no argument.
RESULTS = "results"
TEMPORARIES = "temporaries"
OTHER = "other"


@dataclass(frozen=True)
class Call:
    """A function and what it is called with.

    Attributes:
        function: any function of arrays that JAX can trace, jitted or not.
        arguments: positional ones: trees of arrays or `jax.ShapeDtypeStruct`s. Leaves that are neither, such as the
            activation function of an equinox module, stay as they are.
        donate: positions of the arguments whose memory the results may take, or their names.
        mesh: {axis: size}, over all devices of the target; None: one device, or all of them with the same arrays.
        shardings: of the arguments: a tree of PartitionSpecs, or of prefixes of it, for each; None: as the leaves' own
            `sharding` says, of whatever mesh with these axes; without one, whole on each device.
        out_shardings: of the results, likewise; None: as the compiler likes.
        name: what a report calls it; the function's own name by default.
        argument_names: of its positional parameters, as far as the function tells them.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    donate: Sequence[int | str] = ()
    mesh: Mapping[str, int] | None = None
    shardings: Sequence[Any] | None = None
    out_shardings: Any = None
    name: str = ""
    argument_names: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"expected a function, given {type(self.function).__name__}")
        if not isinstance(self.arguments, (tuple, list)):
            raise TypeError(f"expected a tuple of arguments, given {type(self.arguments).__name__}")
        object.__setattr__(self, "argument_names", _parameter_names(self.function, len(self.arguments)))

    @property
    def title(self) -> str:
        """The name of the function."""
        return self.name or getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def donated_positions(self) -> tuple[int, ...]:
        """Positions of the donated arguments. Raises ValueError: there is no such argument."""
        positions = []
        for which in self.donate:
            if isinstance(which, str) and which not in self.argument_names:
                raise ValueError(
                    f"donate: {self.title} has no argument {which!r}, but: {', '.join(self.argument_names)}"
                )
            position = self.argument_names.index(which) if isinstance(which, str) else which
            if not 0 <= position < len(self.arguments):
                raise ValueError(f"donate: {self.title} is called with {len(self.arguments)} arguments, given {which}")
            positions.append(position)
        return tuple(positions)


def _parameter_names(function: Callable[..., Any], count: int) -> tuple[str, ...]:
    """Names of the first positional parameters; fewer where the function does not tell them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(positional[:count])


def plan_call(call: Call, target: Target, limit: int | None) -> Report:
    """The report of one call of a function.

    Args:
        call: the function and its arguments.
        target: the machine to plan for.
        limit: device memory in bytes; None means unknown.

    Raises:
        ValueError: the function cannot be traced with these arguments, or not on this mesh; the target's compiler is
            not installed.
    """
    mesh = _mesh(call, target)
    dynamic, function = _traceable(call)
    placed = _placed(call, dynamic, mesh)
    out_shardings = _on_mesh(call.out_shardings, mesh) if call.out_shardings is not None else None
    options = {} if out_shardings is None else {"out_shardings": out_shardings}
    jitted = jax.jit(function, donate_argnums=call.donated_positions, **options)
    with phase(f"tracing {call.title}"), _in_mesh(mesh):
        try:
            traced = jitted.trace(*placed)
            lowered = traced.lower()
        # Whatever a user's function raises; its own line is the one to look at.
        except Exception as error:
            raise ValueError(f"{call.title} cannot be traced: {_first_line(error)}{_place_in_code(error)}") from error
    hosted = _hosted(call, placed, out_shardings, traced.out_info)
    with phase(f"compiling {call.title} for {target.name}"):
        compiled = compile_for(lowered, target.platform, hosted, _mib(limit, target))
    return _report(call, target, limit, mesh, compiled, flops(traced.jaxpr), hosted)


def _mib(limit: int | None, target: Target) -> int | None:
    """The limit that the compiler is told: one that is lower than what the target has."""
    return limit >> 20 if limit is not None and limit < (target.limit_bytes or 0) else None


# --- what is traced ---------------------------------------------------------------------------------------------------


def _mesh(call: Call, target: Target) -> Mesh:
    """The mesh of the target's devices. Raises ValueError: the sizes of its axes do not multiply to their number."""
    sizes = dict(call.mesh) if call.mesh is not None else {"devices": target.num_devices}
    if math.prod(sizes.values()) != target.num_devices:
        product = " * ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(f"mesh: {product} is not the {target.num_devices} devices of {target.name}")
    devices = np.array(target.devices()).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _in_mesh(mesh: Mesh) -> Any:
    """The context in which the function's own PartitionSpecs are of the mesh."""
    return jax.set_mesh(mesh) if mesh.size > 1 else nullcontext()


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, a number, or the shape of one."""
    return isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array, np.ndarray, np.generic, bool, int, float, complex))


def _traceable(call: Call) -> tuple[list[Any], Callable[..., Any]]:
    """(the arguments with None for leaves that are no arrays, the function of these arguments alone)."""
    arguments = list(call.arguments)
    arrays_alone = [jax.tree.map(lambda leaf: leaf if _is_array(leaf) else None, one) for one in arguments]

    # The names of the parameters are what the compiler calls the arguments.
    @functools.wraps(call.function, updated=())
    def function(*traced_arguments: Any) -> Any:
        whole = []
        for traced, given in zip(traced_arguments, arguments, strict=True):
            leaves = iter(jax.tree.leaves(traced))
            whole.append(jax.tree.map(lambda leaf: next(leaves) if _is_array(leaf) else leaf, given))  # noqa: B023
        results = call.function(*whole)
        # Results may hold such leaves, too: a model that was updated.
        return jax.tree.map(lambda leaf: leaf if _is_array(leaf) else None, results)

    return arrays_alone, function


def _placed(call: Call, dynamic: list[Any], mesh: Mesh) -> list[Any]:
    """The arguments as shapes on the devices of the mesh."""
    if call.shardings is None:
        return [jax.tree.map(lambda leaf: _shape(leaf, _own_sharding(leaf, mesh)), one) for one in dynamic]
    if len(call.shardings) != len(dynamic):
        raise ValueError(f"shardings: {len(call.shardings)} of them for {len(dynamic)} arguments")
    placed = []
    for position, (specs, argument) in enumerate(zip(call.shardings, dynamic, strict=True)):
        shardings = _on_mesh(PartitionSpec() if specs is None else specs, mesh)
        try:
            broadcast = jax.tree.broadcast(shardings, argument, is_leaf=_is_sharding)
        except ValueError as error:
            raise ValueError(f"shardings: not a prefix of argument {position}: {_first_line(error)}") from None
        placed.append(jax.tree.map(_shape, argument, broadcast))
    return placed


def _is_sharding(node: Any) -> bool:
    return isinstance(node, (NamedSharding, PartitionSpec))


def _on_mesh(specs: Any, mesh: Mesh) -> Any:
    """A tree of PartitionSpecs, or of shardings of another mesh, as shardings of this one."""
    return jax.tree.map(
        lambda spec: _sharding(spec, mesh), specs, is_leaf=lambda node: node is None or _is_sharding(node)
    )


def _sharding(spec: Any, mesh: Mesh) -> NamedSharding:
    memory_kind = None
    if isinstance(spec, NamedSharding):
        memory_kind = spec.memory_kind
        spec = spec.spec
    spec = PartitionSpec() if spec is None else spec
    axes = {axis for entry in spec for axis in ([entry] if isinstance(entry, str) else entry or ())}
    unknown = sorted(axes - set(mesh.axis_names))
    if unknown:
        raise ValueError(
            f"a sharding is by {', '.join(unknown)}, and the mesh has the axes {', '.join(mesh.axis_names)}"
        )
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def _own_sharding(leaf: Any, mesh: Mesh) -> NamedSharding:
    """What a shape says of its own sharding. An array is where its maker has put it, which means nothing there."""
    sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
    return _sharding(sharding if isinstance(sharding, NamedSharding) else None, mesh)


def _shape(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    abstract = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    weak = getattr(abstract, "weak_type", False)
    return jax.ShapeDtypeStruct(abstract.shape, abstract.dtype, sharding=sharding, weak_type=weak)


def _hosted(call: Call, placed: list[Any], out_shardings: Any, results: Any) -> HostBytes:
    """The bytes of arguments and results that are in host memory, per device."""
    donated = sum(_host_bytes(placed[position]) for position in call.donated_positions)
    result_bytes = 0
    if out_shardings is not None:
        broadcast = jax.tree.broadcast(out_shardings, results, is_leaf=_is_sharding)
        result_bytes = _host_bytes(jax.tree.map(_shape, results, broadcast))
    return HostBytes(sum(map(_host_bytes, placed)), result_bytes, donated)


def _host_bytes(tree: Any) -> int:
    """Bytes of each device of the leaves in host memory."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if leaf.sharding.memory_kind in ("pinned_host", "unpinned_host"):
            total += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _place_in_code(error: BaseException) -> str:
    """[file:line] of the user's own line that raised an error; "" where there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_of_a_library(frame.filename)]
    return f"  [{frames[-1].filename}:{frames[-1].lineno}]" if frames else ""


def _is_of_a_library(file: str) -> bool:
    return file == __file__ or "site-packages" in file or file.startswith("<")


# --- the report -------------------------------------------------------------------------------------------------------


def _report(
    call: Call,
    target: Target,
    limit: int | None,
    mesh: Mesh,
    compiled: Compiled,
    flop_count: FlopCount,
    hosted: HostBytes,
) -> Report:
    named_buffers: list[Named] = []
    collective_bytes: dict[str, int] = {}
    transfer_bytes = 0
    if compiled.buffers is not None:
        named_buffers = named(compiled.buffers)
        collective_bytes = dict(compiled.buffers.module.collective_bytes())
        transfer_bytes = compiled.buffers.module.host_bytes()
    # Arguments are first, in the order in which they are given.
    breakdown = Counter(dict.fromkeys([*call.argument_names, RESULTS, TEMPORARIES, OTHER], 0))
    for buffer in named_buffers:
        breakdown[buffer.group] += buffer.bytes
    breakdown[OTHER] += compiled.peak - sum(breakdown.values())
    host_bytes = hosted.arguments + hosted.results - hosted.donated + compiled.host_temp
    return {
        "config": call.title,
        "subject": call.title,
        "settings": [],
        "target": target.name,
        "accelerator": target.spec.name,
        "platform": target.platform,
        "devices": target.num_devices,
        "processes": target.num_processes,
        "mesh": dict(mesh.shape),
        "mesh_across": {},
        "device_limit_bytes": limit,
        "host_limit_bytes": target.host_limit_bytes,
        "versions": versions("jax", "jaxlib", *COMPILERS[target.platform]),
        **device_bytes(compiled),
        "breakdown": {group: size for group, size in breakdown.items() if size},
        "host_breakdown": {},
        "host_peak_bytes": host_bytes,
        "host_process_bytes": host_bytes * target.num_devices // target.num_processes,
        "largest": largest(named_buffers),
        "flops_per_step": flop_count.flops,
        "collective_bytes": collective_bytes,
        "host_transfer_bytes": transfer_bytes,
        "compile_seconds": round(compiled.seconds, 1),
        "message": compiled.message,
        "estimated": False,
        "fits": not compiled.message and (limit is None or compiled.allocated <= limit),
        "notes": target.compiler_notes,
        "phases": {},
        "zero_gradients": [],
        "suggestions": [],
    }


def named(buffers: Buffers) -> list[Named]:
    """The buffers alive at the peak, by the user's own names: argument paths and scopes; the largest first."""
    module = buffers.module
    named_buffers = []
    for name, size in buffers.parameters.items():
        path = module.parameters.get(name, "") or name
        array = arrays(module.instructions[name].type)[0] if name in module.instructions else ""
        named_buffers.append(Named(path, _root(path), size, str(array)))
    for block in buffers.blocks:
        named_buffers.append(_named_block(buffers, block))
    if buffers.output_bytes:
        named_buffers.append(Named("results that take no argument's place", RESULTS, buffers.output_bytes, ""))
    return sorted(named_buffers, key=lambda buffer: -buffer.bytes)


def _named_block(buffers: Buffers, block: Block) -> Named:
    module = buffers.module
    values = [value for value in block.values if value.name in module.instructions]
    block_arrays = arrays(block.values[0].shape)
    shape = str(block_arrays[0]) if block_arrays else block.values[0].shape
    source = module.parameters.get(source_of(module, values), "")
    name = f"copy of {source}" if source else clearest_place(names_of_writers(module, values)) or block.values[0].name
    return Named(name, TEMPORARIES, block.size, shape)


def _root(path: str) -> str:
    """The argument that a path is in: params of params['layer']['weight']."""
    return re.split(r"[\[.]", path, maxsplit=1)[0]
