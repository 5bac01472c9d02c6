"""A fake Hugging Face Hub: a hand-made cache, and a server that imitates its API."""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "a" * 40


@dataclass
class Repository:
    """A repository with one commit that holds the files of a folder."""

    kind: str
    name: str
    folder: Path
    commit: str = COMMIT
    gated: bool = False

    def files(self) -> dict[str, bytes]:
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in paths}


def fill_cache(cache: Path, repository: Repository, names: list[str] | None = None, *, lists: bool = True) -> Path:
    """Write a repository into a cache in huggingface_hub's layout, and return the snapshot's folder.

    Args:
        cache: root of the cache.
        repository: repository to write.
        names: files to include; None for all.
        lists: also write the tree file, which lists all files of the commit.
    """
    storage = cache / f"{repository.kind}s--{repository.name.replace('/', '--')}"
    snapshot = storage / "snapshots" / repository.commit
    entries = {}
    for folder in (storage / "refs", storage / "blobs", storage / "trees", snapshot):
        folder.mkdir(parents=True)
    for name, content in repository.files().items():
        digest = hashlib.sha1(content).hexdigest()
        entries[name] = {"size": len(content), "blob_id": digest}
        if names is None or name in names:
            (storage / "blobs" / digest).write_bytes(content)
            link = snapshot / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(storage / "blobs" / digest, link.parent))
    (storage / "refs/main").write_text(repository.commit)
    if lists:
        (storage / f"trees/{repository.commit}.json").write_text(json.dumps({"format_version": 1, "files": entries}))
    return snapshot


@dataclass
class HubServer:
    """Address and statistics of a running server.

    Attributes:
        url: value for HF_ENDPOINT.
        downloads: names of the files whose contents were requested, in order.
        sent_bytes: number of body bytes sent.
    """

    url: str
    downloads: list[str] = field(default_factory=list)
    sent_bytes: int = 0


@contextlib.contextmanager
def serving(repositories: list[Repository]) -> Iterator[HubServer]:
    """Serve repositories until the end of the block."""
    by_name = {(f"{repository.kind}s", repository.name): repository for repository in repositories}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            segments = self.path.partition("?")[0].strip("/").split("/")
            is_api = segments[0] == "api"
            kind = "models"
            if is_api or segments[0] == "datasets":
                kind = segments[1] if is_api else "datasets"
                segments = segments[2:] if is_api else segments[1:]
            repository = by_name.get((kind, "/".join(segments[:2])))
            if repository is None:
                self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
            elif is_api:
                self.answer_api(repository, segments[2:], with_body)
            else:
                self.answer_file(repository, segments[3], "/".join(segments[4:]), with_body)

        def answer_api(self, repository: Repository, segments: list[str], with_body: bool) -> None:
            if segments[:1] == ["revision"] and segments[1] not in ("main", repository.commit):
                self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body)
                return
            facts: object = {"id": repository.name, "sha": repository.commit, "siblings": []}
            if segments[:1] == ["tree"]:
                entries = []
                for name, content in repository.files().items():
                    digest = hashlib.sha1(content).hexdigest()
                    entries.append({"type": "file", "path": name, "size": len(content), "oid": digest})
                facts = entries
            self.send(200, json.dumps(facts).encode(), {"Content-Type": "application/json"}, with_body)

        def answer_file(self, repository: Repository, revision: str, name: str, with_body: bool) -> None:
            files = repository.files()
            if repository.gated:
                self.send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
            elif name not in files:
                self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repository.commit}, with_body)
            else:
                content = files[name]
                digest = hashlib.sha1(content).hexdigest()
                if with_body:
                    server.downloads.append(name)
                asked = self.headers.get("Range", "")
                headers = {"ETag": f'"{digest}"', "X-Repo-Commit": repository.commit}
                if asked and with_body:
                    first, _, last = asked.removeprefix("bytes=").partition("-")
                    part = content[int(first) : int(last) + 1 if last else None]
                    headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
                    self.send(206, part, headers, with_body)
                else:
                    self.send(200, content, headers, with_body)

        def send(self, status: int, content: bytes, headers: dict[str, str], with_body: bool) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if with_body:
                self.wfile.write(content)
                server.sent_bytes += len(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = HubServer(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def empty_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point the Hub's cache to a new folder under `folder`, forbid requests, and return the cache folder."""
    cache = folder / "cache"
    # The variables are for child processes: in this one, the library may have read them already.
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache
