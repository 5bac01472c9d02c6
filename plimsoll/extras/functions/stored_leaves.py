"""Converts leaves of any pytree to the form that a checkpoint stores: numeric arrays, plus a JSON note if needed.

A checkpoint holds jax.Arrays of numbers. Typed keys become their key data, numpy's 64-bit numbers become pairs of
32-bit words (JAX would round them), and Python's own scalars go into the note.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from plimsoll.extras.functions.leaves import is_key
from plimsoll.framework.checkpoint.directory import LeafRecord

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
_READERS: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: text == "True",
    "int": int,
    "float": float.fromhex,
    "str": str,
}
_WORD_BYTES = 4


def encode_leaves(leaves: Mapping[str, Any], to_array: Callable[[np.ndarray], Any]) -> StoredLeaves:
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
            stored.arrays[name] = to_array(_split_wide(leaf))
            if _is_wide(leaf.dtype):
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


def decode_leaf(leaf: Any, note: Note | None, array: jax.Array | None) -> Any:
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


def key_implementation(leaf: Any) -> str:
    """Return the name of the algorithm of typed keys, such as "threefry2x32"."""
    if isinstance(leaf, jax.Array):
        return str(jax.random.key_impl(leaf))
    # A spec has only a dtype, from which zeros can be made.
    return str(jax.random.key_impl(jnp.empty((), leaf.dtype)))


def get_sharding(leaf: Any) -> Sharding:
    """Return a leaf's sharding; by default the first device, or replicated on all if there are several processes."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is not None:
        return sharding
    if jax.process_count() == 1:
        return SingleDeviceSharding(jax.local_devices()[0])
    every_device = Mesh(np.array(jax.devices()), ("device",))
    return NamedSharding(every_device, PartitionSpec())


def _is_wide(dtype: np.dtype) -> bool:
    """Return whether JAX would round numbers of this dtype unless 64-bit mode is enabled."""
    return dtype.kind in "iufc" and dtype.itemsize > (2 * _WORD_BYTES if dtype.kind == "c" else _WORD_BYTES)


def _split_wide(leaf: np.ndarray | np.generic) -> np.ndarray:
    """Return a numpy array as numbers of at most 32 bits; wider ones become words along a new last axis."""
    array = np.asarray(leaf)
    if not _is_wide(array.dtype):
        return array
    contiguous = np.ascontiguousarray(array[..., None])
    return contiguous.view(np.uint32)
