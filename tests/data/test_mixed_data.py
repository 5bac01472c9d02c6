"""Several --data flags: weights, names, kinds that share a batch, and every wrong combination as one line."""

import json
from pathlib import Path

import numpy as np
import pytest

from plimsoll import configs
from plimsoll.configs.data_flag import with_data
from plimsoll.framework.data.mixed_data import name_paths, parse_weights
from plimsoll.framework.data.sources import Mixture
from plimsoll.launch import cli, train

STAGED = """
from plimsoll import DataStage, config_for
from plimsoll.configs import load

def staged():
    config = load("nanogpt-cpu")
    config.data.stages = {"5": config_for(DataStage, seq_len=32)}
    return config
"""
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Texts, JSON lines, pairs, a judged answer and tokens."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("\n".join(f"line {number} of {name}" for number in range(200)))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(200)))
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({**PAIR, "prompt": str(n)}) + "\n" for n in range(50)))
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    np.arange(2000, dtype="<u2").tofile(tmp_path / "tokens.bin")
    return tmp_path


def test_sources_have_their_weights_and_names(files: Path):
    config, lines = with_data(configs.load("nanogpt-cpu"), [f"{files}/a.txt", f"{files}/rows.jsonl"], [], weights="3,1")
    assert list(config.data.validation) == ["a", "rows"]
    assert config.data.source.weights == [3.0, 1.0]
    assert lines[0].endswith("0.75 of the sequences, evaluated as a")
    mixture = config.data.source.instantiate()
    assert isinstance(mixture, Mixture)
    assert [type(one).__name__ for one in mixture.sources] == ["TextPart", "TextPart"]
    config, _ = with_data(configs.load("nanogpt-cpu"), [f"{files}/a.txt", f"{files}/b.txt"], [])
    assert config.data.source.weights == [1.0, 1.0]
    # A source with weight 0 is only evaluated.
    config, _ = with_data(configs.load("nanogpt-cpu"), [f"{files}/a.txt", f"{files}/b.txt"], [], weights="0,2")
    assert config.data.instantiate().stages[0].weights == (0.0, 1.0)
    # One path stays as it was.
    config, _ = with_data(configs.load("nanogpt-cpu"), f"{files}/a.txt", [])
    assert list(config.data.validation) == ["held_out"]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["code/", "prose.txt"], ["code", "prose"]),
        (["a/train.jsonl", "b/train.jsonl.gz"], ["a", "b"]),
        (["a/x.jsonl", "b/x.jsonl"], ["a_x", "b_x"]),
        (["raw/*.jsonl", "s3://bucket/my data/*.txt"], ["raw", "my_data"]),
        (["hf://datasets/ORG/NAME@main", "hf://datasets/ORG/other"], ["NAME", "other"]),
        (["train/", "train"], ["data", "data_2"]),
        (["x.txt", "./x.txt"], ["x", "x_2"]),
    ],
)
def test_names_are_different_and_no_reserved_ones(paths: list[str], names: list[str]):
    assert name_paths(paths) == names


def test_weights_are_numbers_of_any_scale():
    assert parse_weights("0.75,.25", 2) == [0.75, 0.25]
    assert parse_weights("3e2,0,1", 3) == [300.0, 0.0, 1.0]


def test_data_replaces_the_stages_of_a_config(files: Path):
    (files / "mine.py").write_text(STAGED)
    parser = cli.Parser("train", None)
    parser.add_data()
    flags = [f"--config={files}/mine.py:staged", "--data_at=5:global_batch_size=4"]
    stage = parser.parse(flags).config.data.stages["5"]
    assert (stage.seq_len, stage.global_batch_size) == (32, 4)
    stage = parser.parse([*flags, f"--data={files}/a.txt"]).config.data.stages["5"]
    assert (stage.seq_len, stage.global_batch_size) == (None, 4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--data=a.txt", "--data=b.txt", "--data_weights=1,-1"],
            "--data_weights=1,-1: expected numbers of at least 0",
        ),
        (["--data=a.txt", "--data=b.txt", "--data_weights=1,nan"], "given nan"),
        (["--data=a.txt", "--data=b.txt", "--data_weights=1,inf"], "given inf"),
        (["--data=a.txt", "--data=b.txt", "--data_weights=1,much"], "given 'much'"),
        (["--data=a.txt", "--data=b.txt", "--data_weights=0,0"], "expected at least one weight above 0"),
        (["--data=a.txt", "--data=b.txt", "--data_weights=1,1e-9"], "differ at most by a factor of 1,000,000"),
        (["--data=a.txt", "--data=b.txt", "--data_weights=1"], "one weight for each --data, 2 in total, given 1"),
        (["--data=a.txt", "--data=b.txt", "--data_weights="], "given ''"),
        (["--data_weights=1,2"], "--data_weights=1,2 without --data"),
        (["--data=a.txt", "--data=none.txt"], "none.txt"),
        (["--data=a.txt", "--data=a.txt"], "--data=a.txt is given twice"),
        (["--data=a.txt", "--data=pairs.jsonl"], "a.txt has text and pairs.jsonl has preference pairs, which cannot"),
        (["--data=a.txt", "--data=chats.jsonl"], "--data=chats.jsonl contains conversations"),
        (["--data=a.txt", "--data=tokens.bin"], "--data=tokens.bin has tokens, and other data is text"),
        (["--data=hf:ORG/NAME", "--data=a.txt"], "pass --data=hf://datasets/ORG/NAME"),
        (["--data=a.txt", "--data_at=5:weights=1,2"], "data.stages.5.weights: data.source is no Mixture"),
    ],
)
def test_wrong_combinations_are_one_line_before_anything_is_tokenized(
    flags: list[str], message: str, files: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("plimsoll.framework.data.pipeline.write_tokens", lambda *a: pytest.fail("tokenized"))
    monkeypatch.chdir(files)
    assert train.main(["--config=nanogpt-cpu", "--workdir=run", *flags]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
    assert not (files / "run").exists()
