"""Compiled programs on disk for the processes that JAX's compilation cache leaves out, so that a restart is quick.

JAX lets the first process of a run write its cache, for all. On CPU the others never find anything in it, as the key of
a program differs by process: each restart would compile again. Here those processes keep their own, by the text of what
was lowered; on any other platform, or in the first process, nothing differs from JAX.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

from framework.terminal import interrupts

_log = logging.getLogger(__name__)
_programs: dict[Any, Any] = {}


def use_compilation_cache(directory: str | None) -> None:
    """Keeps compiled programs on disk, so that the next start does not compile again."""
    if directory is None:
        return
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def folder() -> Path | None:
    """Where this process keeps programs; None: JAX does, or nobody."""
    cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if not cache or not jax.process_index() or jax.default_backend() != "cpu":
        return None
    return Path(cache) / "processes"


def compiled(lowered: Any, options: Any = None, devices: list[Any] | None = None) -> Any:
    """`lowered.compile()`, a jax.stages.Compiled, from the disk if it was there before.

    What is read was written by this user on this host, with the trust that JAX's own cache of machine code has.

    Args:
        options: of the compiler, with which it was jitted.
        devices: where it runs, if not on all.
    """
    if (kept := folder()) is None:
        return lowered.compile()
    facts = [jax.__version__, socket.gethostname(), os.environ.get("XLA_FLAGS"), options]
    # The text alone does not tell a random key from its words, nor which names the arguments have.
    facts += [jax.process_count(), jax.process_index(), str(lowered.in_avals), str(lowered.in_tree), lowered.as_text()]
    path = kept / f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.bin"
    try:
        read = path.read_bytes(), lowered.in_tree, lowered.out_tree
        return serialize_executable.deserialize_and_load(*read, execution_devices=devices)
    except FileNotFoundError:
        pass
    except Exception as error:  # cut short, or of another build: it is made again
        _log.warning("%s cannot be used: %s", path, error)
    result = lowered.compile()
    try:
        _keep(path, serialize_executable.serialize(result)[0])
    except OSError as error:  # a disk that is full or read-only costs the cache, not the run
        _log.warning("%s is not kept: %s", path, error.strerror or error)
    return result


def _keep(path: Path, program: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with interrupts.removed_at_end(temporary), os.fdopen(descriptor, "wb") as file:
            file.write(program)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def call(jitted: Any, arrays: Any, *static: Any) -> Any:
    """`jitted(arrays, *static)`, of a tree of arrays and of static arguments, by a program that is `compiled`."""
    if folder() is None:
        return jitted(arrays, *static)
    leaves, tree = jax.tree.flatten(arrays)
    key = jitted, static, tree, tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)
    if key not in _programs:
        sets = [x.sharding.device_set for x in leaves if isinstance(x, jax.Array)]
        devices = sorted(set.union(*sets), key=lambda device: device.id) if sets else jax.local_devices()[:1]
        _programs[key] = compiled(jitted.lower(arrays, *static), devices=devices)
    return _programs[key](arrays)


class HostBytes(NamedTuple):
    """Of a program's arguments, its results, and the arguments that are donated: what is in host memory, per device."""

    arguments: int = 0
    results: int = 0
    donated: int = 0

    @staticmethod
    def in_place(size: int) -> HostBytes:
        """Of a program that takes so much, donated, and gives it back."""
        return HostBytes(size, size, size)


def peak_bytes(stats: Any, platform: str, hosted: HostBytes) -> int:
    """Device memory at the worst instant, from a program's `memory_analysis()`.

    TPU: XLA's own peak counts what is in host memory, and knows it apart; a program from jax's compilation cache may
    have lost it. (In programs of megabytes it counts on-chip memory too, 128 MiB at most: where the buffers are
    known, their sum is better.) GPU and CPU: the sum, no overestimate there, as all temporaries are one allocation.
    """
    if platform == "tpu" and stats.peak_memory_in_bytes:
        results = stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
        return stats.peak_memory_in_bytes - stats.host_argument_size_in_bytes - results
    argument, output, alias = on_device(stats, platform, hosted)
    return argument + output - alias + stats.temp_size_in_bytes


def on_device(stats: Any, platform: str, hosted: HostBytes) -> tuple[int, int, int]:
    """(arguments, results, aliased) without what is in host memory: on CPU the compiler counts all of that among the
    device's, on GPU arguments that it lost sight of."""
    argument, output, alias = stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.alias_size_in_bytes
    if platform == "cpu":
        return argument - hosted.arguments, output - hosted.results, alias - hosted.donated
    lost = hosted.arguments - stats.host_argument_size_in_bytes if platform == "gpu" else 0
    return argument - lost, output, alias
