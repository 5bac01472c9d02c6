"""`plimsoll tpu_vm`: its commands, and their effect on a machine that a stand-in for gcloud simulates."""

import json
import os
import shlex
import sys
import time
from pathlib import Path

import pytest

from plimsoll.launch.tpu_vm import SUBVERBS, main
from tests.support.runs import CONFIG, ROOT

PLACE = ["--name=a", "--zone=z1", "--target=v5e-16"]
TINY = [f"--config={CONFIG}:tiny", "--workdir=gs://bucket/runs/a"]
GCLOUD = """#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
with open("{calls}", "a") as calls:
    calls.write(json.dumps(words) + "\\n")
if words[2:4] == ["tpu-vm", "ssh"]:
    command = next(word for word in words if word.startswith("--command="))
    sys.exit(subprocess.run(["bash", "-c", command.removeprefix("--command=")], cwd="{home}").returncode)
if words[2:4] == ["tpu-vm", "scp"]:
    sys.exit(subprocess.run(["cp", words[4], "{home}"]).returncode)
sys.exit({code})
"""


def dry(capsys, subverb: str, *flags: str) -> list[list[str]]:
    """Return the words of each command that a dry run prints."""
    assert main([subverb, *flags, "--dry_run"]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def test_create(capsys) -> None:
    tpu_vm, queued = ["gcloud", "compute", "tpus", "tpu-vm"], ["gcloud", "compute", "tpus", "queued-resources"]
    kind = ["--accelerator-type=v5litepod-16", "--version=v2-alpha-tpuv5-lite"]
    assert dry(capsys, "create", *PLACE) == [[*tpu_vm, "create", "a", "--zone=z1", *kind]]
    place = ["--zone=z1", "--project=p q"]
    kind = ["--node-id=a", "--accelerator-type=v5litepod-16", "--runtime-version=mine", "--spot"]
    more = ["--project=p q", "--spot", "--runtime_version=mine"]
    assert dry(capsys, "create", *PLACE, *more) == [[*queued, "create", "a", *place, *kind]]
    (words,) = dry(capsys, "create", "--name=a", "--zone=z1", "--target=2xv5p-512", "--reserved")
    assert words[3:] == [
        *("queued-resources", "create", "a", "--zone=z1", "--node-count=2", "--node-prefix=a"),
        *("--accelerator-type=v5p-512", "--runtime-version=v2-alpha-tpuv5", "--reserved"),
    ]


def test_delete(capsys) -> None:
    assert dry(capsys, "delete", *PLACE)[0][3:] == ["tpu-vm", "delete", "a", "--zone=z1"]
    queued = ["queued-resources", "delete", "a", "--force", "--zone=z1"]
    assert dry(capsys, "delete", *PLACE, "--spot")[0][3:] == queued
    assert dry(capsys, "delete", "--name=a", "--zone=z1", "--target=2xv5e-256")[0][3:] == queued


def test_every_slice_gets_the_command(capsys) -> None:
    place = ["--name=a", "--zone=z1", "--target=3xv5e-16"]
    for subverb, flags in (("run", TINY), ("stop", [])):
        nodes = [words[5] for words in dry(capsys, subverb, *place, *flags)]
        assert nodes == ["a-0", "a-1", "a-2"]
    assert [words[5] for words in dry(capsys, "copy", *place)[1:4]] == ["plimsoll.tar.gz"] * 3
    assert dry(capsys, "logs", *place, "--worker=all")[0][3:8] == ["tpu-vm", "ssh", "a-0", "--zone=z1", "--worker=all"]


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The worker's home directory. Calls of gcloud are logged in ../calls, and git uses this repository."""
    programs, home = tmp_path / "bin", tmp_path / "home"
    programs.mkdir()
    home.mkdir()
    text = GCLOUD.format(python=sys.executable, calls=tmp_path / "calls", home=home, code=0)
    python = f"#!/bin/sh\nmkdir -p $3/bin && cp {programs}/worker-python $3/bin/python\n"  # python3 -m venv DIR
    worker = f'#!/bin/sh\nfor word in "$@"; do echo "$word" >> {home}/ran; done\necho out of the worker\n'
    for name, script in {"gcloud": text, "python3": python, "worker-python": worker}.items():
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_DIR", str(ROOT / ".git"))
    return home


@pytest.mark.pairs
def test_copy_then_run_then_logs(cloud: Path, capfd) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: there is nothing that git could archive")
    assert main(["copy", *PLACE]) == 0, capfd.readouterr()
    assert (cloud / "plimsoll" / "launch" / "train.py").exists()
    ran = cloud / "ran"
    assert ran.read_text().splitlines() == [
        *("-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", "--editable", ".[tpu]")
    ]
    ran.unlink()
    override = "--config.trainer.sample_prompt=it's $HOME"
    assert main(["run", *PLACE, *TINY, override]) == 0
    end = time.monotonic() + 20
    while not ran.exists() or override not in ran.read_text():
        assert time.monotonic() < end, list(cloud.iterdir())
        time.sleep(0.05)
    assert ran.read_text().splitlines() == ["-m", "plimsoll", "local", *TINY, override]  # exactly as typed
    assert int((cloud / "a.pid").read_text())
    assert "out of the worker" in (cloud / "a.log").read_text()
    calls = [json.loads(line) for line in (cloud.parent / "calls").read_text().splitlines()]
    assert [call[3] for call in calls] == ["scp", "ssh", "ssh"]
    assert all("--worker=all" in call for call in calls)


def test_the_first_command_that_fails_ends_it(cloud: Path, capfd, tmp_path: Path) -> None:
    text = GCLOUD.format(python=sys.executable, calls=tmp_path / "calls", home=cloud, code=9)
    (tmp_path / "bin" / "gcloud").write_text(text)
    assert main(["create", *PLACE]) == 9
    assert main(["stop", "--name=a", "--zone=z1", "--target=2xv5e-16"]) != 0  # that file does not exist there
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2


WRONG = [
    ([], "no subverb of `plimsoll tpu_vm` ''"),
    (["creat"], "did you mean 'create'?"),
    (["create", "--name=a", "--zone=z"], "the following arguments are required: --target"),
    (["create", *PLACE[:2], "--target=v5e-17"], "nearest: v5e-16"),
    (["create", *PLACE[:2], "--target=h200x8"], "expected a TPU, such as v5e-16"),
    (["create", *PLACE[:2], "--target=tpu7x-8"], "--runtime_version is required for tpu7x"),
    (["create", *PLACE[1:], "--name=A_b"], "--name=A_b: expected only a-z"),
    (["create", *PLACE, "--spt"], "did you mean '--spot'?"),
    (["run", *PLACE, *TINY, "--config.trainer.max_stps=1"], "did you mean 'max_steps'?"),
    (["run", *PLACE, TINY[0], "--workdir=runs/a"], "--workdir: several workers need a shared workdir"),
    (["run", *PLACE, "--workdir=gs://a/b"], "--config=NAME is required"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG)
def test_wrong_usage_runs_nothing(capsys, monkeypatch, tmp_path: Path, argv: list[str], message: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_help(capsys) -> None:
    for argv in (["--help"], *([subverb, "--help"] for subverb in SUBVERBS)):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 0
        assert "--zone" in capsys.readouterr().out
