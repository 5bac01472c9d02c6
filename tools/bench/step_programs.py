"""Steps compiled for TPUs and GPUs, for analysis: compiled here, saved to a folder, or read from one.

A folder contains the compiler's text (hlo.txt, or hlo-000.txt, ... if a step consists of several programs) and
meta.json, which is a `StepInfo`. The step of any framework can be stored this way.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plimsoll import configs
from plimsoll.framework.devices.accelerators import AcceleratorSpec
from plimsoll.framework.plan import targets
from plimsoll.framework.plan.hlo.module import Module
from plimsoll.framework.plan.step_time.tpu_time import StepProgram
from plimsoll.launch.cli import Command, UsageError, prepare_jax

if TYPE_CHECKING:
    from plimsoll.framework.plan.compilation import CompiledProgram
    from plimsoll.framework.plan.targets import Target

META = "meta.json"


@dataclass(frozen=True)
class StepInfo:
    """Facts about a step in addition to its text; None means unknown.

    Attributes:
        name: name of the config.
        target: target as in `plimsoll plan --target`.
        accelerator: name of the accelerator, such as v5e.
        settings: overrides of the config, and changes by its rules.
        tokens: tokens per step on one device.
        model_flops: FLOPs per step on one device: forward and backward, without recomputation.
        traced_flops: FLOPs of the traced program on one device, including recomputation; attention counts as unmasked.
        peak_bytes: peak of device memory.
        compile_seconds: seconds of the compiler only.
        versions: versions of jax and of the compiler.
        files: {file of the text: how often that program runs in a step}
    """

    name: str
    target: str
    accelerator: str
    settings: list[str] = field(default_factory=list)
    tokens: float | None = None
    model_flops: float | None = None
    traced_flops: float | None = None
    peak_bytes: int | None = None
    compile_seconds: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=lambda: {"hlo.txt": 1})


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step: its programs, and facts about it."""

    about: StepInfo
    parts: list[StepProgram]


def add_arguments(parser: argparse.ArgumentParser, targets_like: str) -> None:
    """Add the arguments that select a step and where to save it; `targets_like` are examples of targets."""
    add = parser.add_argument
    add("target", nargs="?", help=f"machine to compile for, such as {targets_like}; see `plimsoll plan`")
    add("--config", metavar="NAME", help="named config; --config.PATH=VALUE overrides a field")
    add("--program", type=Path, metavar="DIR", help="read a saved step from DIR instead of compiling one")
    add("--against", type=Path, metavar="DIR", help="print the step saved in DIR next to this one")
    add("--save", type=Path, metavar="DIR", help="save the compiled text and its metadata in DIR")


def load_or_compile_step(
    args: argparse.Namespace,
    spec: str | None,
    overrides: list[tuple[str, str]],
    check: Callable[[AcceleratorSpec], object],
) -> CompiledStep:
    """Read or compile the step that the arguments of `add_arguments` select, and save it if --save is given.

    Raises:
        UsageError: the arguments select no step, or two; see also `compile_config`, which takes the other arguments.
    """
    if (args.program is None) == (args.target is None):
        raise UsageError("expected a target and --config, such as v5e-16 --config=llama2-7b, or else --program DIR")
    if args.program is not None:
        if spec is not None or overrides:
            raise UsageError("--program names a step that is compiled already; leave out --config")
        step = load(args.program)
    else:
        step = compile_config(args.target, spec, overrides, check)
    if args.save:
        save(step, args.save)
    return step


