"""Checkpoint faults, all of them real: flipped bytes, missing files, kills, a full disk, payloads."""

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from plimsoll.framework.checkpoint.checkpointer import (
    CheckpointCorruptError,
    Checkpointer,
    CheckpointMissingError,
    CheckpointSaveError,
)
from plimsoll.framework.checkpoint.directory import CheckpointError

MESH = jax.make_mesh((4, 2), ("a", "b"))


def make_state(step):
    """Return a state large enough for orbax to store its chunks in separate files instead of in the index."""
    values = np.random.default_rng(step).standard_normal((64, 128), np.float32)
    sharded, whole = NamedSharding(MESH, PartitionSpec("a", "b")), NamedSharding(MESH, PartitionSpec())
    return {
        "parameter": {
            "weight": jax.device_put(values, sharded),
            "b": jax.device_put(values[0].astype(jnp.bfloat16), whole),
        },
        "counter": {"step": jax.device_put(jnp.int32(step), whole)},
    }


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make_state(0))


def is_step(restored, step):
    equal = jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), restored.state, make_state(step))
    return restored.step == step and all(jax.tree.leaves(equal)) and restored.extra == {"next": step}


def write(directory, steps):
    with Checkpointer(directory=directory, keep=10) as checkpointer:
        for step in steps:
            checkpointer.save(step, make_state(step), {"next": step})


@pytest.fixture(scope="module")
def checkpoint_template(tmp_path_factory):
    root = tmp_path_factory.mktemp("written") / "checkpoints"
    write(root, [1, 2, 3])
    return root


@pytest.fixture
def three(checkpoint_template, tmp_path):
    """A directory with steps 1, 2 and 3, for tests to damage."""
    return Path(shutil.copytree(checkpoint_template, tmp_path / "checkpoints"))


def list_files(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)


def flip(path, rng):
    raw = bytearray(path.read_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


# --- flipped bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.pairs
def test_a_flipped_bit_in_any_file_is_found_or_harmless(three):
    """Row 8 of the fault table: a few flips in every file of a checkpoint never give silently wrong values."""
    rng, found = random.Random(0), 0
    checkpointer = Checkpointer(directory=three, read_only=True)
    for path in list_files(three / "00000003"):
        good = path.read_bytes()
        for _ in range(4):
            flip(path, rng)
            try:
                assert is_step(checkpointer.restore(3, ABSTRACT), 3), f"{path}: restored silently, and wrong"
            except CheckpointError:
                found += 1
            path.write_bytes(good)
    assert found >= 12
    assert is_step(checkpointer.restore(3, ABSTRACT), 3)


def data_file(step_directory):
    """Return the file that holds the bytes of the arrays."""
    path = max(list_files(step_directory / "state"), key=lambda path: path.stat().st_size)
    assert path.stat().st_size > 64 * 128 * 4
    return path


def test_corrupt_array_is_named_and_the_previous_step_is_used(three, caplog):
    rng = random.Random(1)
    flip(data_file(three / "00000003"), rng)
    checkpointer = Checkpointer(directory=three)
    named = r"step 3 of .* is corrupt: 1 of 3 arrays differ from what was saved: parameter/weight$"
    with pytest.raises(CheckpointCorruptError, match=named):
        checkpointer.restore(3, ABSTRACT)  # requested by number: no other step is tried
    restored = checkpointer.restore_latest(ABSTRACT)
    assert is_step(restored, 2)
    (problem,) = restored.problems
    assert "differ from what was saved: parameter/weight" in problem
    assert problem in caplog.text
    assert caplog.records[-1].levelname == "WARNING"


def test_corrupt_checkpoints_do_not_crowd_out_good_ones(three):
    """Retention counts good checkpoints only; the corrupt one is replaced when the run reaches its step again."""
    flip(data_file(three / "00000003"), random.Random(1))
    with Checkpointer(directory=three, keep=2) as checkpointer:
        assert checkpointer.restore_latest(ABSTRACT).step == 2
        checkpointer.save(4, make_state(4), {"next": 4})
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3, 4]
        checkpointer.save(3, make_state(3), {"next": 3})
        checkpointer.wait()
        assert is_step(checkpointer.restore(3, ABSTRACT), 3)


