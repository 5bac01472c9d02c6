"""The directory of checkpoints: manifests, completeness checks, and leftovers of killed jobs.

A checkpoint is a directory named by its step, in at least eight digits. Orbax writes it under a temporary name and
renames it when it is complete:

    00000100/manifest/data.json     leaves with shape, dtype and checksum; the caller's `extra`; a digest of all these
    00000100/state/                 the arrays, by orbax
    00000100/commit_success.txt     the commit marker, written last, by orbax
    frozen/00000001/                the frozen arrays, in the same format; the manifests of steps refer to them

Object stores have no renames. There, chunk_store.py writes a step's arrays to a separate folder `state-...`, and then
the manifest, which names that folder, as a single object: this write is the commit. A save through a window has the
same format on a disk, where it is written under a temporary name too.

The manifest is JSON, so reading it never executes stored code. This file does not read any arrays.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import plimsoll
from plimsoll.framework.files.remote import connect, is_url
from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.terminal.tables import TableSection, render

if TYPE_CHECKING:
    import jax
    from etils import epath

    from plimsoll.framework.layout import SplitArray, SplitSpec

FORMAT = 1
MANIFEST = "manifest"
MANIFEST_FILE = "data.json"
STATE = "state"
FROZEN = "frozen"
COMMIT_MARKER = "commit_success.txt"
# Files of a step on disk, in addition to the manifest and the array data; none of them is empty.
_ORBAX_FILES = (COMMIT_MARKER, "_CHECKPOINT_METADATA", f"{STATE}/_METADATA", f"{STATE}/manifest.ocdbt")

_STEP = re.compile(r"\d{1,18}")
# Names of leftovers of a killed process, given by Plimsoll or by orbax for one of its steps. Nothing else is ever
# removed.
_LEFTOVER = re.compile(r"\d{8,18}(\.orbax-checkpoint-tmp.*|\.writing|\.deleting)")
# In an object store, each save of a step has its own array folder with a random suffix.
_OBJECTS = STATE + "-"
# A checkpoint that was moved aside while its successor is being written.
_REPLACED = re.compile(r"(\d{8,18})\.replaced")


class CheckpointError(ValueError):
    """A problem with a checkpoint; the message names the checkpoint, the problem, and the remaining checkpoints."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """The checkpoint does not exist, or it is incomplete."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint belongs to another model: leaves are missing, extra, or have another shape or dtype."""


class CheckpointCorruptError(CheckpointError):
    """Stored bytes cannot be read, or differ from what was saved."""


class CheckpointFormatError(CheckpointError):
    """The checkpoint is intact, but another version of Plimsoll wrote it in a format unknown to this version."""


class CheckpointSaveError(CheckpointError):
    """A save failed, or the disk has no room for it; earlier checkpoints are untouched."""


