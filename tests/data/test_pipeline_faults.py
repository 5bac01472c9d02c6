"""What is wrong with the data is said before anything is compiled: the config path, the file, the place."""

import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from framework.config import config_for
from framework.data.sources import JsonLines, Mixture, Parquet, TextFiles, TokenMemmap
from framework.data.tokenizers import BPETokenizer, ByteTokenizer, NoTokenizer

B, S = 8, 32


def text(path: Path | str) -> object:
    return config_for(TextFiles, paths=[str(path)])


@pytest.mark.parametrize("source", [TextFiles, JsonLines, Parquet])
def test_a_missing_file_is_named_with_its_place_in_the_config(tmp_path: Path, pipeline, documents, source: type):
    with pytest.raises(FileNotFoundError, match=rf"^data.source: {tmp_path}/none.x does not exist"):
        pipeline(source=config_for(source, paths=[str(tmp_path / "none.x")]))
    documents()
    with pytest.raises(FileNotFoundError, match=rf"^data.validation.held: {tmp_path}/none.x does not exist"):
        pipeline(validation={"held": config_for(source, paths=[str(tmp_path / "none.x")])})


def test_a_missing_token_file_and_tokenizer_are_named(tmp_path: Path, pipeline, documents):
    with pytest.raises(FileNotFoundError, match=rf"^data.source: no file matches {tmp_path}/\*.bin"):
        pipeline(source=config_for(TokenMemmap, path=str(tmp_path / "*.bin")))
    documents()
    bpe = config_for(BPETokenizer, vocab_size=300, path=str(tmp_path / "tokenizer.json"))
    with pytest.raises(FileNotFoundError, match=rf"^data.tokenizer: {tmp_path}/tokenizer.json does not exist"):
        pipeline(tokenizer=bpe)


def test_the_place_inside_of_a_mixture_is_named(tmp_path: Path, pipeline, documents):
    documents()
    good, bad = text(tmp_path / "corpus/*.txt"), text(tmp_path / "none.txt")
    nested = config_for(Mixture, sources=[good, bad], weights=[1.0, 1.0])
    source = config_for(Mixture, sources=[good, nested], weights=[1.0, 1.0])
    with pytest.raises(FileNotFoundError, match=r"^data.source.sources.1.sources.1: .*none.txt"):
        pipeline(source=source)
    with pytest.raises(FileNotFoundError, match=r"^data.source.sources.1.sources.1: .*none.txt"):
        pipeline(source=source, tokenizer=config_for(BPETokenizer, vocab_size=300))


@pytest.mark.parametrize("content", ["", "\n"])
def test_an_empty_source_is_named(tmp_path: Path, pipeline, content: str):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"^data.source: the source holds no text"):
        pipeline(source=config_for(JsonLines, paths=[str(tmp_path / "x.jsonl")]))
    assert list((tmp_path / "workdir/data").iterdir()) == []


def test_too_little_text_names_both_numbers(tmp_path: Path, pipeline):
    (tmp_path / "x.txt").write_text("a" * 20)
    with pytest.raises(ValueError, match=r"^data.source: 21 tokens are too few: data.seq_len=32 needs 33"):
        pipeline(source=text(tmp_path / "x.txt"))
    (tmp_path / "x.txt").write_text("a" * (7 * S + 5))
    with pytest.raises(
        ValueError, match=r"^data.source: holds 7 sequences of data.seq_len=32, .*data.global_batch_size=8"
    ):
        pipeline(source=text(tmp_path / "x.txt"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"validation": {"train": 0}}, r"data.validation.train: expected a name"),
        ({"validation": {"a/b": 0}}, r"data.validation.a/b: expected a name"),
        ({"source": config_for(ByteTokenizer)}, r"data.source: expected a source .* given ByteTokenizer"),
        ({"validation": {"m": 1}}, r"data.validation.m: a Mixture has no end"),
    ],
)
def test_configs_that_make_no_pipeline(pipeline, fields: dict, message: str):
    file = text("x.txt")
    parts = [file, config_for(Mixture, sources=[file], weights=[1.0])]
    if "validation" in fields:
        fields = {"validation": {name: parts[which] for name, which in fields["validation"].items()}}
    with pytest.raises(ValueError, match=message):
        pipeline(setup=False, **fields)


