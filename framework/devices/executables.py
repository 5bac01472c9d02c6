"""Stores compiled programs on disk for processes that JAX's compilation cache does not serve, for a quick restart.

In JAX, the first process of a run writes the compilation cache for all processes. On CPU, the others never find
anything in it, because the key of a program differs between processes, so each restart would compile again. This module
gives those processes their own cache, keyed by the lowered text. On any other platform, and in the first process, it
leaves everything to JAX.
"""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import jax
from absl import logging
from jax.experimental import serialize_executable

from plimsoll.framework.devices import compile_times
from plimsoll.framework.devices.accelerators import Device
from plimsoll.framework.layout import PyTree
from plimsoll.framework.terminal import interrupts

# JAX's default of one second would exclude most programs of a small model.
_MIN_COMPILE_SECONDS = 0.05
# Programs of this process, by the arguments of `call`: function, static arguments, tree, shapes, dtypes and shardings.
_programs: dict[Hashable, jax.stages.Compiled] = {}


def use_compilation_cache(directory: str | None) -> None:
    """Store compiled programs on disk, so that the next start does not compile again."""
    if directory is None:
        return
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
    # -1 means no limit: small programs matter as much as large ones.
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def folder() -> Path | None:
    """Return the folder in which this process stores programs; None if JAX stores them, or if there is no cache."""
    cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if not cache or not jax.process_index() or jax.default_backend() != "cpu":
        return None
    return Path(cache) / "processes"


def compile_or_load(
    lowered: jax.stages.Lowered, options: object = None, devices: Sequence[Device] | None = None, what: str = ""
) -> jax.stages.Compiled:
    """Return `lowered.compile()`, and load it from disk if it is already there.

    The files are machine code, written by this user on this host, and are trusted like JAX's own cache.

    Args:
        lowered: the lowered program.
        options: compiler options with which it was jitted.
        devices: devices on which it runs; None for all.
        what: name of the program for the status message, such as "the training step"; "" for no message.
    """
    cache = folder()
    if cache is None:
        with compile_times.compiling(what, lowered) if what else nullcontext():
            return lowered.compile()
    path = cache / f"{_key(lowered, options)}.bin"
    try:
        return serialize_executable.deserialize_and_load(
            path.read_bytes(), lowered.in_tree, lowered.out_tree, execution_devices=devices
        )
    except FileNotFoundError:
        pass
    # The file is truncated or from another build, so compile the program again.
    except Exception as error:
        logging.warning("%s cannot be used: %s", path, error)
    result = lowered.compile()
    try:
        program, *_ = serialize_executable.serialize(result)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Write under a temporary name and rename the file, so that no process reads a partial one.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with interrupts.remove_on_signal(temporary), os.fdopen(descriptor, "wb") as file:
                file.write(program)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    # A full or read-only disk must not end the run.
    except OSError as error:
        logging.warning("%s was not stored: %s", path, error.strerror or error)
    return result


def _key(lowered: jax.stages.Lowered, options: object) -> str:
    """Return a hash of everything that a compiled program depends on, as hexadecimal digits."""
    # Include the host: machine code from another host may use instructions that this one does not have.
    facts = [jax.__version__, socket.gethostname(), os.environ.get("XLA_FLAGS"), options]
    facts += [jax.process_count(), jax.process_index()]
    # The lowered text does not distinguish a random key from an array of its words, and omits the argument names.
    facts += [str(lowered.in_avals), str(lowered.in_tree), lowered.as_text()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def call(jitted: jax.stages.Wrapped, arrays: PyTree, *static: Hashable) -> PyTree:
    """Return `jitted(arrays, *static)`, computed by a program from `compile_or_load`.

    Args:
        jitted: a jitted function.
        arrays: tree of arrays, its first argument.
        *static: its static arguments.
    """
    if folder() is None:
        return jitted(arrays, *static)
    leaves, tree = jax.tree.flatten(arrays)
    avals = tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)
    key = (jitted, static, tree, avals)
    if key not in _programs:
        device_sets = [x.sharding.device_set for x in leaves if isinstance(x, jax.Array)]
        # If all are numpy arrays, the program runs on this process's first device.
        devices = jax.local_devices()[:1]
        if device_sets:
            devices = sorted(set.union(*device_sets), key=lambda device: device.id)
        _programs[key] = compile_or_load(jitted.lower(arrays, *static), devices=devices)
    return _programs[key](arrays)


@dataclass(frozen=True)
class HostBytes:
    """Bytes in host memory, per device, of a program's arguments, its results, and its donated arguments."""

    arguments: int = 0
    results: int = 0
    donated: int = 0

    @staticmethod
    def in_place(size: int) -> HostBytes:
        """Return the bytes of a program that takes `size` donated bytes in host memory and returns them."""
        return HostBytes(arguments=size, results=size, donated=size)


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes in device memory, per device, of a program's arguments, its results, and its donated arguments."""

    arguments: int
    results: int
    donated: int


class MemoryStats(Protocol):
    """A program's `memory_analysis()`: sizes in bytes per device."""

    peak_memory_in_bytes: int
    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    host_argument_size_in_bytes: int
    host_output_size_in_bytes: int
    host_alias_size_in_bytes: int


def peak_bytes(stats: MemoryStats | None, platform: str, offloaded: HostBytes) -> int:
    """Return the peak device memory in bytes, from a program's `memory_analysis()`.

    On TPU, it is XLA's own peak, minus the host memory that XLA includes and also reports separately. A program from
    jax's compilation cache may have lost the peak; then the sum is used. (In programs of megabytes, the peak includes
    on-chip memory, too, 128 MiB at most. If the buffers are known, their sum is more accurate.) On GPU and CPU, it is
    the sum of all buffers, which is not an overestimate there, because all temporaries are one allocation.
    """
    # JAX has an analysis for every program that it compiles itself.
    assert stats is not None
    if platform == "tpu" and stats.peak_memory_in_bytes:
        # Results that are donated arguments are counted once, among the arguments.
        host_results = stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
        return stats.peak_memory_in_bytes - stats.host_argument_size_in_bytes - host_results
    on_device = split_device_bytes(stats, platform, offloaded)
    return on_device.arguments + on_device.results - on_device.donated + stats.temp_size_in_bytes


def split_device_bytes(stats: MemoryStats, platform: str, offloaded: HostBytes) -> DeviceBytes:
    """Return the bytes in device memory, from `memory_analysis()`.

    The compiler's own figures are too large. On CPU they include everything in host memory, and on GPU they include
    the host arguments that the compiler does not recognize as such.
    """
    arguments = stats.argument_size_in_bytes
    results = stats.output_size_in_bytes
    donated = stats.alias_size_in_bytes
    if platform == "cpu":
        arguments -= offloaded.arguments
        results -= offloaded.results
        donated -= offloaded.donated
    elif platform == "gpu":
        arguments -= offloaded.arguments - stats.host_argument_size_in_bytes
    return DeviceBytes(arguments, results, donated)
