"""Checkpoints of any pytree, in one call each: what a run's checkpoints are, for programs of your own.

The directory is that of `framework.checkpoint`: a folder for each step, which appears when it is complete, a checksum
for each leaf, arrays that any mesh can read (docs/checkpoints.md).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from framework.checkpoint.checkpointer import Checkpointer
from framework.checkpoint.directory import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointMissingError,
    LeafRecord,
    Manifest,
    mismatch_table,
    put_aside,
)
from framework.functions.leaves import is_key
from framework.functions.stored_leaves import (
    Note,
    records,
    restored_leaf,
    sharding_of,
    shown,
    stored_leaves,
)
from framework.layout import flatten
from framework.processes import distributed

# The entry of a manifest's `extra` with the notes of leaves that are not simply arrays.
_NOTES = "$leaves"
# A leaf of a checkpoint that has no other: one without arrays cannot be stored.
_PLACEHOLDER = "$none"
# No checkpoint is removed unless the caller says how many to keep.
_KEEP_ALL = 1 << 30


@jax.tree_util.register_pytree_with_keys_class
class _Arrays:
    """Arrays by path. A dict would do, but of a dict the `Checkpointer` takes the names of groups to have a meaning."""

    def __init__(self, arrays: dict[str, Any]):
        self.arrays = arrays

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        pairs = [(jax.tree_util.DictKey(name), array) for name, array in self.arrays.items()]
        return pairs, tuple(self.arrays)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], arrays: Any) -> _Arrays:
        return cls(dict(zip(names, arrays, strict=True)))


def save(
    directory: str | os.PathLike[str],
    step: int,
    tree: Any,
    extra: Mapping[str, Any] | None = None,
    *,
    keep: int | None = None,
    overwrite: bool = False,
) -> None:
    """Saves a tree under a number, and returns when it is complete on the disk. Every process of a job calls it.

    A process that is killed meanwhile leaves the earlier steps as they were; the next save removes what it left.

    Complexity, of B bytes in a process's shards: each is read once for its checksum, and written once. On a CPU a copy
    of B is held until they are written; of a device's arrays the host holds what is on its way to the disk.

    Args:
        directory: local, made if it is not there; or of an object store (gs://, s3://).
        step: at least 0.
        tree: any pytree: of jax.Arrays of any sharding and memory kind, typed keys, numpy arrays and scalars, Python's
            bool, int, float and str. Functions among its leaves are not stored: `restore` takes those of its `like`.
            What is no global jax.Array is to be the same in all processes.
        extra: JSON of yours, such as {"epoch": 3}.
        keep: of the steps up to this one, only the newest so many stay. None: all stay.
        overwrite: whether a step that is there may be replaced.

    Raises:
        FileExistsError: the step is there, and `overwrite` is false.
        TypeError: a leaf is of another kind, or `extra` is not JSON; nothing was written.
        ValueError: two leaves have the same path, `extra` is not JSON (NaN), or step or keep are too small.
        CheckpointSaveError: the disk is full or cannot be written to; the earlier steps are as they were.
    """
    leaves = _leaves(tree)
    stored = stored_leaves(leaves, _on_devices)
    contents = dict(extra or {})
    if _NOTES in contents:
        raise ValueError(f"extra: {_NOTES!r} is a name that save itself uses; choose another")
    if stored.notes:
        contents[_NOTES] = stored.notes
    arrays = {name: jax.random.key_data(array) if is_key(array) else array for name, array in stored.arrays.items()}
    if not any(array.size for array in arrays.values()):
        arrays[_PLACEHOLDER] = _on_devices(np.zeros(1, np.uint8))
    with Checkpointer(directory=directory, keep=_KEEP_ALL if keep is None else keep) as checkpointer:
        is_there = distributed.from_primary(step in checkpointer.steps())
        if is_there and not overwrite:
            raise FileExistsError(f"step {step} is in {directory} already; overwrite=True replaces it")
        checkpointer.save(step, _Arrays(arrays), contents)


def restore(
    directory: str | os.PathLike[str],
    like: Any,
    step: int | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Restores a tree that `save` or a `Checkpointer` has saved, on any mesh. Every process of a job calls it.

    Complexity: each process reads the bytes of its own shards, at most 256 MiB of them at a time, or two of the largest
    leaf, and then computes their checksums.

    Args:
        directory: as `save` had it.
        like: a tree with the same paths, shapes and dtypes, and with shardings and memory kinds to restore into: of
            arrays, or of jax.ShapeDtypeStructs. Without a sharding, on the first device (on all, of several processes).
        step: None for the newest that is complete.

    Returns:
        (tree, extra). The tree has the structure of `like`, and its kinds of leaves.

    Raises:
        CheckpointMissingError (a FileNotFoundError): there is no complete checkpoint, or not of that step.
        CheckpointMismatchError (a ValueError): the leaves differ from those of `like`; names them, and those that have
            the nearest names. No array was read.
        CheckpointCorruptError (a ValueError): bytes are not what was saved; names the leaves, and the earlier steps.
            No other step is taken.
        TypeError, ValueError: a leaf of `like` is of a kind that is not stored, or its sharding has no devices.
    """
    reader = Checkpointer(directory=directory, read_only=True)
    # All processes restore what the primary sees.
    steps_there = distributed.from_primary(reader.steps())
    if step is None:
        step = _newest(reader, steps_there)
    place = f"step {step} of {directory}"
    manifest = _whole_manifest(reader, step, place)
    extra = dict(manifest.extra)
    notes: dict[str, Note] = extra.pop(_NOTES, {})
    leaves = _leaves(like)
    specs = _specs(leaves)
    if _PLACEHOLDER in manifest.leaves:
        specs[_PLACEHOLDER] = jax.ShapeDtypeStruct((1,), np.uint8, sharding=sharding_of(None))
    _refuse_other_leaves(place, manifest, notes, leaves, specs)
    try:
        arrays = reader.restore(step, _Arrays(specs)).state.arrays
    except CheckpointCorruptError as error:
        earlier_steps = [other for other in steps_there if other < step]
        raise CheckpointCorruptError(f"{error}; earlier steps: {earlier_steps or 'none'}") from error
    restored = [restored_leaf(leaf, notes.get(name), arrays.get(name)) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(like), restored), extra


def _whole_manifest(reader: Checkpointer, step: int, place: str) -> Manifest:
    """The manifest of a step. Raises CheckpointMismatchError: some of its leaves are stored elsewhere."""
    manifest = reader.manifest(step)
    if manifest.frozen is not None:
        reason = "is of a run with frozen parameters, which are stored apart: Checkpointer.restore reads both"
        raise CheckpointMismatchError(f"{place} {reason}")
    return manifest


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """The steps in a directory that are complete, ascending; none if there is no such directory. No array is read."""
    return Checkpointer(directory=directory, read_only=True).steps()


def _newest(reader: Checkpointer, steps_there: list[int]) -> int:
    """The newest complete step. Raises CheckpointMissingError: there is none; says what looks like one."""
    if steps_there:
        return steps_there[-1]
    problems = reader.problems()
    # A kill in the moment in which one checkpoint takes another's place leaves the old one under another name.
    steps_aside = put_aside(reader.directory)
    if steps_aside:
        problems.append(f"steps {steps_aside} were being replaced; the next save, or pl.Checkpointer, puts them back")
    raise CheckpointMissingError("\n  ".join([f"there is no complete checkpoint in {reader.directory}", *problems]))


def _leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path. Raises ValueError: two have the same, such as {"a": {"b": x}, "a/b": y}."""
    leaves = flatten(tree)
    if len(leaves) != len(jax.tree.leaves(tree)):
        raise ValueError("two leaves of the tree have the same path: a name in it holds a '/'")
    return leaves


def _on_devices(array: np.ndarray) -> jax.Array:
    """A numpy array as a jax.Array that can be saved."""
    return jax.make_array_from_callback(array.shape, sharding_of(None), lambda index: array[index])


def _spec(array: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _specs(leaves: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """The specs of the arrays into which leaves are restored, with shardings: of keys, of their data.

    Raises ValueError: a sharding names no devices.
    """
    specs: dict[str, jax.ShapeDtypeStruct] = {}
    for name, leaf in stored_leaves(leaves, _spec).arrays.items():
        # jax.eval_shape of arrays on a mesh with explicit axes gives such shardings.
        if isinstance(getattr(leaf.sharding, "mesh", None), AbstractMesh):
            raise ValueError(
                f"{shown(name)}: expected a sharding over a jax.sharding.Mesh, got one over an abstract mesh, which "
                "has no devices to restore to"
            )
        data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
        specs[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding_of(leaf))
    return specs


def _refuse_other_leaves(
    place: str,
    manifest: Manifest,
    notes: Mapping[str, Note],
    leaves: Mapping[str, Any],
    specs: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    """Raises CheckpointMismatchError: names, shapes, dtypes or kinds of leaves differ from the checkpoint's."""
    wanted = {name: LeafRecord(tuple(spec.shape), str(spec.dtype)) for name, spec in specs.items()}
    expected = records(wanted, stored_leaves(leaves, _spec).notes)
    stored = records(manifest.leaves, notes)
    table = mismatch_table(stored, expected)
    if table is None:
        return
    lines = [f"{place} holds other leaves than `like`: {table}"]
    extra_names = [name for name in stored if name not in expected]
    for name in expected:
        if name in stored:
            continue
        for nearest_name in difflib.get_close_matches(name, extra_names, n=1):
            lines.append(f"  {name}: the nearest in the checkpoint is {nearest_name}")
    raise CheckpointMismatchError("\n".join(lines))