def test_wrong_use_is_refused(documents, pipeline, tmp_path: Path):
    documents()
    built = pipeline(validation={"held": text(tmp_path / "corpus/*.txt")})
    with pytest.raises(ValueError, match=r"no validation set 'hold'; data.validation has held"):
        built.eval_batches("hold", range(B))
    with pytest.raises(ValueError, match=r"needs a local folder, given gs://bucket/run"):
        built.setup("gs://bucket/run")
    with pytest.raises(ValueError, match=r"^data.tokenizer: NoTokenizer cannot tokenize"):
        pipeline("w2", tokenizer=config_for(NoTokenizer, vocab_size=9))


# ---- damage


def damaged_jsonl(folder: Path) -> tuple[object, str]:
    path = folder / "x.jsonl"
    lines = [json.dumps({"text": f"document {i} " * 9}) + "\n" for i in range(50)]
    path.write_text("".join(lines)[:-30])
    return config_for(JsonLines, paths=[str(path)]), rf"{path}, line 50 \(byte \d+\): no JSON object"


def damaged_gzip(folder: Path) -> tuple[object, str]:
    path = folder / "x.txt.gz"
    path.write_bytes(gzip.compress(os.urandom(50_000).hex().encode())[:-2000])
    return text(path), rf"{path}: damaged or truncated after byte \d+ of its text"


def damaged_parquet(folder: Path) -> tuple[object, str]:
    import pyarrow
    from pyarrow import parquet

    path = folder / "x.parquet"
    parquet.write_table(pyarrow.table({"text": ["a document " * 9] * 500}), path)
    path.write_bytes(path.read_bytes()[:-100])
    return config_for(Parquet, paths=[str(path)]), rf"{path}: damaged, truncated or not Parquet"


def damaged_tokens(folder: Path) -> tuple[object, str]:
    path = folder / "x.bin"
    path.write_bytes(np.arange(5000, dtype="<u2").tobytes()[:-1])
    return config_for(TokenMemmap, path=str(path)), rf"{path}: ends within a token at byte 9998"


@pytest.mark.parametrize("damaged", [damaged_jsonl, damaged_gzip, damaged_parquet, damaged_tokens])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_damaged_files_are_named_with_the_place_and_nothing_is_cached(
    tmp_path: Path, pipeline, damaged, tokenizer: str
):
    source, message = damaged(tmp_path)
    if tokenizer == "bpe" and damaged is damaged_tokens:
        message = "^data.tokenizer: a BPE tokenizer cannot be trained on tokens"
    else:
        message = f"^data.source: {message}"
    chosen = config_for(ByteTokenizer) if tokenizer == "bytes" else config_for(BPETokenizer, vocab_size=300)
    with pytest.raises(ValueError, match=message):
        pipeline(source=source, tokenizer=chosen)
    assert [path.name for path in (tmp_path / "workdir").rglob("*") if path.is_file()] == []


def test_a_damaged_cache_is_reported_not_used(documents, pipeline, tmp_path: Path):
    documents()
    pipeline()
    (cached,) = (tmp_path / "workdir/data").glob("tokens-*/tokens.bin")
    data = bytearray(cached.read_bytes())
    data[10] ^= 1
    cached.write_bytes(data)
    with pytest.raises(ValueError, match=rf"^data.source: {cached}: garbled between byte 0 and byte {len(data)}"):
        pipeline()
    cached.write_bytes(data[:100])
    with pytest.raises(ValueError, match=rf"^data.source: {cached}: ends early at byte 100 .token 50."):
        pipeline()


def test_truncation_while_training_is_an_error_and_not_a_short_epoch(documents, pipeline, tmp_path: Path):
    documents()
    built = pipeline()
    (cached,) = (tmp_path / "workdir/data").glob("tokens-*/tokens.bin")
    with built.train_iterator(0, range(B)) as batches:
        next(batches)
        cached.write_bytes(cached.read_bytes()[:200])
        with pytest.raises(ValueError, match=rf"{cached}: ends at byte \d+, but it held"):
            list(itertools.islice(batches, 100))


