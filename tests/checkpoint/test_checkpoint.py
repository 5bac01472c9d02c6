"""Checkpoints in real files, on 8 devices: meshes, memory kinds, retention, async saves, mismatches, peak memory."""

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from plimsoll.framework.checkpoint.checkpointer import (
    Checkpointer,
    CheckpointMismatchError,
    CheckpointMissingError,
    CheckpointSaveError,
)
from plimsoll.framework.checkpoint.directory import describe_checkpoints

MESHES = {shape: jax.make_mesh(shape, ("fsdp", "model")) for shape in [(4, 2), (2, 4), (8, 1)]}
EXTRA = {"data": {"next": 7, "fingerprint": "abc"}, "seed": 3, "config": {"$class": "a.B", "x": [1, 2.5, None, True]}}


def sharding(mesh, *spec, kind="device"):
    return NamedSharding(MESHES[mesh], PartitionSpec(*spec), memory_kind=kind)


def make_state(mesh=(4, 2), seed=0):
    """Return a state with every group, optax namedtuples, several dtypes and both memory kinds."""
    rng = np.random.default_rng(seed)
    weight = jnp.asarray(rng.standard_normal((16, 8)), jnp.float32)
    moments = optax.adam(1e-3).init({"dense": {"weight": weight}})[0]
    assert isinstance(moments, tuple)
    host = sharding(mesh, "fsdp", "model", kind="pinned_host")
    return {
        "parameter": {
            "dense": {"weight": jax.device_put(weight, sharding(mesh, "fsdp", "model"))},
            "norm": {"scale": jax.device_put(jnp.arange(8, dtype=jnp.bfloat16), sharding(mesh, "model"))},
        },
        "optimizer": (
            moments._replace(
                count=jax.device_put(jnp.int32(seed), sharding(mesh)),
                mu=jax.tree.map(lambda x: jax.device_put(x + 1, sharding(mesh, "fsdp", "model")), moments.mu),
                nu=jax.tree.map(lambda x: jax.device_put(x + 2, host), moments.nu),
            ),
            optax.EmptyState(),
        ),
        "buffer": {
            "mask": jax.device_put(jnp.arange(8) % 3 == 0, sharding(mesh, ("fsdp", "model"))),
            "empty": jax.device_put(jnp.zeros((0, 4), jnp.int8), sharding(mesh)),
            "nothing": None,
        },
        "counter": {
            "key": jax.device_put(jnp.asarray([1, 2**32 - 1], jnp.uint32), sharding(mesh)),
            "half": jax.device_put(jnp.asarray([1.5, np.nan], jnp.float16), sharding(mesh)),
        },
    }


def like(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same(a, b, *, placed=True):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))
        if placed:
            assert x.sharding == y.sharding, path


@pytest.fixture(scope="module")
def checkpoint_template(tmp_path_factory):
    root = tmp_path_factory.mktemp("written") / "checkpoints"
    with Checkpointer(directory=root) as checkpointer:
        for step in (10, 20):
            assert checkpointer.save(step, make_state(seed=step), EXTRA)
    return root


@pytest.fixture
def checkpoint_folder(checkpoint_template, tmp_path):
    """A directory with steps 10 and 20."""
    return Path(shutil.copytree(checkpoint_template, tmp_path / "checkpoints"))


@pytest.mark.pairs
@pytest.mark.parametrize("mesh", MESHES)
def test_any_mesh_and_memory(checkpoint_folder, mesh):
    """A checkpoint saved on (4, 2) restores host leaves to the host and device leaves to the device."""
    target = make_state(mesh)
    restored = Checkpointer(directory=checkpoint_folder).restore_latest(like(target))
    assert (restored.step, restored.extra, restored.problems) == (20, EXTRA, [])
    assert_same(restored.state, make_state(mesh, seed=20))
    assert restored.state["optimizer"][0].nu["dense"]["weight"].sharding.memory_kind == "pinned_host"
    assert type(restored.state["optimizer"][0]) is type(target["optimizer"][0])


