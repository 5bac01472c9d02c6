"""Writes arrays in chunks and reads them back, with tensorstore: one object or file per chunk of an array, in zarr 3.

Object stores: orbax 0.12 supports gs:// but not s3:// (its paths must be absolute, or start with gs://), and for stores
that it does not recognize it commits with a rename. Here both stores use the same protocol, which only requires that an
object appears as a whole: every process writes the chunks that it holds, and then the primary writes the manifest,
which names their folder.

Disks: orbax copies the whole state to host memory before it writes. A save through a window (`window_bytes`) copies and
writes a few rows at a time, so it needs only the window, and the arrays must not change until it is done. It writes to
a temporary folder, which a rename commits. Saves from GPUs are written in the same way, see `is_needed`.

Endpoints and credentials come from the environment: AWS_ENDPOINT_URL, AWS_REGION, AWS_PROFILE, ... and
GOOGLE_APPLICATION_CREDENTIALS, TENSORSTORE_GCS_HTTP_URL.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from plimsoll.framework.checkpoint.directory import (
    MANIFEST,
    MANIFEST_FILE,
    STATE,
    CheckpointCorruptError,
    Manifest,
    summarize_error,
)
from plimsoll.framework.checkpoint.storage import AbstractArrays, Arrays, empty, read_bytes
from plimsoll.framework.files import durable
from plimsoll.framework.files.remote import is_url
from plimsoll.framework.layout import SplitArray, SplitSpec
from plimsoll.framework.processes import distributed

if TYPE_CHECKING:
    import tensorstore as ts

# Maximum size of an object or file; larger arrays are split into several.
_CHUNK_BYTES = 64 << 20
# A narrow window does not make chunks smaller than this.
_MIN_CHUNK_BYTES = 1 << 20
# Maximum time to wait until rows of the state are released: a failure to release them costs memory, not correctness.
_RELEASE_SECONDS = 10.0
_RELEASE_INTERVAL_SECONDS = 0.0002
# A part of an array: a slice for each dimension.
Index = tuple[slice, ...]
_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


@dataclass(frozen=True, eq=False)
class _Piece:
    """Consecutive rows of one shard of an array, which are copied to host memory and written together.

    Attributes:
        name: path of the array in the state.
        index: their index in the whole array.
        nbytes: size.
        source: where the rows are.
    """

    name: str
    index: Index
    nbytes: int
    source: _ShardRows | np.ndarray

    def read(self) -> np.ndarray:
        """Return the rows in host memory. On a CPU they are a view of the shard, which cannot be donated meanwhile."""
        return self.source if isinstance(self.source, np.ndarray) else self.source.read()

    def copy(self) -> _Piece:
        """Return the piece with a copy of its rows in host memory; it does not refer to the shard."""
        rows = self.read()
        return replace(self, source=rows if rows.flags.owndata else rows.copy())


@dataclass(frozen=True, eq=False)
class _ShardRows:
    """Rows of a shard.

    Attributes:
        shard: the shard, an array on one device.
        first: index of the first row, along the first axis.
        count: number of rows; None for a shard without axes.
    """

    shard: jax.Array
    first: int
    count: int | None

    def read(self) -> np.ndarray:
        """Return the rows in host memory; on a CPU, a view of them."""
        rows = ... if self.count is None else slice(self.first, self.first + self.count)
        platform = get_platform(self.shard)
        if platform == "cpu":
            # JAX keeps the view in this object of the shard, which is not the one that the state refers to.
            return np.asarray(self.shard)[rows]
        if platform == "gpu" and self.shard.sharding.memory_kind == "pinned_host":
            # XLA's GPU compiler cannot slice host memory. Not a view: an array with views cannot be donated.
            return np.array(np.asarray(self.shard)[rows])
        if self.count is None:
            return np.asarray(self.shard)
        # Even if these are all rows: JAX would keep the host copy of the shard itself until the state is donated.
        return np.asarray(_slice_rows(self.shard, np.int32(self.first), self.count))


def get_platform(x: jax.Array | SplitArray) -> str:
    """Return the platform of an array's devices: cpu, gpu or tpu."""
    part = x.parts[0] if isinstance(x, SplitArray) else x
    return next(iter(part.sharding.device_set)).platform


