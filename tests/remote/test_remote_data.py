"""Data in object stores: the same batches as from a disk, and one-line errors."""

import numpy as np
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.data.files import find
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import TextFiles, TokenMemmap
from plimsoll.framework.data.tokenize import write_tokens
from plimsoll.framework.data.tokenizers import ByteTokenizer
from plimsoll.framework.files.remote import connect


def upload(path, url):
    fs, target = connect(url)
    fs.put_file(str(path), target)


def batches(source, folder, cache_dir=None):
    pipeline = DataPipeline(
        source=source, tokenizer=config_for(ByteTokenizer), seq_len=16, global_batch_size=4, cache_dir=cache_dir
    )
    pipeline.setup(folder)
    return pipeline.fingerprint(), [pipeline.train_batch(step, range(4))["tokens"] for step in range(6)]


def same(a, b):
    assert a[0] == b[0], "another fingerprint"
    np.testing.assert_array_equal(a[1], b[1])


@pytest.fixture
def texts(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("".join(rng.choice(list("abcdef \n"), 400)))
    return tmp_path


@pytest.mark.pairs
def test_text_gives_the_same_batches(store, texts, tmp_path):
    for name in ("a.txt", "b.txt"):
        upload(texts / name, f"{store}/text/{name}")
    local = batches(config_for(TextFiles, paths=[f"{texts}/*.txt"]), tmp_path / "one")
    same(batches(config_for(TextFiles, paths=[f"{store}/text/*.txt"]), tmp_path / "two"), local)


@pytest.mark.pairs
@pytest.mark.parametrize("sidecar", [True, False])
def test_token_files_are_fetched_once_and_again_when_they_change(s3, texts, tmp_path, sidecar):
    def prepare(name):
        list(write_tokens(TextFiles(paths=[str(texts / name)]), ByteTokenizer(), tmp_path / "x.bin"))
        upload(tmp_path / "x.bin", f"{s3}/x.bin")
        if sidecar:
            upload(tmp_path / "x.json", f"{s3}/x.json")
        else:
            (tmp_path / "x.json").unlink()

    cache = tmp_path / "cache"
    remote = config_for(TokenMemmap, path=f"{s3}/x.bin")
    local = config_for(TokenMemmap, path=str(tmp_path / "x.bin"))
    prepare("a.txt")
    same(batches(remote, tmp_path / "one", str(cache)), batches(local, tmp_path / "two"))
    (copy,) = cache.glob("fetched/*/x.bin")
    before = copy.stat()
    same(batches(remote, tmp_path / "three", str(cache)), batches(local, tmp_path / "two"))
    assert copy.stat().st_mtime_ns == before.st_mtime_ns
    prepare("b.txt")
    same(batches(remote, tmp_path / "four", str(cache)), batches(local, tmp_path / "five"))
    assert len(list(cache.glob("fetched/*/x.bin"))) == 2


def test_without_a_cache_dir_copies_are_in_the_users_cache(s3, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    list(write_tokens(TextFiles(paths=[str(texts / "a.txt")]), ByteTokenizer(), tmp_path / "x.bin"))
    upload(tmp_path / "x.bin", f"{s3}/x.bin")
    batches(config_for(TokenMemmap, path=f"{s3}/x.bin"), tmp_path / "run")
    assert list(tmp_path.glob("mine/plimsoll/fetched/*/x.bin"))


@pytest.mark.pairs
def test_missing_files_are_named(store, texts, tmp_path):
    upload(texts / "a.txt", f"{store}/text/a.txt")
    for path, message in [
        (f"{store}/text/aa.txt", f"data.source: {store}/text/aa.txt does not exist.*a.txt"),
        (f"{store}/text/*.json", "data.source: no file matches"),
        (f"{store}/text", "is a folder"),
        (store.split("://")[0] + "://nosuchbucket/x.txt", "data.source: .*nosuchbucket.*does not exist"),
    ]:
        with pytest.raises((FileNotFoundError, IsADirectoryError), match=message) as error:
            batches(config_for(TextFiles, paths=[path]), tmp_path / "run")
        assert "\n" not in str(error.value)


@pytest.mark.pairs
def test_no_credentials(s3, environment, tmp_path):
    import fsspec

    fsspec.filesystem("s3").clear_instance_cache()
    environment.delenv("AWS_ACCESS_KEY_ID")
    environment.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises((ValueError, PermissionError), match=f"data.source: .*{s3}/x.txt") as error:
        batches(config_for(TextFiles, paths=[f"{s3}/x.txt"]), tmp_path / "run")
    assert "redentials" in str(error.value)
    fsspec.filesystem("s3").clear_instance_cache()


def test_credentials_in_a_url(tmp_path):
    with pytest.raises(ValueError, match=r"s3://\.\.\.@bucket/x: credentials in a URL are refused") as error:
        find("s3://me:hush@bucket/x")
    assert "hush" not in str(error.value)
