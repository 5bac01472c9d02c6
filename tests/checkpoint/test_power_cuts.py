"""A power cut at any moment: committed checkpoints are on disk, and an older one is deleted only afterwards.

Two kinds of tests check this. The first records the calls that bring files to disk, and works anywhere. The second
cuts the power: the checkpoints are on an ext4 file system whose blocks are copied while they are written, and the
copy is mounted elsewhere. It needs root and loop devices.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.files import durable
from plimsoll.framework.files.workdir import write_json
from tests.support.runs import ROOT

MIB = 1 << 20
# Saves with a copy of the state, and through a window of host memory.
WINDOWS = [None, 1024]
WINDOW_NAMES = ["copy", "window"]


def make_state(step: int) -> dict[str, jax.Array]:
    """Return a state whose values identify its step."""
    return {"a": jnp.arange(1000.0) + step, "b": jnp.full((3, 5), step, jnp.int32)}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(call, path) of each os.fsync, rename and removal, in order."""
    recorded: list[tuple[str, str]] = []
    fsync, rename, replace, rmtree = os.fsync, os.rename, os.replace, shutil.rmtree

    def record_fsync(descriptor: int) -> None:
        recorded.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_rename(source, target, **places) -> None:
        recorded.append(("rename", str(target)))
        rename(source, target, **places)

    def record_replace(source, target, **places) -> None:
        recorded.append(("rename", str(target)))
        replace(source, target, **places)

    def record_rmtree(path, *arguments, **options) -> None:
        recorded.append(("remove", str(path)))
        rmtree(path, *arguments, **options)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(os, "replace", record_replace)
    monkeypatch.setattr(shutil, "rmtree", record_rmtree)
    return recorded


def paths_under(folder: Path) -> set[str]:
    """Return the folder and everything in it."""
    return {str(path) for path in (folder, *folder.rglob("*"))}


@pytest.mark.parametrize("window_bytes", WINDOWS, ids=WINDOW_NAMES)
def test_step_is_synced_before_older_steps_are_deleted(
    tmp_path: Path, calls: list[tuple[str, str]], window_bytes: int | None
) -> None:
    with Checkpointer(directory=tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, make_state(1), {}, window_bytes=window_bytes)
        checkpointer.wait()
        calls.clear()
        checkpointer.save(2, make_state(2), {}, window_bytes=window_bytes)
    synced_before_removal = set()
    for call, path in calls:
        if path.endswith("00000001.deleting"):
            break
        if call == "fsync":
            # A save through a window syncs its files before it renames their folder.
            synced_before_removal.add(path.replace(".writing", ""))
    else:
        pytest.fail("the older step was not removed")
    assert paths_under(tmp_path / "00000002") <= synced_before_removal
    assert str(tmp_path) in synced_before_removal, "the step's own name"


@pytest.mark.parametrize("window_bytes", WINDOWS, ids=WINDOW_NAMES)
def test_a_frozen_part_is_synced(tmp_path: Path, calls: list[tuple[str, str]], window_bytes: int | None) -> None:
    with Checkpointer(directory=tmp_path) as checkpointer:
        checkpointer.save(1, {"parameter": make_state(1), "frozen": make_state(0)}, {}, window_bytes=window_bytes)
    synced = {path.replace(".writing", "") for call, path in calls if call == "fsync"}
    assert paths_under(tmp_path / "frozen" / "00000001") | {str(tmp_path / "frozen"), str(tmp_path)} <= synced


def test_content_is_synced_before_its_name(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "a").write_text("a")
    durable.rename(tmp_path / "new", tmp_path / "folder")
    write_json(tmp_path / "facts.json", {"a": 1})
    names = [(call, Path(path).name) for call, path in calls]
    folder = names.index(("rename", "folder"))
    assert {("fsync", "a"), ("fsync", "new")} <= set(names[:folder])
    facts = names.index(("rename", "facts.json"))
    assert names[facts - 1][0] == names[folder + 1][0] == names[facts + 1][0] == "fsync"
    assert names[facts + 1][1] == names[folder + 1][1] == tmp_path.name


@pytest.mark.parametrize("name", ["manifest/data.json", "commit_success.txt", "state/manifest.ocdbt"])
def test_previous_step_returns_if_its_successor_is_emptied(tmp_path: Path, name: str) -> None:
    """A step is saved again in another attempt of the run; the power fails before the new one is on disk."""
    with Checkpointer(directory=tmp_path) as checkpointer:
        checkpointer.save(1, make_state(1), {"course": 1})
    shutil.copytree(tmp_path / "00000001", tmp_path / "00000001.replaced")
    (tmp_path / "00000001" / name).write_bytes(b"")
    with Checkpointer(directory=tmp_path) as checkpointer:
        restored = checkpointer.restore_latest(jax.eval_shape(lambda: make_state(1)) | make_state(1))
    assert restored.extra == {"course": 1}
    assert not (tmp_path / "00000001.replaced").exists()


def test_complete_successor_is_kept(tmp_path: Path) -> None:
    for course in (1, 2):
        with Checkpointer(directory=tmp_path) as checkpointer:
            checkpointer.save(1, make_state(1), {"course": course})
        if course == 1:
            shutil.copytree(tmp_path / "00000001", tmp_path / "kept")
    (tmp_path / "kept").rename(tmp_path / "00000001.replaced")
    with Checkpointer(directory=tmp_path) as checkpointer:
        assert checkpointer.manifest(1).extra == {"course": 2}
    assert not (tmp_path / "00000001.replaced").exists()


