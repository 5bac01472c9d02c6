"""Writes arrays to disk and reads them back; the only file that uses orbax.

Orbax is imported inside the functions that use it, because the import takes half a second, and the error for a typo on
the command line should not wait for that.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from plimsoll.framework.checkpoint.directory import MANIFEST, STATE, CheckpointCorruptError, summarize_error
from plimsoll.framework.files import durable
from plimsoll.framework.layout import SplitArray, SplitSpec
from plimsoll.framework.processes import distributed

# Arrays, and the shape, dtype and sharding of each array, by path in the state.
Arrays = dict[str, jax.Array | SplitArray]
_Specs = Mapping[str, jax.ShapeDtypeStruct]
AbstractArrays = Mapping[str, jax.ShapeDtypeStruct | SplitSpec]

# Maximum size of a stored chunk of an array, so that reading a small shard does not require reading the whole leaf.
_CHUNK_BYTES = 64 << 20
# Limit on the bytes read at a time, unless a leaf is larger than half of this.
_READ_BYTES = 256 << 20
# Maximum time in seconds to wait, after a failure, for reads that orbax has abandoned.
_DRAIN_SECONDS = 5.0
_DRAIN_INTERVAL_SECONDS = 0.1
# Maximum number of arrays to name in errors: those that failed to load, with their errors, and those that are missing.
_MAX_FAILED = 5
_MAX_LOST = 20


def write(path: Path, arrays: Mapping[str, jax.Array], manifest: dict[str, object]) -> Callable[[], None]:
    """Start to write a checkpoint to `path`, atomically; the arrays may be donated when this returns. Collective.

    Returns:
        A function that waits for the commit, in any thread, and raises any error. Then the checkpoint is on disk.
    """
    from orbax.checkpoint import v1 as ocp

    # Orbax refuses arrays without elements.
    stored: dict[str, jax.Array | np.ndarray] = {name: x for name, x in arrays.items() if x.size}
    context = _context()
    if all(device.platform == "cpu" for x in arrays.values() if x.size for device in x.sharding.device_set):
        # On CPU, orbax would create views of the arrays' own memory, and such arrays are not donated: the next step
        # would silently allocate a second state. So pass copies to orbax. With several processes, it makes them itself.
        if jax.process_count() == 1:
            stored = {name: copy_to_numpy(x) for name, x in arrays.items() if x.size}
        context.array.saving.enable_pinned_host_transfer = True
    checkpointables = {STATE: stored, MANIFEST: manifest}
    with context:
        response = ocp.save_checkpointables_async(str(path), checkpointables)

    def finish() -> None:
        response.result()
        # Orbax syncs the arrays to disk, but not their index, the manifest, or the file names. Without syncing these, a
        # power cut would lose the checkpoint.
        if distributed.is_primary():
            durable.sync_tree(path)
            durable.sync(path.parent)

    return finish


def copy_to_numpy(x: jax.Array) -> np.ndarray:
    """Copy the whole array to memory owned by numpy.

    A jax.Array caches the result of np.asarray, which is a view of its buffer. So this calls it on a copy, which is
    freed before the next leaf is copied.
    """
    copy = jax.device_put(x, x.sharding, may_alias=False)
    return np.array(copy, copy=True)


def read(path: Path, abstract: AbstractArrays) -> Arrays:
    """Read the arrays at `path`, each into the sharding and memory kind of its spec in `abstract`. Collective.

    A split array is read as a whole one, into host memory. This does not validate the data, so the caller must verify
    the checksums.

    Raises:
        CheckpointCorruptError: bytes or files are missing or invalid; the message names the arrays if they can be
            determined.
    """
    problem = None
    loaded = {}
    specs = {name: x.whole if isinstance(x, SplitSpec) else x for name, x in abstract.items()}
    with _silence_orbax() as drain:
        try:
            loaded = _load(path, specs)
        except (jax.errors.JaxRuntimeError, MemoryError):
            # Not the checkpoint's fault, for example out of memory.
            raise
        except Exception as error:
            problem = _describe_unreadable(path, specs) or summarize_error(error)
        if problem is not None:
            # After the end of `except`, which releases the traceback and the coroutines that it references.
            drain()
    arrays: Arrays = {name: x for name, x in loaded.items() if isinstance(x, jax.Array)}
    if problem is None:
        # A changed byte in orbax's own index may hide a leaf; orbax then returns the spec.
        lost_names = [name for name in specs if name not in arrays]
        if lost_names:
            problem = f"not in orbax's index: {', '.join(lost_names[:_MAX_LOST])}"
    if problem is not None:
        raise CheckpointCorruptError(f"{path} cannot be read: {problem}")
    return arrays


@contextmanager
def _silence_orbax() -> Iterator[Callable[[], None]]:
    """Suppress pages of tracebacks that add nothing to the error being raised.

    When one read fails, orbax abandons its other reads: asyncio logs each as an error, and each warns again when it is
    garbage collected. Yields a function that waits, after a failure, until none of them is left (they also hold
    arrays).
    """
    logger = logging.getLogger("asyncio")
    logger_was_disabled = logger.disabled
    original_hook = sys.unraisablehook

    def unraisable(info: sys.UnraisableHookArgs) -> None:
        is_noise = _is_read(info.object) or "Event loop is closed" in str(info.exc_value)
        if not is_noise:
            original_hook(info)

    logger.disabled = True
    sys.unraisablehook = unraisable
    try:
        yield _drain
    finally:
        logger.disabled = logger_was_disabled
        sys.unraisablehook = original_hook


def _is_read(candidate: object) -> bool:
    """Return whether an object is a coroutine of orbax."""
    # Use type(): isinstance reads an object's __class__, and among all objects some emit a warning for that.
    return type(candidate) is types.CoroutineType and "orbax" in candidate.cr_code.co_filename


def _is_pending(candidate: object) -> bool:
    # A finished coroutine has no frame. It may stay referenced for long, for example by the traceback of a log record,
    # but it does not warn when it is collected.
    return _is_read(candidate) and candidate.cr_frame is not None  # pyright: ignore[reportAttributeAccessIssue]


def _drain() -> None:
    """Wait, for a limited time, until no coroutine of orbax is pending."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    while time.monotonic() < deadline:
        gc.collect()
        if not any(_is_pending(candidate) for candidate in gc.get_objects()):
            return
        time.sleep(_DRAIN_INTERVAL_SECONDS)


