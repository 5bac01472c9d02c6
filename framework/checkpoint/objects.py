"""Arrays to an object store and back, by tensorstore: one object per piece of an array, as zarr 3.

Orbax 0.12 takes gs:// but not s3:// (its paths must be absolute, or begin with gs://), and commits by a rename wherever
it does not know the store. Here both stores go by the same way, which needs nothing but "an object appears as a whole":
every process writes the pieces that it holds, and then the primary the manifest, which names their folder.

Endpoints and credentials are the environment's: AWS_ENDPOINT_URL, AWS_REGION, AWS_PROFILE, ... and
GOOGLE_APPLICATION_CREDENTIALS, TENSORSTORE_GCS_HTTP_URL.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from framework.checkpoint.directory import MANIFEST, MANIFEST_FILE, STATE, CheckpointCorruptError, Manifest, one_line
from framework.checkpoint.storage import empty, read_bytes
from framework.processes import distributed

_PIECE_BYTES = 64 << 20  # of an array in one object, at most
_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


def write(
    path: Any, arrays: Mapping[str, jax.Array], manifest: Manifest, before_commit: Callable[[], None]
) -> Callable[[], None]:
    """Copies the arrays to host memory; they may be donated when this returns. Collective. Returns a function that
    uploads them, commits, and raises what went wrong, in any thread, but in every process."""
    folder = distributed.from_primary(f"{STATE}-{os.urandom(6).hex()}")
    held = {name: (_like(x), _pieces(x)) for name, x in arrays.items() if x.size}
    process, count = jax.process_index(), jax.process_count()

    def upload() -> None:
        stores = {name: _open(path / folder / name, like, create=process == 0) for name, (like, _) in held.items()}
        writes = [
            stores[name].result()[index].write(data, can_reference_source_data_indefinitely=True)
            for name, (_, pieces) in held.items()
            for index, data in pieces
        ]
        for future in writes:
            future.result()
        if count > 1:
            (path / folder / f"written.{process}").write_text("")

    def commit() -> None:
        if lost := [i for i in range(count) if count > 1 and not (path / folder / f"written.{i}").exists()]:
            raise OSError(f"processes {lost} did not write their part")
        before_commit()
        (path / MANIFEST / MANIFEST_FILE).write_bytes(json.dumps(replace(manifest, arrays=folder).to_json()).encode())

    def written() -> None:
        # Every process comes to both barriers, so that none waits for one that failed.
        with contextlib.ExitStack() as barriers:
            barriers.callback(distributed.barrier, f"{folder}-committed")
            with contextlib.ExitStack() as barrier:
                barrier.callback(distributed.barrier, f"{folder}-written")
                upload()
            if process == 0:
                commit()
        if process and Manifest.read(path).arrays != folder:
            raise OSError("the primary process did not commit it")

    return written


def read(path: Any, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The arrays in the folder `path`, each in the sharding and memory of its ShapeDtypeStruct. Raises
    CheckpointCorruptError: objects are missing or make no sense; names the array. That the bytes are right is for
    checksums to tell: a piece that is missing reads as zeros."""
    sizes = {name: x.size * x.dtype.itemsize for name, x in wanted.items()}
    limit, found, name = read_bytes(max(sizes.values(), default=0)), dict[str, jax.Array](), ""
    started: dict[str, dict[str, Any]] = {}
    waiting = [name for name, x in wanted.items() if x.size]
    try:
        while started or waiting:
            while waiting and (not started or sum(sizes[name] for name in started) < limit):
                name = waiting.pop(0)
                started[name] = _start(path / name, wanted[name])
            name, x = next((name, wanted[name]) for name in started)
            pieces = started.pop(name)
            found[name] = jax.make_array_from_callback(x.shape, x.sharding, lambda i, p=pieces: p[str(i)].result())
    except (jax.errors.JaxRuntimeError, MemoryError):
        raise  # out of memory, say: no fault of the checkpoint
    except Exception as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {name} ({one_line(error)})") from error
    return {name: found[name] if x.size else empty(x) for name, x in wanted.items()}


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _pieces(x: jax.Array) -> list[tuple[Any, np.ndarray]]:
    """This process's part of an array: (index, data on the host), each piece of it in one process only."""
    shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
    if next(iter(x.sharding.device_set)).platform != "cpu" and x.sharding.memory_kind == "device":
        return [(shard.index, np.asarray(shard.data)) for shard in shards]
    # Of host memory that would be a view of the buffer, which then is not donated: see checkpoint_storage.
    copies = ((shard.index, jax.device_put(shard.data, shard.data.sharding, may_alias=False)) for shard in shards)
    return [(index, np.array(data, copy=True)) for index, data in copies]


def _start(path: Any, x: Any) -> dict[str, Any]:
    """Reads of this process's part of an array, by index."""
    indices = {str(index): index for index in x.sharding.addressable_devices_indices_map(x.shape).values()}
    store = _open(path, x).result()
    if tuple(store.shape) != tuple(x.shape) or store.dtype.numpy_dtype != x.dtype:
        raise ValueError(f"is {store.dtype.name}{list(store.shape)}")
    return {key: store[index].read() for key, index in indices.items()}


def _open(path: Any, x: Any, create: bool | None = None) -> Any:
    """A future of the array at `path`. To write: one process creates it, the others need not look. None: to read."""
    import tensorstore as ts

    spec: dict[str, Any] = {"driver": "zarr3", "kvstore": _kvstore(str(path))}
    if create is not None:
        grid = {"name": "regular", "configuration": {"chunk_shape": _chunk(x.sharding.shard_shape(x.shape), x.dtype)}}
        spec["metadata"] = {"shape": x.shape, "data_type": x.dtype.name, "chunk_grid": grid, "codecs": [_BYTES]}
    return ts.open(ts.Spec(spec), open=True, create=bool(create), assume_metadata=create is False)


def _chunk(shape: tuple[int, ...], dtype: Any) -> list[int]:
    """How a device's part is cut: into equal pieces of at most _PIECE_BYTES, the first axes first."""
    chunk = list(shape)
    for axis, size in enumerate(shape):
        wanted = math.ceil(math.prod(chunk) * dtype.itemsize / _PIECE_BYTES)
        chunk[axis] = size // next(n for n in range(1, size + 1) if size % n == 0 and (n >= wanted or n == size))
    return chunk


def _kvstore(url: str) -> dict[str, Any]:
    """tensorstore's name of a folder. Its S3 driver wants to be told of another endpoint than Amazon's."""
    scheme, _, rest = url.partition("://")
    if not rest:
        return {"driver": "file", "path": f"{url}/"}  # a checkpoint that was copied to a disk
    bucket, _, path = rest.partition("/")
    spec = {"driver": {"gs": "gcs"}.get(scheme, scheme), "bucket": bucket, "path": f"{path}/"}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if scheme == "s3" and endpoint:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        spec |= {"endpoint": endpoint, "aws_region": region}
    return spec