def test_error_if_no_checkpoint_is_valid(three):
    """All checkpoints are tried, the error lists every problem, and nothing stays in memory."""
    before = sum(x.nbytes for x in jax.live_arrays())
    for step in (1, 2, 3):
        flip(data_file(three / f"{step:08d}"), random.Random(step))
    (three / "00000002" / "commit_success.txt").unlink()
    with pytest.raises(CheckpointCorruptError) as error:
        Checkpointer(directory=three).restore_latest(ABSTRACT)
    lines = str(error.value).splitlines()
    assert "no checkpoint in" in lines[0]
    assert [("incomplete" in line, "corrupt" in line) for line in lines[1:]] == [
        (True, False),
        (False, True),
        (False, True),
    ]
    del error
    assert sum(x.nbytes for x in jax.live_arrays()) <= before


@pytest.mark.pairs
def test_truncated_and_missing_data(three):
    """Orbax's own errors cause the same fallback with a warning, and name the arrays."""
    path = data_file(three / "00000003")
    path.write_bytes(path.read_bytes()[:1000])
    data_file(three / "00000002").unlink()
    restored = Checkpointer(directory=three).restore_latest(ABSTRACT)
    assert is_step(restored, 1)
    assert len(restored.problems) == 2
    assert "cannot be read: parameter/weight (ValueError: DATA_LOSS" in restored.problems[1]
    assert "cannot be read: parameter/weight (ValueError: OUT_OF_RANGE" in restored.problems[0]
    assert all("parameter/b" not in problem for problem in restored.problems)


# --- incomplete ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "missing",
    ["commit_success.txt", "_CHECKPOINT_METADATA", "manifest/data.json", "state/_METADATA", "state/manifest.ocdbt"],
)
def test_partial_checkpoint_is_listed_and_ignored(three, missing, caplog):
    """Row 9 of the fault table."""
    (three / "00000003" / missing).unlink()
    checkpointer = Checkpointer(directory=three)
    assert checkpointer.steps() == [1, 2]
    assert checkpointer.problems() == [f"{three / '00000003'}: incomplete: {missing} is missing"]
    restored = checkpointer.restore_latest(ABSTRACT)
    assert is_step(restored, 2)
    assert restored.problems == checkpointer.problems()
    assert f"{missing} is missing" in caplog.text
    with pytest.raises(CheckpointMissingError, match=rf"no checkpoint of step 3: .*{missing} is missing"):
        checkpointer.restore(3, ABSTRACT)


def test_unrelated_files_are_ignored(three, tmp_path):
    """An empty directory, a file, a symlink, a renamed step and foreign files are listed or ignored, never restored."""
    (three / "00000007").mkdir()
    (three / "9").mkdir()
    (three / "00000010").write_text("")
    (three / "00000011").symlink_to(three / "00000001")
    shutil.copytree(three / "00000001", three / "00000012")
    (three / "best").mkdir()
    (three / "notes.txt").write_text("")
    checkpointer = Checkpointer(directory=three)
    assert checkpointer.steps() == [1, 2, 3, 12]
    text = "\n".join(checkpointer.problems())
    for reason in (
        "00000007: incomplete: it is empty",
        "it is not a directory",
        "it is a symbolic link",
        "9: unexpected name",
    ):
        assert reason in text
    restored = checkpointer.restore_latest(ABSTRACT)
    assert is_step(restored, 3)
    assert "00000012 was renamed: it holds step 1" in restored.problems[-1]
    assert (three / "best").exists()
    assert (three / "notes.txt").exists()


def test_leftovers_are_removed_at_the_next_start(three, caplog):
    """Only leftovers of our own saves and deletions are removed; a reader of a directory in use removes nothing."""
    state = three / "00000003"
    for name in (
        "00000004.orbax-checkpoint-tmp",
        "00000005.orbax-checkpoint-tmp-123",
        "00000001.deleting",
        "00000002.replaced",
    ):
        shutil.copytree(state, three / name)
    shutil.copytree(state, three / "00000006.replaced")  # its successor was never written
    kept = ["mine.orbax-checkpoint-tmp", "7.deleting", "00000001.replaced.bak"]
    for name in kept:
        (three / name).mkdir()
    (three / "00000008.orbax-checkpoint-tmp").symlink_to(state)
    Checkpointer(directory=three, read_only=True)
    assert (three / "00000004.orbax-checkpoint-tmp").exists()
    Checkpointer(directory=three)
    steps = [f"0000000{step}" for step in (1, 2, 3, 6)]
    assert sorted(os.listdir(three)) == sorted([*steps, *kept, "00000008.orbax-checkpoint-tmp"])
    assert caplog.text.count("left behind by a job that was stopped") == 4


