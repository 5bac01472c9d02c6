"""Random mutations of every kind of file that a user may supply: each is read, or refused with a message.

A file with its own checksum is never read with other content.
"""

import gzip
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from plimsoll import configs
from plimsoll.extras.flows.image_source import ImageFolder
from plimsoll.framework import families
from plimsoll.framework.batch_transforms.stored_reference import StoredRows
from plimsoll.framework.batch_transforms.teacher_files import TeacherFacts, TeacherOutputs, TeacherRows, TeacherWriter
from plimsoll.framework.data.detect_format import detect_format
from plimsoll.framework.data.files import FileHashes
from plimsoll.framework.data.sources import TextFiles, TokenMemmap
from plimsoll.framework.data.tokenize import write_tokens
from plimsoll.framework.data.tokenizers import ByteTokenizer
from plimsoll.framework.metrics.jsonl import read_metrics
from plimsoll.framework.program import stored_config
from plimsoll.framework.run.user_errors import is_user_error
from plimsoll.framework.weights.directory import Directory
from plimsoll.framework.weights.export import export_model
from plimsoll.launch.status import _table, status
from tests.support import pretrained, small

ROWS = [{"text": f'row {number}, said "so".', "title": "a"} for number in range(30)]
CHATS = [
    {"messages": [{"role": "user", "content": f"what is {n}?"}, {"role": "assistant", "content": f"it is {n}"}]}
    for n in range(30)
]
Read = Callable[[Path], Any]
# Mutations per file; set MUTATIONS=500 for more.
COUNT = int(os.environ.get("MUTATIONS", "40"))


def documents(path: Path) -> list[str]:
    """Return the training and held-out documents of `--data=PATH`."""
    found = detect_format(str(path))
    parts = [found.source, found.held_out]
    tokenizer = ByteTokenizer()
    texts = []
    for part in parts:
        source = part.instantiate()
        if isinstance(source, TokenMemmap):
            texts.append(str(source.open(tokenizer, FileHashes()).read(0, 5)))
        else:
            texts += list(source.documents())
    return texts


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), stream)
    return stream.getvalue()


def npz() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, a=np.zeros((3, 4, 4, 1), np.uint8))
    return stream.getvalue()


def png() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(stream, "PNG")
    return stream.getvalue()


# File name: (function that makes its content, function that reads its folder).
DATA: dict[str, tuple[Callable[[], bytes], Read]] = {
    "rows.jsonl": (lambda: lines(ROWS), lambda folder: documents(folder / "rows.jsonl")),
    "chats.jsonl": (lambda: lines(CHATS), lambda folder: documents(folder / "chats.jsonl")),
    "rows.parquet": (lambda: parquet(ROWS), lambda folder: documents(folder / "rows.parquet")),
    "chats.parquet": (lambda: parquet(CHATS), lambda folder: documents(folder / "chats.parquet")),
    "rows.csv": (
        lambda: b"text,number\n" + b"".join(b'"a ""row"" of %d",%d\n' % (n, n % 2) for n in range(30)),
        lambda folder: documents(folder / "rows.csv"),
    ),
    "rows.jsonl.gz": (lambda: gzip.compress(lines(ROWS)), lambda folder: documents(folder / "rows.jsonl.gz")),
    "text.txt": (lambda: b"some lines\nof text\n" * 30, lambda folder: documents(folder / "text.txt")),
    "images.npz": (npz, lambda folder: ImageFolder(path=str(folder)).load()),
    "image.png": (png, lambda folder: ImageFolder(path=str(folder)).load()),
}


def mutate(content: bytes, draw: random.Random) -> bytes:
    """Return the content truncated, changed, zeroed, with bytes inserted, or replaced by something else."""
    kind = draw.randrange(12)
    at = draw.randrange(max(1, len(content)))
    if kind == 0:
        return content[:at]
    if kind == 1:
        changed = bytearray(content)
        for _ in range(draw.choice([1, 1, 8])):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        return bytes(changed)
    if kind == 2:
        stop = min(len(content), at + draw.randrange(1, 64))
        return content[:at] + bytes(stop - at) + content[stop:]
    if kind == 3:
        return content[:at] + draw.randbytes(draw.randrange(1, 16)) + content[at:]
    if kind == 4:
        return b""
    if kind == 5:
        return b"\x00" * len(content)
    if kind == 6:
        return b"[" * 100_000
    if kind == 7:
        return b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    if kind == 8:
        return draw.choice([b"[]", b"{}", b"null", b"1", b'"x"', b"NaN", b"[[]]", b'{"a": 1e999}'])
    if kind == 9:
        return b"\xff\xfe" + content
    return change_json(content, draw)


