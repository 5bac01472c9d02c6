"""The workdir in an object store: mirrored files and the lock."""

import json
import os
import threading

import fsspec
import pytest

from plimsoll.framework.files import remote
from plimsoll.framework.files.remote import Mirror, connect, without_secrets
from plimsoll.framework.files.workdir import Workdir, read_only
from tests.support.runs import wait_for

OTHER = {"host": "elsewhere", "pid": 7, "since": "2026-01-01T00:00:00+0000", "command": "train", "token": "x"}


@pytest.fixture
def quick(monkeypatch):
    """Shorten leases to 2.5 seconds (S3 has a time resolution of one second)."""
    monkeypatch.setattr(remote, "INTERVAL", 0.1)
    monkeypatch.setattr(remote, "LEASE", 2.5)


@pytest.fixture
def ending(quick, monkeypatch):
    """Shorten leases below the time resolution of S3, for locks that no process refreshes."""
    monkeypatch.setattr(remote, "LEASE", 0.5)


@pytest.fixture
def url(s3):
    return f"{s3}/runs/one"


def read(url):
    fs, path = fsspec.core.url_to_fs(url)
    return fs.cat_file(path)


def put(url, data: bytes):
    fs, path = fsspec.core.url_to_fs(url)
    fs.pipe_file(path, data)


@pytest.mark.pairs
def test_written_files_read_back(url):
    with Workdir(url) as workdir:
        workdir.metrics.write_text('{"step": 1}\n')
        workdir.tensorboard.mkdir()
        (workdir.tensorboard / "events").write_text("e")
        (workdir.path / "data" / "tokens").mkdir(parents=True)
        (workdir.path / "data" / "tokens" / "a.bin").write_bytes(b"12")
        (workdir.path / ".config.json.x.tmp").write_text("half")
        workdir.sync()
        assert read(f"{url}/metrics.jsonl") == b'{"step": 1}\n'
        with open(workdir.metrics, "a") as file:
            file.write('{"step": 2}\n')
        folder = workdir.path
    assert not folder.exists()
    assert read(f"{url}/metrics.jsonl") == b'{"step": 1}\n{"step": 2}\n'  # release makes the last upload
    fs, path = fsspec.core.url_to_fs(url)
    assert sorted(name[len(path) :] for name in fs.find(path)) == [
        "/data/tokens/a.bin",
        "/metrics.jsonl",
        "/tensorboard/events",
    ]
    with Workdir(url) as again:
        assert again.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'
        assert (again.path / "data" / "tokens" / "a.bin").read_bytes() == b"12"
        assert not again.tensorboard.exists()  # event files are only written, so they are not downloaded


def test_readers_need_no_claim(url):
    with Workdir(url) as workdir:
        workdir.config.write_text("{}")
        workdir.sync()
        folder, checkpoints = read_only(url)
        assert (folder / "config.json").read_text() == "{}"
        assert checkpoints == f"{url}/checkpoints"


@pytest.mark.pairs
def test_uploads_only_changes_in_the_background(url, quick):
    with Workdir(url) as workdir:
        sent = []
        put_file = workdir.mirror.fs.put_file
        workdir.mirror.fs = type(workdir.mirror.fs)(use_listings_cache=False, skip_instance_cache=True)
        workdir.mirror.fs.put_file = lambda local, name: (sent.append(name), put_file(local, name))
        workdir.log.write_text("one")
        workdir.sync()
        workdir.sync()
        assert len(sent) == 1
        workdir.log.write_text("two")
        for _ in range(100):
            if read(f"{url}/log.txt") == b"two":
                break
            threading.Event().wait(0.05)
        assert len(sent) == 2


def test_failed_upload_is_reported_once_and_at_the_end(url, quick, monkeypatch, caplog):
    workdir = Workdir(url)
    workdir.claim()

    def refuse(*_):
        raise ConnectionError("no route to the store")

    monkeypatch.setattr(workdir.mirror.fs, "put_file", refuse)
    workdir.log.write_text("precious")

    def find_messages() -> list[str]:
        return [record.getMessage() for record in caplog.records if "no route" in record.getMessage()]

    wait_for(find_messages)
    threading.Event().wait(5 * remote.INTERVAL)
    (line,) = find_messages()
    assert url in line
    with pytest.raises(OSError, match=str(workdir.path)):
        workdir.release()
    assert workdir.log.read_text() == "precious"


