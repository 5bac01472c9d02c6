"""The GPU script, as far as a CPU can test it: rows, order, time budget, the results file, and a dry run."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.framework.run import offload_self_test
from plimsoll.framework.schedules.memory import Memory
from tests.support.small import ROOT
from tools.bench import gpu, gpu_measure, gpu_rows
from tools.bench.gpu_rows import Figures, Machine, Result, Row, Run

H100, H200 = 72 * 2**30, 128 * 2**30  # bytes that a program may use
MACHINE = Machine("a GPU", H100, 16, 2**37, "3.12.3", {"jax": "0.11.2"})


@pytest.fixture(autouse=True)
def restore_globals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the number of steps of the offload self-test, which rows raise, and the command's signal handlers."""
    monkeypatch.setattr(offload_self_test, "STEPS", offload_self_test.STEPS)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("limit", [H100, H200])
def test_row_names_are_unique_and_baselines_exist(limit: int) -> None:
    rows = gpu_rows.order_rows(gpu_rows.PARTS, limit)
    names = [row.name for row in rows if row.part != "memory"]
    assert len(set(names)) == len(names)
    assert {row.against for row in rows if row.against} <= set(names)
    assert {row.part for row in gpu_rows.order_rows(gpu_rows.PARTS, limit, dry=True)} == set(gpu_rows.PARTS)


@pytest.mark.parametrize("dry", [False, True])
def test_most_valuable_rows_run_first(dry: bool) -> None:
    rows = gpu_rows.order_rows(("largest", *gpu_rows.PARTS), H100, dry=dry)
    parts = [row.part for row in rows]
    count = sum(min(number, parts.count(part)) for part, number in gpu_rows.FIRST_ROWS.items())
    for group in (parts[:count], parts[count:]):
        assert group == sorted(group, key=gpu_rows.PARTS.index)
    assert set(parts[:count]) == set(gpu_rows.PARTS)
    # Within a part, the order is the one in which its rows are listed.
    for part in gpu_rows.PARTS:
        listed = [row.name for row in gpu_rows.build_rows(part, H100)]
        found = [row.name for row in rows if row.part == part]
        assert found == [name for name in listed if name in found]
    speed = next(row for row in rows if row.part == "speed")
    assert speed.name.startswith("llama3-8b")
    assert speed.overrides["memory.optimizer_state"] == "pinned_host"


@pytest.mark.pairs
@pytest.mark.parametrize("limit", [H100, H200])
def test_rows_are_valid_and_cover_all_memory_settings(limit: int) -> None:
    """Every config builds; in both dtypes, all schedules run, and all placements run with layer_programs."""
    tried: dict[str, list[Memory]] = {"float32": [], "bfloat16": []}
    for row in gpu_rows.order_rows(gpu_rows.PARTS, limit):
        if row.kind == "exact":
            config = gpu_measure.build_config(row, gpu_measure._MEDIUM)
            tried[config.model.compute_dtype].append(config.instantiate().memory)
        elif row.kind == "train":
            config = gpu_measure.build_config(row, {"seq": row.seq, "batch": row.batch})
            config.instantiate()
            assert config.data.global_batch_size * config.data.seq_len == row.batch * row.seq
    for found in tried.values():
        assert {one.update for one in found} == {"after_backward", "streamed", "in_backward", "layer_programs"}
        layers = [one for one in found if one.update == "layer_programs"]
        for place in ("optimizer_state", "parameters", "activations", "gradients"):
            # Some rows offload only the first layers: pinned_host:2.
            kinds = {getattr(one, place).text.partition(":")[0] for one in layers}
            assert kinds == {"device", "pinned_host", *(["none"] if place == "gradients" else [])}


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    """Run all parts on a CPU. A refused or missing row would not pass, and there is none."""
    out = tmp_path / "gpu.jsonl"
    command = [sys.executable, "-P", "-m", "tools.bench.gpu", "--dry", f"--out={out}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = gpu_rows.read_runs(out)
    assert run.dry
    assert run.machine.device == "cpu"
    assert run.machine.versions["jax"]
    expected = gpu_rows.order_rows(gpu_rows.PARTS, run.machine.limit_bytes or H200, dry=True)
    assert [result.row for result in run.results] == expected
    assert gpu.format_run(run) in done.stdout
    for result in run.results:
        figures = result.figures
        if result.row.part == "exact":
            assert figures.status == "agrees"
            assert 0.0 <= (figures.error or 0.0) < 1e-3
        elif result.row.part == "torch":
            assert figures.status in ("ran", "not available")
        else:
            assert figures.status == "ran"
        if "state_offloaded" in result.row.name or "weights_offloaded" in result.row.name:
            assert figures.host_bytes


def exact_row(overrides: dict[str, str]) -> Row:
    types = {"model.param_dtype": "float32", "model.compute_dtype": "float32", "learner.master_dtype": "none"}
    return Row("exact", "exact", "x", 60, config="llama3-8b", overrides={**types, **overrides})


@pytest.mark.parametrize(
    ("row", "status", "message"),
    [
        (exact_row({"memory.update": "in_backward"}), "refused", "learner.clip_mode = global_norm with memory.update"),
        (exact_row({"memory.update": "forwards"}), "refused", "forwards"),
        (Row("link", "link", "x", 0.01, mib=1), "TIMED OUT", "killed after 0 s"),
        (Row("link", "no such kind", "x", 60), "FAILED", "KeyError: 'no such kind'"),
    ],
)
def test_invalid_row_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Row, status: str, message: str
) -> None:
    monkeypatch.chdir(ROOT)
    session = gpu.Session(tmp_path / "gpu.jsonl", time.monotonic() + 300.0, dry=True)
    session.run([row])
    (result,) = session.results
    assert result.figures.status == status
    assert message in result.figures.message
    assert message in gpu.format_figures(result)


