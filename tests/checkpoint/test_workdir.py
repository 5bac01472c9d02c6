"""The workdir: layout, lock (two jobs, dead owners, recycled process ids, other hosts), safe names, atomic JSON."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from plimsoll.framework.config.changes import config_changes
from plimsoll.framework.files.workdir import Workdir, safe_child, write_json

HOLD = """
import sys, time
from plimsoll.framework.files.workdir import Workdir
print(Workdir(sys.argv[1]).claim(), flush=True)
assert "jax" not in sys.modules
sys.stdin.read()
"""


def hold(path):
    """Start a process that claims the workdir and holds it until its stdin is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "None"
    return process


def read_lock(workdir: Workdir) -> dict:
    return json.loads((workdir.path / "lock.json").read_text())


def leave_lock(workdir, **changes) -> None:
    """Write the lock of a job of this host that has ended or, with `changes`, of another job."""
    write_json(
        workdir / "lock.json",
        {"host": socket.gethostname(), "pid": os.getpid(), "since": "yesterday", "command": "train", **changes},
    )


def test_layout(tmp_path):
    workdir = Workdir(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists(), "it is made by the claim"
    with workdir:
        assert workdir.path.is_dir()
    assert [p.name for p in (workdir.config, workdir.metrics, workdir.log)] == [
        "config.json",
        "metrics.jsonl",
        "log.txt",
    ]
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"--workdir: expected a directory, got the file .*file"):
        Workdir(tmp_path / "file")


def test_second_job_is_refused_by_name_then_welcome(tmp_path):
    first = hold(tmp_path)
    with pytest.raises(ValueError, match=rf"process {first.pid} on host {socket.gethostname()}.*kill {first.pid}"):
        Workdir(tmp_path).claim()
    first.communicate("")
    assert first.returncode == 0
    assert not (tmp_path / "lock.json").exists(), "released at exit"
    with Workdir(tmp_path) as workdir:
        assert read_lock(workdir)["pid"] == os.getpid()
        assert workdir.claim() is None, "claiming twice does nothing"
    assert not (tmp_path / "lock.json").exists()


def test_stale_lock_from_a_killed_job_is_taken_over(tmp_path):
    first = hold(tmp_path)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    workdir = Workdir(tmp_path)
    assert f"process {first.pid}" in (workdir.claim() or "")
    assert read_lock(workdir)["pid"] == os.getpid()
    workdir.release()


def test_recycled_process_id_is_not_the_owner(tmp_path):
    """A live process has the dead owner's id, and the lock is still stale."""
    leave_lock(tmp_path)
    workdir = Workdir(tmp_path)
    assert "left behind" in (workdir.claim() or "")
    workdir.release()


def test_zombie_is_dead(tmp_path):
    """A killed job that its parent has not reaped yet still owns its process id."""
    first = hold(tmp_path)
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert f"process {first.pid}" in (Workdir(tmp_path).claim() or "")
    first.communicate()


def test_lock_held_on_another_host_is_respected(tmp_path):
    leave_lock(tmp_path, host="elsewhere")
    with pytest.raises(ValueError, match=r"Host .* cannot check whether that job is still running.* rm .*lock\.json"):
        Workdir(tmp_path).claim()
    assert (tmp_path / "lock.json").exists()


def test_unidentified_lock_holder_is_respected(tmp_path):
    """The lock file is removed or unreadable while the job runs."""
    first = hold(tmp_path)
    for spoil in (lambda lock: lock.write_text("{"), os.remove):
        spoil(tmp_path / "lock.json")
        with pytest.raises(ValueError, match="in use by another process; stop that job first, or choose"):
            Workdir(tmp_path).claim()
    first.communicate("")
    assert first.returncode == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "null"])
def test_unreadable_lock_is_respected(tmp_path, text):
    (tmp_path / "lock.json").write_text(text)
    with pytest.raises(ValueError, match=r"is not a valid lock file.* rm .*lock\.json"):
        Workdir(tmp_path).claim()
    assert (tmp_path / "lock.json").read_text() == text