# --- kills and full disks, in separate processes ----------------------------------------------------------------------

CHILD = """
import os, resource, sys, time
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from plimsoll.framework.checkpoint.checkpointer import Checkpointer, CheckpointSaveError
sharding = NamedSharding(jax.make_mesh((2,), ("a",)), PartitionSpec("a"))
def state(step):
    return {"parameter": {k: jax.device_put(jnp.full((512, 1024), step, jnp.float32), sharding) for k in "wx"}}
abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
checkpointer = Checkpointer(directory=sys.argv[1], keep=2)
def restore():
    found = checkpointer.restore_latest(abstract)
    assert all((np.asarray(x) == found.step).all() for x in jax.tree.leaves(found.state)), "wrong values"
    return found.step, found.problems
def say(*words):
    print(*words, flush=True)
"""

SAVER = (
    CHILD
    + """
step = restore()[0] if checkpointer.steps() else 0
say("restored", step, sorted(os.listdir(sys.argv[1])))
while True:
    step += 1
    say("saving", step)
    checkpointer.save(step, state(step), {})
    if step % 2:
        checkpointer.wait()
        say("saved", step)
"""
)

FULL_DISK = (
    CHILD
    + """
checkpointer.save(1, state(1), {})
checkpointer.wait()
# A file may not grow beyond 1 MiB from here on: writing fails midway, as on a full disk.
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
checkpointer.save(2, state(2), {})
try:
    checkpointer.save(3, state(3), {})
except CheckpointSaveError as error:
    say("REPORTED", error)
say("LISTED", sorted(os.listdir(sys.argv[1])), restore())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpointer.save(4, state(4), {})
checkpointer.close()
say("LISTED", sorted(os.listdir(sys.argv[1])), restore())
"""
)


def start(code, directory):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path.cwd(),
    )


def kill_and_resume(directory, times, seed):
    """Start a job that saves all the time and kill it at a random moment of a save, `times` times; check each start."""
    rng, committed = random.Random(seed), 0
    for _ in range(times):
        job = start(SAVER, directory)
        assert job.stdout is not None
        word, step, listed = job.stdout.readline().split(" ", 2)
        assert word == "restored", job.communicate()[1]
        assert int(step) >= committed, "a committed step is never lost"
        assert all(name.isdigit() for name in json.loads(listed.replace("'", '"'))), "leftovers are cleaned"
        for _ in range(rng.randrange(1, 4)):
            while not (line := job.stdout.readline()).startswith("saving"):
                assert line, job.communicate()[1]
        time.sleep(rng.random() * 0.1)
        job.kill()
        out, _ = job.communicate()
        saved = [int(line.split()[1]) for line in out.splitlines() if line.startswith("saved")]
        committed = max([committed, int(step), *saved])
    return committed


@pytest.mark.pairs
def test_kill_during_a_save(tmp_path):
    """Row 10 of the fault table, a few times."""
    kill_and_resume(tmp_path / "checkpoints", times=3, seed=0)


@pytest.mark.slow
def test_kill_during_a_save_at_20_moments(tmp_path):
    assert kill_and_resume(tmp_path / "checkpoints", times=20, seed=1) > 5


@pytest.mark.pairs
def test_write_fails_midway(tmp_path):
    """Row 13 of the fault table: the error names the step, the last good one stays, no leftovers, saving continues."""
    job = start(FULL_DISK, tmp_path / "checkpoints")
    out, errors = job.communicate(timeout=300)
    assert job.returncode == 0, errors
    lines = [line for line in out.splitlines() if line.startswith(("REPORTED", "LISTED"))]
    assert lines[0].startswith("REPORTED the checkpoint of step 2 was not saved: ")
    assert lines[0].endswith("still there: steps [1]")
    assert lines[1] == "LISTED ['00000001'] (1, [])"
    assert lines[2] == "LISTED ['00000001', '00000004'] (4, [])"


