"""Memory of runs of other frameworks, against figures that others published or measured."""

from dataclasses import replace
from pathlib import Path

import pytest

from plimsoll import configs
from plimsoll.extras.other_frameworks.adjusted_report import adjust_report, count_in_flight, count_local
from plimsoll.extras.other_frameworks.foreign_run import ForeignMesh, ForeignModel, ForeignRun
from plimsoll.extras.other_frameworks.mapping import build_flags
from plimsoll.extras.other_frameworks.models import find_flavor, find_model
from plimsoll.extras.other_frameworks.read import read_run
from plimsoll.extras.other_frameworks.sharding import Sharding, divide
from plimsoll.framework.plan import targets
from plimsoll.framework.plan.build_report import estimate_report
from plimsoll.framework.plan.plan_report import PlanReport
from plimsoll.framework.program.experiment import Experiment

GB = 1e9
GIB = 2.0**30


def build_experiment(run: ForeignRun) -> tuple[Experiment, object]:
    flags = build_flags(run)
    config = configs.load(flags.config, shape_only=True)
    for path, text in flags.overrides.items():
        config.override(path, text)
    return config.instantiate(), config


def plan(run: ForeignRun, target: str) -> PlanReport:
    _, config = build_experiment(run)
    machine = targets.resolve(target)
    report = estimate_report("run", config, machine, machine.limit_bytes, suggests=False)
    return adjust_report(report, run, config, machine)


def count_parameters(model: ForeignModel) -> int:
    run = ForeignRun("test", model, ForeignMesh(), seq_len=128, rows=1)
    experiment, _ = build_experiment(run)
    sizes = experiment.mesh.resolve(1)
    count = count_local(experiment, sizes)
    return count.shared + count.experts


# Figure 1 of the ZeRO paper (arXiv 1910.02054): 7.5 billion parameters, 64 devices, Adam in mixed precision.
@pytest.mark.parametrize(("kind", "gigabytes"), [("zero0", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)])
def test_zero_stages_are_those_of_the_paper(kind: str, gigabytes: float):
    divided = divide(
        Sharding(kind=kind, half=True),
        source="test",
        devices=64,
        accumulate=1,
        is_full=True,
        weights="float32",
        half=True,
        has_our_state=False,
    )
    stored = divided.stored
    assert stored is not None
    assert stored.state is not None
    each = stored.parameter / stored.parameter_shards + stored.gradient / stored.gradient_shards
    each += stored.state / stored.state_shards
    assert each * 7.5 == pytest.approx(gigabytes, rel=0.02)


def test_parameter_counts_are_the_published_ones():
    llama, _ = find_flavor("torchtitan", "llama3", "8B")
    assert count_parameters(ForeignModel("8B", hub_id=llama)) == 8_030_261_248
    # OPT numbers its positions from two, so its table has two more rows than positions.
    assert count_parameters(find_model("facebook/opt-1.3b", "test")) == 1_315_758_080 - 2 * 2048
    assert count_parameters(find_model("google/gemma-7b", "test")) == 8_537_680_896
    _, gpt3 = find_flavor("maxtext", "", "gpt3-175b")
    assert count_parameters(ForeignModel("gpt3", shape=gpt3)) == pytest.approx(175e9, rel=0.01)


# The figures that Megatron-LM's functional test gpt3_7b_tp4_pp1_memory_speed stores for H100s, at commit
# d98e8a64ddf34856e74b24714e3bedb2f5a39553: bytes between steps, and at the peak.
def test_megatron_agrees_with_measured_memory(folder: Path):
    run = read_run([folder / "pretrain.sh"])
    report = plan(run, "h100x8")
    state = sum(report.breakdown[group] for group in ("parameters", "gradients", "optimizer_state"))
    assert state / GIB == pytest.approx(19.24, rel=0.01)
    assert report.device_allocated_bytes / GIB == pytest.approx(53.22, rel=0.06)


# Bytes per parameter in docs/user-guide/features/dist_optimizer.md of Megatron-LM: 18, or 6 + 12 / d.
@pytest.mark.parametrize(("words", "each"), [([], 18), (["--use-distributed-optimizer"], 6 + 12 / 4)])
def test_megatron_bytes_per_parameter(tmp_path: Path, words: list[str], each: float):
    path = tmp_path / "args.sh"
    path.write_text(
        "python pretrain_gpt.py --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --swiglu "
        "--ffn-hidden-size 512 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear --bf16 "
        "--micro-batch-size 1 --vocab-size 1024 --max-position-embeddings 64 --train-iters 5 "
        "--untie-embeddings-and-output-weights\n"
    )
    run = read_run([path], words, devices=4)
    report = plan(run, "h100x4")
    # Per layer: four matrices of attention, three of the MLP, two norms; two tables and the last norm.
    count = 2 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256) + 2 * 1024 * 256 + 256
    state = sum(report.breakdown[group] for group in ("parameters", "gradients", "optimizer_state"))
    assert state == pytest.approx(count * each, rel=1e-3)


