"""The docs page on plans of functions, live: models of equinox and flax, as their users write them."""

from pathlib import Path

import pytest

from plimsoll.launch import plan
from tests.support.pages import python_block

PAGE = "docs/plan_function.md"
LAYER_BYTES = 1024 * 1024 * 4
ENDS_BYTES = 2 * 256 * 1024 * 4


@pytest.mark.peers
@pytest.mark.parametrize(
    ("file", "package", "argument", "names"),
    [
        # The model has three layers between the first and the last.
        ("eqx_model.py", "equinox", "model", ["model.layers[1].weight", "state"]),
        ("flax_model.py", "flax", "params", ["params['params']['layer2']['kernel']", "Net/layer1/"]),
    ],
)
def test_model_from_another_library_is_planned_unchanged(
    file: str, package: str, argument: str, names: list[str], tmp_path: Path, monkeypatch, capsys
):
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).write_text(python_block(PAGE, f"# {file}"))
    assert plan.main([f"--function={file}:step", "--target=cpu:1"]) == 0
    printed = capsys.readouterr().out
    assert "verdict   fits" in printed
    biases = 4 * 1024 * 4 + 256 * 4
    mib = (3 * LAYER_BYTES + ENDS_BYTES + biases) / 2**20
    (row,) = [line.split() for line in printed.splitlines() if line.startswith(f"  {argument} ")]
    assert float(row[1]) == pytest.approx(mib, abs=0.01)
    # Two moments and the step count.
    (row,) = [line.split() for line in printed.splitlines() if line.startswith("  moments ")]
    assert float(row[1]) == pytest.approx(2 * mib, abs=0.01)
    assert names[0] in printed
