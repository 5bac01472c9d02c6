"""Files of the Hugging Face Hub: from its cache on this machine, else downloaded with the library `huggingface_hub`.

A branch means the commit that the cache has for it, so that a restarted run reads the same files as before, even
without a network. `hf download` updates the cache to the branch's newest commit.
"""

from __future__ import annotations

import glob
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plimsoll.framework.files.hub_cache import Snapshot, find_snapshot, get_cache_folder
from plimsoll.framework.files.hub_names import HubRepo, parse_url
from plimsoll.framework.terminal.install_hints import install_extra
from plimsoll.framework.terminal.tables import human_bytes

# The library lists a commit's files when it downloads one of them. Every repository of the Hub has this one.
_SMALLEST = (".gitattributes",)
# The first release whose cache has a list of all files of a commit.
_OLDEST_LIBRARY = 2
# A name that no repository has. Without a list of the commit's files, it is unknown whether this file exists, so
# fetching it also fetches the list.
UNKNOWN_FILE = ".plimsoll-lists-the-files"
# The reason why the Hub could not be reached, by address: the request is not repeated for each file.
_unreachable: dict[str, str] = {}


@dataclass(frozen=True)
class FetchResult:
    """The result of a fetch.

    Attributes:
        snapshot: the cached files after the fetch.
        unreachable_reason: the reason why the Hub could not be reached; empty if it was reached, or was not needed.
    """

    snapshot: Snapshot
    unreachable_reason: str


def fetch(repo: HubRepo, patterns: Sequence[str]) -> FetchResult:
    """Downloads the files that match into the cache, unless they are there.

    Args:
        repo: the repository.
        patterns: file names, or globs in which `*` also matches `/`.

    Raises:
        FileNotFoundError: neither the cache nor the Hub has the repository at that revision.
        PermissionError: it is gated.
        ValueError: the files are larger than the free disk space.
    """
    before = find_snapshot(repo)
    if before is not None and not before.missing(patterns):
        return FetchResult(before, "")
    unreachable_reason = explain_unreachable()
    # Once a commit is known, use it for all further requests: its branch may move.
    wanted = repo if before is None else before.repo
    if not unreachable_reason and (before is None or before.sizes is None):
        unreachable_reason = _download(wanted, _SMALLEST)
        before = find_snapshot(wanted)
    missing = [] if before is None or unreachable_reason else before.missing(patterns)
    if before is not None and missing:
        # Announce the download, and refuse it if the disk has too little free space.
        sizes = before.sizes or {}
        num_bytes = sum(sizes.get(name, 0) for name in missing)
        folder = get_cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(folder).free
        size = human_bytes(num_bytes)
        files = f"{len(missing)} file" if len(missing) == 1 else f"{len(missing)} files"
        if num_bytes > free_bytes:
            raise ValueError(
                f"{before.repo}: the download of {files} needs {size}, but {folder} has only {human_bytes(free_bytes)} "
                "free; set HF_HUB_CACHE to another folder"
            )
        print(f"hub: downloading {files} of {before.repo}, {size}", file=sys.stderr, flush=True)
        # The library interprets names as globs.
        unreachable_reason = _download(before.repo, [glob.escape(name) for name in missing])
    snapshot = find_snapshot(wanted if before is None else before.repo)
    if snapshot is None:
        raise FileNotFoundError(
            f"{repo} is not in the cache of the Hub ({get_cache_folder()}), and {advice(repo, unreachable_reason)}"
        )
    return FetchResult(snapshot, unreachable_reason)


def advice(repo: HubRepo, unreachable_reason: str) -> str:
    """Returns the reason why a repository cannot be downloaded, and the command that downloads it."""
    kind = " --repo-type=dataset" if repo.kind == "dataset" else ""
    revision = "" if repo.revision == "main" else f" --revision={repo.revision}"
    command = f"hf download {repo.name}{kind}{revision}"
    return f"{unreachable_reason}; run `{command}` where there is a network (HF_HUB_CACHE selects another folder)"