def is_needed(arrays: Mapping[str, jax.Array | SplitArray]) -> bool:
    """Return whether a save has to be written here, and not by orbax, even if it is a copy on a disk.

    Orbax cannot write `SplitArray`s. From a GPU it copies all arrays at once, through XLA's pool of pinned host memory
    (xla_gpu_host_bfc), with `enable_pinned_host_transfer` or without it. The pool has a limit and never shrinks, so one
    save would occupy the size of the state there until the process ends. Here, one piece at a time is copied.
    """
    return any(isinstance(x, SplitArray) or get_platform(x) == "gpu" for x in arrays.values())


@partial(jax.jit, static_argnums=2)
def _slice_rows(shard: jax.Array, first_row: jax.Array, num_rows: int) -> jax.Array:
    """Copy rows of a shard, which may be in host memory, to the device. TPU slices host memory along one axis only."""
    rows = jax.lax.dynamic_slice_in_dim(shard, first_row, num_rows)
    return jax.device_put(rows, jax.memory.Space.Device)


def _refer_to_base(rows: np.ndarray) -> weakref.ref[np.ndarray]:
    """Return a weak reference to the array that `rows` is a view of; tensorstore may refer to another view of it."""
    while isinstance(rows.base, np.ndarray):
        rows = rows.base
    return weakref.ref(rows)


def _wait_until_released(views: Sequence[weakref.ref[np.ndarray]]) -> None:
    """Wait until nothing refers to the arrays, for a limited time.

    tensorstore releases rows in its own threads, shortly after it has reported that they are written. Until then, XLA
    cannot reuse the memory of a donated array, so a step that starts at once would copy it.
    """
    deadline = time.monotonic() + _RELEASE_SECONDS
    for view in views:
        while view() is not None and time.monotonic() < deadline:
            time.sleep(_RELEASE_INTERVAL_SECONDS)


def _split_into_pieces(name: str, x: jax.Array | SplitArray, chunk_shape: Sequence[int]) -> Iterator[_Piece]:
    """Split the part of an array that this process writes; each shard comes from only one process.

    Args:
        name: path of the array in the state.
        x: the array.
        chunk_shape: shape of a chunk, see `_chunk`.
    """
    parts = x.parts if isinstance(x, SplitArray) else (x,)
    start = 0
    for part in parts:
        for shard in part.addressable_shards:
            if shard.replica_id != 0:
                continue
            if not part.ndim:
                yield _Piece(name, (), part.nbytes, _ShardRows(shard.data, 0, None))
                continue
            shard_rows = shard.data.shape[0]
            shard_start = start + (shard.index[0].start or 0)
            # A part of a stack may have fewer rows than a chunk of an unsplit one.
            num_rows = min(chunk_shape[0], shard_rows)
            for first_row in range(0, shard_rows, num_rows):
                rows = slice(shard_start + first_row, shard_start + first_row + num_rows)
                nbytes = shard.data.nbytes // shard_rows * num_rows
                source = _ShardRows(shard.data, first_row, num_rows)
                yield _Piece(name, (rows, *shard.index[1:]), nbytes, source)
        start += part.shape[0] if part.ndim else 0


