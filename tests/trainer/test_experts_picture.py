"""A mixture-of-experts run plots its expert load at the end, if the router reports it."""

from pathlib import Path

import pytest

from tests.support.runs import train, write_text

MOE = "--config.model.stack.pattern.0.mlp"


@pytest.mark.pairs
def test_mixture_run_plots_its_expert_load(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_text(tmp_path / "text")
    flags = [f"{MOE}=plimsoll.MoE", f"{MOE}.num_experts=4", f"{MOE}.experts.hidden=16"]
    flags += ["--config.trainer.max_steps=2", "--config.model.stack.num_layers=1"]
    assert train(tmp_path / "plain", *flags) == 0
    assert "experts.png" not in capsys.readouterr().out
    assert not (tmp_path / "plain" / "experts.png").exists()
    assert train(tmp_path / "run", *flags, f"{MOE}.router.expert_metrics=true") == 0
    picture = tmp_path / "run" / "experts.png"
    assert f"experts: {picture}" in capsys.readouterr().out
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