# --- the manifest ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeafRecord:
    """The record of one leaf: its logical shape, dtype name and checksum."""

    shape: tuple[int, ...]
    dtype: str
    checksum: str = ""

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def record_leaves(
    leaves: Mapping[str, jax.Array | SplitArray | jax.ShapeDtypeStruct | SplitSpec],
    checksums: Mapping[str, str] | None = None,
) -> dict[str, LeafRecord]:
    """Return the record of each leaf, by path, with the leaf's checksum if `checksums` are given."""
    checksums = checksums or {}
    return {name: LeafRecord(tuple(x.shape), str(x.dtype), checksums.get(name, "")) for name, x in leaves.items()}


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except its arrays.

    Attributes:
        step: number of training steps that the state has taken.
        leaves: record of each leaf by logical path, such as "parameter/stack/attention/query/weight".
        extra: JSON data of the caller: data position, seed, resolved config, ...
        versions: versions of Plimsoll, jax and orbax that saved the checkpoint.
        saved_at: wall-clock time, ISO 8601.
        frozen: number of the directory with the frozen arrays of this step; None if `leaves` has all arrays.
        arrays: folder of the arrays; STATE if written by orbax, any other name if written by chunk_store.py.
    """

    step: int
    leaves: dict[str, LeafRecord]
    extra: dict[str, Any]
    versions: dict[str, str]
    saved_at: str
    frozen: int | None = None
    arrays: str = STATE

    @classmethod
    def create(
        cls,
        step: int,
        arrays: Mapping[str, jax.Array | SplitArray],
        checksums: Mapping[str, str],
        extra: dict[str, Any],
        frozen_number: int | None,
    ) -> Manifest:
        """Return the manifest of a checkpoint that the installed versions save now.

        Args:
            step, extra, frozen_number: see the attributes.
            arrays: arrays by path, without the frozen ones.
            checksums: their checksums, by path.
        """
        records = record_leaves(arrays, checksums)
        saved_at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        versions = {"plimsoll-train": plimsoll.__version__}
        for package in ("jax", "orbax-checkpoint"):
            # Not importlib.metadata.version, which raises an error for a checkout that was never installed.
            installed = next(iter(importlib.metadata.distributions(name=package)), None)
            versions[package] = "not installed as a package" if installed is None else installed.version
        return cls(step, records, extra, versions, saved_at, frozen_number)

    def to_json(self) -> dict[str, object]:
        """Return the manifest as stored JSON. `digest` covers all other entries, so a changed byte is detected."""
        body = {"format": FORMAT, **asdict(self)}
        return {**body, "digest": _digest(body)}

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of the checkpoint in `directory`.

        Raises:
            CheckpointCorruptError: its bytes cannot be read, or have changed since it was written.
            CheckpointFormatError: it is intact, but its format is unknown to this version.
            PermissionError: the user has no permission to read it.
        """
        path = directory / MANIFEST / MANIFEST_FILE
        try:
            body = parse_json(path.read_bytes())
            stored_digest = body.pop("digest")
            digest = _digest(body)
            stored_format = body.pop("format")
        except PermissionError as error:
            # Not a CheckpointCorruptError: the checkpoint may be valid, so an older one must not be used instead.
            raise PermissionError(f"no permission to read {path}") from error
        # Corrupted JSON may be valid JSON of any other type, so lookups can fail in many ways.
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointCorruptError(f"{path} cannot be read: {summarize_error(error)}") from error
        if stored_digest != digest:
            raise CheckpointCorruptError(f"{path} was changed after it was saved: its digest does not match")
        if stored_format != FORMAT:
            writer = (body.get("versions") or {}).get("plimsoll-train", "an unknown version")
            raise CheckpointFormatError(
                f"{path} has format {stored_format}, written by plimsoll-train {writer}; "
                f"this version reads format {FORMAT}: install that version, or choose another --workdir"
            )
        for name, leaf in body["leaves"].items():
            shape = tuple(leaf["shape"])
            body["leaves"][name] = LeafRecord(shape, leaf["dtype"], leaf["checksum"])
        return cls(**body)


def _digest(body: Mapping[str, object]) -> str:
    # Sort the keys, because the digest must not depend on the order in which they were read.
    text = json.dumps(body, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def summarize_error(error: BaseException) -> str:
    """Return the first line of an error's root cause: orbax wraps the useful message in several unhelpful ones."""
    while True:
        cause = error.__cause__
        if cause is None and not error.__suppress_context__:
            cause = error.__context__
        if cause is None:
            break
        error = cause
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line[:300]}"