def _load(path: Path, specs: _Specs) -> dict[str, object]:
    """Load arrays with orbax, concurrently, with a limit on the bytes in host memory.

    A leaf that is not in orbax's index is None, or its spec.
    """
    from orbax.checkpoint import v1 as ocp

    loaded: dict[str, object] = {}
    stored_specs = {name: x for name, x in specs.items() if x.size}
    if stored_specs:
        largest_bytes = max(x.size * x.dtype.itemsize for x in stored_specs.values())
        context = _context()
        context.memory.read_concurrent_bytes = read_bytes(largest_bytes)
        with context:
            checkpointables = ocp.load_checkpointables(str(path), {STATE: stored_specs})
            loaded = checkpointables[STATE]
    arrays: dict[str, object] = {}
    for name, x in specs.items():
        arrays[name] = loaded.get(name) if x.size else empty(x)
    return arrays


def empty(x: jax.ShapeDtypeStruct) -> jax.Array:
    """Create an array without elements; such arrays are not stored."""
    shard_shape = x.sharding.shard_shape(x.shape)
    shard = np.zeros(shard_shape, x.dtype)
    return jax.make_array_from_callback(x.shape, x.sharding, lambda _: shard)


def read_bytes(largest: int) -> int:
    """Return the limit on the bytes in host memory while arrays are read.

    The largest array, of `largest` bytes, must fit, as a whole in the worst case. Without a limit all arrays are read
    at once, which takes twice the size of the state on a CPU or in pinned_host memory.
    """
    return max(_READ_BYTES, 2 * largest)


def _describe_unreadable(path: Path, specs: _Specs) -> str:
    """Describe the arrays that cannot be read, trying each separately; "" if all can, or with several processes."""
    # Several processes might disagree about which read fails, and then wait for one another.
    if jax.process_count() > 1:
        return ""
    failures = []
    for name, x in specs.items():
        try:
            _load(path, {name: x})
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise
        except Exception as error:
            failures.append(f"{name} ({summarize_error(error)})")
    text = "; ".join(failures[:_MAX_FAILED])
    num_hidden = len(failures) - _MAX_FAILED
    if num_hidden > 0:
        text += f"; and {num_hidden} more"
    return text


def _context() -> Any:
    """Return the orbax settings for saving and loading."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    saving = context.array.saving
    # In uncompressed data, the checksums detect a changed byte and name its array; decompression could fail in any way.
    saving.use_compression = False
    saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # Shardings are always specified when arrays are read, so stored ones would be unused.
    saving.enable_write_sharding_file = False
    # Report a directory that cannot be created at the start of a save instead of at its end.
    context.asynchronous.create_directories_asynchronously = False
    context.pytree.loading.partial_load = True
    # `copy_to_numpy` has already made copies.
    context.memory.deepcopy_host_arrays = False
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=MANIFEST)
    context.checkpointables.registry = registry
    return context
