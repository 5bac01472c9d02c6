"""Compiling a program for a target, and what the compiler says it needs."""

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

from framework.devices.executables import HostBytes, on_device, peak_bytes
from framework.plan import buffers
from framework.schedules.layerwise.programs import Ledger
from framework.terminal import interrupts

_SIZE = r"([\d.]+)([KMGT]?)"


@dataclass(frozen=True)
class Compiled:
    """The compiler's account of a program, in bytes per device.

    Attributes:
      seconds: compile time.
      peak: bytes alive at the worst instant. On TPU XLA's liveness says it. GPU and CPU take the temporaries as one
        piece, so there the gaps in it count.
      allocated: the peak and the gaps.
      argument, output, alias, temp: device memory, as `memory_analysis()` has it; an output in an argument's place is
        in alias too. They are zero when the program was refused.
      host_temp: temporaries in host memory, where the compiler knows them (TPU).
      buffers: the buffers that are alive; None when refused, or when the program came from jax's compilation cache.
      text: of the program as it is run (TPU, GPU). A TPU's compiler has noted by then what it takes each fusion to
        need. The text that `buffers` are read from does not have it yet.
      message: the compiler's words, if it refused the program; `peak` is then what it named.
      ledger: of a step that is several programs, its rehearsal; `buffers` are then those of the worst program.
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
    ledger: Ledger | None = None


def compile_for(
    lowered: Any,
    platform: str,
    hosted: HostBytes = HostBytes(),
    memory_mib: int | None = None,
    compiler_options: Mapping[str, Any] = MappingProxyType({}),
) -> Compiled:
    """Compiles a lowered program with the compiler of the devices it was lowered for.

    Args:
        lowered: `jax.stages.Lowered`.
        platform: tpu, gpu or cpu.
        hosted: the bytes of its arguments and results that live in host memory.
        memory_mib: TPU: a program that needs more is refused, as one that needs more than the chip has.
        compiler_options: further ones of XLA.
    """
    limits: dict[str, Any] = {}
    if memory_mib is not None and platform == "tpu":
        limits["xla_tpu_max_hbm_size_mib"] = memory_mib
    with tempfile.TemporaryDirectory(prefix="plimsoll-plan-") as folder, interrupts.removed_at_end(folder):
        options = {**compiler_options, **limits, buffers.DUMP_OPTION: folder}
        start = time.perf_counter()
        try:
            executable = lowered.compile(compiler_options=options)
            stats = executable.memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            needed, message = refused(error)
            return Compiled(time.perf_counter() - start, needed, needed, message=message)
        seconds = time.perf_counter() - start
        text = executable.as_text() if platform != "cpu" else ""
        program_buffers = None
        # A program that comes from jax's compilation cache leaves no dump.
        with suppress(FileNotFoundError):
            program_buffers = buffers.read(Path(folder))
    return replace(_read(stats, platform, hosted, program_buffers), seconds=seconds, text=text)


def _read(stats: Any, platform: str, hosted: HostBytes, program_buffers: buffers.Buffers | None) -> Compiled:
    """The bytes of a program, by what the compiler says of it."""
    peak = peak_bytes(stats, platform, hosted)
    gaps = 0
    if platform == "tpu" and program_buffers:
        # The sum of the buffers leaves out on-chip memory, which XLA's own peak counts too.
        peak = program_buffers.live_bytes
        gaps = program_buffers.gap_bytes
    argument, output, alias = on_device(stats, platform, hosted)
    return Compiled(
        seconds=0.0,
        peak=peak,
        allocated=peak + gaps,
        argument=argument,
        output=output,
        alias=alias,
        temp=stats.temp_size_in_bytes,
        host_temp=stats.host_temp_size_in_bytes,
        buffers=program_buffers,
    )


def refused(error: Exception) -> tuple[int, str]:
    """(bytes that a refused program needs, the compiler's words); any other error is raised again."""
    text = str(error)
    match = re.search(rf"(?:memory required[^(]*\(|Used ){_SIZE}(?:\)|B? of)", text)
    if "RESOURCE_EXHAUSTED" not in text or match is None:
        raise error
    number = float(match[1])
    # No letter stands for bytes, K for 1024 of them, and so on.
    exponent = " KMGT".index(match[2] or " ")
    return int(number * 1024**exponent), text.splitlines()[0]