@pytest.mark.pairs
def test_one_device_and_other_memory_kinds(checkpoint_folder):
    """Everything is restored to one device; host leaves may become device leaves, and vice versa."""
    one = SingleDeviceSharding(jax.devices()[5])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), make_state())
    weight = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=one.with_memory_kind("pinned_host"))
    abstract["parameter"]["dense"]["weight"] = weight
    restored = Checkpointer(directory=checkpoint_folder).restore(10, abstract)
    assert_same(restored.state, make_state(seed=10), placed=False)
    assert restored.state["parameter"]["dense"]["weight"].sharding.memory_kind == "pinned_host"
    assert restored.state["optimizer"][0].nu["dense"]["weight"].sharding == one


def test_one_device_saved_comes_back_sharded(tmp_path):
    one = SingleDeviceSharding(jax.devices()[0])
    state = jax.tree.map(lambda x: jax.device_put(x, one), make_state(seed=1))
    with Checkpointer(directory=tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
        assert_same(checkpointer.restore(1, like(make_state())).state, make_state(seed=1))


def test_groups_save_and_restore(checkpoint_folder):
    """Evaluation needs only the parameters: other groups are neither compared nor read."""
    checkpointer = Checkpointer(directory=checkpoint_folder, read_only=True)
    state = make_state()
    part = {"parameter": like(state["parameter"]), "ema": {}}
    restored = checkpointer.restore(20, part, groups=("parameter",))
    assert_same(restored.state, {"parameter": make_state(seed=20)["parameter"]})
    restored = checkpointer.restore_latest(like(state), groups=("parameter", "counter"))
    assert set(restored.state) == {"parameter", "counter"}
    with pytest.raises(ValueError, match=r"groups: expected some of .*'parameter'.*got \['weights'\]"):
        checkpointer.restore(20, part, groups=("weights",))
    with pytest.raises(ValueError, match="opened for reading only"):
        checkpointer.save(30, state, {})


def test_save_returns_when_the_arrays_may_be_donated(tmp_path):
    """The next step overwrites the buffers in place, and nothing else stays alive."""
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    state = {"parameter": {"w": jax.device_put(jnp.arange(2.0**16).reshape(64, -1), sharding((4, 2), "fsdp", "model"))}}
    with Checkpointer(directory=tmp_path) as checkpointer:
        for number in (1, 2, 3):
            kept = np.array(state["parameter"]["w"]) + number
            state = {"parameter": {"w": jax.device_put(kept, state["parameter"]["w"].sharding)}}
            checkpointer.save(number, state, {})
            before, state = state, step(state)
            assert before["parameter"]["w"].is_deleted(), "a save in progress must not stop donation"
            del before
            checkpointer.wait()
            restored = checkpointer.restore(number, like(state)).state
            np.testing.assert_array_equal(np.asarray(restored["parameter"]["w"]), kept)


def test_host_arrays_may_be_donated_too(tmp_path):
    host = sharding((4, 2), "fsdp", kind="pinned_host")

    def step(x):
        return jax.device_put(jax.device_put(x, jax.memory.Space.Device) * 0, jax.memory.Space.Host)

    state = {"optimizer": jax.device_put(jnp.arange(2.0**16).reshape(64, -1), host)}
    kept = np.array(state["optimizer"])
    with Checkpointer(directory=tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
        abstract = like(state)
        after = jax.jit(step, donate_argnums=0, out_shardings=host)(state["optimizer"])
        assert not np.asarray(after).any()
        np.testing.assert_array_equal(np.asarray(checkpointer.restore(1, abstract).state["optimizer"]), kept)


def live_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


@pytest.mark.pairs
def test_one_copy_while_saving_and_restoring(tmp_path):
    """Only the state is alive, both during a save and after a restore."""
    base = live_bytes()
    state = {"parameter": jax.device_put(jnp.ones((512, 1024)), sharding((4, 2), "fsdp", "model"))}
    size = 512 * 1024 * 4
    assert live_bytes() - base == size
    checkpointer = Checkpointer(directory=tmp_path)
    checkpointer.save(1, state, {})
    assert live_bytes() - base < size + 4096
    checkpointer.wait()
    assert live_bytes() - base < size + 4096
    abstract = like(state)
    del state
    restored = checkpointer.restore_latest(abstract)
    assert live_bytes() - base < size + 4096
    del restored
    assert live_bytes() - base < 4096


def test_retention(tmp_path):
    state = make_state()
    with Checkpointer(directory=tmp_path, keep=2, keep_every=4) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, state, {})
            checkpointer.wait()
            # An old step is deleted only once the new one exists.
            assert checkpointer.steps()[-min(step, 2) :] == [step - 1, step][-min(step, 2) :]
    assert checkpointer.steps() == [4, 6, 7]
    # Steps beyond a new one belong to an earlier attempt of the run: they do not count, and are not deleted.
    with Checkpointer(directory=tmp_path, keep=1) as checkpointer:
        checkpointer.save(5, state, {})
    assert checkpointer.steps() == [5, 6, 7]
    assert sorted(os.listdir(tmp_path)) == ["00000005", "00000006", "00000007"]


def test_same_step_again(checkpoint_folder, caplog):
    """A run saves a step once; a step from an earlier attempt of the run is replaced."""
    state = make_state(seed=99)
    with Checkpointer(directory=checkpoint_folder) as checkpointer:
        assert checkpointer.save(20, state, {"n": 1})
        assert "step 20 already exists and is being replaced" in caplog.text
        assert not checkpointer.save(20, state, {"n": 2})
        checkpointer.wait()
        restored = checkpointer.restore(20, like(state))
        assert restored.extra == {"n": 1}
        assert_same(restored.state, state)
        # Back at step 10, the run reaches step 20 again, with other data.
        checkpointer.restore(10, like(state))
        assert checkpointer.save(20, state, {"n": 3})
    assert checkpointer.manifest(20).extra == {"n": 3}
    assert sorted(os.listdir(checkpoint_folder)) == ["00000010", "00000020"]


@pytest.mark.pairs
def test_checkpoint_from_another_model_is_refused(checkpoint_folder):
    """Row 20 of the fault table: one error with a table, and nothing is loaded."""
    state = make_state()
    state["parameter"]["head"] = state["parameter"].pop("norm")
    state["parameter"]["dense"]["weight"] = jnp.zeros((8, 16))
    state["counter"]["key"] = jnp.zeros((2,), jnp.int32)
    before = live_bytes()
    for restore in (lambda c: c.restore(20, like(state)), lambda c: c.restore_latest(like(state))):
        with pytest.raises(CheckpointMismatchError) as error:
            restore(Checkpointer(directory=checkpoint_folder))
        lines = str(error.value).splitlines()
        assert lines[0].endswith("another model: 1 missing, 1 extra, 1 reshaped, 1 other dtype of 9 leaves")
        assert [line.split() for line in lines[1:]] == [
            ["leaf", "difference", "checkpoint", "model"],
            ["counter/key", "other", "dtype", "uint32[2]", "int32[2]"],
            ["parameter/dense/weight", "reshaped", "float32[16,8]", "float32[8,16]"],
            ["parameter/head/scale", "missing", "-", "bfloat16[8]"],
            ["parameter/norm/scale", "extra", "bfloat16[8]", "-"],
        ]
    assert live_bytes() == before


def test_long_tables_are_cut(tmp_path):
    with Checkpointer(directory=tmp_path) as checkpointer:
        checkpointer.save(1, {"parameter": {"w": jnp.zeros(2)}}, {})
        with pytest.raises(
            CheckpointMismatchError, match=r"(?s)100 missing, 1 extra of 100 leaves.*\.\.\. and 96 more$"
        ):
            checkpointer.restore(1, like({"parameter": {f"x{i}": jnp.zeros(2) for i in range(100)}}))


def test_missing_step_is_named(checkpoint_folder):
    checkpointer = Checkpointer(directory=checkpoint_folder)
    with pytest.raises(
        FileNotFoundError, match=r"no checkpoint of step 15: .*no such directory; committed steps: \[10, 20\]"
    ):
        checkpointer.restore(15, like(make_state()))
    with pytest.raises(CheckpointMissingError, match=r"no checkpoint in .* can be restored"):
        Checkpointer(directory=checkpoint_folder / "none").restore_latest(like(make_state()))


def test_save_fails_without_free_space(checkpoint_folder, monkeypatch):
    """Row 13 of the fault table: space is checked first, the error is clear, nothing is written, saving still works."""
    usage = shutil.disk_usage(checkpoint_folder)
    with Checkpointer(directory=checkpoint_folder, keep=2) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1 << 19))
            with pytest.raises(
                CheckpointSaveError, match=r"step 30: it needs 1\.0 MiB, and .* has 0\.5 MiB free; .*steps \[10, 20\]"
            ):
                checkpointer.save(30, make_state(), EXTRA)
        assert sorted(os.listdir(checkpoint_folder)) == ["00000010", "00000020"]
        assert checkpointer.save(30, make_state(), EXTRA)
    assert checkpointer.steps() == [20, 30]


