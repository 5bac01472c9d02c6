"""`plan_function`: computes the needs of any JAX function on a machine that need not be present."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from plimsoll.api.plans import Plan, disable_compilation_cache, use_target_environment
from plimsoll.framework.devices.environment import prepare_jax
from plimsoll.framework.plan import targets
from plimsoll.framework.plan.function_call import FunctionCall
from plimsoll.framework.plan.function_report import plan_call
from plimsoll.framework.terminal.phase_views import show_phases_on_terminal


@show_phases_on_terminal()
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
    """Plan one call of a function for a target by compiling it with the target's compiler.

    The report has the peak, the buffers that are alive at the peak (by argument path and by `jax.named_scope`), the
    bytes in host memory, and the verdict. Nothing is executed, and the function is not modified.

    Args:
        function: any function of arrays that JAX can trace, jitted or not. The settings of `jax.jit` (static and
            donated arguments, shardings, options) are kept, unless `donate` or `out_shardings` are given here.
        arguments: positional arguments of the function: trees of arrays or `jax.ShapeDtypeStruct`s with global shapes.
            Other leaves, such as the activation function in an equinox module, are passed unchanged.
        target: v5e-16, h200x8, 4090, cpu:8, local ...
        donate: arguments whose memory the results may reuse, by position or name; or a single one of these.
        mesh: {axis: size} over all devices of the target, in order; by default every device does the same work. Or a
            mesh, such as one that the function closes over; it may be made of devices of a topology, or be abstract.
        shardings: a PartitionSpec for each argument, or a tree of them that is a prefix of the argument's tree. The
            default is the `sharding` of each ShapeDtypeStruct, from any mesh with these axes; otherwise replicated.
        out_shardings: PartitionSpecs of the results, in the same form; None, for all or some of them, leaves the choice
            to the compiler.
        device_memory_gib: memory of each device in GiB (2^30 bytes), instead of the target's own.
        name: name of the function in the report; by default the function's own name.
        compiler_options: XLA options, as for `jax.jit`.

    Raises:
        ValueError: the target does not exist, or its compiler is not installed; the function cannot be traced with
            these arguments (the message ends with the offending line); or mesh or shardings do not fit the arguments.
        TypeError: `function` is not callable, or `arguments` is not a tuple.
    """
    if device_memory_gib is not None and not device_memory_gib > 0:
        raise ValueError(f"device_memory_gib={device_memory_gib}: expected more than 0")
    call = FunctionCall(function, arguments, donate, mesh, shardings, out_shardings, name, compiler_options or {})
    prepare_jax()
    machine = targets.resolve(target)
    limit = machine.limit_bytes if device_memory_gib is None else int(device_memory_gib * 2**30)
    with use_target_environment(target, starts=True), disable_compilation_cache():
        return Plan(plan_call(call, machine, limit))