def test_stages_of_a_pipeline_hold_as_many_microbatches_as_they_have_started():
    def run(stages: int, chunks: int, accumulate: int) -> ForeignRun:
        mesh = ForeignMesh(stages=stages, chunks=chunks)
        return ForeignRun("test", ForeignModel("m"), mesh, seq_len=8, rows=1, accumulate=accumulate)

    # Figure 4 of arXiv 2104.04473: four stages, eight microbatches; the first device starts four before its first
    # backward pass, and the last one. With two chunks, they start ten chunks and four, plus the one in the first pass.
    assert [count_in_flight(run(4, 1, 8), stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [count_in_flight(run(4, 2, 8), stage) for stage in (0, 3)] == [11, 5]
    assert count_in_flight(run(8, 1, 2), 0) == 2


def test_a_reference_model_and_saved_tables_are_counted(folder: Path):
    recipe = (folder / "recipe.yaml").read_text()
    text = recipe.replace("mistralai/Mistral-7B-v0.1", "HuggingFaceTB/SmolLM2-135M")
    plain = plan(make(folder, text), "h100x1")
    preferences = plan(make(folder, text + "beta: 0.1\n"), "h100x1")
    # SmolLM2 135M has 134.5 million parameters (its page on the Hub).
    assert preferences.breakdown["frozen"] - plain.breakdown["frozen"] == pytest.approx(2 * 134.5e6, rel=1e-3)
    adapters = text + "use_peft: true\nlora_r: 8\n"
    without = plan(make(folder, adapters), "h100x1")
    tables = plan(make(folder, adapters + "lora_modules_to_save: [embed_tokens, lm_head]\n"), "h100x1")
    more = tables.breakdown["optimizer_state"] - without.breakdown["optimizer_state"]
    assert more == 2 * 49152 * 576 * 16


def test_scales_that_are_quantized_too(folder: Path):
    """Double quantization saves 0.373 bits per weight (QLoRA, arXiv 2305.14314, section 3)."""
    text = (folder / "recipe.yaml").read_text() + "use_peft: true\nlora_r: 8\nload_in_4bit: true\n"
    text = text.replace("mistralai/Mistral-7B-v0.1", "meta-llama/Llama-2-7b-hf")
    once = plan(make(folder, text), "h100x1")
    twice = plan(make(folder, text + "bnb_4bit_use_double_quant: true\n"), "h100x1")
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert once.breakdown["frozen"] - twice.breakdown["frozen"] == pytest.approx(weights * 0.373 / 8, rel=2e-3)
    assert once.device_allocated_bytes > twice.device_allocated_bytes


# Bytes that PyTorch allocates in a step of LLaMA-Factory's QLoRA (rank 8, one row), without CUDA's own: printed by
# `python -m tools.bench.torch_reserved` for torch 2.13, transformers 5.23 and peft 0.21.
@pytest.mark.parametrize(("seq_len", "gigabytes"), [(1024, 4.71), (8192, 9.52)])
def test_a_qlora_step_equals_the_simulated_pytorch_step(tmp_path: Path, seq_len: int, gigabytes: float):
    path = tmp_path / "sft.yaml"
    path.write_text(
        "model_name_or_path: meta-llama/Llama-2-7b-hf\nquantization_bit: 4\nstage: sft\nfinetuning_type: lora\n"
        f"lora_rank: 8\ncutoff_len: {seq_len}\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 4\n"
        "bf16: true\n"
    )
    assert plan(read_run([path]), "a100-40").device_allocated_bytes / GB == pytest.approx(gigabytes, rel=0.04)


def test_the_estimate_of_a_compiled_plan_is_adjusted_like_the_plan(folder: Path):
    run = read_run([folder / "recipe.yaml"])
    _, config = build_experiment(run)
    machine = targets.resolve("h100x1")
    ours = estimate_report("run", config, machine, machine.limit_bytes, suggests=False)
    assert ours.estimate is not None
    compiled = replace(
        ours, estimated=False, device_peak_bytes=2 * ours.device_peak_bytes, estimate=replace(ours.estimate, error=-0.5)
    )
    adjusted = adjust_report(compiled, run, config, machine)
    assert adjusted.estimate is not None
    change = adjusted.device_peak_bytes - compiled.device_peak_bytes
    assert change
    assert adjusted.estimate.device_peak_bytes == ours.estimate.device_peak_bytes + change
    assert adjusted.estimate.error == adjusted.estimate.device_peak_bytes / adjusted.device_peak_bytes - 1


def make(folder: Path, text: str) -> ForeignRun:
    (folder / "made.yaml").write_text(text)
    return read_run([folder / "made.yaml"])


def test_names_of_models_are_in_the_table_of_shapes():
    """Each id that a name stands for has a shape, without which its runs could not be planned."""
    from plimsoll.extras.other_frameworks.models import load_names
    from plimsoll.framework.families.published import load_published_models

    known = {name.lower() for name in load_published_models()}
    tables = load_names()
    known_shapes = {name.lower() for name in tables["shapes"]}
    wanted = [*tables["copies"].values()]
    wanted += [name for table in ("torchtitan", "maxtext") for name in tables[table].values() if isinstance(name, str)]
    missing = [name for name in wanted if name.lower() not in known | known_shapes]
    assert missing == []
