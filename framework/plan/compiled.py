"""Compiling a program for a target, and what the compiler says it needs."""

from __future__ import annotations

import re
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from framework.devices.executables import HostBytes, on_device, peak_bytes
from framework.plan import buffers
from framework.schedules.layerwise.programs import Ledger
from framework.terminal import interrupts

_SIZE = r"([\d.]+)([KMGT]?)"


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program, bytes per device.

    Attributes:
      seconds: compile time.
      peak: alive at the worst instant. TPU: what XLA's liveness says. GPU and CPU take the temporaries as one piece, so
        there the gaps in it count.
      allocated: the peak and the gaps.
      argument, output, alias, temp: device memory, as `memory_analysis()` has it; an output in an argument's place is
        in alias too. Zero when the program was refused.
      host_temp: temporaries in host memory, where the compiler knows them (TPU).
      buffers: what is alive; None when refused, or when the program came from jax's compilation cache.
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
    lowered: Any, platform: str, hosted: HostBytes = HostBytes(), memory_mib: int | None = None
) -> Compiled:
    """Compiles a lowered program with the compiler of the devices it was lowered for.

    Args:
        lowered: `jax.stages.Lowered`.
        platform: tpu, gpu or cpu.
        hosted: what of its arguments and results lives in host memory.
        memory_mib: TPU: a program that needs more is refused, as one that needs more than the chip has.
    """
    with tempfile.TemporaryDirectory(prefix="plimsoll-plan-") as folder, interrupts.removed_at_end(folder):
        options: dict[str, Any] = {buffers.DUMP_OPTION: folder}
        if memory_mib is not None and platform == "tpu":
            options["xla_tpu_max_hbm_size_mib"] = memory_mib
        start, found = time.perf_counter(), None
        try:
            executable = lowered.compile(compiler_options=options)
            stats = executable.memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            needed, words = refused(error)
            return Compiled(time.perf_counter() - start, needed, needed, message=words)
        seconds = time.perf_counter() - start
        text = executable.as_text() if platform != "cpu" else ""
        with suppress(FileNotFoundError):  # taken from jax's compilation cache
            found = buffers.read(Path(folder))
    peak, gaps = peak_bytes(stats, platform, hosted), 0
    if platform == "tpu" and found:
        peak, gaps = found.live_bytes, found.gap_bytes
    sizes = *on_device(stats, platform, hosted), stats.temp_size_in_bytes, stats.host_temp_size_in_bytes
    return Compiled(seconds, peak, peak + gaps, *sizes, found, text)


def refused(error: Exception) -> tuple[int, str]:
    """(bytes that a refused program needs, the compiler's words); any other error is raised again."""
    text = str(error)
    match = re.search(rf"(?:memory required[^(]*\(|Used ){_SIZE}(?:\)|B? of)", text)
    if "RESOURCE_EXHAUSTED" not in text or match is None:
        raise error
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2] or " ")), text.splitlines()[0]