def test_a_token_outside_of_the_vocabulary_is_located(tmp_path: Path, pipeline):
    tokens = np.zeros(5000, "<u2")
    tokens[4321] = 300
    tokens.tofile(tmp_path / "x.bin")
    with pytest.raises(ValueError, match=rf"^data.source: {tmp_path}/x.bin: token 300 at index 4321 \(byte 8642\)"):
        pipeline(source=config_for(TokenMemmap, path=str(tmp_path / "x.bin")))


def test_tokens_of_another_tokenizer_are_refused(documents, pipeline, tmp_path: Path):
    documents()
    pipeline(tokenizer=config_for(BPETokenizer, vocab_size=300))
    (cached,) = (tmp_path / "workdir/data").glob("tokens-*/tokens.bin")
    with pytest.raises(ValueError, match=r"^data.source: .*tokens.bin: (eos_id|tokenizer) is .* by its sidecar"):
        pipeline("other", source=config_for(TokenMemmap, path=str(cached)), tokenizer=config_for(ByteTokenizer))


# ---- permissions (as another user, since root may read everything)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user may enter, unlike tmp_path."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)
        subprocess.run(["chmod", "-R", "u+rwX", name], check=True)


AS_NOBODY = """
import importlib, os, sys
# Another user may not be allowed to read this interpreter's files: import first.
for name in ("fsspec.implementations.local", "grain", "numpy", "tokenizers", "encodings.idna"):
    importlib.import_module(name)
from framework.config import config_for
from framework.data.pipeline import DataPipeline
from framework.data.sources import TextFiles, TokenMemmap
from framework.data.tokenizers import BPETokenizer, ByteTokenizer
folder = sys.argv[1]
if os.geteuid() == 0:
    os.setegid(65534); os.seteuid(65534)
def attempt(source, workdir="w", tokenizer=config_for(ByteTokenizer)):
    try:
        data = config_for(DataPipeline, source=source, tokenizer=tokenizer, seq_len=32, global_batch_size=8)
        data.instantiate().setup(f"{folder}/{workdir}")
        print("no error")
    except Exception as error:
        print(type(error).__name__, error)
text = config_for(TextFiles, paths=[f"{folder}/fine.txt"])
attempt(config_for(TextFiles, paths=[f"{folder}/x.txt"]))
attempt(config_for(TextFiles, paths=[f"{folder}/closed/y.txt"]))
attempt(config_for(TextFiles, paths=[f"{folder}/closed/*.txt"]))
attempt(config_for(TextFiles, paths=[f"{folder}/unlisted/*.txt"]))
attempt(config_for(TokenMemmap, path=f"{folder}/x.bin"))
attempt(config_for(TokenMemmap, path=f"{folder}/x.bin", verify=False))
attempt(text, tokenizer=config_for(BPETokenizer, vocab_size=300, path=f"{folder}/t.json"))
attempt(text, workdir="readonly/w")
attempt(text)
"""


def test_what_may_not_be_read_or_written_is_named(open_folder: Path):
    for name in ("closed", "unlisted", "readonly"):
        (open_folder / name).mkdir()
    for name in ("fine.txt", "x.txt", "x.bin", "t.json", "closed/y.txt"):
        (open_folder / name).write_text("text " * 1000)
    forbidden = {"x.txt": 0, "x.bin": 0, "t.json": 0, "closed": 0, "unlisted": 0o311, "readonly": 0o500}
    for name, mode in forbidden.items():
        os.chmod(open_folder / name, mode)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(open_folder)], capture_output=True, text=True, check=False
    )
    expected = [
        rf"data.source: no permission to read {open_folder}/x.txt",
        rf"data.source: no permission to read the folder {open_folder}/closed of .*/y.txt",
        rf"data.source: no permission to read the folder {open_folder}/closed of .*/\*.txt",
        rf"data.source: no permission to read the folder {open_folder}/unlisted of .*/\*.txt",
        rf"data.source: no permission to read {open_folder}/x.bin",
        rf"data.source: no permission to read {open_folder}/x.bin",
        rf"data.tokenizer: no permission to read {open_folder}/t.json",
        rf".*{open_folder}/readonly/w",
    ]
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected) + 1, done.stdout + done.stderr
    for line, message in zip(lines, expected, strict=False):
        assert re.match(f"PermissionError {message}", line), line
    assert lines[-1] == "no error"