def test_bad_arguments(tmp_path):
    checkpointer = Checkpointer(directory=tmp_path)
    state = {"parameter": {"w": jnp.zeros(2)}}
    with pytest.raises(TypeError, match=r"parameter/w: expected a jax.Array, got ndarray"):
        checkpointer.save(1, {"parameter": {"w": np.zeros(2)}}, {})
    for extra in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises((TypeError, ValueError)):
            checkpointer.save(1, state, extra)
    for step in (-1, 1.5, "1"):
        with pytest.raises(ValueError, match="step: expected an integer of at least 0"):
            checkpointer.save(step, state, {})  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="keep and keep_every: expected at least 1, got 0"):
        Checkpointer(directory=tmp_path, keep=0)
    with pytest.raises(ValueError, match=r"a local folder, gs://BUCKET/... or s3://BUCKET/..., got 'memory://x'"):
        Checkpointer(directory="memory://x")


def test_extra_is_stored_as_json(tmp_path):
    """Integer keys and tuples come back as JSON represents them, and do not break the digest."""
    with Checkpointer(directory=tmp_path) as checkpointer:
        checkpointer.save(1, {"a": jnp.zeros(2)}, {"k": {10: 1, 9: (2, 3)}, "x": 0.1})
    assert checkpointer.manifest(1).extra == {"k": {"10": 1, "9": [2, 3]}, "x": 0.1}


