"""The exit codes in the code, in docs/operations.md and in the launchers agree."""

import errno
import os
import re
from pathlib import Path

import pytest

from plimsoll.framework.files.footprint import Footprint
from plimsoll.framework.files.workdir import Workdir, write_json, writing
from plimsoll.framework.run import user_errors
from plimsoll.framework.terminal.exit_codes import FINAL, HOPELESS, ExitCode, describe_exit_code
from plimsoll.launch import cli, commands, compare, evaluate, export, plan, profile, slurm
from tests.support.runs import ROOT


def test_the_page_has_every_code_with_its_meaning():
    page = (ROOT / "docs" / "operations.md").read_text()
    documented: dict[int, str] = {}
    for codes, text in re.findall(r"^\| ([\d, ]+) \| [^|]* \| ([^|]*) \|", page, flags=re.MULTILINE):
        documented |= {int(code): text for code in codes.split(", ")}
    assert set(documented) == {int(code) for code in ExitCode}
    for code in ExitCode:
        assert code.meaning in documented[code]
    (words,) = re.findall(r"restart all processes after every code except (.*?) \(", page)
    assert {int(code) for code in re.findall(r"\d+", words)} == {int(code) for code in FINAL}


def test_launchers_start_nothing_again_after_a_hopeless_code():
    digits = "".join(str(int(code)) for code in HOPELESS)
    assert f"[{digits}]x" in slurm.SCRIPT


def test_exit_code_descriptions():
    assert commands.describe_process_end(ExitCode.TOO_BIG) == "ended with exit code 4 (does not fit)"
    assert commands.describe_process_end(-9) == "was killed by SIGKILL"
    assert describe_exit_code(99) == "unknown"


PLAN = ["--config=gpt2-124m", "--target=h100", "--estimate"]


def is_writable(path: str | os.PathLike[str], mode: int) -> bool:
    """Stand in for os.access, because root may write everywhere."""
    return not (mode & os.W_OK and Path(path).name == "deny")


@pytest.mark.parametrize(
    ("verb", "words", "message"),
    [
        (plan, [*PLAN, "--json=deny/plan.json"], "--json=deny/plan.json: no permission to write in "),
        (plan, [*PLAN, "--html=none/plan.html"], "--html=none/plan.html: the folder none does not exist"),
        (plan, [*PLAN, "--largest", "--picture=deny/a.png"], "--picture=deny/a.png: no permission to write in "),
        (plan, [*PLAN, "--json=deny"], "--json=deny: a folder; expected a file"),
        (plan, ["--check=no.toml", "--markdown=deny/a.md"], "--markdown=deny/a.md: no permission to write in "),
        (plan, ["--check=no.toml"], "--check=no.toml: no such file"),
        (plan, ["--check=file.json"], "--check=file.json: expected a TOML file"),
        (plan, ["--from", "chats.jsonl", "--target=h100"], "--from=chats.jsonl: rows of data; expected the config or"),
        (export, ["--workdir=none", "--to=deny/new/exp"], "--to=deny/new/exp: no permission to write in "),
        (export, ["--workdir=none", "--to=file.json/exp"], "file.json is a file; expected a folder"),
        (compare, ["a", "b", "--out=deny/c.png"], "--out=deny/c.png: no permission to write in "),
        (profile, ["--config=gpt2-124m", "--out=deny/trace"], "--out=deny/trace: no permission to write in "),
        (evaluate, ["--workdir=none", "--files", "no.txt"], "--files=no.txt: no such file"),
        (evaluate, ["--workdir=none", "--files", "deny"], "--files=deny: a folder; expected a file"),
        (evaluate, ["--workdir=none", "--choices=no.jsonl"], "--choices=no.jsonl: no such file"),
    ],
)
def test_files_are_checked_first(verb, words, message, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("deny").mkdir()
    Path("file.json").write_text("{}")
    Path("chats.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    monkeypatch.setattr(os, "access", is_writable)
    assert verb.main(words) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_errors_of_the_system_have_no_errno_and_no_temporary_name(tmp_path: Path, capsys):
    for read in (lambda: (tmp_path / "none").read_text(), lambda: (tmp_path / ("a" * 300)).read_text()):
        with pytest.raises(OSError) as error:
            read()
        assert user_errors.report_error(error.value, is_command=True) == ExitCode.USAGE
        assert capsys.readouterr().err.startswith(f"error: {tmp_path}/")
    with pytest.raises(OSError) as error:
        write_json(tmp_path / "none" / "a.json", {})
    assert user_errors.describe_file_error(error.value) == f"{tmp_path}/none/a.json: no such file or directory"
    with pytest.raises(OSError) as error, writing("c.png"):
        (tmp_path / "none" / "c.png.tmp").write_text("")
    assert user_errors.describe_file_error(error.value) == "c.png: no such file or directory"


def test_a_workdir_that_cannot_be_created_is_named(tmp_path: Path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/x")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError, match=r"--workdir: the folder .*/x/y cannot be created"):
        Workdir(tmp_path / "x" / "y").claim()


def test_only_training_resumes():
    error = OSError(errno.ENOSPC, "No space left on device", "/dev/full")
    assert str(user_errors.describe_disk_error(error)).endswith("then run the same command again")
    error.add_note(user_errors.OF_RUN)
    assert str(user_errors.describe_disk_error(error)).endswith("then run the same command to resume")


def test_a_device_is_an_output():
    cli.check_output("json", "/dev/null")


def test_a_refused_start_leaves_no_decoded_images(tmp_path: Path):
    footprint = Footprint(tmp_path / "run")
    (tmp_path / "run" / "data" / "images-570ed88790b68dd3").mkdir(parents=True)
    footprint.undo()
    footprint.remove_folders()
    assert not list(tmp_path.iterdir())
