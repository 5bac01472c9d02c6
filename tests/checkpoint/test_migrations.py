"""A run of an older version, whose config names modules that have moved since: it can be evaluated and resumed."""

import json
import re
import tarfile
from pathlib import Path

import pytest

from plimsoll.framework.config import Config, config_for, migrations
from plimsoll.framework.schedules.memory import Memory
from plimsoll.launch import configs as configs_command
from plimsoll.launch import evaluate, train
from tests.support.runs import losses, write_text

ARCHIVE = Path(__file__).parent / "older" / "before_rooms.tar.gz"
FILES = '{"$class": "plimsoll.TextFiles", "paths": ["text/%s.txt"]}'
RULE = '{"$class": "plimsoll.AcceleratorRule", "pattern": "cpu", "set": {"trainer.log_every": 1}}'
FLAGS = [
    "--config=nanogpt-cpu",
    "--workdir=run",
    "--config.trainer.save_every=4",
    "--config.trainer.keep=1",
    "--config.trainer.sample_tokens=0",
    "--config.model.dim=16",
    "--config.model.stack.num_layers=2",
    "--config.model.stack.pattern.0.attention.num_heads=2",
    "--config.model.embed.max_positions=32",
    "--config.model.vocab_size=257",
    "--config.data.seq_len=32",
    "--config.data.global_batch_size=8",
    '--config.data.tokenizer={"$class": "plimsoll.ByteTokenizer"}',
    f"--config.data.source={FILES % 'train'}",
    f'--config.data.validation={{"held": {FILES % "valid"}}}',
    f"--config.accelerator_rules=[{RULE}]",
]


