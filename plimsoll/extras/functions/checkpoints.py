"""Save or restore any pytree in one call, from any program, in the checkpoint format of Plimsoll runs.

The directory layout is that of `framework.checkpoint`: one folder per step, which appears only when it is complete; a
checksum for each leaf; arrays that can be restored on any mesh (docs/checkpoints.md).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from plimsoll.extras.functions.leaf_selection import is_key
from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.checkpoint.directory import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointMissingError,
    LeafRecord,
    Manifest,
    list_moved_aside,
    mismatch_table,
)
from plimsoll.framework.layout import PyTree, flatten
from plimsoll.framework.processes import distributed
from plimsoll.framework.program.save_window import agree_on_default_window

# Key in a manifest's `extra` for the notes on leaves that are not plain arrays.
_NOTES = "$leaves"
# The only leaf that is stored for a tree without array data, because a checkpoint needs at least one array.
_PLACEHOLDER = "$none"
# Checkpoints are removed only if the caller passes `keep`.
_KEEP_ALL = 1 << 30


@jax.tree_util.register_pytree_with_keys_class
class _Arrays:
    """Arrays or their specs by path; not a dict, because `Checkpointer` gives a meaning to a dict's group names."""

    def __init__(self, arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct]):
        self.arrays = arrays

    def tree_flatten_with_keys(self) -> tuple[list[tuple[object, jax.Array | jax.ShapeDtypeStruct]], tuple[str, ...]]:
        pairs = [(jax.tree_util.DictKey(name), array) for name, array in self.arrays.items()]
        return pairs, tuple(self.arrays)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], arrays: Iterable[jax.Array]) -> _Arrays:
        return cls(dict(zip(names, arrays, strict=True)))


def save(
    directory: str | os.PathLike[str],
    step: int,
    tree: PyTree,
    extra: Mapping[str, object] | None = None,
    *,
    keep: int | None = None,
    overwrite: bool = False,
) -> None:
    """Save a tree as a step and return once it is complete on disk. Every process of a job must call it.

    If a process is killed during the save, earlier steps stay intact, and the next save removes the leftover files.

    Complexity, for B bytes in a process's shards: each byte is read once for its checksum and written once. Host memory
    holds at most 1 GiB of them at a time, or a quarter of what is free if that is less.

    Args:
        directory: a local directory, created if missing, or one in an object store (gs://, s3://).
        step: step number, at least 0.
        tree: any pytree of jax.Arrays (any sharding and memory kind), typed keys, numpy arrays and scalars, and
            Python's bool, int, float and str. Functions among its leaves are not stored: `restore` takes them from
            its `like`. Everything except global jax.Arrays must be the same in all processes.
        extra: your own JSON data, such as {"epoch": 3}.
        keep: number of newest steps to keep, including this one; None keeps all.
        overwrite: whether an existing step may be replaced.

    Raises:
        FileExistsError: the step exists and `overwrite` is false.
        TypeError: a leaf has an unsupported type, or `extra` is not JSON. Nothing was written.
        ValueError: two leaves have the same path, `extra` is not JSON (NaN), or step or keep is too small.
        CheckpointSaveError: the disk is full or not writable. Earlier steps stay intact.
    """
    leaves = _flatten_leaves(tree)
    stored = encode_leaves(leaves, _on_devices)
    contents = dict(extra or {})
    if _NOTES in contents:
        raise ValueError(f"extra: {_NOTES!r} is a reserved name; choose another")
    if stored.notes:
        contents[_NOTES] = stored.notes
    arrays = {name: jax.random.key_data(array) if is_key(array) else array for name, array in stored.arrays.items()}
    if not any(array.size for array in arrays.values()):
        arrays[_PLACEHOLDER] = _on_devices(np.zeros(1, np.uint8))
    with Checkpointer(directory=directory, keep=_KEEP_ALL if keep is None else keep) as checkpointer:
        exists = distributed.broadcast_from_primary(step in checkpointer.steps())
        if exists and not overwrite:
            raise FileExistsError(f"step {step} already exists in {directory}; pass overwrite=True to replace it")
        checkpointer.save(step, _Arrays(arrays), contents, window_bytes=agree_on_default_window())


