"""Finding, opening and hashing files; writing them whole or not at all."""

import bz2
import gzip
import lzma
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest

from framework.data import storage
from framework.data.storage import BLOCK_BYTES, FileHashes, clear_leftovers, find, temporary_name, write_atomically


def set_age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_a_glob_is_its_matches_in_sorted_order_without_folders(tmp_path: Path):
    for name in ("b.txt", "a.txt", "c.bin"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder.txt").mkdir()
    assert [Path(file.name).name for file in find(str(tmp_path / "*.txt"))] == ["a.txt", "b.txt"]
    assert [Path(file.name).name for file in find([str(tmp_path / "c.bin"), str(tmp_path / "[ab].txt")])] == [
        "c.bin", "a.txt", "b.txt",
    ]  # fmt: skip


def test_a_name_with_glob_letters_that_exists_is_itself(tmp_path: Path):
    (tmp_path / "a[1].txt").write_text("x")
    assert [file.name for file in find(str(tmp_path / "a[1].txt"))] == [str(tmp_path / "a[1].txt")]


def test_urls_of_any_filesystem_read_alike(tmp_path: Path):
    (tmp_path / "x.txt").write_bytes(b"0123456789")
    memory = fsspec.filesystem("memory")
    memory.pipe("/storage-test/x.txt", b"0123456789")
    for url in (str(tmp_path / "x.txt"), f"file://{tmp_path}/x.txt", "memory://storage-test/x.txt"):
        (file,) = find(url)
        assert file.size() == 10
        assert file.read(2, 5) == b"234"
        assert file.read(8, 20) == b"89"
        with file.open() as stream:
            assert stream.read() == b"0123456789"
        assert file.bytes_read == 10
    assert find("memory://storage-test/*.txt")[0].name == "memory:///storage-test/x.txt"


@pytest.mark.parametrize(("extension", "module"), [("gz", gzip), ("bz2", bz2), ("xz", lzma)])
def test_compression_is_inferred_from_the_name(tmp_path: Path, extension: str, module):
    path = tmp_path / f"x.txt.{extension}"
    path.write_bytes(module.compress(b"text " * 1000))
    (file,) = find(str(path))
    with file.open("infer") as stream:
        assert stream.read() == b"text " * 1000
    with file.open() as stream:
        assert stream.read() == path.read_bytes()


@pytest.mark.parametrize(("extension", "package"), [("zst", "zstandard"), ("lz4", "lz4")])
def test_a_codec_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extension: str, package: str
):
    monkeypatch.setattr("fsspec.utils.infer_compression", lambda path: None)  # as fsspec does without the package
    (tmp_path / f"x.jsonl.{extension}").write_bytes(b"compressed")
    with pytest.raises(ValueError, match=f"x.jsonl.{extension}: .*pip install {package}"):
        find(str(tmp_path / "*"))[0].open("infer").__enter__()


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ("{tmp}/tran.txt", FileNotFoundError, "did you mean {tmp}/train.txt"),
        ("{tmp}/*.jsonl", FileNotFoundError, r"no file matches {tmp}/\*.jsonl"),
        ("{tmp}/nowhere/x.txt", FileNotFoundError, "nor does the folder {tmp}/nowhere"),
        ("{tmp}/nowhere/*.txt", FileNotFoundError, "nor does the folder {tmp}/nowhere"),
        ("{tmp}", IsADirectoryError, "name its files"),
        ("nosuchprotocol://x", ValueError, "nosuchprotocol"),
        ("memory://storage-absent/x.txt", FileNotFoundError, "memory://storage-absent/x.txt"),
    ],
)
def test_what_cannot_be_found_is_named(tmp_path: Path, given: str, kind: type, message: str):
    (tmp_path / "train.txt").write_text("x")
    with pytest.raises(kind, match=message.format(tmp=tmp_path)):
        find(given.format(tmp=tmp_path))


def test_no_path_at_all_is_an_error():
    with pytest.raises(ValueError, match=r"at least one path"):
        find([])


def test_a_hash_is_read_once_and_again_when_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, memo = tmp_path / "x.bin", tmp_path / "hashes.json"
    path.write_bytes(b"a" * 100)
    set_age(path, 100)
    monkeypatch.setattr(
        storage.DataFile, "modified", lambda self: os.stat(self.path).st_mtime
    )  # ctime cannot be set back
    reads = []
    blocks = storage.DataFile.blocks
    monkeypatch.setattr(storage.DataFile, "blocks", lambda self: (reads.append(self.name), blocks(self))[1])

    def digest() -> str:
        hashes = FileHashes(memo)
        value = hashes.sha256(find(str(path))[0])
        hashes.save()
        return value

    first = digest()
    assert (digest(), len(reads)) == (first, 1)
    path.write_bytes(b"b" * 100)
    set_age(path, 50)
    assert digest() != first
    assert len(reads) == 2


def test_a_hash_of_a_file_changed_just_now_is_not_memorized(tmp_path: Path):
    path, memo = tmp_path / "x.bin", tmp_path / "hashes.json"
    path.write_bytes(b"a")
    hashes = FileHashes(memo)
    hashes.sha256(find(str(path))[0])
    hashes.save()
    assert not memo.exists()


def test_a_link_is_known_by_what_it_points_to(tmp_path: Path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"a" * 10)
    link.symlink_to(target)
    before = find(str(link))[0].state()
    time.sleep(0.02)
    target.write_bytes(b"b" * 10)  # the link itself does not change
    assert find(str(link))[0].state() != before


def test_a_file_without_a_version_is_never_trusted_unread(monkeypatch: pytest.MonkeyPatch):
    memory = fsspec.filesystem("memory")
    memory.pipe("/storage-test/y.txt", b"one")
    (file,) = find("memory://storage-test/y.txt")
    assert file.state() is not None
    hashes = FileHashes()
    first = hashes.sha256(file)
    monkeypatch.setattr(type(memory), "info", lambda self, path, **kw: {"name": path, "size": 3, "type": "file"})
    assert file.state() is None
    memory.pipe("/storage-test/y.txt", b"two")
    assert hashes.sha256(file) != first


def test_a_damaged_memo_is_made_anew(tmp_path: Path):
    (tmp_path / "hashes.json").write_text('{"half')
    (tmp_path / "x").write_bytes(b"abc")
    expected = FileHashes().sha256(find(str(tmp_path / "x"))[0])
    assert FileHashes(tmp_path / "hashes.json").sha256(find(str(tmp_path / "x"))[0]) == expected


def test_blocks_tile_the_file(tmp_path: Path):
    data = os.urandom(BLOCK_BYTES + 17)
    (tmp_path / "x").write_bytes(data)
    blocks = list(find(str(tmp_path / "x"))[0].blocks())
    assert [len(block) for block in blocks] == [BLOCK_BYTES, 17]
    assert b"".join(blocks) == data


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x.json"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_only_leftovers_of_dead_processes_of_this_machine_are_cleared(tmp_path: Path):
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    dead, host = child.stdout.strip(), socket.gethostname()
    theirs = tmp_path / f".a.tmp-{host}-{dead}-01234567"
    theirs.mkdir()
    (theirs / "half.bin").write_bytes(b"x")
    (tmp_path / f".b.tmp-{host}-{dead}-01234567").write_text("half")
    kept = {temporary_name("mine"), f".c.tmp-otherhost-{dead}-01234567", "tokens-0123"}
    for name in kept:
        (tmp_path / name).write_text("x")
    clear_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept
