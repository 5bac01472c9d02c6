"""Writes arrays to an object store and reads them back, with tensorstore: one object per chunk of an array, in zarr 3.

Orbax 0.12 supports gs:// but not s3:// (its paths must be absolute, or start with gs://), and for stores that it does
not recognize it commits with a rename. Here both stores use the same protocol, which only requires that an object
appears as a whole: every process writes the chunks that it holds, and then the primary writes the manifest, which names
their folder.

Endpoints and credentials come from the environment: AWS_ENDPOINT_URL, AWS_REGION, AWS_PROFILE, ... and
GOOGLE_APPLICATION_CREDENTIALS, TENSORSTORE_GCS_HTTP_URL.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from plimsoll.framework.checkpoint.storage import AbstractArrays, copy_to_numpy, empty, read_bytes
from plimsoll.framework.processes import distributed

if TYPE_CHECKING:
    import tensorstore as ts

# Maximum size of an object; larger arrays are split into several.
_CHUNK_BYTES = 64 << 20
# A part of an array: a slice for each dimension.
Index = tuple[slice, ...]
_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


@dataclass(frozen=True)
class _HostLeaf:
    """The part of one array that this process writes.

    Attributes:
        spec: spec of the whole array.
        shards: (index, data in host memory) of each shard.
    """

    spec: jax.ShapeDtypeStruct
    shards: list[tuple[Index, np.ndarray]]


@dataclass(frozen=True)
class _Upload:
    """The upload of one process for one save.

    Attributes:
        path: folder of the step.
        folder: name of the array folder in `path`.
        leaves: this process's part of all non-empty arrays.
        manifest: manifest that does not name the array folder yet.
        before_commit: called by the primary process before it writes the manifest.
        process: index of this process.
        count: number of processes.
    """

    path: Path
    folder: str
    leaves: Mapping[str, _HostLeaf]
    manifest: Manifest
    before_commit: Callable[[], None]
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
        if self.process and Manifest.read(self.path).arrays != self.folder:
            raise OSError("the primary process did not commit it")

    def _write_arrays(self) -> None:
        # Open all arrays before waiting for the first one, and likewise start all writes: each takes a network request.
        stores = {}
        for name, leaf in self.leaves.items():
            array_path = self.path / self.folder / name
            stores[name] = _open(array_path, leaf.spec, create=self.process == 0)
        writes = []
        for name, leaf in self.leaves.items():
            for index, data in leaf.shards:
                store = stores[name].result()
                # These arrays never change again, so tensorstore need not copy them.
                write = store[index].write(data, can_reference_source_data_indefinitely=True)
                writes.append(write)
        for future in writes:
            future.result()
        if self.count > 1:
            self._note(self.process).write_text("")

    def _commit(self) -> None:
        """Write the manifest, which commits the checkpoint. Raises OSError if a process has not written its part."""
        processes = range(self.count) if self.count > 1 else ()
        lost_processes = [i for i in processes if not self._note(i).exists()]
        if lost_processes:
            raise OSError(f"processes {lost_processes} did not write their part")
        self.before_commit()
        manifest = replace(self.manifest, arrays=self.folder)
        text = json.dumps(manifest.to_json())
        (self.path / MANIFEST / MANIFEST_FILE).write_bytes(text.encode())

    def _note(self, process: int) -> Path:
        """Return the path of the empty object with which a process signals that its part is written."""
        return self.path / self.folder / f"written.{process}"


def write(
    path: Path, arrays: Mapping[str, jax.Array], manifest: Manifest, before_commit: Callable[[], None]
) -> Callable[[], None]:
    """Copy the arrays to host memory; they may be donated when this returns. Collective.

    Returns:
        A function that uploads the arrays, commits, and raises any error. It may run in any thread, but every process
        must call it.
    """
    # A separate folder for each save, so that an upload never touches the objects of a committed checkpoint.
    folder = distributed.broadcast_from_primary(f"{STATE}-{os.urandom(6).hex()}")
    leaves: dict[str, _HostLeaf] = {}
    for name, x in arrays.items():
        if x.size:
            spec = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            leaves[name] = _HostLeaf(spec, _copy_shards(x))
    upload = _Upload(
        path=path,
        folder=folder,
        leaves=leaves,
        manifest=manifest,
        before_commit=before_commit,
        process=jax.process_index(),
        count=jax.process_count(),
    )
    return upload.finish


def read(path: Path, specs: AbstractArrays) -> dict[str, jax.Array]:
    """Read the arrays in the folder `path`, each into the sharding and memory kind of its spec in `specs`.

    This does not validate the data: a missing chunk reads as zeros, so the caller must verify the checksums.

    Raises:
        CheckpointCorruptError: objects are missing or invalid; the message names the array.
    """
    sizes: dict[str, int] = {}
    for name, x in specs.items():
        sizes[name] = x.size * x.dtype.itemsize
    limit_bytes = read_bytes(max(sizes.values(), default=0))
    arrays: dict[str, jax.Array] = {}
    # Reads in progress, by array and then by index, in the order they were started.
    started: dict[str, dict[str, ts.Future]] = {}
    waiting = [name for name, x in specs.items() if x.size]
    name = ""
    try:
        while started or waiting:
            # Read several arrays at a time, up to the limit on host memory.
            while waiting:
                started_bytes = sum(sizes[key] for key in started)
                if started and started_bytes >= limit_bytes:
                    break
                name = waiting.pop(0)
                started[name] = _start(path / name, specs[name])
            name = next(iter(started))
            x = specs[name]
            reads = started.pop(name)
            arrays[name] = jax.make_array_from_callback(
                x.shape, x.sharding, lambda index, reads=reads: reads[str(index)].result()
            )
    except (jax.errors.JaxRuntimeError, MemoryError):
        # Not the checkpoint's fault, for example out of memory.
        raise
    except Exception as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {name} ({summarize_error(error)})") from error
    for name, x in specs.items():
        if not x.size:
            arrays[name] = empty(x)
    # In the order of the specs, not of the reads.
    return {name: arrays[name] for name in specs}


def _copy_shards(x: jax.Array) -> list[tuple[Index, np.ndarray]]:
    """Return this process's shards of an array as (index, host data); each shard comes from only one process."""
    shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
    device = next(iter(x.sharding.device_set))
    if device.platform != "cpu" and x.sharding.memory_kind == "device":
        return [(shard.index, np.asarray(shard.data)) for shard in shards]
    # For arrays in host memory, np.asarray returns a view of the buffer, which then cannot be donated.
    return [(shard.index, copy_to_numpy(shard.data)) for shard in shards]


