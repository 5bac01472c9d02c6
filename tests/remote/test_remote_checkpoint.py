"""Checkpoints in object stores: the same guarantees as on a disk, without renames."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from plimsoll.framework.checkpoint import chunk_store as checkpoint_objects
from plimsoll.framework.checkpoint import directory as checkpoint_directory
from plimsoll.framework.checkpoint.checkpointer import Checkpointer, CheckpointSaveError
from plimsoll.framework.checkpoint.directory import CheckpointCorruptError, CheckpointMissingError, describe_checkpoints
from plimsoll.framework.files.remote import connect

ROOT = Path(__file__).parents[2]
DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int4", "int8", "uint32", "bool", "float16", "complex64"]


def put_on_mesh(value, count, *axes, memory=None):
    mesh = jax.make_mesh((count,), ("x",), devices=jax.devices()[:count])
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes), memory_kind=memory))


def make(seed, count=2, memory=None):
    rng = np.random.default_rng(seed)
    state = {dtype: put_on_mesh(jnp.asarray(rng.integers(0, 2, (8, 6)), dtype), count, "x") for dtype in DTYPES}
    state["host"] = put_on_mesh(jnp.asarray(rng.random((8, 3)), "float32"), count, "x", memory=memory)
    state["scalar"] = put_on_mesh(jnp.float32(rng.random()), count)
    state["none"] = put_on_mesh(jnp.zeros((0, 3)), count)
    state["zeros"] = put_on_mesh(jnp.zeros((4, 3)), count)
    return {"parameter": state}


def like(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def check(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture
def small(s3):
    """(URL of a checkpoint directory with steps 1 and 2, the state in step 2)."""
    url, state = f"{s3}/run/checkpoints", {"parameter": {"w": put_on_mesh(jnp.arange(32.0) + 1, 2, "x")}}
    with Checkpointer(directory=url) as checkpointer:
        checkpointer.save(1, state, {})
        checkpointer.save(2, jax.tree.map(lambda x: 2 * x, state), {})
    return url, jax.tree.map(lambda x: 2 * x, state)


def names(url):
    fs, path = connect(url)
    return [name[len(path) + 1 :] for name in fs.find(path)]


@pytest.mark.pairs
def test_checkpoint_restores_on_any_mesh_and_memory_kind(store):
    url = f"{store}/run/checkpoints"
    with Checkpointer(directory=url, keep=2) as checkpointer:
        for step in (1, 2, 3):
            state = make(step)
            assert checkpointer.save(step, state, {"step": step})
            for leaf in jax.tree.leaves(state):
                leaf.delete()  # like donation
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3]
    assert not [name for name in names(url) if name.startswith("00000001/")]
    again = Checkpointer(directory=url, read_only=True)
    for count, memory in ((2, None), (4, "pinned_host"), (1, None)):
        restored = again.restore_latest(like(make(0, count, memory)))
        assert restored.extra == {"step": 3}
        check(restored.state, make(3, count, memory))
        assert restored.state["parameter"]["host"].sharding.memory_kind == (memory or "device")
    assert "committed steps [2, 3]" in describe_checkpoints(url)


@pytest.mark.pairs
def test_parts_are_split_and_joined(s3, monkeypatch):
    monkeypatch.setattr(checkpoint_objects, "_CHUNK_BYTES", 64)
    state = {
        "parameter": {
            "w": put_on_mesh(jnp.arange(8 * 9 * 5.0).reshape(8, 9, 5), 2, "x"),
            "v": put_on_mesh(jnp.arange(7.0), 1),
        }
    }
    with Checkpointer(directory=f"{s3}/c") as checkpointer:
        checkpointer.save(1, state, {})
        checkpointer.wait()
        check(checkpointer.restore(1, like(state)).state, state)
    sizes = [
        connect(f"{s3}/c/{name}")[0].size(connect(f"{s3}/c/{name}")[1]) for name in names(f"{s3}/c") if "/c/" in name
    ]
    assert max(sizes) <= 64
    assert len(sizes) > 8 * 9 * 5 * 4 // 64


@pytest.mark.pairs
def test_a_save_that_failed_leaves_the_old_ones_and_is_cleaned(small):
    url, state = small

    def refuse():
        raise ConnectionError("metrics are not there yet")

    checkpointer = Checkpointer(directory=url, before_commit=refuse)
    checkpointer.save(3, state, {})
    with pytest.raises(
        CheckpointSaveError, match=r"step 3 was not saved: .*not there yet; still there: steps \[1, 2\]"
    ):
        checkpointer.wait()
    assert not [name for name in names(url) if name.startswith("00000003")]


@pytest.mark.pairs
def test_unreachable_store_fails_the_save(small, monkeypatch):
    url, state = small

    def fail_to_connect(*_, **__):
        raise ConnectionError("no route")

    with Checkpointer(directory=url) as checkpointer:
        assert checkpointer.steps() == [1, 2]
        with monkeypatch.context() as outage:
            for name in ("scan", "remove_leftovers", "delete_step"):
                outage.setattr(checkpoint_directory, name, fail_to_connect)
            outage.setattr(checkpoint_objects, "_open", fail_to_connect)
            checkpointer.save(3, state, {})
            with pytest.raises(
                CheckpointSaveError, match=r"step 3 was not saved: .*no route; still there: steps \[1, 2\]"
            ):
                checkpointer.wait()
            assert checkpointer.steps() == [1, 2]
        checkpointer.save(3, state, {})
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2, 3]


@pytest.mark.pairs
def test_leftovers_from_a_killed_save_are_removed(small):
    url, state = small
    fs, path = connect(url)
    (arrays,) = {name.split("/")[1] for name in names(url) if name.startswith("00000002/state-")}
    fs.cp(f"{path}/00000002/{arrays}", f"{path}/00000003/state-0123", recursive=True)
    fs.cp(f"{path}/00000002/{arrays}", f"{path}/00000002/state-0123", recursive=True)  # an unfinished replacement
    looking = Checkpointer(directory=url, read_only=True)
    assert looking.steps() == [1, 2]
    assert "00000003: incomplete: manifest/data.json is missing" in looking.problems()[0]
    with pytest.raises(CheckpointMissingError, match="no checkpoint of step 3"):
        looking.restore(3, like(state))
    Checkpointer(directory=url)
    assert not [name for name in names(url) if "state-0123" in name]
    check(looking.restore(2, like(state)).state, state)


def test_a_step_is_replaced_as_a_whole(small):
    url, state = small
    other = jax.tree.map(lambda x: x + 7, state)
    with Checkpointer(directory=url) as checkpointer:
        checkpointer.save(2, other, {})
    assert len({name.split("/")[1] for name in names(url) if name.startswith("00000002/")}) == 2
    check(Checkpointer(directory=url, read_only=True).restore(2, like(state)).state, other)


@pytest.mark.first(1)
@pytest.mark.parametrize("harm", ["flip", "drop", "cut"])
def test_corruption_falls_back_to_the_previous_step(small, harm):
    url, state = small
    fs, path = connect(url)
    (piece, *_) = [name for name in fs.find(f"{path}/00000002") if name.endswith("/c/0")]
    data = bytearray(fs.cat_file(piece))
    data[5] ^= 4
    fs.rm_file(piece) if harm == "drop" else fs.pipe_file(piece, bytes(data if harm == "flip" else data[:9]))
    checkpointer = Checkpointer(directory=url, read_only=True)
    with pytest.raises(CheckpointCorruptError, match="parameter/w"):
        checkpointer.restore(2, like(state))
    assert checkpointer.restore_latest(like(state)).step == 1


def test_frozen_arrays_are_written_once(s3):
    url, learning = f"{s3}/c", {"w": put_on_mesh(jnp.arange(4.0), 1)}
    state = {"parameter": learning, "frozen": {"base": put_on_mesh(jnp.arange(6.0), 1)}}
    with Checkpointer(directory=url) as checkpointer:
        checkpointer.save(1, state, {})
        checkpointer.save(2, state, {})
    assert len([name for name in names(url) if "base" in name and name.endswith("zarr.json")]) == 1
    check(Checkpointer(directory=url, read_only=True).restore_latest(like(state)).state, state)


def test_copied_to_a_disk_it_can_be_read(small, tmp_path):
    url, state = small
    fs, path = connect(url)
    fs.get(path, str(tmp_path / "checkpoints"), recursive=True)
    local = Checkpointer(directory=tmp_path / "checkpoints", read_only=True)
    assert local.steps() == [1, 2]
    check(local.restore_latest(like(state)).state, state)


TWO = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[3]))
from jax.sharding import NamedSharding, PartitionSpec
from plimsoll.framework.checkpoint.checkpointer import Checkpointer
mesh = jax.make_mesh((4,), ("x",))
def place(x, *axes):
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
state = {"parameter": {"w": place(np.arange(32.0, dtype="float32"), "x"), "v": place(np.arange(5.0, dtype="float32"))}}
with Checkpointer(directory=sys.argv[1]) as checkpointer:
    for step in (1, 2):
        checkpointer.save(step, state, {})
    checkpointer.wait()
    assert checkpointer.steps() == [1, 2]
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    assert checkpointer.restore_latest(like).step == 2
print("done")
"""


@pytest.mark.slow
def test_two_processes_write_their_parts(s3, tmp_path, environment):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    (tmp_path / "two.py").write_text(TWO)
    command = [sys.executable, str(tmp_path / "two.py"), f"{s3}/c", port]
    environment.setenv("PYTHONPATH", str(ROOT))
    running = [
        subprocess.Popen([*command, str(i)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for i in range(2)
    ]
    for process in running:
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 0, out
    state = {"parameter": {"w": put_on_mesh(jnp.arange(32.0), 1), "v": put_on_mesh(jnp.arange(5.0), 1)}}
    check(Checkpointer(directory=f"{s3}/c", read_only=True).restore(2, like(state)).state, state)


@pytest.mark.pairs
def test_only_the_manifest_commits_a_step(small):
    url, _ = small
    fs, path = connect(url)
    manifest = json.loads(fs.cat_file(f"{path}/00000002/manifest/data.json"))
    assert {name.split("/")[1] for name in names(url) if name.startswith("00000002/")} == {
        "manifest",
        manifest["arrays"],
    }
    fs.rm_file(f"{path}/00000002/manifest/data.json")
    assert Checkpointer(directory=url, read_only=True).steps() == [1]
