"""Compiled programs on disk for the processes that JAX's compilation cache leaves out, so that a restart is quick.

JAX lets the first process of a run write its cache, for all. On CPU the others never find anything in it, as the key of
a program differs by process: each restart would compile again. Here those processes keep their own, by the text of what
was lowered; on any other platform, or in the first process, nothing differs from JAX.
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

from framework.devices import compile_times
from framework.terminal import interrupts

# JAX's own limit of a second would leave out most programs of a small model.
_MIN_COMPILE_SECONDS = 0.05
# Of this process, by what `call` was given: the function, its static arguments, shapes and shardings.
_programs: dict[Any, Any] = {}


def use_compilation_cache(directory: str | None) -> None:
    """Keeps compiled programs on disk, so that the next start does not compile again."""
    if directory is None:
        return
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
    # -1 stands for no limit: small programs count as much as large ones.
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def folder() -> Path | None:
    """The folder in which this process keeps programs; None if JAX keeps them, or nobody does."""
    cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if not cache or not jax.process_index() or jax.default_backend() != "cpu":
        return None
    return Path(cache) / "processes"


def compiled(
    lowered: Any,
    options: Any = None,
    devices: list[Any] | None = None,
    what: str = "",
) -> Any:
    """`lowered.compile()`, a jax.stages.Compiled, from the disk if it was there before.

    What is read was written by this user on this host, with the trust that JAX's own cache of machine code has.

    Args:
        options: of the compiler, with which it was jitted.
        devices: where it runs, if not on all.
        what: what a person is told is being compiled, such as "the training step"; "" tells nobody.
    """
    cache = folder()
    if cache is None:
        with compile_times.compiling(what, lowered) if what else nullcontext():
            return lowered.compile()
    path = cache / f"{_key(lowered, options)}.bin"
    try:
        return serialize_executable.deserialize_and_load(
            path.read_bytes(),
            lowered.in_tree,
            lowered.out_tree,
            execution_devices=devices,
        )
    except FileNotFoundError:
        pass
    # The file was cut short, or is of another build: the program is compiled again.
    except Exception as error:
        logging.warning("%s cannot be used: %s", path, error)
    result = lowered.compile()
    try:
        serialized = serialize_executable.serialize(result)
        _keep(path, serialized[0])
    # A disk that is full or read-only costs the cache, not the run.
    except OSError as error:
        logging.warning("%s is not kept: %s", path, error.strerror or error)
    return result


def _key(lowered: Any, options: Any) -> str:
    """The hash of all that a compiled program depends on, as hexadecimal digits."""
    # Machine code of another host may use instructions that this one has not, so the host counts.
    facts = [jax.__version__, socket.gethostname(), os.environ.get("XLA_FLAGS"), options]
    facts += [jax.process_count(), jax.process_index()]
    # The text alone does not tell a random key from its words, nor which names the arguments have.
    facts += [str(lowered.in_avals), str(lowered.in_tree), lowered.as_text()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _keep(path: Path, program: bytes) -> None:
    """Writes a program under a temporary name and renames it, so that no process reads half a file."""
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
    avals = tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)
    key = (jitted, static, tree, avals)
    if key not in _programs:
        lowered = jitted.lower(arrays, *static)
        _programs[key] = compiled(lowered, devices=_devices_of(leaves))
    return _programs[key](arrays)


def _devices_of(leaves: list[Any]) -> list[Any]:
    """The devices on which arrays lie, by id; where there are only numpy arrays, the first of this process."""
    device_sets = [x.sharding.device_set for x in leaves if isinstance(x, jax.Array)]
    if not device_sets:
        return jax.local_devices()[:1]
    return sorted(set.union(*device_sets), key=lambda device: device.id)


class HostBytes(NamedTuple):
    """The bytes in host memory, per device, of a program's arguments, its results, and its donated arguments."""

    arguments: int = 0
    results: int = 0
    donated: int = 0

    @staticmethod
    def in_place(size: int) -> HostBytes:
        """The bytes of a program that takes `size` bytes in host memory, donated, and returns them."""
        return HostBytes(arguments=size, results=size, donated=size)


def peak_bytes(stats: Any, platform: str, hosted: HostBytes) -> int:
    """Device memory at the worst instant, from a program's `memory_analysis()`.

    TPU: XLA's own peak counts what is in host memory, and knows it apart; a program from jax's compilation cache may
    have lost it. (In programs of megabytes it counts on-chip memory too, 128 MiB at most: where the buffers are
    known, their sum is better.) GPU and CPU: the sum, no overestimate there, as all temporaries are one allocation.
    """
    if platform == "tpu" and stats.peak_memory_in_bytes:
        # Results that are donated arguments are counted once, among the arguments.
        host_results = stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
        return stats.peak_memory_in_bytes - stats.host_argument_size_in_bytes - host_results
    argument_bytes, result_bytes, aliased_bytes = on_device(stats, platform, hosted)
    return argument_bytes + result_bytes - aliased_bytes + stats.temp_size_in_bytes


def on_device(
    stats: Any,
    platform: str,
    hosted: HostBytes,
) -> tuple[int, int, int]:
    """Bytes of (arguments, results, donated arguments) in device memory, from a program's `memory_analysis()`.

    The compiler's own figures are too large: on CPU it counts all of what is in host memory among the device's, on GPU
    arguments that it lost sight of.
    """
    argument_bytes = stats.argument_size_in_bytes
    result_bytes = stats.output_size_in_bytes
    aliased_bytes = stats.alias_size_in_bytes
    if platform == "cpu":
        return (
            argument_bytes - hosted.arguments,
            result_bytes - hosted.results,
            aliased_bytes - hosted.donated,
        )
    lost_bytes = 0
    if platform == "gpu":
        lost_bytes = hosted.arguments - stats.host_argument_size_in_bytes
    return argument_bytes - lost_bytes, result_bytes, aliased_bytes