def _start(path: Path, x: jax.ShapeDtypeStruct) -> dict[str, ts.Future]:
    """Start reading this process's part of an array; returns the futures by index.

    Raises:
        ValueError: the array at `path` has another shape or dtype.
    """
    # Indices are tuples of slices, which are not hashable before Python 3.12, so their string form is the key.
    index_by_device = x.sharding.addressable_devices_indices_map(x.shape)
    indices = {str(index): index for index in index_by_device.values()}
    store = _open(path, x).result()
    has_shape = tuple(store.shape) == tuple(x.shape)
    if not has_shape or store.dtype.numpy_dtype != x.dtype:
        raise ValueError(f"is {store.dtype.name}{list(store.shape)}")
    return {key: store[index].read() for key, index in indices.items()}


def _open(path: Path, x: jax.ShapeDtypeStruct, create: bool | None = None) -> ts.Future[ts.TensorStore]:
    """Open the array at `path` and return a future of it.

    Args:
        path: path of the array.
        x: shape, dtype and sharding.
        create: None to read. To write, True in the process that creates the array, False in the others, which use the
            known metadata without a request.
    """
    import tensorstore as ts

    spec: dict[str, object] = {"driver": "zarr3", "kvstore": _kvstore(str(path))}
    if create is not None:
        shard_shape = x.sharding.shard_shape(x.shape)
        chunk_shape = _chunk(shard_shape, x.dtype)
        spec["metadata"] = {
            "shape": x.shape,
            "data_type": x.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
            "codecs": [_BYTES],
        }
    return ts.open(ts.Spec(spec), open=True, create=bool(create), assume_metadata=create is False)


def _chunk(shape: tuple[int, ...], dtype: np.dtype) -> list[int]:
    """Return the chunk shape: a shard is split into equal chunks of at most _CHUNK_BYTES, along leading axes first."""
    chunk = list(shape)
    for axis, size in enumerate(shape):
        chunk_bytes = math.prod(chunk) * dtype.itemsize
        min_chunks = math.ceil(chunk_bytes / _CHUNK_BYTES)
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
