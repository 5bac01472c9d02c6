"""The rows of tools.bench.gpu: what each part measures, in the order of worth, and the results in a file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# In the order of their worth.
PARTS = ("exact", "memory", "speed", "torch", "link", "largest")
# The most valuable rows of each part run before the other rows of any part. Of `exact`, as many as 16 cores compile at
# the same time.
FIRST_ROWS = {"exact": 8, "memory": 1, "speed": 2, "torch": 1, "link": 1, "largest": 1}

OFFLOADED = {"state": "optimizer_state", "weights": "parameters", "inputs": "activations", "gradients": "gradients"}
WORDS = {f"{word}_offloaded": {f"memory.{name}": "pinned_host"} for word, name in OFFLOADED.items()}
WORDS |= {x: {"memory.update": x} for x in ("after_backward", "streamed", "in_backward", "layer_programs")}
WORDS |= {x: {"memory.remat": x} for x in ("none", "full", "sqrt:2", "offload")}
WORDS |= {"at_once": {"memory.gradients": "none", "learner.clip": "none"}}
WORDS |= {"together": {"memory.accumulate_by": "layer"}}
WORDS |= {"unrolled": {"model.stack.unroll": "0"}}
WORDS |= {"adafactor": {"learner.optimizer": "optax.adafactor", "learner.optimizer.learning_rate": "0.02"}}
ADAMW = {"learner.optimizer": "optax.adamw", "learner.optimizer.learning_rate": "3e-6"}
# Overrides are in WORDS; NAME=VALUE sets a field of the learner; weights_offloaded=N offloads the first N layers.
# GPUs offload with layer_programs only, so it comes first.
FIRST_SCHEDULES = (
    "layer_programs full state_offloaded weights_offloaded gradients_offloaded inputs_offloaded",
    "layer_programs full state_offloaded",
    "layer_programs full",
    "layer_programs full at_once state_offloaded weights_offloaded inputs_offloaded",
    "layer_programs sqrt:2 state_offloaded weights_offloaded gradients_offloaded inputs_offloaded accumulate=2",
    "in_backward full clip_mode=two_pass",
    "streamed full",
    "in_backward full clip_mode=update_rms",
)
OTHER_SCHEDULES = (
    "layer_programs full at_once together state_offloaded weights_offloaded inputs_offloaded accumulate=2",
    "layer_programs full weights_offloaded=2",
    "layer_programs full weights_offloaded",
    "layer_programs full gradients_offloaded",
    "layer_programs full inputs_offloaded",
    "layer_programs full at_once",
    "in_backward full clip_mode=previous_norm",
    "in_backward full clip_mode=norm_growth clip=1.01",
    "after_backward state_offloaded",
    "after_backward offload",
    "streamed full state_offloaded",
    "streamed full state_offloaded gradients_offloaded",
    "in_backward full clip_mode=two_pass state_offloaded",
)
DRY_SCHEDULES = (FIRST_SCHEDULES[0], "in_backward full clip_mode=two_pass", "after_backward state_offloaded")
LAYERS = "layer_programs full state_offloaded"
H200_BYTES = 128 * 2**30
# Estimated seconds of a row of a dry run, on two busy cores.
DRY_SECONDS = 50


@dataclass(frozen=True)
class Row:
    """One measurement. It runs in its own process.

    Attributes:
        part: part that the row belongs to.
        kind: name of its function in gpu_measure.KINDS.
        name: the row's name in the table.
        seconds: estimated seconds on an H100, including the start of the process and compilation. If less time is
            left, the row does not run; after three times as long, its process is killed.
        dry: whether `--dry` runs the row, with tiny shapes.
        config: name of the config to train.
        overrides: overrides of the config, by dotted path.
        batch: sequences per step.
        seq: tokens per sequence.
        steps: steps to train.
        against: name of the row that a speed is compared with.
        mib: size of a transfer, in MiB.
        shape: fields of tools.bench.sizes.Size, for torch's model.
        trace: file for the profile of one more step; none if empty.
    """

    part: str
    kind: str
    name: str
    seconds: float
    dry: bool = False
    config: str = ""
    overrides: dict[str, str] = field(default_factory=dict)
    batch: int = 0
    seq: int = 0
    steps: int = 0
    against: str = ""
    mib: int = 0
    shape: dict[str, int] = field(default_factory=dict)
    trace: str = ""


@dataclass(frozen=True)
class Machine:
    """The machine that ran the rows. `limit_bytes` is the device memory that a program may use, if it is known."""

    device: str
    limit_bytes: int | None
    cores: int
    host_memory_bytes: int
    python: str
    versions: dict[str, str]


# The status of a row that has not finished.
RUNNING = "running"
# The statuses that make the command fail.
BAD = ("WRONG", "FAILED", "TIMED OUT", "LOSS DOES NOT FALL")


@dataclass(frozen=True)
class Figures:
    """Figures of a row, as far as they are known.

    Attributes:
        status: how the row ended.
        message: why there are no figures, or not all.
        tokens_per_second: speed after the step that compiles.
        mfu: model FLOPs utilization.
        plan_bytes: planned peak of device memory.
        peak_bytes: measured peak of device memory, including initialization.
        limit_bytes: device memory that a program may use.
        host_bytes: bytes that are offloaded.
        parameters: number of parameters.
        losses: loss of each step.
        error: largest difference from the plain schedule, relative to how far a leaf moved.
        worst_leaf: name of the leaf with that difference.
        loss_error: largest relative difference of a loss.
        transfers: GB/s of transfers, and how much of them computation hides, by name.
        machine: facts about the machine.
    """

    status: str = RUNNING
    message: str = ""
    tokens_per_second: float | None = None
    mfu: float | None = None
    plan_bytes: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    host_bytes: int | None = None
    parameters: int | None = None
    losses: list[float] = field(default_factory=list)
    error: float | None = None
    worst_leaf: str = ""
    loss_error: float | None = None
    transfers: dict[str, float] = field(default_factory=dict)
    machine: Machine | None = None


@dataclass(frozen=True)
class Result:
    """A row, its figures, and the seconds that it took."""

    row: Row
    figures: Figures
    seconds: float = 0.0


@dataclass(frozen=True)
class Run:
    """One call of the command, with the results of its rows in the order in which they ended."""

    date: str
    command: str
    dry: bool
    machine: Machine
    results: list[Result] = field(default_factory=list)


def parse_overrides(settings: str) -> dict[str, str]:
    """Return the overrides for the words of a row's settings, by dotted path."""
    overrides: dict[str, str] = {}
    for word in settings.split():
        name, _, value = word.partition("=")
        if word in WORDS:
            overrides |= WORDS[word]
        elif name == "weights_offloaded":
            overrides["memory.parameters"] = f"pinned_host:{value}"
        else:
            overrides[f"learner.{name}"] = value
    return overrides


