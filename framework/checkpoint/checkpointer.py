"""Checkpoints: orbax behind one door.

Saves are asynchronous and atomic; every leaf has a checksum that is verified when it is restored, because orbax loads
flipped bits without a word; arrays are restored straight into the shardings and memory kinds that the layout asks for,
on any mesh, with no second copy. What is stored, and where: docs/checkpoints.md.

Here is the `Checkpointer`; beside it checkpoint_directory (names, manifests, errors), checkpoint_integrity (checksums),
checkpoint_storage (orbax) and checkpoint_objects (object stores).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from framework.checkpoint import directory as files
from framework.checkpoint import objects, storage
from framework.checkpoint.directory import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointMissingError,
    CheckpointSaveError,
)
from framework.checkpoint.integrity import checksums
from framework.config import PositiveInt
from framework.files.remote import is_url
from framework.layout import flatten
from framework.processes import distributed

_log = logging.getLogger(__name__)

# Beside the arrays: the manifest and the index of the pieces.
_OVERHEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class Restored:
    """A restored state."""

    step: int
    state: Any  # the pytree of arrays
    extra: dict[str, Any]  # what the caller had stored beside it
    problems: list[str]  # what was passed over on the way: newer checkpoints that are incomplete or corrupt


class Checkpointer:
    """The checkpoints in one directory. Every process of a job makes one, and calls its methods at the same points.

    Args:
        directory: holds one directory per step; made if it is not there. Local, or of an object store (gs://, s3://).
        keep: the newest this many are kept.
        keep_every: also keep the steps that it divides, for good.
        read_only: for looking at a directory that another job may be writing; `save` is then an error. Otherwise
            what killed saves left behind is removed at once.
        before_commit: in an object store, called by the primary in the background before a checkpoint counts.
        after_commit: called by the primary in the background with each step that was committed.
    """

    def __init__(
        self,
        *,
        directory: str | os.PathLike[str],
        keep: PositiveInt = 3,
        keep_every: PositiveInt | None = None,
        read_only: bool = False,
        before_commit: Callable[[], None] = lambda: None,
        after_commit: Callable[[int], None] = lambda step: None,
    ):
        if keep < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"keep and keep_every: expected at least 1, got {keep} and {keep_every}")
        self.directory, self._in_store, self._before_commit = files.folder(directory), is_url(directory), before_commit
        self._after_commit = after_commit
        self.keep, self.keep_every, self.read_only = keep, keep_every, read_only
        self._thread: threading.Thread | None = None
        self._failure: CheckpointSaveError | None = None
        self._saved: set[int] = set()  # by this object, committed
        self._frozen: int | None = None  # the number under which files.FROZEN has this run's frozen arrays
        self._bad: set[int] = set()  # found corrupt by this object
        self._known: set[int] | None = None  # the steps in a store that this object writes to: the loop must not ask it
        if not read_only:
            if not self._in_store:
                self.directory.mkdir(parents=True, exist_ok=True)
            for message in files.remove_leftovers(self.directory) if distributed.is_primary() else ():
                _log.warning("checkpoints: %s", message)

    # --- looking -----------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The committed steps, ascending, as this process sees them. Their arrays are not looked at."""
        if self._known is not None:
            return sorted(self._known)
        found = files.scan(self.directory)[0]
        if self._in_store and not self.read_only:
            self._known = set(found)
        return found

    def problems(self) -> list[str]:
        """What else looks like a checkpoint and is not: incomplete ones, stray directories."""
        return files.scan(self.directory)[1]

    def manifest(self, step: int) -> files.Manifest:
        """What is stored at `step`, without its arrays. Raises CheckpointMissingError, CheckpointCorruptError."""
        path = files.step_directory(self.directory, step)
        if problem := files.incomplete(path):
            found = f"committed steps: {self.steps() or 'none'}"
            raise CheckpointMissingError(f"no checkpoint of step {step}: {path}: {problem}; {found}")
        manifest = files.Manifest.read(path)
        if manifest.step != step:
            raise CheckpointCorruptError(f"{path} was renamed: it holds step {manifest.step}")
        return manifest

    # --- saving ------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> bool:
        """Saves `state`, a pytree of jax.Arrays after so many steps, and `extra`, JSON, in the background. Returns once
        the arrays may be donated or overwritten; False if this object has saved that step already.

        The group "frozen" never changes, so the first save alone writes it, and waits for it; the others refer to that.
        One save runs at a time: this waits for the one before. A checkpoint of the same step that an earlier course of
        the run left here is replaced.

        Raises:
            CheckpointSaveError: the save before this one failed in the background, and nothing was done for this one
                (calling again will); or this one failed at its start, or finds no room on the disk. Older checkpoints
                are untouched in all cases.
            TypeError, ValueError: a leaf is not an array, or `extra` is not JSON.
        """
        if self.read_only:
            raise ValueError(f"{self.directory} was opened for reading only")
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"step: expected an integer of at least 0, got {step!r}")
        self.wait()
        if step in self._saved:
            return False
        if frozen := state.get("frozen") if isinstance(state, dict) else None:
            state = {name: group for name, group in state.items() if name != "frozen"}
            if self._frozen is None:
                with Checkpointer(directory=self.directory / files.FROZEN, keep=1 << 30) as once:
                    number = distributed.from_primary(1 + max(once.steps(), default=0))  # none is ever replaced
                    once.save(number, frozen, {})
                self._frozen = number
        leaves = flatten(state)
        assert len(leaves) == len(jax.tree.leaves(state)), "two leaves of the state have the same path"
        for name, leaf in leaves.items():
            if not isinstance(leaf, jax.Array):
                raise TypeError(f"{name}: expected a jax.Array, got {type(leaf).__name__}")
        extra = json.loads(json.dumps(extra, allow_nan=False))
        if not self._in_store:
            self._check_space(step, sum(leaf.nbytes for leaf in leaves.values()))
        sums, now = checksums(leaves), time.strftime("%Y-%m-%dT%H:%M:%S%z")
        records = {name: files.LeafRecord(x.shape, str(x.dtype), sums[name]) for name, x in leaves.items()}
        versions = {name: _version(name) for name in ("jax", "plimsoll-train", "orbax-checkpoint")}
        manifest = files.Manifest(step, records, extra, versions, now, self._frozen if frozen else None)
        path = files.step_directory(self.directory, step)
        try:
            if self._in_store:
                written = objects.write(path, leaves, manifest, self._before_commit)
            else:
                if distributed.is_primary() and os.path.lexists(path):
                    path.rename(path.with_name(f"{path.name}.replaced"))
                    _log.warning("checkpoints: step %d exists from before and is being replaced", step)
                written = storage.write(path, leaves, manifest.to_json())
        except Exception as error:
            raise self._failed(step, error) from error
        self._thread = threading.Thread(target=self._finish, args=(step, written), name=f"checkpoint-{step}")
        self._thread.start()
        return True

    def _check_space(self, step: int, num_bytes: int) -> None:
        free, needed = shutil.disk_usage(self.directory).free, num_bytes + _OVERHEAD_BYTES
        if not distributed.everywhere(free >= needed):
            raise CheckpointSaveError(
                f"no room for the checkpoint of step {step}: it needs {needed / 2**20:,.1f} MiB, and {self.directory} "
                f"has {free / 2**20:,.1f} MiB free; nothing was written; still there: steps {self.steps() or 'none'}"
            )

    def _finish(self, step: int, written: Callable[[], None]) -> None:
        """In the background: waits for the commit, then retention. Nothing is deleted before the commit."""
        try:
            written()
        except BaseException as error:
            self._failure = self._failed(step, error)
            return
        self._saved.add(step)
        self._bad.discard(step)
        if self._known is not None:
            self._known.add(step)
        if not distributed.is_primary():
            return
        try:
            self._after_commit(step)
        except OSError as error:
            _log.warning("checkpoints: step %d was saved, but not recorded in the workdir: %s", step, error)
        # Steps beyond this one, which another course of the run left here, are neither counted nor removed.
        past = [old for old in self.steps() if old <= step and old not in self._bad]
        try:
            files.remove_leftovers(self.directory)  # what was put aside for this one
            for old in past[: -self.keep]:
                if not (self.keep_every and old % self.keep_every == 0):
                    files.delete_step(self.directory, old)
                    self._known = self._known and self._known - {old}
        except Exception as error:  # of a store, any
            _log.warning("checkpoints: step %d was saved, but old ones could not be deleted: %s", step, error)

    def _failed(self, step: int, error: BaseException) -> CheckpointSaveError:
        """The error of a save, whose remains are removed; what it was to replace is put back."""
        kept: Any = "unknown"
        with contextlib.suppress(Exception) if self._in_store else contextlib.nullcontext():  # it may be out of reach
            kept = [old for old in self.steps() if old != step]
            if distributed.is_primary():
                files.remove_leftovers(self.directory)
        failure = CheckpointSaveError(
            f"the checkpoint of step {step} was not saved: {files.one_line(error)}; still there: steps {kept or 'none'}"
        )
        failure.__cause__ = error
        return failure

    def wait(self) -> None:
        """Waits until nothing is being written. Raises CheckpointSaveError, once: a save failed; names the step."""
        self._join()
        failure, self._failure = self._failure, None
        if failure:
            raise failure

    close = wait

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- restoring ---------------------------------------------------------------------------------------------------

    def restore(self, step: int, abstract: Any, *, groups: Collection[str] | None = None) -> Restored:
        """Restores one step into the shardings and memory kinds of `abstract`, a pytree of ShapeDtypeStructs, whatever
        the mesh and process count that saved it. `groups`: of its first level only these, such as ("parameter", "ema").

        Raises:
            CheckpointMissingError: no such step, or it is incomplete.
            CheckpointMismatchError: leaves differ; holds a table; nothing was read.
            CheckpointCorruptError: bytes cannot be read, or are not what was saved; names the arrays.
        """
        self._join()
        manifest = self.manifest(step)
        stored, frozen = manifest.leaves, {}
        if groups is not None:
            if missing := set(groups) - set(abstract):
                raise ValueError(f"groups: expected some of {sorted(abstract)}, got {sorted(missing)}")
            abstract = {group: abstract[group] for group in abstract if group in groups}
            stored = {name: leaf for name, leaf in stored.items() if name.split("/", 1)[0] in groups}
        if manifest.frozen is not None and (groups is None or "frozen" in groups):
            once = Checkpointer(directory=self.directory / files.FROZEN, read_only=True)
            frozen = {"frozen": once.restore(manifest.frozen, abstract.get("frozen", {})).state}
            abstract = {group: abstract[group] for group in abstract if group != "frozen"}
        wanted = flatten(abstract)
        narrow = _narrow_averages(wanted, stored)
        wanted |= {name: x for name, (x, _) in narrow.items()}
        self._refuse_mismatch(step, stored, wanted)
        path = files.step_directory(self.directory, step)
        if manifest.arrays != files.STATE:
            arrays = objects.read(path / manifest.arrays, wanted)
        else:
            arrays = storage.read(path, wanted)
        sums = checksums(arrays)
        if bad := [name for name in wanted if sums[name] != stored[name].checksum]:
            for array in (*arrays.values(), *jax.tree.leaves(frozen)):
                array.delete()  # now, not when the last reference in a traceback dies: another try needs the room
            raise CheckpointCorruptError(
                f"step {step} of {self.directory} is corrupt: {len(bad)} of {len(wanted)} arrays are not what was "
                f"saved: {', '.join(bad[:20])}{', ...' if len(bad) > 20 else ''}"
            )
        for name, (_, kept) in narrow.items():
            arrays[name] = _widened(arrays[name], kept)
        # Later steps that this object has saved are of another course of the run now: they may be saved again.
        self._saved = {saved for saved in self._saved if saved <= step}
        self._frozen = manifest.frozen if frozen else None
        state = jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in wanted])
        return Restored(step, {**state, **frozen} if frozen else state, manifest.extra, [])

    def compare(self, step: int, abstract: Any) -> files.Manifest:
        """What is stored at `step`, once it is known to be of the same leaves as `abstract`. No array is read.
        Raises as `restore`."""
        manifest = self.manifest(step)
        if manifest.frozen is not None:
            once = Checkpointer(directory=self.directory / files.FROZEN, read_only=True)
            once.compare(manifest.frozen, abstract.get("frozen", {}))
            abstract = {group: abstract[group] for group in abstract if group != "frozen"}
        wanted = flatten(abstract)
        wanted |= {name: x for name, (x, _) in _narrow_averages(wanted, manifest.leaves).items()}
        self._refuse_mismatch(step, manifest.leaves, wanted)
        return manifest

    def _refuse_mismatch(self, step: int, stored: dict[str, files.LeafRecord], wanted: dict[str, Any]) -> None:
        records = {name: files.LeafRecord(tuple(x.shape), str(x.dtype)) for name, x in wanted.items()}
        if table := files.mismatch_table(stored, records):
            raise CheckpointMismatchError(f"step {step} of {self.directory} is of another model: {table}")

    def restore_latest(self, abstract: Any, *, groups: Collection[str] | None = None) -> Restored:
        """Restores, as `restore`, the newest step that is whole: corrupt ones are passed over, loudly.

        Raises:
            CheckpointMissingError: there is none.
            CheckpointMismatchError, CheckpointFormatError, PermissionError: at once, as the ones before are no better.
            CheckpointCorruptError: none of them is whole; lists what is wrong with each.
        """
        self._join()
        # What the primary sees: a network file system may show others an older state.
        steps, problems = distributed.from_primary(files.scan(self.directory))
        for problem in problems:
            _log.warning("checkpoints: %s", problem)
        for step in reversed(steps):
            try:
                return replace(self.restore(step, abstract, groups=groups), problems=problems)
            except (CheckpointCorruptError, CheckpointMissingError) as error:
                problems.append(str(error))
                self._bad.add(step)
                self._saved.discard(step)
                _log.warning("checkpoints: %s; trying the one before", error)
        kind = CheckpointCorruptError if steps else CheckpointMissingError
        raise kind("\n  ".join([f"no checkpoint in {self.directory} can be restored:", *problems]))


def _narrow_averages(wanted: Mapping[str, Any], stored: Mapping[str, files.LeafRecord]) -> dict[str, tuple[Any, Any]]:
    """{name: (as stored, as wanted)} of moving averages that an earlier version kept in bfloat16, as the weights."""
    narrow = {}
    for name, x in wanted.items():
        kept_in_bfloat16 = name in stored and stored[name].dtype == "bfloat16"
        if name.startswith("ema/") and kept_in_bfloat16 and x.dtype == jnp.float32:
            narrow[name] = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding), x
    return narrow


def _widened(x: jax.Array, like: Any) -> jax.Array:
    """An array in the dtype of `like`, where that lives: arithmetic on host memory does not compile."""
    on_device = jax.device_put(x, like.sharding.with_memory_kind("device"))
    return jax.device_put(on_device.astype(like.dtype), like.sharding)


def _version(package: str) -> str:
    found = importlib.metadata.distributions(name=package)
    return next((one.version for one in found), "not installed as a package")
