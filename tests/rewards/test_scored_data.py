"""Sequences to score: encoded as in transformers and packed without splitting, with ends and labels; and bad rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from plimsoll import configs
from plimsoll.configs.data_flag import with_data
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.pretrained_tokenizer import PretrainedTokenizer
from plimsoll.framework.data.scored import LabeledSource, RankedSource, collect_class_names
from plimsoll.framework.data.sources import TextFiles
from plimsoll.framework.data.tokenizers import ByteTokenizer
from tests.support import pretrained

SEPARATOR = 256


def write_rows(path: Path, *rows: Any) -> Path:
    """Write rows as JSON lines and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pipeline(tmp_path: Path, source: Config, **fields: Any) -> DataPipeline:
    """Return a data pipeline after setup; by default with bytes as tokens, 16 columns and one row per batch."""
    fields = {"tokenizer": config_for(ByteTokenizer), "seq_len": 16, "global_batch_size": 1, **fields}
    data = config_for(DataPipeline, source=source, **fields).instantiate()
    data.setup(tmp_path / "workdir")
    return data


def get_sequences(data: DataPipeline) -> list[tuple[list[int], float]]:
    """Return (tokens, label) of each sequence of all rows, in order, after checking positions, weights and targets."""
    found = []
    rows = data.train_leaves[0].rows
    for index in range(rows.num_rows):
        row = rows.row(index)
        assert {name: (a.shape, str(a.dtype)) for name, a in row.items()} == {
            name: (shape[1:], dtype) for name, (shape, dtype) in data.arrays().items()
        }
        for segment in range(1, row["segments"].max() + 1):
            (columns,) = np.nonzero(row["segments"] == segment)
            tokens = row["tokens"][columns]
            assert row["positions"][columns].tolist() == list(range(len(columns)))
            assert row["ends"][columns].tolist() == [0.0] * (len(columns) - 1) + [1.0]
            assert row["targets"][columns].tolist() == [*tokens[1:], 0]
            assert row["weights"][columns].all()
            label = row["labels"][columns[-1]] if "labels" in row else 0
            found.append((tokens.tolist(), float(label)))
        padding = row["segments"] == 0
        assert not any(array[padding].any() for array in row.values())
    return found


def test_labels_by_name_and_number_with_the_whole_text_as_input(tmp_path: Path):
    file = write_rows(tmp_path / "a.jsonl", {"text": "abc", "label": "no"}, {"text": "defg", "label": 1})
    source = config_for(LabeledSource, paths=[str(file)], classes=["no", "yes"])
    expected = [([SEPARATOR, *b"abc"], 0.0), ([SEPARATOR, *b"defg"], 1.0)]
    assert sorted(get_sequences(pipeline(tmp_path, source))) == sorted(expected)


def test_a_long_text_is_cut_and_counted(tmp_path: Path):
    file = write_rows(tmp_path / "a.jsonl", {"text": "a" * 30, "label": "x"}, {"text": "b", "label": "y"})
    data = pipeline(tmp_path, config_for(LabeledSource, paths=[str(file)], classes=["x", "y"]))
    assert sorted(get_sequences(data)) == [([SEPARATOR, *b"a" * 15], 0.0), ([SEPARATOR, *b"b"], 1.0)]
    assert "1 sequences truncated to 16 tokens" in data.source_report()[0].note


def test_pairs_share_a_row_and_long_ones_are_skipped(tmp_path: Path):
    rows = [
        {"prompt": "p", "chosen": "c1", "rejected": "r1"},
        {"prompt": "p", "chosen": "c" * 9, "rejected": "r" * 9},
        {"chosen": "xa", "rejected": "xb"},
    ]
    file = write_rows(tmp_path / "a.jsonl", *rows)
    data = pipeline(tmp_path, config_for(RankedSource, paths=[str(file)]))
    found = [tokens for tokens, _ in get_sequences(data)]
    # As in TRL, a text ends with the end-of-text token, which is not added twice.
    texts = ["pc1", "pr1", "xa", "xb"]
    assert sorted(found) == sorted([[SEPARATOR, *text.encode(), SEPARATOR] for text in texts])
    assert all((found[i][1:2], found[i + 1][1:2]) in (([112],) * 2, ([120],) * 2) for i in (0, 2))
    assert found[0][2] in b"ca"
    assert "1 pairs skipped, of more than 16 tokens" in data.source_report()[0].note


