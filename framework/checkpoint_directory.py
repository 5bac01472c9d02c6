"""The directory of checkpoints: names, what is complete, what a killed job left, retention, and a text for people.

A checkpoint is a directory named by its step, in at least eight digits. Orbax writes it under a temporary name and
renames it when it is complete:

    00000100/manifest/data.json     ours: framework/checkpoint_manifest.py
    00000100/state/                 the arrays, by orbax
    00000100/commit_success.txt     the commit marker, written last, by orbax
    frozen/00000001/                in the same form, the arrays that do not learn: steps refer to them

May import: the standard library and checkpoint_manifest. No array is read here.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from framework.checkpoint_manifest import MANIFEST, MANIFEST_FILE, CheckpointMissingError, Manifest

STATE = "state"
FROZEN = "frozen"
COMMIT_MARKER = "commit_success.txt"

_STEP = re.compile(r"\d{1,18}")
# What a killed process may leave behind, named by us, or by orbax for a step of ours. Nothing else is ever removed.
_LEFTOVER = re.compile(r"\d{8,18}(\.orbax-checkpoint-tmp.*|\.deleting)")
_REPLACED = re.compile(r"(\d{8,18})\.replaced")


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return root / f"{step:08d}"


def scan(root: Path) -> tuple[list[int], dict[int, str]]:
    """The committed steps, ascending, and what is wrong with the other directories that look like steps."""
    committed: list[int] = []
    problems: dict[int, str] = {}
    for entry in sorted(os.listdir(root)) if root.is_dir() else []:
        if not _STEP.fullmatch(entry):
            continue
        step, path = int(entry), root / entry
        if path != step_directory(root, step):
            if not step_directory(root, step).exists():
                problems[step] = f"{path}: not a name that this program gives; it would be {step:08d}"
        elif (problem := incomplete(path)) is not None:
            problems[step] = f"{path}: incomplete: {problem}"
        else:
            committed.append(step)
    return sorted(committed), problems


def incomplete(path: Path) -> str | None:
    """Why a path is no committed checkpoint; None if it is one. Looks at names only."""
    if path.is_symlink():
        return "it is a symbolic link"
    if not path.is_dir():
        return "it is not a directory"
    if not any(path.iterdir()):
        return "it is empty"
    for name in (COMMIT_MARKER, "_CHECKPOINT_METADATA", f"{STATE}/_METADATA", f"{STATE}/manifest.ocdbt"):
        if not (path / name).is_file():
            return f"{name} is missing"
    if not (path / MANIFEST / MANIFEST_FILE).is_file():
        return f"{MANIFEST}/{MANIFEST_FILE} is missing"
    return None


def remove_leftovers(root: Path) -> list[str]:
    """Removes what saves and deletions that were killed left in `root`; returns a message for each.

    Only directories whose names this program gives: half-written ones, half-deleted ones, and ones that were put aside
    while their successor was written (put back if that never came).
    """
    messages = []
    for entry in sorted(os.listdir(root)):
        path = root / entry
        if path.is_symlink() or not path.is_dir():
            continue
        aside = _REPLACED.fullmatch(entry)
        if aside and not (root / aside[1]).exists():
            path.rename(root / aside[1])
            messages.append(f"put {root / aside[1]} back, which was to be replaced")
        elif aside or _LEFTOVER.fullmatch(entry):
            shutil.rmtree(path)
            messages.append(f"removed {path}, left behind by a job that was stopped")
    return messages


def delete_step(root: Path, step: int) -> None:
    """Deletes a checkpoint; killed halfway, what remains does not look like one."""
    doomed = step_directory(root, step)
    aside = doomed.with_name(doomed.name + ".deleting")
    doomed.rename(aside)
    shutil.rmtree(aside)


def put_aside(root: Path, step: int) -> bool:
    """Renames what is in the way of a new checkpoint of that step; False if nothing is."""
    path = step_directory(root, step)
    if not os.path.lexists(path):
        return False
    path.rename(path.with_name(path.name + ".replaced"))
    return True


def settle(root: Path, step: int, *, saved: bool) -> None:
    """After a save: removes what was put aside for it, or, if it failed, its remains, and puts back what was there."""
    path = step_directory(root, step)
    aside = path.with_name(path.name + ".replaced")
    if not saved:
        for remains in root.glob(f"{path.name}.orbax-checkpoint-tmp*"):
            shutil.rmtree(remains)
    if not os.path.lexists(aside):
        return
    if not saved:
        aside.rename(path)
    elif aside.is_symlink() or not aside.is_dir():
        aside.unlink()
    else:
        shutil.rmtree(aside)


def steps_to_delete(steps: Collection[int], newest: int, keep: int, keep_every: int | None) -> list[int]:
    """What retention removes after `newest` was committed.

    Steps beyond `newest`, which another course of the run left there, are neither counted nor removed.
    """
    past = sorted(step for step in steps if step <= newest)
    return [step for step in past[:-keep] if not (keep_every and step % keep_every == 0)]


def describe(root: str | os.PathLike[str], step: int | None = None) -> str:
    """A text for people: the checkpoints in `root`, and the leaves of one of them (the newest if `step` is None).

    Raises:
        CheckpointMissingError: there is none.
        CheckpointCorruptError: its manifest is not readable.
    """
    committed, problems = scan(Path(root))
    lines = [f"{root}: committed steps {committed or 'none'}", *problems.values()]
    if step is None and not committed:
        raise CheckpointMissingError("\n".join(lines))
    step = committed[-1] if step is None else step
    if step not in committed:
        raise CheckpointMissingError(f"no checkpoint of step {step}; " + "\n".join(lines))
    manifest = Manifest.read(step_directory(Path(root), step))
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    lines.append(f"step {step}, saved {manifest.saved_at} by {versions}; extra: {', '.join(manifest.extra) or 'none'}")
    width = max(map(len, manifest.leaves), default=0)
    lines += [f"{name.ljust(width)}  {leaf.checksum}  {leaf}" for name, leaf in manifest.leaves.items()]
    return "\n".join(lines)
