"""Host memory that a run needs in each of its phases, and whether the host has it.

A host has to hold more than the arrays that are offloaded to it: Python and the libraries, the compiler while it works,
the batches, and whatever passes through it when a checkpoint is written or read. On a CPU, the memory of the devices is
host memory as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from plimsoll.framework.checkpoint.storage import read_bytes
from plimsoll.framework.devices.accelerators import GIB, MIB
from plimsoll.framework.devices.allocator import MAX_KEPT_BYTES
from plimsoll.framework.layers.base import batch_specs
from plimsoll.framework.layers.experts.experts import Experts
from plimsoll.framework.layout import StateLayout
from plimsoll.framework.plan.plan_report import HostReport, PhaseReport
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program import save_window
from plimsoll.framework.program.backend import get_stack_split
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.schedules.stack_layout import StackParts
from plimsoll.framework.terminal.tables import human_bytes

# Parts of the need.
PROCESS = "Python and libraries"
SYSTEM = "operating system"
COMPILER = "compiler"
PROGRAMS = "compiled programs"
DEVICES = "memory of the devices"
STATE = "offloaded state"
BATCHES = "batches"
AUXILIARY = "auxiliary model"
# What else a phase holds in host memory.
_OTHER = {
    "restore": "reading the checkpoint",
    "save": "writing the checkpoint",
    "train": "activations and temporaries",
    "end": "joining layers",
}

# The phases of a run in their order; those of an auxiliary model follow "restore".
_ORDER = ("start", "compile", "init", "restore", "train", "evaluation", "save", "end", "export")

# Resident memory of a process that has imported everything. CPU: measured with Python 3.11 and jax 0.10.2. On a GPU it
# includes CUDA's libraries, on a TPU libtpu: assumed, because nothing was measured on a device.
PROCESS_BYTES: Mapping[str, int] = {"cpu": 400 * MIB, "gpu": 2 * GIB, "tpu": 2 * GIB}
# Memory of the compiler while it works. CPU: measured for steps of 6 to 48 layers. TPU and GPU: the compilers took up
# to 5 GiB for a step when planning.
COMPILER_BYTES: Mapping[str, int] = {"cpu": 350 * MIB, "gpu": 5 * GIB, "tpu": 5 * GIB}
# Memory that stays occupied by compiled programs. CPU: measured. TPU and GPU: assumed.
PROGRAM_BYTES: Mapping[str, int] = {"cpu": 360 * MIB, "gpu": 512 * MIB, "tpu": 512 * MIB}
# The same of a step that is many programs, on a CPU: measured.
_MANY_PROGRAMS_BYTES = 640 * MIB
# What the step of a mixture of experts takes in addition, on a CPU: the most that was measured, on a busy machine; it
# varies from step to step. XLA does not count it.
_EXPERT_STEP_BYTES = 420 * MIB
# What the operating system needs of a machine that is not this one. Assumed.
SYSTEM_BYTES = GIB


@dataclass(frozen=True)
class Host:
    """The memory of a machine, and the processes of a run on it.

    Attributes:
        limit_bytes: bytes that the run may use; None if unknown.
        num_processes: number of the run's processes that share the machine.
        process_bytes: bytes of each process before it compiles anything.
        system_bytes: bytes for the operating system, if `limit_bytes` includes them.
    """

    limit_bytes: int | None
    num_processes: int
    process_bytes: int
    system_bytes: int = 0

    @staticmethod
    def of_target(target: Target) -> Host:
        """Return the host of a machine to plan for, with one process."""
        system = 0 if target.platform == "cpu" or target.available_devices else SYSTEM_BYTES
        return Host(target.host_limit_bytes, 1, PROCESS_BYTES[target.platform], system)


class HostMemoryModel:
    """Predicts the host memory of a run. All bytes are those of one process, unless stated otherwise.

    Args:
        experiment: the experiment to train.
        layout: layout of the running state, on devices that may be absent.
        platform: tpu, gpu or cpu.
        num_local_devices: number of devices of each process.
        num_processes: number of processes of the run.
        host: the machine that holds the process.

    Attributes:
        window_bytes: bytes of host memory that a save goes through; None if it copies the state. If the host's memory
            is unknown, a window is the least that a save needs.
        written_bytes: bytes that a save writes.
    """

    def __init__(
        self,
        experiment: Experiment,
        layout: StateLayout,
        platform: str,
        num_local_devices: int,
        num_processes: int,
        host: Host,
    ):
        self._experiment = experiment
        self._layout = layout
        self._platform = platform
        self._num_local_devices = num_local_devices
        self._num_processes = num_processes
        self._host = host
        self._parts: StackParts = get_stack_split(experiment)
        self._program_bytes = PROGRAM_BYTES[platform]
        if platform == "cpu" and experiment.memory.traits.is_many_programs:
            self._program_bytes = _MANY_PROGRAMS_BYTES
        layers = [layer for stack in experiment.model.stacks.values() for layer in stack.pattern.walk()]
        if platform == "cpu" and any(isinstance(layer, Experts) for layer in layers):
            self._program_bytes += _EXPERT_STEP_BYTES
        self._device_bytes = layout.bytes_per_device(memory_kind="device")
        self._offloaded_bytes = layout.bytes_per_device(memory_kind="pinned_host")
        self.written_bytes = save_window.count_written_bytes(layout, num_local_devices)
        self._copied_bytes = save_window.count_copied_bytes(layout, self._parts, num_local_devices, platform)
        free_bytes = 0
        if host.limit_bytes is not None:
            held_bytes = self._base_bytes() + num_local_devices * self._offloaded_bytes
            if platform == "cpu":
                held_bytes += num_local_devices * self._device_bytes
            free_bytes = (host.limit_bytes - host.system_bytes) // host.num_processes - held_bytes
        window_gib = experiment.checkpoint.window_gib
        if host.limit_bytes is None and window_gib is None:
            window_gib = save_window.MAX_WINDOW_BYTES / GIB
        self.window_bytes = save_window.choose_window(self._copied_bytes, window_gib, free_bytes)

    def checkpoint_peaks(self) -> dict[str, PhaseReport]:
        """Return the peaks of reading and writing a checkpoint, and of the end of a run, which follow from the layout.

        Reading fills the layout's leaves through host memory, with a bounded number of bytes in flight. Writing needs
        a copy of the arrays that this process writes, each once, or a window of them. At the end, layers that are
        stored separately are joined to sample from the model.
        """
        count = self._num_local_devices
        whole_bytes = self._device_bytes + self._offloaded_bytes
        # A process reads only the shards of its own devices.
        passing = min(read_bytes(max(leaf.spec.num_bytes for leaf in self._layout)), count * whole_bytes)
        writing = self._copied_bytes
        if self.window_bytes is not None:
            writing = min(writing, self.window_bytes)
        split_stages = {part.stage for part in self._parts.parts}
        for leaf in self._layout:
            is_split = leaf.path.split("/")[1] in split_stages
            # A device's layers are read into host memory as whole stacks, unless they were written in chunks: through a
            # window, or from a GPU.
            is_chunked = self.window_bytes is not None or self._platform == "gpu"
            if is_split and not leaf.spec.is_offloaded and not is_chunked:
                passing += count * leaf.bytes_per_device
        host = self._offloaded_bytes
        return {
            "restore": PhaseReport(self._device_bytes, host + passing // count),
            "save": PhaseReport(self._device_bytes, host + writing // count),
            "end": PhaseReport(self._device_bytes, max(host + count_joined_bytes(self._layout, self._parts), 0)),
        }

    def report(self, peaks: Mapping[str, PhaseReport]) -> HostReport:
        """Return the need by phase.

        Args:
            peaks: memory of the arrays by phase, per device; a step ("train") and what `checkpoint_peaks` returns, and
                more phases if they are known.
        """
        process = self._host.process_bytes
        phases: dict[str, dict[str, int]] = {
            "start": {PROCESS: process},
            "compile": {PROCESS: process, COMPILER: COMPILER_BYTES[self._platform]},
        }
        step = peaks.get("train", PhaseReport(self._device_bytes, self._offloaded_bytes))
        for name, peak in peaks.items():
            parts = {PROCESS: process, PROGRAMS: self._program_bytes}
            device_bytes = peak.device_peak_bytes
            other_bytes = peak.host_peak_bytes - self._offloaded_bytes
            # A copy is written while the next steps run.
            if name == "save" and self.window_bytes is None:
                device_bytes = max(device_bytes, step.device_peak_bytes)
                other_bytes += step.host_peak_bytes - self._offloaded_bytes
            if self._platform == "cpu":
                # Offloaded weights are moved to the device to draw a sample.
                if name == "end":
                    device_bytes += self._offloaded_weight_bytes()
                parts[DEVICES] = self._num_local_devices * device_bytes
                if name in self._list_compiling_phases(step):
                    parts[COMPILER] = COMPILER_BYTES[self._platform]
            parts[STATE] = self._num_local_devices * (self._offloaded_bytes + min(other_bytes, 0))
            parts[_OTHER.get(name, AUXILIARY)] = self._num_local_devices * max(other_bytes, 0)
            parts[BATCHES] = self._batch_bytes()
            phases[name] = parts
        # The weights of a run of several processes may be exported on another machine.
        if self._num_processes == 1:
            phases["export"] = self._export_parts()
        if self._host.system_bytes:
            for parts in phases.values():
                parts[SYSTEM] = self._host.system_bytes // self._host.num_processes
        end = phases.get("end", {})
        if not HostReport(self._host.limit_bytes, self._host.num_processes, {"end": end}).fits:
            # Without room for the joined layers, no sample is drawn.
            end.pop(_OTHER["end"], None)
        ordered = sorted(phases, key=lambda name: _ORDER.index(name) if name in _ORDER else _ORDER.index("restore"))
        phases = {name: {part: size for part, size in phases[name].items() if size} for name in ordered}
        return HostReport(self._host.limit_bytes, self._host.num_processes, phases)

    def _list_compiling_phases(self, step: PhaseReport) -> Collection[str]:
        """Return the phases in which a run on a CPU compiles next to the state.

        The last one compiles the programs that draw a sample. The evaluation is compiled in a thread while the first
        steps run, or before the state exists if it is large (`CompileThread`), or when it is needed.

        Args:
            step: memory of a step, per device.
        """
        if self._num_processes > 1 or self._experiment.memory.traits.is_many_programs:
            return ("evaluation", "end")
        bytes_per_device = step.device_peak_bytes + self._offloaded_bytes
        is_small = self._num_local_devices * bytes_per_device <= MAX_KEPT_BYTES
        return ("train", "evaluation", "end") if is_small else ("end",)

    def _export_parts(self) -> dict[str, int]:
        """Return what `plimsoll export` needs: a process that reads the model's weights and writes them one by one."""
        weights = [leaf.spec.num_bytes for leaf in self._layout if leaf.group in ("parameter", "frozen", "buffer")]
        # Reading needs more than the copies of one tensor that is written.
        parts = {PROCESS: self._host.process_bytes, _OTHER["restore"]: read_bytes(max(weights, default=0))}
        if self._platform == "cpu":
            parts[DEVICES] = sum(weights)
        return parts

    def _offloaded_weight_bytes(self) -> int:
        groups = ("parameter", "frozen", "buffer")
        return sum(self._layout.bytes_per_device(group, "pinned_host") for group in groups)

    def _base_bytes(self) -> int:
        return self._host.process_bytes + self._program_bytes + self._batch_bytes()

    def _batch_bytes(self) -> int:
        """Return the bytes of the batches that are prepared, waiting and in use."""
        data = self._experiment.data
        batch_bytes = sum(spec.num_bytes for spec in batch_specs(data.arrays()).values())
        # One batch is in use, and one is being prepared.
        num_batches = getattr(data, "prefetch", 2) + 2
        return num_batches * batch_bytes // self._num_processes


