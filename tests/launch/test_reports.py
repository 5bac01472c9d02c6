"""--wandb, --mlflow and --tensorboard set config fields, and are checked before anything is compiled."""

import pytest

from plimsoll.launch import cli, reports
from tests.support.runs import CONFIG, train


def parse_trainer(*flags: str):
    parser = cli.Parser("train")
    reports.add_flags(parser)
    return parser.parse([f"--config={CONFIG}:tiny", *flags]).config.trainer


def test_flags_are_short_for_fields(monkeypatch: pytest.MonkeyPatch):
    plain = parse_trainer()
    assert (plain.wandb_project, plain.mlflow_uri, plain.tensorboard) == (None, None, True)
    bare = parse_trainer("--wandb", "--mlflow", "--no-tensorboard")
    assert (bare.wandb_project, bare.mlflow_uri, bare.tensorboard) == ("plimsoll", "default", False)
    named = parse_trainer("--wandb=mine", "--mlflow", "http://host:5000", "--tensorboard")
    assert (named.wandb_project, named.mlflow_uri, named.tensorboard) == ("mine", "http://host:5000", True)
    assert parse_trainer("--wandb=mine", "--config.trainer.wandb_project=other").wandb_project == "other"
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    assert parse_trainer("--wandb").wandb_project == "ours"


@pytest.mark.pairs
def test_missing_package_fails_before_compilation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("plimsoll.framework.program.jit_step.JitStep.compile", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr("plimsoll.framework.data.pipeline.DataPipeline.setup", lambda *_, **__: pytest.fail("read"))
    monkeypatch.setenv("TINY_TEXT", str(tmp_path))
    assert train(tmp_path / "run", "--mlflow", "--wandb") == 2
    error = capsys.readouterr().err
    assert error.endswith("the package `wandb` is not installed; run `pip install wandb`\n")
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
