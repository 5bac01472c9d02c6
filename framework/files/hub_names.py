"""Names of Hugging Face Hub repositories, and the URLs with which configs store them.

hf://ORG/NAME@REVISION/PATH is a file of a model repository, hf://datasets/ORG/NAME@REVISION/PATH one of a dataset.
They are the URLs of huggingface_hub's HfFileSystem.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import quote, unquote

PREFIX = "hf://"
_NAME = r"\w[\w.-]*/\w[\w.-]*"
# The Hub's own branches have slashes in their names; slashes in other branch names are encoded as %2F.
_REVISION = r"refs/(?:convert|pr)/[\w.-]+|[^/@]+"
_ID = re.compile(rf"(?P<name>{_NAME})(@(?P<revision>{_REVISION}))?")
_URL = re.compile(rf"hf://(?P<kind>datasets/|models/)?(?P<name>{_NAME})(@(?P<revision>{_REVISION}))?(/(?P<path>.*))?")
# Repository kinds, which cannot be organization names.
_RESERVED = ("models", "datasets", "spaces", "buckets", "kernels")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubRepo:
    """A repository at a revision.

    Attributes:
        kind: "model" or "dataset".
        name: ORG/NAME.
        revision: a branch, a tag or a commit hash.
    """

    kind: Literal["model", "dataset"]
    name: str
    revision: str = "main"

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit, whose files never change."""
        return _COMMIT.fullmatch(self.revision) is not None

    def at(self, revision: str) -> HubRepo:
        """Returns the same repository at another revision."""
        return replace(self, revision=revision)

    def url(self, path: str = "") -> str:
        """Returns the URL of the repository, or of a file in it."""
        folder = "datasets/" if self.kind == "dataset" else ""
        revision = self.revision if self.revision.startswith("refs/") else quote(self.revision, safe="")
        return f"{PREFIX}{folder}{self.name}@{revision}" + (f"/{path}" if path else "")

    def __str__(self) -> str:
        short = self.revision[:8] if self.is_pinned else self.revision
        return f"{self.name}@{short}"


def is_hub_url(path: str) -> bool:
    """Returns whether a path is a Hub URL."""
    return path.startswith(PREFIX)


def parse_url(url: str) -> tuple[HubRepo, str]:
    """Parses hf://[datasets/]ORG/NAME[@REVISION][/PATH]: the repository, and the path in it, "" for all of it.

    Raises:
        ValueError: the URL does not have this form.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise ValueError(f"{url}: expected hf://datasets/ORG/NAME, hf://datasets/ORG/NAME@REVISION or .../PATH in it")
    kind = "dataset" if match["kind"] == "datasets/" else "model"
    path = (match["path"] or "").strip("/")
    repo = _repo(url, kind, match["name"], match["revision"])
    _check_inside(url, path)
    return repo, path


def parse_model_id(text: str) -> HubRepo | None:
    """Parses ORG/NAME or ORG/NAME@REVISION, the id of a model; None if the text is not an id.

    Raises:
        ValueError: the Hub cannot have such an id.
    """
    match = _ID.fullmatch(text)
    if match is None:
        return None
    return _repo(text, "model", match["name"], match["revision"])


def _repo(text: str, kind: Literal["model", "dataset"], name: str, revision: str | None) -> HubRepo:
    # The cache separates the two parts of a name by "--", so the Hub has no such names.
    if name.partition("/")[0] in _RESERVED:
        raise ValueError(f"{text}: expected ORG/NAME of a model, or hf://datasets/ORG/NAME of a dataset")
    if "--" in name or ".." in name:
        raise ValueError(f"{text}: {name!r} is not a valid Hub name: it must not contain '--' or '..'")
    branch = unquote(revision or "main")
    _check_inside(text, branch)
    return HubRepo(kind, name, branch)


def _check_inside(text: str, path: str) -> None:
    """Raises ValueError if the path would lead out of the folder in which it is resolved."""
    if ".." in path.split("/") or path.startswith("/"):
        raise ValueError(f"{text}: {path!r} points outside the repository")
