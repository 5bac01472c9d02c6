"""A user's function and the arguments of one call, and their abstract arrays on the devices of a target."""

from __future__ import annotations

import functools
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.devices.executables import HostBytes
from plimsoll.framework.layout import PyTree
from plimsoll.framework.plan.targets import Target

# The folder of the package `plimsoll`.
_LIBRARY = Path(__file__).parents[2]
# Type of the functions that jax.jit returns. They already carry static and donated arguments, and shardings.
_JITTED = type(jax.jit(lambda: None))


@dataclass(frozen=True)
class FunctionCall:
    """A function and the arguments of one call.

    Attributes:
        function: any function of arrays that JAX can trace, jitted or not.
        arguments: positional arguments: trees of arrays or `jax.ShapeDtypeStruct`s. Leaves that are neither, such as
            the activation function of an equinox module, stay as they are.
        donate: positions or names of the arguments whose memory the results may reuse; a single one needs no sequence.
        mesh: {axis: size} over all devices of the target, or a mesh. None means one device, or all devices with
            replicated arrays. A mesh of devices of the target's kind is used unchanged; of any other mesh, only the
            axes are used.
        shardings: one tree of PartitionSpecs, or a prefix of it, per argument. None, for all arguments or for one,
            uses the leaves' own `sharding`, which may belong to any mesh with these axes; leaves without one are
            replicated.
        out_shardings: tree of PartitionSpecs of the results, or a prefix of it; None, for all or some results, leaves
            the choice to the compiler.
        name: name of the call in a report; by default the function's own name.
        compiler_options: {option: value} for XLA.
        argument_names: names of the positional parameters, as far as the signature is known.
    """

    function: Callable[..., PyTree]
    arguments: Sequence[PyTree]
    donate: Sequence[int | str] | int | str = ()
    mesh: Mapping[str, int] | Mesh | AbstractMesh | None = None
    shardings: Sequence[PyTree] | None = None
    out_shardings: PyTree = None
    name: str = ""
    compiler_options: Mapping[str, str | int | bool] = field(default_factory=dict)
    argument_names: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"expected a function, given {type(self.function).__name__}")
        if not isinstance(self.arguments, (tuple, list)):
            raise TypeError(f"expected a tuple of arguments, given {type(self.arguments).__name__}")
        if isinstance(self.donate, (int, str)):
            object.__setattr__(self, "donate", (self.donate,))
        # The signature of some functions is unknown, and it may have fewer positional parameters.
        names = []
        with suppress(TypeError, ValueError):
            for parameter in inspect.signature(self.function).parameters.values():
                if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                    names.append(parameter.name)
        object.__setattr__(self, "argument_names", tuple(names[: len(self.arguments)]))

    @property
    def title(self) -> str:
        """The given name, or the function's own name; a `functools.partial` without a name uses its function's."""
        function = self.function
        while isinstance(function, functools.partial) and not hasattr(function, "__name__"):
            function = function.func
        return self.name or getattr(function, "__name__", type(function).__name__)

    @property
    def is_jitted(self) -> bool:
        """True if the function's own `jax.jit` is used, which then defines static and donated arguments."""
        return isinstance(self.function, _JITTED) and not self.donate and self.out_shardings is None

    @property
    def donated_positions(self) -> tuple[int, ...]:
        """Positions of the donated arguments.

        Raises:
            ValueError: there is no such argument.
        """
        positions = []
        assert not isinstance(self.donate, (int, str))
        for which in self.donate:
            if isinstance(which, str) and which not in self.argument_names:
                raise ValueError(
                    f"donate: {self.title} has no argument {which!r}; its arguments: {', '.join(self.argument_names)}"
                )
            position = self.argument_names.index(which) if isinstance(which, str) else which
            if not 0 <= position < len(self.arguments):
                raise ValueError(f"donate: {self.title} is called with {len(self.arguments)} arguments, given {which}")
            positions.append(position)
        return tuple(positions)


