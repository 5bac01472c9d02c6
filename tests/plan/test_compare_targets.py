"""Several targets in one table, the smallest that fits a config, and models that are known only by their shape."""

import json
import re
from pathlib import Path

import pytest

import plimsoll as pl
from plimsoll import configs
from plimsoll.framework.config import ConfigError
from plimsoll.framework.families.published import load_published_models
from plimsoll.framework.plan import compare_targets, targets
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import plan
from tests.support.hub import COMMIT, Repository, empty_cache, fill_cache
from tests.support.runs import CONFIG, write_text

TINY = f"--config={CONFIG}:tiny"
MODEL = "--config=hf:Qwen/Qwen2.5-1.5B"


@pytest.fixture(autouse=True)
def isolated_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty Hub cache and forbid requests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_text(tmp_path / "text")
    empty_cache(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(text: str) -> dict[str, list[str]]:
    """Return the words of the table's rows, by target."""
    lines = [line.split() for line in text.splitlines() if line.startswith("  ")]
    return {words[0]: words[1:] for words in lines}


def test_candidates_are_sorted_and_each_is_a_target():
    names = compare_targets.list_candidates()
    sizes = [compare_targets.total_bytes(targets.resolve(name)) for name in names]
    assert sizes == sorted(sizes)
    assert len(set(names)) == len(names)
    assert {"rtx4090", "h100", "h100x8", "v5e-1", "v5e-256", "rtx3060x4"} <= set(names)
    # Rented machines have one H200 or eight.
    assert "h200x2" not in names


@pytest.mark.pairs
def test_several_targets_share_one_table(isolated_folder: Path, capsys: pytest.CaptureFixture):
    flags = ["--target=4090, v5e-8,t4,cpu:3", "--estimate", f"--json={isolated_folder / 'plans.json'}"]
    assert plan.main([MODEL, *flags]) == 0
    captured = capsys.readouterr()
    row_by_target = rows(captured.out)
    assert row_by_target["4090"][:2] == ["22.01", "GiB"]
    assert "TOO BIG" in " ".join(row_by_target["4090"])
    assert row_by_target["4090"][-1].startswith("--config.")
    assert " ".join(row_by_target["v5e-8"]).startswith("8 x 15.75 GiB")
    assert " fits " in " ".join(row_by_target["v5e-8"])
    assert " ".join(row_by_target["v5e-8"]).endswith("estimate unchanged")
    assert "does not divide the 16 sequences" in " ".join(row_by_target["cpu:3"])
    assert "shape of Qwen/Qwen2.5-1.5B: from the table of published models" in captured.err
    reports = json.loads((isolated_folder / "plans.json").read_text())
    assert [report["target"] for report in reports] == ["4090", "v5e-8", "t4"]
    # The printed settings are those of the report.
    assert reports[0]["suggestions"][0]["setting"] in captured.out


def test_batches_that_differ_by_target_are_both_shown(capsys: pytest.CaptureFixture):
    rule = '{"$class": "plimsoll.AcceleratorRule", "pattern": "cpu-2", "set": {"data.global_batch_size": 4}}'
    flags = ["--target=cpu:1,cpu:2", "--estimate", "--step_only", f"--config.accelerator_rules=[{rule}]"]
    assert plan.main([TINY, *flags]) == 0
    printed = capsys.readouterr().out
    first, second = re.findall(r"^estimates of (.*)$", printed, re.MULTILINE)
    assert (first.split()[0], second.split()[0]) == ("8", "4")
    assert f": {first} or {second}\n" in printed


@pytest.mark.pairs
def test_settings_in_the_table_fit(capsys: pytest.CaptureFixture):
    assert plan.main([MODEL, "--target=t4,4090", "--estimate"]) == 0
    settings = [word for word in rows(capsys.readouterr().out)["4090"] if word.startswith("--config.")]
    assert plan.main([MODEL, "--target=4090", "--estimate"]) == ExitCode.TOO_BIG
    assert plan.main([MODEL, "--target=4090", "--estimate", *settings]) == 0


def test_smallest_among_some_and_all_targets(capsys: pytest.CaptureFixture):
    assert plan.main([TINY, "--target=h100,t4,4090", "--smallest", "--estimate"]) == 0
    assert list(rows(capsys.readouterr().out)) == ["target", "t4"]
    assert plan.main([TINY, "--smallest", "--estimate"]) == 0
    assert list(rows(capsys.readouterr().out)) == ["target", compare_targets.list_candidates()[0]]


@pytest.mark.pairs
def test_largest_machine_is_shown_if_none_fits(capsys: pytest.CaptureFixture):
    one_row = "--config.data.global_batch_size=1"
    big = "--config=hf:meta-llama/Llama-3.1-405B"
    # With state and weights offloaded, a card would fit the model; the long sequence makes it too big for both.
    code = plan.main([big, "--target=t4,rtx3060", "--smallest", "--estimate", one_row, "--config.data.seq_len=65536"])
    assert code == ExitCode.TOO_BIG
    assert "none found" in capsys.readouterr().out


@pytest.mark.pairs
def test_table_is_compiled_if_a_compiler_is_installed(capsys: pytest.CaptureFixture):
    assert plan.main([TINY, "--target=cpu:1,cpu:2", "--step_only"]) == 0
    row_by_target = rows(capsys.readouterr().out)
    assert all("compiler unchanged" in " ".join(row_by_target[name]) for name in ("cpu:1", "cpu:2"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--target=4090,h101"], "unknown target 'h101'; nearest: h100"),
        (
            ["--target=4090,h100", "--compare=memory.remat=none,full"],
            "several targets cannot be combined with --compare",
        ),
        (["--target=4090,local"], "several targets cannot be combined with"),
        (["--target=,"], "--target=NAME is required"),
        (["--target=cpu:3,cpu:5", "--config.data.global_batch_size=4"], "does not divide"),
    ],
)
def test_user_errors(flags: list[str], said: str, capsys: pytest.CaptureFixture):
    assert plan.main([TINY, "--estimate", *flags]) == ExitCode.USAGE
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.pairs
def test_every_shape_makes_a_config_without_a_file():
    for hub_id in load_published_models():
        for kind in ("hf", "lora", "qlora"):
            config = configs.load(f"{kind}:{hub_id.upper()}", shape_only=True)
            assert config.pretrained.path == f"shape:{hub_id}"


def test_hub_cache_takes_precedence_over_the_table(isolated_folder: Path):
    facts = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1}
    facts |= {"num_attention_heads": 2, "intermediate_size": 96, "vocab_size": 128, "dtype": "float32"}
    files = isolated_folder / "files"
    files.mkdir()
    (files / "config.json").write_text(json.dumps(facts))
    fill_cache(isolated_folder / "cache", Repository("model", "meta-llama/Llama-3.1-8B", files))
    config = configs.load("hf:meta-llama/Llama-3.1-8B", shape_only=True)
    assert config.pretrained.path == f"hf://meta-llama/Llama-3.1-8B@{COMMIT}"
    assert config.model.dim == 64


