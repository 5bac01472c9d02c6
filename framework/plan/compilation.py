"""Compiles a program for a target and reads the memory it needs from the compiler."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from plimsoll.framework.devices.executables import HostBytes, peak_bytes, split_device_bytes
from plimsoll.framework.plan import buffers
from plimsoll.framework.schedules.layerwise.programs import MemoryTracker
from plimsoll.framework.terminal import interrupts

_SIZE = r"([\d.]+)([KMGT]?)"


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled program's memory, in bytes per device.

    Attributes:
        seconds: compile time.
        peak: bytes alive at the memory peak. On TPU it comes from XLA's liveness analysis. GPU and CPU allocate all
            temporaries as one block, so there the gaps in it count.
        allocated: the peak including the gaps.
        argument, output, alias, temp: device memory, as reported by `memory_analysis()`; an output that aliases an
            argument is also in alias. They are zero if the compiler refused the program.
        host_temp: temporaries in host memory, where the compiler reports them (TPU).
        buffers: the live buffers; None if the program was refused or came from jax's compilation cache.
        text: final program text (TPU, GPU; empty on CPU). On TPU it includes the compiler's estimated cost of each
            fusion, which the text that `buffers` are read from does not have yet.
        message: the compiler's error message, if it refused the program; `peak` is then the size that it names.
        tracker: memory tracker of the dry run, for a step that consists of several programs; `buffers` are then those
            of the program with the highest peak.
    """

    seconds: float
    peak: int
    allocated: int
    argument: int = 0
    output: int = 0
    alias: int = 0
    temp: int = 0
    host_temp: int = 0
    buffers: buffers.Buffers | None = None
    text: str = ""
    message: str = ""
    tracker: MemoryTracker | None = None


def compile_for(
    lowered: jax.stages.Lowered,
    platform: str,
    offloaded: HostBytes = HostBytes(),
    memory_mib: int | None = None,
    compiler_options: Mapping[str, str | int | bool] = MappingProxyType({}),
) -> CompiledProgram:
    """Compile a lowered program with the compiler of the devices it was lowered for.

    Args:
        lowered: the program.
        platform: tpu, gpu or cpu.
        offloaded: bytes of its arguments and results that are in host memory.
        memory_mib: device memory limit in MiB (TPU only); the compiler refuses a program that needs more.
        compiler_options: additional XLA compiler options.
    """
    limits: dict[str, int] = {}
    if memory_mib is not None and platform == "tpu":
        limits["xla_tpu_max_hbm_size_mib"] = memory_mib
    with tempfile.TemporaryDirectory(prefix="plimsoll-plan-") as folder, interrupts.remove_on_signal(folder):
        options = {**compiler_options, **limits, buffers.DUMP_OPTION: folder}
        start = time.perf_counter()
        try:
            executable = lowered.compile(compiler_options=options)
            stats = executable.memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            needed, message = parse_refusal(error)
            return CompiledProgram(time.perf_counter() - start, needed, needed, message=message)
        seconds = time.perf_counter() - start
        text = executable.as_text() if platform != "cpu" else ""
        program_buffers = None
        # A program that comes from jax's compilation cache leaves no dump.
        with suppress(FileNotFoundError):
            program_buffers = buffers.read_dump(Path(folder))
    return replace(_read_stats(stats, platform, offloaded, program_buffers), seconds=seconds, text=text)


def _read_stats(
    stats: Any, platform: str, offloaded: HostBytes, program_buffers: buffers.Buffers | None
) -> CompiledProgram:
    """Return the memory of a program from the compiler's memory analysis and, if available, its buffers."""
    peak = peak_bytes(stats, platform, offloaded)
    gaps = 0
    if platform == "tpu" and program_buffers:
        # XLA's own peak includes on-chip memory; the sum of the buffers does not.
        peak = program_buffers.live_bytes
        gaps = program_buffers.gap_bytes
    on_device = split_device_bytes(stats, platform, offloaded)
    return CompiledProgram(
        seconds=0.0,
        peak=peak,
        allocated=peak + gaps,
        argument=on_device.arguments,
        output=on_device.results,
        alias=on_device.donated,
        temp=stats.temp_size_in_bytes,
        host_temp=stats.host_temp_size_in_bytes,
        buffers=program_buffers,
    )


def parse_refusal(error: Exception) -> tuple[int, str]:
    """Return (bytes that a refused program needs, the compiler's message); re-raise any other error."""
    text = str(error)
    match = re.search(rf"(?:memory required[^(]*\(|Used ){_SIZE}(?:\)|B? of)", text)
    if "RESOURCE_EXHAUSTED" not in text or match is None:
        raise error
    number = float(match[1])
    # No letter means bytes, K means KiB, and so on.
    exponent = " KMGT".index(match[2] or " ")
    return int(number * 1024**exponent), text.splitlines()[0]
