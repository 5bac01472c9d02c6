"""The start of a run on devices that are not here: all that happens before the first array, for all its processes.

`launch.train --dry_run --target=...` says it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

from framework.config import Config
from framework.layers.base import BATCH_AXES
from framework.plan import guard
from framework.plan.start_table import start_report
from framework.plan.targets import Target
from framework.program.program import Program
from framework.terminal.tables import Section, human_bytes, render


def dry_run(name: str, config: Config, target: Target, folder: Path, limit: int | None) -> bool:
    """Starts for a target, prints what its processes do, compiles its step; whether that fits in `limit` bytes, by
    default the target's. The data keeps its tokens in `folder`; a source that is not on this machine is told, and is no
    error. Raises ValueError: what the run itself would say before its first compile."""
    jax.config.update("jax_enable_compilation_cache", False)  # what was not compiled for this machine is not kept
    program = Program(config.instantiate(), target.devices())
    experiment, missing = program.experiment, ""
    try:
        if experiment.pretrained is not None:
            experiment.pretrained.places(experiment.language_model)
        experiment.data.setup(folder)
    except FileNotFoundError as error:
        missing = f"not on this machine: {error}"
    print(render([*start_report(name, program, missing), processes(program)]), flush=True)
    start = time.perf_counter()
    found = guard.need(program)
    seconds, limit = time.perf_counter() - start, target.limit_bytes if limit is None else limit
    refusal = guard.refusal(config, program, found, limit, target)
    peak = f"its peak is {human_bytes(found.peak)} of {human_bytes(limit)} per device"
    done = f"dry run: the step compiles for {target.name} in {seconds:.0f} s, and {peak}. Nothing was trained."
    print(refusal or done)
    return refusal is None


def processes(program: Program) -> Section:
    """What each process reads and writes."""
    held = Counter(device.process_index for device in program.mesh.devices.flat)
    rows, (written, pieces) = reading(program), writing(program)
    readers = _span(Counter(row for own in rows.values() for row in own.tolist()).values())
    leaves, sets = (
        sum(leaf.group in program.whole.kept for leaf in program.whole),
        {x.tobytes() for x in rows.values()},
    )
    own = f"{_span(map(len, rows.values()))} of {program.experiment.data.global_batch_size} rows for each process"
    total, least, most = map(human_bytes, (sum(written.values()), min(written.values()), max(written.values())))
    table = [
        ("processes", f"{len(held)}, of {_span(held.values())} devices each"),
        ("batch", f"{own}, {len(sets)} different sets; each row is read by {readers}: those whose devices hold it"),
        ("checkpoint", f"{total} in {leaves} leaves, {pieces} pieces; each process writes {least} to {most}"),
    ]
    return Section("start", table)


def reading(program: Program) -> dict[int, np.ndarray]:
    """The rows of the global batch that each process reads: `program.rows_of_processes`, which the data pipeline is
    asked for. They are held against where the devices stand in the mesh; a difference is a bug of ours."""
    rows, mesh = program.rows_of_processes, program.mesh
    size = program.experiment.data.global_batch_size
    blocks = np.arange(size).reshape(*(mesh.shape[axis] for axis in BATCH_AXES), -1)
    expected: dict[int, set[int]] = {}
    for place, device in np.ndenumerate(mesh.devices):
        own = blocks[tuple(place[mesh.axis_names.index(axis)] for axis in BATCH_AXES)]
        expected.setdefault(device.process_index, set()).update(own.tolist())
    assert expected == {process: set(own.tolist()) for process, own in rows.items()}, "rows are read by the wrong ones"
    return rows


def writing(program: Program) -> tuple[dict[int, int], int]:
    """Bytes that each process writes of a checkpoint of everything, and the number of pieces of arrays that those are.

    As orbax shares out the work (its replica-parallel saving): the replicas of a shard write equal parts of it, along
    the first dimension that their number divides; if there is none, the first of them writes it all.
    """
    written, pieces = Counter({device.process_index: 0 for device in program.mesh.devices.flat}), 0
    for leaf in program.whole:
        if leaf.group not in program.whole.kept or not leaf.bytes_per_device:
            continue
        sharding = program.whole.sharding(leaf.spec)
        shard, owners = sharding.shard_shape(leaf.spec.shape), dict[tuple[object, ...], list[int]]()
        for device, index in sharding.devices_indices_map(leaf.spec.shape).items():
            owners.setdefault(tuple((part.start, part.stop) for part in index), []).append(device.process_index)
        # Orbax does not cut small arrays in host memory, which may hang (its b/417243451).
        whole = leaf.spec.memory_kind == "pinned_host" and (
            len(shard) < 2 or int(np.prod(shard)) % 1024 != 0 or shard[-1] % 128 != 0
        )
        for replicas in owners.values():
            if whole or not any(size % len(replicas) == 0 for size in shard):
                replicas = replicas[:1]
            for process in replicas:
                written[process] += leaf.bytes_per_device // len(replicas)
            pieces += len(replicas)
    return dict(written), pieces


def _span(numbers: Iterable[int]) -> str:
    low, *_, high = sorted([*numbers] * 2)
    return f"{low}" if low == high else f"{low} to {high}"
