"""Saves through a window of host memory: the same bits as a copy, in a bounded amount of memory, atomic."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from plimsoll.framework.checkpoint import chunk_store
from plimsoll.framework.checkpoint.checkpointer import Checkpointer, CheckpointSaveError
from plimsoll.framework.checkpoint.directory import Manifest
from plimsoll.framework.checkpoint.integrity import checksums
from plimsoll.framework.devices import host
from plimsoll.framework.layout import SplitArray, SplitSpec
from plimsoll.framework.program import save_window
from plimsoll.framework.schedules import stack_layout
from tests.checkpoint import test_checkpoint, test_checkpoint_processes
from tests.support import runs, small

MESH = jax.make_mesh((4, 2), ("a", "b"))
# A row of the largest array below is larger than this.
NARROW = 1 << 10


def place(values: np.ndarray, *axes: str | None, kind: str = "device") -> jax.Array:
    return jax.device_put(values, NamedSharding(MESH, PartitionSpec(*axes), memory_kind=kind))


def list_pointers(x: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


def read_leaves(directory: Path, step: int) -> dict:
    return json.loads((directory / f"{step:08d}" / "manifest" / "data.json").read_text())["leaves"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few rows, as they would be in arrays of gigabytes."""
    monkeypatch.setattr(chunk_store, "_MIN_CHUNK_BYTES", 256)


@pytest.mark.parametrize("window_bytes", [1, NARROW, 1 << 30])
def test_the_same_bits_as_without_a_window(tmp_path: Path, window_bytes: int):
    """All dtypes, shapes, shardings and memory kinds; the checksums of both manifests are equal."""
    state = test_checkpoint.make_state()
    state["parameter"]["cube"] = place(np.arange(12 * 6 * 10, dtype=np.float32).reshape(12, 6, 10), "a", "b")
    with Checkpointer(directory=tmp_path, keep=9) as checkpointer:
        checkpointer.save(1, state, {"next": 1})
        checkpointer.save(2, state, {"next": 2}, window_bytes=window_bytes)
        assert checkpointer.steps() == [1, 2], "a save through a window has finished when it returns"
        restored = checkpointer.restore(2, test_checkpoint.like(state))
        test_checkpoint.assert_same(restored.state, state)
        assert restored.extra == {"next": 2}
    assert read_leaves(tmp_path, 1) == read_leaves(tmp_path, 2)
    assert not list(tmp_path.glob("*.writing"))


@pytest.mark.parametrize("counts", [(1, 1, 1, 1, 1, 1), (2, 4), (4, 2), (6,)])
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_a_split_stack_is_saved_as_a_whole_one(tmp_path: Path, counts: tuple[int, ...], kind: str):
    """Parts of a stack give the files, the checksum and the values of the whole stack, and none of them is copied."""
    values = np.random.default_rng(0).standard_normal((6, 16, 8)).astype(jnp.bfloat16)
    cuts = np.cumsum(counts)[:-1]
    parts = tuple(place(part, None, "a", "b", kind=kind) for part in np.split(values, cuts))
    whole = place(values, None, "a", "b")
    with Checkpointer(directory=tmp_path, keep=9) as checkpointer:
        checkpointer.save(1, {"parameter": {"stack": whole}}, {})
        checkpointer.save(2, {"parameter": {"stack": SplitArray(parts)}}, {}, window_bytes=NARROW)
        abstract = {"parameter": {"stack": jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=whole.sharding)}}
        restored = checkpointer.restore(2, abstract)
        np.testing.assert_array_equal(np.asarray(restored.state["parameter"]["stack"]), values)
        assert read_leaves(tmp_path, 1) == read_leaves(tmp_path, 2)
        # It is read into parts of any other sizes, each into its own memory kind.
        kinds = ("device", "pinned_host", "device")
        places = [place(part, None, "b", kind=kind) for part, kind in zip(np.split(values, (1, 5)), kinds, strict=True)]
        spec = SplitSpec(tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in places))
        restored = checkpointer.restore(2, {"parameter": {"stack": spec}}).state["parameter"]["stack"]
        assert [part.sharding for part in restored.parts] == [x.sharding for x in places]
        np.testing.assert_array_equal(np.concatenate([np.asarray(part) for part in restored.parts]), values)
        # A checkpoint that was written as a copy is read as a whole stack, in host memory.
        restored = checkpointer.restore(1, {"parameter": {"stack": spec}}).state["parameter"]["stack"]
        assert restored.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(np.asarray(restored), values)


