"""Summarizes a trace of jax.profiler: the operations that take the most time, and how long devices are busy.

The trace has the name of each executed instruction; the compiled program's text says which layer it belongs to.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from plimsoll.framework.plan.buffer_names import describe_clearest_operation
from plimsoll.framework.plan.hlo.computations import Computations, Instruction
from plimsoll.framework.plan.hlo.transfers import collective_kind
from plimsoll.framework.terminal.tables import TableSection, human_duration

Key = TypeVar("Key")
# The operations that only wait for those that they contain.
_CONTROL_FLOW = ("while", "call", "conditional", "async-start", "async-done", "async-update")
# On a TPU an event is named by the whole text of its instruction, `%fusion.1 = bf16[...] ...`.
_INSTRUCTION = re.compile(r"^%?([\w.\-<>]+)")
_PRODUCTS = ("dot", "convolution", "dot_general", "conv_general_dilated")
_COPIES = ("copy", "copy-start", "copy-done", "transpose", "memcpyd2h", "memcpyh2d", "memcpyd2d")


@dataclass(frozen=True)
class TracedOperation:
    """All executions of one instruction, on all devices.

    Attributes:
        name: name of the instruction, or of the kernel if the trace does not name the instruction.
        module: program that it belongs to; "" if unknown.
        operation: the layer, the operation and the phase, such as "stack/mlp/up/dot_general, backward"; "" if unknown.
        kind: product, collective, copy or other.
        count: number of executions.
        seconds: time of all executions, without the instructions that run within them.
    """

    name: str
    module: str
    operation: str
    kind: str
    count: int
    seconds: float


@dataclass(frozen=True)
class TraceSummary:
    """The operations of a trace.

    Attributes:
        operations: the operations, the slowest first.
        num_devices: number of devices (of processes on a CPU) in the trace.
        busy_seconds: time in which a device executes anything, mean over the devices.
        span_seconds: time from the first operation's start to the last one's end.
    """

    operations: list[TracedOperation]
    num_devices: int
    busy_seconds: float
    span_seconds: float

    @property
    def total_seconds(self) -> float:
        """The time of all operations. On a CPU, whose threads run next to each other, more than `busy_seconds`."""
        return sum(operation.seconds for operation in self.operations)

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON."""
        return asdict(self)

    def sections(self, num_steps: int, top: int) -> list[TableSection]:
        """Return the tables: use of the devices, time by kind and by layer, and the slowest operations.

        Args:
            num_steps: number of traced steps; times are given per step.
            top: maximum number of rows of a table.
        """
        per_step = 1.0 / (num_steps * max(self.num_devices, 1))
        total = max(self.total_seconds, 1e-12)

        def row(name: str, seconds: float, *more: str) -> tuple[str, ...]:
            return name, human_duration(seconds * per_step), f"{seconds / total:.1%}", *more

        by_kind: dict[str, float] = defaultdict(float)
        by_layer: dict[str, float] = defaultdict(float)
        for operation in self.operations:
            by_kind[operation.kind] += operation.seconds
            path, _, phase = operation.operation.rpartition(", ")
            layer = path.rpartition("/")[0] or path
            by_layer[f"{layer}, {phase}" if layer else "(not named)"] += operation.seconds
        busy = self.busy_seconds / max(self.span_seconds, 1e-12)
        devices = f"busy {busy:.1%} of {human_duration(self.span_seconds / num_steps)} per step"
        slowest = []
        for operation in self.operations[:top]:
            count = f"{operation.count / (num_steps * max(self.num_devices, 1)):.3g}"
            slowest.append(row(operation.name, operation.seconds, count, operation.operation or "-"))
        kinds = [row(kind, seconds) for kind, seconds in _sort_by_time(by_kind)]
        layers = [row(layer, seconds) for layer, seconds in _sort_by_time(by_layer)[:top]]
        has_layers = any(operation.operation for operation in self.operations)
        return [
            TableSection("devices", [("devices", str(self.num_devices)), ("use", devices)]),
            TableSection("time of operations by kind, per step and device", kinds),
            *([TableSection("by layer and phase", layers)] if has_layers else []),
            TableSection(
                f"the {len(slowest)} slowest of {len(self.operations)} operations; times and runs are per step",
                [("operation", "time", "share", "runs", "layer, operation and phase"), *slowest],
            ),
        ]


def _sort_by_time(seconds_by_name: Mapping[Key, float]) -> list[tuple[Key, float]]:
    return sorted(seconds_by_name.items(), key=lambda item: -item[1])


def find_traces(folder: Path) -> list[Path]:
    """Return the traces in a folder of jax.profiler, oldest first."""
    return sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)


