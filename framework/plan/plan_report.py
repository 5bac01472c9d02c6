"""The report of a plan: a typed record, and its JSON form, which docs/plan.md explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Version of the JSON form, and the JSON Schema that describes it; see tools/plan_schema.py.
SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("plan_schema.json")

# The groups of the memory breakdown, in the order used everywhere.
BREAKDOWN_KEYS: tuple[str, ...] = (
    *("parameters", "frozen", "buffers", "gradients", "optimizer_state"),
    *("ema", "batch", "activations", "other"),
)
# Keys of the JSON in their order, which depends on the kind of report.
_DEVICE = ("peak", "allocated", "argument", "output", "alias", "temp")
_DEVICE_KEYS = tuple(f"device_{name}_bytes" for name in _DEVICE)
_HOST_KEYS = ("host_argument_bytes", "host_peak_bytes", "host_process_bytes", "host")
_FIRST_KEYS = (
    *("largest", "zero_gradients", "suggestions", "notes", "collective_bytes", "phases", "host_transfer_bytes"),
    *("compile_seconds", "message", "config", "target", "accelerator", "platform", "devices", "processes", "mesh"),
    *("mesh_across", "device_limit_bytes", "device_reserved", "device_memory_fraction", "host_limit_bytes", "item"),
    *("tokens_per_step", "batch", "in_effect", "model_flops_per_token", "versions", "smaller_batch"),
)
_COMPILED_KEYS = (
    *_FIRST_KEYS,
    *("estimated", "flops_per_step", "flops_per_token"),
    *_DEVICE_KEYS,
    *("breakdown", "host_breakdown"),
    *_HOST_KEYS,
    *("estimate", "time", "fits", "settings"),
)
_ESTIMATED_KEYS = (
    *_FIRST_KEYS,
    *_DEVICE_KEYS,
    *("estimated", "fits", "breakdown", "host_breakdown", "estimate", "flops_per_step", "flops_per_token", "time"),
    *_HOST_KEYS,
    "settings",
)
_FUNCTION_KEYS = (
    *("config", "subject", "settings", "target", "accelerator", "platform", "devices", "processes", "mesh"),
    *("mesh_across", "device_limit_bytes", "device_reserved", "device_memory_fraction", "host_limit_bytes", "versions"),
    *_DEVICE_KEYS,
    *("breakdown", "host_breakdown", "host_peak_bytes", "host_process_bytes", "largest", "flops_per_step"),
    *("collective_bytes", "host_transfer_bytes", "time", "compile_seconds", "message", "estimated", "fits", "notes"),
    *("phases", "zero_gradients", "suggestions"),
)


def list_keys() -> dict[str, bool]:
    """Return {key of the JSON form: whether the reports of all kinds have it}."""
    kinds = (_COMPILED_KEYS, _ESTIMATED_KEYS, _FUNCTION_KEYS)
    return {key: all(key in keys for keys in kinds) for keys in kinds for key in keys}


@dataclass(frozen=True)
class PhaseReport:
    """Peak memory of one phase of a run.

    Attributes:
        device_peak_bytes: bytes of device memory, per device.
        host_peak_bytes: bytes of host memory, per device.
    """

    device_peak_bytes: int
    host_peak_bytes: int


@dataclass(frozen=True)
class HostReport:
    """The memory that a run needs on each machine that holds its devices.

    Attributes:
        limit_bytes: bytes of the machine's memory that the run may use; None if unknown.
        num_processes: number of the run's processes on one machine.
        phases: bytes of one process by phase of a run, and by what needs them.
    """

    limit_bytes: int | None
    num_processes: int
    phases: dict[str, dict[str, int]]

    @property
    def peak_phase(self) -> str:
        """The phase that needs the most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def process_peak_bytes(self) -> int:
        """Bytes that a process needs in that phase."""
        return sum(self.phases[self.peak_phase].values())

    @property
    def peak_bytes(self) -> int:
        """Bytes that the machine needs in that phase, for all processes."""
        return self.num_processes * self.process_peak_bytes

    @property
    def fits(self) -> bool:
        """True if the machine has that memory, or if the limit is unknown."""
        return self.limit_bytes is None or self.peak_bytes <= self.limit_bytes


@dataclass(frozen=True)
class LargestBuffer:
    """Buffers with the same name, group and shape that are alive at the peak.

    Attributes:
        name: path or scope of the array.
        group: key of the breakdown that it counts toward.
        shape: dtype and dimensions as text; "" if unknown.
        count: number of buffers.
        bytes: their total bytes, per device.
    """

    name: str
    group: str
    shape: str
    count: int
    bytes: int


@dataclass(frozen=True)
class ZeroGradient:
    """A parameter whose gradient is zero for all data.

    Attributes:
        path: path of the parameter.
        bytes: its bytes per device.
    """

    path: str
    bytes: int


