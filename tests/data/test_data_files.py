"""Finding and reading files on any filesystem; hashes are computed once, and again when a file changes."""

import os
import time
from pathlib import Path

import fsspec
import pytest

from plimsoll.framework.data.files import DataFile, FileHashes, find


def test_a_glob_is_its_matches_in_sorted_order_without_folders(tmp_path: Path):
    for name in ("b.txt", "a.txt", "c.bin", "d[1].txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder.txt").mkdir()
    names = [Path(file.name).name for file in find([str(tmp_path / "c.bin"), str(tmp_path / "*.txt")])]
    assert names == ["c.bin", "a.txt", "b.txt", "d[1].txt"]
    assert [Path(file.name).name for file in find(str(tmp_path / "d[1].txt"))] == ["d[1].txt"]  # exists: no glob


def test_urls_on_any_filesystem_read_alike(tmp_path: Path):
    (tmp_path / "x.txt").write_bytes(b"0123456789")
    fsspec.filesystem("memory").pipe("/files-test/x.txt", b"0123456789")
    for url in (str(tmp_path / "x.txt"), f"file://{tmp_path}/x.txt", "memory://files-test/x.txt"):
        (file,) = find(url)
        assert file.size() == 10
        assert (file.read(2, 5), file.read(8, 20)) == (b"234", b"89")
        assert list(file.chunks(4)) == [b"0123", b"4567", b"89"]
        assert file.position == 10
    assert find("memory://files-test/*.txt")[0].name == "memory:///files-test/x.txt"


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ("{tmp}/tran.txt", FileNotFoundError, "{tmp}/tran.txt does not exist; did you mean 'train.txt'"),
        ("{tmp}/*.jsonl", FileNotFoundError, r"no file matches {tmp}/\*.jsonl"),
        ("{tmp}/nowhere/x.txt", FileNotFoundError, "the folder {tmp}/nowhere of .*/x.txt does not exist"),
        ("{tmp}/nowhere/*.txt", FileNotFoundError, "the folder {tmp}/nowhere of .*txt does not exist"),
        ("{tmp}", IsADirectoryError, "name its files"),
        ("nosuchprotocol://x", ValueError, "nosuchprotocol"),
        ("memory://files-absent/x.txt", FileNotFoundError, "memory://files-absent/x.txt"),
    ],
)
def test_missing_files_are_named(tmp_path: Path, given: str, kind: type, message: str):
    (tmp_path / "train.txt").write_text("x")
    with pytest.raises(kind, match=message.format(tmp=tmp_path)):
        find(given.format(tmp=tmp_path))
    with pytest.raises(ValueError, match=r"at least one path"):
        find([])


def test_a_hash_is_computed_once_and_again_when_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, link, memo = tmp_path / "x.bin", tmp_path / "link.bin", tmp_path / "hashes.json"
    link.symlink_to(path)
    reads = []
    chunks = DataFile.chunks
    monkeypatch.setattr(DataFile, "chunks", lambda self, size: (reads.append(self.name), chunks(self, size))[1])

    def digest(name: Path) -> str:
        hashes = FileHashes(memo)
        value = hashes.sha256(find(str(name))[0])
        hashes.save()
        return value

    def write(data: bytes, age: float) -> None:
        path.write_bytes(data)
        os.utime(path, (time.time() - age,) * 2)

    write(b"a" * 100, age=100)
    first = digest(path)
    assert digest(path) == digest(link) == digest(link) == first
    assert len(reads) == 2
    write(b"b" * 100, age=50)
    assert digest(path) == digest(link) != first
    write(b"c" * 100, age=0)
    # A file that was just changed is read each time.
    assert digest(path) == digest(link)
    assert len(reads) == 6
    assert digest(path) not in memo.read_text()  # just changed: it could change again unnoticed
    memo.write_text('{"half')
    assert digest(path) == digest(link)


def test_a_remote_file_that_changes_is_hashed_again():
    memory = fsspec.filesystem("memory")
    memory.pipe("/files-test/y.txt", b"one")
    (file,), hashes = find("memory://files-test/y.txt"), FileHashes()
    first = hashes.sha256(file)
    time.sleep(0.01)
    memory.pipe("/files-test/y.txt", b"two")
    assert hashes.sha256(file) != first


@pytest.mark.parametrize("kind", ["simplecache", "filecache", "blockcache", "reference"])
def test_filesystems_around_another_one_are_refused(kind, tmp_path, monkeypatch):
    """They would store copies elsewhere or interpret the file's content; a config has to name the file itself."""
    (tmp_path / "x.json").write_text('{"version": 1, "refs": {"a": "text"}}')
    monkeypatch.chdir(tmp_path)
    for url in (f"{kind}::file://{tmp_path}/x.json", f"{kind}://a::{tmp_path}/x.json"):
        with pytest.raises(ValueError, match=f"{kind} is refused; give the URL of the file itself"):
            find(url)
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]
    (tmp_path / kind).write_text("a local file of that name")
    assert find(kind)[0].read() == b"a local file of that name"