def require(fetched: FetchResult, names: Iterable[str]) -> None:
    """Raises FileNotFoundError if a file is not in the cache; the message states whether the Hub has it."""
    snapshot = fetched.snapshot
    missing = [name for name in dict.fromkeys(names) if not snapshot.has(name)]
    if not missing:
        return
    listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    if snapshot.sizes is not None and not any(name in snapshot.sizes for name in missing):
        raise FileNotFoundError(f"{snapshot.repo} on the Hub has no file {listed}")
    reason = advice(snapshot.repo, fetched.unreachable_reason or "the Hub does not have it")
    raise FileNotFoundError(
        f"{snapshot.repo}: {listed} is not in the cache of the Hub ({snapshot.folder}), and {reason}"
    )


def local_paths(paths: Iterable[str]) -> list[str]:
    """Returns paths on this machine: for Hub URLs, those in the cache; other paths are unchanged.

    All files of a repository are downloaded in parallel. A glob in a URL becomes a glob in the cache.

    Raises:
        FileNotFoundError, PermissionError, ValueError: as `fetch` and `require`.
    """
    paths = list(paths)
    paths_by_repo: dict[HubRepo, list[str]] = {}
    for path in paths:
        if path.startswith("hf://"):
            repo, name = parse_url(path)
            paths_by_repo.setdefault(repo, []).append(name)
    local_by_url: dict[tuple[HubRepo, str], str] = {}
    for repo, names in paths_by_repo.items():
        fetched = fetch(repo, names)
        require(fetched, [name for name in names if not glob.has_magic(name)])
        for name in names:
            local_by_url[repo, name] = str(fetched.snapshot.folder / name)
    return [local_by_url[parse_url(path)] if path.startswith("hf://") else path for path in paths]


def explain_unreachable() -> str:
    """Returns the reason why the Hub cannot be reached; empty if it can."""
    from huggingface_hub import __version__, constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if int(__version__.partition(".")[0]) < _OLDEST_LIBRARY:
        install = install_extra("hub")
        return f"downloads need huggingface_hub {_OLDEST_LIBRARY}, this is {__version__} ({install})"
    return _unreachable.get(constants.ENDPOINT, "")


def _download(repo: HubRepo, patterns: Sequence[str]) -> str:
    """Downloads matching files into the cache. Returns the reason why the Hub could not be reached; empty if it could.

    Raises FileNotFoundError, PermissionError: the Hub has no such repository, or it is gated.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    endpoint = constants.ENDPOINT
    if find_snapshot(repo) is None:
        print(f"hub: requesting {repo} from {endpoint}", file=sys.stderr, flush=True)
    page = f"{endpoint}/{'datasets/' if repo.kind == 'dataset' else ''}{repo.name}"
    try:
        snapshot_download(
            repo.name,
            repo_type=repo.kind,
            revision=repo.revision,
            cache_dir=get_cache_folder(),
            allow_patterns=list(patterns),
        )
    # In the library, GatedRepoError is a subclass of RepositoryNotFoundError, so this comes first.
    except GatedRepoError as error:
        raise PermissionError(
            f"{repo} is gated: request access at {page}, then run `hf auth login` or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        message = f"no {repo.kind} {repo.name} at {page}, or it is private: check the name, or run `hf auth login`"
        raise FileNotFoundError(message) from error
    except RevisionNotFoundError as error:
        raise FileNotFoundError(f"{page} has no revision {repo.revision!r}") from error
    except Exception as error:
        # A full disk is not a network problem.
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            raise
        # The library and its dependencies raise exceptions without a common base class.
        cause = error.__cause__ or error
        first_line = str(cause).strip().partition("\n")[0]
        reason = f"{endpoint} cannot be reached ({type(cause).__name__}: {first_line[:200]})"
        _unreachable[endpoint] = reason
        return reason
    return ""