def summarize_trace(profile: Any, program_texts: Sequence[str] = ()) -> TraceSummary:
    """Summarize a trace.

    Args:
        profile: the trace, a jax.profiler.ProfileData.
        program_texts: final texts of the compiled programs, which name the layers; without them, only what the trace
            itself says is known.
    """
    programs = {_module_name(text): Computations(text) for text in program_texts}
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    names: dict[tuple[str, str], str] = {}
    busy: list[float] = []
    bounds: list[tuple[float, float]] = []
    num_devices = 0
    for plane in profile.planes:
        lines = list(_operation_lines(plane))
        if not any(lines):
            continue
        num_devices += 1
        spans = []
        for events in lines:
            for event, own_seconds in _own_times(events):
                key = (event.module, event.name)
                instruction = _find_instruction(programs, event)
                opcode = event.name.split(".")[0] if instruction is None else instruction.opcode
                # It waits for the operations that it contains, which other threads of a CPU may run.
                if opcode in _CONTROL_FLOW:
                    continue
                seconds[key] += own_seconds
                counts[key] += 1
                names.setdefault(key, event.op_name)
                spans.append((event.start, event.end))
        busy.append(_measure_union(spans))
        bounds += spans
    operations = []
    for key, time in _sort_by_time(seconds):
        module, name = key
        instruction = _find_instruction(programs, _Event(name, module, "", 0.0, 0.0))
        operation = _describe(programs.get(module), instruction, names[key])
        operations.append(TracedOperation(name, module, operation, _kind(name, instruction), counts[key], time))
    span = max(end for _, end in bounds) - min(start for start, _ in bounds) if bounds else 0.0
    return TraceSummary(operations, num_devices, sum(busy) / max(num_devices, 1), span)


@dataclass(frozen=True)
class _Event:
    """One execution of an instruction, in seconds."""

    name: str
    module: str
    op_name: str
    start: float
    end: float


def _operation_lines(plane: Any) -> Iterable[list[_Event]]:
    """Yield the executed instructions of each line (a stream or a thread) of a plane; [] for other lines."""
    is_device = plane.name.startswith("/device:")
    is_tpu = plane.name.startswith("/device:TPU")
    for line in plane.lines:
        # The other lines of a TPU are steps, whole programs and transfers that run next to the operations.
        if is_tpu and line.name != "XLA Ops":
            continue
        events = []
        for event in line.events:
            stats = {name: value for name, value in event.stats if name in ("hlo_op", "hlo_module", "tf_op")}
            # On a CPU, operations are among many other events of the host.
            if not is_device and "hlo_op" not in stats:
                continue
            name = str(stats.get("hlo_op") or event.name)
            match = _INSTRUCTION.match(name)
            start = 1e-9 * event.start_ns
            end = start + 1e-9 * event.duration_ns
            module = str(stats.get("hlo_module", ""))
            op_name = str(stats.get("tf_op", ""))
            events.append(_Event(match[1] if match else name, module, op_name, start, end))
        yield events


def _own_times(events: Sequence[_Event]) -> list[tuple[_Event, float]]:
    """Return each event of a line with its time, without that of the events within it."""
    own: list[float] = []
    ordered = sorted(events, key=lambda event: (event.start, -event.end))
    # Indices of the events that contain the current one, outermost first.
    open_events: list[int] = []
    for index, event in enumerate(ordered):
        while open_events and ordered[open_events[-1]].end <= event.start:
            open_events.pop()
        own.append(event.end - event.start)
        if open_events:
            own[open_events[-1]] -= event.end - event.start
        open_events.append(index)
    return [(event, max(seconds, 0.0)) for event, seconds in zip(ordered, own, strict=True)]


def _measure_union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total = 0.0
    end = float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _module_name(text: str) -> str:
    """Return the name of a program, from `HloModule jit_step, ...`."""
    return text.partition(",")[0].removeprefix("HloModule ").strip()


def _find_instruction(programs: Mapping[str, Computations], event: _Event) -> Instruction | None:
    """Return the instruction of an event; None if its program is unknown."""
    # A trace of a GPU may not name the module; the name of an instruction is then looked up in all of them.
    candidates = [programs[event.module]] if event.module in programs else programs.values()
    if event.module and event.module not in programs:
        return None
    for program in candidates:
        if event.name in program.instructions:
            return program.instructions[event.name]
    return None


def _describe(program: Computations | None, instruction: Instruction | None, op_name: str) -> str:
    """Return the layer, operation and phase of an instruction; "" if unknown."""
    op_names = [op_name] if op_name else []
    if instruction is not None and instruction.op_name:
        op_names = [instruction.op_name]
    elif instruction is not None and program is not None:
        op_names = [inner.op_name for inner in program.get_fused_instructions(instruction) if inner.op_name]
    return describe_clearest_operation(op_names)


def _kind(name: str, instruction: Instruction | None) -> str:
    """Return product, collective, copy or other."""
    opcode = name.split(".")[0].lower() if instruction is None else instruction.opcode
    op_name = "" if instruction is None else instruction.op_name
    if instruction is not None and collective_kind(instruction):
        return "collective"
    if opcode.startswith(("all-", "reduce-scatter", "collective-", "ncclk", "nccldevk")):
        return "collective"
    is_product = opcode in _PRODUCTS or op_name.endswith(("/dot_general", "/conv_general_dilated"))
    if is_product or any(word in opcode for word in ("gemm", "cutlass", "cublas")):
        return "product"
    return "copy" if opcode in _COPIES else "other"
