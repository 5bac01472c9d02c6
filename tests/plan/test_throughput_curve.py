"""Tokens per second at larger batches: the knee, how the batch grows, the tables, the JSON and the chart."""

import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from plimsoll import configs
from plimsoll.extras.autotune import batch_curve
from plimsoll.extras.autotune.batch_curve import estimate_curve
from plimsoll.extras.autotune.cost_model import CostModel, MemoryBudget, SettingsCost
from plimsoll.extras.autotune.settings import Machine, Setting, Settings, TunedSettings, TuningRequest
from plimsoll.extras.plan_page import page, throughput
from plimsoll.framework.config import Config
from plimsoll.framework.plan import targets
from plimsoll.framework.plan.plan_report import TimeReport
from plimsoll.framework.plan.step_time.estimated_time import StepWork, estimate_time
from plimsoll.framework.plan.step_time.layer_transfers import ProgramTransfers
from plimsoll.framework.plan.step_time.time_breakdown import StepTime
from plimsoll.framework.plan.suggest import check_target, estimate_for_target
from plimsoll.framework.plan.throughput_curve import ThroughputCurve, ThroughputPoint
from plimsoll.framework.terminal.tables import render
from plimsoll.launch import plan
from tests.support.plan_pages import plan as build_report

MIB = 2**20
# Offloads everything that layer programs can, and updates each layer in the backward pass.
AT_ONCE = (
    Setting("memory.update", "layer_programs"),
    Setting("memory.gradients", "none"),
    Setting("learner.clip_mode", "two_pass"),
    Setting("memory.optimizer_state", "pinned_host"),
)
IN_BACKWARD = (Setting("memory.update", "in_backward"), Setting("learner.clip_mode", "two_pass"))


@pytest.fixture(autouse=True)
def isolated_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small_llama() -> Config:
    config = configs.load("llama2-7b", shape_only=True)
    config.model.stack.num_layers = 2
    config.model.dim = 512
    config.model.vocab_size = config.data.tokenizer.vocab_size = 1024
    config.data.seq_len = 512
    config.data.global_batch_size = 1
    config.memory.remat = "full"
    return config


def build_curve(
    config: Config, target_name: str, settings: Settings, device_mib: int, host_gib: int = 64, **more: Any
) -> ThroughputCurve:
    target = targets.resolve(target_name)
    machine = Machine.derive(target, device_mib * MIB, host_gib << 30)
    options: dict[str, Any] = {"mode": "memory", "fixed": (), "allowed": (), "estimate": True, **more}
    request = TuningRequest(config, machine, **options)
    choice = TunedSettings(machine, settings, (), (), 0, 0, 0, None, 0.0, compiled=False)
    curve = estimate_curve(request, target, choice, host_gib << 30)
    assert curve is not None
    return curve


class HandCosts(CostModel):
    """Costs by hand: 100 MiB for each row of a microbatch on device and host, and 50 MiB for the sum of gradients.

    A step takes a second for transfers, and half a second for each row of the batch.
    """

    def _cost(self, settings: Settings) -> SettingsCost:
        experiment = self.experiment(settings)
        check_target(experiment, self.target)
        batch = experiment.data.global_batch_size
        accumulate = experiment.learner.accumulate
        row_bytes = 100 * MIB * batch // accumulate
        peak = row_bytes + (50 * MIB if accumulate > 1 else 0)
        time = StepTime(0.5 * batch, 0.0, 0.0, 1.0, 0.0, basis="by hand")
        return SettingsCost(peak, 0, row_bytes, row_bytes, time.seconds, 0.0, time)


@pytest.fixture
def hand_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_curve, "CostModel", HandCosts)
    # The aim below the limit of the device is not part of these tests.
    monkeypatch.setattr(batch_curve, "MemoryBudget", functools.partial(MemoryBudget, aim=1.0))


def build_point(batch: int, seconds: float, link_seconds: float = 0.0) -> ThroughputPoint:
    parts = {"matrix units": seconds - link_seconds, "host link": link_seconds}
    bound_by = max(parts, key=lambda name: parts[name])
    time = TimeReport(seconds, 100 * batch / seconds, None, bound_by, parts, basis="by hand")
    return ThroughputPoint(batch, 1, 100 * batch, 1000, 2000, f"--config.data.global_batch_size={batch}", time)


# A second per step for transfers, and half a second for each row: 66.7, 100, 133.3, 160, 177.8 tokens per second.
BY_HAND = ThroughputCurve(
    "token", tuple(build_point(batch, 1.0 + 0.5 * batch, 1.0) for batch in (1, 2, 4, 8, 16)), "memory", "device"
)


# --- the curve -------------------------------------------------------------------------------------------------------


