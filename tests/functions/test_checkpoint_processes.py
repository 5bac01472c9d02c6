"""Checkpoints of any pytree by two real processes: each writes and reads its part, and one process reads the whole."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import plimsoll as pl
from tests.support.runs import ROOT

VALUES = np.arange(8192, dtype=np.float32).reshape(64, 128)
# Each process has two devices. Arguments: the directory, the port, the process id.
JOB = """
import faulthandler, os, sys
# A process that hangs ends with the stacks of its threads, which the test prints.
faulthandler.dump_traceback_later(150, exit=True)
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
import plimsoll as pl
directory, port, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, heartbeat_timeout_seconds=30)
mesh = jax.make_mesh((2, 2), ("a", "b"))
place = NamedSharding(mesh, PartitionSpec("a", "b"))
values = np.arange(8192, dtype=np.float32).reshape(64, 128)
array = jax.make_array_from_callback(values.shape, place, lambda index: values[index])
tree = {"w": array, "wide": np.array([1 / 3]), "n": 7}
pl.save(directory, 1, tree, {"a": 1})
like = {"w": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=place), "wide": np.zeros(1), "n": 0}
restored, extra = pl.restore(directory, like)
assert extra == {"a": 1}
assert restored["w"].sharding == place
for shard in restored["w"].addressable_shards:
    np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])
assert restored["wide"].tolist() == [1 / 3]
assert restored["n"] == 7
try:
    pl.save(directory, 1, tree)
except FileExistsError:
    print("REFUSED", pl.steps(directory))
"""


@pytest.mark.pairs
def test_two_processes_write_one_checkpoint(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [sys.executable, "-W", "ignore", "-c", JOB, str(tmp_path), str(port)]
    jobs = [
        subprocess.Popen(
            [*command, str(process)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for process in (0, 1)
    ]
    try:
        results = [job.communicate(timeout=240) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(errors[-3000:] for _, errors in results)
    for output, _ in results:
        assert "REFUSED [1]" in output.splitlines()
    place = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec(None, "x"))
    like = {"w": jax.ShapeDtypeStruct(VALUES.shape, VALUES.dtype, sharding=place), "wide": np.zeros(1), "n": 0}
    restored, _ = pl.restore(tmp_path, like)
    np.testing.assert_array_equal(np.asarray(restored["w"]), VALUES)
    assert restored["wide"].tolist() == [1 / 3]
