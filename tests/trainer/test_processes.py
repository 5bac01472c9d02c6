"""Two real processes of one run: their losses equal those of one process, and either setup restores the checkpoints."""

from pathlib import Path

import pytest

from tests.support.runs import losses, pair, start


@pytest.mark.pairs
def test_two_processes_equal_one(text: Path, tmp_path: Path) -> None:
    mesh = ("--config.mesh.data=2", "--config.mesh.fsdp=2")
    one = start(tmp_path / "one", *mesh, devices=4)
    assert one.wait(timeout=300) == 0, Path(f"{tmp_path}/one.out").read_text()
    two = pair(tmp_path / "two", *mesh, "--config.trainer.max_steps=8")
    assert [process.wait(timeout=300) for process in two] == [0, 0], Path(f"{tmp_path}/two.out").read_text()
    # 8 steps on two processes, then 4 more on one process with another mesh, from the checkpoint of the two.
    rest = start(tmp_path / "two", "--config.mesh.fsdp=2", devices=2)
    assert rest.wait(timeout=300) == 0, Path(f"{tmp_path}/two.out").read_text()
    expected, found = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert list(found) == list(range(1, 13))
    assert "resumed from step 8" in Path(f"{tmp_path}/two.out").read_text()
    for step, loss in expected.items():
        assert abs(found[step] - loss) < 2e-5 * abs(loss), (step, found[step], loss)
