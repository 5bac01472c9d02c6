"""`plimsoll local` with real processes and real signals. The processes follow a script; in one test they train."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from plimsoll.launch.local import _find_newest_step, main
from tests.support.runs import CONFIG, ROOT, losses, wait_for, write_text

TINY = [f"--config={CONFIG}:tiny", "--workdir=runs/x"]
PLIMSOLL_TRAIN = [sys.executable, "-m", "plimsoll", "train"]
# The supervisor as `plimsoll local` runs it, but with `script` instead of `plimsoll train`.
DRIVER = """
import sys
from plimsoll.launch import local
local.Supervisor.verb, local.Supervisor.warm_imports = "tests.launch.scripted", "json"
newest = lambda: int(open("newest").read())
grace, backoff, max_restarts = float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
sys.exit(local.Supervisor([sys.argv[1]], [{}] * int(sys.argv[2]), newest).run(grace, backoff, max_restarts))
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class Launched:
    """A supervisor that runs `script` in `count` processes; each writes its pid to pids/INDEX."""

    def __init__(self, folder: Path, script: str, count: int, grace: float, backoff: float, max_restarts: int):
        self.folder, self.out = folder, folder / "out"
        (folder / "pids").mkdir()
        (folder / "newest").write_text("0")
        begin = "import os, signal, sys, time; i = int(sys.argv[1]); open(f'starts{i}', 'a').write('x')\n"
        begin += "starts = len(open(f'starts{i}').read())\n"
        end = "\nopen(f'pids/{i}.tmp', 'w').write(str(os.getpid())); os.rename(f'pids/{i}.tmp', f'pids/{i}')\n"
        words = [sys.executable, "-c", DRIVER, begin + end + script, *map(str, (count, grace, backoff, max_restarts))]
        with open(self.out, "wb") as out:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(words, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def text(self) -> str:
        return self.out.read_text()

    def pids(self, count: int) -> list[int]:
        wait_for(lambda: len(list(self.folder.glob("pids/*[0-9]"))) == count)
        return [int((self.folder / "pids" / str(i)).read_text()) for i in range(count)]

    def starts(self) -> int:
        return len((self.folder / "starts0").read_text())

    def wait(self) -> int:
        return self.process.wait(timeout=60)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    made: list[Launched] = []

    def start(
        script: str, count: int = 3, *, grace: float = 0.5, backoff: float = 0.1, max_restarts: int = 2
    ) -> Launched:
        made.append(Launched(tmp_path, script, count, grace, backoff, max_restarts))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()


def test_all_restart_when_one_is_killed(launcher) -> None:
    # Process 0 exits with 5 because another process died; process 1 is stopped and has to be killed.
    script = """
if starts == 2: sys.exit(0)
if i == 1: os.kill(os.getpid(), signal.SIGSTOP)
while i == 2 or not os.path.exists('go'): time.sleep(0.01)
sys.exit(5)"""
    run = launcher(script, grace=0.2)
    *_, last = run.pids(3)
    killed = time.time()
    os.kill(last, signal.SIGKILL)
    (run.folder / "go").touch()
    assert run.wait() == 0, run.text()
    line = next(line for line in run.text().splitlines() if "restart 1 of 2" in line)
    assert "process 2 was killed by SIGKILL at " in line
    assert "(others: 5, killed); restart 1 of 2 in 0 s" in line
    told = datetime.strptime(re.findall(r"at (\d+:\d+:[\d.]+);", line)[0], "%H:%M:%S.%f").time()
    assert told > datetime.fromtimestamp(killed).time()
    assert told < datetime.fromtimestamp(killed + 1).time()  # fails in the last second of a day
    assert run.starts() == 2


def test_secondary_failures_are_not_blamed(launcher) -> None:
    run = launcher("time.sleep(i * 0.2); sys.exit([5, 7, 5][i])", grace=5.0, max_restarts=0)
    assert run.wait() == 7
    assert "process 1 ended with exit code 7 (replicas disagree)" in run.text()
    assert "(others: 5, 5)" in run.text()


def test_gives_up_after_restarts_without_progress(launcher) -> None:
    run = launcher("os.kill(os.getpid(), signal.SIGSEGV) if i == 0 else time.sleep(60)", 2, backoff=0.3, grace=0.1)
    assert run.wait() == 128 + signal.SIGSEGV
    assert run.starts() == 3
    assert re.findall(r"restart .*", run.text()) == ["restart 1 of 2 in 0 s", "restart 2 of 2 in 0.3 s"]


def test_a_new_checkpoint_makes_the_count_start_again(launcher) -> None:
    run = launcher("open('newest', 'w').write(str(starts)); sys.exit(0 if starts == 5 else 1)", 1, max_restarts=1)
    assert run.wait() == 0, run.text()
    assert run.starts() == 5


def test_restart_resumes_whatever_the_resume_flag(launcher) -> None:
    run = launcher("print('told', sys.argv[2:]); sys.exit(1)", 1, max_restarts=1)
    assert run.wait() == 1
    assert re.findall("told .*", run.text()) == ["told []", "told ['--resume=auto']"]


@pytest.mark.pairs
@pytest.mark.parametrize("code", [2, 3, 4, 8, 130, 143])
def test_final_codes_are_not_tried_again(launcher, code: int) -> None:
    # 2, 3 and 4: process 0 is still waiting for process 1. 8, 130 and 143: process 0 is still saving.
    is_waiting = code in (2, 3, 4)
    others = "time.sleep(60)" if is_waiting else f"time.sleep(0.4); sys.exit({code})"
    # Process 1 ends only after process 0 has started: on a busy machine, process 0 might be killed before that.
    first = f"while not os.path.exists('pids/0'): time.sleep(0.05)\n    sys.exit({code})"
    run = launcher(f"if i == 1:\n    {first}\n{others}", 2, grace=0.1)
    assert run.wait() == code
    assert run.starts() == 1
    assert ("killed" in run.text()) == is_waiting


def test_signals_are_passed_on_once_and_the_second_kills(launcher) -> None:
    script = (
        "signal.signal(signal.SIGTERM, lambda *_: print('saving') or (sys.exit(143) if os.path.exists('go') else 0))"
    )
    script = script + "\nopen(f'ready{i}', 'w')\nwhile True: time.sleep(0.01)"
    run = launcher(script, 2)
    pids = run.pids(2)
    wait_for(lambda: (run.folder / "ready0").exists() and (run.folder / "ready1").exists())
    run.process.terminate()
    wait_for(lambda: run.text().count("saving") == 2)
    assert all(map(alive, pids))
    run.process.terminate()
    assert run.wait() == 143
    wait_for(lambda: not any(map(alive, pids)))
    assert run.starts() == 1


def test_processes_shut_down_cleanly_on_a_signal(launcher) -> None:
    script = "signal.signal(signal.SIGINT, lambda *_: (time.sleep(0.4), sys.exit(130)))\nopen(f'ready{i}', 'w')"
    run = launcher(script + "\nwhile True: time.sleep(0.01)", 2, grace=0.1)
    wait_for(lambda: (run.folder / "ready0").exists() and (run.folder / "ready1").exists())
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "stopped by SIGINT" in run.text()


def test_a_signal_ends_the_wait_for_a_restart(launcher) -> None:
    run = launcher("sys.exit(1)", 1, backoff=50.0)
    wait_for(lambda: "in 50 s" in run.text())
    run.process.terminate()
    assert run.wait() == 143


def test_processes_die_with_a_supervisor_that_is_killed(launcher) -> None:
    run = launcher("time.sleep(60)", 2)
    pids = run.pids(2)
    run.process.kill()
    wait_for(lambda: not any(map(alive, pids)), 5.0)


def test_child_processes_end_with_their_parent(launcher) -> None:
    script = """
import subprocess
if starts == 1:
    worker = subprocess.Popen(['sleep', '60'])
    open(f'worker.tmp', 'w').write(str(worker.pid)); os.rename('worker.tmp', 'worker')
    os.kill(os.getpid(), signal.SIGKILL)"""
    run = launcher(script, 1)
    assert run.wait() == 0  # although the worker held the pipe of its output
    wait_for(lambda: not alive(int((run.folder / "worker").read_text())), 5.0)


def test_output_is_complete_and_in_whole_lines(launcher) -> None:
    run = launcher(
        "for n in range(3000): print(i, n, 'x' * 200)\nsys.stdout.write('no newline')\nos.abort()", 2, max_restarts=0
    )
    assert run.wait() == 128 + signal.SIGABRT
    lines = run.text().splitlines()
    for i in range(2):
        assert [line for line in lines if line.startswith(f"[{i}] {i}")] == [
            f"[{i}] {i} {n} {'x' * 200}" for n in range(3000)
        ]
        assert f"[{i}] no newline" in lines


def test_colour_is_for_terminals(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    words = [sys.executable, "-c", DRIVER, "print('hello')", "2", "1", "1", "0"]
    (tmp_path / "newest").write_text("0")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(words, cwd=tmp_path, env=environment, stdout=theirs, timeout=60).returncode == 0
    shown = os.read(ours, 10_000).decode()
    assert "\033[31m[0]\033[0m hello" in shown
    assert "\033[32m[1]\033[0m hello" in shown


# --- command line -----------------------------------------------------------------------------------------------------


def dry(capsys, *flags: str) -> tuple[int, list[list[str]], str]:
    """Return (exit code, words of each line of stdout, stderr) of a dry run."""
    code = main([*TINY, "--dry_run", *flags])
    out, err = capsys.readouterr()
    return code, [shlex.split(line) for line in out.splitlines()], err


def test_dry_run_prints_each_process_with_its_environment(capsys, monkeypatch, text: Path) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/a b")
    monkeypatch.setenv("A_SECRET_KEY", "hush")
    flags = [
        "--processes=2",
        "--devices_per_process",
        "3",
        "--config.trainer.max_steps=7",
        "--resume=must",
        "--grace",
        "9",
    ]
    code, lines, err = dry(capsys, *flags)
    assert (code, err, len(lines)) == (0, "", 2)
    assert lines[1] == [
        "JAX_PLATFORMS=cpu",
        "XLA_FLAGS=--xla_dump_to=/tmp/a b --xla_force_host_platform_device_count=3",
        *PLIMSOLL_TRAIN,
        *(*TINY, "--config.trainer.max_steps=7", "--resume=must"),
        *("--coordinator=127.0.0.1:PORT", "--num_processes=2", "--process_id=1"),
    ]
    assert dry(capsys)[1] == [[*PLIMSOLL_TRAIN, *TINY]]  # a single process needs no flags


def test_gpus_are_divided(capsys, monkeypatch, tmp_path: Path, text: Path) -> None:
    def devices(*flags: str) -> list[str]:
        return [words[0] for words in dry(capsys, *flags)[1]]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices("--gpus=0,3") == ["CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=3"]
    assert devices("--gpus=4,5,6,7", "--processes=2") == ["CUDA_VISIBLE_DEVICES=4,5", "CUDA_VISIBLE_DEVICES=6,7"]
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '0\\n1\\n2\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert devices("--gpus=all") == [f"CUDA_VISIBLE_DEVICES={i}" for i in range(3)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert devices("--gpus=all") == ["CUDA_VISIBLE_DEVICES=5", "CUDA_VISIBLE_DEVICES=7"]


def test_no_gpus_to_be_found(capsys, monkeypatch, tmp_path: Path, text: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho it has failed; exit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code, lines, err = dry(capsys, "--gpus=all")
    assert (code, lines) == (2, [])
    assert "--gpus=all: no GPU was found (nvidia-smi printed 'it has failed')" in err
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    code, lines, err = dry(capsys, "--gpus=all")
    assert (code, lines) == (2, [])
    assert "--gpus=all: this machine has no GPUs (nvidia-smi is not installed)" in err


def test_the_newest_checkpoint_is_progress(tmp_path: Path, monkeypatch) -> None:
    assert _find_newest_step(str(tmp_path)) == -1
    for step in (3, 12):
        for name in (
            "commit_success.txt",
            "_CHECKPOINT_METADATA",
            "state/_METADATA",
            "state/manifest.ocdbt",
            "manifest/data.json",
        ):
            path = tmp_path / "checkpoints" / f"{step:08d}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
    assert _find_newest_step(str(tmp_path)) == 12
    path.with_name("data.json").unlink()  # now incomplete
    assert _find_newest_step(str(tmp_path)) == 3
    assert _find_newest_step("ftp://host/x") == -1  # a location that cannot be read is no progress


WRONG = [
    (["--proceses=2"], "unknown flag '--proceses'; did you mean '--processes'?"),
    (["--resme=auto"], "unknown flag '--resme'; did you mean '--resume'?"),
    (["--config.trainer.max_stps=2"], "did you mean 'max_steps'?"),
    (["--config.data.seq_len=0"], "seq_len"),
    (["--processes=0"], "expected at least 1"),
    (["--processes=x"], "invalid int value: 'x'"),
    (["--gpus=0,1", "--devices_per_process=2"], "the latter without --gpus"),
    (["--gpus=0,1,2", "--processes=2"], "'0, 1, 2' are not distinct GPUs, or not divisible by --processes"),
    (["--gpus=0,0"], "are not distinct GPUs"),
    (["--gpus=0,"], "are not distinct GPUs"),
    (["--process_id=1"], "--process_id is for processes that you start yourself"),
]


@pytest.mark.pairs
@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_wrong_usage_ends_before_anything_starts(capsys, flags: list[str], message: str, text: Path) -> None:
    assert main([*TINY, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_run_names_are_checked(capsys, text: Path) -> None:
    assert main([TINY[0], "--run_name=../x", "--processes=2"]) == 2
    assert "--run_name: expected 1 to 128 letters" in capsys.readouterr().err


# --- a training run ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_four_process_training_survives_sigkill(tmp_path: Path) -> None:
    write_text(tmp_path)
    words = [
        sys.executable,
        "-m",
        "plimsoll",
        "local",
        f"--config={CONFIG}:tiny",
        "--processes=4",
        "--config.mesh.data=4",
    ]
    words += ["--config.trainer.max_steps=60", "--config.trainer.save_every=10", "--grace=3"]
    traces = []
    for name in ("calm", "killed"):
        with open(tmp_path / "out", "w+b") as out:
            process = subprocess.Popen([*words, f"--workdir={tmp_path / name}"], cwd=ROOT, stdout=out)
            if name == "killed":
                wait_for(lambda: "step 25/" in (tmp_path / "out").read_text(), 120.0)
                pids = re.findall(r"pids (.*)", (tmp_path / "out").read_text())[0].split()
                os.kill(int(pids[2]), signal.SIGKILL)
            assert process.wait(timeout=200) == 0, (tmp_path / "out").read_text()
        traces.append(losses(tmp_path / name))
    assert "process 2 was killed by SIGKILL" in (tmp_path / "out").read_text()
    assert "resumed from step 20" in (tmp_path / "out").read_text()
    assert traces[0] == traces[1]
    assert len(traces[0]) == 60
