"""A function of somebody's own, and its arguments as shapes on the devices of a target."""

from __future__ import annotations

import functools
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from framework.devices.executables import HostBytes
from framework.plan.targets import Target

# The folder of this library.
_LIBRARY = Path(__file__).resolve().parents[1]


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


def mesh_of(call: Call, target: Target) -> Mesh:
    """The mesh of the target's devices. Raises ValueError: the sizes of its axes do not multiply to their number."""
    sizes = dict(call.mesh) if call.mesh is not None else {"devices": target.num_devices}
    if math.prod(sizes.values()) != target.num_devices:
        product = " * ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(f"mesh: {product} is not the {target.num_devices} devices of {target.name}")
    devices = np.array(target.devices()).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def in_mesh(mesh: Mesh) -> Any:
    """The context in which the function's own PartitionSpecs are of the mesh."""
    return jax.set_mesh(mesh) if mesh.size > 1 else nullcontext()


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, a number, or the shape of one."""
    return isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array, np.ndarray, np.generic, bool, int, float, complex))


def traceable(call: Call) -> tuple[list[Any], Callable[..., Any]]:
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


def placed(call: Call, dynamic: list[Any], mesh: Mesh) -> list[Any]:
    """The arguments as shapes on the devices of the mesh."""
    if call.shardings is None:
        return [jax.tree.map(lambda leaf: _shape(leaf, _own_sharding(leaf, mesh)), one) for one in dynamic]
    if len(call.shardings) != len(dynamic):
        raise ValueError(f"shardings: {len(call.shardings)} of them for {len(dynamic)} arguments")
    placed = []
    for position, (specs, argument) in enumerate(zip(call.shardings, dynamic, strict=True)):
        shardings = on_mesh(PartitionSpec() if specs is None else specs, mesh)
        try:
            broadcast = jax.tree.broadcast(shardings, argument, is_leaf=_is_sharding)
        except ValueError as error:
            raise ValueError(f"shardings: not a prefix of argument {position}: {first_line(error)}") from None
        placed.append(jax.tree.map(_shape, argument, broadcast))
    return placed


def _is_sharding(node: Any) -> bool:
    return isinstance(node, (NamedSharding, PartitionSpec))


def on_mesh(specs: Any, mesh: Mesh) -> Any:
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


def host_bytes(call: Call, placed: list[Any], out_shardings: Any, results: Any) -> HostBytes:
    """The bytes of arguments and results that are in host memory, per device."""
    donated = sum(_bytes_on_host(placed[position]) for position in call.donated_positions)
    result_bytes = 0
    if out_shardings is not None:
        broadcast = jax.tree.broadcast(out_shardings, results, is_leaf=_is_sharding)
        result_bytes = _bytes_on_host(jax.tree.map(_shape, results, broadcast))
    return HostBytes(sum(map(_bytes_on_host, placed)), result_bytes, donated)


def _bytes_on_host(tree: Any) -> int:
    """Bytes of each device of the leaves in host memory."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if leaf.sharding.memory_kind in ("pinned_host", "unpinned_host"):
            total += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total


def reason_and_line(error: BaseException) -> str:
    """What an error says, and the user's own line that raised it: `TypeError: ...  [step.py:7]`."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if not _is_of_a_library(frame.filename)]
    place = f"  [{own_frames[-1].filename}:{own_frames[-1].lineno}]" if own_frames else ""
    return first_line(error) + place


def first_line(error: BaseException) -> str:
    """The first line of what an error says, after its type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _is_of_a_library(file: str) -> bool:
    return "site-packages" in file or file.startswith("<") or Path(file).is_relative_to(_LIBRARY)
