"""Whole runs whose workdir and data are in an object store."""

import json
import signal
import time

import fsspec
import pytest

from tests.support.runs import losses, start, write_text

STEPS = ("--config.trainer.max_steps=40", "--config.trainer.save_every=5")


def put(folder, url):
    fs, path = fsspec.core.url_to_fs(url)
    for name in ("train.txt", "valid.txt"):
        fs.put_file(str(folder / name), f"{path}/{name}")


def data_flags(url):
    return (
        f'--config.data.source.paths=["{url}/train*.txt"]',
        f'--config.data.validation.held.paths=["{url}/valid.txt"]',
    )


def rows_in(url):
    fs, path = fsspec.core.url_to_fs(f"{url}/metrics.jsonl")
    return [json.loads(line) for line in fs.cat_file(path).splitlines()] if fs.exists(path) else []


def losses_in(url):
    found = [(row["step"], row["train/loss"]) for row in rows_in(url) if "train/loss" in row]
    assert len(dict(found)) == len(found), "a step is there twice"
    return dict(found)


@pytest.mark.slow
def test_a_killed_run_goes_on_and_equals_a_local_one(store, tmp_path):
    folder = write_text(tmp_path / "text")
    put(folder, f"{store}/text")
    plain = start(tmp_path / "plain", *STEPS)
    url, flags = f"{store}/run", (*STEPS, *data_flags(f"{store}/text"))
    fs, path = fsspec.core.url_to_fs(url)
    run = start(url, *flags, out=tmp_path / "out")
    while not fs.exists(f"{path}/checkpoints/00000010/manifest/data.json"):
        assert run.poll() is None, (tmp_path / "out").read_text()
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert fs.exists(f"{path}/lock.json")
    run = start(url, *flags, "--resume=must", out=tmp_path / "out")
    assert run.wait() == 0, (tmp_path / "out").read_text()
    assert plain.wait() == 0
    assert losses_in(url) == losses(tmp_path / "plain")
    assert [row for row in rows_in(url) if "resumed_from" in row]
    assert not fs.exists(f"{path}/lock.json")