def mismatch_table(stored: Mapping[str, LeafRecord], expected: Mapping[str, LeafRecord], limit: int = 4) -> str | None:
    """Return a table of the leaves that differ between a checkpoint and a state; None if there are none.

    Args:
        stored: leaves of the checkpoint, by path.
        expected: leaves of the state, by path.
        limit: maximum number of rows for each kind of difference, because a change of one field may alter all leaves.
    """
    rows: list[tuple[str, str, str, str]] = []
    for name in sorted({*stored, *expected}):
        old = stored.get(name)
        new = expected.get(name)
        if old is None or new is None:
            difference = "missing" if old is None else "extra"
            rows.append((name, difference, str(old or "-"), str(new or "-")))
        elif str(old) != str(new):
            difference = "reshaped" if old.shape != new.shape else "other dtype"
            rows.append((name, difference, str(old), str(new)))
    if not rows:
        return None
    summaries = []
    shown = []
    for difference in ("missing", "extra", "reshaped", "other dtype"):
        matching_rows = [row for row in rows if row[1] == difference]
        if matching_rows:
            summaries.append(f"{len(matching_rows)} {difference}")
            shown.extend(matching_rows[:limit])
    head = f"{', '.join(summaries)} of {len(expected)} leaves"
    columns = ("leaf", "difference", "checkpoint", "model")
    section = TableSection(head, [columns, *sorted(shown)])
    table = render([section]).rstrip()
    num_hidden = len(rows) - len(shown)
    if num_hidden > 0:
        table += f"\n... and {num_hidden} more"
    return table


# --- the directory ---------------------------------------------------------------------------------------------------


def folder(path: str | os.PathLike[str]) -> Path:
    """Return the absolute Path of a local folder, or the etils equivalent of a Path for a URL.

    Raises:
        ValueError: the URL belongs to an unsupported store, or cannot be used.
    """
    if not is_url(path):
        return Path(os.path.abspath(path))
    from etils import epath

    url = os.fspath(path)
    if not url.startswith(("gs://", "s3://")):
        raise ValueError(f"checkpoints: expected a local folder, gs://BUCKET/... or s3://BUCKET/..., got {str(path)!r}")
    connect(url)
    return cast(Path, epath.Path(path))


