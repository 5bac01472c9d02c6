"""Data errors are reported before anything is compiled, with the config path, the file and the position."""

import gzip
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.data.sources import JsonLines, Mixture, Parquet, TextFiles, TokenMemmap
from plimsoll.framework.data.tokenizers import BPETokenizer, ByteTokenizer, NoTokenizer
from plimsoll.framework.files import durable

B, S = 8, 32
BPE = config_for(BPETokenizer, vocab_size=300)


def text(path: Path | str) -> object:
    return config_for(TextFiles, paths=[str(path)])


def test_missing_values_are_named_with_their_config_path(tmp_path: Path, pipeline, documents, monkeypatch):
    documents()
    # Before anything is tokenized, which may take hours.
    monkeypatch.setattr("plimsoll.framework.data.pipeline.write_tokens", lambda *a: pytest.fail("tokenized"))
    good, bad, where = text(tmp_path / "corpus/*.txt"), text(tmp_path / "none.x"), f"{tmp_path}/none.x does not exist"
    for kind in (TextFiles, JsonLines, Parquet):
        with pytest.raises(FileNotFoundError, match=rf"^data.source: {where}"):
            pipeline(source=config_for(kind, paths=[str(tmp_path / "none.x")]), tokenizer=BPE)
    with pytest.raises(FileNotFoundError, match=rf"^data.validation.held: {where}"):
        pipeline(validation={"held": bad})
    with pytest.raises(FileNotFoundError, match=rf"^data.source: no file matches {tmp_path}/\*.bin"):
        pipeline(source=config_for(TokenMemmap, path=str(tmp_path / "*.bin")))
    with pytest.raises(FileNotFoundError, match=rf"^data.tokenizer: {tmp_path}/tokenizer.json does not exist"):
        pipeline(tokenizer=config_for(BPETokenizer, vocab_size=300, path=str(tmp_path / "tokenizer.json")))
    nested = config_for(Mixture, sources=[good, bad], weights=[1.0, 1.0])
    with pytest.raises(FileNotFoundError, match=rf"^data.source.sources.1.sources.1: {where}"):
        pipeline(source=config_for(Mixture, sources=[good, nested], weights=[1.0, 1.0]))


def test_too_little_text_names_both_numbers(tmp_path: Path, pipeline):
    for content, message in [
        ("", "the source has no text"),
        ("a" * 20, "21 tokens are too few: data.seq_len=32 needs 33"),
        ("a" * (7 * S + 5), "has 7 sequences of data.seq_len=32, .*data.global_batch_size=8"),
    ]:
        (tmp_path / "x.txt").write_text(content)
        with pytest.raises(ValueError, match=f"^data.source: {message}"):
            pipeline(source=text(tmp_path / "x.txt"))
        assert not list((tmp_path / "workdir/data").glob(".*"))


def test_invalid_pipeline_configs_are_refused(pipeline):
    file = text("x.txt")
    mixture = config_for(Mixture, sources=[file], weights=[1.0])
    for fields, message in [
        ({"validation": {"train": file}}, r"data.validation.train: expected a name"),
        ({"validation": {"a/b": file}}, r"data.validation.a/b: expected a name"),
        ({"validation": {"m": mixture}}, r"data.validation.m: a Mixture has no end"),
        ({"source": config_for(ByteTokenizer)}, r"data.source: expected a source .* given ByteTokenizer"),
    ]:
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


@pytest.mark.parametrize("tokenizer", [config_for(ByteTokenizer), BPE])
def test_damaged_source_is_located_and_nothing_is_cached(tmp_path: Path, pipeline, tokenizer):
    path = tmp_path / "x.txt.gz"
    path.write_bytes(gzip.compress(os.urandom(50_000).hex().encode())[:-2000])
    with pytest.raises(ValueError, match=rf"^data.source: {path}: damaged or truncated after byte \d+ of its text"):
        pipeline(source=text(path), tokenizer=tokenizer)
    assert [path.name for path in (tmp_path / "workdir").rglob("*") if path.is_file()] == []


def test_truncation_while_training_is_an_error_and_not_a_short_epoch(documents, pipeline, tmp_path: Path):
    documents()
    built = pipeline()
    (cached,) = (tmp_path / "workdir/data").glob("tokens-*/tokens.bin")
    with built.train_iterator(0, range(B)) as batches:
        next(batches)
        cached.write_bytes(cached.read_bytes()[:200])
        with pytest.raises(ValueError, match=rf"{cached}: ends at byte \d+, but it had"):
            list(itertools.islice(batches, 100))


# ---- permissions (as another user, because root can read everything)