@dataclass(frozen=True)
class Suggestion:
    """Settings that fit where the config does not.

    Attributes:
        setting: the settings in command-line syntax.
        device_peak_bytes: bytes of device memory that they need, per device.
        compiled: the compiler reported the bytes; otherwise they are estimated.
        host_process_bytes: bytes of offloaded arrays that each process holds, estimated.
    """

    setting: str
    device_peak_bytes: int
    compiled: bool
    host_process_bytes: int = 0


@dataclass(frozen=True)
class BatchReport:
    """The batch that a plan is for. For a model of other items than tokens, such as images, these count as tokens.

    Attributes:
        rows_per_step: rows (sequences or images) in a step on all devices: `data.global_batch_size`.
        tokens_per_row: tokens in a row: `data.seq_len`.
        tokens_per_step: tokens in a step on all devices.
        accumulate: number of microbatches in a step: `learner.accumulate`.
        rows_per_device: rows in a step on one device. Devices that share rows, along the axes seq, model and pipe, have
            the same rows.
        tokens_per_device: tokens in a step on one device; devices along seq share the tokens of a row.
    """

    rows_per_step: int
    tokens_per_row: int
    tokens_per_step: int
    accumulate: int
    rows_per_device: int
    tokens_per_device: int

    @classmethod
    def make(
        cls, rows: int, tokens_per_row: int, accumulate: int, *, row_shards: int, token_shards: int
    ) -> BatchReport:
        """Return the batch of a mesh.

        Args:
            rows: rows in a step on all devices.
            tokens_per_row: tokens in a row.
            accumulate: number of microbatches in a step.
            row_shards: number of shards of the rows.
            token_shards: number of shards of each row's tokens.
        """
        rows_per_device = rows // row_shards
        return cls(
            rows_per_step=rows,
            tokens_per_row=tokens_per_row,
            tokens_per_step=rows * tokens_per_row,
            accumulate=accumulate,
            rows_per_device=rows_per_device,
            tokens_per_device=rows_per_device * tokens_per_row // token_shards,
        )


@dataclass(frozen=True)
class EstimateReport:
    """The analytical estimate of a step's memory.

    Attributes:
        device_peak_bytes: bytes of device memory at the peak, per device.
        breakdown: these bytes by group.
        error: relative error of the estimate: estimated / compiled - 1; None if nothing was compiled.
    """

    device_peak_bytes: int
    breakdown: dict[str, int]
    error: float | None


