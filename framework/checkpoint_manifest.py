"""What a checkpoint says about itself: its leaves with shape, dtype and checksum, the caller's `extra`, and versions.

The manifest is JSON, so nothing stored is ever executed on reading it, and a digest covers it. Also here: how it is
compared with the state that a run wants, and the errors of all checkpoint files.

May import: the standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST = "manifest"
MANIFEST_FILE = "data.json"


class CheckpointError(ValueError):
    """Something is wrong with a checkpoint; the message says which, what, and what is left."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """There is no such checkpoint, or it is not complete."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint is of another model: leaves are missing, extra, or of another shape or dtype."""


class CheckpointCorruptError(CheckpointError):
    """Stored bytes cannot be read, or are not what was saved."""


class CheckpointSaveError(CheckpointError):
    """A save failed in the background; the checkpoints before it are untouched."""


class CheckpointSpaceError(CheckpointError):
    """The disk has no room for another checkpoint; nothing was written."""


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
    """Everything about a checkpoint but its arrays.

    Args:
        step: how many steps the state has taken.
        leaves: by logical path, such as "parameter/stack/attention/query/weight".
        extra: what the caller stored: data position, seed, resolved config, ...; JSON.
        versions: of this framework, jax and orbax, when it was saved.
        saved_at: wall clock, ISO 8601.
        frozen: which of the directories of frozen arrays belongs to this; None: none, `leaves` has everything.
    """

    step: int
    leaves: dict[str, LeafRecord]
    extra: dict[str, Any]
    versions: dict[str, str]
    saved_at: str
    frozen: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As stored. `digest` covers all the rest, so that a changed byte in it does not go unnoticed either."""
        body = {
            "format": FORMAT,
            "step": self.step,
            "saved_at": self.saved_at,
            "versions": self.versions,
            "leaves": {
                name: {"shape": list(leaf.shape), "dtype": leaf.dtype, "checksum": leaf.checksum}
                for name, leaf in self.leaves.items()
            },
            "extra": self.extra,
            "frozen": self.frozen,
        }
        return {**body, "digest": _digest(body)}

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Of the checkpoint in `directory`.

        Raises:
            CheckpointCorruptError: unreadable, changed since it was written, or of a format that is not known here.
        """
        path = directory / MANIFEST / MANIFEST_FILE
        try:
            value = json.loads(path.read_bytes())
            digest = value.pop("digest")
            known = value["format"]
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointCorruptError(f"{path} cannot be read: {one_line(error)}") from error
        if digest != _digest(value):
            raise CheckpointCorruptError(f"{path} was changed after it was saved: its digest does not match")
        if known != FORMAT:
            raise CheckpointCorruptError(f"{path} has format {known}; this version reads format {FORMAT}")
        leaves = {
            name: LeafRecord(tuple(leaf["shape"]), leaf["dtype"], leaf["checksum"])
            for name, leaf in value["leaves"].items()
        }
        frozen = value.get("frozen")  # not in the earliest ones
        return cls(value["step"], leaves, value["extra"], value["versions"], value["saved_at"], frozen)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def one_line(error: BaseException) -> str:
    """The first line of what an error goes back to: orbax wraps the message that helps in several that do not."""
    while (deeper := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = deeper
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"


# --- comparing -------------------------------------------------------------------------------------------------------


def mismatch_table(stored: Mapping[str, LeafRecord], wanted: Mapping[str, LeafRecord], limit: int = 40) -> str | None:
    """A table of the leaves that differ between a checkpoint and a state; None if there are none."""
    rows = []
    for name in sorted({*stored, *wanted}):
        old, new = stored.get(name), wanted.get(name)
        if old is None:
            rows.append((name, "missing", "-", str(new)))
        elif new is None:
            rows.append((name, "extra", str(old), "-"))
        elif old.shape != new.shape:
            rows.append((name, "reshaped", str(old), str(new)))
        elif old.dtype != new.dtype:
            rows.append((name, "other dtype", str(old), str(new)))
    if not rows:
        return None
    head = ("leaf", "difference", "checkpoint", "model")
    shown = [head, *rows[:limit]]
    widths = [max(len(row[i]) for row in shown) for i in range(3)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, [*widths, 0], strict=True)).rstrip() for row in shown]
    if len(rows) > limit:
        lines.append(f"... and {len(rows) - limit} more")
    counts = {kind: sum(row[1] == kind for row in rows) for kind in ("missing", "extra", "reshaped", "other dtype")}
    summary = ", ".join(f"{n} {kind}" for kind, n in counts.items() if n)
    return f"{summary} of {len(wanted)} leaves\n" + "\n".join(lines)
