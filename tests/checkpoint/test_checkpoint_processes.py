"""Checkpoints of a job of two real processes: saved by two and restored by one, and vice versa."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from plimsoll.framework.checkpoint.checkpointer import Checkpointer

# Each process has two devices. Arguments: directory to save to, directory to restore from, port, process id.
JOB = """
import faulthandler, os, random, sys
# A process that hangs ends with the stacks of its threads, which the test prints.
faulthandler.dump_traceback_later(150, exit=True)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
directory, restored_directory, port, process = *sys.argv[1:4], int(sys.argv[4])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, heartbeat_timeout_seconds=30)
import logging
from plimsoll.framework.checkpoint.checkpointer import Checkpointer, CheckpointCorruptError, CheckpointSaveError
mesh = jax.make_mesh((2, 2), ("a", "b"))
shardings = {
    "parameter": {"w": NamedSharding(mesh, PartitionSpec("a", "b")), "b": NamedSharding(mesh, PartitionSpec())},
    "optimizer": NamedSharding(mesh, PartitionSpec("a"), memory_kind="pinned_host"),
}
values = {
    "parameter": {"w": np.arange(8192, dtype=np.float32).reshape(64, 128), "b": np.arange(5, dtype=np.int32)},
    "optimizer": np.arange(4096, dtype=np.float32).reshape(64, 64),
}
def put(factor):
    make = lambda v, s: jax.make_array_from_callback(v.shape, s, lambda i: (v * factor).astype(v.dtype)[i])
    return jax.tree.map(make, values, shardings)
def check(state, factor):
    for x, v, s in zip(jax.tree.leaves(state), jax.tree.leaves(values), jax.tree.leaves(shardings)):
        assert x.sharding == s
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), (v * factor)[shard.index])
abstract = jax.tree.map(lambda v, s: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=s), values, shardings)
checkpointer = Checkpointer(directory=directory, keep=2)
"""

SAVE = """
state = put(1)
checkpointer.save(1, state, {"next": 1})
# The arrays may be donated at once, in every process.
step = jax.jit(lambda x: x + 1, donate_argnums=0)
before, state["parameter"]["w"] = state["parameter"]["w"], step(state["parameter"]["w"])
assert before.is_deleted()
checkpointer.save(2, put(2), {"next": 2})
checkpointer.save(3, put(3), {"next": 3})
checkpointer.wait()
assert checkpointer.steps()[-1] == 3
check(checkpointer.restore(2, abstract).state, 2)
# The disk is full for one of the two: both hear of it, and nothing is written.
import shutil
usage = shutil.disk_usage(directory)
if process == 1:
    shutil.disk_usage = lambda path: usage._replace(free=0)
try:
    checkpointer.save(4, put(4), {})
except CheckpointSaveError:
    print("REFUSED", checkpointer.steps())
checkpointer.close()
"""

RESTORE = """
checkpointer = Checkpointer(directory=restored_directory, keep=2)
# Both see what process 0 sees, whatever their file system shows them.
if process == 1:
    import plimsoll.framework.checkpoint.directory
    plimsoll.framework.checkpoint.directory.scan = lambda root: ([99], ["nonsense"])
restored = checkpointer.restore_latest(abstract)
assert restored.step == 1 and restored.extra == {"next": 8}, restored
check(restored.state, 8)
# The newer one is corrupt: both fall back, since each sums what the other holds.
print("PROBLEMS", len(restored.problems), "parameter/w" in restored.problems[0])
checkpointer.close()
"""


def run(directory, restored_directory):
    """Return the lines that each of two processes prints after saving and after restoring."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-c", JOB + SAVE + RESTORE, str(directory), str(restored_directory)]
    jobs = [
        subprocess.Popen(
            [*command, str(port), str(process)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path.cwd(),
        )
        for process in (0, 1)
    ]
    try:
        results = [job.communicate(timeout=240) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(err[-3000:] for _, err in results)
    # Gloo prints its peer counts between these lines.
    return [[line for line in out.splitlines() if line.startswith(("REFUSED", "PROBLEMS"))] for out, _ in results]


def make_abstract(values, spec, kind="device"):
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), spec, memory_kind=kind)
    return jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)


W, B = np.arange(8192, dtype=np.float32).reshape(64, 128), np.arange(5, dtype=np.int32)
HOST = np.arange(4096, dtype=np.float32).reshape(64, 64)
ABSTRACT = {
    "parameter": {"w": make_abstract(W, PartitionSpec(None, "x")), "b": make_abstract(B, PartitionSpec())},
    "optimizer": make_abstract(HOST, PartitionSpec("x"), "pinned_host"),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(directory that two processes saved to, lines of each). One job saves and restores: each start takes seconds."""
    saved, made = tmp_path_factory.mktemp("by-two"), tmp_path_factory.mktemp("by-one")
    save_by_one(made)
    return saved, run(saved, made)


def save_by_one(directory):
    """Save two steps from one process, and corrupt the newer one."""

    def place(values, x):
        return jax.device_put(values, x.sharding)

    values = {"parameter": {"w": W * 8, "b": B * 8}, "optimizer": HOST * 8}
    state = jax.tree.map(place, values, ABSTRACT)
    with Checkpointer(directory=directory) as checkpointer:
        checkpointer.save(1, state, {"next": 8})
        checkpointer.save(2, state, {"next": 9})
    path = max((directory / "00000002").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    raw = bytearray(path.read_bytes())
    at = raw.index((W * 8)[40, :16].tobytes())  # larger than all values in HOST, so this finds W in the file
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.pairs
def test_two_processes_save_one_restores(both):
    directory, said = both
    assert [lines[0] for lines in said] == ["REFUSED [2, 3]"] * 2
    check_saved_by_two(Checkpointer(directory=directory))


def check_saved_by_two(checkpointer):
    """Check that one process restores what two have saved, on another mesh."""
    assert checkpointer.steps() == [2, 3]
    restored = checkpointer.restore_latest(ABSTRACT)
    assert (restored.step, restored.extra, restored.problems) == (3, {"next": 3}, [])
    np.testing.assert_array_equal(np.asarray(restored.state["parameter"]["w"]), W * 3)
    np.testing.assert_array_equal(np.asarray(restored.state["parameter"]["b"]), B * 3)
    np.testing.assert_array_equal(np.asarray(restored.state["optimizer"]), HOST * 3)
    assert restored.state["optimizer"].sharding.memory_kind == "pinned_host"


@pytest.mark.pairs
def test_one_process_saves_two_restore(both):
    _, said = both
    assert [lines[1:] for lines in said] == [["PROBLEMS 1 True"]] * 2