def restore(directory: str | os.PathLike[str], like: PyTree, step: int | None = None) -> tuple[PyTree, dict[str, Any]]:
    """Restore a tree that `save` or a `Checkpointer` saved, on any mesh. Every process of a job must call it.

    Complexity: each process reads the bytes of its own shards, at most 256 MiB at a time, or two of the largest leaf,
    and then computes their checksums.

    Args:
        directory: the directory that was passed to `save`.
        like: a tree of arrays or jax.ShapeDtypeStructs with the same paths, shapes and dtypes, and with the shardings
            and memory kinds to restore into. A leaf without a sharding goes to the first device, or is replicated on
            all devices if there are several processes.
        step: step to restore; None for the newest complete one.

    Returns:
        (tree, extra). The tree has the structure of `like` and its leaf types.

    Raises:
        CheckpointMissingError (a FileNotFoundError): there is no complete checkpoint, or none of that step.
        CheckpointMismatchError (a ValueError): the leaves differ from those of `like`. The message lists them and the
            leaves with the closest names. No array was read.
        CheckpointCorruptError (a ValueError): the data is not what was saved. The message lists the leaves and the
            earlier steps. No other step is restored instead.
        TypeError, ValueError: a leaf of `like` has a type that cannot be stored, or its sharding has no devices.
    """
    reader = Checkpointer(directory=directory, read_only=True)
    # All processes restore the step that process 0 finds.
    saved_steps = distributed.broadcast_from_primary(reader.steps())
    if step is None:
        step = _find_newest_step(reader, saved_steps)
    location = f"step {step} of {directory}"
    manifest = reader.manifest(step)
    if manifest.frozen is not None:
        reason = "belongs to a run with frozen parameters, which are stored separately"
        raise CheckpointMismatchError(f"{location} {reason}; use Checkpointer.restore, which reads both")
    extra = dict(manifest.extra)
    notes: dict[str, Note] = extra.pop(_NOTES, {})
    leaves = _flatten_leaves(like)
    specs = _specs(leaves)
    if _PLACEHOLDER in manifest.leaves:
        specs[_PLACEHOLDER] = jax.ShapeDtypeStruct((1,), np.uint8, sharding=get_sharding(None))
    _refuse_other_leaves(location, manifest, notes, leaves, specs)
    try:
        arrays = reader.restore(step, _Arrays(specs)).state.arrays
    except CheckpointCorruptError as error:
        earlier_steps = [other for other in saved_steps if other < step]
        raise CheckpointCorruptError(f"{error}; earlier steps: {earlier_steps or 'none'}") from error
    restored = [decode_leaf(leaf, notes.get(name), arrays.get(name)) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(like), restored), extra


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """Return the complete steps in a directory, ascending; empty if it does not exist. No array is read."""
    return Checkpointer(directory=directory, read_only=True).steps()


def _find_newest_step(reader: Checkpointer, saved_steps: list[int]) -> int:
    """Return the newest complete step. Raise CheckpointMissingError, listing incomplete steps, if there is none."""
    if saved_steps:
        return saved_steps[-1]
    problems = reader.problems()
    # If a process is killed while one checkpoint replaces another, the old one is left under another name.
    steps_aside = list_moved_aside(reader.directory)
    if steps_aside:
        problems.append(f"steps {steps_aside} were being replaced; the next save, or pl.Checkpointer, puts them back")
    raise CheckpointMissingError("\n  ".join([f"there is no complete checkpoint in {reader.directory}", *problems]))


def _flatten_leaves(tree: PyTree) -> dict[str, PyTree]:
    """Return a tree's leaves by path. Raise ValueError if two paths are equal, such as {"a": {"b": x}, "a/b": y}."""
    leaves = flatten(tree)
    if len(leaves) != len(jax.tree.leaves(tree)):
        raise ValueError("two leaves of the tree have the same path, because a name contains a '/'; rename it")
    return leaves