@pytest.fixture
def older_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workdir of a run that stopped after step 4, next to its text, in the current directory."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.setenv("TINY_TEXT", "")
    write_text(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def test_the_archive_has_names_that_moved(older_run: Path):
    config = json.loads((older_run / "config.json").read_text())
    assert config["$class"] == "framework.experiment.Experiment"
    assert config["learner"]["rules"][0]["$class"] == "framework.rules.Rule"


def test_it_is_evaluated(older_run: Path, capsys: pytest.CaptureFixture[str]):
    assert evaluate.main([f"--workdir={older_run}", "--files=text/valid.txt"]) == 0
    assert "bits per byte" in capsys.readouterr().out


@pytest.mark.pairs
def test_resumes_without_reporting_renamed_classes(older_run: Path, capsys: pytest.CaptureFixture[str]):
    assert train.main([*FLAGS, "--config.trainer.max_steps=6"]) == 0
    printed = capsys.readouterr().out
    assert "resumed from step 4" in printed
    changes = [line for line in printed.splitlines() if "config changed since the checkpoint: " in line]
    assert any("config.trainer.max_steps: 4 -> 6" in change for change in changes)
    # New fields are reported; classes that moved are not.
    assert not any("$class" in change or "framework." in change for change in changes)
    assert sorted(losses(older_run)) == [4, 6]


RENAMED_ARCHIVE = Path(__file__).parent / "older" / "before_renames.tar.gz"
DPO_FLAGS = [
    "--config=dpo-tiny",
    "--workdir=run",
    "--config.trainer.save_every=4",
    "--config.trainer.keep=1",
    "--config.trainer.sample_tokens=0",
    "--config.model.dim=16",
    "--config.model.stack.num_layers=2",
    "--config.model.stack.pattern.0.attention.num_heads=2",
    "--config.model.vocab_size=257",
    "--config.data.seq_len=128",
    "--config.data.global_batch_size=8",
    "--config.data.source.every=400",
    "--config.data.tokenizer=ByteTokenizer",
    "--config.data.validation={}",
    "--config.memory.update=in_backward",
    "--config.memory.optimizer_state=pinned_host",
    "--config.learner.clip_mode=previous_norm",
]
CURRENT_NAMES = [
    "--config.memory.prefetch=layer",
    "--config.learner.scope=layer",
    "--config.batch_transform.kind=offloaded",
    "--config.health.offload_self_test=False",
    "--config.compiler.use_accelerator_options=False",
]
OLD_NAMES = [
    "--config.memory.prefetch=unit",
    "--config.learner.scope=unit",
    "--config.companion.kind=hosted",
    "--config.health.canary=False",
    "--config.compiler.of_accelerator=False",
]


def test_stored_names_load_without_a_warning(caplog):
    rollouts = {"$class": "framework.companions.rollouts.Rollouts", "reward": "framework.companions.rewards.exact"}
    reference = {"$class": "framework.companions.reference.Reference", "kind": "hosted"}
    assert Config.from_dict(rollouts).reward == "plimsoll.framework.batch_transforms.rewards.exact"
    config = Config.from_dict({"$class": "framework.experiment.Experiment", "companion": reference})
    assert config.batch_transform.kind == "offloaded"
    assert not caplog.records


def test_typed_old_names_warn_once(caplog):
    migrations._warn_once.cache_clear()
    config = config_for(Memory)
    for _ in range(2):
        config.prefetch = "unit"
        assert config.prefetch == "layer"
        config.override("prefetch", "piece")
        assert config.prefetch == "chunk"
    assert [record.getMessage() for record in caplog.records] == [
        "prefetch = unit was renamed; use layer",
        "prefetch = piece was renamed; use chunk",
    ]


@pytest.mark.pairs
@pytest.mark.parametrize("names", [CURRENT_NAMES, OLD_NAMES], ids=["current", "old"])
def test_run_with_old_field_names_resumes(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog
):
    with tarfile.open(RENAMED_ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    migrations._warn_once.cache_clear()
    assert '"companion"' in (tmp_path / "run" / "config.json").read_text()
    assert train.main([*DPO_FLAGS, *names, "--config.trainer.max_steps=5"]) == 0
    printed = capsys.readouterr().out
    assert "resumed from step 4" in printed
    changes = [line for line in printed.splitlines() if "config changed since the checkpoint: " in line]
    # Only the flag of this start differs, and fields that exist since then: none was given another name or value.
    differences = [change.partition("checkpoint: ")[2] for change in changes]
    newer = [difference for difference in differences if ": (absent) -> " in difference]
    assert [difference for difference in differences if difference not in newer] == ["config.trainer.max_steps: 4 -> 5"]
    assert "config.model.stack.pattern[0].attention.output_gate: (absent) -> false" in newer
    defaults = (
        " null",
        " false",
        " {}",
        ' "microbatch"',
        '.context_parallel: (absent) -> "auto"',
        ".pipe_chunks: (absent) -> 1",
        '.experts: (absent) -> "device"',
        ".chunk_tokens: (absent) -> 0",
        '.keep_best_mode: (absent) -> "min"',
    )
    assert all(difference.endswith(defaults) for difference in newer), newer
    warnings = [record.getMessage() for record in caplog.records if "was renamed" in record.getMessage()]
    expected = [] if names is CURRENT_NAMES else ["companion", "prefetch = unit", "scope = unit", "canary"]
    assert all(sum(name in warning for warning in warnings) == 1 for name in expected), warnings
    assert bool(warnings) == (names is OLD_NAMES)


def test_a_users_class_of_the_same_name_keeps_its_fields_and_values(caplog):
    class Memory:
        def __init__(self, *, prefetch: str = "none", companion: str = ""): ...

    config = config_for(Memory, prefetch="unit")
    config.override("prefetch", "piece")
    assert (config.prefetch, config.current_path("companion.x")) == ("piece", "companion.x")
    assert not caplog.records


def test_an_old_path_on_the_command_line_is_shown_under_its_current_name(capsys: pytest.CaptureFixture[str]):
    assert configs_command.main(["show", "dpo-tiny", "--config.companion.kind=hosted"]) == 0
    assert re.search(r"batch_transform\.kind = offloaded +<- command line", capsys.readouterr().out)