def build_mesh(call: FunctionCall, target: Target) -> Mesh:
    """Return the mesh of the target's devices.

    Args:
        call: the user's call.
        target: the machine to plan for.

    Raises:
        ValueError: the product of the axis sizes is not the number of devices.
    """
    sizes: dict[str, int] = {"devices": target.num_devices}
    if isinstance(call.mesh, (Mesh, AbstractMesh)):
        sizes = dict(call.mesh.shape)
    elif call.mesh is not None:
        sizes = dict(call.mesh)
    if math.prod(sizes.values()) != target.num_devices:
        product = " * ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(f"mesh: {product} does not match the {target.num_devices} devices of {target.name}")
    devices = target.devices()
    if isinstance(call.mesh, Mesh) and call.mesh.devices.flat[0].device_kind == devices[0].device_kind:
        # Keep the caller's device order; the function may also have closed over this mesh.
        return call.mesh
    axis_types = (AxisType.Auto,) * len(sizes)
    if isinstance(call.mesh, (Mesh, AbstractMesh)):
        axis_types = call.mesh.axis_types
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes), axis_types=axis_types)


def mesh_context(call: FunctionCall, mesh: Mesh) -> AbstractContextManager[object]:
    """Return the context manager in which the function's own PartitionSpecs refer to the mesh."""
    return nullcontext() if call.mesh is None and mesh.size == 1 else jax.set_mesh(mesh)


def _is_array(leaf: object) -> bool:
    """Return whether a leaf is an array, a number, or a `jax.ShapeDtypeStruct`."""
    return isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array, np.ndarray, np.generic, bool, int, float, complex))


def make_traceable(call: FunctionCall) -> tuple[list[PyTree], Callable[..., PyTree]]:
    """Return (the arguments with None for leaves that are not arrays, a function of only these arguments)."""
    arguments = list(call.arguments)
    array_arguments = [jax.tree.map(lambda leaf: leaf if _is_array(leaf) else None, one) for one in arguments]

    # Keep the signature: the compiler names arguments after the parameters.
    @functools.wraps(call.function, updated=())
    def function(*traced_arguments: PyTree) -> PyTree:
        full_arguments = []
        for traced, given in zip(traced_arguments, arguments, strict=True):
            leaves = iter(jax.tree.leaves(traced))
            full_arguments.append(jax.tree.map(lambda leaf: next(leaves) if _is_array(leaf) else leaf, given))  # noqa: B023
        results = call.function(*full_arguments)
        # Results may hold such leaves too, for example an updated model.
        return jax.tree.map(lambda leaf: leaf if _is_array(leaf) else None, results)

    return array_arguments, function


def place_arguments(call: FunctionCall, dynamic: list[PyTree], mesh: Mesh) -> list[PyTree]:
    """Return the arguments as abstract arrays on the devices of the mesh.

    Args:
        call: the user's call.
        dynamic: its arguments, with None for leaves that are not arrays.
        mesh: mesh of the target's devices.
    """
    shardings = [None] * len(dynamic) if call.shardings is None else call.shardings
    if len(shardings) != len(dynamic):
        raise ValueError(f"shardings: expected one per argument ({len(dynamic)}), given {len(shardings)}")
    placed = []
    for position, (specs, argument) in enumerate(zip(shardings, dynamic, strict=True)):
        if specs is None:
            placed.append(jax.tree.map(lambda leaf: _abstract_array(leaf, _sharding_on_mesh(leaf, mesh)), argument))
            continue
        # In a tree of specs, None means replicated.
        on_mesh = jax.tree.map(
            lambda spec: _sharding(spec, mesh), specs, is_leaf=lambda node: node is None or _is_sharding(node)
        )
        try:
            broadcast = jax.tree.broadcast(on_mesh, argument, is_leaf=_is_sharding)
        except ValueError as error:
            raise ValueError(f"shardings: not a prefix of argument {position}: {first_line(error)}") from None
        placed.append(jax.tree.map(_abstract_array, argument, broadcast))
    return placed


