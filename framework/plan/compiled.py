"""Compiling a program for a target, and what the compiler says it needs. May import: framework.plan.buffers, JAX."""

from __future__ import annotations

import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from framework.plan import buffers

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program, bytes per device.

    Attributes:
      argument, output, alias, temp: device memory, as `memory_analysis()` has it; an output in an argument's place is
        in alias too. Zero when the program was refused.
      host_temp: temporaries in host memory, where the compiler knows them (TPU).
      peak: alive at the worst instant. TPU: what XLA's liveness says. GPU and CPU take the temporaries as one piece, so
        there the gaps in it count.
      allocated: the peak and the gaps.
      needed: what the compiler named when it refused; else None.
      message: its words.
      buffers: what is alive; None when refused, or when the program came from jax's compilation cache.
      seconds: compile time.
    """

    argument: int
    output: int
    alias: int
    temp: int
    host_temp: int
    peak: int
    allocated: int
    needed: int | None
    message: str
    buffers: buffers.Buffers | None
    seconds: float


def compile_for(lowered: Any, platform: str, hosted_bytes: int = 0, memory_mib: int | None = None) -> Compiled:
    """Compiles a lowered program with the compiler of the devices it was lowered for.

    Args:
        lowered: `jax.stages.Lowered`.
        platform: tpu, gpu or cpu.
        hosted_bytes: of the arguments (or, where there are none, of the results), per device, that live in host memory.
        memory_mib: TPU: a program that needs more is refused, as one that needs more than the chip has.
    """
    with tempfile.TemporaryDirectory(prefix="plimsoll-plan-") as folder:
        options: dict[str, Any] = {buffers.DUMP_OPTION: folder}
        if memory_mib is not None and platform == "tpu":
            options["xla_tpu_max_hbm_size_mib"] = memory_mib
        start = time.perf_counter()
        try:
            stats = lowered.compile(compiler_options=options).memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            needed = needed_bytes(str(error))
            if needed is None:
                raise
            words = str(error).splitlines()[0]
            return Compiled(0, 0, 0, 0, 0, needed, needed, needed, words, None, time.perf_counter() - start)
        seconds = time.perf_counter() - start
        try:
            found = buffers.read(Path(folder))
        except FileNotFoundError:  # taken from jax's compilation cache
            found = None
    on_tpu, among = platform == "tpu", _hosted_among(stats, platform, hosted_bytes)
    peak = found.live_bytes if on_tpu and found else peak_bytes(stats, platform, hosted_bytes)
    return Compiled(
        argument=max(0, stats.argument_size_in_bytes - among),
        output=stats.output_size_in_bytes - among,
        alias=max(0, stats.alias_size_in_bytes - among),
        temp=stats.temp_size_in_bytes,
        host_temp=stats.host_temp_size_in_bytes,
        peak=peak,
        allocated=peak + (found.gap_bytes if on_tpu and found else 0),
        needed=None,
        message="",
        buffers=found,
        seconds=seconds,
    )


def peak_bytes(stats: Any, platform: str, hosted_bytes: int) -> int:
    """Device memory at the worst instant, from a program's `memory_analysis()`.

    TPU: XLA's own peak counts host arguments, and knows them apart; a program from jax's compilation cache may have
    lost it. (In programs of megabytes it counts on-chip memory too, 128 MiB at most: where the buffers are known, their
    sum is better.) GPU and CPU: the sum, no overestimate there, as all temporaries are one allocation.
    """
    if platform == "tpu" and stats.peak_memory_in_bytes:
        return stats.peak_memory_in_bytes - stats.host_argument_size_in_bytes
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return total + stats.temp_size_in_bytes - _hosted_among(stats, platform, hosted_bytes)


def _hosted_among(stats: Any, platform: str, hosted_bytes: int) -> int:
    """Bytes in host memory that the compiler counts among the device's: on CPU all of them, on GPU those it lost."""
    return 0 if platform == "tpu" else hosted_bytes - stats.host_argument_size_in_bytes


def needed_bytes(message: str) -> int | None:
    """Bytes that a refused program needs, from the compiler's message; None if it is about something else."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    match = re.search(rf"(?:memory required[^(]*\({_SIZE}\)|Used {_SIZE}B? of)", message)
    if match is None:
        return None
    number, unit = next((match[i], match[i + 1]) for i in (1, 3) if match[i])
    return int(float(number) * _UNITS[unit])
