"""A kernel that is asked for by name, and is of another platform than the run's or the plan's."""

from pathlib import Path

import pytest

from launch import plan, train

BLOCK = "--config.model.stack.pattern.0"


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mlp.experts.implementation=triton", "experts.implementation = 'triton' is for gpu, not cpu; try auto"),
        ("attention.implementation=splash", "attention.implementation = 'splash' is for tpu, not cpu; try auto"),
    ],
)
def test_a_run_is_refused_before_its_data_is_prepared(
    setting: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    workdir = tmp_path / "run"
    for flags in ([], ["--dry_run"]):
        code = train.main(["--config=moe-tiny", f"--workdir={workdir}", f"{BLOCK}.{setting}", *flags])
        assert code == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"error: {message}"
        assert not workdir.exists()


@pytest.mark.pairs
def test_a_plan_goes_by_the_platform_of_its_target(capsys: pytest.CaptureFixture):
    flags = ["--config=moe-tiny", "--estimate"]
    assert plan.main([*flags, "--target=h100x1", f"{BLOCK}.mlp.experts.implementation=megablox"]) == 2
    assert "'megablox' is for tpu, not gpu; try auto" in capsys.readouterr().err
    assert plan.main([*flags, "--target=v5e-1", f"{BLOCK}.mlp.experts.implementation=megablox"]) == 0
