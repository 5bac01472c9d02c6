"""--data=hf://datasets/ORG/NAME: the files of a Hub data set that are used for training and for evaluation."""

import json
import re
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from plimsoll import configs
from plimsoll.configs.data_flag import with_data
from plimsoll.framework.config import target_of
from plimsoll.framework.data.preferences import PairSource
from plimsoll.framework.data.recognize import recognized
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


def names_of(source) -> list[str]:
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
def test_parts_by_names(data_set, names: list[str], train: list[str], held_out: list[str] | None):
    data_set(*names)
    data = recognized(URL)
    assert names_of(data.source) == train
    assert names_of(data.held_out) == (held_out or train)
    assert ("split" in data.source) == (held_out is None)
    assert recognized(PINNED).source == data.source, "the config names the commit"
    assert recognized("hf://acme/code").source == data.source


def test_pairs_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    empty_cache(tmp_path, monkeypatch)
    rows = [{"prompt": f"{number}?", "chosen": "yes", "rejected": "no"} for number in range(200)]
    (tmp_path / "files").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "files/train.parquet")
    fill_cache(tmp_path / "cache", Repository("dataset", "acme/code", tmp_path / "files"))
    data = recognized(URL)
    assert target_of(data.source) is PairSource
    assert names_of(data.source) == names_of(data.held_out) == ["train.parquet"]
    parts = [len(list(source.instantiate().documents())) for source in (data.source, data.held_out)]
    assert sum(parts) == 200
    assert 0 < parts[1] < 30


def test_parts_by_the_card(data_set):
    data_set("data/a-1.jsonl", "data/a-2.jsonl", "data/b.jsonl", "data/c.jsonl", "train.jsonl", card=SPLIT_FILES)
    data = recognized(URL)
    assert names_of(data.source) == ["data/a-1.jsonl", "data/a-2.jsonl"]
    assert names_of(data.held_out) == ["data/b.jsonl", "data/c.jsonl"]
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
    assert names_of(recognized(URL + path).source) == train


@pytest.mark.parametrize(
    ("card", "path", "message"),
    [
        (
            "\n- {config_name: a, data_files: a}\n- {config_name: b, data_files: b}\n",
            "",
            f"2 subsets: choose one by {URL}/a",
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
        ("\n- {config_name: a, data_files: nothing/*}\n", "", "no file matches nothing/*, as its card says"),
        (
            "\n- {config_name: a, data_files: [{split: train}]}\n",
            "",
            "the head of the data set's card cannot be read: 'path'",
        ),
        ("\n- [}\n", "", "the head of the data set's card cannot be read: while parsing"),
        ("", "/nowhere", f"{PINNED}/nowhere does not exist: the data set has "),
        (
            "",
            "/pictures",
            "pictures holds no data that is known (.png): expected Parquet, JSON lines or .txt; the Hub may",
        ),
        ("", "/array.json", "array.json is one JSON value; expected a JSON object on each line"),
    ],
)
def test_mistakes(data_set, tmp_path: Path, card: str, path: str, message: str):
    (tmp_path / "files").mkdir()
    (tmp_path / "files/array.json").write_text("[\n1,\n2]\n")
    data_set("a.jsonl", "pictures/a.png", card=card)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        recognized(URL + path)


def test_the_form_of_models_is_answered_with_that_of_data_sets():
    with pytest.raises(
        ValueError, match=r"--data=hf:acme/code: a data set of the Hub is --data=hf://datasets/acme/code"
    ):
        with_data(configs.load("stdlib-tiny"), "hf:acme/code", [])


def test_of_a_cache_without_a_list_only_what_is_there_is_known(data_set):
    data_set("a.jsonl", "b.jsonl", cached=["a.jsonl"], lists=False)
    data = recognized(URL)
    assert names_of(data.source) == ["a.jsonl"]
    assert "(by the cache alone: HF_HUB_OFFLINE is set)" in data.line


def test_a_missing_file_is_an_error_before_anything_is_compiled(data_set):
    data_set("train-0.jsonl", "train-1.jsonl", "val.jsonl", cached=["train-0.jsonl"])
    with pytest.raises(FileNotFoundError, match=r"train-1.jsonl is not in the cache .* HF_HUB_OFFLINE is set"):
        with_data(configs.load("stdlib-tiny"), URL, [])
