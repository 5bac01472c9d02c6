"""`plimsoll prepare` from the command line: it writes all files or none, and a pipeline reads them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import TextFiles, TokenMemmap
from plimsoll.framework.data.tokenizers import BPETokenizer, ByteTokenizer
from plimsoll.launch import prepare

B = 8


@pytest.fixture
def flags(tmp_path: Path, documents) -> list[str]:
    """Flags for nanogpt-cpu (bytes) on tmp_path/corpus, written to tmp_path/out."""
    documents()
    paths = json.dumps([f"{tmp_path}/corpus/*.txt"])
    source = ["--config.data.source=plimsoll.TextFiles", f"--config.data.source.paths={paths}"]
    return ["--config=nanogpt-cpu", *source, "--config.data.validation={}", f"--out={tmp_path}/out"]


def test_prepared_files_train_as_the_text_does(tmp_path: Path, flags: list[str], pipeline, capsys):
    out, held = tmp_path / "out", "--config.data.validation.held"
    bpe = ["--config.data.tokenizer=plimsoll.BPETokenizer", "--config.data.tokenizer.vocab_size=300"]
    more = [f"{held}=plimsoll.TextFiles", f'{held}.paths=["{tmp_path}/corpus/0001.txt"]']
    assert prepare.main([*flags, *bpe, *more]) == 0
    printed = capsys.readouterr()
    assert f"--config.data.source.path={out}/train.bin" in printed.out
    assert f"--config.data.tokenizer.path={out}/tokenizer.json" in printed.out
    assert "train: 100%, 40 documents" in printed.err
    names = {"train.bin", "train.json", "validation-held.bin", "validation-held.json", "tokenizer.json", "prepare.json"}
    assert {path.name for path in out.iterdir()} == names
    assert len(json.loads((out / "prepare.json").read_text())["sources"]["train"]["files"]) == 40
    tokenizer = config_for(BPETokenizer, vocab_size=300, path=str(out / "tokenizer.json"))
    tokens = pipeline("a", source=config_for(TokenMemmap, path=str(out / "train.bin")), tokenizer=tokenizer)
    text = pipeline("b", source=config_for(TextFiles, paths=[f"{tmp_path}/corpus/*.txt"]), tokenizer=tokenizer)
    for name, array in text.train_batch(4, range(B)).items():
        assert np.array_equal(array, tokens.train_batch(4, range(B))[name])
    assert tokens.fingerprint() == text.fingerprint()


def test_user_errors_exit_with_2_and_leave_no_files(tmp_path: Path, flags: list[str], capsys):
    before = sorted(tmp_path.rglob("*"))
    for change, message in [
        ("--froce", "unknown flag '--froce'; did you mean '--force'"),
        ('--config.data.source.paths=["/nowhere/x"]', "data.source: the folder /nowhere of /nowhere/x does not exist"),
        (f"--out={tmp_path}/corpus/0000.txt", "is a file; expected a folder"),
        (f"--out={tmp_path}/corpus/0000.txt/out", "0000.txt is a file; expected a folder"),
        (f"--out={tmp_path}/corpus", "already contains 40 files; --force replaces files that this verb wrote"),
    ]:
        assert prepare.main([*flags, change]) == 2
        assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    source, tokenizer = config_for(TokenMemmap, path="x.bin"), config_for(ByteTokenizer)
    data = config_for(DataPipeline, source=source, tokenizer=tokenizer, seq_len=1, global_batch_size=1)
    with pytest.raises(ValueError, match=r"^data.source: x.bin is already tokenized"):
        prepare.prepare(data, tmp_path / "out", force=False)


def test_overwrites_only_with_force_and_only_prepared_files(tmp_path: Path, flags: list[str], capsys):
    assert prepare.main(flags) == 0
    before = (tmp_path / "out/train.bin").read_bytes()
    assert prepare.main(flags) == 2
    (tmp_path / "corpus/0000.txt").write_text("something else")
    (tmp_path / ".out.replaced").mkdir()  # left by a run that was killed at its end
    (tmp_path / ".out.replaced/train.bin").write_text("old")
    assert prepare.main([*flags, "--force"]) == 0
    assert (changed := (tmp_path / "out/train.bin").read_bytes()) != before
    (tmp_path / "corpus/0039.txt").write_bytes(b"\xff\xff")
    assert prepare.main([*flags, "--force"]) == 2  # the old files stay
    assert (tmp_path / "out/train.bin").read_bytes() == changed
    (tmp_path / "out/thesis.tex").write_text("years of work")
    assert prepare.main([*flags, "--force"]) == 2
    assert "contains thesis.tex, which `plimsoll prepare` did not write" in capsys.readouterr().err
    assert (tmp_path / "out/thesis.tex").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]


@pytest.mark.pairs
def test_killed_midway_it_leaves_no_file_under_the_final_name(tmp_path: Path, flags: list[str]):
    code = (
        "import sys, time\n"
        "from plimsoll.framework.data import encoding\n"
        "encoding._LOCAL_BATCH = encoding._WORKER_BATCH = 100\n"
        "from plimsoll.launch import prepare\n"
        "prepare.show = lambda name, steps: [(print(s.tokens, flush=True), time.sleep(0.2)) for s in steps]\n"
        "prepare.main(sys.argv[1:])\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, *flags], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert [child.stdout.readline().strip().isdigit() for _ in range(2)] == [True, True]
    os.kill(child.pid, signal.SIGKILL)
    child.wait(30)
    child.stdout.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial", "corpus"]
    assert prepare.main(flags) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]
