"""--data=hf://datasets/ORG/NAME: the files of a Hub data set that are used for training and for evaluation."""

import json
import re
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from plimsoll import configs
from plimsoll.configs.data_flag import with_data
from plimsoll.framework.config import get_target
from plimsoll.framework.data.detect_format import detect_format
from plimsoll.framework.data.preferences import PairSource
from tests.support.hub import COMMIT, Repository, empty_cache, fill_cache

URL = "hf://datasets/acme/code"
PINNED = f"{URL}@{COMMIT}"
SPLIT_FILES = """
- config_name: default
  data_files:
  - {split: train, path: "data/a-*"}
  - {split: test, path: [data/b.jsonl, data/c.jsonl]}
"""


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """data_set(name, ..., card="...") puts a data set with these files into the cache; requests are forbidden."""
    empty_cache(tmp_path, monkeypatch)

    def make(*names: str, card: str = "", cached: list[str] | None = None, lists: bool = True) -> None:
        folder = tmp_path / "files"
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps({"text": f"text of {name}"}) + "\n")
        if card:
            (folder / "README.md").write_text(f"---\nlicense: mit\nconfigs:{card}---\n# Data\n")
        fill_cache(tmp_path / "cache", Repository("dataset", "acme/code", folder), cached, lists=lists)

    return make


def list_source_files(source) -> list[str]:
    """Return the files of a source, relative to the repository."""
    paths = source.paths if "paths" in source else source.source.paths
    return [path.removeprefix(f"{PINNED}/") for path in paths]


@pytest.mark.parametrize(
    ("names", "train", "held_out"),
    [
        (["train.jsonl", "validation.jsonl", "test.jsonl"], ["train.jsonl"], ["validation.jsonl"]),
        (["train/a.jsonl", "test/a.jsonl"], ["train/a.jsonl"], ["test/a.jsonl"]),
        (["data/train-0.jsonl", "data/train-1.jsonl"], ["data/train-0.jsonl", "data/train-1.jsonl"], None),
        (["train.jsonl", "val.jsonl", "extra.jsonl"], ["train.jsonl"], ["val.jsonl"]),
        (["a.jsonl", "b/c.jsonl", "script.py", ".hidden.jsonl"], ["a.jsonl", "b/c.jsonl"], None),
        (["a.json", "LICENSE.txt"], ["a.json"], None),
    ],
)
def test_splits_by_file_name(data_set, names: list[str], train: list[str], held_out: list[str] | None):
    data_set(*names)
    data = detect_format(URL)
    assert list_source_files(data.source) == train
    assert list_source_files(data.held_out) == (held_out or train)
    assert ("split" in data.source) == (held_out is None)
    assert detect_format(PINNED).source == data.source, "the config names the commit"
    assert detect_format("hf://acme/code").source == data.source


def test_hub_preference_pairs_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    empty_cache(tmp_path, monkeypatch)
    rows = [{"prompt": f"{number}?", "chosen": "yes", "rejected": "no"} for number in range(200)]
    (tmp_path / "files").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "files/train.parquet")
    fill_cache(tmp_path / "cache", Repository("dataset", "acme/code", tmp_path / "files"))
    data = detect_format(URL)
    assert get_target(data.source) is PairSource
    assert list_source_files(data.source) == list_source_files(data.held_out) == ["train.parquet"]
    parts = [len(list(source.instantiate().documents())) for source in (data.source, data.held_out)]
    assert sum(parts) == 200
    assert 0 < parts[1] < 30


def test_splits_by_the_dataset_card(data_set):
    data_set("data/a-1.jsonl", "data/a-2.jsonl", "data/b.jsonl", "data/c.jsonl", "train.jsonl", card=SPLIT_FILES)
    data = detect_format(URL)
    assert list_source_files(data.source) == ["data/a-1.jsonl", "data/a-2.jsonl"]
    assert list_source_files(data.held_out) == ["data/b.jsonl", "data/c.jsonl"]
    how = "2 files for training, 2 held out, by the splits of its card; left out: 1 .jsonl"
    assert data.line == f"data: JSON lines from {PINNED}: {how}"


