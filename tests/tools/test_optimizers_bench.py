"""tools.bench.optimizers on a tiny model: finished runs are stored and not repeated, and bytes equal the layout's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from plimsoll.framework.program.program import Program
from tests.support import runs
from tools.bench import optimizers
from tools.bench.optimizer_rows import ROWS, build

SPEC = f"{runs.CONFIG}:tiny"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The command with a small budget: (function from flags to the printed text, the results file)."""
    monkeypatch.setenv("TINY_TEXT", "")
    runs.write_text(tmp_path / "text")
    for name in ("adamw", "lion"):
        monkeypatch.setitem(optimizers.ROWS, name, replace(ROWS[name], rates=(1e-3,)))

    def run(*flags: str) -> str:
        small = ["--steps=3", "--extend=0", "--eval-batches=1", f"--config={SPEC}"]
        assert optimizers.main([f"--results={tmp_path / 'r.jsonl'}", f"--data={tmp_path}", *small, *flags]) == 0
        return capsys.readouterr().out

    return run, tmp_path / "r.jsonl"


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a results file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def cells(out: str, title: str) -> list[str]:
    """Return the cells of the first table's row with that title."""
    (row,) = (line for line in out.splitlines() if line.startswith(f"| {title} |") and line.count("|") > 4)
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.pairs
def test_rows_are_trained_once_and_printed_from_the_file(bench, monkeypatch: pytest.MonkeyPatch):
    run, path = bench
    both = ("--rows=adamw,lion", "--seeds=1")
    run("--rows=adamw", "--seeds=1")
    first = run(*both)  # stored runs are not repeated
    assert [first.count(f'"run": "{name}"') for name in ("adamw", "lion")] == [0, 1]
    lines = read_results(path)
    assert [(one["run"], one["rate"], one["seed"], one["steps"]) for one in lines] == [
        ("adamw", 1e-3, 0, 3),
        ("lion", 1e-3, 0, 3),
    ]
    assert lines[0]["bits_per_byte"] != lines[1]["bits_per_byte"]
    monkeypatch.setattr(optimizers, "train", None)
    printed = run(*both, "--print")
    assert printed in first
    row, bits = cells(printed, "Lion, bf16 momentum"), [one["bits_per_byte"] for one in lines]
    assert row[7:9] == ["0.001", f"{bits[1]:.4f} ± one seed"]
    assert row[9:] == [
        f"{100 * (bits[1] / bits[0] - 1):+.2f} ± one seed %",
        "yes" if bits[1] > 1.01 * bits[0] else "no",
    ]


@pytest.mark.pairs
def test_rates_seeds_and_edges(bench, monkeypatch: pytest.MonkeyPatch):
    """Check which runs are made if bits per byte are the distance from a best rate, plus the seed."""
    run, path = bench
    monkeypatch.setitem(optimizers.ROWS, "adamw", replace(ROWS["adamw"], rates=(1e-3, 2e-3)))
    monkeypatch.setattr(optimizers, "trace", lambda *args: [1.0])
    monkeypatch.setattr(optimizers, "train", lambda row, rate, seed, args: {"bits_per_byte": abs(rate - 9e-3) + seed})
    run("--rows=adamw", "--seeds=3", "--extend=2")
    assert [(one["rate"], one["seed"]) for one in read_results(path)] == [
        *((rate, 0) for rate in (1e-3, 2e-3, 4e-3, 8e-3)),
        *((8e-3, seed) for seed in (1, 2)),
    ]
    run("--rows=kahan", "--seeds=2")
    assert [(one["rate"], one["seed"]) for one in read_results(path)][6:] == [(8e-3, 0), (8e-3, 1)]
    assert cells(run("--rows=adamw", "--print"), "AdamW")[7] == "0.008 (edge)"
    # If another optimizer has the same name, the trace of three steps differs, and its stored runs no longer count.
    monkeypatch.setattr(optimizers, "trace", lambda *args: [1.01])
    assert run("--rows=adamw", "--seeds=1", "--extend=0").count('"run"') == 2


@pytest.mark.pairs
@pytest.mark.parametrize("name", ["apollo_mini", "adamw8bit", "kahan"])
def test_bytes_match_the_state(name: str, bench):
    row, steps = ROWS[name], 3
    state = Program(build(row, 1e-3, 0, steps, SPEC).instantiate(), jax.devices()[:1]).init()
    sizes = [
        sum(x.nbytes for x in jax.tree.leaves(state.optimizer)),
        sum(x.size for x in jax.tree.leaves(state.parameter)),
    ]
    assert optimizers.state_bytes(row, SPEC, False) == (sizes[0] / sizes[1], 0.0)


@pytest.mark.slow
def test_times_are_side_by_side(bench):
    run, path = bench
    shown = cells(run("--rows=adamw,lion", "--times=2"), "AdamW")
    assert shown[5] == shown[6] == "1.00 [1.00, 1.00]"
    found = {line["time"]: line for line in read_results(path)}
    low, high = found["lion"]["wall"][1:]
    assert 0 < low <= found["lion"]["wall"][0] <= high


def test_unknown_rows_and_rates_without_results(bench, capsys: pytest.CaptureFixture[str]):
    _, path = bench
    assert optimizers.main([f"--results={path}", "--rows=adamv"]) == 2
    assert "no row 'adamv'; valid: adamw, " in capsys.readouterr().err
    assert optimizers.main([f"--results={path}", f"--data={path.parent}", "--rows=kahan", f"--config={SPEC}"]) == 2
    assert "kahan takes the best learning rate of adamw, which has no results" in capsys.readouterr().err


@pytest.mark.pairs
def test_new_rows_use_the_same_model_as_stored_rows(tmp_path: Path):
    args = optimizers.parser().parse_flags([f"--data={tmp_path}"])
    trace = optimizers.trace(ROWS["adamw"], args)
    assert optimizers.StoredResults(runs.ROOT / "docs/benchmarks/optimizers.jsonl").runs("adamw", 250, trace)
