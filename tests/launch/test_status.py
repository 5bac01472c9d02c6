"""`plimsoll status`: the health that it derives from the files of the processes."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from plimsoll.framework.processes.health import identify_process
from plimsoll.launch.status import main, status

NOW = 1_700_000_000.0


def write(workdir: Path, process: int = 0, *, of: int = 1, **facts: Any) -> None:
    """Write the file of a process that was healthy a second ago, with `facts` replaced."""
    said = {
        **{"process": process, "num_processes": of, "host": f"host{process}", "pid": 40 + process, "attempt": 2},
        **{"interval": 10.0, "hang_seconds": 100.0, "phase": "step", "limited": True, "step": 7, "max_steps": 20},
        **{"loss": 3.25, "tokens_per_second": 1234.5, "time": NOW - 1.0, "moved": NOW - 1.5},
        **{"goodput": {"step": 90.0, "compile": 10.0}, **facts},
    }
    (workdir / "health").mkdir(parents=True, exist_ok=True)
    (workdir / "health" / f"process-{process:05d}.json").write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("facts", "health"),
    [
        ({}, "running"),
        ({"exit": 0, "time": NOW - 1e6}, "done"),
        ({"exit": 6, "reason": "stood still"}, "ended with exit code 6"),
        ({"exit": 143}, "ended with exit code 143"),
        ({"time": NOW - 40.0, "moved": NOW - 41.0}, "silent for 40 s"),
        ({"time": NOW - 30.0, "moved": NOW - 31.0}, "running"),  # three intervals, plus a margin for delays
        ({"moved": NOW - 61.0}, "stalled for 60 s"),
        ({"moved": NOW - 61.0, "phase": "compile", "limited": False}, "running"),
        ({"moved": NOW - 61.0, "hang_seconds": None}, "running"),
    ],
)
def test_process_health(tmp_path: Path, facts: dict[str, Any], health: str) -> None:
    write(tmp_path, **facts)
    assert status(tmp_path, NOW)["health"] == health


def test_killed_process_is_reported_immediately(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    facts = {"host": socket.gethostname(), "pid": process.pid, "identity": identify_process(process.pid)}
    write(tmp_path, **facts)
    assert facts["identity"]
    assert status(tmp_path, NOW)["health"] == "running"
    process.kill()
    process.wait()
    assert status(tmp_path, NOW)["health"].startswith("ended without an exit code")
    # Nothing is known about another machine, and its pids are unrelated to ours.
    write(tmp_path, **{**facts, "host": "elsewhere"})
    assert status(tmp_path, NOW)["health"] == "running"
    # The pid now belongs to another process.
    write(tmp_path, **{**facts, "pid": os.getpid()})
    assert status(tmp_path, NOW)["health"].startswith("ended without an exit code")


def test_worst_process_in_the_current_start_counts(tmp_path: Path) -> None:
    write(tmp_path, 0, of=2)
    write(tmp_path, 1, of=2, exit=5)
    write(tmp_path, 3, of=4, exit=6)
    found = status(tmp_path, NOW)
    assert found["health"] == "ended with exit code 5"
    assert [row["process"] for row in found["processes"]] == [0, 1]
    write(tmp_path, 0, of=3)
    write(tmp_path, 1, of=3)
    found = status(tmp_path, NOW)
    assert (found["health"], found["missing"]) == ("missing", 1)


def test_text_and_json_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, time=time.time(), moved=time.time(), loss="nan")
    for name in ("00000004", "00000008"):
        step = tmp_path / "checkpoints" / name
        for file in ("commit_success.txt", "_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt"):
            (step / file).parent.mkdir(parents=True, exist_ok=True)
            (step / file).touch()
        (step / "manifest").mkdir()
        (step / "manifest" / "data.json").touch()
    (tmp_path / "checkpoints" / "00000012").mkdir()
    assert main([f"--workdir={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    for words in ("running", "7 of 20", "nan", "step 8", "steps that count", "90.0%", "host0:40", "00000012"):
        assert words in shown, words
    assert main([f"--workdir={tmp_path}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"] == [4, 8]
    write(tmp_path, exit=1, reason="ValueError: no")
    assert main([f"--workdir={tmp_path}"]) == 1
    assert "ValueError: no" in capsys.readouterr().out


def test_missing_workdir_and_unknown_flag_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--workdir={tmp_path / 'nowhere'}"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(["--workdr=x"]) == 2
    assert "--workdir" in capsys.readouterr().err
