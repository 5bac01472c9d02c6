"""Memory and time of a training step against the number of layers, for each activation memory policy.

    python -m tools.memory_vs_depth --target=v5e-1 --layers=16,64,256,1024     # by that machine's compiler, without one
    python -m tools.memory_vs_depth --layers=16,64 --out=here.png              # compiled and measured on this machine

Takes any config and overrides, like every command. The default is a small reversible language model;
tools/depth_configs.py has more models. Writes a table to stdout, OUT.png and OUT.csv. The policies differ only in
`memory`, and all compute the same step.

"Temporaries" are the memory that the step needs at its peak in addition to its arguments (weights, optimizer state,
batch), which necessarily grow with depth. The policies of one depth are timed side by side: they take turns and pass
on a single state. Times are medians of wall-clock seconds, and of processor seconds, which vary less with other work on
the machine.
"""

from __future__ import annotations

import argparse
import csv
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from plimsoll.framework.config import Config, ConfigError
from plimsoll.framework.terminal.tables import TableSection, human_bytes, render
from plimsoll.launch import cli
from tools.bench.workers import rotate
from tools.depth_configs import LANGUAGE
from tools.depth_picture import draw

POLICIES = {
    "none": {"memory.remat": "none"},
    "full": {"memory.remat": "full"},
    "sqrt": {"memory.remat": "sqrt"},
    "offload": {"memory.remat": "offload"},
    "invert": {"memory.remat": "invert"},
    "invert+in_backward": {"memory.remat": "invert", "memory.update": "in_backward"},
}


@dataclass(frozen=True)
class DepthRow:
    """One step. Bytes are for one device; None means that a figure is unknown here.

    Attributes:
      config, target, policy, layers: the compiled config, its target, remat policy and depth.
      parameters_bytes: bytes of the parameters in the layout.
      peak_bytes: compiled peak, as docs/plan.md defines it.
      temp_bytes: the peak without arguments.
      fits: whether the peak is within the device's limit.
      measured_peak_bytes: peak by the device's own statistics.
      step_seconds: wall-clock seconds of a step.
      processor_seconds: processor seconds of all cores of this machine together.
      jax_version: version of JAX, the compiler's frontend.
    """

    config: str
    target: str
    policy: str
    layers: int
    parameters_bytes: int
    peak_bytes: int
    temp_bytes: int
    fits: bool
    measured_peak_bytes: int | None = None
    step_seconds: float | None = None
    processor_seconds: float | None = None
    jax_version: str = ""


