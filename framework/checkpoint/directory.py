"""The directory of checkpoints: what each says about itself, which are complete, what a killed job left.

A checkpoint is a directory named by its step, in at least eight digits. Orbax writes it under a temporary name and
renames it when it is complete:

    00000100/manifest/data.json     leaves with shape, dtype and checksum; the caller's `extra`; a digest of all that
    00000100/state/                 the arrays, by orbax
    00000100/commit_success.txt     the commit marker, written last, by orbax
    frozen/00000001/                in the same form, the arrays that do not learn: steps refer to them

An object store knows no renames: there a step's arrays are in a folder `state-...` of their own, written by
checkpoint_objects, and the manifest, which names that folder, is written last and as a whole: it is the commit.

The manifest is JSON, so nothing stored is ever executed on reading it. No array is read here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from framework.files.remote import connect, is_url
from framework.terminal.tables import Section, render

FORMAT = 1
MANIFEST, MANIFEST_FILE = "manifest", "data.json"
STATE = "state"
FROZEN = "frozen"
COMMIT_MARKER = "commit_success.txt"

_STEP = re.compile(r"\d{1,18}")
# What a killed process may leave behind, named by us, or by orbax for a step of ours. Nothing else is ever removed.
_LEFTOVER = re.compile(r"\d{8,18}(\.orbax-checkpoint-tmp.*|\.deleting)")
_OBJECTS = STATE + "-"
_REPLACED = re.compile(r"(\d{8,18})\.replaced")


class CheckpointError(ValueError):
    """Something is wrong with a checkpoint; the message says which, what, and what is left."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """There is no such checkpoint, or it is not complete."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint is of another model: leaves are missing, extra, or of another shape or dtype."""


class CheckpointCorruptError(CheckpointError):
    """Stored bytes cannot be read, or are not what was saved."""


class CheckpointFormatError(CheckpointError):
    """The checkpoint is whole, and of a format that is not known here: another version of this program wrote it."""


class CheckpointSaveError(CheckpointError):
    """A save failed, or the disk has no room for it; the checkpoints before it are untouched."""


