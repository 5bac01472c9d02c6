"""Checkpoints: orbax behind one door.

Saves are asynchronous and atomic; every leaf has a checksum that is verified when it is restored, because orbax loads
flipped bits without a word; arrays are restored straight into the shardings and memory kinds that the layout asks for,
on any mesh, with no second copy. What is stored, and where: docs/checkpoints.md.

This file has the `Checkpointer`. Beside it are directory.py (names, manifests, errors), integrity.py (checksums),
storage.py (orbax) and objects.py (object stores).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import jax
from absl import logging

from framework.checkpoint import directory as files
from framework.checkpoint import objects, storage
from framework.checkpoint.directory import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointMissingError,
    CheckpointSaveError,
)
from framework.checkpoint.integrity import checksums
from framework.checkpoint.leaves import (
    array_leaves,
    manifest_of,
    narrow_averages,
    records_of_groups,
    selected_groups,
    widened,
    without_frozen,
)
from framework.config import PositiveInt
from framework.files import durable
from framework.files.remote import is_url
from framework.layout import flatten
from framework.processes import distributed
from framework.terminal.phases import SHORT, phase

# Beside the arrays a checkpoint has the manifest and the index of the pieces, which take less.
_OVERHEAD_BYTES = 1 << 20
# Frozen arrays are never removed, as the manifests of older steps refer to them.
_KEEP_ALL = 1 << 30
# An error about many arrays names the first of them.
_MAX_NAMES = 20


@dataclass(frozen=True)
class Restored:
    """A restored state.

    Attributes:
        step: the number of steps that the state has taken.
        state: the pytree of arrays.
        extra: the JSON that the caller had stored beside the arrays.
        problems: newer checkpoints that were passed over, because they are incomplete or corrupt.
    """

    step: int
    state: Any
    extra: dict[str, Any]
    problems: list[str]


class Checkpointer:
    """The checkpoints in one directory. Every process of a job makes one, and calls its methods at the same points.

    Args:
        directory: holds one directory per step; made if it is not there. Local, or of an object store (gs://, s3://).
        keep: the newest this many are kept.
        keep_every: steps that this number divides are kept for good, too.
        read_only: for looking at a directory that another job may be writing; `save` is then an error. Otherwise the
            constructor removes at once what killed saves left behind.
        before_commit: in an object store, called by the primary in the background before a checkpoint counts.
        after_commit: called by the primary in the background with each step that was committed.

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
        # The thread that waits for the commit of the last save, and the error that it met.
        self._thread: threading.Thread | None = None
        self._failure: CheckpointSaveError | None = None
        # Steps that this object has committed, and steps that it has found corrupt.
        self._saved: set[int] = set()
        self._bad: set[int] = set()
        # The number under which files.FROZEN has this run's frozen arrays.
        self._frozen: int | None = None
        # The steps in a store that this object writes to. Asking the store takes a request over
        # the network, which the training loop must not wait for.
        self._known: set[int] | None = None
        if not read_only:
            self._prepare_directory()

    def _prepare_directory(self) -> None:
        """Makes the directory, and removes what killed saves left in it."""
        if not self._in_store:
            durable.make_folder(self.directory)
        # The processes share the directory, so one of them tidies up.
        if not distributed.is_primary():
            return
        for message in files.remove_leftovers(self.directory):
            logging.warning("checkpoints: %s", message)

    # --- looking -----------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The committed steps, ascending, as this process sees them. Their arrays are not looked at."""
        if self._known is not None:
            return sorted(self._known)
        committed_steps, _ = files.scan(self.directory)
        # Another job may add steps to a store that this object only reads, so those are not cached.
        if self._in_store and not self.read_only:
            self._known = set(committed_steps)
        return committed_steps

    def problems(self) -> list[str]:
        """Describes entries that look like checkpoints and are none: incomplete ones and stray directories."""
        _, problems = files.scan(self.directory)
        return problems

    def manifest(self, step: int) -> files.Manifest:
        """Reads what is stored at `step`, without its arrays.

        Raises:
            CheckpointMissingError: there is no complete checkpoint of this step.
            CheckpointCorruptError: the manifest cannot be read, or belongs to another step.
            CheckpointFormatError: the manifest has a format that is not known here.
        """
        path = files.step_directory(self.directory, step)
        problem = files.incomplete(path)
        if problem:
            committed_steps = f"committed steps: {self.steps() or 'none'}"
            raise CheckpointMissingError(f"no checkpoint of step {step}: {path}: {problem}; {committed_steps}")
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
        frozen_arrays = state.get("frozen") if isinstance(state, dict) else None
        if frozen_arrays:
            state = without_frozen(state)
            if self._frozen is None:
                self._frozen = self._save_frozen(frozen_arrays)
        leaves = array_leaves(state)
        # The round trip raises for values that are not JSON before anything of this step is written.
        extra = json.loads(json.dumps(extra, allow_nan=False))
        # The size of a bucket is not limited, so only a disk is asked for its free space.
        if not self._in_store:
            num_bytes = sum(leaf.nbytes for leaf in leaves.values())
            self._check_space(step, num_bytes)
        frozen_number = self._frozen if frozen_arrays else None
        manifest = manifest_of(step, leaves, extra, frozen_number)
        path = files.step_directory(self.directory, step)
        try:
            finish_write = self._begin_write(path, leaves, manifest)
        except Exception as error:
            raise self._failed(step, error) from error
        self._thread = threading.Thread(
            target=self._finish,
            args=(step, finish_write),
            name=f"checkpoint-{step}",
        )
        self._thread.start()
        return True

    def _save_frozen(self, frozen_arrays: Any) -> int:
        """Writes the frozen arrays, waits until they are committed, and returns their number."""
        with Checkpointer(directory=self.directory / files.FROZEN, keep=_KEEP_ALL) as frozen_checkpointer:
            # A number above all others, as older checkpoints refer to those: none is ever replaced.
            # Processes may see different directory listings, so the primary's number counts.
            newest = max(frozen_checkpointer.steps(), default=0)
            number = distributed.from_primary(1 + newest)
            frozen_checkpointer.save(number, frozen_arrays, {})
        return number

    def _begin_write(
        self,
        path: Any,
        leaves: dict[str, jax.Array],
        manifest: files.Manifest,
    ) -> Callable[[], None]:
        """Starts the write, after a checkpoint of the same step was put aside; returns what waits for its commit."""
        if self._in_store:
            return objects.write(path, leaves, manifest, self._before_commit)
        if distributed.is_primary() and os.path.lexists(path):
            # It is not deleted before its successor is committed: a save that fails puts it back.
            path.rename(path.with_name(f"{path.name}.replaced"))
            logging.warning("checkpoints: step %d exists from before and is being replaced", manifest.step)
        return storage.write(path, leaves, manifest.to_json())

    def _check_space(self, step: int, num_bytes: int) -> None:
        """Raises CheckpointSaveError, in every process, if the disk of any process has no room for the arrays."""
        free_bytes = shutil.disk_usage(self.directory).free
        needed_bytes = num_bytes + _OVERHEAD_BYTES
        if distributed.everywhere(free_bytes >= needed_bytes):
            return
        needed_mib = needed_bytes / 2**20
        free_mib = free_bytes / 2**20
        raise CheckpointSaveError(
            f"no room for the checkpoint of step {step}: it needs {needed_mib:,.1f} MiB, and {self.directory} "
            f"has {free_mib:,.1f} MiB free; nothing was written; still there: steps {self.steps() or 'none'}"
        )

    def _finish(self, step: int, finish_write: Callable[[], None]) -> None:
        """Waits for the commit, in the background, and then removes old checkpoints: none before the commit.

        Orbax puts the arrays on the disk, but neither their index, nor the manifest, nor the names: without these a
        power cut would lose the checkpoint.
        """
        try:
            finish_write()
            if distributed.is_primary() and not self._in_store:
                durable.sync_tree(files.step_directory(self.directory, step))
                durable.sync(self.directory)
        except BaseException as error:
            # Nobody sees what a thread raises: `wait` raises it in the thread of the training loop.
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
            logging.warning("checkpoints: step %d was saved, but not recorded in the workdir: %s", step, error)
        self._remove_old(step)

    def _remove_old(self, step: int) -> None:
        """Removes what was put aside for `step`, and the checkpoints before it that are not to be kept."""
        # Steps beyond this one, which another course of the run left here, are neither counted nor
        # removed. Corrupt ones do not count either: as many good ones as asked for stay.
        past_steps = [old for old in self.steps() if old <= step and old not in self._bad]
        try:
            files.remove_leftovers(self.directory)
            for old in past_steps[: -self.keep]:
                if self.keep_every and old % self.keep_every == 0:
                    continue
                files.delete_step(self.directory, old)
                if self._known:
                    self._known = self._known - {old}
        # The client of an object store raises exceptions of any type.
        except Exception as error:
            logging.warning("checkpoints: step %d was saved, but old ones could not be deleted: %s", step, error)

    def _failed(self, step: int, error: BaseException) -> CheckpointSaveError:
        """Makes the error of a save, removes what the save has left, and puts back what it was to replace."""
        remaining_steps: Any = "unknown"
        # A store may be out of reach, which is then what made the save fail.
        ignored_errors = contextlib.suppress(Exception) if self._in_store else contextlib.nullcontext()
        with ignored_errors:
            remaining_steps = [old for old in self.steps() if old != step]
            if distributed.is_primary():
                files.remove_leftovers(self.directory)
        reason = files.one_line(error)
        failure = CheckpointSaveError(
            f"the checkpoint of step {step} was not saved: {reason}; still there: steps {remaining_steps or 'none'}"
        )
        # Set here, as `wait` raises this error in another thread, where `from` has nothing to refer to.
        failure.__cause__ = error
        return failure

    def wait(self) -> None:
        """Waits until nothing is being written.

        Raises:
            CheckpointSaveError: the last save failed; names the step. Raised once.
        """
        self._join()
        failure = self._failure
        self._failure = None
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

    def restore(
        self,
        step: int,
        abstract: Any,
        *,
        groups: Collection[str] | None = None,
        what: str | None = None,
    ) -> Restored:
        """Restores one step into the shardings and memory kinds of `abstract`, a pytree of ShapeDtypeStructs, whatever
        the mesh and process count that saved it. `groups`: of its first level only these, such as ("parameter", "ema").
        `what`: the words for what is read; None for the checkpoint of the step.

        Raises:
            CheckpointMissingError: no such step, or it is incomplete.
            CheckpointMismatchError: leaves differ; holds a table; nothing was read.
            CheckpointCorruptError: bytes cannot be read, or are not what was saved; names the arrays.
        """
        self._join()
        manifest = self.manifest(step)
        stored = manifest.leaves
        if groups is not None:
            abstract = selected_groups(abstract, groups)
            stored = records_of_groups(stored, groups)
        frozen: dict[str, Any] = {}
        if manifest.frozen is not None and (groups is None or "frozen" in groups):
            frozen_abstract = abstract.get("frozen", {})
            # All checkpoints of a run share them: they are numbered by themselves, and not by the run's steps.
            reader = self._frozen_reader()
            restored = reader.restore(manifest.frozen, frozen_abstract, what="the frozen weights")
            frozen = {"frozen": restored.state}
            abstract = without_frozen(abstract)
        target_specs = flatten(abstract)
        narrow_specs = narrow_averages(target_specs, stored)
        stored_specs = target_specs | narrow_specs
        self._refuse_mismatch(step, stored, stored_specs)
        with phase(f"reading {what or f'the checkpoint of step {step}'}", patience=SHORT):
            arrays = self._read_arrays(step, manifest, stored_specs)
            self._refuse_corrupt(step, stored, arrays, frozen)
        for name in narrow_specs:
            arrays[name] = widened(arrays[name], target_specs[name])
        # Later steps that this object has saved belong to another course of the run from here on:
        # the run comes to them again, and may then save them again.
        self._saved = {saved_step for saved_step in self._saved if saved_step <= step}
        self._frozen = manifest.frozen if frozen else None
        leaves = [arrays[name] for name in target_specs]
        state = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
        if frozen:
            state = {**state, **frozen}
        return Restored(step, state, manifest.extra, [])

    def _frozen_reader(self) -> Checkpointer:
        return Checkpointer(directory=self.directory / files.FROZEN, read_only=True)

    def _read_arrays(
        self,
        step: int,
        manifest: files.Manifest,
        stored_specs: dict[str, Any],
    ) -> dict[str, jax.Array]:
        path = files.step_directory(self.directory, step)
        # The manifest tells who wrote the arrays: a checkpoint of a store may be copied to a disk.
        if manifest.arrays == files.STATE:
            return storage.read(path, stored_specs)
        return objects.read(path / manifest.arrays, stored_specs)

    def _refuse_corrupt(
        self,
        step: int,
        stored: dict[str, files.LeafRecord],
        arrays: dict[str, jax.Array],
        frozen: dict[str, Any],
    ) -> None:
        """Raises CheckpointCorruptError, and frees all arrays, if the checksum of an array is not the stored one."""
        sums = checksums(arrays)
        bad_names = [name for name in arrays if sums[name] != stored[name].checksum]
        if not bad_names:
            return
        # They are freed now, and not when the last reference in a traceback goes: the attempt to
        # restore an older step needs the memory.
        for array in (*arrays.values(), *jax.tree.leaves(frozen)):
            array.delete()
        listed_names = ", ".join(bad_names[:_MAX_NAMES])
        ellipsis = ", ..." if len(bad_names) > _MAX_NAMES else ""
        raise CheckpointCorruptError(
            f"step {step} of {self.directory} is corrupt: {len(bad_names)} of {len(arrays)} arrays are not what was "
            f"saved: {listed_names}{ellipsis}"
        )

    def compare(self, step: int, abstract: Any) -> files.Manifest:
        """Returns the manifest of `step`, after a check that it is of the same leaves as `abstract`. No array is read.
        Raises as `restore`."""
        manifest = self.manifest(step)
        if manifest.frozen is not None:
            frozen_abstract = abstract.get("frozen", {})
            self._frozen_reader().compare(manifest.frozen, frozen_abstract)
            abstract = without_frozen(abstract)
        target_specs = flatten(abstract)
        narrow_specs = narrow_averages(target_specs, manifest.leaves)
        self._refuse_mismatch(step, manifest.leaves, target_specs | narrow_specs)
        return manifest

    def _refuse_mismatch(
        self,
        step: int,
        stored: dict[str, files.LeafRecord],
        stored_specs: dict[str, Any],
    ) -> None:
        """Raises CheckpointMismatchError if names, shapes or dtypes differ: orbax would cast a dtype silently."""
        records: dict[str, files.LeafRecord] = {}
        for name, x in stored_specs.items():
            records[name] = files.LeafRecord(tuple(x.shape), str(x.dtype))
        table = files.mismatch_table(stored, records)
        if table:
            raise CheckpointMismatchError(f"step {step} of {self.directory} is of another model: {table}")

    def restore_latest(
        self,
        abstract: Any,
        *,
        groups: Collection[str] | None = None,
    ) -> Restored:
        """Restores, as `restore`, the newest step that is whole: corrupt ones are passed over, loudly.

        Raises:
            CheckpointMissingError: there is none.
            CheckpointMismatchError, CheckpointFormatError, PermissionError: at once, as the ones before are no better.
            CheckpointCorruptError: none of them is whole; lists what is wrong with each.
        """
        self._join()
        # All processes go by what the primary sees: a network file system may show others an older
        # state, and processes that restored different steps would train different models.
        steps, problems = distributed.from_primary(files.scan(self.directory))
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
