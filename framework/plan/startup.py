"""The start of a run: the table that it shows, and its dry run on absent devices.

The dry run does everything before the first array, for all processes; `plimsoll train --dry_run --target=...` uses it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

from plimsoll.framework.config import Config
from plimsoll.framework.data.batches import Pipeline
from plimsoll.framework.devices.accelerators import accelerator_name, spec_for
from plimsoll.framework.devices.mesh import island, mesh_text
from plimsoll.framework.devices.reserved_memory import get_limit_bytes
from plimsoll.framework.layers.base import BATCH_AXES
from plimsoll.framework.layout import GROUPS, UNSAVED_GROUPS, MemoryKind
from plimsoll.framework.learner.rules import DEFAULT
from plimsoll.framework.plan import memory_budget
from plimsoll.framework.plan.host_memory import build_host_model, explain_host_refusal
from plimsoll.framework.plan.plan_report import HostReport, PhaseReport
from plimsoll.framework.plan.report_tables import host_verdict
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import Program
from plimsoll.framework.program.run_length import rate_course
from plimsoll.framework.program.small_data import fit_batch_to_data
from plimsoll.framework.program.stages import build_stage_programs, with_stage
from plimsoll.framework.terminal.tables import TableSection, human_bytes, render, start_table


def build_start_table(
    name: str, program: Program, host: HostReport, without_data: str = "", starts_at: str = ""
) -> list[TableSection]:
    """Return the table that is shown at a run's start.

    It lists parameters by group, bytes per device by group and memory kind, mesh, items per step, FLOPs per item,
    length of the run, learning rates, and data.

    Args:
        name: name of the config.
        program: the experiment's program on the devices.
        host: host memory of the run.
        without_data: reason why there is no data; "" if the pipeline was set up.
        starts_at: first step of the run and the source of its weights; "" leaves the row out.
    """
    layout = program.layout
    experiment = program.experiment
    devices = list(program.mesh.devices.flat)
    mesh_shape = dict(program.mesh.shape)
    num_slices = len(set(map(island, devices)))
    parameters = []
    for group in ("parameter", "frozen"):
        if layout.size(group):
            num_bytes = sum(leaf.spec.num_bytes for leaf in layout if leaf.group == group)
            parameters.append((group, layout.size(group), num_bytes))
    kinds: list[MemoryKind] = sorted({leaf.spec.memory_kind for leaf in layout})
    device_bytes = {}
    for group in GROUPS:
        for kind in kinds:
            size = layout.bytes_per_device(group, kind)
            if size:
                device_bytes[group, kind] = size
    data: Pipeline = experiment.data
    return start_table(
        config=name,
        accelerator=accelerator_name(devices),
        mesh=mesh_text(mesh_shape, experiment.mesh.split(mesh_shape, num_slices), devices[0].platform),
        parameters=parameters,
        device_bytes=device_bytes,
        tokens_per_step=data.global_batch_size * data.seq_len,
        flops_per_token=experiment.model.flops_per_token(data.seq_len),
        device_limit_bytes=_get_limit_bytes(program),
        data={"not checked": without_data} if without_data else {row.name: str(row) for row in data.source_report()},
        item=data.item,
        versions={name: version(name) for name in ("jax", "jaxlib", "optax", "orbax-checkpoint", "grain")},
        course={
            **(data.describe_course(experiment.trainer.known_steps) if not without_data else {}),
            **_describe_run_length(program, starts_at, has_data=not without_data),
            "host memory": host_verdict(host),
        },
    )


def _get_limit_bytes(program: Program) -> int | None:
    """Return the memory that programs may use on each device: what JAX has taken, or what a target leaves."""
    devices = list(program.mesh.devices.flat)
    # Devices of other processes, and those of a topology, do not report their memory.
    with suppress(AttributeError, RuntimeError, NotImplementedError, IndexError):
        stats = program.mesh.local_devices[0].memory_stats() or {}
        if "bytes_limit" in stats:
            return stats["bytes_limit"]
    return get_limit_bytes(spec_for(devices), len(devices), dict(program.mesh.shape))


def _describe_run_length(program: Program, starts_at: str, *, has_data: bool) -> dict[str, str]:
    """Return the rows about a run's length, learning rates and first step."""
    experiment = program.experiment
    steps = experiment.trainer.known_steps
    rows = {}
    # The length is unknown if it is given in epochs and the data is not on this machine.
    if steps is not None:
        epochs = ""
        if has_data:
            epochs = f" ({experiment.data.count_epochs(steps):.3g} epochs)"
        rows["steps"] = f"{steps:,}{epochs}"
        for label, rate in experiment.learner.learning_rates.items():
            row = "learning rate" if label == DEFAULT else f"learning rate ({label})"
            rows[row] = rate_course(rate, steps)
    if starts_at:
        rows["starts at"] = starts_at
    return rows


