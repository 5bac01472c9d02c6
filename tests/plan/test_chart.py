"""The memory chart of a page: proportional segments, a slider over planned points only, and escaped text."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from plimsoll.extras.plan_page import PlanCommand, chart_figures, page
from plimsoll.extras.plan_page.batch_grid import GridPoint
from plimsoll.framework.plan.plan_report import PlanReport
from tests.support.plan_pages import GIB, IN_EFFECT, TIME, browse, measure, needs_browser, plan

EVIL = "</script><script>document.title='broken'</script><img src=x onerror=\"alert(1)\">'; --\"$HOME`x`"
ASKED = PlanCommand("--config=llama2-7b", "--target=v5e-16", ["memory.remat=full"], ["--html=plan.html"])
# Simulates a reader: moves the sliders, returns to the requested point, and records the page after each move.
WATCH = """<script>
const seen = () => ({
  heights: [...document.querySelectorAll('.stage .segment')].map(e => Number(e.getAttribute('height'))),
  verdict: document.querySelector('header .verdict').textContent,
  settings: document.querySelector('header .soft').textContent, basis: document.querySelector('.basis').textContent,
  train: document.querySelector('.command code').textContent, ship: document.querySelector('.ship').className.baseVal,
  moved: document.body.classList.contains('moved'), impossible: document.body.classList.contains('impossible'),
  valuetext: document.querySelector('[name=batch]').getAttribute('aria-valuetext')});
const form = document.querySelector('.controls');
const move = (name, index) => { form.elements[name].value = index;
  form.elements[name].dispatchEvent(new Event('input', {bubbles: true})) };
