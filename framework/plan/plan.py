"""The plan of a run: every phase compiled for a target, and what it says put into one report.

A report is a dict that JSON can hold; docs/plan.md explains its keys. Bytes are of one device unless a name says
otherwise. May import: everything in framework but trainer and hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from framework.accelerators import AcceleratorSpec
from framework.checkpoint_storage import read_bytes
from framework.config import Config
from framework.experiment import Experiment
from framework.layout import Group, Leaf, StateLayout, TensorSpec, flatten
from framework.metrics.tables import human_bytes
from framework.plan import jaxprs
from framework.plan.compiled import Compiled, compile_for
from framework.plan.naming import OF_LAYOUT, Named, name_buffers
from framework.plan.report import KEYS
from framework.plan.suggest import closed_form, limit_mib, state_bytes, suggestions
from framework.plan.targets import Target
from framework.program import Program
from framework.schedules.after_backward import accumulated_gradients
from framework.schedules.step import training_context

Report = dict[str, Any]
Tell = Callable[[str], None]
PHASES = ("init", "restore", "train", "evaluation", "save")
_LARGEST = 30


def quick(name: str, config: Config, target: Target, limit: int | None) -> Report:
    """The report of the closed form alone: no compiler, no devices.

    Args:
        name: of the config. config: resolved for the target. target: where.
        limit: device memory in bytes; None means unknown.
    """
    experiment: Experiment = config.instantiate()
    found = closed_form(experiment, target)
    state = state_bytes(found)
    report: Report = _head(name, experiment, target, limit) | {
        "estimated": True,
        "device_peak_bytes": found.peak_bytes,
        "device_allocated_bytes": found.peak_bytes,
        "device_argument_bytes": state + found.breakdown["batch"],
        "device_output_bytes": state,
        "device_alias_bytes": state,
        "device_temp_bytes": found.peak_bytes - state - found.breakdown["batch"],
        "host_argument_bytes": found.host_bytes,
        "host_peak_bytes": found.host_bytes,
        "breakdown": found.breakdown,
        "host_breakdown": found.host_breakdown,
        "estimate": {"device_peak_bytes": found.peak_bytes, "breakdown": found.breakdown, "error": None},
    }
    report["host_process_bytes"] = found.host_bytes * target.num_devices // target.num_processes
    report["fits"] = limit is None or found.peak_bytes <= limit
    report["notes"] += _host_note(report)
    if not report["fits"]:
        report["suggestions"] = suggestions(config, target, limit or 0, found.peak_bytes, seconds=0.0)
    return report


def plan(
    name: str, config: Config, target: Target, limit: int | None, *, phases: bool = True, tell: Tell = lambda text: None
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
    hosted = layout.bytes_per_device(memory_kind="pinned_host")
    report: Report = _head(name, program.experiment, target, limit) | {"estimated": False}

    tell("tracing the training step")
    report |= _traced(program)
    tell(f"compiling the training step for {target.name}")
    step = compile_for(program.traced_step.lower(), target.platform, hosted, limit_mib(target, limit))
    report |= _step(program, step, hosted, target)
    found = closed_form(program.experiment, target)
    error = None if step.needed else found.peak_bytes / step.peak - 1.0
    report["estimate"] = {"device_peak_bytes": found.peak_bytes, "breakdown": found.breakdown, "error": error}

    report["phases"] = {"train": _phase(step.allocated, report["host_peak_bytes"])}
    report["phases"] |= _save_and_restore(layout, target)
    if phases:
        tell("compiling initialization")
        # The GPU's compiler puts results for the host on the device first; on a CPU they are in the same memory anyway.
        init = compile_for(program.init_jit().lower(), target.platform, hosted if target.platform == "cpu" else 0)
        report["phases"]["init"] = _phase(init.allocated, hosted)
        tell("compiling evaluation")
        evaluation = compile_for(_lowered_evaluation(program), target.platform)
        taken = _device_bytes(layout, "parameter", "frozen", "buffer")  # its arguments; the rest of the state stays too
        alive = evaluation.allocated - taken + layout.bytes_per_device(memory_kind="device")
        report["phases"]["evaluation"] = _phase(alive, hosted)
        report["compile_seconds"] = round(step.seconds + init.seconds + evaluation.seconds, 1)
        report["message"] = step.message or init.message or evaluation.message
    report["phases"] = {name: report["phases"][name] for name in PHASES if name in report["phases"]}
    refused = step.needed is not None
    report["notes"] += _host_note(report)
    most = max(phase["device_peak_bytes"] for phase in report["phases"].values())
    report["fits"] = not refused and (limit is None or most <= limit)
    if not report["fits"]:
        tell("looking for settings that fit")
        report["suggestions"] = suggestions(config, target, limit or 0, most)
    return report


# --- the parts of a report -------------------------------------------------------------------------------------------


def _head(name: str, experiment: Experiment, target: Target, limit: int | None) -> Report:
    tokens = experiment.data.global_batch_size * experiment.data.seq_len
    per_token = experiment.model.flops_per_token(experiment.data.seq_len)
    return {
        "config": name,
        "target": target.name,
        "accelerator": target.spec.name,
        "devices": target.num_devices,
        "processes": target.num_processes,
        "mesh": experiment.mesh.resolve(target.num_devices),
        "device_limit_bytes": limit,
        "host_limit_bytes": target.host_limit_bytes,
        "tokens_per_step": tokens,
        "model_flops_per_token": per_token,
        "flops_per_token": per_token,
        "flops_per_step": per_token * tokens,
        "collective_bytes": {},
        "host_transfer_bytes": 0,
        "largest": [],
        "phases": {},
        "zero_gradients": [],
        "suggestions": [],
        "notes": [],
        "message": "",
        "compile_seconds": 0.0,
        "versions": {package: _version(package) for package in _packages(target.spec)},
    }


def _host_note(report: Report) -> list[str]:
    """The verdict is about devices: which machine they are attached to is for people to choose."""
    need, limit = report["host_process_bytes"], report["host_limit_bytes"]
    if limit is None or need <= limit:
        return []
    return [f"a host of this kind has {human_bytes(limit)}, less than the {human_bytes(need)} that live there"]


def _packages(spec: AcceleratorSpec) -> list[str]:
    compiler = {"tpu": ["libtpu"], "gpu": ["jax-cuda12-pjrt", "jax-cuda13-pjrt"]}.get(spec.platform, [])
    return [package for package in ("jax", "jaxlib", *compiler) if _version(package)]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _traced(program: Program) -> Report:
    """FLOPs, and parameters that the loss does not reach."""
    count = jaxprs.flops(program.traced_step.jaxpr)
    tokens = program.batch_specs["tokens"].size
    model, learner, remat = program.experiment.model, program.experiment.learner, program.experiment.memory.remat

    def gradients(state: Any, batch: Any) -> Any:
        ctx = training_context(batch, state["counter"], model, program.layout, remat)
        return accumulated_gradients(model, learner, state, ctx)[1]

    specs = jax.eval_shape(gradients, program.layout.abstract(), program.layout.abstract(program.batch_specs))
    jaxpr = jax.make_jaxpr(gradients)(program.layout.abstract(), program.layout.abstract(program.batch_specs))
    sizes = {leaf.path: leaf.bytes_per_device for leaf in program.layout if leaf.group == "parameter"}
    zero = [path for path, is_zero in zip(flatten(specs), jaxprs.zero_outputs(jaxpr), strict=True) if is_zero]
    notes = []
    if count.uncounted_loops:
        notes.append(f"{count.uncounted_loops} loops run as often as the data says; their FLOPs are counted once")
    return {
        "flops_per_step": count.flops,
        "flops_per_token": count.flops / tokens,
        "zero_gradients": [{"path": path, "bytes": sizes[f"parameter/{path}"]} for path in zero],
        "notes": notes,
    }


def _step(program: Program, step: Compiled, hosted: int, target: Target) -> Report:
    """What the training step's buffers say."""
    layout = program.layout
    host = dict.fromkeys(KEYS, 0)
    for leaf in layout:
        if leaf.spec.memory_kind != "device":
            host[OF_LAYOUT[leaf.group]] += leaf.bytes_per_device
    host["activations"] += step.host_temp
    report: Report = {
        "device_peak_bytes": step.peak,
        "device_allocated_bytes": step.allocated,
        "device_argument_bytes": step.argument,
        "device_output_bytes": step.output,
        "device_alias_bytes": step.alias,
        "device_temp_bytes": step.temp,
        "host_argument_bytes": hosted,
        "host_peak_bytes": hosted + step.host_temp,
        "host_process_bytes": (hosted + step.host_temp) * target.num_devices // target.num_processes,
        "host_breakdown": host,
        "compile_seconds": round(step.seconds, 1),
        "message": step.message,
    }
    if step.buffers is None:  # the compiler refused: the state is known, and what it adds up to
        named = [_named(leaf) for leaf in layout if leaf.spec.memory_kind == "device"]
        report["device_argument_bytes"] = layout.bytes_per_device(memory_kind="device")
    else:
        named = name_buffers(step.buffers, layout)
        module = step.buffers.module
        report["collective_bytes"] = module.collective_bytes()
        # Each host leaf is taken in and out, also where the program's text does not name its memory space (CPU, GPU).
        report["host_transfer_bytes"] = max(module.host_bytes(), 2 * hosted)
    breakdown = dict.fromkeys(KEYS, 0)
    for one in named:
        breakdown[one.group] += one.bytes
    rest = "other" if step.buffers is not None else "activations"
    breakdown[rest] += step.peak - sum(breakdown.values())
    report["breakdown"] = breakdown
    alike: dict[tuple[str, str, str], list[int]] = {}
    for one in named:
        alike.setdefault((one.name, one.group, one.shape), []).append(one.bytes)
    report["largest"] = [
        {"name": name, "group": group, "shape": shape, "count": len(sizes), "bytes": sum(sizes)}
        for (name, group, shape), sizes in sorted(alike.items(), key=lambda item: -sum(item[1]))[:_LARGEST]
    ]
    return report


