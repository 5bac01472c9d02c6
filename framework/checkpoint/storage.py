"""Arrays to disk and back: the only file that knows orbax.

Orbax is imported inside the functions that use it: that takes half a second, which a typo on the command line should
not wait for.
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

from framework.checkpoint.directory import MANIFEST, STATE, CheckpointCorruptError, one_line

# Arrays are cut into stored pieces of at most this size, so that a reader of a small shard does not read a whole leaf.
_CHUNK_BYTES = 64 << 20
# Being read at a time, if no leaf is larger than half of this.
_READ_BYTES = 256 << 20
_DRAIN_SECONDS = 5.0  # how long reads that were left to themselves are waited for


def write(path: Path, arrays: Mapping[str, jax.Array], manifest: dict[str, Any]) -> Callable[[], None]:
    """Starts to write a checkpoint to `path`, atomically; the arrays may be donated when this returns. Collective.
    Returns a function that waits for the commit, in any thread, and raises what went wrong."""
    from orbax.checkpoint import v1 as ocp

    stored: dict[str, Any] = {name: x for name, x in arrays.items() if x.size}  # orbax refuses arrays without elements
    context = _context()
    if all(device.platform == "cpu" for x in stored.values() for device in x.sharding.device_set):
        # On CPU orbax would look at the arrays' own memory, and what is looked at is not donated: the next step would
        # silently allocate a second state. So it is given copies; of arrays of several processes it makes them itself.
        if jax.process_count() == 1:
            stored = {name: _copy(x) for name, x in stored.items()}
        context.array.saving.enable_pinned_host_transfer = True
    with context:
        return ocp.save_checkpointables_async(str(path), {STATE: stored, MANIFEST: manifest}).result


def _copy(x: jax.Array) -> np.ndarray:
    """The whole array in numpy's own memory. A jax.Array keeps what np.asarray made of it, and that is a view of its
    buffer: so that is asked of a copy, which goes again before the next leaf's is made."""
    return np.array(jax.device_put(x, x.sharding, may_alias=False), copy=True)


def read(path: Path, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The arrays at `path`, each in the sharding and memory of its ShapeDtypeStruct. Collective. Raises
    CheckpointCorruptError: bytes or files are missing or make no sense; the arrays are named where that could be told.
    That the bytes are right is for checksums to tell."""
    problem, arrays = None, {}
    with _quiet() as drain:
        try:
            arrays = _load(path, wanted)
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # out of memory, say: no fault of the checkpoint
        except Exception as error:
            problem = _unreadable(path, wanted) or one_line(error)
        if problem is not None:
            drain()
    # A changed byte in orbax's own index may hide a leaf; it then hands back what it was asked with.
    if problem is None and (lost := [name for name in wanted if not isinstance(arrays[name], jax.Array)]):
        problem = f"not in orbax's index: {', '.join(lost[:20])}"
    if problem is not None:
        raise CheckpointCorruptError(f"{path} cannot be read: {problem}")
    return arrays


@contextmanager
def _quiet() -> Iterator[Callable[[], None]]:
    """Keeps pages of tracebacks off the screen that say nothing beyond the error that is raised.

    When one read fails, orbax leaves its other reads to themselves: asyncio logs each as an error, and each complains
    again when it is collected. Yields a function that waits, after a failure, until none of them is left (they hold
    arrays, too).
    """

    def is_read(thing: object) -> bool:
        # By type(): isinstance asks an object for its __class__, and among all objects some answer with a warning.
        return type(thing) is types.CoroutineType and "orbax" in thing.cr_code.co_filename

    def unraisable(info: Any) -> None:
        if not is_read(info.object) and "Event loop is closed" not in str(info.exc_value):
            hook(info)

    def is_pending(thing: object) -> bool:
        # One that has ended has no frame. It may be held for long, by a log record's traceback say, and says nothing.
        return is_read(thing) and thing.cr_frame is not None  # pyright: ignore[reportAttributeAccessIssue]

    def drain() -> None:
        deadline = time.monotonic() + _DRAIN_SECONDS
        while time.monotonic() < deadline:
            gc.collect()
            if not any(is_pending(thing) for thing in gc.get_objects()):
                return
            time.sleep(0.1)

    logger, hook = logging.getLogger("asyncio"), sys.unraisablehook
    before, logger.disabled, sys.unraisablehook = logger.disabled, True, unraisable
    try:
        yield drain
    finally:
        logger.disabled, sys.unraisablehook = before, hook


def _load(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    from orbax.checkpoint import v1 as ocp

    found: dict[str, Any] = {}
    if stored := {name: x for name, x in wanted.items() if x.size}:
        context = _context()
        context.memory.read_concurrent_bytes = read_bytes(max(x.size * x.dtype.itemsize for x in stored.values()))
        with context:
            found = ocp.load_checkpointables(str(path), {STATE: stored})[STATE]
    return {name: found.get(name) if x.size else empty(x) for name, x in wanted.items()}


def empty(x: Any) -> jax.Array:
    """An array without elements, which no store keeps."""
    shard = np.zeros(x.sharding.shard_shape(x.shape), x.dtype)
    return jax.make_array_from_callback(x.shape, x.sharding, lambda _: shard)


def read_bytes(largest: int) -> int:
    """Bytes that pass through host memory at a time while arrays are read, the largest of which has `largest` bytes and
    must pass, whole in the worst case. Without a limit all do at once: twice the state on a CPU or in pinned_host."""
    return max(_READ_BYTES, 2 * largest)


def _unreadable(path: Path, wanted: Mapping[str, Any]) -> str:
    """Which arrays cannot be read, each tried by itself. Several processes might disagree, and wait for one another."""
    found = []
    for name, x in wanted.items() if jax.process_count() == 1 else ():
        try:
            _load(path, {name: x})
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise
        except Exception as error:
            found.append(f"{name} ({one_line(error)})")
    return "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")


def _context() -> Any:
    """Orbax's settings for both directions."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    # The checksums find a changed byte in raw data and name its array; decompressing one may fail in any way.
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    context.array.saving.enable_write_sharding_file = False  # shardings are always given
    context.asynchronous.create_directories_asynchronously = False  # what stops the start is then raised by the start
    context.pytree.loading.partial_load = True
    context.memory.deepcopy_host_arrays = False  # `_copy` made them
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=MANIFEST)
    context.checkpointables.registry = registry
    return context