def test_manifest_is_human_readable_and_needs_no_jax(checkpoint_folder):
    """docs/checkpoints.md shows these ways to look at a checkpoint."""
    value = json.loads((checkpoint_folder / "00000020" / "manifest" / "data.json").read_text())
    assert value["step"] == 20
    assert value["leaves"]["optimizer/0/mu/dense/weight"]["shape"] == [16, 8]
    assert set(value["versions"]) == {"plimsoll-train", "jax", "orbax-checkpoint"}
    text = describe_checkpoints(checkpoint_folder)
    assert "committed steps [10, 20]" in text
    assert "parameter/dense/weight" in text
    code = f"import sys\nimport plimsoll as pl\nprint(pl.describe_checkpoints({str(checkpoint_folder)!r}, 10))"
    code += "\nassert not {'jax', 'orbax', 'numpy'} & set(sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path.cwd()
    ).stdout
    assert "step 10, saved" in out
    with pytest.raises(CheckpointMissingError, match="no checkpoint of step 11"):
        describe_checkpoints(checkpoint_folder, 11)


@pytest.mark.pairs
def test_import_is_cheap():
    """A typo on the command line must not wait for the import of orbax."""
    code = "import sys, plimsoll.framework.checkpoint.checkpointer\n"
    code += "assert not any(m.startswith(('orbax', 'tensorstore')) for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path.cwd())