def test_the_knee_is_the_first_point_with_90_percent_of_the_highest_rate():
    rates = [point.rate for point in BY_HAND.points]
    assert rates == pytest.approx([66.667, 100.0, 133.333, 160.0, 177.778], rel=1e-4)
    assert BY_HAND.knee.batch == 8, "160 is exactly 90% of 177.8"
    assert BY_HAND.points[0].bound_text == "host link 67%"
    assert BY_HAND.points[4].bound_text == "matrix units 89%"


def test_a_rate_that_falls_has_its_knee_at_the_start():
    points = (build_point(1, 1.0), build_point(2, 2.5))
    assert ThroughputCurve("token", points, "flat").knee is points[0]


@pytest.mark.usefixtures("hand_costs")
def test_curve_ends_when_the_rate_is_flat():
    curve = build_curve(small_llama(), "v5e-1", (), 100_000)
    assert [point.batch for point in curve.points] == [1, 2, 4, 8, 16, 32, 64]
    assert [point.rate for point in curve.points] == pytest.approx(
        [512 * b / (1 + b / 2) for b in (1, 2, 4, 8, 16, 32, 64)]
    )
    # From 32 to 64 rows the rate rises by 3%.
    assert curve.end == "limit"
    config = small_llama()
    config.data.global_batch_size = 32
    curve = build_curve(config, "v5e-1", (), 100_000)
    assert ([point.batch for point in curve.points], curve.end) == ([32, 64, 128, 256, 512], "flat")
    rates = [point.rate for point in curve.points]
    assert rates[4] < 1.02 * rates[2]
    assert rates[3] > 1.02 * rates[1]


@pytest.mark.usefixtures("hand_costs")
@pytest.mark.parametrize(
    ("device_mib", "sizes", "end"),
    [
        # There is room for two rows, and for the sum of gradients.
        (250, [(1, 1), (2, 1), (4, 2), (8, 4), (16, 8), (32, 16), (64, 32)], "limit"),
        # Only one row leaves room for the sum of gradients.
        (200, [(1, 1), (2, 1), (4, 4), (8, 8), (16, 16), (32, 32), (64, 64)], "limit"),
        # No row leaves room for it.
        (149, [(1, 1)], "memory"),
    ],
)
def test_rows_grow_first_and_then_microbatches(device_mib: int, sizes: list[tuple[int, int]], end: str):
    curve = build_curve(small_llama(), "v5e-1", (), device_mib)
    assert [(point.batch, point.accumulate) for point in curve.points] == sizes
    assert curve.end == end
    assert max(point.device_peak_bytes for point in curve.points) <= device_mib * MIB


@pytest.mark.usefixtures("hand_costs")
@pytest.mark.parametrize(
    ("settings", "fixed"),
    [(IN_BACKWARD, ()), ((), ("learner.accumulate",)), (AT_ONCE, ("memory.accumulate_by",))],
    ids=["schedule", "fixed", "order fixed"],
)
def test_without_accumulation_only_rows_grow(settings: Settings, fixed: tuple[str, ...]):
    curve = build_curve(small_llama(), "h100", settings, 500, fixed=fixed)
    assert [(point.batch, point.accumulate) for point in curve.points] == [(1, 1), (2, 1), (4, 1)]
    assert (curve.end, curve.exhausted) == ("no accumulation", "device")


@pytest.mark.usefixtures("hand_costs")
@pytest.mark.parametrize(("target", "settings"), [("h100", AT_ONCE), ("v5e-1", IN_BACKWARD)])
def test_microbatches_run_together_if_layers_are_updated_at_once(target: str, settings: Settings):
    curve = build_curve(small_llama(), target, settings, 500)
    assert [(point.batch, point.accumulate) for point in curve.points[:4]] == [(1, 1), (2, 1), (4, 1), (8, 2)]
    assert "--config.memory.accumulate_by=layer" in curve.points[3].overrides
    assert "accumulate_by" not in curve.points[2].overrides


@pytest.mark.usefixtures("hand_costs")
def test_host_memory_limits_the_batch():
    curve = build_curve(small_llama(), "h100", AT_ONCE, 100_000, host_gib=1, fixed=("learner.accumulate",))
    assert curve.points[-1].host_need_bytes == 800 * MIB
    assert (curve.points[-1].batch, curve.end, curve.exhausted) == (8, "no accumulation", "host")


@pytest.mark.usefixtures("hand_costs")
def test_mode_batch_may_accumulate():
    curve = build_curve(small_llama(), "v5e-1", (), 150, mode="batch", fixed=("learner.accumulate",))
    assert [(point.batch, point.accumulate) for point in curve.points[:3]] == [(1, 1), (2, 2), (4, 4)]


