"""`launch.prepare` as a person runs it: files in place or nothing at all, and a pipeline that reads them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from framework.config import config_for
from framework.data.pipeline import DataPipeline
from framework.data.sources import TextFiles, TokenMemmap
from framework.data.tokenizers import BPETokenizer, ByteTokenizer
from launch import prepare

B = 8


@pytest.fixture
def corpus(tmp_path: Path, documents) -> str:
    documents()
    return str(tmp_path / "corpus/*.txt")


def test_prepared_files_train_as_the_text_does(
    tmp_path: Path, corpus: str, pipeline, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    flags = ["--source=text", "--tokenizer=bpe", "--vocab_size=300", "--shard_tokens=800", f"--out={out}"]
    assert prepare.main([*flags, "--paths", corpus, "--validation_paths", f"{tmp_path}/corpus/0001.txt"]) == 0
    printed = capsys.readouterr()
    assert f"--config.data.source.path='{out}/train-*.bin'" in printed.out
    assert f"--config.data.tokenizer.path={out}/tokenizer.json" in printed.out
    assert "train: 100%, 40 documents" in printed.err
    assert len(list(out.glob("train-*.bin"))) > 2
    assert len(list(out.glob("validation-main-*.bin"))) == 1
    tokenizer = config_for(BPETokenizer, vocab_size=300, path=str(out / "tokenizer.json"))
    shards = pipeline("a", source=config_for(TokenMemmap, path=str(out / "train-*.bin")), tokenizer=tokenizer)
    text = pipeline("b", source=config_for(TextFiles, paths=[corpus]), tokenizer=tokenizer)
    for step in (0, 4):
        for name, array in text.train_batch(step, range(B)).items():
            assert np.array_equal(array, shards.train_batch(step, range(B))[name])
    (row,), (other,) = shards.source_report(), text.source_report()
    assert (row.tokens, row.documents, row.bytes) == (other.tokens, other.documents, other.bytes)
    manifest = json.loads((out / "prepare.json").read_text())
    assert manifest["files"] == sorted(path.name for path in out.iterdir())
    assert len(manifest["sources"]["train"]["files"]) == 40


def test_a_named_config_with_overrides(tmp_path: Path, corpus: str):
    user_file = tmp_path / "mine.py"
    user_file.write_text(
        "from framework.config import Config, config_for\n"
        "from framework.data.pipeline import DataPipeline\n"
        "from framework.data.sources import TextFiles\n"
        "from framework.data.tokenizers import ByteTokenizer\n"
        "class Root:\n"
        "    def __init__(self, *, data: Config):\n"
        "        self.data = data\n"
        "def mine():\n"
        "    source = config_for(TextFiles, paths=['/nowhere.txt'])\n"
        "    data = config_for(DataPipeline, source=source, tokenizer=config_for(ByteTokenizer), seq_len=8,\n"
        "                      global_batch_size=2, validation={'held': source})\n"
        "    return config_for(Root, data=data)\n"
    )
    flags = [f"--config={user_file}:mine", f"--out={tmp_path}/out"]
    assert prepare.main(flags) == 2
    assert not (tmp_path / "out").exists()
    paths = json.dumps([corpus])
    held = f"--config.data.validation.held.paths={paths}"
    assert prepare.main([*flags, f"--config.data.source.paths={paths}", held]) == 0
    assert (tmp_path / "out/validation-held-00000.json").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "expected --config=NAME, or --source=text"),
        (["--source=txt", "--paths", "x", "--tokenizer=bytes"], "no source 'txt'; did you mean 'text'"),
        (["--source=text", "--tokenizer=bytes"], "--source=text needs --paths"),
        (["--source=text", "--paths", "x"], "--tokenizer is required"),
        (["--source=text", "--paths", "x", "--tokenizer=bpe"], "needs --vocab_size"),
        (["--source=text", "--paths", "x", "--tokenizer=bytes", "--field=body"], "--field goes with --source=jsonl"),
        (
            ["--source=jsonl", "--paths", "x", "--tokenizer=bytes", "--separator=|"],
            "--separator goes with --source=text",
        ),
        (["--source=text", "--paths", "/nowhere/x", "--tokenizer=bytes"], "data.source: /nowhere/x does not exist"),
        (["--source=text", "--pahts", "x"], "unknown flag '--pahts'; did you mean '--paths'"),
        (["--source=stdlib", "--tokenizer=bytes", "--shard_tokens=0"], "expected an integer > 0, given '0'"),
    ],
)
def test_mistakes_end_with_exit_code_2(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert prepare.main([*flags, f"--out={tmp_path}/out"]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_it_overwrites_only_when_forced_and_only_its_own(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
):
    flags = ["--source=text", "--paths", corpus, "--tokenizer=bytes", f"--out={tmp_path}/out"]
    assert prepare.main(flags) == 0
    before = (tmp_path / "out/train-00000.bin").read_bytes()
    assert prepare.main(flags) == 2
    assert "holds 4 files already; --force" in capsys.readouterr().err
    (tmp_path / "corpus/0000.txt").write_text("something else")
    assert prepare.main([*flags, "--force"]) == 0
    assert (tmp_path / "out/train-00000.bin").read_bytes() != before
    (tmp_path / "out/thesis.tex").write_text("years of work")
    assert prepare.main([*flags, "--force"]) == 2
    assert "holds thesis.tex, which this verb did not write" in capsys.readouterr().err
    assert (tmp_path / "out/thesis.tex").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]
    (tmp_path / "file").write_text("x")
    assert prepare.main([*flags[:-1], f"--out={tmp_path}/file", "--force"]) == 2
    assert (tmp_path / "file").read_text() == "x"


def test_a_failing_replacement_keeps_the_old_files(tmp_path: Path, corpus: str):
    flags = ["--source=text", "--paths", corpus, "--tokenizer=bytes", f"--out={tmp_path}/out", "--force"]
    assert prepare.main(flags) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (tmp_path / "corpus/0039.txt").write_bytes(b"\xff\xff")
    assert prepare.main(flags) == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]


def test_tokens_cannot_be_prepared_again(tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]):
    source, tokenizer = config_for(TokenMemmap, path=str(tmp_path / "x.bin")), config_for(ByteTokenizer)
    data = config_for(DataPipeline, source=source, tokenizer=tokenizer, seq_len=1, global_batch_size=1)
    with pytest.raises(ValueError, match=r"^data.source: .*x.bin holds tokens already"):
        prepare.prepare(data, tmp_path / "out", force=False, shard_tokens=100)
    assert not (tmp_path / "out").exists()


def test_killed_midway_it_leaves_no_file_under_the_final_name(tmp_path: Path, corpus: str):
    code = (
        "import sys, time\n"
        "from framework.data import encode\n"
        "encode._BATCH_BYTES = 100\n"
        "from launch import prepare\n"
        "prepare._Reporter.__call__ = lambda self, progress: (print(progress.tokens, flush=True), time.sleep(0.2))\n"
        "prepare.main(sys.argv[1:])\n"
    )
    flags = ["--source=text", "--paths", corpus, "--tokenizer=bytes", f"--out={tmp_path}/out"]
    child = subprocess.Popen([sys.executable, "-c", code, *flags], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert [child.stdout.readline().strip().isdigit() for _ in range(2)] == [True, True]
    os.kill(child.pid, signal.SIGKILL)
    child.wait(30)
    child.stdout.close()
    assert not (tmp_path / "out").exists()
    assert [path.name[:9] for path in tmp_path.iterdir() if path.name != "corpus"] == [".out.tmp-"]
    assert prepare.main(flags) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]


def test_the_module_runs_as_a_command(tmp_path: Path, corpus: str):
    command = [sys.executable, "-m", "launch.prepare", "--source=text", "--paths", corpus, "--tokenizer=bytes"]
    started = time.monotonic()
    done = subprocess.run([*command, f"--out={tmp_path}/out"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 20
    assert (tmp_path / "out/train-00000.bin").exists()
    again = subprocess.run([*command, f"--out={tmp_path}/out"], capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