def count_joined_bytes(layout: StateLayout, parts: StackParts) -> int:
    """Return by how many bytes the host memory of a device's arrays grows when separate layers are joined to sample.

    Negative if the offloaded optimizer state, which is freed before, is larger.

    Args:
        layout: layout of the running state.
        parts: how the stacks are stored.
    """
    split_stages = {part.stage for part in parts.parts}
    if not split_stages:
        return 0
    joined = 0
    for leaf in layout:
        is_split = leaf.path.split("/")[1] in split_stages
        if is_split and leaf.group in ("parameter", "frozen", "ema", "buffer"):
            joined += leaf.bytes_per_device
    return joined - layout.bytes_per_device("optimizer", "pinned_host")


def build_host_model(experiment: Experiment, layout: StateLayout, target: Target) -> HostMemoryModel:
    """Return the model of the host memory on a target.

    Args:
        experiment: the experiment to train.
        layout: layout of the running state.
        target: the machine to plan for.
    """
    return HostMemoryModel(
        experiment,
        layout,
        target.platform,
        target.num_devices // target.num_processes,
        target.num_processes,
        Host.of_target(target),
    )


def explain_host_refusal(report: HostReport) -> str | None:
    """Return the reason why a run does not fit in host memory; None if it fits, or if the limit is unknown."""
    if report.fits:
        return None
    phase = report.peak_phase
    need = f"the run needs {human_bytes(report.peak_bytes)} of host memory ({phase} needs the most)"
    if report.num_processes > 1:
        need += f" for {report.num_processes} processes on this machine"
    largest = sorted(report.phases[phase].items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{part} {human_bytes(size)}" for part, size in largest)
    advice = (
        "increase mesh.fsdp, set learner.moment_dtype=bfloat16, or offload fewer layers (memory.FIELD=pinned_host:8)"
    )
    if largest[0][0] == DEVICES:
        advice = "use a smaller batch, memory.remat=full or a smaller model"
    elif phase == "save" and largest[0][0] == _OTHER["save"]:
        advice = "set a smaller checkpoint.window_gib"
    return f"{need}, but {human_bytes(report.limit_bytes)} are available; per process: {parts}; {advice}"
