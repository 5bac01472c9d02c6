"""The benchmark of training steps: its statistics, turns of processes, table, and our own training run in turns."""

import io
import json
import math
import random
import statistics
import time
from pathlib import Path

import numpy as np
import pytest

from tools.bench import contestants, cpu_parts, cpu_peers, first_step
from tools.bench.contestants import overrides, train_with_driver
from tools.bench.cpu_peers import ContestantResult, check_equal, check_loss, summarize, table
from tools.bench.ratios import median_interval, quantile, ratio
from tools.bench.sizes import SIZES, Batches, Size, write_tokens
from tools.bench.workers import Channel, ContestantError, Hello, TimedRun, Worker, rotate, serve

TINY = Size(
    "tiny", layers=2, heads=2, dim=16, seq_len=12, batch=8, vocab=50, positions=16, config="nanogpt-cpu", steps=1
)


# --- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values", [[3.0], [2.0, 1.0], [5.0, 1.0, 4.0, 2.0], list(np.random.default_rng(0).normal(size=31))]
)
@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_quantile_is_numpys(values: list[float], fraction: float):
    assert quantile(values, fraction) == pytest.approx(np.quantile(values, fraction))


def test_quantile_without_values():
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


# From the table of the sign test: ranks of the two-sided 95% interval of a median.
@pytest.mark.parametrize(("n", "rank"), [(5, 1), (6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (25, 8), (40, 14)])
def test_median_interval_uses_sign_test_ranks(n: int, rank: int):
    values = [float(v) for v in range(1, n + 1)]
    random.Random(n).shuffle(values)
    assert median_interval(values) == (rank, n + 1 - rank)


def test_median_interval_has_its_stated_coverage():
    rng = random.Random(1)
    held = 0
    for _ in range(2000):
        low, high = median_interval([rng.expovariate(1.0) for _ in range(20)])
        held += low <= math.log(2) <= high
    assert 0.94 < held / 2000 < 0.975


def test_ratio_uses_pairs():
    # In one pair, the machine is ten times slower: the ratio of medians would be 2, but the median of ratios is 1.
    slow = ratio([1.0, 10.0, 1.0, 2.0, 2.0], [1.0, 10.0, 1.0, 1.0, 1.0])
    assert slow.median == 1.0
    assert slow.quartiles == (1.0, 2.0)
    assert slow.interval == (1.0, 2.0)
    assert slow.pairs == 5
    assert str(slow) == "1.000 [1.000, 2.000]"
    assert ratio([3.0], [2.0]).median == 1.5  # above one: the other is faster


@pytest.mark.parametrize(("reference", "other"), [([], []), ([1.0], [1.0, 2.0])])
def test_ratio_needs_pairs(reference: list[float], other: list[float]):
    with pytest.raises(ValueError, match="as many turns"):
        ratio(reference, other)


# --- turns -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from tools.bench.workers import Channel, Hello, serve
class Counter:
    total = 0
    def hello(self): return Hello(7, 8, {"counter": "1"})
    def run(self, steps):
        print("noise on stdout")
        self.total += steps
        if self.total > 5: raise RuntimeError("too many")
        return float(self.total)
serve(Counter(), Channel.from_process())
"""


def test_worker_measures_in_its_own_process(tmp_path: Path):
    worker = Worker(["-c", SCRIPT], tmp_path / "log", {})
    assert worker.hello == Hello(7, 8, {"counter": "1"})
    first, second = worker.run(2), worker.run(3)
    assert (first.loss, second.loss) == (2.0, 5.0)
    assert 0 <= first.seconds < worker.seconds_since_start()
    worker.close()
    assert "noise on stdout" in (tmp_path / "log").read_text()


def test_worker_crash_error_includes_its_last_output(tmp_path: Path):
    worker = Worker(["-c", SCRIPT], tmp_path / "log", {})
    with pytest.raises(ContestantError, match="RuntimeError: too many"):
        worker.run(6)
    with pytest.raises(ContestantError, match="No module named 'absent'"):
        Worker(["-c", "import absent"], tmp_path / "log", {})


def test_worker_run_is_timed():
    class Sleeper:
        def hello(self) -> Hello:
            return Hello(0, 0, {})

        def run(self, steps: int) -> float:
            sum(range(steps))
            return 1.5

    sink = io.StringIO()
    serve(Sleeper(), Channel(io.StringIO("1\n3000000\n"), sink))
    _, short, long = (json.loads(line) for line in sink.getvalue().splitlines())
    assert long["seconds"] > short["seconds"]
    assert long["cpu_seconds"] == pytest.approx(long["seconds"], rel=0.9)
    assert long["loss"] == 1.5


def test_rounds_reverse_the_order():
    assert list(rotate(["a", "b", "c"], 3)) == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]


# --- data and sizes --------------------------------------------------------------------------------------------------


def test_sizes_match_gpt2():
    assert SIZES["gpt2-124m"].num_parameters == 124_439_808  # openai-community/gpt2
    assert SIZES["nanogpt-cpu"].tokens_per_step == 768
    assert SIZES["6x384"].flops_per_step == pytest.approx(6 * 2048 * (6 * (12 * 384**2 + 2 * 256 * 384) + 257 * 384))


def test_batches_are_windows_from_the_file(tmp_path: Path):
    path = tmp_path / "t.bin"
    write_tokens(path, TINY.vocab, 500)
    ids = np.fromfile(path, "<u2")
    assert len(ids) == 500
    assert ids.max() < TINY.vocab
    counts = np.bincount(ids, minlength=TINY.vocab)
    assert counts[:5].sum() > 2 * counts[-5:].sum()  # the data have structure to learn
    inputs, targets = Batches(path, TINY)()
    assert inputs.shape == targets.shape == (TINY.batch, TINY.seq_len)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    text = ids.astype("<i4").tobytes()
    assert all(row.astype("<i4").tobytes() in text for row in inputs)
    again, _ = Batches(path, TINY)()
    np.testing.assert_array_equal(inputs, again)


# --- checks and table ------------------------------------------------------------------------------------------------


def test_another_model_is_refused():
    size = SIZES["nanogpt-cpu"]
    check_equal("x", size, Hello(size.num_parameters, size.tokens_per_step, {}))
    for hello in (Hello(size.num_parameters + 1, size.tokens_per_step, {}), Hello(size.num_parameters, 1, {})):
        with pytest.raises(ContestantError, match="expected"):
            check_equal("x", size, hello)


@pytest.mark.parametrize("last", [math.log(257), 5.5, math.nan, math.inf])
def test_a_loss_that_does_not_fall_is_refused(last: float):
    size = SIZES["nanogpt-cpu"]
    check_loss("x", size, [TimedRun(1, 1, 5.6), TimedRun(1, 1, 4.9), TimedRun(1, 1, 4.8)])
    with pytest.raises(ContestantError, match="did not fall"):
        check_loss("x", size, [TimedRun(1, 1, last)] * 5)


def test_table():
    size = SIZES["nanogpt-cpu"]
    hello = Hello(size.num_parameters, size.tokens_per_step, {"jax": "1"})
    plain = ContestantResult(
        None, hello, 9.0, [TimedRun(2.0, 3.0, 5.0), TimedRun(4.0, 3.0, 4.0), TimedRun(2.0, 3.0, 4.0)]
    )
    ours = ContestantResult(
        None, hello, 11.0, [TimedRun(1.0, 1.5, 5.0), TimedRun(2.0, 1.5, 4.0), TimedRun(1.0, 3.0, 4.0)]
    )
    gone = ContestantResult("not installed: torch", None, math.nan, [])
    rows = summarize(size, {"plain": plain, "ours": ours, "eager": gone}, steps=10)
    assert [row["ms_per_step"] for row in rows[:2]] == [200.0, 100.0]
    assert rows[1]["speed"]["median"] == 2.0
    assert rows[1]["speed_cpu"]["median"] == 2.0
    assert rows[0]["gflops"] == pytest.approx(size.flops_per_step / 0.2e9)
    header, *lines = table(rows)
    assert [line[header.index("speed (wall)")] for line in lines] == ["1", "2.000 [2.000, 2.000]", ""]
    assert lines[2][1] == "not installed: torch"
    assert "NaN" not in json.dumps(rows)  # JSON has no NaN
    printed = cpu_peers.markdown(table(rows)).splitlines()
    assert len({len(line) for line in printed}) == 1
    assert set(printed[1]) <= set("|- ")


def test_peers_that_are_not_installed_are_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(contestants.importlib.util, "find_spec", lambda module: None)
    results = cpu_peers.compete(TINY, ["eager", "compiled"], rounds=1, steps=1, folder=tmp_path)
    assert [result.problem for result in results.values()] == [
        "not installed: torch, transformers (pip install -e '.[peers]')"
    ] * 2
    assert contestants.missing("ours") is None


@pytest.mark.parametrize("argument", ["--sizes=nanogpt", "--contestants=plain,our", "--contestants=ours"])
def test_command_line_error(argument: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        cpu_peers.main([argument])
    assert end.value.code == 2
    assert argument.split("=")[0] in capsys.readouterr().err


# --- ours ------------------------------------------------------------------------------------------------------------


@pytest.mark.pairs
def test_ours_pauses_and_resumes_between_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    tokens = tmp_path / "tokens.bin"
    write_tokens(tokens, TINY.vocab, 20_000)
    sink = io.StringIO()
    arguments = [*overrides(TINY, tokens), f"--workdir={tmp_path / 'run'}", "--config.trainer.max_steps=1000000"]
    train_with_driver(Channel(io.StringIO("3\n12\n"), sink), arguments)
    hello, first, second = (json.loads(line) for line in sink.getvalue().splitlines())
    assert hello["parameters"] == TINY.num_parameters
    assert hello["tokens_per_step"] == TINY.tokens_per_step
    assert second["loss"] < first["loss"] < math.log(TINY.vocab) + 0.1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [10]  # 15 steps, reported every ten; none after the driver left
    assert not list((tmp_path / "run" / "checkpoints").glob("*[0-9]*"))
    assert capfd.readouterr().err.count("error") == 0


@pytest.mark.slow
def test_the_whole_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.json"
    flags = ["--sizes=nanogpt-cpu", "--contestants=plain,ours", "--rounds=4", "--steps=8", "--first_step=1"]
    cpu_peers.main([*flags, f"--json={out}"])
    record = json.loads(out.read_text())
    plain, ours = record["sizes"]["nanogpt-cpu"]["rows"]
    assert len(plain["turns"]) == len(ours["turns"]) == 4
    # The bound is loose, because the machine may be busy; it still catches a step that does the work twice.
    assert ours["speed_cpu"]["median"] > 0.7
    seconds = record["sizes"]["nanogpt-cpu"]["command_to_first_step_s"]
    assert statistics.median(seconds["cached"]) < statistics.median(seconds["cold"])
    printed = capsys.readouterr().out
    assert "Plimsoll" in printed
    assert "from command to first step" in printed


@pytest.mark.pairs
def test_a_start_that_fails_is_an_error(tmp_path: Path):
    with pytest.raises(ContestantError, match="made no step"):
        first_step.first_step_seconds(TINY, tmp_path / "absent.bin", tmp_path / "cache", cpu_peers.ENVIRONMENT)


# --- parts -----------------------------------------------------------------------------------------------------------


def test_parts_are_the_same_in_both_tables_and_sum_up():
    size = SIZES["6x384"]
    parts = cpu_parts.counts(size)
    fast = dict.fromkeys(parts, 0.001)
    slow = {part: 0.003 if part == "attention" else 0.001 for part in parts}
    header, *lines = cpu_parts.rows(size, slow, fast)
    assert [line[0] for line in lines] == [*parts, "sum"]
    cells = dict(zip(header, next(line for line in lines if line[0] == "attention"), strict=True))
    assert cells["JAX / torch"] == "3.00"
    assert cells["JAX ms per step"] == "18.0"  # six layers
    total = sum(parts.values())
    assert [float(cell) for cell in lines[-1][-2:]] == [total + 12.0, total]


@pytest.mark.pairs
def test_jax_parts_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_parts, "SQUARE", 8)
    parts = cpu_parts.jax_parts(TINY)
    assert parts.keys() == cpu_parts.counts(TINY).keys()
    monkeypatch.setattr(cpu_parts, "SECONDS", 0.0)
    assert all(cpu_parts.shortest(part, time.perf_counter) > 0 for part in parts.values())


@pytest.mark.peers
def test_torch_parts_run():
    pytest.importorskip("torch")
    parts = cpu_parts.torch_parts(TINY)
    assert parts.keys() == cpu_parts.counts(TINY).keys()
    for part in parts.values():
        part()
