"""auto.json, where a run stores what memory.auto chose. It is untrusted: a workdir may come from someone else."""

import json
from pathlib import Path
from typing import Any

import pytest

from plimsoll.extras.autotune.run_tuning import read_choice
from plimsoll.extras.autotune.settings import Machine, Setting, TunedSettings, find_fixed_paths, with_settings
from plimsoll.framework.config import Config
from plimsoll.framework.run.request import TUNING_FILE
from tests.support import small


def config() -> Config:
    return small.experiment(batch=8)


def write(folder: Path, *settings: tuple[Any, Any], **fields: Any) -> Path:
    """Write a record with these settings, and replace other fields of the choice."""
    chosen = tuple(Setting(*pair) for pair in settings)
    machine = Machine("cpu:1", 1, 2**30, None)
    choice = TunedSettings(machine, chosen, (), (), peak=1, host=0, host_need=0, seconds=None, moved=0.0, compiled=True)
    path = folder / TUNING_FILE
    path.write_text(json.dumps({"asked": "digest", "choice": choice.to_json() | fields}))
    return path


def test_stored_choice_is_reused(tmp_path: Path) -> None:
    path = write(tmp_path, ("learner.accumulate", "2"), ("memory.remat", "full"))
    record = read_choice(path, config(), frozenset())
    assert record is not None
    assert with_settings(config(), TunedSettings.from_json(record["choice"]).settings).learner.accumulate == 2


@pytest.mark.parametrize(
    "setting",
    [
        ("model", "evil.py:make"),
        ("learner.optimizer", "evil.make"),
        ("batch_transform.reward", "evil.py:reward"),
        ("data.source", "evil.Source"),
        ("trainer.hooks", '[{"$class": "evil.Hook"}]'),
        ("trainer.compilation_cache", "elsewhere"),
        ("data.global_batch_size", "1"),
        ("memory.remat\x1b[2J", "full"),
        ("memory.remat", "no such policy"),
        ("learner.accumulate", "2.5"),
        ("learner.accumulate", {"$class": "evil.make"}),
        (["learner.accumulate"], "2"),
    ],
    ids=repr,
)
def test_fields_outside_the_search_are_ignored(
    tmp_path: Path, setting: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, ("mesh.data", "1"), setting)
    assert read_choice(path, config(), frozenset()) is None
    assert TUNING_FILE in caplog.text
    assert "\x1b" not in caplog.text


def test_fields_that_the_user_set_are_not_changed(tmp_path: Path) -> None:
    path = write(tmp_path, ("learner.accumulate", "2"))
    assert read_choice(path, config(), find_fixed_paths(config(), ["learner.accumulate"])) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"asked": 1, "choice": []}', "[" * 100_000, "\xff"])
def test_a_file_that_is_no_record_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / TUNING_FILE).write_text(text, encoding="latin-1")
    assert read_choice(tmp_path / TUNING_FILE, config(), frozenset()) is None
    assert read_choice(tmp_path / "none.json", config(), frozenset()) is None