def _on_devices(array: np.ndarray) -> jax.Array:
    """Return a numpy array as a jax.Array that can be saved."""
    return jax.make_array_from_callback(array.shape, get_sharding(None), lambda index: array[index])


def _spec(array: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _specs(leaves: Mapping[str, PyTree]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the specs, with shardings, of the arrays to restore; for typed keys, the specs of their key data.

    Raises:
        ValueError: a sharding has no devices.
    """
    specs: dict[str, jax.ShapeDtypeStruct] = {}
    for name, leaf in encode_leaves(leaves, _spec).arrays.items():
        # jax.eval_shape of arrays on a mesh with explicit axes returns such shardings.
        if isinstance(getattr(leaf.sharding, "mesh", None), AbstractMesh):
            raise ValueError(
                f"{format_name(name)}: expected a sharding over a jax.sharding.Mesh, got one over an abstract mesh, "
                "which has no devices to restore to"
            )
        data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
        specs[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=get_sharding(leaf))
    return specs


def _refuse_other_leaves(
    location: str,
    manifest: Manifest,
    notes: Mapping[str, Note],
    leaves: Mapping[str, PyTree],
    specs: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    """Raise CheckpointMismatchError if leaf names, shapes, dtypes or types differ from those in the checkpoint."""
    wanted = {name: LeafRecord(tuple(spec.shape), str(spec.dtype)) for name, spec in specs.items()}
    expected = make_records(wanted, encode_leaves(leaves, _spec).notes)
    stored = make_records(manifest.leaves, notes)
    table = mismatch_table(stored, expected)
    if table is None:
        return
    lines = [f"{location} has different leaves than `like`: {table}"]
    extra_names = [name for name in stored if name not in expected]
    for name in expected:
        if name in stored:
            continue
        for nearest_name in difflib.get_close_matches(name, extra_names, n=1):
            lines.append(f"  {name}: the nearest in the checkpoint is {nearest_name}")
    raise CheckpointMismatchError("\n".join(lines))


# --- the stored form of a leaf ---------------------------------------------------------------------------------------

NoteKind = Literal["key", "words", "scalar", "function"]


class Note(TypedDict):
    """JSON note on a leaf that is not a plain array.

    Attributes:
        kind: "key", a typed key; "words", a numpy array of 64-bit numbers; "scalar", a Python scalar; "function", a
            function, which the tree to restore into has to supply.
        type: the key's implementation, the dtype, or the scalar's class; "" for a function.
        value: the scalar as text; "" for other kinds.
    """

    kind: NoteKind
    type: str
    value: str


@dataclass
class StoredLeaves:
    """A tree's leaves by path: numeric arrays (or their specs), and the notes."""

    arrays: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Note] = field(default_factory=dict)


# Text form of each scalar type, and its exact inverse.
_WRITERS: dict[type, Callable[[Any], str]] = {bool: str, int: str, float: float.hex, str: str}
_READERS: dict[str, Callable[[str], bool | int | float | str]] = {
    "bool": lambda text: text == "True",
    "int": int,
    "float": float.fromhex,
    "str": str,
}
_WORD_BYTES = 4


def encode_leaves(leaves: Mapping[str, PyTree], to_array: Callable[[np.ndarray], Any]) -> StoredLeaves:
    """Convert the leaves of a tree to their stored form.

    Args:
        leaves: jax.Arrays or jax.ShapeDtypeStructs, typed keys, numpy arrays and scalars, Python scalars, functions.
        to_array: converts a numpy array to a jax.Array to save, or to a spec to restore into.

    Raises:
        TypeError: a leaf has another type; the message names the leaf.
    """
    stored = StoredLeaves()
    for name, leaf in leaves.items():
        if isinstance(leaf, core.Tracer):
            raise TypeError(f"{format_name(name)} is being traced; call save and restore outside of jax.jit")
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            if is_key(leaf):
                stored.notes[name] = Note(kind="key", type=key_implementation(leaf), value="")
            stored.arrays[name] = leaf
        elif isinstance(leaf, np.ndarray | np.generic):
            array = np.asarray(leaf)
            # JAX would round wider numbers unless 64-bit mode is enabled.
            num_parts = 2 if array.dtype.kind == "c" else 1
            is_wide = array.dtype.kind in "iufc" and array.dtype.itemsize > num_parts * _WORD_BYTES
            if is_wide:
                # Words along a new last axis.
                array = np.ascontiguousarray(array[..., None]).view(np.uint32)
            stored.arrays[name] = to_array(array)
            if is_wide:
                stored.notes[name] = Note(kind="words", type=str(leaf.dtype), value="")
        elif type(leaf) in _WRITERS:
            text = _WRITERS[type(leaf)](leaf)
            stored.notes[name] = Note(kind="scalar", type=type(leaf).__name__, value=text)
        elif callable(leaf):
            stored.notes[name] = Note(kind="function", type="", value="")
        else:
            raise TypeError(
                f"{format_name(name)}: expected an array, a key, a bool, int, float or str, got {type(leaf).__name__}; "
                "register your own classes as pytrees (jax.tree_util.register_dataclass)"
            )
    return stored


def decode_leaf(leaf: PyTree, note: Note | None, array: jax.Array | None) -> PyTree:
    """Rebuild a leaf from the checkpoint's `array` and `note`, with the type of `leaf` in the target tree."""
    kind = None if note is None else note["kind"]
    if kind == "function":
        return leaf
    if note is not None and kind == "scalar":
        return _READERS[note["type"]](note["value"])
    if note is not None and kind == "key":
        assert array is not None
        keys = jax.random.wrap_key_data(array, impl=note["type"])
        return jax.device_put(keys, get_sharding(leaf))
    if isinstance(leaf, np.ndarray | np.generic):
        numbers = np.array(array)
        if note is not None:
            # Wide numbers were split into words along the last axis.
            numbers = numbers.view(note["type"])[..., 0]
        return numbers[()] if isinstance(leaf, np.generic) else numbers
    return array


def make_records(stored: Mapping[str, LeafRecord], notes: Mapping[str, Note]) -> dict[str, LeafRecord]:
    """Return user-facing records of the leaves: keys, wide numpy numbers and Python scalars by their own type names."""
    named: dict[str, LeafRecord] = {}
    for name in sorted({*stored, *notes}):
        note = notes.get(name)
        if note is None:
            named[name] = LeafRecord(stored[name].shape, stored[name].dtype)
        elif note["kind"] == "key":
            named[name] = LeafRecord(stored[name].shape[:-1], f"key:{note['type']}")
        elif note["kind"] == "words":
            named[name] = LeafRecord(stored[name].shape[:-1], f"numpy:{note['type']}")
        else:
            named[name] = LeafRecord((), f"Python:{note['type'] or 'function'}")
    return named


def format_name(name: str) -> str:
    """Return a leaf's path for messages. The path is empty if the tree is a single leaf."""
    return name or "the tree itself"


def key_implementation(leaf: PyTree) -> str:
    """Return the name of the algorithm of typed keys, such as "threefry2x32"."""
    # A spec has only a dtype, from which zeros can be made.
    keys = leaf if isinstance(leaf, jax.Array) else jnp.empty((), leaf.dtype)
    return str(jax.random.key_impl(keys))


def get_sharding(leaf: PyTree) -> Sharding:
    """Return a leaf's sharding; by default the first device, or replicated on all if there are several processes."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is not None:
        return sharding
    if jax.process_count() == 1:
        return SingleDeviceSharding(jax.local_devices()[0])
    every_device = Mesh(np.array(jax.devices()), ("device",))
    return NamedSharding(every_device, PartitionSpec())
