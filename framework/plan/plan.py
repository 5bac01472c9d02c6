"""The plan of a run: every phase compiled for a target, and what it says put into one report.

A report is a dict that JSON can hold; docs/plan.md explains its keys. Bytes are of one device unless a name says
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from framework.checkpoint.storage import read_bytes
from framework.config import Config
from framework.devices.executables import HostBytes
from framework.layout import Leaf, merge
from framework.plan import jaxprs, layers
from framework.plan.cache import versions
from framework.plan.compiled import Compiled, compile_for
from framework.plan.hlo import Array
from framework.plan.naming import OF_LAYOUT, Named, name_buffers
from framework.plan.report import KEYS
from framework.plan.suggest import closed_form, compile_step, state_bytes, suggestions
from framework.plan.targets import Target
from framework.program.experiment import Experiment
from framework.program.program import Program
from framework.schedules.layerwise.storage import STACK
from framework.schedules.step import training_context
from framework.terminal.tables import human_bytes

Report = dict[str, Any]
_COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda12-pjrt", "jax-cuda13-pjrt"), "cpu": ()}
_LARGEST = 30


def quick(name: str, config: Config, target: Target, limit: int | None) -> Report:
    """The report of the closed form alone: no compiler, no devices.

    Args:
        name: of the config. config: resolved for the target. target: where.
        limit: device memory in bytes; None means unknown.
    """
    experiment: Experiment = config.instantiate()
    found = closed_form(experiment, target)
    state, peak = state_bytes(found), found.peak_bytes
    arguments = state + found.breakdown["batch"]
    report = _head(name, experiment, target, limit)
    report |= _device_bytes(Compiled(0.0, peak, peak, arguments, state, state, peak - arguments))
    report |= {
        "estimated": True,
        "fits": limit is None or peak <= limit,
        "breakdown": found.breakdown,
        "host_breakdown": found.host_breakdown,
        "estimate": {"device_peak_bytes": peak, "breakdown": found.breakdown, "error": None},
        **_flops(found.flops, report["tokens_per_step"]),
    }
    _add_host(report, found.host_bytes, 0, target)
    if not report["fits"]:
        report["suggestions"] = suggestions(config, target, limit or 0, peak, seconds=0.0)
    return report


def plan(
    name: str,
    config: Config,
    target: Target,
    limit: int | None,
    *,
    phases: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> Report:
    """The report of the compiled programs.

    Args:
        name, config, target, limit: as for `quick`.
        phases: compile initialization and evaluation too, not the training step alone.
        tell: called with a word about what is going on.

    Raises:
        ValueError: config and target do not fit each other; the target's compiler is not installed.
    """
    program = Program(config.instantiate(), target.devices())
    layout = program.layout
    state, hosted = (layout.bytes_per_device(memory_kind=kind) for kind in ("device", "pinned_host"))
    report = _head(name, program.experiment, target, limit) | {"estimated": False}
    tell("tracing the training step")
    report |= traced(program)
    tell(f"compiling the training step for {target.name}")
    step = compile_step(program, target, limit)
    report |= _step(program, step)
    if step.ledger is not None:
        report |= layers.totals(step.ledger, report["tokens_per_step"])
    _add_host(report, hosted, step.host_temp, target)
    found = closed_form(program.experiment, target)
    error = None if step.message else found.peak_bytes / step.peak - 1.0
    report["estimate"] = {"device_peak_bytes": found.peak_bytes, "breakdown": found.breakdown, "error": error}

    peaks = {"train": (step.allocated, report["host_peak_bytes"])} | _save_and_restore(program, target)
    if phases:
        tell("compiling initialization")
        init = _init(program, target, hosted)
        tell("compiling evaluation")
        evaluation = _evaluation(program, target)
        taken = sum(layout.bytes_per_device(group, "device") for group in ("parameter", "frozen", "buffer"))
        # What is no argument of it, the rest of the state, stays too.
        peaks |= {"init": (init.allocated, hosted), "evaluation": (evaluation.allocated - taken + state, hosted)}
        report["compile_seconds"] = round(step.seconds + init.seconds + evaluation.seconds, 1)
        report["message"] = step.message or init.message or evaluation.message
    report["phases"] = {
        phase: {"device_peak_bytes": peaks[phase][0], "host_peak_bytes": peaks[phase][1]}
        for phase in ("init", "restore", "train", "evaluation", "save")
        if phase in peaks
    }
    most = max(device for device, _ in peaks.values())
    report["fits"] = not step.message and (limit is None or most <= limit)
    if not report["fits"]:
        tell("looking for settings that fit")
        report["suggestions"] = suggestions(config, target, limit or 0, most)
    return report


def _init(program: Program, target: Target, hosted: int) -> Compiled:
    if program.in_parts:
        return layers.rehearsed(target, None, program.rehearse_init)
    return compile_for(program.init_jit().lower(), target.platform, HostBytes(results=hosted))


def _evaluation(program: Program, target: Target) -> Compiled:
    layout, batch = program.layout, program.evaluation_specs
    if program.in_parts:
        weights = {group: layout.specs[group] for group in ("parameter", "frozen")}
        return layers.rehearsed(target, None, partial(program.layers.evaluate, weights, layout.specs["buffer"], batch))
    groups = layout.abstract([layout.specs[group] for group in ("parameter", "frozen", "buffer")])
    hosted = sum(layout.bytes_per_device(group, "pinned_host") for group in ("parameter", "frozen"))
    lowered = program.evaluate_jit.lower(*groups, layout.abstract(batch))
    return compile_for(lowered, target.platform, HostBytes(arguments=hosted))


# --- the parts of a report -------------------------------------------------------------------------------------------


def _head(name: str, experiment: Experiment, target: Target, limit: int | None) -> Report:
    tokens = experiment.data.global_batch_size * experiment.data.seq_len
    sizes = experiment.mesh.resolve(target.num_devices)
    per_token = experiment.model.flops_per_token(experiment.data.seq_len)
    empty: Report = {key: [] for key in ("largest", "zero_gradients", "suggestions", "notes")}
    empty |= {"collective_bytes": {}, "phases": {}, "host_transfer_bytes": 0, "compile_seconds": 0.0, "message": ""}
    return empty | {
        "config": name,
        "target": target.name,
        "accelerator": target.spec.name,
        "platform": target.platform,
        "devices": target.num_devices,
        "processes": target.num_processes,
        "mesh": sizes,
        "mesh_across": experiment.mesh.cut(sizes, target.num_slices),
        "device_limit_bytes": limit,
        "host_limit_bytes": target.host_limit_bytes,
        "item": experiment.data.item,
        "tokens_per_step": tokens,
        "model_flops_per_token": per_token,
        "flops_per_token": per_token,
        "flops_per_step": per_token * tokens,
        "versions": versions("jax", "jaxlib", *_COMPILERS[target.platform]),
    }


def _device_bytes(step: Compiled) -> Report:
    names = ("peak", "allocated", "argument", "output", "alias", "temp")
    return {f"device_{name}_bytes": getattr(step, name) for name in names}


def _add_host(report: Report, state: int, temporary: int, target: Target) -> None:
    """Bytes in host memory: no part of the verdict, as which machine has the devices is for people to choose."""
    need, limit = (state + temporary) * target.num_devices // target.num_processes, target.host_limit_bytes
    report |= {"host_argument_bytes": state, "host_peak_bytes": state + temporary, "host_process_bytes": need}
    if limit is not None and need > limit:
        less = f"less than the {human_bytes(need)} that live there"
        report["notes"].append(f"a host of this kind has {human_bytes(limit)}, {less}")


def traced(program: Program) -> Report:
    """FLOPs, and parameters that the loss does not reach."""
    layout = program.whole
    count = jaxprs.FlopCount() if program.in_parts else jaxprs.flops(program.traced_step.jaxpr)
    model, remat = program.experiment.model, program.experiment.memory.remat

    def loss(params: Any, state: Any, batch: Any) -> jax.Array:
        ctx = training_context(batch, state["counter"], model, layout, remat)
        params, frozen = layout.fetch("parameter", params), layout.fetch("frozen", state["frozen"])
        params, frozen = (model.split_units(group, remat) for group in (params, frozen))
        return model.loss(merge(params, frozen), ctx, state["buffer"])[0]

    state, batch = layout.abstract(), layout.abstract(program.batch_specs)
    leaves = [leaf for leaf in layout if leaf.group == "parameter"]
    zero = jaxprs.unreached(loss, state["parameter"], state, batch)
    return {
        **_flops(count, program.experiment.data.global_batch_size * program.experiment.data.seq_len),
        "zero_gradients": [
            {"path": leaf.path.removeprefix("parameter/"), "bytes": leaf.bytes_per_device}
            for leaf, is_zero in zip(leaves, zero, strict=True)
            if is_zero
        ],
    }


def _flops(count: jaxprs.FlopCount, tokens: int) -> Report:
    """What a report says of them."""
    loops = f"{count.uncounted_loops} loops run as often as the data says; their FLOPs are counted once"
    return {
        "flops_per_step": count.flops,
        "flops_per_token": count.flops / tokens,
        "notes": [loops] if count.uncounted_loops else [],
    }


def _step(program: Program, step: Compiled) -> Report:
    """What the training step's buffers say."""
    layout, breakdown, host = program.layout, dict.fromkeys(KEYS, 0), dict.fromkeys(KEYS, 0)
    state, hosted = (layout.bytes_per_device(memory_kind=kind) for kind in ("device", "pinned_host"))
    for leaf in layout:
        if leaf.spec.memory_kind != "device":
            host[OF_LAYOUT[leaf.group]] += leaf.bytes_per_device
    host["activations"] += step.host_temp
    moved, rest = {}, "other"
    if step.ledger is not None:
        named = layers.named(program, step.ledger)
    elif step.buffers is not None:
        named = name_buffers(step.buffers, layout)
        module = step.buffers.module
        # Each host leaf is taken in and out, also where the program's text does not name its memory space (CPU, GPU).
        transfers = max(module.host_bytes(), 2 * hosted)
        moved = {"collective_bytes": module.collective_bytes(), "host_transfer_bytes": transfers}
    else:  # the compiler refused: the state is known, and what it adds up to
        rest = "activations"
        named = [
            Named(leaf.path, OF_LAYOUT[leaf.group], leaf.bytes_per_device, f"{shape}, all shards")
            for leaf in layout
            for shape in [Array(str(leaf.spec.dtype), leaf.spec.shape)]
            if leaf.spec.memory_kind == "device"
        ]
    alike: dict[tuple[str, str, str], list[int]] = {}
    for one in named:
        breakdown[one.group] += one.bytes
        alike.setdefault((one.name, one.group, one.shape), []).append(one.bytes)
    breakdown[rest] += step.peak - sum(breakdown.values())
    largest = sorted(alike.items(), key=lambda item: -sum(item[1]))[:_LARGEST]
    return {
        **moved,
        **_device_bytes(replace(step, argument=state) if step.message else step),
        "breakdown": breakdown,
        "host_breakdown": host,
        "largest": [
            {"name": name, "group": group, "shape": shape, "count": len(sizes), "bytes": sum(sizes)}
            for (name, group, shape), sizes in largest
        ],
        "compile_seconds": round(step.seconds, 1),
        "message": step.message,
    }


def _save_and_restore(program: Program, target: Target) -> dict[str, tuple[int, int]]:
    """(device, host) bytes, by the layout. Saving copies to host memory what this process writes, each array once;
    restoring fills the layout's leaves, with a bounded number of bytes on their way through host memory; but stacks
    that are in parts are read as whole ones, into host memory, and cut a leaf at a time."""
    layout = program.layout
    device, host = (layout.bytes_per_device(memory_kind=kind) for kind in ("device", "pinned_host"))
    local = target.num_devices // target.num_processes
    copied = sum(min(leaf.spec.num_bytes, leaf.bytes_per_device * local) for leaf in layout)
    passing = read_bytes(max(leaf.spec.num_bytes for leaf in layout))
    if program.in_parts:
        passing += local * sum(leaf.bytes_per_device for leaf in layout if _comes_by_host(leaf))
    passing = min(passing, local * (device + host))  # a process reads the shards of its own devices
    return {"save": (device, host + copied // local), "restore": (device, host + passing // local)}


def _comes_by_host(leaf: Leaf) -> bool:
    return leaf.spec.memory_kind == "device" and leaf.path.split("/")[1] == STACK
