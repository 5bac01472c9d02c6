"""Complete runs with workdir and data in an object store."""

import json
import os
import signal
import socket
import subprocess
import time

import pytest

from plimsoll.framework.files.remote import connect
from tests.support.runs import ROOT, command, losses, start, write_text

STEPS = ("--config.trainer.max_steps=40", "--config.trainer.save_every=5")


@pytest.fixture
def text(store, tmp_path):
    """Command-line flags for text data in the store."""
    folder, (fs, path) = write_text(tmp_path / "text"), connect(f"{store}/text")
    for name in ("train.txt", "valid.txt"):
        fs.put_file(str(folder / name), f"{path}/{name}")
    return (
        f'--config.data.source.paths=["{store}/text/train*.txt"]',
        f'--config.data.validation.held.paths=["{store}/text/valid.txt"]',
    )


def names(url):
    fs, path = connect(url)
    return {name[len(path) + 1 :] for name in fs.find(path)}


def read(url):
    fs, path = connect(url)
    return fs.cat_file(path).decode()


def rows(url):
    return [json.loads(line) for line in read(f"{url}/metrics.jsonl").splitlines()]


def losses_in(url):
    found = [(row["step"], row["train/loss"]) for row in rows(url) if "train/loss" in row]
    assert len(dict(found)) == len(found), "a step is there twice"
    return dict(found)


def wait_for(url, name, run, out):
    while name not in names(url):
        assert run.poll() is None, out.read_text()
        time.sleep(0.05)


def both(workdir, *flags, outs):
    """Start two processes of one run; process i gets `workdir(i)` and writes its output to `outs[i]`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = (f"--coordinator=127.0.0.1:{probe.getsockname()[1]}", "--num_processes=2")
    return [start(workdir(i), *where, f"--process_id={i}", *flags, out=outs[i]) for i in range(2)]


def run_command(*argv):
    return subprocess.run(
        argv, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=200
    )


@pytest.mark.slow
def test_killed_run_resumes_and_equals_a_local_one(store, text, tmp_path):
    plain = start(tmp_path / "plain", *STEPS)
    url, out = f"{store}/run", tmp_path / "out"
    run = start(url, *STEPS, *text, out=out)
    wait_for(url, "checkpoints/00000010/manifest/data.json", run, out)
    held = json.loads(read(f"{url}/lock.json"))
    assert held["pid"] == run.pid
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert "lock.json" in names(url)
    run = start(url, *STEPS, *text, "--resume=must", out=out)
    assert run.wait() == 0, out.read_text()
    if url.startswith("s3"):  # the GCS emulator also creates objects that already exist
        assert f"took over {url}: its lock was left behind by process {held['pid']}" in out.read_text()
    assert plain.wait() == 0
    assert losses_in(url) == losses(tmp_path / "plain")
    assert [row for row in rows(url) if "resumed_from" in row]
    assert {"config.json", "log.txt", "loss.png", "metrics.jsonl", "data/hashes.json"} <= names(url)
    assert "lock.json" not in names(url)
    for file in ("config.json", "log.txt", "metrics.jsonl"):
        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in read(f"{url}/{file}")
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in out.read_text()


@pytest.mark.pairs
def test_user_errors_exit_with_2_before_compilation(s3, tmp_path):
    write_text(tmp_path / "text")
    bucket = s3.removeprefix("s3://")
    for flags, message in [
        ((f"s3://{bucket}/run", f'--config.data.source.paths=["{s3}/text/absent.txt"]'), f"data.source: .*{s3}"),
        (("s3://nosuchbucket/run",), "s3://nosuchbucket/run does not exist, or its bucket does not"),
        (("s3://me:hush@bucket/run",), "credentials in a URL are refused"),
    ]:
        done = run_command(*command(*flags))
        assert done.returncode == 2, done.stderr
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert message.split(".*")[0] in line
        assert message.split(".*")[-1] in line
        assert "hush" not in done.stderr + done.stdout
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_two_processes_share_a_workdir_in_a_store(s3, tmp_path):
    write_text(tmp_path / "text")
    url, outs = f"{s3}/run", [tmp_path / "0", tmp_path / "1"]
    assert max(run.wait(timeout=300) for run in both(lambda i: url, *STEPS, outs=outs)) == 0, outs[0].read_text()
    assert sorted(losses_in(url)) == list(range(1, 41))
    assert {"health/process-00000.json", "health/process-00001.json"} <= names(url)
    assert not [name for name in names(url) if "written" in name and name.startswith("checkpoints/00000005")]


@pytest.mark.slow
def test_differing_folders_between_hosts_are_reported(tmp_path):
    write_text(tmp_path / "text")
    outs = [tmp_path / "0", tmp_path / "1"]
    codes = [run.wait(timeout=300) for run in both(lambda i: tmp_path / f"host{i}", *STEPS, outs=outs)]
    said = [out.read_text() for out in outs]
    assert codes == [2, 2], said
    message = f"process 1 on host {os.uname().nodename} does not see the files that process 0 of this run wrote to"
    assert f"{message} {tmp_path}/host1" in said[1]
    assert "another process of this run does not see" in said[0]