@pytest.mark.pairs
def test_wrong_values_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that computes different numbers, or NaN, is WRONG."""
    errors = {"loss of step 0": 0.0, "parameter/x": 0.5}
    monkeypatch.setattr(offload_self_test, "compare", lambda ours, plain: errors)
    (figures,) = gpu_measure.compare_schedules(exact_row({}), True)
    assert (figures.status, figures.error, figures.worst_leaf) == ("WRONG", 0.5, "parameter/x")
    errors["loss of step 0"] = float("nan")
    (figures,) = gpu_measure.compare_schedules(exact_row({}), True)
    assert (figures.status, figures.worst_leaf) == ("WRONG", "loss of step 0")


class FakeProcess:
    """A row's process that takes the row's seconds on a fake clock, and then is done."""

    def __init__(self, row: Row, clock: list[float], status: str = "ran"):
        self.row = row
        self.end = clock[0] + row.seconds
        self.connection = None
        self._clock = clock
        self._status = status

    def is_done(self) -> bool:
        return self._clock[0] >= self.end

    def stop(self, status: str = "") -> Result:
        rate = 50.0 if "layer_programs" in self.row.name else 100.0
        return Result(self.row, Figures(status or self._status, tokens_per_second=rate), self.row.seconds)


class FakeProcesses:
    """Replaces the processes, the clock and the number of cores of the command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.clock = [0.0]
        self.statuses: dict[str, str] = {}
        # The names of the rows that run when a row ends.
        self.running: list[list[str]] = []
        self._processes: list[FakeProcess] = []
        monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: self.clock[0]))
        monkeypatch.setattr(gpu.os, "cpu_count", lambda: 12)
        monkeypatch.setattr(gpu.multiprocessing.connection, "wait", self._wait)
        monkeypatch.setattr(gpu.Session, "start", lambda session, row: self._start(row))
        monkeypatch.setattr(gpu.Session, "query_machine", lambda session: Figures("ran", machine=MACHINE))

    def _start(self, row: Row) -> FakeProcess:
        process = FakeProcess(row, self.clock, self.statuses.get(row.name, "ran"))
        self._processes.append(process)
        return process

    def _wait(self, connections: Any, timeout: float) -> None:
        self.running.append([one.row.name for one in self._processes if not one.is_done()])
        self.clock[0] += timeout


