"""Plans any JAX function: what one call needs on a target, according to the target's compiler."""

from __future__ import annotations

import re
from collections import Counter
from typing import cast

import jax
from jax.sharding import Mesh

from plimsoll.framework.devices.executables import HostBytes
from plimsoll.framework.plan.buffer_names import (
    NamedBuffer,
    describe_clearest_operation,
    find_source_argument,
    list_writer_names,
)
from plimsoll.framework.plan.buffers import Buffers
from plimsoll.framework.plan.build_report import COMPILERS, list_largest
from plimsoll.framework.plan.cache import versions
from plimsoll.framework.plan.compilation import CompiledProgram, compile_for
from plimsoll.framework.plan.function_call import (
    FunctionCall,
    build_mesh,
    host_bytes,
    make_traceable,
    mesh_context,
    place_arguments,
    place_jitted_arguments,
    reason_and_line,
    result_shardings_on_mesh,
)
from plimsoll.framework.plan.hlo import arrays
from plimsoll.framework.plan.jaxpr_analysis import FlopCount, flops
from plimsoll.framework.plan.plan_report import PlanReport
from plimsoll.framework.plan.step_time.compiled_time import estimate_compiled_time
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.terminal.phases import phase

# Breakdown groups other than arguments.
RESULTS = "results"
TEMPORARIES = "temporaries"
OTHER = "other"


def plan_call(call: FunctionCall, target: Target, limit: int | None) -> PlanReport:
    """Return the report of one call of a function.

    Args:
        call: the function and its arguments.
        target: the machine to plan for.
        limit: device memory in bytes; None means unknown.

    Raises:
        ValueError: the function cannot be traced with these arguments or on this mesh, or the target's compiler is not
            installed.
    """
    mesh = build_mesh(call, target)
    out_shardings = result_shardings_on_mesh(call.out_shardings, mesh)
    if call.is_jitted:
        jitted = cast(jax.stages.Wrapped, call.function)
        placed = place_jitted_arguments(call, mesh)
    else:
        dynamic, function = make_traceable(call)
        placed = place_arguments(call, dynamic, mesh)
        options = {} if call.out_shardings is None else {"out_shardings": out_shardings}
        jitted = jax.jit(function, donate_argnums=call.donated_positions, **options)
    with phase(f"tracing {call.title}"), mesh_context(call, mesh):
        try:
            traced = jitted.trace(*placed)
            lowered = traced.lower()
        # A user's function may raise anything; the message names the line in the user's code.
        except Exception as error:
            reason = reason_and_line(error)
            raise ValueError(f"{call.title} cannot be traced: {reason}") from error
    offloaded = host_bytes(placed, out_shardings, traced)
    # A limit is passed to the compiler only if it is below the target's own, which the compiler knows.
    mib = limit >> 20 if limit is not None and limit < (target.limit_bytes or 0) else None
    with phase(f"compiling {call.title} for {target.name}"):
        compiled = compile_for(lowered, target.platform, offloaded, mib, call.compiler_options)
    return _report(call, target, limit, mesh, compiled, flops(traced.jaxpr), offloaded)


def _report(
    call: FunctionCall,
    target: Target,
    limit: int | None,
    mesh: Mesh,
    compiled: CompiledProgram,
    flop_count: FlopCount,
    offloaded: HostBytes,
) -> PlanReport:
    buffers = compiled.buffers
    named_buffers = [] if buffers is None else name_peak_buffers(buffers)
    # The bytes at the peak by group: arguments first, in call order.
    breakdown = Counter(dict.fromkeys([*call.argument_names, RESULTS, TEMPORARIES, OTHER], 0))
    for buffer in named_buffers:
        breakdown[buffer.group] += buffer.bytes
    breakdown[OTHER] += compiled.peak - sum(breakdown.values())
    time = None if compiled.message else estimate_compiled_time([compiled], target, compiled.peak)
    host_bytes = offloaded.arguments + offloaded.results - offloaded.donated + compiled.host_temp
    return PlanReport(
        config=call.title,
        subject=call.title,
        target=target.name,
        accelerator=target.spec.name,
        platform=target.platform,
        devices=target.num_devices,
        processes=target.num_processes,
        mesh=dict(mesh.shape),
        mesh_across={},
        device_limit_bytes=limit,
        device_reserved=target.list_reserved_bytes(None),
        device_memory_fraction=target.get_memory_fraction(limit),
        host_limit_bytes=target.host_limit_bytes,
        versions=versions("jax", "jaxlib", *COMPILERS[target.platform]),
        fits=not compiled.message and (limit is None or compiled.allocated <= limit),
        device_peak_bytes=compiled.peak,
        device_allocated_bytes=compiled.allocated,
        device_argument_bytes=compiled.argument,
        device_output_bytes=compiled.output,
        device_alias_bytes=compiled.alias,
        device_temp_bytes=compiled.temp,
        breakdown={group: size for group, size in breakdown.items() if size},
        host_peak_bytes=host_bytes,
        host_process_bytes=host_bytes * target.num_devices // target.num_processes,
        largest=list_largest(named_buffers),
        flops_per_step=flop_count.flops,
        collective_bytes={} if buffers is None else buffers.module.collective_bytes(),
        host_transfer_bytes=0 if buffers is None else buffers.module.host_bytes(),
        time=None if time is None else time.report(tokens=None, model_flops=None, peak_flops=None),
        compile_seconds=round(compiled.seconds, 1),
        message=compiled.message,
        notes=target.compiler_notes,
    )


def name_peak_buffers(buffers: Buffers) -> list[NamedBuffer]:
    """Return the buffers alive at the peak, largest first, named by the user's argument paths and scopes."""
    module = buffers.module
    named_buffers = []
    for name, size in buffers.parameters.items():
        path = module.parameters.get(name, "") or name
        array = arrays(module.instructions[name].type)[0] if name in module.instructions else ""
        # The group is the argument name: params for params['layer']['weight'].
        argument = re.split(r"[\[.]", path, maxsplit=1)[0]
        named_buffers.append(NamedBuffer(path, argument, size, str(array)))
    for block in buffers.blocks:
        values = [value for value in block.values if value.name in module.instructions]
        block_arrays = arrays(block.values[0].shape)
        shape = str(block_arrays[0]) if block_arrays else block.values[0].shape
        source = module.parameters.get(find_source_argument(module, values), "")
        operation = describe_clearest_operation(list_writer_names(module, values)) or block.values[0].name
        name = f"copy of {source}" if source else operation
        named_buffers.append(NamedBuffer(name, TEMPORARIES, block.size, shape))
    if buffers.output_bytes:
        named_buffers.append(NamedBuffer("results that reuse no argument's memory", RESULTS, buffers.output_bytes, ""))
    return sorted(named_buffers, key=lambda buffer: -buffer.bytes)
