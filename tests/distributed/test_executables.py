"""framework.devices.executables: on CPU, processes other than the first find their programs again at the next start."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from plimsoll.framework.devices import executables
from tests.support.runs import ROOT, free_port

SCRIPT = """
import sys
import jax
port, index, cache = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
jax.config.update("jax_compilation_cache_dir", cache)
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from plimsoll.framework.devices import executables

mesh = Mesh(np.asarray(jax.devices()), ("all",))
split, whole = NamedSharding(mesh, PartitionSpec("all")), NamedSharding(mesh, PartitionSpec())
x = jax.make_array_from_process_local_data(split, np.arange(2.0, dtype=np.float32) + index)
double = jax.jit(lambda x: (2 * x, x.sum()), out_shardings=(split, whole), donate_argnums=0)
compiled = executables.compile_or_load(double.lower(x))
many, total = compiled(x)
assert x.is_deleted(), "donated"
small = executables.call(jax.jit(lambda tree, power: tree["a"] ** power, static_argnums=1), {"a": np.float32(3)}, 2)
print("result", float(total), [float(v) for s in many.addressable_shards for v in s.data], float(small), flush=True)
"""


def run(cache: Path) -> list[str]:
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    words = [sys.executable, "-c", SCRIPT, str(port)]
    both = [
        subprocess.Popen([*words, str(i), str(cache)], env=environment, stdout=-1, stderr=-2, text=True)
        for i in range(2)
    ]
    texts = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], texts
    return texts


def result(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("result"))


@pytest.mark.pairs
def test_executables_are_saved_and_reloaded(tmp_path: Path) -> None:
    first = run(tmp_path)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "processes").iterdir()}
    assert len(kept) == 2, "both programs of the second process, none of the first"
    assert [result(text) for text in first] == ["result 4.0 [0.0, 2.0] 9.0", "result 4.0 [2.0, 4.0] 9.0"]
    again = run(tmp_path)
    assert [result(text) for text in again] == [result(text) for text in first]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "processes").iterdir()} == kept, "written again"
    for path in kept:
        path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2])
    third = run(tmp_path)
    assert [result(text) for text in third] == [result(text) for text in first]
    assert "cannot be used" in third[1]
    assert "cannot be used" not in third[0]


def test_single_process_uses_the_jax_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert executables.folder() is None
    square = jax.jit(lambda x: x * x)
    assert executables.call(square, jnp.float32(3)) == 9
    assert executables.compile_or_load(square.lower(jnp.float32(3)))(jnp.float32(4)) == 16