def test_rows_that_take_longer_than_the_time_left_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = FakeProcesses(monkeypatch)
    session = gpu.Session(tmp_path / "gpu.jsonl", 100.0, dry=False)
    session.run([Row("speed", "train", str(seconds), seconds) for seconds in (40, 70, 30, 31, 30, 1)])
    statuses = {result.row.name: result.figures.status for result in session.results}
    assert statuses == {"40": "ran", "70": "not run", "30": "ran", "31": "not run", "1": "not run"}
    assert session.results[1].figures.message == "it takes about 70 s, and 60 s were left"
    assert processes.clock == [100.0]


def test_only_exact_rows_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = FakeProcesses(monkeypatch)
    session = gpu.Session(tmp_path / "gpu.jsonl", 100.0, dry=False)
    exact = [Row("exact", "exact", f"exact {seconds}", seconds) for seconds in (1, 2, 3, 4)]
    speed = [Row("speed", "train", f"speed {seconds}", seconds) for seconds in (1, 2)]
    session.run([*exact, *speed])
    # Twelve cores: three at a time.
    assert processes.running == [
        ["exact 1", "exact 2", "exact 3"],
        ["exact 2", "exact 3", "exact 4"],
        ["exact 3", "exact 4"],
        ["exact 4"],
        ["speed 1"],
        ["speed 2"],
    ]


def test_exit_code_and_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """Wrong or failed rows are an error; refused rows and rows without time left are only reported.

    Ratios compare tokens per second.
    """
    processes = FakeProcesses(monkeypatch)
    processes.statuses["gpt2-1.5b 32x1024 streamed full"] = "refused"
    out = tmp_path / "results" / "gpu.jsonl"
    assert gpu.main(["speed", "--minutes=20", f"--out={out}"]) == 0
    output = capsys.readouterr().out
    assert "| speed | gpt2-1.5b 32x1024 streamed full | refused |" in output
    # The row runs before the one that it is compared with.
    assert "0.50 times 'llama3-8b 3x8192 full moment_dtype=bfloat16 master_dtype=none'" in output
    processes.statuses["gpt2-124m 32x1024 none"] = "LOSS DOES NOT FALL"
    assert gpu.main(["speed", "--minutes=20", f"--out={out}"]) == 1
    assert gpu.main(["link", f"--out={out}", "--minutes=0.01"]) == 0
    runs = gpu_rows.read_runs(out)
    assert len(runs) == 3
    assert {result.figures.status for result in runs[2].results} == {"not run"}
    capsys.readouterr()
    assert gpu.main([f"--table={out}"]) == 0
    tables = capsys.readouterr().out
    assert tables.count("a GPU, 72.00 GiB for programs, 16 cores") == 3
    assert output.partition("\n\n")[2].strip() in tables


def test_machine_without_gpu_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The command stops before its rows, which would train large models on the CPU."""
    with pytest.raises(ValueError, match="JAX finds no GPU"):
        next(gpu_measure.describe_machine(gpu.MACHINE, dry=False))
    FakeProcesses(monkeypatch)
    monkeypatch.setattr(gpu.Session, "query_machine", lambda session: Figures("refused", "JAX finds no GPU"))
    assert gpu.main([f"--out={tmp_path / 'gpu.jsonl'}"]) == 1
    assert "cannot measure: refused; JAX finds no GPU" in capsys.readouterr().err
    assert not (tmp_path / "gpu.jsonl").exists()


# The command with rows whose processes do what the row's name says. They do not import JAX.
SCRIPT = """
import os, signal, sys, time
from tools.bench import gpu, gpu_rows
from tools.bench.gpu_rows import Figures, Machine, Row

