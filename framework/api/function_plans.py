"""`plan_function`: what any JAX function needs on a machine that need not be there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from framework.api.plans import Plan, of_target, uncached
from framework.devices.environment import prepare_jax
from framework.plan import targets
from framework.plan.function import plan_call
from framework.plan.function_call import Call
from framework.terminal.phase_views import shown_on_terminal


@shown_on_terminal()
def plan_function(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    target: str,
    *,
    donate: Sequence[int | str] | int | str = (),
    mesh: Mapping[str, int] | Mesh | AbstractMesh | None = None,
    shardings: Sequence[Any] | None = None,
    out_shardings: Any = None,
    device_memory_gib: float | None = None,
    name: str = "",
    compiler_options: Mapping[str, Any] | None = None,
) -> Plan:
    """Tells what one call of a function needs on a target: the target's compiler compiles it.

    The report has the peak, the buffers that are alive at it by the path of the argument and by `jax.named_scope`s, the
    bytes in host memory, and the verdict. Nothing is computed, and nothing of the function is changed.

    Args:
        function: any function of arrays that JAX can trace, jitted or not. What `jax.jit` was told is kept (what is
            static or donated, shardings, options), unless `donate` or `out_shardings` are given here.
        arguments: its positional arguments: trees of arrays or `jax.ShapeDtypeStruct`s, of a global shape. Leaves that
            are neither, such as the activation function in an equinox module, are given to it as they are.
        target: v5e-16, h200x8, 4090, cpu:8, local ...
        donate: arguments whose memory the results may take, by position or name; or one of these alone.
        mesh: {axis: size} over all devices of the target, in order; by default every device does the same. Or a mesh,
            which may be of devices of a topology, such as the function closed over, or of none.
        shardings: for each argument a PartitionSpec, or a tree of them that is a prefix of the argument's. By default
            what the `sharding` of a ShapeDtypeStruct says, of whatever mesh with such axes; else whole on each device.
        out_shardings: of the results, likewise; None, for all or for some of them: as the compiler likes.
        device_memory_gib: of each device, instead of what the target has; in GiB of 2^30 bytes.
        name: what the report calls it; the function's own name by default.
        compiler_options: of XLA, as `jax.jit` takes them.

    Raises:
        ValueError: there is no such target, or its compiler is not installed; the function cannot be traced with these
            arguments, and the message ends with the line that says so; mesh or shardings do not go with them.
        TypeError: `function` cannot be called, or `arguments` is no tuple.
    """
    if device_memory_gib is not None and not device_memory_gib > 0:
        raise ValueError(f"device_memory_gib={device_memory_gib}: expected more than 0")
    call = Call(function, arguments, donate, mesh, shardings, out_shardings, name, compiler_options or {})
    prepare_jax()
    machine = targets.resolve(target)
    limit = machine.limit_bytes if device_memory_gib is None else int(device_memory_gib * 2**30)
    with of_target(target, starts=True), uncached():
        return Plan(plan_call(call, machine, limit))