@dataclass(frozen=True)
class _Upload:
    """The upload of one process for one save.

    Attributes:
        path: folder of the step.
        target: name of that folder after the commit; the same as `path` in an object store.
        folder: name of the array folder in `path`.
        specs: shape and dtype of all non-empty arrays.
        chunk_shapes: shape of their chunks.
        pieces: this process's part of the arrays.
        window_bytes: maximum number of bytes that are read but not yet written, at least one piece; None if the pieces
            are copies.
        manifest: manifest that does not name the array folder yet.
        before_commit: called by the primary process before it writes the manifest.
        on_progress: called whenever another piece was read.
        process: index of this process.
        count: number of processes.
    """

    path: Path
    target: Path
    folder: str
    specs: Mapping[str, jax.ShapeDtypeStruct]
    chunk_shapes: Mapping[str, list[int]]
    pieces: Iterable[_Piece]
    window_bytes: int | None
    manifest: Manifest
    before_commit: Callable[[], None]
    on_progress: Callable[[], object]
    process: int
    count: int

    def finish(self) -> None:
        """Upload the arrays and commit. If the commit does not happen, raises an error in every process."""
        # Every process reaches both barriers even after an error, so that none waits for one that failed.
        with contextlib.ExitStack() as barriers:
            barriers.callback(distributed.barrier, f"{self.folder}-committed")
            with contextlib.ExitStack() as barrier:
                barrier.callback(distributed.barrier, f"{self.folder}-written")
                self._write_arrays()
            if self.process == 0:
                self._commit()
        # The other processes read the manifest to find out whether the primary has committed.
        if self.process and Manifest.read(self.target).arrays != self.folder:
            raise OSError("the primary process did not commit it")

    def _write_arrays(self) -> None:
        """Write the arrays of this process. Afterwards, with a window, nothing refers to them any more."""
        views: list[weakref.ref[np.ndarray]] = []
        try:
            self._write_pieces(views)
        except BaseException as error:
            # The error outlives the save, and its frames refer to rows of the state.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            # Without a window the upload itself keeps its copies.
            if self.window_bytes is not None:
                _wait_until_released(views)
        if self.count > 1:
            self._note(self.process).write_text("")

    def _write_pieces(self, views: list[weakref.ref[np.ndarray]]) -> None:
        """Write all pieces, and add the arrays that own their rows to `views`."""
        # Open all arrays before waiting for the first one: each takes a network request.
        opening = {}
        for name, spec in self.specs.items():
            array_path = self.path / self.folder / name
            opening[name] = _open(array_path, spec, self.chunk_shapes[name], create=self.process == 0)
        # Writes in progress, oldest first, and the bytes of each.
        writes: deque[tuple[ts.WriteFutures, int]] = deque()
        written_bytes = 0
        for piece in self.pieces:
            # The oldest writes end first, which releases their host memory.
            while self.window_bytes is not None and writes and written_bytes + piece.nbytes > self.window_bytes:
                write, nbytes = writes.popleft()
                write.result()
                written_bytes -= nbytes
                del write
            # The rows do not change until they are written, so tensorstore need not copy them.
            store = opening[piece.name].result()
            rows = piece.read()
            views.append(_refer_to_base(rows))
            write = store[piece.index].write(rows, can_reference_source_data_indefinitely=True)
            del rows
            self.on_progress()
            writes.append((write, piece.nbytes))
            written_bytes += piece.nbytes
        for write, _ in writes:
            write.result()

    def _commit(self) -> None:
        """Write the manifest, which commits the checkpoint. Raises OSError if a process has not written its part."""
        processes = range(self.count) if self.count > 1 else ()
        lost_processes = [i for i in processes if not self._note(i).exists()]
        if lost_processes:
            raise OSError(f"processes {lost_processes} did not write their part")
        self.before_commit()
        manifest = replace(self.manifest, arrays=self.folder)
        text = json.dumps(manifest.to_json())
        if self.target != self.path:
            # Object stores have no folders to create.
            (self.path / MANIFEST).mkdir(parents=True, exist_ok=True)
        (self.path / MANIFEST / MANIFEST_FILE).write_bytes(text.encode())
        if self.target != self.path:
            durable.rename(self.path, self.target)

    def _note(self, process: int) -> Path:
        """Return the path of the empty object with which a process signals that its part is written."""
        return self.path / self.folder / f"written.{process}"