def place_jitted_arguments(call: FunctionCall, mesh: Mesh) -> list[PyTree]:
    """Return the arguments of a jitted function, with arrays replaced by abstract arrays.

    Other leaves are unchanged, because they may be static. On the caller's own mesh, an array without a sharding stays
    without one, so that the function may choose it.

    Args:
        call: the user's call.
        mesh: mesh of the target's devices.
    """
    if call.shardings is not None:
        return place_arguments(call, list(call.arguments), mesh)

    def place(leaf: object) -> object:
        if not isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array, np.ndarray, np.generic)):
            return leaf
        has_no_sharding = not isinstance(getattr(leaf, "sharding", None), NamedSharding)
        return _abstract_array(leaf, None if has_no_sharding and mesh is call.mesh else _sharding_on_mesh(leaf, mesh))

    return [jax.tree.map(place, one) for one in call.arguments]


def result_shardings_on_mesh(specs: PyTree, mesh: Mesh) -> PyTree:
    """Convert the shardings of results to this mesh; None leaves the choice to the compiler, as in `jax.jit`."""
    return jax.tree.map(lambda spec: _sharding(spec, mesh), specs, is_leaf=_is_sharding)


def _is_sharding(node: object) -> bool:
    return isinstance(node, (NamedSharding, PartitionSpec))


def _sharding(spec: NamedSharding | PartitionSpec | None, mesh: Mesh) -> NamedSharding:
    memory_kind = None
    if isinstance(spec, NamedSharding):
        memory_kind = spec.memory_kind
        spec = spec.spec
    spec = PartitionSpec() if spec is None else spec
    axes = {axis for entry in spec for axis in ([entry] if isinstance(entry, str) else entry or ())}
    unknown = sorted(axes - set(mesh.axis_names))
    if unknown:
        raise ValueError(
            f"a sharding uses {', '.join(unknown)}, but the axes of the mesh are {', '.join(mesh.axis_names)}"
        )
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def _sharding_on_mesh(leaf: object, mesh: Mesh) -> NamedSharding:
    """Return the sharding of a `jax.ShapeDtypeStruct` on this mesh.

    A concrete array's sharding is ignored: it only reflects where the array happens to be on this machine.
    """
    sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
    return _sharding(sharding if isinstance(sharding, NamedSharding) else None, mesh)


def _abstract_array(leaf: Any, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    abstract = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    weak = getattr(abstract, "weak_type", False)
    return jax.ShapeDtypeStruct(abstract.shape, abstract.dtype, sharding=sharding, weak_type=weak)


def host_bytes(placed: list[PyTree], out_shardings: PyTree, traced: jax.stages.Traced) -> HostBytes:
    """Return the bytes of arguments and results that are in host memory, per device.

    Args:
        placed: arguments as abstract arrays.
        out_shardings: tree of the results' shardings, or a prefix of it.
        traced: the traced function.
    """
    results = traced.out_info
    broadcast = jax.tree.broadcast(out_shardings, results, is_leaf=lambda node: node is None or _is_sharding(node))
    # The results may reuse the memory of donated arguments. `args_info` leaves out static arguments.
    infos = traced.args_info[0]
    dynamic = placed
    if len(infos) != len(placed):
        dynamic = []
        for argument in placed:
            if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(argument)):
                dynamic.append(argument)
    donated = 0
    for argument, info in zip(dynamic, infos, strict=False):
        if any(leaf.donated for leaf in jax.tree.leaves(info)):
            donated += _bytes_on_host(argument)
    return HostBytes(
        arguments=sum(map(_bytes_on_host, placed)),
        results=_bytes_on_host(jax.tree.map(_abstract_array, results, broadcast)),
        donated=donated,
    )


def _bytes_on_host(tree: PyTree) -> int:
    """Return the bytes per device of the leaves in host memory."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        # Other leaves are static.
        sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
        if sharding is not None and sharding.memory_kind in ("pinned_host", "unpinned_host"):
            total += math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total


def reason_and_line(error: BaseException) -> str:
    """Return an error's message and the line of user code that raised it: `TypeError: ...  [step.py:7]`."""
    location = ""
    for frame in traceback.extract_tb(error.__traceback__):
        file = frame.filename
        is_library = "site-packages" in file or file.startswith("<") or Path(file).is_relative_to(_LIBRARY)
        if not is_library:
            location = f"  [{file}:{frame.lineno}]"
    return first_line(error) + location


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
