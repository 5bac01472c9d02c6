"""Dry run of a run's start on absent devices: everything before the first array, for all processes.

Used by `plimsoll train --dry_run --target=...`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

from plimsoll.framework.config import Config
from plimsoll.framework.layers.base import BATCH_AXES
from plimsoll.framework.plan import device_budget
from plimsoll.framework.plan.start_table import build_start_table
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import Program
from plimsoll.framework.terminal.tables import TableSection, human_bytes, render


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
        experiment.data.setup(folder)
    except FileNotFoundError as error:
        missing = f"not on this machine: {error}"
    print(render([*build_start_table(name, program, missing), process_table(program)]), flush=True)
    start = time.perf_counter()
    need = device_budget.measure_need(program)
    seconds = time.perf_counter() - start
    if limit is None:
        limit = target.limit_bytes
    refusal = device_budget.explain_refusal(config, program, need, limit, target)
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
    """Return {process: rows of the global batch that it reads}, from `program.rows_by_process`.

    These are the rows requested from the data pipeline. They are checked against the positions of the devices in the
    mesh; a mismatch is a bug in the framework.
    """
    rows_by_process = program.rows_by_process
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
        if leaf.group == "gradient" or not leaf.bytes_per_device:
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