def order_rows(parts: Collection[str], limit_bytes: int = H200_BYTES, *, dry: bool = False) -> list[Row]:
    """Return the rows of some parts in the order in which to run them: first the most valuable ones of every part.

    Args:
        parts: names of the parts.
        limit_bytes: see `build_rows`.
        dry: return only the rows of a dry run.
    """
    first: list[Row] = []
    others: list[Row] = []
    for part in PARTS:
        if part not in parts:
            continue
        rows = build_rows(part, limit_bytes)
        if dry:
            rows = [dataclasses.replace(row, seconds=DRY_SECONDS) for row in rows if row.dry]
        count = FIRST_ROWS[part]
        first += rows[:count]
        others += rows[count:]
    return first + others


def build_rows(part: str, limit_bytes: int = H200_BYTES) -> list[Row]:
    """Return the rows of a part, the most valuable first.

    Args:
        part: name of the part.
        limit_bytes: device memory that a program may use. By the plan, the sizes fit on an H200 (128 GiB) or else on an
            H100 (72.8 GiB): `plimsoll plan --target=h100 --config=...` with a row's settings.
    """
    is_large = limit_bytes >= H200_BYTES
    if part == "exact":
        return _build_exact_rows()
    if part == "memory":
        return _build_memory_rows()
    if part == "speed":
        return _build_speed_rows(is_large)
    if part == "torch":
        return _build_torch_rows()
    if part == "link":
        return [Row(part, "link", f"{mib} MiB", 20, dry=mib == 256, mib=mib) for mib in (256, 2048, 16, 1)]
    assert part == "largest", part
    return _build_largest_rows(is_large)


def _build_exact_rows() -> list[Row]:
    rows: list[Row] = []
    for schedules in (FIRST_SCHEDULES, OTHER_SCHEDULES):
        # float32 first: rounding hides less of an error.
        for dtype, master in (("float32", "none"), ("bfloat16", "float32")):
            types = {"model.param_dtype": dtype, "model.compute_dtype": dtype, "learner.master_dtype": master}
            for settings in schedules:
                overrides = types | parse_overrides(settings)
                dry = dtype == "float32" and settings in DRY_SCHEDULES
                name = f"{settings} {dtype}"
                rows.append(Row("exact", "exact", name, 45, dry=dry, config="llama3-8b", overrides=overrides))
    return rows


def _build_train_row(part: str, config: str, size: str, settings: str, steps: int, seconds: float) -> Row:
    batch, _, seq = size.partition("x")
    overrides = parse_overrides(settings)
    if "adafactor" not in settings:
        overrides = ADAMW | overrides
    name = f"{config} {size} {settings}"
    return Row(
        part, "train", name, seconds, config=config, overrides=overrides, batch=int(batch), seq=int(seq), steps=steps
    )


