"""tools.bench.distillation: the values it reads from runs, and the share of the gap that it reports."""

import json
from pathlib import Path

import pytest

from plimsoll import configs
from plimsoll.framework.layout import flatten
from tools.bench import distillation


def test_share_by_which_the_gap_closes():
    result = distillation.Outcome(teacher=1.0, alone=2.0, distilled=1.25, best_baseline=1.5, seconds=1.0)
    assert (result.closed, result.share_closed_at_best) == (pytest.approx(0.75), pytest.approx(0.5))
    assert result._replace(distilled=2.5).closed == pytest.approx(-0.5)


def test_evaluations_are_read_by_step(tmp_path: Path):
    assert distillation.evaluations(tmp_path, "nll") == {}
    rows = [{"step": 1, "eval/stdlib/nll": 3.0}, {"step": 2, "eval/stdlib/nll": 2.0}, {"step": 3, "train/loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert distillation.evaluations(tmp_path, "nll") == {1: 3.0, 2: 2.0}
    assert distillation.evaluations(tmp_path, "loss") == {}


def test_students_differ_only_in_the_teacher():
    """Model, data and steps are the same; only the objective and its teacher differ."""
    alone = configs.load(distillation.ALONE).to_dict()
    distilled = configs.load(distillation.DISTILLED).to_dict()
    left, right = flatten(alone), flatten(distilled)
    changed = {path for path in {*left, *right} if left.get(path) != right.get(path)}
    assert {path for path in changed if not path.startswith(("model/head/objective", "batch_transform"))} == set()
    assert configs.load(distillation.DISTILLED).batch_transform.top_k == distillation.TOP_K