AS_NOBODY = """
import importlib, os, sys
# Another user may not be allowed to read this interpreter's files: import first.
for name in ("fsspec.implementations.local", "grain", "numpy", "tokenizers", "encodings.idna"):
    importlib.import_module(name)
from plimsoll.framework.config import config_for
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import TextFiles, TokenMemmap
from plimsoll.framework.data.tokenizers import BPETokenizer, ByteTokenizer
from plimsoll.framework.files import durable
os.chdir(sys.argv[1])
if os.geteuid() == 0:
    os.setegid(65534); os.seteuid(65534)
def attempt(kind, path, workdir="w", tokenizer=config_for(ByteTokenizer), **fields):
    source = config_for(kind, **({"paths": [path]} if kind is TextFiles else {"path": path}), **fields)
    data = config_for(DataPipeline, source=source, tokenizer=tokenizer, seq_len=32, global_batch_size=8)
    try:
        data.instantiate().setup(f"{sys.argv[1]}/{workdir}")
        print("no error")
    except Exception as error:
        print(type(error).__name__, error)
attempt(TextFiles, "x.txt")
attempt(TextFiles, "closed/y.txt")
attempt(TextFiles, "unlisted/*.txt")
attempt(TokenMemmap, "x.bin")
attempt(TokenMemmap, "x.bin", verify=False)
attempt(TextFiles, "fine.txt", tokenizer=config_for(BPETokenizer, vocab_size=300, path="t.json"))
attempt(TextFiles, "fine.txt", workdir="readonly/w")
attempt(TextFiles, "fine.txt")
"""


@pytest.mark.pairs
def test_unreadable_and_unwritable_files_are_named():
    with tempfile.TemporaryDirectory() as name:  # unlike tmp_path, any user may enter it
        folder = Path(name)
        folder.chmod(0o777)
        for name in ("closed", "unlisted", "readonly"):
            (folder / name).mkdir()
        for name in ("fine.txt", "x.txt", "x.bin", "t.json", "closed/y.txt"):
            (folder / name).write_text("text " * 1000)
        modes = {"x.txt": 0, "x.bin": 0, "t.json": 0, "closed": 0, "unlisted": 0o311, "readonly": 0o500}
        for name, mode in modes.items():
            (folder / name).chmod(mode)
        command = [sys.executable, "-c", AS_NOBODY, str(folder)]
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        subprocess.run(["chmod", "-R", "u+rwX", str(folder)], check=True)
    expected = [
        rf"data.source: no permission to read {folder}/x.txt",
        rf"data.source: no permission to read the folder {folder}/closed of closed/y.txt",
        rf"data.source: no permission to read the folder {folder}/unlisted of unlisted/\*.txt",
        rf"data.source: no permission to read {folder}/x.bin",
        rf"data.source: no permission to read {folder}/x.bin",
        rf"data.tokenizer: no permission to read {folder}/t.json",
        rf".*{folder}/readonly/w",
    ]
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected) + 1, done.stdout + done.stderr
    for line, message in zip(lines, expected, strict=False):
        assert re.match(f"PermissionError {message}", line), line
    assert lines[-1] == "no error"


# ---- processes, and kills


def test_tokens_appear_by_one_rename_which_another_job_may_have_done(documents, pipeline, tmp_path, monkeypatch):
    documents()
    cache, rename = tmp_path / "cache", durable.rename

    def rename_after_other(source: Path, target: Path) -> None:
        if target.name.startswith("tokens-"):
            with monkeypatch.context() as patch:
                patch.setattr(durable, "rename", rename)
                pipeline("other", cache_dir=str(cache))
        rename(source, target)

    def interrupt_rename(source: Path, target: Path) -> None:
        if target.name.startswith("tokens-"):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(durable, "rename", rename_after_other)
    assert pipeline("mine", cache_dir=str(cache)).train_batch(0, range(B))
    assert [path.name[:7] for path in cache.iterdir()] == ["tokens-"]
    monkeypatch.setattr(durable, "rename", interrupt_rename)
    with pytest.raises(KeyboardInterrupt):
        pipeline("third")
    assert list((tmp_path / "third/data").iterdir()) == []
    monkeypatch.undo()
    (tmp_path / "third/data/.tokens-half").mkdir()  # as left by a SIGKILL before the rename
    assert pipeline("third").fingerprint() == pipeline("undisturbed").fingerprint()
    assert not list((tmp_path / "third/data").glob(".*"))


def test_only_process_0_writes(documents, pipeline, tmp_path: Path):
    documents()
    for what, fields in (("data.tokenizer: .*tokenizer.json", {"tokenizer": BPE}), ("data.source: .*/tokens-", {})):
        with pytest.raises(FileNotFoundError, match=rf"^{what}.* does not exist, but process 0 should have written it"):
            pipeline(setup=False, **fields).setup(tmp_path / "workdir", is_primary=False)
    assert not (tmp_path / "workdir").exists()


def test_a_typo_is_answered_before_any_library_is_imported():
    code = (
        "import sys, plimsoll.launch.prepare\n"
        "from plimsoll.framework.data import pipeline, sources, tokenizers\n"
        "print([m for m in ('grain', 'tokenizers', 'pyarrow', 'fsspec', 'jax', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
