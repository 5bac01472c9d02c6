"""Faults in multi-process runs, with real processes and real signals.

Test numbers are rows of the table in docs/faults.md. `pytest -rP tests/faults/test_processes.py | grep measured`
prints the times in docs/benchmarks/endurance.md.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from plimsoll.framework.checkpoint.directory import scan
from plimsoll.framework.processes.rendezvous import KEY
from tests.support.runs import CONFIG, ROOT, free_port, losses, output, rows, start, start_several, wait_for, write_text

STEPS, EVERY = 60, 20
RUN = (
    "--config.mesh.data=-1",
    "--config.mesh.fsdp=1",
    f"--config.trainer.max_steps={STEPS}",
    f"--config.trainer.save_every={EVERY}",
)
INJECTED = str(Path(__file__).parent / "fault_injection.py")
GONE = (5, -signal.SIGABRT)  # exit codes after another process has died: ours, and JAX's abort


def print_times(row: int, **seconds: float) -> None:
    """Print times for the table in docs/benchmarks/endurance.md."""
    print(f"measured: row {row}: {', '.join(f'{name} {value:.2f} s' for name, value in seconds.items())}")


def newest(workdir: Path) -> int:
    """Return the last logged step, or 0 before the first."""
    return max(losses(workdir), default=0)


def ends(processes: list[subprocess.Popen], seconds: float = 300.0) -> list[int]:
    """Return the processes' exit codes, and kill those that run longer than `seconds`."""
    end = time.monotonic() + seconds
    try:
        return [process.wait(timeout=max(0.1, end - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Kill processes that a failed test leaves behind."""
    before = set(children())
    yield
    for pid in set(children()) - before:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def children() -> list[int]:
    """Return the ids of child processes that have not been waited for."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of an uninterrupted run of two processes."""
    root = tmp_path_factory.mktemp("calm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_TEXT", "")
        write_text(root / "text")
        assert ends(start_several(root / "run", 2, *RUN)) == [0, 0], output(root / "run")
    assert list(losses(root / "run")) == list(range(1, STEPS + 1))
    return root / "run"


@pytest.mark.pairs
def test_11_sigterm_to_one_stops_both_after_the_same_step(calm: Path, text: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    pair = start_several(workdir, 2, *RUN)
    wait_for(lambda: newest(workdir) >= 5)
    pair[1].send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert ends(pair) == [143, 143], output(workdir)
    print_times(11, saved_and_gone=time.monotonic() - began)
    assert "stopped by SIGTERM" in output(workdir)
    last = newest(workdir)
    assert 5 <= last < STEPS
    said = [json.loads((workdir / "health" / f"process-0000{i}.json").read_text()) for i in range(2)]
    assert [(one["exit"], one["step"]) for one in said] == [(143, last)] * 2
    assert max(scan(workdir / "checkpoints")[0]) == last
    assert ends(start_several(workdir, 2, *RUN)) == [0, 0], output(workdir)
    assert f"resumed from step {last}" in output(workdir)
    assert losses(workdir) == losses(calm)


@pytest.mark.pairs
def test_12_second_sigterm_exits_at_once_without_damage(calm: Path, text: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    program = (INJECTED, "stall", str(EVERY + 5))  # the loop stalls, so it cannot act on the first SIGTERM
    pair = start_several(workdir, 2, *RUN, programs={1: program})
    wait_for(lambda: "fault: stall" in output(workdir) and scan(workdir / "checkpoints")[0] == [EVERY])
    pair[1].send_signal(signal.SIGTERM)
    time.sleep(1.0)
    assert pair[1].poll() is None, "one SIGTERM waits for the end of the step"
    pair[1].send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert pair[1].wait(timeout=30) == 143
    alone = time.monotonic() - began
    assert alone < 2.0
    assert pair[0].wait(timeout=120) in GONE, output(workdir)
    print_times(12, gone=alone, others_gone=time.monotonic() - began)
    assert scan(workdir / "checkpoints")[0] == [EVERY]
    assert ends(start_several(workdir, 2, *RUN)) == [0, 0], output(workdir)
    assert f"resumed from step {EVERY}" in output(workdir)
    assert losses(workdir) == losses(calm)


@pytest.mark.pairs
def test_16_a_flipped_bit_names_process_step_and_leaf(text: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    flags = (*RUN, "--config.trainer.save_every=4", "--config.health.replica_check_every=2")
    pair = start_several(workdir, 2, *flags, devices=2, programs={1: (INJECTED, "flip", "7")})
    began = wait_for(lambda: "fault: flip" in output(workdir) and time.monotonic())
    assert ends(pair) == [7, 7], output(workdir)
    print_times(16, found_and_gone=time.monotonic() - began)
    # One of four copies differs, so only its process is blamed.
    found = re.search(r"error: replicas disagree after step 8: (.*)", output(workdir))
    assert found is not None, output(workdir)
    blamed = r"parameter/embed/token: process 1 \(device \d+\) of 4 copies"
    assert re.fullmatch(blamed, found[1].partition(";")[0].strip()), found[1]
    assert "process 0" not in found[1]
    assert scan(workdir / "checkpoints") == ([4], []), "what was saved before is whole, and nothing bad was saved"
    assert ends(start_several(workdir, 2, *flags, "--config.trainer.max_steps=9", devices=2)) == [0, 0], output(workdir)
    assert "resumed from step 4" in output(workdir)


@pytest.mark.pairs
def test_17_a_process_that_hangs_ends_all_with_their_stacks(text: Path, tmp_path: Path) -> None:
    workdir, limit = tmp_path / "run", 5.0
    long = ("--config.trainer.max_steps=100000", "--config.trainer.save_every=100000")
    pair = start_several(workdir, 2, *RUN, *long, f"--config.health.hang_seconds={limit}")
    wait_for(lambda: newest(workdir) >= 5)
    pair[1].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        assert pair[0].wait(timeout=60) == 6, output(workdir)
        seconds = time.monotonic() - began
        print_times(17, stacks_and_gone=seconds)
        assert limit - 0.5 < seconds < limit + 10.0
    finally:
        pair[1].send_signal(signal.SIGCONT)
    assert pair[1].wait(timeout=120) in (*GONE, 6), output(workdir)
    stacks = (workdir / "health" / "process-00000.stacks.txt").read_text()
    assert f"process 0 has made no progress for {limit:g} s (health.hang_seconds) in phase 'step', after step" in stacks
    assert "framework/run/trainer.py" in stacks
    assert stacks.count("Thread 0x") + stacks.count("Current thread") >= 2
    assert json.loads((workdir / "health" / "process-00000.json").read_text())["exit"] == 6
    assert not (workdir / "lock.json").exists() or start(workdir, *RUN, "--config.trainer.max_steps=1").wait() == 0


@pytest.mark.pairs
@pytest.mark.parametrize("victim", [1, 0])
def test_18_death_ends_all_other_processes(text: Path, tmp_path: Path, victim: int) -> None:
    workdir = tmp_path / "run"
    long = ("--config.trainer.max_steps=100000", "--config.trainer.save_every=100000")
    pair = start_several(workdir, 2, *RUN, *long, "--config.health.heartbeat_seconds=10")
    wait_for(lambda: newest(workdir) >= 5)
    pair[victim].send_signal(signal.SIGKILL)
    began = time.monotonic()
    assert pair[1 - victim].wait(timeout=120) in GONE, output(workdir)
    seconds = time.monotonic() - began
    print_times(18, other_gone=seconds)
    assert seconds < 15.0
    assert pair[victim].wait(timeout=10) == -signal.SIGKILL


@pytest.mark.pairs
def test_18_save_does_not_wait_for_a_dead_process(text: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    pair = start_several(workdir, 2, *RUN, programs={1: (INJECTED, "kill", str(EVERY))})
    assert pair[1].wait(timeout=300) == -signal.SIGKILL
    began = time.monotonic()
    assert pair[0].wait(timeout=120) == 5, output(workdir)
    assert time.monotonic() - began < 20.0, "less than health.heartbeat_seconds"


@pytest.mark.slow
def test_17_18_under_launch_local_all_start_again_and_lose_nothing(calm: Path, text: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    words = [sys.executable, "-m", "plimsoll", "local", f"--config={CONFIG}:tiny", f"--workdir={workdir}", *RUN]
    words += ["--processes=2", "--devices_per_process=1", "--grace=3", "--config.health.hang_seconds=8"]
    words += ["--config.trainer.max_steps=400"]  # enough that the run is not over before it is disturbed
    with open(f"{workdir}.out", "w") as out:
        environment = {
            **os.environ,
            "XLA_FLAGS": "",
        }  # compiled as the uninterrupted run was, without the flags of this process
        launcher = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def disturb(number: signal.Signals, saved: int, starts: int, row: int) -> None:
        """Signal process 1 of start `starts` once step `saved` is on disk, and wait for further progress."""
        wait_for(lambda: max(scan(workdir / "checkpoints")[0], default=0) >= saved)
        pids = re.findall(r"pids (.*)", output(workdir))
        assert len(pids) == starts
        os.kill(int(pids[-1].split()[1]), number)
        began, reached = time.monotonic(), newest(workdir)
        found = wait_for(lambda: len(re.findall(r"pids (.*)", output(workdir))) > starts and time.monotonic())
        wait_for(lambda: [row for row in rows(workdir) if "resumed_from" in row][starts - 1 :])
        wait_for(lambda: newest(workdir) > reached)
        print_times(row, all_started_again=found - began, further_than_before=time.monotonic() - began)

    disturb(signal.SIGSTOP, EVERY, 1, 17)
    disturb(signal.SIGKILL, newest(workdir) + EVERY, 2, 18)
    assert launcher.wait(timeout=300) == 0, output(workdir)
    first, second = map(int, re.findall(r"resumed from step (\d+)", output(workdir)))
    assert EVERY <= first < second
    assert "process 1 was killed by SIGKILL" in output(workdir)
    assert (workdir / "health" / "process-00000.stacks.txt").exists()
    found = losses(workdir)
    assert list(found) == list(range(1, 401))
    assert losses(calm).items() <= found.items()


@pytest.mark.slow
def test_19_other_process_counts_train_the_same(text: Path, tmp_path: Path) -> None:
    mesh = ("--config.mesh.data=2", "--config.mesh.fsdp=2")
    one = start(tmp_path / "one", *mesh, devices=4)
    assert one.wait(timeout=300) == 0, output(tmp_path / "one")
    workdir = tmp_path / "run"
    for count, last in ((4, 4), (2, 8), (4, 12)):
        group = start_several(workdir, count, *mesh, f"--config.trainer.max_steps={last}", devices=4 // count)
        assert ends(group) == [0] * count, output(workdir)
    assert re.findall(r"resumed from step (\d+)", output(workdir)) == ["4", "8"]
    expected, found = losses(tmp_path / "one"), losses(workdir)
    assert list(found) == list(expected) == list(range(1, 13))
    for step, loss in expected.items():
        # Only rounding differs: losses of neighboring steps, and so of other batches, are 100 times further apart.
        assert abs(found[step] - loss) < 2e-5 * abs(loss), (step, found[step], loss)


@pytest.mark.pairs
def test_25_process_0_clock_decides_when_to_save(text: Path, tmp_path: Path) -> None:
    workdir, pause = tmp_path / "run", 1.5
    flags = (*RUN, f"--config.trainer.save_every_minutes={pause / 60}", "--config.trainer.save_every=100000")
    flags += ("--config.health.hang_seconds=null", "--config.health.connect_seconds=3000")
    programs = {0: (INJECTED, "clock", "1"), 1: (INJECTED, "clock", "20")}
    assert ends(start_several(workdir, 2, *flags, programs=programs)) == [0, 0], output(workdir)
    saves = re.findall(r"process (\d) saves step (\d+) at ([\d.]+)", output(workdir))
    steps, others = ([int(step) for i, step, _ in saves if i == process] for process in "01")
    assert steps == others
    assert steps[-1] == STEPS
    assert len(steps) > 2, "no save by the clock"
    times = [float(at) for i, _, at in saves if i == "0"]
    # The clock of process 1 would have saved every 0.075 s. The last save is at the end, regardless of time.
    assert all(after - before >= pause - 0.1 for before, after in pairwise(times[:-1])), saves


# --- rendezvous -------------------------------------------------------------------------------------------------------


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("count", "ids", "message"),
    [
        (2, [(0, 2)], r"after 2 s, 1 of 2 processes are missing: 1; arrived: 0 \(process \d+ on host \S+\)"),
        (2, [(1, 2)], r"process 1 has waited for 2 s: no answer from 127\.0\.0\.1:\d+ .*has process 0 started\?"),
        (3, [(0, 3), (1, 3), (1, 3)], r"two processes claim to be process 1: process \d+ on host \S+ and process"),
        (2, [(0, 2), (1, 3)], r"process 1 \(process \d+ on host \S+\) expects 3 processes, but process 0 expects 2"),
    ],
    ids=["missing", "no answer", "twice", "another count"],
)
def test_processes_that_do_not_find_each_other(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, ids: list[tuple[int, int]], message: str
) -> None:
    # With a key, which the launchers set, a contradiction ends all processes immediately.
    monkeypatch.setenv(KEY, "a key")
    coordinator, seconds = f"--coordinator=127.0.0.1:{free_port()}", 2 if len(ids) == 1 else 60
    group = []
    for number, (index, of) in enumerate(ids):
        where = (coordinator, f"--num_processes={of}", f"--process_id={index}")
        group.append(start(tmp_path / f"run{number}", *where, f"--config.health.connect_seconds={seconds}"))
    assert ends(group) == [5] * len(group)
    for number in range(len(ids)):
        told = [line for line in output(tmp_path / f"run{number}").splitlines() if line.startswith("error: ")]
        assert len(told) == 1, told
        assert re.match(f"error: {message}", told[0]), told
        assert "Traceback" not in output(tmp_path / f"run{number}")


def listens_at(pid: int) -> set[str]:
    """Return the addresses at which a process listens, as in /proc."""
    mine = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            mine.add(os.readlink(descriptor))
        except FileNotFoundError:  # closed since the folder was listed
            continue
    found = set()
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                found.add(words[1].partition(":")[0])
    return found


@pytest.mark.pairs
@pytest.mark.parametrize("count", [1, 2])
def test_no_port_is_open_to_other_hosts(text: Path, tmp_path: Path, count: int) -> None:
    long = ("--config.trainer.max_steps=100000", "--config.trainer.save_every=100000")
    workdir, loopback = tmp_path / "run", {"0100007F", "0000000000000000FFFF00000100007F", "0" * 24 + "01000000"}
    group = [start(workdir, *RUN, *long)] if count == 1 else start_several(workdir, count, *RUN, *long)
    wait_for(lambda: newest(workdir) >= 3)
    found = [listens_at(process.pid) for process in group]
    for process in group:
        process.kill()
    ends(group)
    if count == 1:
        assert found == [set()]
    else:
        assert found[0], "the coordinator listens"
        assert set.union(*found) <= loopback, found