const steps = [seen()];
move('batch', 1); steps.push(seen());
move('sequence', 0); steps.push(seen());
move('batch', 0); steps.push(seen());
document.querySelector('.back').click(); steps.push(seen());
document.body.insertAdjacentHTML('beforeend', '<pre id="steps"></pre>');
document.getElementById('steps').textContent = JSON.stringify(steps);
</script>"""


def at(batch: int, sequence: int, activations: float, **more: Any) -> GridPoint:
    settings = IN_EFFECT | {"data.global_batch_size": batch, "data.seq_len": sequence}
    return GridPoint(batch, sequence, plan("full", activations, in_effect=settings, **more))


def points() -> list[GridPoint]:
    """Return three of four points, as if the config did not allow short sequences in small batches."""
    closed = {"estimated": True, "settings": ["memory.remat=full"]}
    asked = at(16, 4096, 2.0, settings=["memory.remat=full"])
    return [asked, at(32, 4096, 40.0, **closed), at(32, 2048, 4.0, **closed)]


def sliding(asked: PlanCommand = ASKED, **more: Any) -> str:
    planned = [point._replace(report=PlanReport.from_json(point.report.to_json() | more)) for point in points()]
    return page([planned[0].report], points=planned, asked=asked)


@pytest.mark.parametrize("activations", [0.001, 2.0, 9.5, 14.0, 80.0, 1200.0])
@pytest.mark.parametrize("limit", [None, 0.02, 15.75])
def test_heights_are_proportional_to_bytes(activations: float, limit: float | None):
    report = plan("full", activations, limit=limit, allocated=None if activations < 5 else 6.7 + activations)
    held = chart_figures.list_segments([report])
    figures = chart_figures.figures(report, held)
    heights = np.array([float(figures[f"{layer.key}.height"]) for layer in held])
    sizes = np.array([chart_figures.bytes_by_group(report)[layer.group] for layer in held])
    scale = heights.sum() / sizes.sum()
    np.testing.assert_allclose(heights, scale * sizes, atol=0.02)
    tops = [float(figures[f"{layer.key}.y"]) for layer in held]
    np.testing.assert_allclose(tops, chart_figures.FLOOR - heights.cumsum(), atol=0.05)
    assert tops[-1] >= 0, "the segments leave the picture"
    assert figures["sea"] == f"translate(0 {tops[-1]:.2f})"
    if limit is None:
        assert figures["line.visible"] == "0"
        return
    line = float(figures["line"].removeprefix("translate(0 ").removesuffix(")"))
    assert chart_figures.FLOOR - line == pytest.approx(scale * limit * GIB, abs=0.02)
    is_over = report.device_allocated_bytes > limit * GIB
    assert figures["ship"] == ("ship sunk" if is_over else "ship afloat")
    assert (tops[-1] < line) == is_over


def test_capacity_line_is_fixed_while_the_plan_fits():
    figures = [
        chart_figures.figures(report, chart_figures.list_segments([report])) for report in (plan(), plan("dots", 8.0))
    ]
    assert figures[0]["line"] == figures[1]["line"]
    assert "activations 8.00 GiB" in figures[1]["description"]


def test_toy_and_empty_plans_are_drawn():
    for size in (0, 1, 700):
        report = plan(breakdown={"parameters": size}, device_peak_bytes=size, device_allocated_bytes=size, limit=None)
        assert f"{size} B" in page([report])


@needs_browser
def test_slider_updates_figures_chart_and_commands(tmp_path: Path):
    text = sliding().replace("</body>", WATCH + "</body>")
    dom, said = browse(text, tmp_path)
    assert said == []
    found = re.search(r'<pre id="steps">(.+?)</pre>', dom)
    assert found
    asked, sunk, short, impossible, again = json.loads(found[1].replace("&gt;", ">").replace("&amp;", "&"))
    assert asked["basis"] == "Batch 16, sequence 4,096: compiled by the target's own compiler."
    assert asked["verdict"].startswith("✓ fits")
    assert "global_batch_size" not in asked["train"]
    assert sunk["settings"] == "memory.remat=full data.global_batch_size=32 data.seq_len=4096"
    assert (sunk["ship"], sunk["valuetext"]) == ("ship sunk", "32")
    assert sunk["verdict"].startswith("✗ does not fit, 30.85 GiB over")
    assert "analytical estimate, not compiled." in sunk["basis"]
    assert "At the compiled point, the estimate is 3.1% too high." in sunk["basis"]
    assert "--config.data.global_batch_size=32" in sunk["train"]
    assert "--config.data.seq_len=4096" in sunk["train"]
    assert "--config.data.seq_len=2048" in short["train"]
    assert short["heights"][3] == pytest.approx(2 * asked["heights"][3], abs=0.1)
    assert impossible["impossible"]
    assert [step["moved"] for step in (asked, sunk, short, again)] == [False, True, True, False]
    assert again == asked


def test_without_javascript_the_requested_point_is_shown():
    text = sliding()
    before_scripts = text.partition("<script")[0]
    assert "Batch 16, sequence 4,096: compiled" in before_scripts
    assert "activations: 2.00 GiB" in before_scripts
    assert '<form class="controls" hidden>' in before_scripts
    assert "1 compiled and 2 estimated" in before_scripts


def test_compared_batches_are_slider_points():
    compiled = [at(batch, 4096, batch / 8, settings=[f"data.global_batch_size={batch}"]) for batch in (16, 32)]
    text = page([point.report for point in compiled], points=compiled, asked=ASKED)
    assert "only at planned points: 2 compiled." in text
    assert "<figure" not in text
    assert "Memory of one device at the peak" in text
    assert text.count('data-follow="class:verdict.class text:verdict"') == 1


@needs_browser
def test_names_are_escaped(tmp_path: Path):
    asked = PlanCommand(f"--config={EVIL}", "--target=v5e-16", ["memory.remat=full"], [f"--html={EVIL}"])
    text = sliding(asked, config=EVIL, settings=[EVIL, "memory.remat=full"])
    dom, said = browse(text, tmp_path)
    assert said == []
    assert "<title>broken" not in dom
    assert text.count("</script>") == 2
    assert "<img" not in dom
    data = re.search(r'<script type="application/json" id="points">(.*?)</script>', text)
    assert data
    shown = json.loads(data[1])["points"]["32,2048"]["command.train"]
    # A shell parses the exact name.
    assert f"--config={EVIL}" in shlex.split(shown)


@needs_browser
@pytest.mark.parametrize("width", [400, 800, 1600])
def test_nothing_is_wider_than_the_window_and_nothing_is_fetched(tmp_path: Path, width: int):
    name = "optimizer/stack/default/state/0/nu/block0/attention/projection/weight/" * 3
    largest = [{"name": name, "group": "activations", "bytes": GIB, "shape": "bf16[32,1,4096,4096]", "count": 2}]
    suggestion = {
        "setting": " ".join(["--config.memory.optimizer_state=pinned_host"] * 5),
        "device_peak_bytes": GIB,
        "compiled": True,
    }
    text = sliding(time=TIME, largest=largest, suggestions=[suggestion])
    seen = measure(text, tmp_path, width)
    assert seen["view"] == width
    assert seen["page"] <= width
    assert seen["requests"] == []


@needs_browser
def test_chart_in_light_and_dark_mode(tmp_path: Path):
    brightness = []
    for scheme in (0, 1):  # dark, light
        shot = tmp_path / f"{scheme}.png"
        flags = [f"--screenshot={shot}", f"--blink-settings=preferredColorScheme={scheme}"]
        browse(sliding(time=TIME), tmp_path, 900 + scheme, *flags)
        image = matplotlib.image.imread(shot)[..., :3]
        # The sky above the ship and below the heading.
        brightness.append((image[2, 2].mean(), image[200, 850].mean()))
    assert max(brightness[0]) < 0.2
    assert min(brightness[1]) > 0.9