# ---- killed midway

SLOW_SETUP = """
import sys, time
from framework.config import config_for
from framework.data.pipeline import DataPipeline
from framework.data.sources import TextFiles
from framework.data.tokenizers import {tokenizer}
from framework.data import pipeline, token_files
token_files._BATCH_BYTES = 200
folder = sys.argv[1]
data = config_for(DataPipeline, source=config_for(TextFiles, paths=[folder + "/corpus/*.txt"]), seq_len=32,
                  global_batch_size=8, tokenizer=config_for({tokenizer}{size}))
def slowly(*arguments, write=pipeline.write_tokens):
    for progress in write(*arguments):
        print(progress.tokens, flush=True)
        yield time.sleep(0.2)
pipeline.write_tokens = slowly
data.instantiate().setup(folder + "/workdir")
"""


@pytest.mark.parametrize("tokenizer", ["ByteTokenizer", "BPETokenizer"])
def test_a_set_up_killed_midway_leaves_nothing_half_done(documents, pipeline, tmp_path: Path, tokenizer: str):
    documents()
    size = ", vocab_size=300" if tokenizer == "BPETokenizer" else ""
    code = SLOW_SETUP.replace("{tokenizer}", tokenizer).replace("{size}", size)
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(3):  # three batches of many are written
        assert child.stdout.readline().strip().isdigit()
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    child.stdout.close()
    cache = tmp_path / "workdir/data"
    leftovers = [path.name for path in cache.iterdir()]
    assert len(leftovers) == 1
    assert leftovers[0].startswith(".tokens-")
    config = config_for(ByteTokenizer) if tokenizer == "ByteTokenizer" else config_for(BPETokenizer, vocab_size=300)
    again, undisturbed = pipeline(tokenizer=config), pipeline("undisturbed", tokenizer=config)
    assert again.fingerprint() == undisturbed.fingerprint()
    assert not [path.name for path in cache.iterdir() if path.name.startswith(".")]


def test_a_typo_is_answered_before_any_library_is_imported():
    code = (
        "import sys, framework.data.pipeline, framework.data.sources, framework.data.tokenizers, launch.prepare\n"
        "print([m for m in ('grain', 'tokenizers', 'pyarrow', 'fsspec', 'jax', 'rich') if m in sys.modules])"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert time.monotonic() - started < 3


def test_the_last_act_of_a_set_up_is_one_rename(documents, pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A kill just before it leaves no token folder under its final name, and no other act makes one."""
    documents()

    def killed(*paths: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            pipeline()
    assert list((tmp_path / "workdir/data").iterdir()) == []


def test_another_job_may_finish_first(documents, pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    documents()
    cache = tmp_path / "cache"
    rename = os.rename

    def late(source: Path, target: Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename)
            pipeline("other", cache_dir=str(cache))
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert pipeline("mine", cache_dir=str(cache)).train_batch(0, range(B))
    assert [path.name[:7] for path in cache.iterdir()] == ["tokens-"]


@pytest.mark.parametrize("bpe", [False, True])
def test_a_process_that_is_not_the_first_writes_nothing(documents, pipeline, tmp_path: Path, bpe: bool):
    documents()
    tokenizer = config_for(BPETokenizer, vocab_size=300) if bpe else config_for(ByteTokenizer)
    what = "data.tokenizer: .*tokenizer.json" if bpe else "data.source: .*/tokens-[0-9a-f]+"
    with pytest.raises(FileNotFoundError, match=rf"^{what} does not exist: the first process was to write it"):
        pipeline(setup=False, tokenizer=tokenizer).setup(tmp_path / "workdir", is_primary=False)
    assert not (tmp_path / "workdir").exists()
