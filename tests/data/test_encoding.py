"""Tokenization by several processes: it writes the same files as one process, and leaves nothing behind."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from plimsoll.framework.config import config_for
from plimsoll.framework.data import encoding
from plimsoll.framework.data.held_out import TextPart
from plimsoll.framework.data.sources import DataSource, JsonLines, Parquet, TextFiles
from plimsoll.framework.data.tokenize import write_tokens
from plimsoll.framework.data.tokenizers import BPETokenizer, ByteTokenizer, Tokenizer
from plimsoll.launch import prepare

TEXTS = [f"document {number}: " + "some words, or more words " * (number % 7) for number in range(60)] + [""]


class Letters(Tokenizer):
    """A user's own tokenizer, which cannot be pickled; its ids need 32 bits."""

    def __init__(self):
        self.vocab_size = 1 << 17
        self.eos_id = 0
        self.digest = "letters"
        self.id_of = lambda letter: ord(letter)

    def encode_batch(self, texts):
        return [np.array([self.id_of(letter) for letter in text], np.uint32) for text in texts]


def bpe(folder: Path) -> Tokenizer:
    """Return a byte-level BPE tokenizer with 300 ids."""
    tokenizer = BPETokenizer(vocab_size=300)
    tokenizer.prepare(folder, lambda budget: iter(TEXTS), write=True)
    return tokenizer


def sources(folder: Path) -> Iterator[DataSource]:
    """Yield a source of every kind."""
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "a.parquet")
    (folder / "a.txt").write_text("<|end|>".join(TEXTS))
    yield JsonLines(paths=[str(folder / "a.jsonl.gz")])
    yield Parquet(paths=[str(folder / "a.parquet")] * 2)
    yield TextFiles(paths=[str(folder / "a.txt")], separator="<|end|>")
    yield TextPart(source=config_for(TextFiles, paths=[str(folder / "a.txt")]), split="validation")


def write_and_read(source: DataSource, tokenizer: Tokenizer, out: Path, workers: int) -> tuple[bytes, bytes]:
    """Return the contents of a token file and its sidecar."""
    with encoding.start_workers(tokenizer, workers) as encode:
        reports = list(write_tokens(source, tokenizer, out, encode))
    assert reports
    return out.read_bytes(), out.with_suffix(".json").read_bytes()


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.pairs
@pytest.mark.parametrize("make", [bpe, lambda folder: Letters(), lambda folder: ByteTokenizer()])
def test_files_do_not_depend_on_the_worker_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make):
    tokenizer = make(tmp_path)
    monkeypatch.setattr(encoding, "_WORKER_BATCH", 100)
    for source in sources(tmp_path):
        by_one = write_and_read(source, tokenizer, tmp_path / "one.bin", 1)
        by_three = write_and_read(source, tokenizer, tmp_path / "three.bin", 3)
        assert by_three == by_one
        assert by_one[0]
    assert "TOKENIZERS_PARALLELISM" not in os.environ


class Threads(Letters):
    """Encodes a text as one id per thread of the worker; as no ids if the tokenizers library may start threads."""

    def encode_batch(self, texts):
        status = Path("/proc/self/status").read_text()
        threads = int(status.partition("Threads:")[2].split()[0])
        return [np.ones(threads if os.environ["TOKENIZERS_PARALLELISM"] == "false" else 0, np.uint32) for _ in texts]


def test_each_worker_has_one_thread():
    with encoding.start_workers(Threads(), 2) as encode:
        (batch,) = encode(["a", "b"])
    assert batch.tokens == 2 * (1 + 1), "a separator and one id for each text"


def test_default_workers_follow_the_core_count(monkeypatch: pytest.MonkeyPatch):
    for cores, workers in ((1, 1), (7, 1), (8, 8), (64, 64)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert encoding.default_workers() == workers


def test_few_batches_are_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoding, "_WORKER_BATCH", 1)
    read = 0

    def documents() -> Iterator[str]:
        nonlocal read
        for text in TEXTS:
            read += 1
            yield text

    with encoding.start_workers(bpe(tmp_path), 2) as encode:
        batches = encode(documents())
        next(batches)
        assert read == 4, "two for each worker"


def test_many_workers_report_damage_like_one_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nnot json\n')
    source = f'--config.data.source.paths=["{tmp_path}/a.jsonl"]'
    kind = "--config.data.source=plimsoll.JsonLines"
    tokenizer = "--config.data.tokenizer=plimsoll.BPETokenizer"
    (tmp_path / "bpe").mkdir()
    bpe(tmp_path / "bpe")
    fields = [f"{tokenizer}", "--config.data.tokenizer.vocab_size=300"]
    path = f"--config.data.tokenizer.path={tmp_path}/bpe/tokenizer.json"
    errors = []
    for workers in (1, 2):
        flags = [kind, source, "--config.data.validation={}", *fields, path, f"--workers={workers}"]
        assert prepare.main(["--config=nanogpt-cpu", *flags, f"--out={tmp_path}/out"]) == 2
        errors.append(capsys.readouterr().err)
    assert errors[0] == errors[1]
    assert "a.jsonl, line 2 (byte 14): not JSON" in errors[0]
    assert not (tmp_path / "out").exists()
    assert prepare.main(["--config=nanogpt-cpu", "--workers=0", f"--out={tmp_path}/out"]) == 2
    assert "--workers=0: expected at least 1" in capsys.readouterr().err


@pytest.mark.pairs
@pytest.mark.parametrize("target", ["worker", "parent", "group", "parent by SIGKILL"])
def test_all_worker_processes_end_with_the_run(tmp_path: Path, target: str):
    (tmp_path / "bpe").mkdir()
    bpe(tmp_path / "bpe")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text * 50}) + "\n" for text in TEXTS) * 100)
    command = [sys.executable, "-m", "plimsoll", "prepare", "--config=nanogpt-cpu", f"--data={tmp_path}/a.jsonl"]
    command += ["--config.data.tokenizer=plimsoll.BPETokenizer"]
    command += ["--config.data.tokenizer.vocab_size=300", f"--config.data.tokenizer.path={tmp_path}/bpe/tokenizer.json"]
    command += ["--workers=2", f"--out={tmp_path}/out"]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    limit = time.monotonic() + 60
    while len(children(parent.pid)) < 2:
        assert time.monotonic() < limit
        time.sleep(0.02)
    workers = children(parent.pid)
    if target == "worker":
        os.kill(workers[1], signal.SIGKILL)
    elif target == "parent":
        os.kill(parent.pid, signal.SIGTERM)
    elif target == "group":
        os.killpg(parent.pid, signal.SIGINT)
    else:
        os.kill(parent.pid, signal.SIGKILL)
    _, error = parent.communicate(timeout=60)
    last_line = error.splitlines()[-1]
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < limit
        time.sleep(0.02)
    expected = {"worker": 1, "parent": 143, "group": 130, "parent by SIGKILL": -9}
    assert parent.returncode == expected[target]
    if target == "worker":
        assert last_line.startswith("error: one of 2 tokenizer processes was killed by SIGKILL")
        assert "Traceback" not in error
    if target != "parent by SIGKILL":
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "bpe"]