def test_padding_at_the_end_is_not_scored_as_in_transformers(tmp_path: Path):
    file = write_rows(tmp_path / "a.jsonl", {"chosen": "abb", "rejected": "acb"})
    source = config_for(RankedSource, paths=[str(file)], append_eos=False, pad_token_id=ord("b"))
    data = pipeline(tmp_path, source)
    assert [tokens for tokens, _ in get_sequences(data)] == [[SEPARATOR, *b"a"], [SEPARATOR, *b"ac"]]


def test_conversations_are_rendered_whole_and_texts_encoded_as_transformers_does(tmp_path: Path):
    folder = pretrained.write(tmp_path / "llama3", "llama3")
    tokenizer = config_for(PretrainedTokenizer, path=str(folder), vocab_size=512)
    messages = [{"role": "user", "content": "who are you"}, {"role": "assistant", "content": "a model"}]
    file = write_rows(tmp_path / "a.jsonl", {"messages": messages, "label": 0}, {"text": "the fox", "label": 1})
    source = config_for(LabeledSource, paths=[str(file)], classes=["0", "1"])
    data = pipeline(tmp_path, source, tokenizer=tokenizer, seq_len=64)
    rendered, _ = data.tokenizer.render(messages)
    (encoding,) = data.tokenizer.encode_rendered([rendered])
    expected = [(encoding.ids, 0.0), (data.tokenizer.encode_prompt("the fox"), 1.0)]
    assert sorted(get_sequences(data)) == sorted(expected)


def test_splits_are_disjoint_and_parquet_is_read(tmp_path: Path):
    rows = [{"text": f"text {number}", "label": number % 2} for number in range(60)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    parts = []
    for split in ("train", "validation"):
        source = LabeledSource(
            paths=[str(tmp_path / "a.parquet")], classes=["0", "1"], split=split, validation_fraction=0.3
        )
        parts.append({json.loads(document)[1][0] for document in source.documents()})
    assert parts[0] | parts[1] == {row["text"] for row in rows}
    assert not parts[0] & parts[1]
    assert all(parts)


def test_pairs_with_one_prompt_are_in_the_same_split(tmp_path: Path):
    rows = [{"prompt": f"{n % 20} ", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(100)]
    file = write_rows(tmp_path / "a.jsonl", *rows)
    prompts = []
    for split in ("train", "validation"):
        source = RankedSource(paths=[str(file)], split=split, validation_fraction=0.3)
        prompts.append({json.loads(document)[1][0].split()[0] for document in source.documents()})
    assert prompts[0] | prompts[1] == {str(n) for n in range(20)}
    assert not prompts[0] & prompts[1]
    assert all(prompts)


def test_classes_are_a_files_sorted_names(tmp_path: Path):
    by_name = write_rows(tmp_path / "a.jsonl", *({"text": "x", "label": label} for label in ("b", "a", "b")))
    assert collect_class_names([str(by_name)]) == ["a", "b"]
    by_number = write_rows(tmp_path / "b.jsonl", *({"text": "x", "label": label} for label in (10, 2, 0)))
    assert collect_class_names([str(by_number)]) == ["0", "2", "10"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x", "label": "c"}, "line 2 .*: field 'label' is 'c'; expected one of a, b"),
        ({"text": "x", "label": 2}, "line 2 .*: field 'label' is 2; expected one of a, b"),
        ({"text": "x", "label": True}, "line 2 .*: field 'label' is True; expected the name of a class or its number"),
        ({"text": "x", "label": 0.5}, "line 2 .*: field 'label' is 0.5"),
        ({"text": "x"}, "line 2 .*: no field 'label'"),
        ({"text": 3, "label": "a"}, "line 2 .*: field 'text' is int, expected text"),
        ({"text": "", "label": "a"}, "line 2 .*: field 'text' is empty"),
        ({"label": "a"}, "line 2 .*: expected a row with text, messages, conversations, .*, given one with label"),
        ([1], "line 2 .*: expected a JSON object, given list"),
        (
            {"messages": [{"role": "user", "content": "x"}], "label": "a"},
            "line 2 .*: messages need the chat template of a PretrainedTokenizer; data.tokenizer is ByteTokenizer",
        ),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: Any, message: str):
    file = write_rows(tmp_path / "a.jsonl", {"text": "x", "label": "a"}, row)
    with pytest.raises(ValueError, match=rf"data.source: .*a.jsonl, {message}"):
        pipeline(tmp_path, config_for(LabeledSource, paths=[str(file)], classes=["a", "b"]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "x"}, "line 1 .*: no field 'rejected'"),
        ({"chosen": "x", "rejected": 1}, "line 1 .*: field 'rejected' is int, expected text or messages"),
        ({"chosen": "x", "rejected": "x"}, "line 1 .*: both answers are the same"),
        ({"chosen": "x", "rejected": ""}, "line 1 .*: the rejected answer is empty"),
    ],
)
def test_a_bad_pair_is_named(tmp_path: Path, row: Any, message: str):
    file = write_rows(tmp_path / "a.jsonl", row)
    with pytest.raises(ValueError, match=rf"data.source: .*a.jsonl, {message}"):
        pipeline(tmp_path, config_for(RankedSource, paths=[str(file)]))


