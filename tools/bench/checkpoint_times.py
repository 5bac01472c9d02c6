"""Benchmark of half-gigabyte checkpoints on this machine: checksums, time that a save blocks, and restoring.

    JAX_PLATFORMS=cpu python -m tools.bench.checkpoint_times [--directory=/tmp] [--leaves=8]

Each number is wall-clock seconds, followed in parentheses by CPU seconds of this process, which vary less on a busy
machine. The disk cache is warm, as it is for a run that saves and continues training.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.checkpoint.integrity import checksums

LEAF_SHAPE = (16, 1024, 1024)


class Stopwatch:
    """Wall-clock and CPU seconds since construction."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def __str__(self) -> str:
        return f"{time.perf_counter() - self._wall:.2f} s ({time.process_time() - self._cpu:.2f} s CPU)"


def time_call(function: Callable[[], Any]) -> str:
    """Return the time that a call takes, as text."""
    clock = Stopwatch()
    function()
    return str(clock)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="folder to write checkpoints in")
    parser.add_argument("--leaves", type=int, default=8, help="number of leaves, of 64 MiB each")
    args = parser.parse_args()
    devices = jax.device_count()
    sharding = NamedSharding(jax.make_mesh((devices,), ("fsdp",)), PartitionSpec(None, "fsdp"))
    values = np.random.default_rng(0).standard_normal(LEAF_SHAPE, np.float32)
    state = {f"leaf{i}": jax.device_put(values, sharding) for i in range(args.leaves)}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    size = sum(x.nbytes for x in state.values())
    print(f"state: {size / 1e6:.0f} MB on {devices} {jax.default_backend()} devices")
    print(f"checksums, first (compiles): {time_call(lambda: checksums(state))}")
    print(f"checksums: {time_call(lambda: checksums(state))}")
    with (
        tempfile.TemporaryDirectory(dir=args.directory) as directory,
        Checkpointer(directory=directory, keep=1) as checkpointer,
    ):
        for step in (1, 2, 3, 4):
            clock = Stopwatch()
            checkpointer.save(step, state, {})
            blocked = str(clock)
            checkpointer.wait()
            print(f"save {step}{' (compiles)' if step == 1 else ''}: blocks {blocked}, in all {clock}")
        written = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
        print(f"on disk: {written / 1e6:.1f} MB")
        for leaf in state.values():
            leaf.delete()
        for _ in range(2):
            took = time_call(lambda: jax.block_until_ready(checkpointer.restore(4, abstract).state))
            print(f"restore and verify: {took}")


if __name__ == "__main__":
    main()
