"""The Hub's cache: we read it the way huggingface_hub does, without a network."""

import shutil
from pathlib import Path

import pytest

from plimsoll.framework.files import hub
from plimsoll.framework.files.hub_cache import find_snapshot
from plimsoll.framework.files.hub_names import HubRepo, parse_model_id, parse_url
from tests.support.hub import COMMIT, Repository, empty_cache, fill_cache

MODEL = HubRepo("model", "acme/tiny")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A repository of three small files."""
    folder = tmp_path / "files"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub/a.txt").write_text("text")
    (folder / "weights[1].bin").write_bytes(b"\0" * 100)
    return Repository("model", "acme/tiny", folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, empty; network requests fail."""
    return empty_cache(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("url", "repo", "path"),
    [
        ("hf://acme/tiny", HubRepo("model", "acme/tiny"), ""),
        ("hf://models/acme/tiny@v1/config.json", HubRepo("model", "acme/tiny", "v1"), "config.json"),
        (
            "hf://datasets/acme/code@refs/convert/parquet/a/b",
            HubRepo("dataset", "acme/code", "refs/convert/parquet"),
            "a/b",
        ),
        ("hf://datasets/acme/code@a%2Fb/x/", HubRepo("dataset", "acme/code", "a/b"), "x"),
    ],
)
def test_urls(url: str, repo: HubRepo, path: str):
    assert parse_url(url) == (repo, path)
    assert parse_url(repo.url(path)) == (repo, path)


@pytest.mark.parametrize(
    "url",
    ["hf://acme", "hf://acme/a--b", "hf://spaces/acme/x", "hf://acme/a/../x", "hf://../a/b", "hf://acme/a@..%2Fb"],
)
def test_invalid_urls_are_refused(url: str):
    with pytest.raises(ValueError, match="hf://"):
        parse_url(url)


def test_ids():
    assert parse_model_id("acme/tiny") == MODEL
    assert parse_model_id("acme/tiny@v1") == MODEL.at("v1")
    for folder in ("tiny", "./acme/tiny", "a/b/c", "/a/b", "~/a", "../a"):
        assert parse_model_id(folder) is None


def test_the_library_reads_the_same_snapshot(cache: Path, repository: Repository):
    library = pytest.importorskip("huggingface_hub")
    folder = fill_cache(cache, repository)
    snapshot = find_snapshot(MODEL)
    assert snapshot is not None
    assert snapshot.folder == folder
    assert library.snapshot_download("acme/tiny", cache_dir=cache, local_files_only=True) == str(folder)
    assert snapshot.sizes == {
        file.path: file.size for file in library.get_cached_repo_tree("acme/tiny", cache_dir=cache)
    }


def test_partial_snapshot_reports_what_is_known(cache: Path, repository: Repository):
    fill_cache(cache, repository, ["config.json"])
    snapshot = find_snapshot(MODEL)
    assert snapshot is not None
    assert snapshot.repo == MODEL.at(COMMIT)
    assert snapshot.missing(["*"]) == ["sub/a.txt", "weights[1].bin"]
    assert not snapshot.missing(["config.json", "tokenizer.json"]), "the commit has no tokenizer.json"
    assert find_snapshot(MODEL.at("other")) is None
    assert find_snapshot(MODEL.at(COMMIT)) == snapshot


def test_without_a_file_list_missing_files_may_exist(cache: Path, repository: Repository):
    folder = fill_cache(cache, repository, ["config.json"], lists=False)
    absent = folder.parents[1] / ".no_exist" / COMMIT
    absent.mkdir(parents=True)
    (absent / "generation_config.json").touch()
    snapshot = find_snapshot(MODEL)
    assert snapshot is not None
    assert snapshot.missing(["config.json", "generation_config.json", "tokenizer.json"]) == ["tokenizer.json"]


def test_a_commit_is_found_by_its_file_list(cache: Path, repository: Repository):
    """The library does not find a commit before it has downloaded one of its files."""
    fill_cache(cache, repository, []).rmdir()
    snapshot = find_snapshot(MODEL)
    assert snapshot is not None
    assert snapshot.missing(["*"]) == ["config.json", "sub/a.txt", "weights[1].bin"]


def test_a_link_without_its_content_is_no_file(cache: Path, repository: Repository):
    folder = fill_cache(cache, repository)
    (folder / "config.json").resolve().unlink()
    snapshot = find_snapshot(MODEL)
    assert snapshot is not None
    assert snapshot.missing(["config.json"]) == ["config.json"]


def test_paths_match_the_cache(cache: Path, repository: Repository):
    folder = fill_cache(cache, repository)
    paths = ["/local/a", "hf://acme/tiny/config.json", "hf://acme/tiny/weights[1].bin", "hf://acme/tiny/sub/*.txt"]
    assert hub.local_paths(paths) == [
        "/local/a",
        *(f"{folder}/{name}" for name in ("config.json", "weights[1].bin", "sub/*.txt")),
    ]
    with pytest.raises(FileNotFoundError, match=r"acme/tiny@aaaaaaaa on the Hub has no file confg\.json"):
        hub.local_paths(["hf://acme/tiny/confg.json"])


def test_missing_files_are_reported_with_the_reason(
    cache: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
):
    fill_cache(cache, repository, ["config.json"])
    with pytest.raises(FileNotFoundError, match=r"acme/other@main is not in .*cache.*HF_HUB_OFFLINE is set; run `hf d"):
        hub.local_paths(["hf://acme/other/a"])
    with pytest.raises(FileNotFoundError, match=rf"sub/a.txt is not in .*hf download acme/tiny --revision={COMMIT}"):
        hub.local_paths(["hf://acme/tiny/sub/a.txt"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.__version__", "1.23.0")
    with pytest.raises(
        FileNotFoundError, match=r"need huggingface_hub 2, this is 1.23.0 \(pip install -e '\.\[hub\]'\)"
    ):
        hub.local_paths(["hf://acme/tiny/sub/a.txt"])
    assert hub.local_paths(["hf://acme/tiny/config.json"]), "any version will do for files that are there"


def test_insufficient_disk_space_fails_before_download(
    cache: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("huggingface_hub")
    fill_cache(cache, repository, ["config.json"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    usage = type(shutil.disk_usage(cache))(total=100, used=50, free=50)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match=r"the download of 1 file needs 100 B, but .* has only 50 B free"):
        hub.local_paths(["hf://acme/tiny/weights[1].bin"])