def write(
    path: Path,
    arrays: Mapping[str, jax.Array | SplitArray],
    manifest: Manifest,
    before_commit: Callable[[], None] = lambda: None,
    on_progress: Callable[[], object] = lambda: None,
    *,
    window_bytes: int | None = None,
) -> Callable[[], None]:
    """Start to write a checkpoint. Collective.

    Args:
        path: folder of the step, in an object store or on a disk.
        arrays: arrays by path in the state.
        manifest: manifest, which does not name the array folder yet.
        before_commit: called by the primary process before it writes the manifest.
        on_progress: called by the thread that writes, whenever another piece was read.
        window_bytes: maximum number of bytes of host memory that the write needs, but at least one piece of an array.
            None copies all arrays now.

    Returns:
        A function that writes the arrays, commits, and raises any error. It may run in any thread, but every process
        must call it. Without a window the arrays may be donated now, with one only after this function.
    """
    # A separate folder for each save, so that an upload never touches the objects of a committed checkpoint.
    folder = distributed.broadcast_from_primary(f"{STATE}-{os.urandom(6).hex()}")
    stored = {name: x for name, x in arrays.items() if x.size}
    # Four pieces at a time, so that copies and writes overlap.
    chunk_bytes = _CHUNK_BYTES if window_bytes is None else min(_CHUNK_BYTES, max(window_bytes // 4, _MIN_CHUNK_BYTES))
    chunk_shapes = {name: _chunk(_unit_shape(x), x.dtype, chunk_bytes) for name, x in stored.items()}
    # A generator: with a window, rows are read while earlier ones are written.
    pieces: Iterable[_Piece] = (
        piece for name, x in stored.items() for piece in _split_into_pieces(name, x, chunk_shapes[name])
    )
    if window_bytes is None:
        pieces = [piece.copy() for piece in pieces]
    upload = _Upload(
        path=path if is_url(path) else path.with_name(f"{path.name}.writing"),
        target=path,
        folder=folder,
        specs={name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in stored.items()},
        chunk_shapes=chunk_shapes,
        pieces=pieces,
        window_bytes=window_bytes,
        manifest=manifest,
        before_commit=before_commit,
        on_progress=on_progress,
        process=jax.process_index(),
        count=jax.process_count(),
    )
    return upload.finish


def _unit_shape(x: jax.Array | SplitArray) -> tuple[int, ...]:
    """Return the shape that chunks divide evenly: of a shard, or of as many layers as divide each part of a stack."""
    if isinstance(x, SplitArray):
        num_rows = math.gcd(*(part.shape[0] for part in x.parts))
        return (num_rows, *x.parts[0].sharding.shard_shape(x.parts[0].shape)[1:])
    return x.sharding.shard_shape(x.shape)


@dataclass(frozen=True, eq=False)
class _Target:
    """An array to read, or a part of one.

    Attributes:
        name: path of the array in the state.
        array: spec of the whole array.
        first_row: index of the part's first row in the array.
        spec: spec of the part.
    """

    name: str
    array: jax.ShapeDtypeStruct | SplitSpec
    first_row: int
    spec: jax.ShapeDtypeStruct

    @property
    def nbytes(self) -> int:
        return self.spec.size * self.spec.dtype.itemsize


def _list_targets(specs: AbstractArrays) -> Iterator[_Target]:
    for name, x in specs.items():
        first_row = 0
        for part in x.parts if isinstance(x, SplitSpec) else (x,):
            if part.size:
                yield _Target(name, x, first_row, part)
            first_row += part.shape[0] if part.ndim else 0


def read(path: Path, specs: AbstractArrays) -> Arrays:
    """Read the arrays in the folder `path`, each into the sharding and memory kind of its spec in `specs`.

    This does not validate the data: a missing chunk reads as zeros, so the caller must verify the checksums.

    Raises:
        CheckpointCorruptError: objects are missing or invalid; the message names the array.
    """
    waiting = deque(_list_targets(specs))
    limit_bytes = read_bytes(max((target.nbytes for target in waiting), default=0))
    # Reads in progress, in the order they were started: the target, and its shards by index.
    started: deque[tuple[_Target, dict[str, ts.Future]]] = deque()
    parts: dict[str, list[jax.Array]] = {name: [] for name in specs}
    name = ""
    try:
        while started or waiting:
            # Read several arrays at a time, up to the limit on host memory.
            while waiting:
                started_bytes = sum(target.nbytes for target, _ in started)
                if started and started_bytes >= limit_bytes:
                    break
                target = waiting.popleft()
                name = target.name
                started.append((target, _start(path / name, target)))
            target, reads = started.popleft()
            name = target.name
            x = target.spec
            part = jax.make_array_from_callback(
                x.shape, x.sharding, lambda index, reads=reads: reads[str(index)].result()
            )
            parts[name].append(part)
    except (jax.errors.JaxRuntimeError, MemoryError):
        # Not the checkpoint's fault, for example out of memory.
        raise
    except Exception as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {name} ({summarize_error(error)})") from error
    arrays: Arrays = {}
    for name, x in specs.items():
        if isinstance(x, SplitSpec):
            arrays[name] = SplitArray(tuple(parts[name]) or tuple(empty(part) for part in x.parts))
        else:
            arrays[name] = parts[name][0] if x.size else empty(x)
    return arrays


def _start(path: Path, target: _Target) -> dict[str, ts.Future]:
    """Start reading this process's shards of an array or a part of one; returns the futures by index in the part.

    Raises:
        ValueError: the array at `path` has another shape or dtype.
    """
    x = target.array
    store = _open(path, x, []).result()
    has_shape = tuple(store.shape) == tuple(x.shape)
    if not has_shape or store.dtype.numpy_dtype != x.dtype:
        raise ValueError(f"is {store.dtype.name}{list(store.shape)}")
    if target.spec.ndim:
        store = store[target.first_row : target.first_row + target.spec.shape[0]].translate_to[0]
    # Indices are tuples of slices, which are not hashable before Python 3.12, so their string form is the key.
    index_by_device = target.spec.sharding.addressable_devices_indices_map(target.spec.shape)
    indices = {str(index): index for index in index_by_device.values()}
    return {key: store[index].read() for key, index in indices.items()}


def _open(
    path: Path, x: jax.ShapeDtypeStruct | SplitSpec, chunk_shape: Sequence[int], create: bool | None = None
) -> ts.Future[ts.TensorStore]:
    """Open the array at `path` and return a future of it.

    Args:
        path: path of the array.
        x: its shape and dtype.
        chunk_shape: shape of its chunks, to write; unused to read.
        create: None to read. To write, True in the process that creates the array, False in the others, which use the
            known metadata without a request.
    """
    import tensorstore as ts

    spec: dict[str, object] = {"driver": "zarr3", "kvstore": _kvstore(str(path))}
    if create is not None:
        spec["metadata"] = {
            "shape": x.shape,
            "data_type": x.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
            "codecs": [_BYTES],
        }
    return ts.open(ts.Spec(spec), open=True, create=bool(create), assume_metadata=create is False)


def _chunk(shape: tuple[int, ...], dtype: np.dtype, max_bytes: int) -> list[int]:
    """Return the chunk shape: `shape` is split into equal chunks of at most `max_bytes`, along leading axes first."""
    chunk = list(shape)
    for axis, size in enumerate(shape):
        chunk_bytes = math.prod(chunk) * dtype.itemsize
        min_chunks = math.ceil(chunk_bytes / max_bytes)
        # Use a divisor of the axis size, so that no chunk crosses the boundary between two shards.
        divisors = (n for n in range(1, size + 1) if size % n == 0)
        num_chunks = next(n for n in divisors if n >= min_chunks or n == size)
        chunk[axis] = size // num_chunks
    return chunk


def _kvstore(url: str) -> dict[str, str]:
    """Return the tensorstore kvstore spec of a folder. For S3, endpoints other than Amazon's must be set explicitly."""
    scheme, _, location = url.partition("://")
    if not location:
        # A checkpoint that was copied from an object store to a disk.
        return {"driver": "file", "path": f"{url}/"}
    bucket, _, path = location.partition("/")
    driver = "gcs" if scheme == "gs" else scheme
    spec = {"driver": driver, "bucket": bucket, "path": f"{path}/"}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if scheme == "s3" and endpoint:
        # The driver would ask Amazon for the region, which does not work for other endpoints.
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        spec["endpoint"] = endpoint
        spec["aws_region"] = region or "us-east-1"
    return spec
