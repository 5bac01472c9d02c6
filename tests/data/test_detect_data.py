"""--data=PATH: the kind of the user's data is detected, and the data is split into two disjoint parts."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from plimsoll import configs
from plimsoll.configs.data_flag import with_data
from plimsoll.framework.config import config_for, get_target
from plimsoll.framework.data.detect_format import detect_format
from plimsoll.framework.data.files import FileHashes
from plimsoll.framework.data.held_out import TextPart, TokenPart
from plimsoll.framework.data.sources import JsonLines, TextFiles
from plimsoll.framework.data.tokenizers import BPETokenizer, NoTokenizer
from plimsoll.framework.data.vocabulary import count_vocabulary
from plimsoll.launch import train

SPLITS = ("train", "validation")


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_both_splits(**fields) -> list[list[str]]:
    """Return the documents of both parts of a source."""
    return [list(TextPart(split=split, **fields).documents()) for split in SPLITS]


# --- the split -------------------------------------------------------------------------------------------------------


def test_few_files_hold_out_the_end_from_a_line_start(tmp_path: Path):
    texts = ["".join(f"line {line} of file {number}\n" for line in range(100)) for number in range(3)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    source = config_for(TextFiles, paths=[f"{tmp_path}/*.txt"])
    train_texts, held_out_texts = read_both_splits(source=source, validation_fraction=0.1)
    assert [a + b for a, b in zip(train_texts, held_out_texts, strict=True)] == texts
    assert all(text.startswith("line ") and 0.05 < len(text) / len(texts[0]) < 0.15 for text in held_out_texts)


def test_one_line_is_cut_within(tmp_path: Path):
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    source = config_for(TextFiles, paths=[f"{tmp_path}/a.txt"])
    assert read_both_splits(source=source, validation_fraction=0.1) == [["0123456789" * 9], ["0123456789"]]


@pytest.mark.parametrize("count", [20, 200])
def test_many_files_hold_out_whole_files_anywhere(tmp_path: Path, count: int):
    parts = []
    for folder in (tmp_path / "a", tmp_path / "moved"):
        folder.mkdir()
        for number in range(count):
            (folder / f"{number}.txt").write_text(f"file {number}")
        source = config_for(TextFiles, paths=[f"{folder}/*.txt"])
        parts.append(read_both_splits(source=source))
    (train_texts, held_out_texts), moved_parts = parts
    assert moved_parts == [train_texts, held_out_texts]
    assert sorted(train_texts + held_out_texts) == sorted(f"file {number}" for number in range(count))
    assert 1 <= len(held_out_texts) < count / 5


def test_listing_calls_do_not_grow_with_the_file_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    listings = []
    list_files = TextFiles.files
    monkeypatch.setattr(TextFiles, "files", lambda source: listings.append(source) or list_files(source))
    counts = []
    for count in (5, 50):
        for number in range(count):
            (tmp_path / f"{number}.txt").write_text(f"file {number}\n" * 100)
        listings.clear()
        part = TextPart(source=config_for(TextFiles, paths=[f"{tmp_path}/*.txt"]))
        assert list(part.documents())
        counts.append(len(listings))
    assert counts[0] == counts[1]


def test_equal_documents_are_in_the_same_split(tmp_path: Path):
    rows = [{"text": f"document {number % 50}"} for number in range(200)]
    # The last document of each file also appears elsewhere.
    for number in range(4):
        write_rows(tmp_path / f"{number}.jsonl", rows[50 * number : 50 * number + 40 + number])
    source = config_for(JsonLines, paths=[f"{tmp_path}/*.jsonl"])
    train_texts, held_out_texts = read_both_splits(source=source, validation_fraction=0.2)
    assert len(train_texts + held_out_texts) == 40 + 41 + 42 + 43
    assert train_texts
    assert held_out_texts
    assert not set(train_texts) & set(held_out_texts)


@pytest.mark.parametrize("fraction", [0.05, 0.95])
def test_few_documents_hold_out_exactly_one(tmp_path: Path, fraction: float):
    for count in (2, 3, 5):
        rows = [{"text": f"document {number}"} for number in range(count)] * 2
        file = write_rows(tmp_path / f"{count}.jsonl", rows)
        source = config_for(JsonLines, paths=[str(file)])
        train_texts, held_out_texts = read_both_splits(source=source, validation_fraction=fraction)
        assert sorted(train_texts + held_out_texts) == sorted(row["text"] for row in rows)
        assert train_texts
        assert held_out_texts
        assert not set(train_texts) & set(held_out_texts)


def test_only_equal_documents_cannot_be_split(tmp_path: Path):
    file = write_rows(tmp_path / "a.jsonl", [{"text": "the same"}] * 9)
    with pytest.raises(ValueError, match="all documents of the data are equal"):
        read_both_splits(source=config_for(JsonLines, paths=[str(file)]))


def test_equal_files_are_in_the_same_split(tmp_path: Path):
    for number in range(200):
        (tmp_path / f"{number}.txt").write_text(f"file {number % 40}")
    train_texts, held_out_texts = read_both_splits(source=config_for(TextFiles, paths=[f"{tmp_path}/*.txt"]))
    assert len(train_texts + held_out_texts) == 200
    assert held_out_texts
    assert not set(train_texts) & set(held_out_texts)


def test_tokens_are_cut_in_two(tmp_path: Path):
    tokens = np.arange(1000, dtype=np.uint16)
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    tokenizer = NoTokenizer(vocab_size=1000)
    streams = [
        TokenPart(path=f"{tmp_path}/a.bin", split=split, validation_fraction=0.25).open(tokenizer, FileHashes())
        for split in SPLITS
    ]
    assert [stream.num_tokens for stream in streams] == [750, 250]
    np.testing.assert_array_equal(np.concatenate([stream.read(0, stream.num_tokens) for stream in streams]), tokens)
    np.testing.assert_array_equal(streams[1].read(10, 12), [760, 761])
    assert streams[0].digest != streams[1].digest


# --- data autodetection -----------------------------------------------------------------------------------------------


def test_text_folder_is_detected(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("a.md", "sub/b.py", ".git/config", ".hidden"):
        (tmp_path / name).write_text("text\n" * 10)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    data = detect_format(str(tmp_path))
    assert data.source.source.paths == [f"{tmp_path}/a.md", f"{tmp_path}/sub/b.py"]
    assert data.line == f"data: text from {tmp_path}: 2 files, 5% held out; left out: 1 .png"
    assert data.has_text


def test_many_files_go_into_the_config_as_globs_unless_these_name_others_too(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    for number in range(10):
        (tmp_path / f"sub/{number}.md").write_text("text")
        (tmp_path / f"{number}.txt").write_text("text")
    globs = [f"{tmp_path}/**/*.md", f"{tmp_path}/**/*.txt"]
    assert detect_format(str(tmp_path)).source.source.paths == globs
    (tmp_path / "empty.txt").write_text("")
    assert len(detect_format(str(tmp_path)).source.source.paths) == 20


@pytest.mark.parametrize(
    ("names", "training", "validation"),
    [
        (["train.txt", "val.txt"], ["train.txt"], ["val.txt"]),
        (["train/a.txt", "test/a.txt"], ["train/a.txt"], ["test/a.txt"]),
        (["train-0.txt", "train-1.txt", "validation.txt"], ["train-0.txt", "train-1.txt"], ["validation.txt"]),
        (["trainer.txt", "value.txt"], None, None),
        (["train.txt", "other.txt", "val.txt"], None, None),
        (["train.txt", "train2.txt"], None, None),
    ],
)
def test_splits_are_detected_from_names(
    tmp_path: Path, names: list[str], training: list[str] | None, validation: list[str]
):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    data = detect_format(str(tmp_path))
    if training is None:
        assert data.source.split == "train"
        return
    assert data.source.paths == [f"{tmp_path}/{name}" for name in training]
    assert data.held_out.paths == [f"{tmp_path}/{name}" for name in validation]


def test_json_lines_and_their_field(tmp_path: Path):
    file = write_rows(tmp_path / "a.jsonl", [{"id": "7", "story": "once", "n": 1}])
    data = detect_format(str(file))
    assert (data.source.source.field, data.source.source.paths) == ("story", [str(file)])
    assert data.line.endswith("; the text is in 'story' (of id, story)")
    compressed = tmp_path / "b.json.gz"
    compressed.write_bytes(gzip.compress(b'{"body": "long", "x": 1}\n{"body": "y"}\n'))
    assert detect_format(str(compressed)).source.source.field == "body"
    renamed = file.rename(tmp_path / "a.json")
    assert detect_format(str(renamed)).source.source.field == "story"


def test_parquet(tmp_path: Path):
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": [1], "content": ["text"]}), file)
    data = detect_format(f"{tmp_path}/*.parquet")
    assert (data.source.source.column, data.source.source.paths) == ("content", [str(file)])


def test_conversations(tmp_path: Path):
    file = write_rows(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hello"}]}])
    data = detect_format(str(file))
    assert data.line == f"data: conversations from {file}: 1 file, 5% held out"
    assert (data.source.split, data.held_out.split) == ("train", "validation")
    with pytest.raises(
        ValueError, match=r"conversations, which need the chat template of a model; pass --config=hf:DIR"
    ):
        with_data(configs.load("stdlib-tiny"), str(file), [])


def test_token_files(tmp_path: Path):
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(b"\1\0" * 100)
    data = detect_format(str(tmp_path))
    assert (data.source.path, data.held_out.path) == (f"{tmp_path}/train.bin", f"{tmp_path}/val.bin")
    assert not data.has_text
    config, lines = with_data(configs.load("gpt2-124m"), f"{tmp_path}/train.bin", [])
    assert config.data.tokenizer == configs.load("gpt2-124m").data.tokenizer
    assert len(lines) == 1


def test_config_without_a_tokenizer_trains_one_by_default(tmp_path: Path):
    (tmp_path / "a.txt").write_text(" ".join(f"word{chr(97 + letter)}" for letter in range(26)))
    named = configs.load("gpt2-124m")
    named.data.tokenizer.vocab_size = 270
    unchanged = named.copy()
    config, lines = with_data(named, str(tmp_path), [])
    assert (get_target(config.data.tokenizer), config.data.tokenizer.vocab_size) == (BPETokenizer, 270)
    assert lines[1] == "tokenizer: byte-level BPE of 270 ids, trained on this text"
    config, lines = with_data(named, str(tmp_path), ["data.tokenizer.path"])
    assert config.data.tokenizer == named.data.tokenizer
    assert named == unchanged, "the named config stays as it was"


# --- short texts ------------------------------------------------------------------------------------------------------

# {text: number of ids: the bytes, the separator, and all merges until each word is one token}
IDS_OF_TEXTS = {"hi": 257 + 1, "abc abc abc": 257 + 2 + 1, "abcd\n" * 1000: 257 + 3}


@pytest.mark.parametrize("text", list(IDS_OF_TEXTS))
def test_vocabulary_is_bounded_by_the_texts_merges(text: str):
    assert count_vocabulary([text], 2048, "<|endoftext|>") == IDS_OF_TEXTS[text]
    assert count_vocabulary([text], 258, "<|endoftext|>") == 258


def test_large_text_is_read_only_as_far_as_needed():
    def texts():
        for number in range(1000):
            assert number < 3, "read on, although each text has 400 new words"
            yield " ".join(f"{chr(97 + number)}{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(400))

    assert count_vocabulary(texts(), 1000, "<|endoftext|>") == 1000


@pytest.mark.parametrize(
    ("overridden", "ids", "rows"),
    [
        ([], 260, 320),
        (["model.dim", "data.seq_len"], 260, 320),
        (["model.vocab_size"], 260, 4096),
        (["data.tokenizer.vocab_size"], 4096, 4096),
    ],
)
def test_a_small_text_makes_tokenizer_and_model_smaller(tmp_path: Path, overridden: list[str], ids: int, rows: int):
    (tmp_path / "a.txt").write_text("abcd\n" * 1000)
    config, lines = with_data(configs.load("stdlib-tiny"), str(tmp_path), overridden)
    assert (config.data.tokenizer.vocab_size, config.model.vocab_size) == (ids, rows)
    told = [line for line in lines if "of 260 ids, not 4,096, because this text supports no more" in line]
    assert len(told) == (ids < 4096)
    if ids < 4096:
        # The tokenizer refuses a text that yields fewer ids than its config has.
        config.data.tokenizer.instantiate().prepare(tmp_path, lambda budget: iter(["abcd\n" * 950]), write=True)


def test_too_little_text_is_reported_and_more_text_trains(tmp_path: Path):
    file = tmp_path / "a.txt"
    # Each text has different letters, and so a different tokenizer.
    few_tokens = r"data.source: \d+ tokens are too few: .*seq_len=256 needs 257 and a batch 2,049 tokens"
    few_sequences = r"has 4 sequences of data.seq_len=256, too few for one batch, which needs 2,049 tokens"
    for letters, num_lines, message in [("abc", 50, few_tokens), ("abcd", 600, few_sequences), ("abcde", 1500, "")]:
        file.write_text(f"{letters}\n" * num_lines)
        config, _ = with_data(configs.load("stdlib-tiny"), str(file), [])
        pipeline = config.data.instantiate()
        if not message:
            pipeline.setup(tmp_path / "run")
            continue
        with pytest.raises(ValueError, match=rf"{message} with data.global_batch_size=8: about [\d.]+ KiB of text"):
            pipeline.setup(tmp_path / "run")


# --- user errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({}, "the folder .* has no files"),
        ({"a.png": b"\0\1"}, r"has no data in a known format \(.png\): expected UTF-8 text, .jsonl, .parquet, .csv or"),
        ({"a.jsonl": b"not json\n"}, r"a.jsonl, line 1 \(byte 0\): not JSON"),
        ({"a.jsonl": b"[1]\n"}, r"a.jsonl, line 1 \(byte 0\): expected a JSON object, given list"),
        ({"a.jsonl": b"\n"}, r"a.jsonl has no rows"),
        ({"a.jsonl": b'{"n": 1}\n'}, r"a.jsonl: no field of its first row has text: n"),
        ({"a.parquet": b"PAR1"}, r"a.parquet: damaged, truncated or not Parquet"),
        ({"a.bin": b"\0\0", "b.bin": b"\0\0"}, "2 token files: select them with one glob"),
    ],
)
def test_user_errors_come_before_compilation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], contents: dict[str, bytes], message: str
):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    workdir = tmp_path / "run"
    assert train.main(["--config=stdlib-tiny", f"--data={folder}", f"--workdir={workdir}"]) == 2
    error = capsys.readouterr().err
    assert re.match(f"error: --data: .*{message}", error), error
    assert not workdir.exists()


def test_the_nearest_name(tmp_path: Path):
    (tmp_path / "corpus.txt").write_text("text")
    with pytest.raises(FileNotFoundError, match=r"--data: .*corpsu.txt does not exist; did you mean 'corpus.txt'\?"):
        with_data(configs.load("stdlib-tiny"), f"{tmp_path}/corpsu.txt", [])


def test_token_files_use_the_tokenizer_next_to_them(tmp_path: Path):
    (tmp_path / "train.bin").write_bytes(np.arange(1000, dtype=np.uint16).tobytes())
    named = configs.load("stdlib-tiny")
    config, lines = with_data(named, f"{tmp_path}/train.bin", [])
    assert config.data.tokenizer.path is None
    tokenizer_file = tmp_path / "tokenizer.json"
    tokenizer_file.write_text("{}")
    config, lines = with_data(named, f"{tmp_path}/train.bin", [])
    assert config.data.tokenizer.path == str(tokenizer_file)
    assert lines[-1] == f"tokenizer: {tokenizer_file}, found next to the tokens"
    config, lines = with_data(named, f"{tmp_path}/train.bin", ["data.tokenizer.path"])
    assert config.data.tokenizer.path is None
