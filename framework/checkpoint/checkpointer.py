"""Checkpoints: saves and restores training state through orbax or an object store.

Saves are asynchronous and atomic. Every leaf has a checksum that is verified on restore, because orbax silently loads
flipped bits. Arrays are restored directly into the shardings and memory kinds of the requested layout, on any mesh,
without a second copy. docs/checkpoints.md describes the files.

This file has the `Checkpointer`. The other files are directory.py (names, manifests, errors), integrity.py (checksums),
storage.py (orbax), chunk_store.py (object stores, and saves through a window), state_groups.py (groups of a state) and
narrow_averages.py (averages of earlier versions).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
from absl import logging

from plimsoll.framework.checkpoint import chunk_store, narrow_averages, storage
from plimsoll.framework.checkpoint import directory as files
from plimsoll.framework.checkpoint.directory import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointMissingError,
    CheckpointSaveError,
)
from plimsoll.framework.checkpoint.integrity import checksums
from plimsoll.framework.checkpoint.state_groups import select_groups, split_frozen
from plimsoll.framework.checkpoint.storage import AbstractArrays
from plimsoll.framework.config import PositiveInt
from plimsoll.framework.devices.allocator import keeps_freed_memory, release_freed_memory
from plimsoll.framework.files import durable
from plimsoll.framework.files.remote import is_url
from plimsoll.framework.layout import Nested, PyTree, SplitArray, flatten
from plimsoll.framework.processes import distributed
from plimsoll.framework.terminal.phases import SHORT, phase

# Upper bound for the rest of a checkpoint: the manifest and the index of the stored chunks.
_OVERHEAD_BYTES = 1 << 20
# Frozen arrays are never removed, because the manifests of older steps refer to them.
_KEEP_ALL = 1 << 30
# Maximum number of arrays to name in an error.
_MAX_NAMES = 20


@dataclass(frozen=True)
class Restored:
    """A restored state.

    Attributes:
        step: number of training steps that the state has taken.
        state: pytree of arrays, with the structure of the abstract arrays that were passed.
        extra: JSON that the caller stored with the arrays.
        problems: descriptions of the entries that `restore_latest` skipped because they are incomplete or corrupt.
    """

    step: int
    state: PyTree
    extra: dict[str, Any]
    problems: list[str]


class Checkpointer:
    """The checkpoints in one directory. Every process of a job creates one and calls its methods at the same points.

    Args:
        directory: folder with one subfolder per step, created if it does not exist. Local, or in an object store
            (gs://, s3://).
        keep: number of most recent checkpoints to keep.
        keep_every: also keep all checkpoints whose step is a multiple of this; None keeps no others.
        read_only: open a directory that another job may be writing to; `save` is then an error. If False, the
            constructor removes leftovers of killed saves.
        before_commit: called in the background by the primary process, before a checkpoint in an object store is
            committed.
        after_commit: called in the background by the primary process, with each committed step.
        on_progress: called during a save through a window, which may take longer than a step.

    Raises:
        ValueError: keep or keep_every is below 1, or the URL of the directory cannot be used.
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
        on_progress: Callable[[], object] = lambda: None,
    ):
        if keep < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"keep and keep_every: expected at least 1, got {keep} and {keep_every}")
        self.directory = files.folder(directory)
        self.keep = keep
        self.keep_every = keep_every
        self.read_only = read_only
        self._in_store = is_url(directory)
        self._before_commit = before_commit
        self._after_commit = after_commit
        self._on_progress = on_progress
        # The thread that commits the last save and removes old ones, whether it committed or failed, and its error.
        self._thread: threading.Thread | None = None
        self._is_settled = threading.Event()
        self._failure: CheckpointSaveError | None = None
        # Steps that this object has committed, and steps that it found to be corrupt.
        self._saved: set[int] = set()
        self._bad: set[int] = set()
        # The step that retention keeps in addition to the newest, and the one before it; see `protect`.
        self._protected: int | None = None
        self._protected_before: int | None = None
        # The number of the folder in files.FROZEN that has this run's frozen arrays.
        self._frozen: int | None = None
        # Cached steps of an object store that this object writes to: listing the store takes a network request, which
        # the training loop must not wait for.
        self._known: set[int] | None = None
        if not read_only:
            if not self._in_store:
                durable.make_folder(self.directory)
            # The processes share the directory, so only one of them cleans up.
            if distributed.is_primary():
                for message in files.remove_leftovers(self.directory):
                    logging.warning("checkpoints: %s", message)

    # --- looking -----------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """List the committed steps, ascending, as seen by this process. Their arrays are not checked."""
        if self._known is not None:
            return sorted(self._known)
        committed_steps, _ = files.scan(self.directory)
        # Another job may add steps to a store that this object only reads, so they are not cached.
        if self._in_store and not self.read_only:
            self._known = set(committed_steps)
        return committed_steps

    def problems(self) -> list[str]:
        """Describe entries that look like checkpoints but are not: incomplete ones and stray directories."""
        _, problems = files.scan(self.directory)
        return problems

    def manifest(self, step: int) -> files.Manifest:
        """Read the manifest of `step`, without its arrays.

        Raises:
            CheckpointMissingError: there is no complete checkpoint of this step.
            CheckpointCorruptError: the manifest cannot be read, or belongs to another step.
            CheckpointFormatError: the format of the manifest is unknown to this version.
        """
        path = files.step_directory(self.directory, step)
        problem = files.find_missing(path)
        if problem:
            committed_steps = f"committed steps: {self.steps() or 'none'}"
            raise CheckpointMissingError(f"no checkpoint of step {step}: {path}: {problem}; {committed_steps}")
        manifest = files.Manifest.read(path)
        if manifest.step != step:
            raise CheckpointCorruptError(f"{path} was renamed: it holds step {manifest.step}")
        return manifest

    def protect(self, step: int | None) -> None:
        """Keep this step in addition to the newest ones, until another step is protected and committed."""
        if step != self._protected:
            self._protected_before = self._protected
            self._protected = step

    # --- saving ------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: PyTree,
        extra: dict[str, object],
        *,
        window_bytes: int | None = None,
        replace_saved: bool = False,
    ) -> bool:
        """Save a checkpoint; returns once the arrays may be donated or overwritten.

        Without a window, arrays are copied and written in the background; with one, this call writes them row by row.

        The group "frozen" never changes, so only the first save writes it, and waits for it; later saves refer to it.
        Only one save runs at a time: this call waits for the previous one. A checkpoint of the same step, left here
        before the run was resumed from an earlier step, is replaced.

        Args:
            step: number of training steps that the state has taken.
            state: a `TrainState`, or any other pytree of jax.Arrays and `SplitArray`s.
            extra: JSON data to store with the arrays.
            window_bytes: maximum number of bytes of host memory that the save needs, but at least one row of each
                array's shard; None for a copy of this process's part of the state.
            replace_saved: save again a step that this object has saved.

        Returns:
            False if this object has already saved that step.

        Raises:
            CheckpointSaveError: the previous save failed in the background, and this one was not started (call again to
                save); or this save failed to start, or the disk has no room for it. Older checkpoints are untouched in
                all cases.
            TypeError, ValueError: a leaf is not an array, or `extra` is not JSON.
        """
        if self.read_only:
            raise ValueError(f"{self.directory} was opened for reading only")
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"step: expected an integer of at least 0, got {step!r}")
        self.wait()
        if step in self._saved and not replace_saved:
            return False
        state, frozen_arrays = split_frozen(state)
        frozen_number = self._save_frozen(frozen_arrays, window_bytes) if frozen_arrays else None
        leaves = flatten(state)
        assert len(leaves) == len(jax.tree.leaves(state)), "two leaves of the state have the same path"
        for name, leaf in leaves.items():
            if not isinstance(leaf, jax.Array | SplitArray):
                raise TypeError(f"{name}: expected a jax.Array, got {type(leaf).__name__}")
        # The round trip raises for values that are not JSON, before anything is written for this step.
        stored_extra = json.loads(json.dumps(extra, allow_nan=False))
        # Buckets have no size limit, so only disks are checked for free space.
        if not self._in_store:
            num_bytes = sum(leaf.nbytes for leaf in leaves.values())
            self._check_space(step, num_bytes)
        manifest = files.Manifest.create(step, leaves, checksums(leaves), stored_extra, frozen_number)
        path = files.step_directory(self.directory, step)
        try:
            finish_write = self._begin_write(path, leaves, manifest, window_bytes)
        except Exception as error:
            raise self._handle_failed_save(step, error) from error
        self._is_settled.clear()
        self._thread = threading.Thread(target=self._finish, args=(step, finish_write), name=f"checkpoint-{step}")
        self._thread.start()
        if window_bytes is not None:
            # Not until the old checkpoints are removed, which takes as long as half of the write.
            self._is_settled.wait()
            self._raise_failure()
        return True

    def _save_frozen(self, frozen_arrays: Nested, window_bytes: int | None) -> int:
        """Write the frozen arrays if this run has not yet done so, wait for their commit, and return their number."""
        if self._frozen is not None:
            return self._frozen
        frozen_folder = self.directory / files.FROZEN
        with Checkpointer(
            directory=frozen_folder, keep=_KEEP_ALL, on_progress=self._on_progress
        ) as frozen_checkpointer:
            # Use a number above all existing ones: older checkpoints refer to those, so they must never be replaced.
            # Processes may see different directory listings, so all use the number of the primary.
            newest = max(frozen_checkpointer.steps(), default=0)
            number = distributed.broadcast_from_primary(1 + newest)
            frozen_checkpointer.save(number, frozen_arrays, {}, window_bytes=window_bytes)
        self._frozen = number
        return number

    def _begin_write(
        self, path: Path, leaves: storage.Arrays, manifest: files.Manifest, window_bytes: int | None
    ) -> Callable[[], None]:
        """Move an existing checkpoint of the step aside and start the write; returns a function that finishes it."""
        if self._in_store:
            hooks = self._before_commit, self._on_progress
            return chunk_store.write(path, leaves, manifest, *hooks, window_bytes=window_bytes)
        if distributed.is_primary() and os.path.lexists(path):
            # Delete it only after its successor is committed: if the save fails, it is put back.
            path.rename(path.with_name(f"{path.name}.replaced"))
            logging.warning("checkpoints: step %d already exists and is being replaced", manifest.step)
        if window_bytes is not None or chunk_store.is_needed(leaves):
            return chunk_store.write(path, leaves, manifest, on_progress=self._on_progress, window_bytes=window_bytes)
        return storage.write(path, cast("dict[str, jax.Array]", leaves), manifest.to_json())

    def _check_space(self, step: int, num_bytes: int) -> None:
        """Raise CheckpointSaveError in every process if the disk of any process has no room for the arrays."""
        free_bytes = shutil.disk_usage(self.directory).free
        needed_bytes = num_bytes + _OVERHEAD_BYTES
        if distributed.is_true_on_all(free_bytes >= needed_bytes):
            return
        needed_mib = needed_bytes / 2**20
        free_mib = free_bytes / 2**20
        raise CheckpointSaveError(
            f"no room for the checkpoint of step {step}: it needs {needed_mib:,.1f} MiB, and {self.directory} "
            f"has {free_mib:,.1f} MiB free; nothing was written; still there: steps {self.steps() or 'none'}"
        )

    def _finish(self, step: int, finish_write: Callable[[], None]) -> None:
        """Wait for the commit in a background thread, and only then remove old checkpoints."""
        try:
            is_committed = self._commit(step, finish_write)
        finally:
            self._is_settled.set()
        if is_committed and distributed.is_primary():
            self._remove_old(step)
        # The copies that were written are free, but their pages still belong to the process.
        del finish_write
        if not keeps_freed_memory():
            release_freed_memory()

    def _commit(self, step: int, finish_write: Callable[[], None]) -> bool:
        """Wait for the commit and record it, or the error; returns whether the checkpoint is committed."""
        try:
            finish_write()
        except BaseException as error:
            # An exception in a thread would go unnoticed, so `wait` raises it in the thread of the training loop.
            self._failure = self._handle_failed_save(step, error)
            return False
        self._saved.add(step)
        self._bad.discard(step)
        if self._known is not None:
            self._known.add(step)
        if distributed.is_primary():
            try:
                self._after_commit(step)
            except OSError as error:
                logging.warning("checkpoints: step %d was saved, but not recorded in the workdir: %s", step, error)
        return True

    def _remove_old(self, step: int) -> None:
        """Remove the replaced checkpoint of `step`, and older checkpoints beyond those to keep."""
        # Later steps, left from before the run was resumed at an earlier step, are neither counted nor removed. Corrupt
        # ones are not counted either, so `keep` valid checkpoints remain.
        past_steps = [old for old in self.steps() if old <= step and old not in self._bad]
        try:
            files.remove_leftovers(self.directory)
            kept = self._protected
            if kept not in past_steps:
                # Its save has failed.
                kept = self._protected_before
            for old in past_steps[: -self.keep]:
                if old == kept or (self.keep_every and old % self.keep_every == 0):
                    continue
                files.delete_step(self.directory, old)
                if self._known:
                    self._known = self._known - {old}
        # Object store clients can raise exceptions of any type.
        except Exception as error:
            logging.warning("checkpoints: step %d was saved, but old ones could not be deleted: %s", step, error)

    def _handle_failed_save(self, step: int, error: BaseException) -> CheckpointSaveError:
        """Create the error for a failed save, remove its leftovers, and restore the checkpoint it was to replace."""
        remaining_steps: list[int] | str = "unknown"
        # The save may have failed because the store is unreachable.
        ignored_errors = contextlib.suppress(Exception) if self._in_store else contextlib.nullcontext()
        with ignored_errors:
            remaining_steps = [old for old in self.steps() if old != step]
            if distributed.is_primary():
                files.remove_leftovers(self.directory)
        reason = files.summarize_error(error)
        failure = CheckpointSaveError(
            f"the checkpoint of step {step} was not saved: {reason}; still there: steps {remaining_steps or 'none'}"
        )
        # Set here, because `wait` raises this error in another thread, where `raise ... from` is not possible.
        failure.__cause__ = error
        return failure

    def wait(self) -> None:
        """Wait until the save in progress has finished.

        Raises:
            CheckpointSaveError: the last save failed; the message names the step. Raised only once.
        """
        self._join()
        self._raise_failure()

    close = wait

    def _raise_failure(self) -> None:
        failure = self._failure
        self._failure = None
        if failure:
            raise failure

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- restoring ---------------------------------------------------------------------------------------------------

    def restore(
        self, step: int, abstract: PyTree, *, groups: Collection[str] | None = None, what: str | None = None
    ) -> Restored:
        """Restore one step, independent of the mesh and process count that saved it.

        Args:
            step: step of the checkpoint.
            abstract: a `TrainState`, or any other pytree, of ShapeDtypeStructs with the shardings and memory kinds to
                restore into.
            groups: restore only these top-level groups of `abstract`, such as ("parameter", "ema"); None for all.
            what: name of the arrays in the status message; None for "the checkpoint of step N".

        Raises:
            CheckpointMissingError: there is no such step, or it is incomplete.
            CheckpointMismatchError: leaves differ; the message has a table of them. Nothing was read.
            CheckpointCorruptError: bytes cannot be read or differ from what was saved; the message names the arrays.
        """
        self._join()
        manifest = self.manifest(step)
        abstract = select_groups(abstract, groups)
        target_specs = flatten(abstract)
        stored = manifest.leaves
        if groups is not None:
            # The group is the first part of a leaf's path.
            stored = {name: record for name, record in stored.items() if name.partition("/")[0] in groups}
        frozen_number = manifest.frozen if groups is None or "frozen" in groups else None
        frozen = {} if frozen_number is None else self._restore_frozen(frozen_number, abstract)
        specs = {name: spec for name, spec in target_specs.items() if name not in frozen}
        stored_specs = narrow_averages.narrow(specs, stored)
        self._check_specs(step, stored, stored_specs)
        with phase(f"reading {what or f'the checkpoint of step {step}'}", patience=SHORT):
            path = files.step_directory(self.directory, step)
            # The manifest, not the location, determines the reader: a checkpoint may be copied from a store to a disk.
            if manifest.arrays == files.STATE:
                arrays = storage.read(path, stored_specs)
            else:
                arrays = chunk_store.read(path / manifest.arrays, stored_specs)
            self._check_checksums(step, stored, arrays, frozen)
        narrow_averages.widen(arrays, specs)
        # The run will reach later steps again, so forget that this object has saved them.
        self._saved = {saved_step for saved_step in self._saved if saved_step <= step}
        self._frozen = frozen_number
        arrays |= frozen
        leaves = [arrays[name] for name in target_specs]
        state = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
        return Restored(step, state, manifest.extra, [])

    def _restore_frozen(self, number: int, abstract: PyTree) -> storage.Arrays:
        """Restore the frozen arrays of a state, by path in the state.

        All checkpoints of a run share them. They have their own numbers, independent of the steps.
        """
        _, frozen_abstract = split_frozen(abstract)
        reader = Checkpointer(directory=self.directory / files.FROZEN, read_only=True)
        restored = reader.restore(number, frozen_abstract, what="the frozen weights")
        return {f"frozen/{name}": x for name, x in flatten(restored.state).items()}

    def _check_checksums(
        self, step: int, stored: dict[str, files.LeafRecord], arrays: storage.Arrays, frozen: storage.Arrays
    ) -> None:
        """Raise CheckpointCorruptError and free all arrays if the checksum of an array does not match."""
        sums = checksums(arrays)
        bad_names = [name for name in arrays if sums[name] != stored[name].checksum]
        if not bad_names:
            return
        # Free the arrays now instead of when the traceback is released, because restoring an older step needs the
        # memory.
        for array in (*arrays.values(), *frozen.values()):
            array.delete()
        listed_names = ", ".join(bad_names[:_MAX_NAMES])
        ellipsis = ", ..." if len(bad_names) > _MAX_NAMES else ""
        raise CheckpointCorruptError(
            f"step {step} of {self.directory} is corrupt: {len(bad_names)} of {len(arrays)} arrays differ from what "
            f"was saved: {listed_names}{ellipsis}"
        )

    def compare(self, step: int, abstract: PyTree) -> files.Manifest:
        """Return the manifest of `step` after checking that it has the same leaves as `abstract`.

        No array is read. Raises the same errors as `restore`.
        """
        manifest = self.manifest(step)
        if manifest.frozen is not None:
            abstract, frozen_abstract = split_frozen(abstract)
            reader = Checkpointer(directory=self.directory / files.FROZEN, read_only=True)
            reader.compare(manifest.frozen, frozen_abstract)
        self._check_specs(step, manifest.leaves, narrow_averages.narrow(flatten(abstract), manifest.leaves))
        return manifest

    def _check_specs(self, step: int, stored: dict[str, files.LeafRecord], specs: AbstractArrays) -> None:
        """Raise CheckpointMismatchError if names, shapes or dtypes differ; orbax would silently cast dtypes."""
        table = files.mismatch_table(stored, files.record_leaves(specs))
        if table:
            raise CheckpointMismatchError(f"step {step} of {self.directory} belongs to another model: {table}")

    def restore_latest(self, abstract: PyTree, *, groups: Collection[str] | None = None) -> Restored:
        """Restore the newest valid step, see `restore`. Corrupt steps are skipped with a warning.

        Raises:
            CheckpointMissingError: there is no checkpoint.
            CheckpointMismatchError, CheckpointFormatError, PermissionError: raised immediately, because older
                checkpoints would have the same problem.
            CheckpointCorruptError: none of the checkpoints is valid; the message lists the problems of each.
        """
        self._join()
        # All processes use the primary's list of steps: a network file system may show others an older state, and
        # processes that restored different steps would train different models.
        steps, problems = distributed.broadcast_from_primary(files.scan(self.directory))
        for problem in problems:
            logging.warning("checkpoints: %s", problem)
        for step in reversed(steps):
            try:
                restored = self.restore(step, abstract, groups=groups)
                return replace(restored, problems=problems)
            except (CheckpointCorruptError, CheckpointMissingError) as error:
                problems.append(str(error))
                # A later save replaces the step, and retention does not count it.
                self._bad.add(step)
                self._saved.discard(step)
                logging.warning("checkpoints: %s; trying the one before", error)
        error_class = CheckpointCorruptError if steps else CheckpointMissingError
        headline = f"no checkpoint in {self.directory} can be restored:"
        raise error_class("\n  ".join([headline, *problems]))