def test_separate_layers_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A save through a window is not read as whole stacks, because the host may have no room for them."""
    memory = {"update": "layer_programs", "remat": "full", "optimizer_state": "pinned_host:1"}
    program = small.program(small.experiment(small.llama(), mesh={"data": 2, "fsdp": 4}, memory=memory))
    backend = program.backend
    state = program.init()
    expected = jax.tree.map(np.asarray, state)
    with Checkpointer(directory=tmp_path, keep=9) as checkpointer:
        checkpointer.save(1, backend.to_checkpoint(state, join=False), {}, window_bytes=NARROW)
        checkpointer.save(2, backend.to_checkpoint(state), {})
        checkpointer.wait()
        assert read_leaves(tmp_path, 1) == read_leaves(tmp_path, 2)
        for step in (2, 1):
            if step == 1:
                monkeypatch.setattr(stack_layout, "_slice_leaf", lambda *_: pytest.fail("a whole stack was read"))
            restored = backend.from_checkpoint(checkpointer.restore(step, backend.abstract_checkpoint).state)
            program.layout.check(restored)
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, restored), expected)


def test_the_state_can_be_donated_afterwards(tmp_path: Path):
    """No view of the state is left, so the next step reuses its memory."""
    state = {"parameter": {"x": place(np.ones((16, 16), np.float32), "a", "b")}}
    with Checkpointer(directory=tmp_path) as checkpointer:
        checkpointer.save(1, state, {}, window_bytes=NARROW)
    pointers = list_pointers(state["parameter"]["x"])
    new = jax.jit(lambda x: x + 1, donate_argnums=0)(state["parameter"]["x"])
    assert state["parameter"]["x"].is_deleted()
    assert list_pointers(new) == pointers


@pytest.mark.parametrize("fails", [False, True], ids=["saved", "failed"])
def test_a_save_ends_when_its_views_are_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool):
    """tensorstore may release rows late; a step that followed at once would have to copy the arrays."""
    read = chunk_store._ShardRows.read
    held = threading.Event()

    def read_and_hold(self: chunk_store._ShardRows) -> np.ndarray:
        rows = read(self)
        if fails and held.is_set():
            raise OSError(5, "Input/output error")
        held.set()
        threading.Timer(1.0, lambda rows: None, [rows]).start()
        return rows

    monkeypatch.setattr(chunk_store._ShardRows, "read", read_and_hold)
    state = {"parameter": {"x": place(np.ones((16, 16), np.float32), "a", "b")}}
    errors: list[CheckpointSaveError] = []
    with Checkpointer(directory=tmp_path) as checkpointer:
        try:
            checkpointer.save(1, state, {}, window_bytes=NARROW)
        except CheckpointSaveError as error:
            # A run logs the error and goes on.
            errors.append(error)
    assert held.is_set()
    assert len(errors) == fails
    pointers = [shard.data.unsafe_buffer_pointer() for shard in state["parameter"]["x"].addressable_shards]
    new = jax.jit(lambda x: x + 1, donate_argnums=0)(state["parameter"]["x"])
    assert [shard.data.unsafe_buffer_pointer() for shard in new.addressable_shards] == pointers


def test_a_copy_can_be_written_after_the_state_is_donated(tmp_path: Path):
    """As object stores do: the step that follows reuses the memory, and the checkpoint has the values from before."""
    x = place(np.ones((16, 16), np.float32), "a", "b")
    pointers = list_pointers(x)
    manifest = Manifest.create(1, {"x": x}, checksums({"x": x}), {}, None)
    finish = chunk_store.write(tmp_path / "00000001", {"x": x}, manifest)
    new = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert list_pointers(new) == pointers
    finish()
    spec = jax.ShapeDtypeStruct(new.shape, new.dtype, sharding=new.sharding)
    restored = Checkpointer(directory=tmp_path).restore(1, {"x": spec})
    np.testing.assert_array_equal(np.asarray(restored.state["x"]), 1)


def test_rows_wait_until_the_window_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where rows have to be copied, as on accelerators, the copies that are not written yet stay within the window."""
    read = chunk_store._ShardRows.read
    alive = {"bytes": 0, "peak": 0}

    def read_copy(self: chunk_store._ShardRows) -> np.ndarray:
        rows = np.array(read(self))
        alive["bytes"] += rows.nbytes
        alive["peak"] = max(alive["peak"], alive["bytes"])
        weakref.finalize(rows, lambda size: alive.update(bytes=alive["bytes"] - size), rows.nbytes)
        return rows

    monkeypatch.setattr(chunk_store._ShardRows, "read", read_copy)
    state = {"parameter": {f"x{i}": place(np.ones((64, 64), np.float32), "a", "b") for i in range(8)}}
    pieces: list[None] = []
    with Checkpointer(directory=tmp_path, on_progress=lambda: pieces.append(None)) as checkpointer:
        checkpointer.save(1, state, {}, window_bytes=4 * NARROW)
    assert len(pieces) >= 8 * 16, "progress is reported piece by piece"
    # tensorstore releases rows shortly after it has reported that they are written; all of them are 128 KiB.
    assert NARROW <= alive["peak"] <= 2 * 4 * NARROW