def test_a_second_job_is_refused_by_name(url, quick):
    with Workdir(url):
        who = json.loads(read(f"{url}/lock.json"))
        assert who["pid"] == os.getpid()
        with pytest.raises(ValueError, match=rf"{url} is in use by process {os.getpid()} on host .*; stop that job"):
            Workdir(url).claim()
        assert json.loads(read(f"{url}/lock.json")) == who
    assert not fsspec.core.url_to_fs(url)[0].exists(f"{url}/lock.json")
    Workdir(url).claim()


def test_a_lease_that_ended_is_taken_over(url, ending):
    put(f"{url}/lock.json", json.dumps(OTHER).encode())
    message = (workdir := Workdir(url)).claim()
    assert "process 7 on host elsewhere" in message
    assert "did not refresh it" in message
    workdir.release()


@pytest.mark.pairs
@pytest.mark.parametrize("body", [b"", b"[1]", b'{"host": 1}'])
def test_a_lock_that_holds_anything_else_is_taken_over_too(url, ending, body: bytes):
    put(f"{url}/lock.json", body)
    message = (workdir := Workdir(url)).claim()
    assert "its lock was left behind by an unknown job" in message
    workdir.release()


def test_lock_from_an_ended_local_process_is_taken_at_once(url, quick):
    here = {"host": os.uname().nodename, "pid": 2**22 + 1, "pid_namespace": os.readlink("/proc/self/ns/pid")}
    put(f"{url}/lock.json", json.dumps({**OTHER, **here}).encode())
    message = (workdir := Workdir(url)).claim()
    assert "which has ended" in message
    workdir.release()


def test_lost_lease_stops_all_writes(url, quick):
    workdir = Workdir(url)
    workdir.claim()
    put(f"{url}/lock.json", json.dumps(OTHER).encode())
    threading.Event().wait(0.6)
    workdir.log.write_text("late")
    with pytest.raises(ValueError, match="another job has taken it over"):
        workdir.sync()
    with pytest.raises(OSError, match="taken it over"):
        workdir.release()
    assert json.loads(read(f"{url}/lock.json")) == OTHER


@pytest.mark.pairs
def test_only_one_concurrent_claim_wins(url, quick):
    won, lost = [], []

    def job():
        workdir = Workdir(url)
        try:
            workdir.claim()
            won.append(workdir)
        except ValueError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=job) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1, lost
    won[0].release()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("s3://", "expected gs://BUCKET/RUN or s3://BUCKET/RUN"),
        ("s3://bucket", "expected gs://BUCKET/RUN"),
        ("s3://bucket/../x", "expected gs://BUCKET/RUN"),
        ("memory://x/y", "expected gs://BUCKET/RUN"),
        ("s3://me:hush@bucket/run", "credentials in a URL are refused"),
    ],
)
def test_bad_urls(bad, message):
    with pytest.raises(ValueError, match=message) as error:
        Workdir(bad)
    assert "hush" not in str(error.value)


def test_no_bucket_is_one_line(s3):
    with pytest.raises(FileNotFoundError, match="s3://nosuchbucket/run does not exist, or its bucket does not"):
        Workdir("s3://nosuchbucket/run").claim()


def test_a_missing_package_is_named(monkeypatch):
    def absent(*_):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", absent)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[s3\]'"):
        connect("s3://bucket/x")


def test_secrets_are_redacted():
    assert without_secrets("--workdir=s3://a:b@c/d x") == "--workdir=s3://...@c/d x"
    assert "abc" not in without_secrets("https://h/x?X-Amz-Signature=abc&y=1")
    for url in ("s3://key:secret@bucket/x", "https://h/x.txt?X-Amz-Credential=abc"):
        with pytest.raises(ValueError, match="credentials in a URL are refused"):
            connect(url)


@pytest.mark.pairs
def test_by_gcs_too(gcs):
    mirror = Mirror(f"{gcs}/run")
    assert mirror.claim({"host": "a", "pid": 1, "since": "", "command": ""}) is None
    (mirror.folder / "config.json").write_text("{}")
    mirror.close()
    again = Mirror(f"{gcs}/run")
    again.fetch()
    assert (again.folder / "config.json").read_text() == "{}"