@cli.main
def main(argv: list[str]) -> int:
    """Compile, measure if the target is this machine, print the table and write the files."""
    if not any(one == "--config" or one.startswith("--config=") for one in argv):
        argv = [f"--config={LANGUAGE}", *argv]
    parser = cli.Parser("plan", __doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.prog = "python -m tools.memory_vs_depth"
    add = parser.add_argument
    add(
        "--target",
        default="local",
        help="machine to compile for, such as v5e-1 or h200x1; default: compile and measure on this machine",
    )
    add("--layers", default="16,64,256,1024", metavar="N,N", help="depths to compare")
    add(
        "--policies",
        default=",".join(POLICIES),
        metavar="NAME,NAME",
        help=f"policies to compare; default: {', '.join(POLICIES)}",
    )
    add(
        "--depth_field", default="model.stack.num_layers", metavar="PATH", help="config field with the number of layers"
    )
    add("--rounds", type=int, default=5, help="measured steps of each policy; 0: only compile")
    add(
        "--out",
        type=Path,
        default=Path("memory_vs_depth.png"),
        metavar="FILE.png",
        help="plot to write, with a .csv file next to it",
    )
    command = parser.parse(argv)
    args = command.args
    layers, policies = _depths(args.layers), args.policies.split(",")
    for policy in policies:
        cli.choose("policy", policy, list(POLICIES))
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        raise cli.UsageError(f"--out={args.out}: expected a .png file in an existing folder")
    if args.rounds < 0:
        raise cli.UsageError(f"--rounds={args.rounds}: expected 0 or more")

    import jax

    from plimsoll.framework.plan import targets

    targets.set_environment(args.target)
    cli.prepare_jax()
    jax.config.update("jax_enable_compilation_cache", False)
    target = targets.resolve(args.target)
    config, _ = command.resolve(target.name)
    settings = dict(_settings(config, policies, layers, args.depth_field, target))
    if not settings:
        raise cli.UsageError(f"--policies={args.policies}: {target.name} supports none of them")
    rows, out = [], args.out
    for depth in layers:
        configs = {name: _at(config, {args.depth_field: depth, **changed}) for name, changed in settings.items()}
        rows += [replace(row, config=command.spec, layers=depth) for row in _rows(configs, target, args.rounds)]
        _save(rows, out, f"{command.spec} on {target.name}")
        print(f"{depth} layers: done", file=sys.stderr)
    print(table(rows))
    print(f"table: {out.with_suffix('.csv')}, picture: {out}")
    return 0


def _save(rows: Sequence[DepthRow], png: Path, title: str) -> None:
    """Write both files. They are rewritten after each depth, because the greatest may take long or not fit."""
    with png.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(DepthRow)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    draw(rows, png, title)


def _depths(text: str) -> list[int]:
    """Parse the depths; return them sorted and without duplicates."""
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise cli.UsageError(f"--layers={text}: expected positive numbers of layers, such as 16,64,256")
    return sorted({int(part) for part in text.split(",")})


def _at(config: Config, changed: dict[str, Any]) -> Config:
    config = config.copy()
    for path, value in changed.items():
        config.set_path(path, value)
    return config


def _settings(
    config: Config, policies: Sequence[str], layers: Sequence[int], field: str, target: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (policy, its fields) of the policies that the platform supports; raise other errors before compiling.

    Updates in the backward pass cannot clip gradients by their global norm. If the config does, these policies limit
    the RMS of each update instead.
    """
    from plimsoll.framework.layers.remat import check_platform
    from plimsoll.framework.plan.suggest import check_target

    for name in policies:
        changed = dict[str, Any](POLICIES[name])
        try:
            check_platform(changed["memory.remat"], target.platform)
        except ValueError as error:
            print(f"left out: {name}: {error}")
            continue
        learner = config.learner
        if "memory.update" in changed and learner.clip is not None and learner.clip_mode == "global_norm":
            changed["learner.clip_mode"] = "update_rms"
        try:
            for depth in layers:
                check_target(_at(config, {field: depth, **changed}).instantiate(), target)
        except ConfigError:
            raise
        except ValueError as error:
            raise cli.UsageError(f"policy {name}: {error} (use --policies=NAME,NAME to leave it out)") from None
        yield name, changed


# --- one depth -------------------------------------------------------------------------------------------------------


def _rows(configs: dict[str, Config], target: Any, rounds: int) -> Iterator[DepthRow]:
    """Yield the row of each policy at one depth."""
    import jax

    from plimsoll.framework.devices.executables import HostBytes, peak_bytes, split_device_bytes
    from plimsoll.framework.plan.dry_run import compile_step
    from plimsoll.framework.program.program import Program

    programs, rows = {}, dict[str, DepthRow]()
    for name, config in configs.items():
        programs[name] = program = Program(config.instantiate(), target.devices())
        if target.available_devices:  # measure exactly the program that runs
            stats, offloaded = program.jit_step.compiled_step.memory_analysis(), HostBytes()
            assert stats is not None
            peak, argument = (
                peak_bytes(stats, target.platform, offloaded),
                split_device_bytes(stats, target.platform, offloaded).arguments,
            )
        else:
            step = compile_step(program, target, None)
            peak, argument = step.peak, step.argument
        fits = argument > 0 and (target.limit_bytes is None or peak <= target.limit_bytes)
        if not argument:  # refused: the compiler only reported the total
            argument = program.layout.bytes_per_device(memory_kind="device")
            argument += sum(spec.num_bytes for spec in program.batch_specs.values()) // target.num_devices
        sizes = program.layout.bytes_per_device("parameter"), peak, peak - argument, fits
        rows[name] = DepthRow("", target.name, name, 0, *sizes, jax_version=jax.__version__)
    if target.available_devices and rounds:
        measured = _measure(programs, {name: row.peak_bytes for name, row in rows.items()}, rounds)
        rows = {name: replace(row, **measured[name]) for name, row in rows.items()}
    yield from rows.values()


def _measure(programs: dict[str, Any], peaks: dict[str, int], rounds: int) -> dict[str, dict[str, Any]]:
    """Return the seconds of a step, and the device's own peak, by policy.

    Devices report the highest peak so far. Policies therefore run in ascending order of their compiled peaks, and a
    peak that does not exceed the previous one counts as unknown.
    """
    import jax

    from plimsoll.framework.metrics.memory import memory_in_use

    names = sorted(programs, key=lambda name: peaks[name])
    first = programs[names[0]]
    devices, batch, state = list(first.mesh.devices.flat), first.put(_batch(first)), first.init()
    jax.block_until_ready((state, batch))
    metrics = None
    seen, found, timed = memory_in_use(devices).device_peak_bytes, dict[str, dict[str, Any]](), {}
    for name in names:
        state, metrics = programs[name].step(state, batch)
        jax.block_until_ready((state, metrics))
        now = memory_in_use(devices).device_peak_bytes
        found[name] = {"measured_peak_bytes": now if now is not None and seen is not None and now > seen else None}
        timed[name], seen = ([], []), now
    for order in rotate(names, rounds):
        for name in order:
            wall, processor = time.perf_counter(), time.process_time()
            state, metrics = programs[name].step(state, batch)
            jax.block_until_ready((state, metrics))
            timed[name][0].append(time.perf_counter() - wall)
            timed[name][1].append(time.process_time() - processor)
    for name, (wall, processor) in timed.items():
        found[name] |= {"step_seconds": statistics.median(wall), "processor_seconds": statistics.median(processor)}
    del state, metrics
    gc.collect()
    return found


def _batch(program: Any) -> dict[str, Any]:
    """Return random tokens or pixels, all with weight 1."""
    import numpy as np

    rng, model = np.random.default_rng(0), program.experiment.model
    high = getattr(model, "vocab_size", None) or model.levels
    return {
        name: np.ones(spec.shape, spec.dtype) if name == "weights" else rng.integers(0, high, spec.shape, spec.dtype)
        for name, spec in program.batch_specs.items()
    }


# --- output ----------------------------------------------------------------------------------------------------------


def table(rows: Sequence[DepthRow]) -> str:
    """Return all rows as text; times are also shown relative to the step with `none` at the same depth."""
    plain = {row.layers: row for row in rows if row.policy == "none"}
    timed = any(row.step_seconds is not None for row in rows)
    head = ["policy", "layers", "parameters", "peak", "temporaries"]
    head += ["measured peak", "step", "of none's", "processor", "of none's"] if timed else []
    lines = [head]
    for row in rows:
        peak = human_bytes(row.peak_bytes) + ("" if row.fits else " (does not fit)")
        line = [row.policy, str(row.layers), human_bytes(row.parameters_bytes), peak, human_bytes(row.temp_bytes)]
        if timed:
            line.append("" if row.measured_peak_bytes is None else human_bytes(row.measured_peak_bytes))
            for name in ("step_seconds", "processor_seconds"):
                seconds, other = getattr(row, name), getattr(plain.get(row.layers), name, None)
                line += [f"{1e3 * seconds:.1f} ms", f"{seconds / other:.2f}" if other else ""]
        lines.append(line)
    return render([TableSection(f"{rows[0].config} on {rows[0].target}, per device", lines, numbers=True)])


if __name__ == "__main__":
    sys.exit(main())
