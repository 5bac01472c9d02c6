"""framework.processes.health: the heartbeat of a process. Ending a hang is tested in a separate process."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plimsoll.framework.metrics.goodput import Goodput
from plimsoll.framework.processes.health import Health, Pulse, read
from tests.support.runs import ROOT, wait_for


def pulse(folder: Path, **options: float) -> Pulse:
    return Pulse(folder, 3, 4, Health(**options), Goodput())


def test_reports_the_loops_last_state(tmp_path: Path) -> None:
    folder = tmp_path / "health"
    with pulse(folder, status_seconds=0.05) as one:
        first = read(folder / "process-00003.json")
        assert first is not None
        assert (first["process"], first["num_processes"], first["attempt"], first["phase"]) == (3, 4, 1, "start")
        one.note(step=7, loss=float("nan"))
        said = wait_for(lambda: (now := read(one.path)) and now.get("step") == 7 and now, 10)
        assert said["loss"] == "nan", "JSON has no NaN"
        assert time.time() - said["moved"] < 5.0
    one.write(exit=0)
    assert read(one.path)["exit"] == 0
    assert not list(folder.glob("*.tmp*"))


@pytest.mark.parametrize(("code", "down"), [(0, False), (130, False), (5, True), (None, True)])
def test_the_next_start_carries_on(tmp_path: Path, code: int | None, down: bool) -> None:
    path = tmp_path / "process-00003.json"
    facts = {"time": time.time() - 50.0, "moved": 0.0, "attempt": 2, "goodput": {"step": 30.0}, "phase": "step"}
    facts |= {"process": 3, "num_processes": 4, "host": "h", "pid": 1, "interval": 5.0}
    path.write_text(json.dumps(facts if code is None else {**facts, "exit": code}))
    goodput = Goodput()
    one = Pulse(tmp_path, 3, 4, Health(), goodput)
    one.write()
    assert read(path)["attempt"] == 3
    totals = goodput.totals()
    assert totals["step"] == 30.0
    assert (totals.get("down", 0.0) > 49.0) == down, "the time after a requested stop does not count as down"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"time": 1}', '{"attempt": 1}', "\0\0"])
def test_implausible_heartbeats_are_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "process-00003.json"
    assert read(path) is None
    path.write_text(text)
    assert read(path) is None
    one = pulse(tmp_path)
    one.write()
    assert read(path)["attempt"] == 1


def test_a_full_disk_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plimsoll.framework.processes.health.write_json", full)
    with pulse(tmp_path) as one:
        one.note(step=1)
        one.write()


HANG = """
import sys, time
from pathlib import Path
from plimsoll.framework.processes.health import Health, Pulse
from plimsoll.framework.metrics.goodput import Goodput
goodput = Goodput()
folder = Path(sys.argv[1])
last_words = lambda: (folder / "last").write_text("words")
with Pulse(folder, 3, 4, Health(hang_seconds=0.5), goodput, last_words) as pulse:
    with goodput.during("compile"):
        time.sleep(1.2)  # takes as long as it takes
    goodput.enter("step")
    for step in range(8):
        time.sleep(0.15)
        pulse.note(step=step)
    print("hanging", flush=True)
    time.sleep(60)
"""


def test_stuck_loop_exits_with_stack_traces(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HANG, str(tmp_path)]
    process = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert process.returncode == 6, process.stderr
    assert process.stdout == "hanging\n", "only a process without progress is ended"
    message = "process 3 has made no progress for 0.5 s (health.hang_seconds) in phase 'step', after step 7"
    assert f"error: {message}" in process.stderr
    stacks = (tmp_path / "process-00003.stacks.txt").read_text()
    assert 'File "<string>", line' in stacks
    assert "in _run" in stacks, "the stacks of all threads"
    said = read(tmp_path / "process-00003.json")
    assert (said["exit"], said["step"]) == (6, 7)
    assert "has made no progress" in said["reason"]
    assert (tmp_path / "last").read_text() == "words"