def test_save_fails_at_its_start(three, monkeypatch):
    """The directory cannot be written: the error is immediate, and the step that was in the way is put back."""
    with Checkpointer(directory=three) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(
                "plimsoll.framework.checkpoint.storage.write", lambda *_: (_ for _ in ()).throw(OSError("read-only"))
            )
            with pytest.raises(
                CheckpointSaveError, match=r"step 3 was not saved: OSError: read-only; .*steps \[1, 2\]"
            ):
                checkpointer.save(3, make_state(3), {})
        assert is_step(checkpointer.restore(3, ABSTRACT), 3)


def test_background_failure_surfaces_once(three, monkeypatch):
    def fail():
        raise OSError("no more")

    with Checkpointer(directory=three) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr("plimsoll.framework.checkpoint.storage.write", lambda *_: fail)
            checkpointer.save(5, make_state(5), {})
        with pytest.raises(CheckpointSaveError, match=r"step 5 was not saved: OSError: no more; .*steps \[1, 2, 3\]"):
            checkpointer.wait()
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2, 3]
        with monkeypatch.context() as patch:
            patch.setattr("plimsoll.framework.checkpoint.storage.write", lambda *_: fail)
            checkpointer.save(6, make_state(6), {})
        with pytest.raises(CheckpointSaveError, match="step 6"):
            checkpointer.close()


def test_undeletable_old_checkpoint_is_reported(three, monkeypatch, caplog):
    """The new checkpoint is saved anyway."""
    with Checkpointer(directory=three, keep=1) as checkpointer:
        monkeypatch.setattr(
            "plimsoll.framework.checkpoint.directory.delete_step",
            lambda *_: (_ for _ in ()).throw(PermissionError("no")),
        )
        checkpointer.save(4, make_state(4), {"next": 4})
        checkpointer.wait()
        assert checkpointer.steps()[-1] == 4
    assert "step 4 was saved, but old ones could not be deleted: no" in caplog.text


# --- payloads --------------------------------------------------------------------------------------------------------


class Payload:
    def __reduce__(self):
        return (os.mkdir, (os.environ["CANARY"],))


def test_payloads_are_never_executed(three, tmp_path, monkeypatch):
    """Row 22 of the fault table: pickles, YAML, Python files and class names in a checkpoint and in `extra`."""
    canary = tmp_path / "canary"
    monkeypatch.setenv("CANARY", str(canary))
    code = "import os\nos.mkdir(os.environ['CANARY'])\nclass Handler: pass\n"
    yaml = "!!python/object/apply:os.mkdir ['" + str(canary) + "']"
    extra = {
        "next": 3,
        "yaml": yaml,
        "$class": "canary_module.Handler",
        "pickle": pickle.dumps(Payload(), 0).decode("latin1"),
    }
    with Checkpointer(directory=three) as checkpointer:
        checkpointer.save(3, make_state(3), extra)
    step = three / "00000003"
    for directory in (three, step, step / "state", step / "manifest"):
        (directory / "canary_module.py").write_text(code)
        (directory / "__init__.py").write_text(code)
        (directory / "conftest.py").write_text(code)
        (directory / "data.yaml").write_text(yaml)
        for name in ("data.pkl", "metadata", "checkpoint", "x.npy"):
            (directory / name).write_bytes(pickle.dumps(Payload()))
    monkeypatch.syspath_prepend(str(step))
    # Orbax's own files name the classes that read them; a different name must not be imported.
    for path, old, new in [
        (step / "_CHECKPOINT_METADATA", "pytree_handler.PyTreeHandler", "x"),
        (step / "state" / "_METADATA", "np.ndarray", "canary_module.Handler"),
    ]:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    metadata = json.loads((step / "_CHECKPOINT_METADATA").read_text())
    metadata["item_handlers"] = dict.fromkeys(metadata["item_handlers"], "canary_module.Handler")
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata))
    restored = Checkpointer(directory=three).restore_latest(ABSTRACT)
    assert restored.step in (2, 3)
    assert checkpointer.manifest(3).extra == extra
    assert not canary.exists()
    assert "canary_module" not in sys.modules