@pytest.mark.parametrize(
    ("card", "path", "train"),
    [
        ("\n- {config_name: one, data_files: one/*}\n", "", ["one/train.jsonl"]),
        (
            "\n- {config_name: one, data_files: one/*}\n- {config_name: two, data_dir: two, default: true}\n",
            "",
            ["two/x.jsonl"],
        ),
        (
            "\n- {config_name: 1st, data_files: [one/*]}\n- {config_name: two, data_dir: two}\n",
            "/1st",
            ["one/train.jsonl"],
        ),
        ("\n- {config_name: a, data_files: one/*}\n- {config_name: b, data_dir: two}\n", "/two", ["two/x.jsonl"]),
        (
            "\n- {config_name: a, data_files: one/*}\n- {config_name: b, data_dir: two}\n",
            "/**/x.jsonl",
            ["two/x.jsonl"],
        ),
    ],
)
def test_subsets_and_paths(data_set, card: str, path: str, train: list[str]):
    data_set("one/train.jsonl", "two/x.jsonl", card=card)
    assert list_source_files(detect_format(URL + path).source) == train


@pytest.mark.parametrize(
    ("card", "path", "message"),
    [
        (
            "\n- {config_name: a, data_files: a}\n- {config_name: b, data_files: b}\n",
            "",
            f"2 subsets; choose one, such as {URL}/a",
        ),
        (
            "\n- {config_name: a, data_files: [{split: train_x, path: a}, {split: train_y, path: b}]}\n",
            "",
            "has 2 splits for tr",
        ),
        (
            "\n- {config_name: a, data_files: [{split: test, path: a}, {split: dev, path: b}]}\n",
            "",
            "has no splits for training",
        ),
        ("\n- {config_name: a, data_files: nothing/*}\n", "", "no file matches nothing/*, which its card lists"),
        (
            "\n- {config_name: a, data_files: [{split: train}]}\n",
            "",
            "the front matter of the dataset card cannot be read: 'path'",
        ),
        ("\n- [}\n", "", "the front matter of the dataset card cannot be read: while parsing"),
        ("", "/nowhere", f"{PINNED}/nowhere does not exist: the dataset has "),
        (
            "",
            "/pictures",
            "pictures has no data in a known format (.png): expected Parquet, JSON lines or .txt; the Hub may",
        ),
        ("", "/array.json", "array.json is one JSON value; expected a JSON object on each line"),
    ],
)
def test_user_errors(data_set, tmp_path: Path, card: str, path: str, message: str):
    (tmp_path / "files").mkdir()
    (tmp_path / "files/array.json").write_text("[\n1,\n2]\n")
    data_set("a.jsonl", "pictures/a.png", card=card)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        detect_format(URL + path)


def test_hub_model_url_suggests_the_dataset_url():
    with pytest.raises(
        ValueError, match=r"--data=hf:acme/code: for a data set of the Hub, pass --data=hf://datasets/acme/code"
    ):
        with_data(configs.load("stdlib-tiny"), "hf:acme/code", [])


def test_cache_without_a_file_list_uses_only_cached_files(data_set):
    data_set("a.jsonl", "b.jsonl", cached=["a.jsonl"], lists=False)
    data = detect_format(URL)
    assert list_source_files(data.source) == ["a.jsonl"]
    assert "(from the cache only: HF_HUB_OFFLINE is set)" in data.line


def test_a_missing_file_is_an_error_before_anything_is_compiled(data_set):
    data_set("train-0.jsonl", "train-1.jsonl", "val.jsonl", cached=["train-0.jsonl"])
    with pytest.raises(FileNotFoundError, match=r"train-1.jsonl is not in the cache .* HF_HUB_OFFLINE is set"):
        with_data(configs.load("stdlib-tiny"), URL, [])