@pytest.mark.pairs
def test_rate_rises_while_the_link_bounds_the_step():
    curve = build_curve(small_llama(), "h100", AT_ONCE, 70_000)
    assert {point.accumulate for point in curve.points} == {1}, "layers are updated at once, so only rows can grow"
    rates = [point.rate for point in curve.points]
    assert rates == sorted(rates)
    assert curve.points[0].time.bound_by == "host link"
    # The transfers take the same time at any batch, and products are short: twice the rows, nearly twice the rate.
    assert rates[1] / rates[0] > 1.8
    assert curve.knee.rate >= 0.9 * max(rates)


# --- transfers of layer programs -------------------------------------------------------------------------------------


def test_only_the_computation_of_its_own_program_hides_a_transfer():
    h100 = targets.resolve("h100").spec
    link = 0.75 * 64e9
    # Half of the products hide the first transfer, and none the second one.
    transfers = (ProgramTransfers(10, 4e9, 1e9, product_share=0.05), ProgramTransfers(1, 0, 3e9, product_share=0.0))
    work = StepWork(0.7 * 989.5e12, 0.0, 0.0, 0.0, 0.0, layer_transfers=transfers)
    time = estimate_time(work, h100, 1, "bfloat16")
    assert time is not None
    assert time.matrix_units == pytest.approx(1.0, rel=1e-2)
    # 40 GB take 0.83 s, of which products hide 0.5 s.
    assert time.host_link == pytest.approx(40e9 / link - 0.5 + 3e9 / link, rel=1e-2)
    assert work.link_bytes == 40e9 + 3e9


def count_transfers(**fields: str) -> tuple[Config, list[ProgramTransfers]]:
    config = small_llama()
    config.memory.update = "layer_programs"
    for path, text in fields.items():
        config.override(path.replace("__", "."), text)
    need = estimate_for_target(config.instantiate(), targets.resolve("h100"))
    return config, [transfers for transfers in need.work.layer_transfers if transfers.link_bytes]


def test_state_moves_during_the_last_backward_pass_of_its_layer():
    config, transfers = count_transfers(
        memory__gradients="none", learner__clip_mode="two_pass", memory__optimizer_state="pinned_host"
    )
    # Master weights and two moments in float32, 4 bytes each; norms are small and stay on the device.
    block = config.model.stack.pattern[0]
    layer_elements = 4 * 512 * 512 + 3 * 512 * block.mlp.hidden
    first, second, outside = transfers
    assert first == second
    assert (first.to_host, first.from_host) == (12 * layer_elements, 12 * layer_elements)
    # Two layers. A step is a forward pass and two backward passes, which cost three times as much with recomputation.
    assert first.product_share == pytest.approx(3 / 7 / 2, rel=0.05)
    # Embedding and head, to the device and back.
    assert (outside.from_host, outside.product_share) == (2 * 12 * 2 * 1024 * 512, 0.0)


def test_nothing_hides_the_transfers_of_an_update_after_the_backward_pass():
    _, transfers = count_transfers(memory__gradients="pinned_host", memory__optimizer_state="pinned_host")
    backward, update = transfers[:2]
    assert backward.product_share > 0
    # Gradients in bfloat16 go to the host, and come back together with 12 bytes of state for each element.
    assert backward.to_host == update.from_host - update.to_host
    assert update.to_host == 6 * backward.to_host
    assert update.product_share == 0.0


@pytest.mark.parametrize("gradients", ["none", "pinned_host"])
def test_only_activations_move_for_each_microbatch(gradients: str):
    """Each microbatch has as many rows as before, so only the bytes of the activations grow with their number."""
    offloaded = {f"memory__{field}": "pinned_host" for field in ("optimizer_state", "parameters", "activations")}
    moved = []
    # Sums of several gradients have another dtype than a single one.
    for count in (2, 4, 6):
        _, transfers = count_transfers(
            **offloaded,
            memory__gradients=gradients,
            learner__clip_mode="two_pass",
            learner__accumulate=str(count),
            data__global_batch_size=str(count),
            data__seq_len="2048",
            memory__accumulate_by="layer",
        )
        moved.append([sum(one.runs * getattr(one, way) for one in transfers) for way in ("to_host", "from_host")])
    (to_2, from_2), (to_4, from_4), (to_6, from_6) = moved
    # At least the layers' inputs: two layers, 2048 tokens of 512 features in bfloat16, for two more microbatches.
    assert to_4 - to_2 == to_6 - to_4 >= 2 * 2 * 2048 * 512 * 2
    backward_passes = 2 if gradients == "none" else 1
    assert from_4 - from_2 == from_6 - from_4 == pytest.approx(backward_passes * (to_4 - to_2))