VALUES: list[Any] = [None, True, [], {}, 0, -1, 1.5, 10**30, "", "x", "\x1b[2J", [[1]], {"a": {}}, float("nan"), "../x"]


def change_json(content: bytes, draw: random.Random) -> bytes:
    """Replace one value of the JSON document, or of one line; for other content, swap the two halves."""
    rows = content.split(b"\n")
    index = draw.randrange(len(rows))
    for part, join in ((content, None), (rows[index], index)):
        try:
            value = json.loads(part)
        except (ValueError, RecursionError):
            continue
        new = json.dumps(with_other_value(value, draw)).encode()
        if join is None:
            return new
        return b"\n".join([*rows[:join], new, *rows[join + 1 :]])
    middle = len(content) // 2
    return content[middle:] + content[:middle]


def with_other_value(value: Any, draw: random.Random) -> Any:
    """Return the value with one randomly chosen part replaced or removed."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        if draw.random() < 0.2:
            return {key: part for key, part in value.items() if key != name}
        return {**value, name: with_other_value(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        index = draw.randrange(len(value))
        return [*value[:index], with_other_value(value[index], draw), *value[index + 1 :]]
    return draw.choice(VALUES)


def find_problems(
    good: Path, name: str, read: Read, folder: Path, is_same: Callable[[Any], bool] | None = None
) -> list[str]:
    """Return the mutations of a file that were neither read correctly nor refused with a user error.

    Args:
        good: a readable folder.
        name: the file in it to mutate.
        read: reads a folder.
        folder: working directory.
        is_same: whether the result of `read` matches the good folder; None if this cannot be checked.
    """
    content = (good / name).read_bytes()
    problems = []
    for seed in range(COUNT):
        place = folder / f"{Path(name).name}-{seed}"
        shutil.copytree(good, place)
        (place / name).write_bytes(mutate(content, random.Random(f"{name} {seed}")))
        try:
            found = read(place)
        except Exception as error:
            if not is_user_error(error):
                problems.append(f"{name}, seed {seed}: {type(error).__name__}: {error}")
        else:
            if is_same is not None and not is_same(found):
                problems.append(f"{name}, seed {seed}: read with other content")
        shutil.rmtree(place)
    return problems


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a published model."""
    folder = tmp_path_factory.mktemp("published") / "model"
    config = small.llama(vocab_size=512)
    program = small.program(small.experiment(config))
    facts, family = families.export_config(config)
    export_model(folder, program.experiment.model, program.init().parameter, family, facts)
    pretrained.write(folder, "chatml")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.7}')
    return folder


def read_model(folder: Path) -> Any:
    """Read the directory's config, the headers of its tensors, and a conversation."""
    config = configs.load(f"hf:{folder}")
    directory = Directory(folder)
    config.pretrained.instantiate().places(config.model.instantiate())
    tokenizer = config.data.tokenizer.instantiate()
    tokenizer.prepare(folder, None, write=False)
    tokenizer.render([{"role": "user", "content": "Hello"}])
    return tokenizer.encode_prompt("Hello"), len(directory.home)


MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.mark.pairs
@pytest.mark.parametrize("name", DATA)
def test_data(name: str, tmp_path: Path):
    make, read = DATA[name]
    good = tmp_path / "good"
    good.mkdir()
    (good / name).write_bytes(make())
    read(good)
    assert find_problems(good, name, read, tmp_path) == []


@pytest.mark.pairs
@pytest.mark.parametrize("name", MODEL_FILES)
def test_published_models(name: str, model: Path, tmp_path: Path):
    read_model(model)
    assert find_problems(model, name, read_model, tmp_path) == []


@pytest.mark.pairs
def test_mutated_shard_index(model: Path, tmp_path: Path):
    good = tmp_path / "good"
    shutil.copytree(model, good)
    index = {"metadata": {}, "weight_map": dict.fromkeys(Directory(model).home, "a.safetensors")}
    (good / "model.safetensors").rename(good / "a.safetensors")
    (good / "model.safetensors.index.json").write_text(json.dumps(index))
    Directory(good)
    assert find_problems(good, "model.safetensors.index.json", Directory, tmp_path) == []


# --- files with their own checksums: never read with other content ----------------------------------------------------

FACTS = TeacherFacts(weights="w" * 64, tokenizer="t" * 64, vocab_size=99, seq_len=4, top_k=2, data={"train": "d" * 64})


