"""The Hub's cache on this machine, in huggingface_hub's layout; read without a network.

    models--ORG--NAME/refs/main                      the commit that a branch pointed to when last requested
    models--ORG--NAME/snapshots/COMMIT/config.json   the files that were downloaded
    models--ORG--NAME/trees/COMMIT.json              the names and sizes of all files of the commit
    models--ORG--NAME/.no_exist/COMMIT/NAME          a file that was requested, but does not exist in the commit

Layout: huggingface_hub 2.4, its documentation's page "Understand caching" and `_tree_cache.py`. The library's own
functions for this take half a second to import, and do not find a commit before one of its files is downloaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from plimsoll.framework.files.hub_names import HubRepo
from plimsoll.framework.files.text_files import parse_json

# Version of the file list that this module reads; a list of another version counts as missing.
_TREE_FORMAT = 1


def get_cache_folder() -> Path:
    """Returns the cache folder, which huggingface_hub derives from the environment variables."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


@dataclass(frozen=True)
class Snapshot:
    """The cached files of a commit.

    Attributes:
        repo: the repository, at the commit.
        folder: folder of its files; it may contain only some of them.
        sizes: sizes in bytes of all files of the commit, by name; None if the cache has no list of them.
        absent: names of files that are known not to exist in the commit.
    """

    repo: HubRepo
    folder: Path
    sizes: dict[str, int] | None
    absent: frozenset[str]

    def has(self, name: str) -> bool:
        """Returns whether a file is in the cache; a link whose content was deleted does not count."""
        return (self.folder / name).is_file()

    def names(self, patterns: Iterable[str]) -> list[str]:
        """Returns the names that match, sorted: from all files of the commit if known, else from those in the cache."""
        if self.sizes is not None:
            return match_names(self.sizes, patterns)
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return match_names([path.relative_to(self.folder).as_posix() for path in paths], patterns)

    def missing(self, patterns: Iterable[str]) -> list[str]:
        """Returns the matching files that are not in the cache, as far as is known.

        Without a list of the commit's files, a pattern without a wildcard counts as a file that the commit may have.
        """
        patterns = list(patterns)
        if self.sizes is not None:
            expected = match_names(self.sizes, patterns)
        else:
            expected = [pattern for pattern in patterns if pattern not in self.absent]
        return [name for name in expected if not self.has(name)]


def match_names(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Returns the names that equal a pattern or match it as a glob, sorted."""
    patterns = list(patterns)
    # A file's own name may contain glob characters.
    return sorted(name for name in names if any(name == one or fnmatchcase(name, one) for one in patterns))


def find_snapshot(repo: HubRepo) -> Snapshot | None:
    """Returns the cached snapshot of a repository at its revision; None if the cache does not know that revision."""
    storage = get_cache_folder() / f"{repo.kind}s--{repo.name.replace('/', '--')}"
    commit = repo.revision
    if not repo.is_pinned:
        try:
            commit = (storage / "refs" / repo.revision).read_text().strip()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
    folder = storage / "snapshots" / commit
    # The list of the commit's files; None if there is none, or it has an unknown format.
    sizes: dict[str, int] | None = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        tree = parse_json((storage / "trees" / f"{commit}.json").read_text())
        if tree["format_version"] == _TREE_FORMAT:
            sizes = {name: int(facts["size"]) for name, facts in tree["files"].items()}
    if not commit or (sizes is None and not folder.is_dir()):
        return None
    absent_folder = storage / ".no_exist" / commit
    absent = frozenset(path.relative_to(absent_folder).as_posix() for path in absent_folder.rglob("*"))
    return Snapshot(repo.at(commit), folder, sizes, absent)