@dataclass(frozen=True)
class TimeReport:
    """The estimated time of a step.

    Attributes:
        seconds: seconds of the whole step.
        tokens_per_second: tokens per second on all devices; None for a function, which has no tokens.
        model_flops_utilization: the model's FLOP/s as a fraction of the peak (MFU); None if the peak is unknown.
        bound_by: name of the largest part.
        parts: seconds by name of what bounds them.
        basis: a sentence that describes the method of the estimate and its reliability.
        lanes: for a compiled step on an accelerator: the share of each interval of the step during which the cores
            ("computation"), the links to other devices ("collectives"), and the link "to host" and "from host" are
            busy.
    """

    seconds: float
    tokens_per_second: float | None
    model_flops_utilization: float | None
    bound_by: str
    parts: dict[str, float]
    basis: str
    lanes: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The memory, work and time of one step on a target. Bytes are per device unless an attribute says otherwise.

    Attributes:
        config: name of the config, or of the user's function.
        subject: name of the user's function; "" for a config.
        settings: settings of the command line as `path=value`, and lines about the rules that apply.
        target: name of the machine, as the user wrote it.
        accelerator: name of the kind of device.
        platform: tpu, gpu or cpu.
        devices: number of devices.
        processes: number of hosts.
        mesh: {mesh axis: size}.
        mesh_across: {mesh axis: number of slices that it spans}, for the axes that span several.
        device_limit_bytes: memory of each device that programs may use; None if unknown.
        device_reserved: {part: bytes} of each device's memory that programs cannot use; {} if unknown.
        device_memory_fraction: XLA_CLIENT_MEM_FRACTION that gives programs the limit; None if there is nothing to set.
        host_limit_bytes: memory of each process's host; None if unknown.
        versions: {package: version} of the compiler.
        item: what `tokens_per_step` counts, in the singular.
        tokens_per_step: tokens (or other items) in a step on all devices; None for a function.
        batch: the batch of a step; None for a function.
        in_effect: {config path: value} of the settings that memory depends on most; empty for a function.
        estimated: the report is an analytical estimate, and nothing was compiled.
        compilable: the step of this config could be compiled; not stored.
        fits: the memory of all phases is within the limits of the device and of its host.
        device_peak_bytes: bytes alive at the peak of the step.
        device_allocated_bytes: the peak including the gaps that packing leaves empty.
        device_argument_bytes: bytes of the step's arguments in device memory.
        device_output_bytes: bytes of its results in device memory.
        device_alias_bytes: bytes of results that reuse an argument's memory.
        device_temp_bytes: bytes of its temporaries.
        breakdown: bytes at the peak by group, see BREAKDOWN_KEYS; for a function, by argument.
        host_argument_bytes: bytes of the state in host memory; None for a function.
        host_peak_bytes: bytes in host memory at the peak.
        host_process_bytes: bytes in host memory at the peak for all devices of one process.
        host: everything that the machine's memory has to hold, by phase; None for a function.
        host_breakdown: bytes in host memory by group.
        largest: the largest buffers at the peak, largest first.
        phases: peaks by phase of a run, in the order of a run.
        flops_per_step: matrix-product FLOPs of a step on all devices, including recomputation.
        flops_per_token: these FLOPs per token; None for a function.
        model_flops_per_token: FLOPs per token that the model needs, excluding recomputation; None for a function.
        collective_bytes: bytes that a device exchanges with others in a step, by kind of collective.
        host_transfer_bytes: bytes moved between device and host in a step, in both directions.
        time: estimated time of a step; None if the rates of the target are unknown.
        estimate: analytical estimate of the memory; None for a function.
        compile_seconds: time that the compiler took, in seconds.
        message: the compiler's error message, if it refused a program.
        notes: facts that the user should know, one sentence each.
        zero_gradients: parameters that are never trained.
        suggestions: settings that fit, cheapest first, if the config does not.
        smaller_batch: settings with a smaller batch that fit, if the config and all suggestions do not. They change the
            training.
    """

    config: str
    subject: str = ""
    settings: list[str] = field(default_factory=list)
    target: str
    accelerator: str
    platform: str
    devices: int
    processes: int
    mesh: dict[str, int]
    mesh_across: dict[str, int]
    device_limit_bytes: int | None
    device_reserved: dict[str, int] = field(default_factory=dict)
    device_memory_fraction: float | None = None
    host_limit_bytes: int | None
    versions: dict[str, str]
    item: str = "item"
    tokens_per_step: int | None = None
    batch: BatchReport | None = None
    in_effect: dict[str, Any] = field(default_factory=dict)
    estimated: bool = False
    compilable: bool = True
    fits: bool = True
    device_peak_bytes: int = 0
    device_allocated_bytes: int = 0
    device_argument_bytes: int = 0
    device_output_bytes: int = 0
    device_alias_bytes: int = 0
    device_temp_bytes: int = 0
    breakdown: dict[str, int] = field(default_factory=dict)
    host_argument_bytes: int | None = None
    host_peak_bytes: int = 0
    host_process_bytes: int = 0
    host: HostReport | None = None
    host_breakdown: dict[str, int] = field(default_factory=dict)
    largest: list[LargestBuffer] = field(default_factory=list)
    phases: dict[str, PhaseReport] = field(default_factory=dict)
    flops_per_step: float = 0
    flops_per_token: float | None = None
    model_flops_per_token: float | None = None
    collective_bytes: dict[str, int] = field(default_factory=dict)
    host_transfer_bytes: int = 0
    time: TimeReport | None = None
    estimate: EstimateReport | None = None
    compile_seconds: float = 0.0
    message: str = ""
    notes: list[str] = field(default_factory=list)
    zero_gradients: list[ZeroGradient] = field(default_factory=list)
    suggestions: list[Suggestion] = field(default_factory=list)
    smaller_batch: Suggestion | None = None

    @property
    def needed_bytes(self) -> int:
        """The bytes of device memory, per device, of the phase that needs the most."""
        return max([self.device_allocated_bytes, *(phase.device_peak_bytes for phase in self.phases.values())])

    def to_json(self) -> dict[str, Any]:
        """Return the report as `plimsoll plan --json` writes it."""
        keys = _ESTIMATED_KEYS if self.estimated else _COMPILED_KEYS
        if self.subject:
            keys = _FUNCTION_KEYS
        content = asdict(self)
        if self.host is not None:
            content["host"] |= {"peak_phase": self.host.peak_phase, "peak_bytes": self.host.peak_bytes}
        return {"schema_version": SCHEMA_VERSION} | {key: content[key] for key in keys}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PlanReport:
        """Return the report that `to_json` wrote; it may lack keys that have a default."""
        fields = dict(content)
        fields.pop("schema_version", None)
        if fields.get("time"):
            fields["time"] = TimeReport(**fields["time"])
        if fields.get("estimate"):
            fields["estimate"] = EstimateReport(**fields["estimate"])
        if fields.get("batch"):
            fields["batch"] = BatchReport(**fields["batch"])
        if fields.get("smaller_batch"):
            fields["smaller_batch"] = Suggestion(**fields["smaller_batch"])
        if fields.get("host"):
            host = fields["host"]
            fields["host"] = HostReport(host["limit_bytes"], host["num_processes"], host["phases"])
        fields["phases"] = {name: PhaseReport(**peaks) for name, peaks in fields.get("phases", {}).items()}
        records = (("largest", LargestBuffer), ("zero_gradients", ZeroGradient), ("suggestions", Suggestion))
        for key, record in records:
            fields[key] = [record(**entry) for entry in fields.get(key, [])]
        return cls(**fields)