def test_sums_of_gradients_are_counted_in_their_own_dtype():
    """Microbatches that run together leave one sum in float32, which is twice as large as a gradient in bfloat16."""
    config = small_llama()
    config.memory.update = "layer_programs"
    config.memory.accumulate_by = "layer"
    sizes = {}
    for count in (1, 2):
        config.learner.accumulate = config.data.global_batch_size = count
        need = estimate_for_target(config.instantiate(), targets.resolve("h100"))
        sizes[count] = need.breakdown["gradients"]
    assert sizes[2] > 1.8 * sizes[1]


# --- tables, JSON and page -------------------------------------------------------------------------------------------


def test_table_marks_the_knee():
    text = render(BY_HAND.sections())
    (marked,) = [line for line in text.splitlines() if line.endswith("   knee")]
    assert marked.split()[:6] == ["800", "8", "1", "5.00", "s", "160"]
    assert "tokens per second by batch, estimated" in text
    assert "overrides          --config.data.global_batch_size=8" in text
    assert "device memory has no room for twice the batch" in text
    assert "estimated, h100x1" in render(BY_HAND.sections("h100x1"))


def test_json_has_the_points_and_the_knee():
    content = json.loads(json.dumps(BY_HAND.to_json()))
    assert (content["knee"], content["end"], content["item"]) == (800, "memory", "token")
    assert [point["batch"] for point in content["points"]] == [1, 2, 4, 8, 16]
    assert content["points"][0]["time"]["parts"] == {"matrix units": 0.5, "host link": 1.0}


def test_chart_has_a_point_for_each_batch_and_a_line_at_the_knee():
    drawing = throughput.draw_curve(BY_HAND)
    points = re.findall(r'<circle class="(\w+)" cx="([\d.]+)" cy="([\d.]+)"', drawing)
    assert [kind for kind, _, _ in points] == ["point", "point", "point", "knee", "point"]
    xs = [float(x) for _, x, _ in points]
    gaps = [after - before for before, after in itertools.pairwise(xs)]
    assert gaps == pytest.approx([gaps[0]] * 4, abs=0.11), "each doubling is as wide as any other"
    heights = [210.0 - float(y) for _, _, y in points]
    ratios = [height / heights[-1] for height in heights]
    assert ratios == pytest.approx([point.rate / BY_HAND.points[-1].rate for point in BY_HAND.points], abs=0.01)
    assert f'<line class="limit" x1="{points[3][1]}" x2="{points[3][1]}"' in drawing


def test_page_has_a_section_only_with_a_curve():
    text = page([build_report()], curves={"": BY_HAND})
    assert "<h2>Larger batches</h2>" in text
    assert "tokens per second, estimated" in text
    assert "Larger batches" not in page([build_report()])
    evil = "<script>alert(1)</script>"
    assert evil not in page([build_report()], curves={evil: BY_HAND})


@pytest.mark.pairs
def test_auto_says_the_tokens_per_second_of_larger_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, html = tmp_path / "plan.json", tmp_path / "plan.html"
    argv = ["--config=stdlib-tiny", "--target=cpu:1", "--auto", "--estimate", f"--json={file}", f"--html={html}"]
    argv += ["--config.data.global_batch_size=8", "--config.memory.remat=full"]
    assert plan.main(argv) == 0
    assert "tokens per second by batch, estimated" in capsys.readouterr().out
    report = json.loads(file.read_text())
    curve = report["throughput_curve"]
    assert curve["points"][0]["tokens_per_step"] == report["tokens_per_step"]
    assert curve["points"][0]["time"] == report["time"]
    document = html.read_text()
    assert "Larger batches" in document
    assert document.count('<svg class="curve"') == 1


@pytest.mark.pairs
def test_largest_says_the_tokens_per_second_of_larger_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, html = tmp_path / "largest.json", tmp_path / "largest.html"
    flags = ["--config=gpt2-124m", "--target=rtx3060", "--largest", "--estimate", "--config.data.global_batch_size=1"]
    # Fields that are set are not searched, so each size takes a fraction of a second.
    flags += ["--config.data.seq_len=128", "--config.memory.remat=full", "--config.memory.update=after_backward"]
    flags += ["--config.memory.optimizer_state=device", "--device_memory_gib=2"]
    assert plan.main([*flags, f"--json={file}", f"--html={html}"]) == 0
    assert "knee of the curve" in capsys.readouterr().out
    (series,) = json.loads(file.read_text())
    largest = series["points"][-1]
    first = series["throughput_curve"]["points"][0]
    assert first["time"]["tokens_per_second"] == pytest.approx(largest["tokens_per_second"])
    document = html.read_text()
    assert "Larger batches" in document
    assert f"--config.model.stack.num_layers={largest['layers']}" in document, "the commands have the size"
