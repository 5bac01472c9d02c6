"""Points around a plan, settings that change its groups, and the page of `plimsoll plan --html` that shows both."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plimsoll.extras.plan_page import batch_grid, memory_levers
from plimsoll.framework.plan import targets
from plimsoll.framework.plan.build_report import estimate_report
from plimsoll.launch import plan
from tests.support import small
from tests.support.runs import CONFIG, write_text

TINY = f"--config={CONFIG}:tiny"
SIZES = {"data.global_batch_size": 8, "data.seq_len": 32}


def config(**changes: Any) -> Any:
    changed = small.experiment(small.llama())
    for path, value in (SIZES | changes).items():
        changed.set_path(path, value)
    return changed


@pytest.mark.pairs
@pytest.mark.parametrize(("fits", "limit"), [(True, None), (False, 1 << 10)])
def test_points_surround_the_requested_one_and_are_valid(fits: bool, limit: int | None):
    target = targets.resolve("v5e-4")
    asked = config()
    report = replace(estimate_report("tiny", asked, target, limit, suggests=False), estimated=False)
    assert report.fits == fits
    points = batch_grid.plan_grid(asked, target, report, seconds=600)
    # Four devices share a batch, so 4 rows are the minimum.
    assert sorted({point.batch for point in points}) == [4, 8, 16, 32, 64]
    assert {8, 16, 32, 64} <= {point.sequence for point in points}
    assert len({point[:2] for point in points}) == len(points)
    (asked_point,) = [point for point in points if not point.report.estimated]
    assert asked_point == batch_grid.point_from_report(report)
    by_batch = {point.batch: point.report for point in points if point.sequence == 32}
    peaks = [by_batch[batch].device_peak_bytes for batch in sorted(by_batch)]
    assert peaks == sorted(peaks)
    assert not any(point.report.suggestions for point in points)


@pytest.mark.pairs
def test_time_limit_drops_whole_rows():
    target = targets.resolve("v5e-4")
    report = estimate_report("tiny", config(), target, None, suggests=False)
    points = batch_grid.plan_grid(config(), target, report, seconds=0)
    assert {point.sequence for point in points} == {32}
    assert len(points) == 5


@pytest.mark.pairs
@pytest.mark.parametrize("name", ["v5e-4", "rtx4090"])
def test_each_memory_setting_is_valid_and_shrinks_its_group(name: str):
    target = targets.resolve(name)
    asked = config()
    report = estimate_report("tiny", asked, target, None)
    candidates = memory_levers.levers(report)
    helpful = memory_levers.estimate_levers(asked, target, report, candidates, seconds=600)
    assert {"activations", "parameters"} & {lever.group for lever in helpful}
    assert len(helpful) <= len(candidates)
    for lever in helpful:
        trial = config(**dict(lever.settings))
        need = estimate_report("tiny", trial, target, None)
        assert need.device_peak_bytes == lever.peak_bytes, lever
        assert need.breakdown[lever.group] == lever.group_bytes, lever
        shrinks = lever.group_bytes < report.breakdown[lever.group]
        assert shrinks or lever.peak_bytes < report.device_peak_bytes, lever


def test_current_settings_are_not_proposed():
    target = targets.resolve("v5e-4")
    offloaded = {"memory.remat": "full", "memory.update": "streamed", "memory.optimizer_state": "pinned_host"}
    report = estimate_report("tiny", config(**offloaded), target, None)
    texts = [lever.text for lever in memory_levers.levers(report)]
    assert "memory.remat=full" not in texts
    assert not [text for text in texts if "optimizer_state" in text or "update" in text]


@pytest.mark.pairs
def test_command_line_plans_the_points_on_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_text(tmp_path / "text")
    file = tmp_path / "plan.html"
    flags = ["--target=v5e-4", "--estimate", "--device_memory_gib=0.5", "--config.memory.remat=dots"]
    assert plan.main([TINY, *flags, f"--html={file}"]) == 0
    text = file.read_text()
    data = re.search(r'id="points">(.*?)</script>', text)
    assert data
    stored = json.loads(data[1])
    assert len(stored["points"]) == len(stored["batch"]) * len(stored["sequence"]) or len(stored["points"]) > 4
    assert "--config.memory.remat=dots" in text
    assert "--device_memory_gib=0.5" in text
    assert "plimsoll train --config=" in text
    assert "memory.remat=<wbr>full" in text
