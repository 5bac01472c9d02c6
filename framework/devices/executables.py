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
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import logging
from jax.experimental import serialize_executable

from plimsoll.framework.devices import compile_times
from plimsoll.framework.terminal import interrupts

# JAX's default of one second would exclude most programs of a small model.
_MIN_COMPILE_SECONDS = 0.05
# Programs of this process, by the arguments of `call`: function, static arguments, tree, shapes, dtypes and shardings.
_programs: dict[Any, Any] = {}


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


def compile_or_load(lowered: Any, options: Any = None, devices: list[Any] | None = None, what: str = "") -> Any:
    """Return `lowered.compile()`, a jax.stages.Compiled, and load it from disk if it is already there.

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
        serialized = serialize_executable.serialize(result)
        _save_program(path, serialized[0])
    # A full or read-only disk must not end the run.
    except OSError as error:
        logging.warning("%s was not stored: %s", path, error.strerror or error)
    return result


def _key(lowered: Any, options: Any) -> str:
    """Return a hash of everything that a compiled program depends on, as hexadecimal digits."""
    # Include the host: machine code from another host may use instructions that this one does not have.
    facts = [jax.__version__, socket.gethostname(), os.environ.get("XLA_FLAGS"), options]
    facts += [jax.process_count(), jax.process_index()]
    # The lowered text does not distinguish a random key from an array of its words, and omits the argument names.
    facts += [str(lowered.in_avals), str(lowered.in_tree), lowered.as_text()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _save_program(path: Path, program: bytes) -> None:
    """Write a program under a temporary name and rename it, so that no process reads a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with interrupts.remove_on_signal(temporary), os.fdopen(descriptor, "wb") as file:
            file.write(program)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def call(jitted: Any, arrays: Any, *static: Any) -> Any:
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
        lowered = jitted.lower(arrays, *static)
        _programs[key] = compile_or_load(lowered, devices=_find_devices(leaves))
    return _programs[key](arrays)


def _find_devices(leaves: list[Any]) -> list[Any]:
    """Return the devices of some arrays, sorted by id; this process's first device if all are numpy arrays."""
    device_sets = [x.sharding.device_set for x in leaves if isinstance(x, jax.Array)]
    if not device_sets:
        return jax.local_devices()[:1]
    return sorted(set.union(*device_sets), key=lambda device: device.id)


class HostBytes(NamedTuple):
    """Bytes in host memory, per device, of a program's arguments, its results, and its donated arguments."""

    arguments: int = 0
    results: int = 0
    donated: int = 0

    @staticmethod
    def in_place(size: int) -> HostBytes:
        """Return the bytes of a program that takes `size` donated bytes in host memory and returns them."""
        return HostBytes(arguments=size, results=size, donated=size)


def peak_bytes(stats: Any, platform: str, offloaded: HostBytes) -> int:
    """Return the peak device memory in bytes, from a program's `memory_analysis()`.

    On TPU, it is XLA's own peak, minus the host memory that XLA includes and also reports separately. A program from
    jax's compilation cache may have lost the peak; then the sum is used. (In programs of megabytes, the peak includes
    on-chip memory, too, 128 MiB at most. If the buffers are known, their sum is more accurate.) On GPU and CPU, it is
    the sum of all buffers, which is not an overestimate there, because all temporaries are one allocation.
    """
    if platform == "tpu" and stats.peak_memory_in_bytes:
        # Results that are donated arguments are counted once, among the arguments.
        host_results = stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
        return stats.peak_memory_in_bytes - stats.host_argument_size_in_bytes - host_results
    argument_bytes, result_bytes, aliased_bytes = split_device_bytes(stats, platform, offloaded)
    return argument_bytes + result_bytes - aliased_bytes + stats.temp_size_in_bytes


def split_device_bytes(stats: Any, platform: str, offloaded: HostBytes) -> tuple[int, int, int]:
    """Return the bytes of (arguments, results, donated arguments) in device memory, from `memory_analysis()`.

    The compiler's own figures are too large. On CPU they include everything in host memory, and on GPU they include
    the host arguments that the compiler does not recognize as such.
    """
    argument_bytes = stats.argument_size_in_bytes
    result_bytes = stats.output_size_in_bytes
    aliased_bytes = stats.alias_size_in_bytes
    if platform == "cpu":
        return (
            argument_bytes - offloaded.arguments,
            result_bytes - offloaded.results,
            aliased_bytes - offloaded.donated,
        )
    lost_bytes = 0
    if platform == "gpu":
        lost_bytes = offloaded.arguments - stats.host_argument_size_in_bytes
    return argument_bytes - lost_bytes, result_bytes, aliased_bytes