@pytest.mark.parametrize("window_bytes", [None, NARROW])
def test_a_gpu_is_copied_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window_bytes: int | None):
    """Orbax would copy the whole state through XLA's pinned memory, which never shrinks; here one piece at a time."""
    state = test_checkpoint.make_state()
    offloaded = state["optimizer"][0].nu["dense"]["weight"]
    pointers = list_pointers(offloaded)
    with Checkpointer(directory=tmp_path, keep=9) as checkpointer:
        checkpointer.save(1, state, {})
    transferred: list[int] = []
    slice_rows = chunk_store._slice_rows

    def record(*args: Any) -> jax.Array:
        rows = slice_rows(*args)
        transferred.append(rows.nbytes)
        return rows

    monkeypatch.setattr(chunk_store, "_CHUNK_BYTES", NARROW)
    monkeypatch.setattr(chunk_store, "_slice_rows", record)
    monkeypatch.setattr(chunk_store, "get_platform", lambda x: "gpu")
    shard = offloaded.addressable_shards[0].data
    rows = chunk_store._ShardRows(shard, 0, shard.shape[0]).read()
    assert not np.shares_memory(rows, np.asarray(shard))
    with Checkpointer(directory=tmp_path, keep=9) as checkpointer:
        checkpointer.save(2, state, {}, window_bytes=window_bytes)
        # The offloaded array has no view, with which a GPU would refuse to donate it, and a CPU would copy it.
        stay = jax.jit(lambda x: x, donate_argnums=0, out_shardings=offloaded.sharding)
        assert list_pointers(stay(offloaded)) == pointers
    assert 0 < max(transferred) <= NARROW
    assert any(name.startswith("state-") for name in os.listdir(tmp_path / "00000002"))
    assert read_leaves(tmp_path, 1) == read_leaves(tmp_path, 2)


def test_frozen_arrays_go_through_the_window_too(tmp_path: Path):
    frozen = {"base": place(np.arange(256, dtype=np.float32).reshape(16, 16), "a", "b")}
    state = {"parameter": {"x": place(np.ones(4, np.float32))}, "frozen": frozen}
    with Checkpointer(directory=tmp_path) as checkpointer:
        checkpointer.save(1, state, {}, window_bytes=NARROW)
        restored = checkpointer.restore(1, test_checkpoint.like(state))
    np.testing.assert_array_equal(np.asarray(restored.state["frozen"]["base"]), np.asarray(frozen["base"]))
    (step,) = (tmp_path / "frozen").iterdir()
    assert any(path.name.startswith("state-") for path in step.iterdir())


def test_a_step_is_replaced_and_old_steps_are_removed(tmp_path: Path):
    def state(step: int):
        return {"parameter": {"x": place(np.full((8, 8), step, np.float32), "a", "b")}}

    with Checkpointer(directory=tmp_path, keep=2) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step), {}, window_bytes=NARROW)
            assert checkpointer.steps()[-1] == step
        # Old steps are removed in the background.
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3]
    with Checkpointer(directory=tmp_path, keep=2) as checkpointer:
        checkpointer.save(3, state(30), {}, window_bytes=NARROW)
        restored = checkpointer.restore_latest(test_checkpoint.like(state(0)))
    assert restored.step == 3
    assert np.asarray(restored.state["parameter"]["x"])[0, 0] == 30