def _build_memory_rows() -> list[Row]:
    in_backward = "in_backward full clip_mode=update_rms moment_dtype=bfloat16 master_dtype=none"
    rows = [
        _build_train_row("memory", "gpt2-350m", "16x1024", LAYERS, 3, 25),
        _build_train_row("memory", "gpt2-350m", "16x1024", "full", 3, 25),
        _build_train_row("memory", "llama3-8b", "2x8192", in_backward, 3, 75),
        _build_train_row("memory", "gpt2-350m", "16x1024", "none", 3, 25),
        _build_train_row("memory", "gpt2-350m", "16x1024", "streamed full", 3, 25),
        _build_train_row("memory", "gpt2-350m", "16x1024", "in_backward full clip_mode=two_pass", 3, 25),
        _build_train_row("memory", "llama3-8b", "2x8192", LAYERS, 3, 90),
    ]
    rows[1] = dataclasses.replace(rows[1], dry=True)
    return rows


def _build_speed_rows(is_large: bool) -> list[Row]:
    def build(config: str, size: str, settings: str, steps: int, seconds: float, against: str = "") -> Row:
        row = _build_train_row("speed", config, size, settings, steps, seconds)
        return dataclasses.replace(row, against=f"{config} {size} {against}" if against else "")

    # With the whole state resident and in float32, it does not fit.
    resident = "full moment_dtype=bfloat16"
    if not is_large:
        resident += " master_dtype=none"
    large, small = ("4x8192" if is_large else "3x8192"), "1x8192"
    # A loop over layers copies each layer's residuals into a stack and out again; unrolled, they stay in place.
    rows = [
        build("llama3-8b", large, LAYERS, 5, 90, against=resident),
        build("gpt2-124m", "32x1024", "none unrolled", 20, 40),
        build("llama3-8b", large, resident, 5, 75),
        build("gpt2-350m", "32x1024", "none unrolled", 20, 60),
        build("gpt2-1.5b", "32x1024", "full", 8, 60),
        build("gpt2-1.5b", "32x1024", LAYERS, 8, 60, against="full"),
        build("llama3-8b", small, LAYERS, 5, 90, against=resident),
        build("llama3-8b", small, resident, 5, 75),
        build("gpt2-124m", "32x1024", "none", 20, 30, against="none unrolled"),
        build("gpt2-350m", "32x1024", "none", 20, 40, against="none unrolled"),
        build("gpt2-1.5b", "32x1024", "streamed full", 8, 60, against="full"),
    ]
    return [dataclasses.replace(row, dry=row in rows[:2]) for row in rows]


def _build_torch_rows() -> list[Row]:
    sizes = {"gpt2-124m": (12, 12, 768, 60), "gpt2-350m": (24, 16, 1024, 90), "gpt2-1.5b": (48, 25, 1600, 150)}
    rows: list[Row] = []
    for config, (layers, heads, dim, seconds) in sizes.items():
        shape = {"layers": layers, "heads": heads, "dim": dim, "seq_len": 1024, "batch": 32}
        name = f"{config} 32x1024 torch"
        ours = "full" if config == "gpt2-1.5b" else "none unrolled"
        against = f"{config} 32x1024 {ours}"
        dry = config == "gpt2-124m"
        rows.append(Row("torch", "torch", name, seconds, dry=dry, steps=10, against=against, shape=shape))
    return rows


def _build_largest_rows(is_large: bool) -> list[Row]:
    lean = "layer_programs full at_once adafactor master_dtype=none moment_dtype=none inputs_offloaded"
    # The first row offloads more, to be sure that it fits.
    most, least = (16, 8) if is_large else (48, 40)
    rows = [
        _build_train_row("largest", "llama-65b", "2x2048", f"{lean} weights_offloaded={layers}", 6, 180)
        for layers in (most, least)
    ]
    rows[0] = dataclasses.replace(rows[0], dry=True)
    return rows


def append_run(path: Path, run: Run) -> None:
    """Append the first line of a run to a results file."""
    facts = dataclasses.asdict(run)
    del facts["results"]
    # If a kill cut the last line, do not continue that line.
    separator = "" if not path.exists() or path.read_bytes().endswith(b"\n") else "\n"
    _append(path, f"{separator}{json.dumps({'run': facts})}\n")


def append_result(path: Path, result: Result) -> None:
    """Append a row's result to a results file."""
    _append(path, json.dumps({"result": dataclasses.asdict(result)}) + "\n")


def _append(path: Path, line: str) -> None:
    # One unbuffered write, so that a kill does not leave a part of a line.
    with open(path, "ab", buffering=0) as file:
        file.write(line.encode())
        os.fsync(file.fileno())


def read_runs(path: Path) -> list[Run]:
    """Return the runs in a results file, without a line that is cut."""
    runs: list[Run] = []
    for line in path.read_text().splitlines():
        try:
            record: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "run" in record:
            facts = record["run"]
            runs.append(Run(**{**facts, "machine": Machine(**facts["machine"])}))
        else:
            fields = record["result"]
            figures = Figures(**fields["figures"])
            runs[-1].results.append(Result(Row(**fields["row"]), figures, fields["seconds"]))
    return runs