def dry_run(name: str, config: Config, experiment: Experiment, target: Target, folder: Path, limit: int | None) -> bool:
    """Start a run for a target, print the work of its processes, and compile its step.

    Args:
        name: name of the config.
        config: config resolved for the target.
        experiment: experiment built from the config.
        target: the machine to start for.
        folder: folder where the data pipeline stores its tokens; a source that is missing on this machine is reported
            and is not an error.
        limit: device memory in bytes; None means the target's.

    Returns:
        True if the step fits.

    Raises:
        ValueError: the run itself would fail with this error before its first compilation.
    """
    # Do not cache programs that are compiled for another machine.
    jax.config.update("jax_enable_compilation_cache", False)
    program = Program(experiment, target.devices())
    missing = ""
    try:
        if experiment.pretrained is not None:
            experiment.pretrained.places(experiment.language_model)
        experiment.data.allows_small_data = True
        experiment.data.setup(folder)
        small_data_lines = fit_batch_to_data(config, experiment, program.mesh)
        if small_data_lines:
            print("\n".join(small_data_lines))
            experiment = config.instantiate(data=experiment.data)
            program = Program(experiment, target.devices())
    except FileNotFoundError as error:
        missing = f"not on this machine: {error}"
    host = build_host_model(experiment, program.layout, target)
    offloaded = sum(memory_budget.count_offloaded_bytes(program, target).values())
    # The memory of the step itself is not known yet; it is host memory only on a CPU.
    step = PhaseReport(program.layout.bytes_per_device(memory_kind="device"), offloaded)
    host_report = host.report(host.checkpoint_peaks() | {"train": step})
    print(render([*build_start_table(name, program, host_report, missing), process_table(program)]), flush=True)
    start = time.perf_counter()
    need, largest = memory_budget.measure_largest_need(build_stage_programs(program))
    if largest.stage is not None:
        config = with_stage(config, largest.stage)
        program = largest.program
        print(f"the largest stage is that {largest.label}")
    seconds = time.perf_counter() - start
    host_report = host.report(host.checkpoint_peaks() | {"train": PhaseReport(need.peak, offloaded)})
    if limit is None:
        limit = target.get_limit_bytes(dict(program.mesh.shape))
    refusal = memory_budget.explain_refusal(config, program, need, limit, target) or explain_host_refusal(host_report)
    peak = f"its peak is {human_bytes(need.peak)} of {human_bytes(limit)} per device"
    summary = f"dry run: the step compiles for {target.name} in {seconds:.0f} s, and {peak}. Nothing was trained."
    for note in target.compiler_notes:
        print(f"note: {note}")
    print(refusal or summary)
    return refusal is None