@pytest.mark.pairs
@pytest.mark.parametrize("name", ["teacher.json", "rows.bin", "ids.bin", "log_probs.bin", "tails.bin", "checksums.bin"])
def test_a_teachers_answers(name: str, tmp_path: Path):
    rng = np.random.default_rng(0)
    rows = TeacherOutputs(*(rng.integers(0, 99, array.shape).astype(array.dtype) for array in FACTS.empty(6).arrays))
    with TeacherWriter(tmp_path / "good", FACTS).open() as writer:
        writer.append(rows)
        writer.commit()

    expected = [array.tobytes() for array in rows.arrays]

    def read(folder: Path) -> tuple[TeacherFacts, list[bytes]]:
        found = TeacherRows(folder)
        # The keys of the rows that the run needs.
        numbers = [found.number_by_key.get(key.tobytes()) for key in rows.keys]
        if None in numbers:
            # A run without this row would refuse to continue.
            return found.facts, expected
        return found.facts, [
            array.tobytes() for array in found.take([number for number in numbers if number is not None]).arrays
        ]

    assert read(tmp_path / "good") == (FACTS, expected)
    # A run compares the stored facts with its own.
    problems = find_problems(
        tmp_path / "good", name, read, tmp_path, lambda found: found[0] != FACTS or found[1] == expected
    )
    assert problems == []


@pytest.mark.pairs
@pytest.mark.parametrize("name", ["train.bin", "train.json"])
def test_tokens(name: str, tmp_path: Path):
    (tmp_path / "text.txt").write_text("some lines\nof text\n" * 30)
    good = tmp_path / "good"
    good.mkdir()
    path = good / "train.bin"
    for _ in write_tokens(TextFiles(paths=[str(tmp_path / "text.txt")]), ByteTokenizer(), path):
        pass

    def read(folder: Path) -> bytes:
        stream = TokenMemmap(path=str(folder / "train.bin")).open(ByteTokenizer(), FileHashes())
        return stream.read(0, stream.num_tokens).tobytes()

    expected = read(good)
    assert find_problems(good, name, read, tmp_path, lambda found: found == expected) == []


@pytest.mark.pairs
@pytest.mark.parametrize("name", ["reference.json", "train.f32"])
def test_a_stored_reference(name: str, tmp_path: Path):
    rows: Any = {"train": SimpleNamespace(digest="d", num_rows=6)}

    def open_rows(folder: Path) -> StoredRows:
        return StoredRows(folder, rows, 4, "weights")

    writer = open_rows(tmp_path / "good")
    writer.begin(restart=True)
    writer.write("train", 0, np.ones((4, 4), np.float32))
    writer.write("train", 4, np.ones((2, 4), np.float32))

    def read(folder: Path) -> bytes | None:
        found = open_rows(folder)
        # The run computes the reference again.
        if found.difference is not None or found.has_changed:
            return None
        return found.open()["train"].tobytes()

    expected = read(tmp_path / "good")
    assert expected is not None
    problems = find_problems(tmp_path / "good", name, read, tmp_path, lambda found: found is None or found == expected)
    assert problems == []


# --- files that a run writes ------------------------------------------------------------------------------------------


@pytest.mark.pairs
def test_a_stored_config(tmp_path: Path):
    good = tmp_path / "good"
    good.mkdir()
    (good / "config.json").write_text(configs.load("stdlib-tiny").to_json())

    def read(folder: Path) -> Any:
        return stored_config.read(folder, lambda line: None).instantiate()

    assert find_problems(good, "config.json", read, tmp_path) == []


@pytest.mark.pairs
def test_mutated_metrics_heartbeats_and_hashes(tmp_path: Path):
    facts = {"process": 0, "num_processes": 1, "host": "h", "pid": 1, "attempt": 1, "interval": 1.0, "phase": "step"}
    facts |= {"time": 1.0, "moved": 1.0, "limited": True, "step": 1, "max_steps": 2, "loss": 1.0, "hang_seconds": None}
    good = tmp_path / "good"
    contents = {
        "metrics.jsonl": lines([{"step": step, "train/loss": 1.0} for step in range(9)]),
        "health/process-00000.json": json.dumps({**facts, "goodput": {"step": 1.0}}).encode(),
        "data/hashes.json": json.dumps({f"sha256 {tmp_path}/x": [[1, 2], "0" * 64]}).encode(),
    }
    for name, content in contents.items():
        (good / name).parent.mkdir(parents=True, exist_ok=True)
        (good / name).write_bytes(content)
    readers: dict[str, Read] = {
        "metrics.jsonl": lambda folder: read_metrics(folder / "metrics.jsonl"),
        "health/process-00000.json": lambda folder: _table(status(folder, 2.0)),
        "data/hashes.json": lambda folder: FileHashes(folder / "data/hashes.json").save(),
    }
    problems = []
    for name, read in readers.items():
        read(good)
        problems += find_problems(good, name, read, tmp_path)
    assert problems == []
