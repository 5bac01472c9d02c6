"""Benchmark of half-gigabyte checkpoints on this machine: checksums, saves, and restoring.

    JAX_PLATFORMS=cpu python -m tools.bench.checkpoint_times [--directory=/tmp] [--leaves=8] [--window_mib=64]

Each number is wall-clock seconds, followed in parentheses by CPU seconds of this process, which vary less on a busy
machine. The disk cache is warm, as it is for a run that saves and continues training.

A save with a copy of the state blocks training only while it copies; a save through a window blocks until the
checkpoint is committed. Each save through a window follows a plain write of the same bytes to the same disk with an
fsync at the end, and the last rows compare both.
"""

from __future__ import annotations

import argparse
import os
import statistics
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
# A plain write passes this many bytes to the system at a time, like `dd bs=16M conv=fsync`.
BLOCK_BYTES = 16 << 20


class Stopwatch:
    """Wall-clock and CPU seconds since construction."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        """Wall-clock seconds."""
        return time.perf_counter() - self._wall

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s ({time.process_time() - self._cpu:.2f} s CPU)"


def time_call(function: Callable[[], Any]) -> str:
    """Return the time that a call takes, as text."""
    clock = Stopwatch()
    function()
    return str(clock)


def write_plainly(path: Path, values: np.ndarray, num_copies: int) -> None:
    """Write an array several times to one file, flush it to disk, and remove it."""
    view = values.data.cast("B")
    with open(path, "wb", buffering=0) as file:
        for _ in range(num_copies):
            for start in range(0, len(view), BLOCK_BYTES):
                file.write(view[start : start + BLOCK_BYTES])
        os.fsync(file.fileno())
    path.unlink()


def compare_with_disk(state: dict[str, jax.Array], values: np.ndarray, directory: str, window_mib: int) -> None:
    """Save through a window and write the same bytes plainly, in turn, and print both and their ratio.

    Args:
        state: state to save.
        values: array that has the bytes of one leaf.
        directory: folder to write in.
        window_mib: size of the window.
    """
    size_mib = sum(x.nbytes for x in state.values()) / 2**20
    disk_seconds = []
    window_seconds = []
    with tempfile.TemporaryDirectory(dir=directory) as folder, Checkpointer(directory=folder, keep=1) as checkpointer:
        for step in range(1, 6):
            clock = Stopwatch()
            write_plainly(Path(folder) / "plain", values, len(state))
            disk_seconds.append(clock.seconds)
            plain = f"{clock}, {size_mib / clock.seconds:.0f} MiB/s"
            clock = Stopwatch()
            checkpointer.save(step, state, {}, window_bytes=window_mib << 20)
            window_seconds.append(clock.seconds)
            speed = size_mib / window_seconds[-1]
            print(f"plain write {step}: {plain}; save through {window_mib} MiB: {clock}, {speed:.0f} MiB/s")
            # The previous checkpoint is removed in the background.
            checkpointer.wait()
    disk = size_mib / statistics.median(disk_seconds)
    window = size_mib / statistics.median(window_seconds)
    print(
        f"medians: plain write {disk:.0f} MiB/s, save through {window_mib} MiB {window:.0f} MiB/s: {window / disk:.0%}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="folder to write checkpoints in")
    parser.add_argument("--leaves", type=int, default=8, help="number of leaves, of 64 MiB each")
    parser.add_argument("--window_mib", type=int, default=64, help="window of the saves through one, in MiB")
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
            print(f"save with a copy {step}{' (compiles)' if step == 1 else ''}: blocks {blocked}, in all {clock}")
        written = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
        print(f"on disk: {written / 1e6:.1f} MB")
        compare_with_disk(state, values, args.directory, args.window_mib)
        for leaf in state.values():
            leaf.delete()
        for _ in range(2):
            took = time_call(lambda: jax.block_until_ready(checkpointer.restore(4, abstract).state))
            print(f"restore and verify: {took}")


if __name__ == "__main__":
    main()