def measure_row(row, dry, seconds, log, connection):
    os.setsid()
    gpu.kill_with_parent()
    if row.part == "machine":
        connection.send(Figures("ran", machine=Machine("cpu", None, 2, 2**30, "3", {})))
    elif row.name == "raises":
        raise ValueError
    elif row.name == "is killed":
        connection.send(Figures(plan_bytes=7))
        os.kill(os.getpid(), signal.SIGKILL)
    elif row.name == "hangs":
        connection.send(Figures(tokens_per_second=5.0))
        with open("hanging", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(3600)
    else:
        connection.send(Figures("ran"))

if __name__ == "__main__":
    limit, *names = sys.argv[1].split(",")
    gpu.measure_row = measure_row
    preload = gpu.multiprocessing.set_forkserver_preload
    gpu.multiprocessing.set_forkserver_preload = lambda names: preload(names[:1])
    gpu_rows.order_rows = lambda *args, **fields: [Row("link", "", name, float(limit)) for name in names]
    sys.exit(gpu.main(["--out=gpu.jsonl"]))
"""


def start_script(folder: Path, limit: float, *names: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), ",".join([str(limit), *names])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE)


def read_results(folder: Path) -> dict[str, Figures]:
    (run,) = gpu_rows.read_runs(folder / "gpu.jsonl")
    return {result.row.name: result.figures for result in run.results}


def test_bad_rows_do_not_lose_the_others(tmp_path: Path) -> None:
    process = start_script(tmp_path, 2.0, "first", "raises", "is killed", "hangs", "last")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    found = read_results(tmp_path)
    assert {name: figures.status for name, figures in found.items()} == {
        "first": "ran",
        "raises": "FAILED",
        "is killed": "FAILED",
        "hangs": "TIMED OUT",
        "last": "ran",
    }
    assert found["raises"].message == "its process ended with exit code 1"
    assert found["is killed"].message == "its process ended with exit code -9"
    # Figures that were known before the end are kept.
    assert found["is killed"].plan_bytes == 7
    assert found["hangs"].tokens_per_second == 5.0
    assert "| link | last | ran |" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_killed_command_keeps_its_results(tmp_path: Path, number: signal.Signals) -> None:
    process = start_script(tmp_path, 60.0, "first", "hangs", "last")
    marker = tmp_path / "hanging"
    deadline = time.monotonic() + 120.0
    while not (marker.exists() and marker.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    expected = {"first": "ran"}
    if number == signal.SIGKILL:
        assert process.returncode == -9
    else:
        assert process.returncode == 128 + number
        expected["hangs"] = "stopped"
        assert "| link | hangs | stopped |" in output
        assert read_results(tmp_path)["hangs"].tokens_per_second == 5.0
    assert {name: figures.status for name, figures in read_results(tmp_path).items()} == expected
    # The row's process has ended, too.
    while True:
        try:
            os.kill(int(marker.read_text()), 0)
        except ProcessLookupError:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_cut_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    run = Run("2026-11-27", "python -m tools.bench.gpu", False, MACHINE)
    result = Result(Row("link", "link", "x", 1.0), Figures("ran", losses=[2.0, float("nan")]), 3.0)
    gpu_rows.append_run(path, run)
    gpu_rows.append_result(path, result)
    gpu_rows.append_result(path, result)
    path.write_bytes(path.read_bytes()[:-20])
    gpu_rows.append_run(path, run)
    gpu_rows.append_result(path, dataclasses.replace(result, seconds=4.0))
    first, second = gpu_rows.read_runs(path)
    assert [one.seconds for one in first.results] == [3.0]
    assert [one.seconds for one in second.results] == [4.0]
    assert second.machine == MACHINE


def test_overlap_of_copies_and_computation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(*events: tuple[str, int, int]) -> SimpleNamespace:
        return SimpleNamespace(events=[SimpleNamespace(name=n, start_ns=s, duration_ns=d) for n, s, d in events])

    compute = line(("gemm", 0, 10), ("gemm", 20, 10))
    first = line(("MemcpyH2D", 5, 10), ("MemcpyD2H", 40, 4))
    second = line(("MemcpyD2H", 12, 4))
    plane = SimpleNamespace(name="/device:GPU:0", lines=[compute, first, second])
    host = SimpleNamespace(name="/host:CPU", lines=[line(("python", 0, 1000))])
    profile = SimpleNamespace(planes=[host, plane])
    monkeypatch.setattr("jax.profiler.ProfileData.from_file", lambda path: profile)
    seconds = gpu_measure.measure_overlap(tmp_path / "a.xplane.pb")
    assert {name: round(1e9 * value) for name, value in seconds.items()} == {
        "computing s": 20,
        "to device s": 10,
        "to host s": 8,
        "copying, either way s": 15,
        "busy s": 30,
        "copying while computing s": 5,
    }
