"""Turns the arguments of a user's function into abstract arrays on the devices of a target."""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.devices.executables import HostBytes
from plimsoll.framework.plan.function_call import FunctionCall
from plimsoll.framework.plan.targets import Target

# The folder of the package `plimsoll`.
_LIBRARY = Path(__file__).parents[2]


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


def mesh_context(call: FunctionCall, mesh: Mesh) -> Any:
    """Return the context manager in which the function's own PartitionSpecs refer to the mesh."""
    return nullcontext() if call.mesh is None and mesh.size == 1 else jax.set_mesh(mesh)


def _is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array, a number, or a `jax.ShapeDtypeStruct`."""
    return isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array, np.ndarray, np.generic, bool, int, float, complex))


def make_traceable(call: FunctionCall) -> tuple[list[Any], Callable[..., Any]]:
    """Return (the arguments with None for leaves that are not arrays, a function of only these arguments)."""
    arguments = list(call.arguments)
    array_arguments = [jax.tree.map(lambda leaf: leaf if _is_array(leaf) else None, one) for one in arguments]

    # Keep the signature: the compiler names arguments after the parameters.
    @functools.wraps(call.function, updated=())
    def function(*traced_arguments: Any) -> Any:
        full_arguments = []
        for traced, given in zip(traced_arguments, arguments, strict=True):
            leaves = iter(jax.tree.leaves(traced))
            full_arguments.append(jax.tree.map(lambda leaf: next(leaves) if _is_array(leaf) else leaf, given))  # noqa: B023
        results = call.function(*full_arguments)
        # Results may hold such leaves too, for example an updated model.
        return jax.tree.map(lambda leaf: leaf if _is_array(leaf) else None, results)

    return array_arguments, function


def place_arguments(call: FunctionCall, dynamic: list[Any], mesh: Mesh) -> list[Any]:
    """Return the arguments as abstract arrays on the devices of the mesh.

    Args:
        call: the user's call.
        dynamic: its arguments, with None for leaves that are not arrays.
        mesh: mesh of the target's devices.
    """
    if call.shardings is None:
        return [_apply_leaf_shardings(one, mesh) for one in dynamic]
    if len(call.shardings) != len(dynamic):
        raise ValueError(f"shardings: expected one per argument ({len(dynamic)}), given {len(call.shardings)}")
    placed = []
    for position, (specs, argument) in enumerate(zip(call.shardings, dynamic, strict=True)):
        if specs is None:
            placed.append(_apply_leaf_shardings(argument, mesh))
            continue
        try:
            broadcast = jax.tree.broadcast(on_mesh(specs, mesh), argument, is_leaf=_is_sharding)
        except ValueError as error:
            raise ValueError(f"shardings: not a prefix of argument {position}: {first_line(error)}") from None
        placed.append(jax.tree.map(_abstract_array, argument, broadcast))
    return placed


def place_jitted_arguments(call: FunctionCall, mesh: Mesh) -> list[Any]:
    """Return the arguments of a jitted function, with arrays replaced by abstract arrays.

    Other leaves are unchanged, because they may be static. On the caller's own mesh, an array without a sharding stays
    without one, so that the function may choose it.

    Args:
        call: the user's call.
        mesh: mesh of the target's devices.
    """
    if call.shardings is not None:
        return place_arguments(call, list(call.arguments), mesh)

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array, np.ndarray, np.generic)):
            return leaf
        has_no_sharding = not isinstance(getattr(leaf, "sharding", None), NamedSharding)
        return _abstract_array(leaf, None if has_no_sharding and mesh is call.mesh else _sharding_on_mesh(leaf, mesh))

    return [jax.tree.map(shape, one) for one in call.arguments]


def _apply_leaf_shardings(argument: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda leaf: _abstract_array(leaf, _sharding_on_mesh(leaf, mesh)), argument)


def _is_sharding(node: Any) -> bool:
    return isinstance(node, (NamedSharding, PartitionSpec))


def on_mesh(specs: Any, mesh: Mesh) -> Any:
    """Convert a tree of PartitionSpecs, or of shardings on another mesh, to this mesh; None means replicated."""
    return jax.tree.map(
        lambda spec: _sharding(spec, mesh), specs, is_leaf=lambda node: node is None or _is_sharding(node)
    )


def result_shardings_on_mesh(specs: Any, mesh: Mesh) -> Any:
    """Convert the shardings of results to this mesh; None leaves the choice to the compiler, as in `jax.jit`."""
    return jax.tree.map(lambda spec: _sharding(spec, mesh), specs, is_leaf=_is_sharding)


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
            f"a sharding uses {', '.join(unknown)}, but the axes of the mesh are {', '.join(mesh.axis_names)}"
        )
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def _sharding_on_mesh(leaf: Any, mesh: Mesh) -> NamedSharding:
    """Return the sharding of a `jax.ShapeDtypeStruct` on this mesh.

    A concrete array's sharding is ignored: it only reflects where the array happens to be on this machine.
    """
    sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
    return _sharding(sharding if isinstance(sharding, NamedSharding) else None, mesh)


def _abstract_array(leaf: Any, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    abstract = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    weak = getattr(abstract, "weak_type", False)
    return jax.ShapeDtypeStruct(abstract.shape, abstract.dtype, sharding=sharding, weak_type=weak)


def host_bytes(placed: list[Any], out_shardings: Any, traced: jax.stages.Traced) -> HostBytes:
    """Return the bytes of arguments and results that are in host memory, per device.

    Args:
        placed: arguments as abstract arrays.
        out_shardings: tree of the results' shardings, or a prefix of it.
        traced: the traced function.
    """
    return HostBytes(
        arguments=sum(map(_bytes_on_host, placed)),
        results=_result_bytes_on_host(out_shardings, traced.out_info),
        donated=sum(map(_bytes_on_host, _select_donated(placed, traced))),
    )


def _select_donated(placed: list[Any], traced: jax.stages.Traced) -> list[Any]:
    """Return the donated arguments, whose memory the results may reuse."""
    infos = traced.args_info[0]
    if len(infos) != len(placed):
        # `args_info` leaves out static arguments.
        placed = [argument for argument in placed if any(map(_is_shape, jax.tree.leaves(argument)))]
    pairs = zip(placed, infos, strict=False)
    return [argument for argument, info in pairs if any(leaf.donated for leaf in jax.tree.leaves(info))]


def _result_bytes_on_host(out_shardings: Any, results: Any) -> int:
    broadcast = jax.tree.broadcast(out_shardings, results, is_leaf=lambda node: node is None or _is_sharding(node))
    return _bytes_on_host(jax.tree.map(_abstract_array, results, broadcast))


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _bytes_on_host(tree: Any) -> int:
    """Return the bytes per device of the leaves in host memory."""
    total = 0
    for leaf in filter(_is_shape, jax.tree.leaves(tree)):
        if leaf.sharding is not None and leaf.sharding.memory_kind in ("pinned_host", "unpinned_host"):
            total += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total


def reason_and_line(error: BaseException) -> str:
    """Return an error's message and the line of user code that raised it: `TypeError: ...  [step.py:7]`."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not _is_library_file(frame.filename)]
    location = f"  [{user_frames[-1].filename}:{user_frames[-1].lineno}]" if user_frames else ""
    return first_line(error) + location


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _is_library_file(file: str) -> bool:
    return "site-packages" in file or file.startswith("<") or Path(file).is_relative_to(_LIBRARY)