def _named(leaf: Leaf) -> Named:
    shape = f"{leaf.spec.dtype}[{','.join(map(str, leaf.spec.shape))}], all shards"
    return Named(leaf.path, OF_LAYOUT[leaf.group], leaf.bytes_per_device, shape)


def _phase(device: int, host: int) -> dict[str, int]:
    return {"device_peak_bytes": device, "host_peak_bytes": host}


def _save_and_restore(layout: StateLayout, target: Target) -> dict[str, dict[str, int]]:
    """By the layout. Saving copies to host memory what this process writes, each array once; restoring fills the
    layout's leaves, with a bounded number of bytes on their way through host memory."""
    device, host = (layout.bytes_per_device(memory_kind=kind) for kind in ("device", "pinned_host"))
    local = target.num_devices // target.num_processes
    copied = sum(min(leaf.spec.num_bytes, leaf.bytes_per_device * local) for leaf in layout)
    passing = read_bytes(max(leaf.spec.num_bytes for leaf in layout))
    passing = min(passing, local * (device + host))  # a process reads the shards of its own devices
    return {"save": _phase(device, host + copied // local), "restore": _phase(device, host + passing // local)}


def _device_bytes(layout: StateLayout, *groups: Group) -> int:
    return sum(layout.bytes_per_device(group, "device") for group in groups)


def _lowered_evaluation(program: Program) -> Any:
    specs = program.layout.specs
    batch: dict[str, TensorSpec] = dict(program.batch_specs)
    if program.experiment.data.tokenizer.has_text:
        batch["bytes"] = batch["weights"]
    arguments = program.layout.abstract((specs["parameter"], specs["frozen"], specs["buffer"], batch))
    return program.evaluate_jit.lower(*arguments)