def test_sources_that_do_not_go_together_are_refused(tmp_path: Path):
    labelled = config_for(LabeledSource, paths=["a"], classes=["a", "b"])
    other = config_for(LabeledSource, paths=["a"], classes=["a", "c"])
    for validation, message in [
        (other, r"data.validation.x.classes = \['a', 'c'\]; expected \['a', 'b'\]"),
        (config_for(TextFiles, paths=["a"]), "data.validation.x"),
        (config_for(RankedSource, paths=["a"]), "data.validation.x"),
    ]:
        config = config_for(
            DataPipeline,
            source=labelled,
            validation={"x": validation},
            tokenizer=config_for(ByteTokenizer),
            seq_len=16,
            global_batch_size=1,
        )
        with pytest.raises(ValueError, match=message):
            config.instantiate()


def test_data_on_the_command_line_gives_a_classifier_its_classes(tmp_path: Path):
    rows = [{"text": f"text {number}", "label": "xyzw"[number % 4]} for number in range(400)]
    file = write_rows(tmp_path / "a.jsonl", *rows)
    config, lines = with_data(configs.load("classify-tiny"), str(file), [])
    assert config.data.source.classes == ["w", "x", "y", "z"]
    assert config.model.head.num_labels == 4
    assert "texts of 4 classes (w, x, y, z)" in lines[0]
    assert (config.data.source.split, config.data.validation["held_out"].split) == ("train", "validation")
    config.instantiate()


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("reward-tiny", {"text": "x", "label": 1}, "a.jsonl, line 1 .*: no field 'chosen'"),
        ("classify-tiny", {"text": "x"}, "a.jsonl, line 1 .*: no field 'label'"),
        ("classify-tiny", {"text": "x", "label": "a"}, "field 'label' is a everywhere; expected two classes or more"),
    ],
)
def test_data_in_another_format_is_refused(tmp_path: Path, name: str, row: Any, message: str):
    file = write_rows(tmp_path / "a.jsonl", row)
    with pytest.raises(ValueError, match=message):
        with_data(configs.load(name), str(file), [])