def test_release_keeps_a_lock_held_by_another_job(tmp_path):
    workdir = Workdir(tmp_path)
    workdir.claim()
    (tmp_path / "lock.json").write_text("another's")
    workdir.release()
    assert (tmp_path / "lock.json").read_text() == "another's"


def test_only_one_concurrent_job_gets_the_lock(tmp_path):
    """All jobs find the same stale lock at the same time."""
    leave_lock(tmp_path)
    code = "import sys\nfrom plimsoll.framework.files.workdir import Workdir\n"
    code += f"try: Workdir({str(tmp_path)!r}).claim(); print('won')\n"
    code += "except ValueError: print('lost')\nsys.stdout.flush(); sys.stdin.read()"
    jobs = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    said = [job.stdout.readline().strip() for job in jobs if job.stdout]
    for job in jobs:
        job.communicate("")
    assert sorted(said) == ["lost"] * 5 + ["won"]


def test_fork_does_not_release(tmp_path):
    with Workdir(tmp_path) as workdir:
        code = os.fork()
        if code == 0:
            workdir.release()
            os._exit(0)
        os.waitpid(code, 0)
        assert (tmp_path / "lock.json").exists()


@pytest.mark.parametrize("name", ["run1", "2024-01-01_a=b+c.d", "_x", "A"])
def test_good_names(tmp_path, name):
    assert safe_child(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "/etc",
        "a\\b",
        "-rf",
        ".hidden",
        "a b",
        "a\n",
        "a\0b",
        "ä",
        "x" * 129,
        "~",
        "$HOME",
        7,
    ],
)
def test_bad_names(tmp_path, name):
    with pytest.raises(ValueError, match="--run_name: expected"):
        safe_child(tmp_path, name, "--run_name")


def test_bad_name_suggests_a_good_one(tmp_path):
    with pytest.raises(ValueError, match=r"try 'my-run'"):
        safe_child(tmp_path, "my run")


def test_symlink_that_leaves_the_root_is_rejected(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "inside").mkdir()
    (root / "ok").symlink_to(root / "inside")
    (root / "out").symlink_to(tmp_path)
    assert safe_child(root, "ok") == root / "ok"
    with pytest.raises(ValueError, match=r"--run_name: .*out is a symbolic link that points outside"):
        safe_child(root, "out", "--run_name")


def test_write_json_is_all_or_nothing(tmp_path):
    path = tmp_path / "config.json"
    write_json(path, {"a": [1, 2.5, None, "ü"]})
    assert json.loads(path.read_text()) == {"a": [1, 2.5, None, "ü"]}
    for bad in ({"a": float("nan")}, {"a": object()}):
        with pytest.raises((TypeError, ValueError)):
            write_json(path, bad)
    assert json.loads(path.read_text())["a"][0] == 1
    assert os.listdir(tmp_path) == ["config.json"], "no temporary file is left"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_file_permissions_follow_the_umask(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        write_json(tmp_path / "config.json", {})
        write_json(tmp_path / "config.json", {"again": 1})
    finally:
        os.umask(before)
    assert (tmp_path / "config.json").stat().st_mode & 0o777 == mode


def test_config_changes():
    old = {
        "model": {"dim": 8, "layers": [{"out": 1}, {"out": 2}], "rope": (1, 2)},
        "seed": 1,
        "gone": None,
        "flag": True,
    }
    new = {"model": {"dim": 16, "layers": [{"out": 1}, {"out": 3}], "rope": [1, 2]}, "seed": 1.0, "new": "x", "flag": 1}
    assert config_changes(old, new) == [
        "config.model.dim: 8 -> 16",
        "config.model.layers[1].out: 2 -> 3",
        "config.gone: null -> (absent)",
        "config.flag: true -> 1",
        'config.new: (absent) -> "x"',
    ]
    assert config_changes(old, old) == []
    assert config_changes({"a": [1]}, {"a": [1, 2]}) == ["config.a: [1] -> [1, 2]"]
    # Older versions saved the module of a component too.
    old_names = [{"$class": "framework.any.module.Linear"}, {"$class": "framework.data.preferences.ThumbSource"}]
    assert config_changes(old_names, [{"$class": "plimsoll.Linear"}, {"$class": "plimsoll.UnpairedSource"}]) == []