def process_table(program: Program) -> TableSection:
    """Return the table of the rows that each process reads and the bytes that it writes."""
    device_counts = Counter(device.process_index for device in program.mesh.devices.flat)
    rows_by_process = assign_rows(program)
    written_by_process, chunks = count_written_bytes(program)
    reader_counts: Counter[int] = Counter()
    for rows in rows_by_process.values():
        reader_counts.update(rows.tolist())
    readers = _format_range(reader_counts.values())
    distinct_sets = {rows.tobytes() for rows in rows_by_process.values()}
    row_counts = _format_range(map(len, rows_by_process.values()))
    share = f"{row_counts} of {program.experiment.data.global_batch_size} rows per process"
    sets = f"{len(distinct_sets)} distinct sets"
    leaves = len(jax.tree.leaves(program.checkpoint_layout.checkpoint_specs))
    total = human_bytes(sum(written_by_process.values()))
    least = human_bytes(min(written_by_process.values()))
    most = human_bytes(max(written_by_process.values()))
    table = [
        ("processes", f"{len(device_counts)}, with {_format_range(device_counts.values())} devices each"),
        ("batch", f"{share}, {sets}; processes that read each row: {readers}"),
        ("checkpoint", f"{total} in {leaves} leaves, {chunks} chunks; each process writes {least} to {most}"),
    ]
    return TableSection("start", table)


def assign_rows(program: Program) -> dict[int, np.ndarray]:
    """Return {process: rows of the global batch that it reads}, from `program.batch_rows.rows_by_process`.

    These are the rows requested from the data pipeline. They are checked against the positions of the devices in the
    mesh; a mismatch is a bug in the framework.
    """
    rows_by_process = program.batch_rows.rows_by_process
    mesh = program.mesh
    batch_size = program.experiment.data.global_batch_size
    # The batch is sharded over the batch axes in mesh order, into blocks of consecutive rows.
    blocks = np.arange(batch_size).reshape(*(mesh.shape[axis] for axis in BATCH_AXES), -1)
    expected: dict[int, set[int]] = {}
    for position, device in np.ndenumerate(mesh.devices):
        block_index = tuple(position[mesh.axis_names.index(axis)] for axis in BATCH_AXES)
        device_rows = blocks[block_index]
        expected.setdefault(device.process_index, set()).update(device_rows.tolist())
    row_sets = {process: set(rows.tolist()) for process, rows in rows_by_process.items()}
    assert expected == row_sets, "a process reads rows that its devices do not hold, or lacks some that they hold"
    return rows_by_process


def count_written_bytes(program: Program) -> tuple[dict[int, int], int]:
    """Return ({process: bytes that it writes of a full checkpoint}, number of array chunks in the checkpoint).

    Orbax distributes the work (its replica-parallel saving): the replicas of a shard write equal parts of it, split
    along the first dimension that their number divides. If there is none, the first replica writes the whole shard.
    """
    # Processes that write nothing are listed too.
    written_by_process = Counter({device.process_index: 0 for device in program.mesh.devices.flat})
    chunks = 0
    for leaf in program.checkpoint_layout:
        if leaf.group in UNSAVED_GROUPS or not leaf.bytes_per_device:
            continue
        sharding = program.checkpoint_layout.sharding(leaf.spec)
        shard_shape = sharding.shard_shape(leaf.spec.shape)
        processes_by_shard: dict[tuple[object, ...], list[int]] = {}
        for device, index in sharding.devices_indices_map(leaf.spec.shape).items():
            # Slices cannot be keys of a dict before Python 3.12.
            shard = tuple((part.start, part.stop) for part in index)
            processes_by_shard.setdefault(shard, []).append(device.process_index)
        # Orbax does not split small arrays in host memory, because that may hang (its b/417243451).
        is_small = len(shard_shape) < 2 or int(np.prod(shard_shape)) % 1024 != 0 or shard_shape[-1] % 128 != 0
        is_whole = leaf.spec.memory_kind == "pinned_host" and is_small
        for replicas in processes_by_shard.values():
            if is_whole or not any(size % len(replicas) == 0 for size in shard_shape):
                replicas = replicas[:1]
            for process in replicas:
                written_by_process[process] += leaf.bytes_per_device // len(replicas)
            chunks += len(replicas)
    return dict(written_by_process), chunks


def _format_range(numbers: Iterable[int]) -> str:
    """Return the range of the numbers as text: `4`, or `2 to 4`."""
    values = sorted(numbers)
    low = values[0]
    high = values[-1]
    return f"{low}" if low == high else f"{low} to {high}"