def test_training_needs_the_files(isolated_folder: Path):
    with pytest.raises(FileNotFoundError, match="not in the cache of the Hub"):
        configs.load("hf:meta-llama/Llama-3.1-8B")


def test_an_unknown_name_has_the_nearest():
    count = len(load_published_models())
    with pytest.raises(OSError, match=rf"has {count} models; did you mean meta-llama/Llama-3.1-8B"):
        configs.load("hf:meta-lama/Llama-3.1-8B", shape_only=True)
    # A revision refers to the Hub, and the table has no commits.
    with pytest.raises(OSError, match="not in the cache of the Hub"):
        configs.load("hf:meta-llama/Llama-3.1-8B@main", shape_only=True)


@pytest.mark.pairs
def test_a_plan_in_python_takes_the_name(isolated_folder: Path):
    plan_of_name = pl.plan("lora:Qwen/Qwen2.5-0.5B", "h100", estimate=True)
    assert plan_of_name.fits
    config = pl.load_config("lora:Qwen/Qwen2.5-0.5B", {"data.global_batch_size": "32"}, shape_only=True)
    assert pl.plan(config, "h100", estimate=True).peak_bytes > plan_of_name.peak_bytes
    with pytest.raises((ConfigError, OSError)):
        pl.load_config("lora:Qwen/Qwen2.5-0.5B")
