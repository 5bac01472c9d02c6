"""The cases from public threads still print the numbers in docs/benchmarks/public_threads.md."""

from pathlib import Path

import pytest

from tools import issue_threads

DOCS = (Path(__file__).parents[2] / "docs" / "benchmarks" / "public_threads.md").read_text()


def rows(text: str) -> list[list[str]]:
    """Return the cells of the markdown tables in a text."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


@pytest.mark.pairs
def test_frozen_weight_costs_only_its_bytes(capsys):
    issue_threads.main(["jax-23316"])
    printed = capsys.readouterr().out
    found = [row for row in rows(printed) if row[0] not in ("program", "---")]
    assert len(found) == 8
    ratios = {}
    for name, model, _, ratio in found:
        ratios.setdefault(name, []).append(float(ratio))
        assert model in DOCS, f"docs/benchmarks/public_threads.md has another size of the model than {model}"
    assert min(ratios["gradients of the whole tree are returned"]) >= 2.0
    assert min(ratios["split, but the model is returned without donation"]) >= 2.0
    assert max(ratios["ours: a rule freezes W"]) < 1.1


def test_every_case_has_a_section_and_a_command(capsys):
    issue_threads.main([])
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == list(issue_threads.CASES)
    for name in names:
        assert f"python -m tools.issue_threads {name}" in DOCS


def test_an_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit) as error:
        issue_threads.main(["jax-1"])
    assert error.value.code == 2
    assert "jax-23316" in capsys.readouterr().err