def step_directory(root: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step, whether or not it exists."""
    return root / f"{step:08d}"


def scan(root: Path) -> tuple[list[int], list[str]]:
    """Return the committed steps, ascending, and the problems of other directories that look like steps."""
    committed: list[int] = []
    problems: list[str] = []
    if not root.is_dir():
        return committed, problems
    names = sorted(entry.name for entry in root.iterdir())
    for name in names:
        if not _STEP.fullmatch(name):
            continue
        step = int(name)
        path = root / name
        expected_path = step_directory(root, step)
        if path != expected_path:
            # If both names exist, the canonical one is the checkpoint.
            if not expected_path.exists():
                problems.append(f"{path}: unexpected name; expected {expected_path.name}")
            continue
        problem = find_missing(path)
        if problem is not None:
            problems.append(f"{path}: incomplete: {problem}")
        else:
            committed.append(step)
    # The names are sorted as strings, which matches the order of the steps only up to eight digits.
    return sorted(committed), problems


def list_moved_aside(root: Path) -> list[int]:
    """List the steps of checkpoints that were moved aside for a successor that was never written, ascending.

    The next Checkpointer that is not read-only puts them back.
    """
    # Object stores have no renames, so nothing is moved aside there.
    if is_url(root) or not root.is_dir():
        return []
    matches = [_REPLACED.fullmatch(entry.name) for entry in root.iterdir()]
    names = [match for match in matches if match is not None]
    return sorted(int(name[1]) for name in names if find_missing(root / name[0]) is None)


def find_missing(path: Path) -> str | None:
    """Return the reason why a path is not a committed checkpoint; None if it is one. Checks names only."""
    if os.path.islink(path):
        return "it is a symbolic link"
    if not path.is_dir():
        return "it is not a directory" if path.exists() else "there is no such directory"
    names = [entry.name for entry in path.iterdir()]
    if not names:
        return "it is empty"
    needed = [f"{MANIFEST}/{MANIFEST_FILE}"]
    # An array folder written by chunk_store.py has none of orbax's files: there the manifest is the commit.
    if not any(name.startswith(_OBJECTS) for name in names):
        needed = [*_ORBAX_FILES, *needed]
    missing = [name for name in needed if not (path / name).is_file()]
    return f"{missing[0]} is missing" if missing else None


def remove_leftovers(root: Path) -> list[str]:
    """Remove leftovers of failed or killed saves and deletions in `root`; returns a message for each.

    This only affects directories with names given by Plimsoll: half-written ones, half-deleted ones, and those that
    were moved aside while their successor was written (which are put back if it was never completed).
    """
    messages: list[str] = []
    if is_url(root):
        entries = root.iterdir() if root.exists() else ()
        for entry in entries:
            messages += _remove_objects(cast("epath.Path", entry))
        return messages
    for name in sorted(os.listdir(root)):
        path = root / name
        replaced = _REPLACED.fullmatch(name)
        if replaced and _has_lost_content(root / replaced[1]):
            shutil.rmtree(root / replaced[1])
        if replaced and not os.path.lexists(root / replaced[1]):
            path.rename(root / replaced[1])
            messages.append(f"restored {root / replaced[1]}: its replacement was not completed")
        elif replaced and (path.is_symlink() or path.is_file()):
            # The replaced entry was a link with a step's name: remove the link, not its target.
            path.unlink()
        elif (replaced or _LEFTOVER.fullmatch(name)) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
            messages.append(f"removed {path}, left behind by a job that was stopped")
    return messages


def _has_lost_content(path: Path) -> bool:
    """Return whether a power cut has emptied files of a step's directory."""
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        Manifest.read(path)
    except CheckpointCorruptError:
        return True
    except CheckpointFormatError:
        return False
    return any((path / name).is_file() and not (path / name).stat().st_size for name in _ORBAX_FILES)


def _remove_objects(path: epath.Path) -> list[str]:
    """Remove a step's array folders in an object store that no manifest refers to; returns a message for each."""
    if not _STEP.fullmatch(path.name) or not path.is_dir():
        return []
    names = [entry.name for entry in path.iterdir()]
    array_folders = [name for name in names if name.startswith(_OBJECTS)]
    is_committed = MANIFEST in names
    # The names are enough to detect the usual case, without a request for the manifest.
    if not array_folders or (is_committed and len(array_folders) == 1):
        return []
    committed_folder = Manifest.read(cast(Path, path)).arrays if is_committed else None
    stale_folders = [name for name in array_folders if name != committed_folder]
    for name in stale_folders:
        (path / name).rmtree()
    return [f"removed {path / name}, left behind by an unfinished or replaced save" for name in stale_folders]


def delete_step(root: Path, step: int) -> None:
    """Delete a checkpoint; if killed halfway, the remaining files do not look like a checkpoint."""
    path = step_directory(root, step)
    if is_url(root):
        # The manifest is the commit, so delete it first.
        (path / MANIFEST / MANIFEST_FILE).unlink()
        cast("epath.Path", path).rmtree()
        return
    doomed = path.rename(root / f"{step:08d}.deleting")
    shutil.rmtree(doomed)


def describe_checkpoints(root: str | os.PathLike[str], step: int | None = None) -> str:
    """Describe the checkpoints in `root`, and the leaves of one of them, in human-readable text.

    Args:
        root: folder of the checkpoints.
        step: checkpoint whose leaves are listed; None for the newest.

    Raises:
        CheckpointMissingError: there is no such checkpoint.
        CheckpointCorruptError: the manifest is not readable.
    """
    committed, problems = scan(folder(root))
    overview = "\n".join([f"{root}: committed steps {committed or 'none'}", *problems])
    if step is None:
        step = max(committed, default=None)
    if step not in committed:
        message = overview if step is None else f"no checkpoint of step {step}; {overview}"
        raise CheckpointMissingError(message)
    manifest = Manifest.read(step_directory(folder(root), step))
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    extra = ", ".join(manifest.extra) or "none"
    headline = f"step {step}, saved {manifest.saved_at} by {versions}; extra: {extra}"
    width = max(map(len, manifest.leaves), default=0)
    leaf_lines = [f"{name:{width}}  {leaf.checksum}  {leaf}" for name, leaf in manifest.leaves.items()]
    return "\n".join([overview, headline, *leaf_lines])
