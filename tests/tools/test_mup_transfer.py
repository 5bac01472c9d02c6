"""The curves and tables of tools/bench/mup_transfer.py, from results that are made here."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tools.bench.mup_transfer import (
    Result,
    Setting,
    build_base,
    collect_curve,
    interpolate_best,
    make_table,
    plot,
    read_results,
)


@pytest.fixture
def results() -> list[Result]:
    """Parabolas around 2^-8.7 at the base, and around 2^-10.2 without muP at four times its width."""
    made = []
    for parametrization, heads, best in (("muP", 2, -8.7), ("muP", 8, -8.7), ("usual", 8, -10.2)):
        for exponent in (-12.0, -11.0, -10.0, -9.0, -8.0):
            loss = 2.0 + 0.1 * (exponent - best) ** 2
            made.append(Result(Setting(parametrization, heads, exponent, 0), loss, 300))
    return made


def test_the_best_rate_is_interpolated(results: list[Result], tmp_path: Path):
    curves = {name: collect_curve(results, name, 8) for name in ("muP", "usual")}
    assert interpolate_best(curves["muP"]) == pytest.approx(-8.7)
    assert interpolate_best(curves["usual"]) == pytest.approx(-10.2)
    # The base has no parametrization of its own.
    assert collect_curve(results, "usual", 2) == collect_curve(results, "muP", 2)
    rows = make_table(results, "usual").rows
    assert rows[2][-3:] == ["2^-10", "2^-10.2", f"+{0.1 * (1.2**2 - 0.2**2):.3f}"]
    plot(results, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_results_are_read_back(results: list[Result], tmp_path: Path):
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(asdict(one)) + "\n" for one in results))
    assert read_results(file) == results


def test_seeds_are_averaged():
    results = [Result(Setting("muP", 4, -9.0, seed), loss, 300) for seed, loss in ((0, 2.0), (1, 2.5))]
    assert collect_curve(results, "muP", 4) == {-9.0: 2.25}


def test_the_base_is_64_wide():
    base = build_base(300, 0.25)
    assert (base.model.dim, base.model.stack.pattern[0].mlp.hidden, base.trainer.max_steps) == (64, 256, 300)
    base.instantiate()
