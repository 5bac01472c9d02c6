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
# Bytes that are read at a time, if no leaf is larger than half of this.
_READ_BYTES = 256 << 20
# After a failure, reads that orbax has left to themselves are waited for this long.
_DRAIN_SECONDS = 5.0
_DRAIN_INTERVAL_SECONDS = 0.1
# Errors name at most so many arrays: of those that failed, with what each said; of those that are missing.
_MAX_FAILED = 5
_MAX_LOST = 20


def write(
    path: Path,
    arrays: Mapping[str, jax.Array],
    manifest: dict[str, Any],
) -> Callable[[], None]:
    """Starts to write a checkpoint to `path`, atomically; the arrays may be donated when this returns. Collective.
    Returns a function that waits for the commit, in any thread, and raises what went wrong."""
    from orbax.checkpoint import v1 as ocp

    # Orbax refuses arrays without elements.
    stored: dict[str, Any] = {name: x for name, x in arrays.items() if x.size}
    context = _context()
    device_sets = [x.sharding.device_set for x in stored.values()]
    devices = set[Any]().union(*device_sets)
    if all(device.platform == "cpu" for device in devices):
        # On CPU orbax would look at the arrays' own memory, and what is looked at is not donated: the next step would
        # silently allocate a second state. So it is given copies; of arrays of several processes it makes them itself.
        if jax.process_count() == 1:
            stored = {name: _copy(x) for name, x in stored.items()}
        context.array.saving.enable_pinned_host_transfer = True
    checkpointables = {STATE: stored, MANIFEST: manifest}
    with context:
        response = ocp.save_checkpointables_async(str(path), checkpointables)
    return response.result


def _copy(x: jax.Array) -> np.ndarray:
    """The whole array in numpy's own memory. A jax.Array keeps what np.asarray made of it, and that is a view of its
    buffer: so that is asked of a copy, which goes again before the next leaf's is made."""
    copy = jax.device_put(x, x.sharding, may_alias=False)
    return np.array(copy, copy=True)


def read(path: Path, specs: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Reads the arrays at `path`, each into the sharding and memory of its ShapeDtypeStruct in `specs`. Collective.

    That the bytes are right is for checksums to tell.

    Raises:
        CheckpointCorruptError: bytes or files are missing or make no sense; the arrays are named where that could be
            told.
    """
    problem = None
    arrays = {}
    with _quiet() as drain:
        try:
            arrays = _load(path, specs)
        except (jax.errors.JaxRuntimeError, MemoryError):
            # Out of memory, for one: that is no fault of the checkpoint.
            raise
        except Exception as error:
            problem = _unreadable(path, specs) or one_line(error)
        if problem is not None:
            # After `except` has ended, which drops the traceback and the coroutines that it holds.
            drain()
    if problem is None:
        # A changed byte in orbax's own index may hide a leaf; orbax then hands back the spec.
        lost_names = [name for name in specs if not isinstance(arrays[name], jax.Array)]
        if lost_names:
            problem = f"not in orbax's index: {', '.join(lost_names[:_MAX_LOST])}"
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
    logger = logging.getLogger("asyncio")
    logger_was_disabled = logger.disabled
    original_hook = sys.unraisablehook

    def unraisable(info: Any) -> None:
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
    """Whether an object is a coroutine of orbax."""
    # By type(): isinstance asks an object for its __class__, and among all objects some answer with a warning.
    return type(candidate) is types.CoroutineType and "orbax" in candidate.cr_code.co_filename


def _is_pending(candidate: object) -> bool:
    # A coroutine that has ended has no frame. It may be held for long, by a log record's traceback
    # for one, and says nothing when it goes.
    return _is_read(candidate) and candidate.cr_frame is not None  # pyright: ignore[reportAttributeAccessIssue]


def _drain() -> None:
    """Waits, for a limited time, until no coroutine of orbax is pending."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    while time.monotonic() < deadline:
        gc.collect()
        if not any(_is_pending(candidate) for candidate in gc.get_objects()):
            return
        time.sleep(_DRAIN_INTERVAL_SECONDS)


def _load(path: Path, specs: Mapping[str, Any]) -> dict[str, Any]:
    """Loads arrays by orbax: all at once, with a limit on the bytes in host memory."""
    from orbax.checkpoint import v1 as ocp

    loaded: dict[str, Any] = {}
    stored_specs = {name: x for name, x in specs.items() if x.size}
    if stored_specs:
        largest_bytes = max(x.size * x.dtype.itemsize for x in stored_specs.values())
        context = _context()
        context.memory.read_concurrent_bytes = read_bytes(largest_bytes)
        with context:
            checkpointables = ocp.load_checkpointables(str(path), {STATE: stored_specs})
            loaded = checkpointables[STATE]
    arrays: dict[str, Any] = {}
    for name, x in specs.items():
        arrays[name] = loaded.get(name) if x.size else empty(x)
    return arrays


def empty(x: Any) -> jax.Array:
    """An array without elements, which no store keeps."""
    shard_shape = x.sharding.shard_shape(x.shape)
    shard = np.zeros(shard_shape, x.dtype)
    return jax.make_array_from_callback(x.shape, x.sharding, lambda _: shard)


def read_bytes(largest: int) -> int:
    """Bytes that pass through host memory at a time while arrays are read, the largest of which has `largest` bytes and
    must pass, whole in the worst case. Without a limit all do at once: twice the state on a CPU or in pinned_host."""
    return max(_READ_BYTES, 2 * largest)


def _unreadable(path: Path, specs: Mapping[str, Any]) -> str:
    """Which arrays cannot be read, each tried by itself; "" if all can be, or if several processes read."""
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
            failures.append(f"{name} ({one_line(error)})")
    text = "; ".join(failures[:_MAX_FAILED])
    num_hidden = len(failures) - _MAX_FAILED
    if num_hidden > 0:
        text += f"; and {num_hidden} more"
    return text


def _context() -> Any:
    """Orbax's settings for both directions."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    saving = context.array.saving
    # The checksums find a changed byte in raw data and name its array; decompressing one may fail in any way.
    saving.use_compression = False
    saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # Shardings are always given when arrays are read, so the stored ones would go unused.
    saving.enable_write_sharding_file = False
    # A directory that cannot be made is then an error of the start of a save, and not of its end.
    context.asynchronous.create_directories_asynchronously = False
    context.pytree.loading.partial_load = True
    # `_copy` has made copies already.
    context.memory.deepcopy_host_arrays = False
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=MANIFEST)
    context.checkpointables.registry = registry
    return context