def compile_config(
    name: str, spec: str | None, overrides: list[tuple[str, str]], check: Callable[[AcceleratorSpec], object]
) -> CompiledStep:
    """Compile a config's training step for a target, as `plimsoll plan` does.

    Args:
        name: name of the target.
        spec: name of the config.
        overrides: overrides of its fields, by path.
        check: function that raises for a target whose program the caller cannot read, before minutes of compiling.

    Raises:
        UsageError: there is no config, or the compiler refused the program.
        ValueError: there is no such target, or config and target do not fit each other.
    """
    if spec is None:
        raise UsageError(f"--config=NAME is required; valid names: {', '.join(configs.names())}")
    target = targets.resolve(name)
    check(target.spec)
    command = Command(argparse.Namespace(), spec, configs.load(spec), overrides)
    command.config  # noqa: B018  (a mistake in it shows before JAX starts)
    targets.set_environment(name)
    prepare_jax()

    import jax

    jax.config.update("jax_enable_compilation_cache", False)  # a cached program lacks its buffers
    return _compile(command, target)


def _compile(command: Command, target: Target) -> CompiledStep:
    """Compile the training step of a config for a target.

    Raises:
        UsageError: the compiler refused the program.
        ValueError: config and target do not fit each other.
    """
    from plimsoll.framework.plan.cache import versions
    from plimsoll.framework.plan.dry_run import compile_step
    from plimsoll.framework.plan.jaxpr_analysis import sum_flops
    from plimsoll.framework.program.program import Program

    config, lines = command.resolve(target.name)
    program = Program(config.instantiate(), target.devices())
    step = compile_step(program, target, target.limit_bytes)
    if step.message:
        raise UsageError(f"{command.spec} on {target.name}: {step.message}")
    experiment = program.experiment
    tokens = experiment.data.global_batch_size * experiment.data.seq_len
    traced = sum_flops(program.backend.step_jaxprs(step.tracker)).flops
    parts = _parts(step)
    about = StepInfo(
        name=command.spec,
        target=target.name,
        accelerator=target.spec.name,
        settings=[*map("=".join, command.overrides), *lines],
        tokens=tokens / target.num_devices,
        model_flops=experiment.model.flops_per_token(experiment.data.seq_len) * tokens / target.num_devices,
        traced_flops=traced / target.num_devices,
        peak_bytes=step.peak,
        compile_seconds=round(step.seconds, 1),
        versions=versions("jax", "jaxlib", "libtpu" if target.platform == "tpu" else "jax-cuda12-plugin"),
        files=_files(parts),
    )
    return CompiledStep(about, parts)


def _parts(step: CompiledProgram) -> list[StepProgram]:
    """Return the distinct programs of a step."""
    assert step.tracker is not None, "refused steps have none"
    calls = Counter(call.about.text for call in step.tracker.calls)
    return [StepProgram(Module(text), runs) for text, runs in calls.items()]


def _files(parts: list[StepProgram]) -> dict[str, int]:
    if len(parts) == 1:
        return {"hlo.txt": parts[0].runs}
    return {f"hlo-{index:03d}.txt": part.runs for index, part in enumerate(parts)}


def save(step: CompiledStep, folder: Path) -> None:
    """Save a step to a folder, which is created if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip(step.about.files, step.parts, strict=True):
        (folder / name).write_text(part.module.text)
    (folder / META).write_text(json.dumps(dataclasses.asdict(step.about), indent=1) + "\n")


def load(folder: Path) -> CompiledStep:
    """Read a step from a folder.

    Raises:
        FileNotFoundError: the folder contains no step.
        UsageError: meta.json is not in the format that `save` writes.
    """
    if not (folder / META).is_file():
        raise FileNotFoundError(f"no compiled step in {folder}: expected {META} and hlo.txt, as --save writes them")
    about = _about(folder / META)
    missing = [name for name in about.files if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder / META} names {missing[0]}, which is not there")
    parts = [StepProgram(Module((folder / name).read_text()), runs) for name, runs in about.files.items()]
    for name, part in zip(about.files, parts, strict=True):
        if not part.module.entry:
            raise UsageError(f"{folder / name}: expected the compiler's text of a program, found no ENTRY computation")
    return CompiledStep(about, parts)


def _about(path: Path) -> StepInfo:
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        return StepInfo(**fields)
    except (TypeError, ValueError) as error:
        names = ", ".join(one.name for one in dataclasses.fields(StepInfo))
        raise UsageError(f"{path}: expected a JSON object with {names}: {error}") from None