# --- the manifest ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeafRecord:
    """What is stored of one leaf: its logical shape, dtype name and checksum."""

    shape: tuple[int, ...]
    dtype: str
    checksum: str = ""

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but its arrays."""

    step: int  # how many steps the state has taken
    leaves: dict[str, LeafRecord]  # by logical path, such as "parameter/stack/attention/query/weight"
    extra: dict[str, Any]  # the caller's JSON: data position, seed, resolved config, ...
    versions: dict[str, str]  # of this framework, jax and orbax, when it was saved
    saved_at: str  # wall clock, ISO 8601
    frozen: int | None = (
        None  # which of the directories of frozen arrays belongs to this; None: `leaves` has everything
    )
    arrays: str = STATE  # where the arrays are; anything but STATE was written by checkpoint_objects

    def to_json(self) -> dict[str, Any]:
        """As stored. `digest` covers all the rest, so that a changed byte in it does not go unnoticed either."""
        body = {"format": FORMAT, **asdict(self)}
        return {**body, "digest": _digest(body)}

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Of the checkpoint in `directory`.

        Raises:
            CheckpointCorruptError: its bytes cannot be read, or were changed since it was written.
            CheckpointFormatError: it is whole, and of a format that is not known here.
            PermissionError: this user may not read it.
        """
        path = directory / MANIFEST / MANIFEST_FILE
        try:
            body = json.loads(path.read_bytes())
            digest, found = body.pop("digest"), _digest(body)
            known = body.pop("format")
        except PermissionError as error:  # no fault of the checkpoint: the one before is not to be taken instead
            raise PermissionError(f"no permission to read {path}") from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointCorruptError(f"{path} cannot be read: {one_line(error)}") from error
        if digest != found:
            raise CheckpointCorruptError(f"{path} was changed after it was saved: its digest does not match")
        if known != FORMAT:
            writer = (body.get("versions") or {}).get("plimsoll-train", "an unknown version")
            raise CheckpointFormatError(
                f"{path} has format {known}, written by plimsoll-train {writer}; this version reads format {FORMAT}: "
                "install that version, or choose another --workdir"
            )
        for name, leaf in body["leaves"].items():
            body["leaves"][name] = LeafRecord(tuple(leaf["shape"]), leaf["dtype"], leaf["checksum"])
        return cls(**body)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def one_line(error: BaseException) -> str:
    """The first line of what an error goes back to: orbax wraps the message that helps in several that do not."""
    while (deeper := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = deeper
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def mismatch_table(stored: Mapping[str, LeafRecord], wanted: Mapping[str, LeafRecord], limit: int = 40) -> str | None:
    """A table of the leaves that differ between a checkpoint and a state; None if there are none."""
    rows = []
    for name in sorted({*stored, *wanted}):
        old, new = stored.get(name), wanted.get(name)
        if old is None or new is None:
            rows.append((name, "missing" if old is None else "extra", str(old or "-"), str(new or "-")))
        elif str(old) != str(new):
            rows.append((name, "reshaped" if old.shape != new.shape else "other dtype", str(old), str(new)))
    if not rows:
        return None
    counts = Counter(kind for _, kind, *_ in rows)
    kinds = [f"{counts[kind]} {kind}" for kind in ("missing", "extra", "reshaped", "other dtype") if counts[kind]]
    head = f"{', '.join(kinds)} of {len(wanted)} leaves"
    table = render([Section(head, [("leaf", "difference", "checkpoint", "model"), *rows[:limit]])]).rstrip()
    return table + (f"\n... and {len(rows) - limit} more" if len(rows) > limit else "")


# --- the directory ---------------------------------------------------------------------------------------------------


def folder(path: str | os.PathLike[str]) -> Any:
    """A Path, or of a URL etils' equivalent. Raises ValueError: a URL that cannot be used."""
    if not is_url(path):
        return Path(os.path.abspath(path))
    from etils import epath

    if not os.fspath(path).startswith(("gs://", "s3://")):
        raise ValueError(f"checkpoints: expected a local folder, gs://BUCKET/... or s3://BUCKET/..., got {str(path)!r}")
    connect(os.fspath(path))
    return epath.Path(path)


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return root / f"{step:08d}"


def scan(root: Path) -> tuple[list[int], list[str]]:
    """The committed steps, ascending, and what is wrong with the other directories that look like steps."""
    committed: list[int] = []
    problems: list[str] = []
    for entry in sorted(found.name for found in root.iterdir()) if root.is_dir() else []:
        if not _STEP.fullmatch(entry):
            continue
        path, right = root / entry, step_directory(root, int(entry))
        if path != right:
            if not right.exists():
                problems.append(f"{path}: not a name that this program gives; it would be {right.name}")
        elif (problem := incomplete(path)) is not None:
            problems.append(f"{path}: incomplete: {problem}")
        else:
            committed.append(int(entry))
    return sorted(committed), problems


def put_aside(root: Path) -> list[int]:
    """The steps of checkpoints that were put aside for a successor that never came, ascending: the next Checkpointer
    that may write puts them back."""
    if is_url(root) or not root.is_dir():
        return []
    names = [found for entry in root.iterdir() if (found := _REPLACED.fullmatch(entry.name))]
    return sorted(int(name[1]) for name in names if incomplete(root / name[0]) is None)


def incomplete(path: Path) -> str | None:
    """Why a path is no committed checkpoint; None if it is one. Looks at names only."""
    if os.path.islink(path):
        return "it is a symbolic link"
    if not path.is_dir():
        return "it is not a directory" if path.exists() else "there is no such directory"
    names = [entry.name for entry in path.iterdir()]
    if not names:
        return "it is empty"
    needed = COMMIT_MARKER, "_CHECKPOINT_METADATA", f"{STATE}/_METADATA", f"{STATE}/manifest.ocdbt"
    if any(name.startswith(_OBJECTS) for name in names):
        needed = ()
    missing = [name for name in (*needed, f"{MANIFEST}/{MANIFEST_FILE}") if not (path / name).is_file()]
    return f"{missing[0]} is missing" if missing else None


def remove_leftovers(root: Path) -> list[str]:
    """Removes what failed or killed saves and deletions left in `root`; returns a message for each. Only directories
    whose names this program gives: half-written ones, half-deleted ones, and those that were put aside while their
    successor was written (put back if that never came)."""
    messages = []
    if is_url(root):
        return [note for entry in (root.iterdir() if root.exists() else ()) for note in _remove_objects(entry)]
    for entry in sorted(os.listdir(root)):
        path, aside = root / entry, _REPLACED.fullmatch(entry)
        if aside and not os.path.lexists(root / aside[1]):
            path.rename(root / aside[1])
            messages.append(f"put {root / aside[1]} back, which was to be replaced")
        elif aside and (path.is_symlink() or path.is_file()):
            path.unlink()
        elif (aside or _LEFTOVER.fullmatch(entry)) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
            messages.append(f"removed {path}, left behind by a job that was stopped")
    return messages


def _remove_objects(path: Any) -> list[str]:
    """In an object store: what is in a step's folder, but not of a checkpoint that was committed."""
    names = [entry.name for entry in path.iterdir()] if _STEP.fullmatch(path.name) and path.is_dir() else []
    arrays = [name for name in names if name.startswith(_OBJECTS)]
    if not arrays or (MANIFEST in names and len(arrays) == 1):
        return []
    kept = Manifest.read(path).arrays if MANIFEST in names else None
    stale = [name for name in arrays if name != kept]
    for name in stale:
        (path / name).rmtree()
    return [f"removed {path / name}, left behind by a save that did not end, or replaced" for name in stale]


def delete_step(root: Path, step: int) -> None:
    """Deletes a checkpoint; killed halfway, what remains does not look like one."""
    if is_url(root):
        path: Any = step_directory(root, step)
        (path / MANIFEST / MANIFEST_FILE).unlink()
        return path.rmtree()
    shutil.rmtree(step_directory(root, step).rename(root / f"{step:08d}.deleting"))


def describe(root: str | os.PathLike[str], step: int | None = None) -> str:
    """A text for people: the checkpoints in `root`, and the leaves of one of them, the newest if `step` is None. Raises
    CheckpointMissingError: there is none; CheckpointCorruptError: its manifest is not readable."""
    committed, problems = scan(folder(root))
    text = "\n".join([f"{root}: committed steps {committed or 'none'}", *problems])
    step = max(committed, default=None) if step is None else step
    if step not in committed:
        raise CheckpointMissingError(text if step is None else f"no checkpoint of step {step}; {text}")
    manifest = Manifest.read(step_directory(folder(root), step))
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    width = max(map(len, manifest.leaves), default=0)
    leaves = [f"{name:{width}}  {leaf.checksum}  {leaf}" for name, leaf in manifest.leaves.items()]
    extra = ", ".join(manifest.extra) or "none"
    return "\n".join([text, f"step {step}, saved {manifest.saved_at} by {versions}; extra: {extra}", *leaves])
