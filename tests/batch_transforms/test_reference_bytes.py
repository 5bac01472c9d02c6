"""Device memory of a reference according to the compiler: almost nothing on top of fine-tuning on the same tokens."""

import pytest

from plimsoll.framework.batch_transforms.reference import Reference
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.objectives.preferences import DPO
from plimsoll.framework.plan.build_report import compile_report, estimate_report
from plimsoll.framework.plan.memory_budget import measure_need
from plimsoll.framework.plan.step_time.tpu_operations import PCIE_EFFICIENCY
from plimsoll.framework.plan.targets import resolve
from tests.support import small
from tests.support.paired_rows import Halves

SIZES = {"dim": 128, "stack__num_layers": 4, "stack__pattern__0__mlp__hidden": 352}


def tuning(*, lora: bool, kind: str | None) -> Config:
    """Return a config that fine-tunes a small model, by DPO with a kind of reference or (None) on the next tokens."""
    config = small.experiment(small.llama(**SIZES), seq_len=64, batch=2, documents=True)
    config.memory.remat = "full"
    if lora:
        config.model.lora = config_for(LoRA, rank=4)
    if kind is not None:
        config.data = config_for(Halves, **{name: config.data[name] for name in config.data})
        config.model.head.objective = config_for(DPO)
        config.batch_transform = config_for(Reference, kind=kind)
    return config


def run_plan(**fields) -> dict:
    return compile_report("small", tuning(**fields), resolve("cpu:1"), None, phases=False).to_json()


def most(report: dict) -> int:
    """Return the highest peak of all programs that run in a step."""
    return max(report["phases"][name]["device_peak_bytes"] for name in ("train", "reference"))


@pytest.fixture(scope="module")
def base() -> dict[bool, int]:
    """The peaks with the next-token loss, without and with adapters."""
    return {lora: run_plan(lora=lora, kind=None)["phases"]["train"]["device_peak_bytes"] for lora in (False, True)}


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("lora", "kind", "bound"), [(True, "adapter_off", 1.02), (False, "offloaded", 1.05), (False, "stored", 1.05)]
)
def test_preference_tuning_needs_the_memory_for_finetuning(lora, kind, bound, base):
    report = run_plan(lora=lora, kind=kind)
    assert report["fits"]
    assert most(report) <= bound * base[lora]
    program = small.program(tuning(lora=lora, kind=kind))
    weights = sum(leaf.bytes_per_device for leaf in program.layout if leaf.group in ("parameter", "frozen"))
    # A second copy of the weights in device memory would have been noticed.
    assert most(report) + weights > 1.1 * bound * base[lora]
    kept = report["host_peak_bytes"]
    if kind == "offloaded":
        assert 0.95 * weights < kept <= weights
        assert report["phases"]["reference"]["host_peak_bytes"] == kept
    else:
        assert kept == 0
    # The guard of `plimsoll train` counts the reference as the plan does.
    assert measure_need(program).peak == most(report)


@pytest.mark.pairs
def test_step_time_includes_the_reference():
    seconds = {kind: run_plan(lora=True, kind=kind)["time"]["seconds"] for kind in ("adapter_off", "stored")}
    assert 1.1 < seconds["adapter_off"] / seconds["stored"] < 1.6


def run_estimate(*, lora: bool, kind: str, accumulate: int) -> dict:
    """Return the report of the analytical estimate, for one H100."""
    config = tuning(lora=lora, kind=kind)
    config.learner.accumulate = accumulate
    return estimate_report("small", config, resolve("h100"), None).to_json()


@pytest.mark.pairs
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["adapter_off", "offloaded"])
def test_estimate_includes_the_reference(kind: str, accumulate: int):
    lora = kind == "adapter_off"
    report = run_estimate(lora=lora, kind=kind, accumulate=accumulate)
    # With stored values, a step computes no reference.
    without = run_estimate(lora=lora, kind="stored", accumulate=accumulate)
    program = small.program(tuning(lora=lora, kind=kind))
    kept = program.experiment.batch_transform.host_bytes(program)
    assert (kept > 0) == (kind == "offloaded")
    assert report["host_peak_bytes"] - without["host_peak_bytes"] == kept
    more = {name: report["time"]["parts"][name] - seconds for name, seconds in without["time"]["parts"].items()}
    # One forward pass in addition to two of them and a backward pass. The backward pass costs as much as one forward
    # pass or, if all weights train, two.
    share = more["matrix units"] / without["time"]["parts"]["matrix units"]
    assert 0.2 < share < 0.4
    link_seconds = accumulate * kept / (PCIE_EFFICIENCY * resolve("h100").spec.pcie_bytes_per_second)
    assert more["host link"] == pytest.approx(link_seconds, rel=1e-6, abs=1e-12)