def test_a_failed_write_leaves_the_old_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = {"parameter": {"x": place(np.ones((8, 8), np.float32), "a", "b")}}
    with Checkpointer(directory=tmp_path) as checkpointer:
        checkpointer.save(1, state, {}, window_bytes=NARROW)

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(chunk_store.durable, "rename", fail)
            with pytest.raises(CheckpointSaveError, match=r"step 2 was not saved: .*No space left.*steps \[1\]"):
                checkpointer.save(2, state, {}, window_bytes=NARROW)
        assert [path.name for path in tmp_path.iterdir()] == ["00000001"], "the half-written step is removed"
        checkpointer.save(2, state, {}, window_bytes=NARROW)
        assert checkpointer.steps() == [1, 2]


# Arguments: directory, bytes of the state, window in bytes (0 for a copy). Prints the growth of the peak memory.
MEASURE = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp
from plimsoll.framework.checkpoint.checkpointer import Checkpointer
directory, size, window = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def peak():  # not ru_maxrss, which starts with the peak of the parent process
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
make = jax.jit(lambda value: jnp.full((size // 32 // 4096, 1024), value, jnp.float32))
state = {"parameter": {f"x{i}": jax.block_until_ready(make(i)) for i in range(32)}}
checkpointer = Checkpointer(directory=directory)
# Imports, threads, and the compiler's memory for the checksums.
checkpointer.save(1, {"parameter": {"x": make(0)[:32]}}, {}, window_bytes=window or None)
checkpointer.wait()
from plimsoll.framework.checkpoint.integrity import checksums
checksums({f"parameter/{name}": x for name, x in state["parameter"].items()})
before = peak()
checkpointer.save(2, state, {}, window_bytes=window or None)
checkpointer.wait()
print("GROWTH", peak() - before)
"""


def measure(directory: Path, size: int, window: int) -> int:
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, str(directory), str(size), str(window)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=Path.cwd())
    assert job.returncode == 0, job.stderr[-3000:]
    return int(job.stdout.split()[-1])


@pytest.mark.pairs
def test_memory_is_bounded_by_the_window(tmp_path: Path):
    """512 MiB through 16 MiB; a copy needs the 512 MiB again, which shows that the measurement sees it."""
    size = 512 << 20
    assert measure(tmp_path / "window", size, 16 << 20) <= 24 << 20
    assert measure(tmp_path / "copy", size, 0) >= size


@pytest.mark.pairs
def test_a_killed_save_leaves_the_old_checkpoint(tmp_path: Path):
    """SIGKILL at six moments within a save: the step before it stays, and the next start removes the rest."""
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, str(tmp_path), str(256 << 20), str(16 << 20)]
    hits = 0
    for number in range(6):
        job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
        runs.wait_for(lambda job=job: (tmp_path / "00000002.writing").exists() or job.poll() is not None)
        time.sleep(0.05 * number)
        job.send_signal(signal.SIGKILL)
        job.communicate()
        hits += (tmp_path / "00000002.writing").exists()
        assert Checkpointer(directory=tmp_path, read_only=True).steps() in ([1], [1, 2])
        Checkpointer(directory=tmp_path).close()
        assert not list(tmp_path.glob("*.writing"))
    assert hits >= 3


@pytest.mark.pairs
def test_two_processes_save_through_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each process writes its own shards; one process restores them on another mesh."""
    through_window = test_checkpoint_processes.SAVE
    for step in (1, 2, 3):
        extra = f'{{"next": {step}}}'
        through_window = through_window.replace(f"{extra})", f"{extra}, window_bytes=4096)")
    assert through_window.count("window_bytes") == 3
    monkeypatch.setattr(test_checkpoint_processes, "SAVE", through_window)
    test_checkpoint_processes.save_by_one(tmp_path / "one")
    test_checkpoint_processes.run(tmp_path / "two", tmp_path / "one")
    checkpointer = Checkpointer(directory=tmp_path / "two")
    assert any(name.startswith("state-") for name in os.listdir(tmp_path / "two" / "00000003"))
    test_checkpoint_processes.check_saved_by_two(checkpointer)


# --- the choice of a run ---------------------------------------------------------------------------------------------


def test_a_run_copies_while_there_is_room(monkeypatch: pytest.MonkeyPatch):
    program = small.program(small.experiment(small.llama(), mesh={"data": 2, "fsdp": 4}))
    state = program.init()
    copied = save_window.count_copied_bytes(program.layout, program.backend.parts, 8, "cpu")
    assert copied == 2 * sum(x.nbytes for x in jax.tree.leaves(state))
    free = {"bytes": copied + save_window._RESERVE_BYTES}
    monkeypatch.setattr(save_window, "get_free_memory_bytes", lambda: free["bytes"])
    assert save_window.agree_on_window(program) is None
    free["bytes"] -= 1
    assert save_window.agree_on_window(program) == free["bytes"] // 4
    monkeypatch.setattr(save_window, "count_copied_bytes", lambda *_: 8 << 30)
    free["bytes"] = 8 << 30
    assert save_window.agree_on_window(program) == 1 << 30
    assert save_window.choose_window(8 << 30, None, None) is None, "a host of unknown size is not refused"
    assert save_window.choose_window(8 << 30, 8.0, 0) is None, "the window has room for the copy"
    assert save_window.choose_window(8 << 30, 7.5, 1 << 40) == 15 << 29


def test_a_gpu_does_not_join_separate_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Joined stacks would be in pinned memory; the parts are saved as they are, and count once."""
    program = small.program(small.experiment(memory={"update": "layer_programs", "remat": "full"}))
    state = program.init()
    counts = {
        platform: save_window.count_copied_bytes(program.layout, program.backend.parts, 1, platform)
        for platform in ("cpu", "gpu")
    }
    assert counts["gpu"] == sum(x.nbytes for x in jax.tree.leaves(state)) < counts["cpu"]
    monkeypatch.setattr(chunk_store, "get_platform", lambda x: "gpu")
    with Checkpointer(directory=tmp_path) as checkpointer:
        checkpointer.save(1, program.backend.to_checkpoint(state, join=False), {})
        restored = checkpointer.restore(1, program.backend.abstract_checkpoint)
    test_checkpoint.assert_same(program.backend.from_checkpoint(restored.state), state, placed=False)


def test_free_memory_in_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The limit less what is used; page cache that the kernel would drop counts as free."""
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("1000000")
    (group / "memory.current").write_text("700000")
    (group / "memory.stat").write_text("anon 500000\ninactive_file 150000\nactive_file 50000\n")
    monkeypatch.setattr(host, "Path", lambda path: tmp_path / str(path).removeprefix("/"))
    assert host.get_free_memory_bytes() == 450000


LAYERS = ["--config.memory.update=layer_programs", "--config.memory.remat=full"]


@pytest.mark.pairs
@pytest.mark.parametrize("flags", [[], LAYERS], ids=["whole", "layers"])
def test_a_run_resumes_from_a_save_through_a_window(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
):
    """The checkpoints of a run with a window have the same checksums, and it resumes with the same losses."""
    runs.write_text(tmp_path / "text")
    window = "--config.checkpoint.window_gib=1e-6"
    ends = ["--config.trainer.save_every=2", *flags]
    assert runs.train(tmp_path / "copy", *ends, "--config.trainer.max_steps=4") == 0
    assert runs.train(tmp_path / "window", *ends, window, "--config.trainer.max_steps=2") == 0
    output = capsys.readouterr().out
    assert "saves go through a window of 1.05 KiB of host memory" in output
    assert len(re.findall(r"the save of step \d+ blocked training for ", output)) == 1
    assert runs.train(tmp_path / "window", *ends, window, "--config.trainer.max_steps=4") == 0
    for step in (2, 4):
        checkpoints = [read_leaves(tmp_path / name / "checkpoints", step) for name in ("copy", "window")]
        assert checkpoints[0] == checkpoints[1]
    assert runs.losses(tmp_path / "copy") == runs.losses(tmp_path / "window")