# --- power cuts of a file system --------------------------------------------------------------------------------------

SAVES = """
import sys, time
from plimsoll.framework.checkpoint import chunk_store
from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from tests.checkpoint.test_power_cuts import make_state
window_bytes = int(sys.argv[4]) or None
# Several files per array, as in arrays of gigabytes.
chunk_store._MIN_CHUNK_BYTES = 256
with Checkpointer(directory=sys.argv[1], keep=int(sys.argv[2])) as checkpointer:
    for step in range(1, 1000000):
        checkpointer.save(step, make_state(step), {"step": step}, window_bytes=window_bytes)
        checkpointer.wait()
        print(step, flush=True)
        time.sleep(float(sys.argv[3]))
"""


@contextmanager
def mount_image(image: Path, place: Path) -> Iterator[Path]:
    """Mount the image of a file system, which receives writes only when something is synced."""
    place.mkdir()
    subprocess.run(["mount", "-o", "loop,commit=300", image, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def can_mount(folder: Path) -> bool:
    """Return whether this process may mount an image."""
    image = folder / "probe.img"
    image.write_bytes(b"")
    os.truncate(image, 8 * MIB)
    try:
        subprocess.run(["mkfs.ext4", "-q", image], check=True, capture_output=True)
        with mount_image(image, folder / "probe"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@dataclass
class Cuts:
    """Result of several power cuts.

    Attributes:
        lost: descriptions of the cuts that lost a committed checkpoint.
        num_within_windows: number of cuts while a save through a window was not committed yet.
    """

    lost: list[str]
    num_within_windows: int


def cut_power(folder: Path, *, keep: int, every: float, cuts: int, window_bytes: int | None) -> Cuts:
    """Cut the power at random moments while checkpoints are saved.

    Args:
        folder: working directory.
        keep: number of checkpoints to keep.
        every: seconds between two saves.
        cuts: number of power cuts.
        window_bytes: window of each save; None for a copy of the state.
    """
    image = folder / "disk.img"
    image.write_bytes(b"")
    os.truncate(image, 64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    draw = random.Random(0)
    result = Cuts([], 0)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    with mount_image(image, folder / "disk") as disk:
        words = [sys.executable, "-c", SAVES, str(disk / "checkpoints"), str(keep), str(every)]
        words.append(str(window_bytes or 0))
        with subprocess.Popen(words, env=environment, cwd=ROOT, stdout=subprocess.PIPE) as saver:
            try:
                os.set_blocking(saver.stdout.fileno(), False)  # pyright: ignore[reportOptionalMemberAccess]
                said = b""
                while b"\n" not in said:
                    time.sleep(0.01)
                    said += saver.stdout.read() or b""  # pyright: ignore[reportOptionalMemberAccess]
                for number in range(cuts):
                    time.sleep(draw.uniform(0.0, max(0.3, 1.5 * every)))
                    saver.send_signal(signal.SIGSTOP)
                    said += saver.stdout.read() or b""  # pyright: ignore[reportOptionalMemberAccess]
                    copy = folder / "copy.img"
                    shutil.copyfile(image, copy)
                    result.num_within_windows += any((disk / "checkpoints").glob("*.writing"))
                    saver.send_signal(signal.SIGCONT)
                    said = said[said.rindex(b"\n", 0, -1) + 1 :] if said.count(b"\n") > 1 else said
                    committed = int(said)
                    with mount_image(copy, folder / f"cut-{number}") as place:
                        problem = problem_after_cut(place / "checkpoints", committed)
                    if problem:
                        result.lost.append(f"cut {number}, after step {committed} was committed: {problem}")
            finally:
                saver.kill()
    return result


def problem_after_cut(checkpoints: Path, committed: int) -> str | None:
    """Return what is wrong after a power cut; None if the newest checkpoint is of step `committed` or later."""
    try:
        with Checkpointer(directory=checkpoints) as checkpointer:
            restored = checkpointer.restore_latest(make_state(0))
    except (ValueError, OSError) as error:
        return repr(error)
    if restored.step < committed:
        return f"step {restored.step} is the newest: {restored.problems}"
    jax.tree.map(np.testing.assert_array_equal, restored.state, make_state(restored.step))
    return None


@pytest.mark.pairs
@pytest.mark.parametrize("window_bytes", WINDOWS, ids=WINDOW_NAMES)
@pytest.mark.parametrize("keep", [1, 3])
def test_no_power_cut_loses_what_was_committed(tmp_path: Path, keep: int, window_bytes: int | None) -> None:
    if not can_mount(tmp_path):
        pytest.skip("mounting an image of a file system needs root and loop devices")
    result = cut_power(tmp_path, keep=keep, every=0.0, cuts=10, window_bytes=window_bytes)
    assert result.lost == []
    print(f"{result.num_within_windows} of 10 cuts within a window")
    # Saves follow one another, and most of the time of each is spent before its commit.
    assert result.num_within_windows >= 3 if window_bytes else result.num_within_windows == 0
