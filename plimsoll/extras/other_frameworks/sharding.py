"""How Hugging Face runs divide the state: DeepSpeed JSON, accelerate YAML, and FSDP settings of trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from plimsoll.extras.other_frameworks.foreign_run import ForeignConfigError, ForeignMesh, StoredBytes
from plimsoll.extras.other_frameworks.settings import Settings

Kind = Literal["ddp", "zero0", "zero1", "zero2", "zero3", "fsdp", "fsdp gradients"]
_AUTO = "auto"
# DeepSpeed's defaults, in elements.
_BUCKET = 500_000_000
_LIVE_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class Sharding:
    """How the state of a run is divided over its data-parallel devices.

    Attributes:
        kind: what is sharded: ddp nothing; zero1 the optimizer state; zero2 gradients too; zero3 and fsdp weights too;
            "fsdp gradients" keeps the weights gathered between the forward and the backward pass.
        devices: number of devices, if the file states it.
        replicas: groups with all of the state (HSDP); 1 if there is only one.
        offloaded: fields of our `memory` section whose arrays are in host memory.
        half: the engine has half-precision weights with float32 masters.
        bucket: elements of a bucket of gradients; 0 if there is none, None if it is a width squared ("auto").
        has_two_buckets: communication overlaps with the next bucket.
        live_parameters: weights that ZeRO-3 keeps gathered at most.
        rows: devices that share a row.
        tensors: tensor-parallel devices.
        micro_rows, accumulate: rows of a device, and microbatches, if the file states them.
        remat: our policy, if the file states it; "" otherwise.
        is_fsdp1: FSDP in its first version, whose communication is in the computation's dtype.
        notes: sentences about what is approximated.
    """

    kind: Kind = "ddp"
    devices: int | None = None
    replicas: int = 1
    offloaded: tuple[str, ...] = ()
    half: bool | None = None
    bucket: int | None = 0
    has_two_buckets: bool = False
    live_parameters: int = 0
    rows: int = 1
    tensors: int = 1
    micro_rows: int | None = None
    accumulate: int | None = None
    remat: str = ""
    is_fsdp1: bool = True
    notes: tuple[str, ...] = ()


def is_deepspeed(values: Mapping[str, Any]) -> bool:
    """Return whether the names of a JSON file are those of DeepSpeed."""
    own = (
        "zero_optimization",
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "gradient_clipping",
        "zero_allow_untested_optimizer",
    )
    return any(name in values for name in own)


def is_accelerate(values: Mapping[str, Any]) -> bool:
    """Return whether the names of a YAML file are those of accelerate."""
    return "distributed_type" in values or "compute_environment" in values


def read_deepspeed(values: Mapping[str, Any], source: str) -> Sharding:
    """Read a DeepSpeed JSON file.

    Raises:
        ForeignConfigError: a value is invalid.
    """
    settings = Settings(values, source, "")
    zero = Settings(settings.section("zero_optimization"), source, "")
    stage = zero.raw("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ForeignConfigError(f"{source}: zero_optimization.stage = {stage!r}; expected 0, 1, 2 or 3")
    notes = []
    offloaded: dict[str, None] = {}
    for name, fields in (("offload_optimizer", ("gradients", "optimizer_state")), ("offload_param", ("parameters",))):
        section = zero.section(name)
        device = str(section.get("device", "none")).lower()
        if device in ("cpu", "nvme"):
            offloaded |= dict.fromkeys(fields)
        if device == "nvme":
            notes.append(f"{name} to nvme: counted as in host memory")
        if section.get("ratio", 1) != 1:
            notes.append(f"{name}.ratio = {section['ratio']}: counted as all in host memory")
    if zero.raw("cpu_offload"):
        offloaded |= dict.fromkeys(("gradients", "optimizer_state"))
    has_auto_bucket = zero.raw("reduce_bucket_size") == _AUTO
    bucket = None if has_auto_bucket else zero.integer("reduce_bucket_size", _BUCKET)
    live_name = "stage3_max_live_parameters" if "stage3_max_live_parameters" in zero else "max_live_parameters"
    live = _LIVE_PARAMETERS if zero.raw(live_name) == _AUTO else zero.integer(live_name, _LIVE_PARAMETERS)
    half = None
    for name in ("bf16", "bfloat16", "fp16"):
        enabled = settings.section(name).get("enabled")
        if enabled is True or enabled == "true":
            half = True
        elif enabled is False and half is None:
            half = False
    if "1bit" in str(settings.section("optimizer").get("type", "")).lower().replace("onebit", "1bit"):
        notes.append("a 1-bit optimizer has one more buffer for each moment: not counted")
    micro = values.get("train_micro_batch_size_per_gpu")
    accumulate = values.get("gradient_accumulation_steps")
    if settings.section("activation_checkpointing").get("cpu_checkpointing"):
        notes.append("activation_checkpointing.cpu_checkpointing: saved inputs of layers are counted in device memory")
    return Sharding(
        kind=("zero0", "zero1", "zero2", "zero3")[stage],
        offloaded=tuple(offloaded),
        half=half,
        bucket=bucket if stage else 0,
        has_two_buckets=bool(zero.raw("overlap_comm", stage == 3)),
        live_parameters=live if stage == 3 else 0,
        micro_rows=micro if isinstance(micro, int) else None,
        accumulate=accumulate if isinstance(accumulate, int) else None,
        notes=tuple(notes),
    )


def read_accelerate(values: Mapping[str, Any], source: str) -> Sharding:
    """Read an accelerate YAML file.

    Raises:
        ForeignConfigError: a value is invalid.
    """
    kind = str(values.get("distributed_type", "NO")).upper()
    devices = values.get("num_processes")
    precision = str(values.get("mixed_precision", "no")).lower()
    half = precision in ("bf16", "fp16", "fp8")
    settings = Settings(values, source, "")
    parallel = Settings(settings.section("parallelism_config"), source, "")
    sizes = {name: parallel.positive(f"parallelism_config_{name}_size", 1) for name in ("cp", "sp", "tp")}
    rows = max(sizes["cp"], sizes["sp"])
    tensors = sizes["tp"]
    replicas = parallel.positive("parallelism_config_dp_replicate_size", 1)
    common = {
        "devices": devices if isinstance(devices, int) else None,
        "rows": rows,
        "tensors": tensors,
        "replicas": replicas,
    }
    if kind == "DEEPSPEED":
        section = settings.section("deepspeed_config")
        if "deepspeed_config_file" in section:
            raise ForeignConfigError(
                f"{source}: deepspeed_config_file names {section['deepspeed_config_file']}; give that file too"
            )
        zero = {"stage": section.get("zero_stage", 2)}
        for name in ("optimizer", "param"):
            device = section.get(f"offload_{name}_device")
            if device not in (None, "none"):
                zero[f"offload_{name}"] = {"device": device}
        # Trainers set the bucket by the width of the model.
        zero["reduce_bucket_size"] = _AUTO
        read = read_deepspeed({"zero_optimization": zero, "bf16": {"enabled": half or None}}, source)
        accumulate = section.get("gradient_accumulation_steps")
        return replace(read, accumulate=accumulate if isinstance(accumulate, int) else None, **common)
    if kind == "FSDP":
        read = read_fsdp(settings.section("fsdp_config"), source)
        return replace(read, half=half, **common)
    if kind in ("NO", "MULTI_GPU"):
        return Sharding(kind="ddp", half=None, **common)
    raise ForeignConfigError(f"{source}: distributed_type = {kind!r}; read are NO, MULTI_GPU, FSDP and DEEPSPEED")


def read_fsdp(section: Mapping[str, Any], source: str, words: str = "") -> Sharding:
    """Read the FSDP settings of accelerate, of the Trainer or of axolotl.

    Args:
        section: {name, with or without fsdp_: value}.
        source: name of the file.
        words: the Trainer's `fsdp`, such as "full_shard auto_wrap offload".

    Raises:
        ForeignConfigError: the sharding strategy is unknown.
    """
    plain = {str(name).removeprefix("fsdp_"): value for name, value in section.items()}
    strategy = str(plain.get("sharding_strategy", plain.get("reshard_after_forward", "FULL_SHARD"))).upper()
    for word in ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard"):
        if word in words:
            strategy = word.upper()
    # Earlier versions number the strategies.
    strategy = {
        "1": "FULL_SHARD",
        "2": "SHARD_GRAD_OP",
        "3": "NO_SHARD",
        "4": "HYBRID_SHARD",
        "TRUE": "FULL_SHARD",
    }.get(strategy, strategy)
    strategy = "SHARD_GRAD_OP" if strategy == "FALSE" else strategy
    notes = []
    kind: Kind = "fsdp"
    if strategy == "SHARD_GRAD_OP":
        kind = "fsdp gradients"
    elif strategy == "NO_SHARD":
        kind = "ddp"
    elif strategy in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2"):
        notes.append(f"{strategy}: shards within a host and copies between hosts; counted as sharded over all devices")
    elif strategy != "FULL_SHARD":
        raise ForeignConfigError(
            f"{source}: fsdp sharding strategy {strategy!r}; expected FULL_SHARD, SHARD_GRAD_OP, ..."
        )
    offloads = str(plain.get("offload_params", plain.get("cpu_offload", False))).lower() == "true" or "offload" in words
    remat = "full" if str(plain.get("activation_checkpointing", False)).lower() == "true" else ""
    version = str(plain.get("version", "1"))
    return Sharding(
        kind=kind,
        offloaded=("parameters", "gradients", "optimizer_state") if offloads else (),
        remat=remat,
        is_fsdp1=version != "2",
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class Divided:
    """What follows from a sharding: the mesh, the stored bytes, the dtypes, what is offloaded, and notes."""

    mesh: ForeignMesh
    stored: StoredBytes | None
    precision: str
    offloaded: tuple[str, ...]
    notes: list[str]


def divide(
    sharding: Sharding,
    *,
    source: str,
    devices: int,
    accumulate: int,
    is_full: bool,
    weights: str,
    half: bool,
    has_our_state: bool,
    width: int | None = None,
) -> Divided:
    """Return what each device stores.

    Args:
        sharding: how the state is divided.
        source: name of the file.
        devices: number of devices.
        accumulate: microbatches per update.
        is_full: all weights are trained.
        weights: dtype of the model's weights when it is loaded: float32, bfloat16 or float16.
        half: computation is in bfloat16 or float16.
        has_our_state: the optimizer is not AdamW with full moments, so that its state is counted by our optimizer.
        width: width of the model, for buckets whose size is "auto"; None if it is not known.

    Raises:
        ForeignConfigError: sizes do not divide the number of devices.
    """
    notes = list(sharding.notes)
    shared_rows = sharding.rows * sharding.tensors
    if devices % (shared_rows * sharding.replicas):
        raise ForeignConfigError(
            f"{source}: {sharding.rows} x {sharding.tensors} x {sharding.replicas} devices for rows, tensors, replicas "
            f"do not divide {devices} devices"
        )
    data = devices // shared_rows
    is_deepspeed = sharding.kind.startswith("zero")
    weight_bytes = 2 if weights != "float32" else 4
    if is_deepspeed:
        is_half = half if sharding.half is None else sharding.half
        precision = "bfloat16, float32 master" if is_half else "float32"
        parameter = 2 if is_half else 4
        gradient: float = parameter
        state: float = 12 if is_half else 8
    elif sharding.kind.startswith("fsdp") and (half or sharding.half):
        # Mixed precision keeps the sharded weights in float32.
        precision, parameter, gradient, state = "float32 weights, bfloat16 products", 4, 4, 8
    elif weight_bytes == 2:
        precision, parameter, gradient, state = "all bfloat16", 2, 2, 4
    else:
        precision = "float32 weights, bfloat16 products" if half else "float32"
        parameter, gradient, state = 4, 4, 8
    if not is_full:
        # The frozen weights have the dtype in which they are loaded, adapters their own.
        precision = "float32" if weight_bytes == 4 and not half else "bfloat16, float32 master"
    shards = data // sharding.replicas
    kind = sharding.kind
    is_sharded = kind in ("zero3", "fsdp", "fsdp gradients")
    # With state in host memory, each device has its shard there.
    keeps_shards = is_sharded or bool(sharding.offloaded)
    mesh = ForeignMesh(
        replicas=sharding.replicas if keeps_shards else data,
        shards=shards if keeps_shards else 1,
        tensors=sharding.tensors,
        rows=sharding.rows,
    )
    if not is_full:
        if kind == "zero2" and devices > 1:
            notes.append(
                "ZeRO-2: state and gradients of the adapters are sharded, frozen weights are not: counted as copies"
            )
        if keeps_shards and not is_sharded:
            mesh = ForeignMesh(replicas=data, tensors=sharding.tensors, rows=sharding.rows)
        return Divided(mesh, None, precision, sharding.offloaded, notes)
    all_shards = shards * sharding.rows
    parameter_shards = all_shards if kind in ("zero3", "fsdp") else 1
    gradient_shards = all_shards if kind in ("zero2", "zero3", "fsdp", "fsdp gradients") else 1
    state_shards = all_shards if kind not in ("ddp", "zero0") else 1
    buffers = 0
    stored_parameter: float = parameter
    keeps = accumulate > 1
    if kind == "ddp":
        if devices > 1:
            stored_parameter += gradient
            notes.append(f"DDP: buckets with a copy of all gradients are counted, {gradient:g} bytes per parameter")
        if parameter == 4 and half:
            stored_parameter += 2
            notes.append(
                "autocast keeps bfloat16 copies of float32 weights during a pass: counted, 2 bytes per parameter"
            )
    if kind == "fsdp gradients":
        stored_parameter = 2 + parameter / all_shards
        notes.append(
            "weights stay gathered until the backward pass (SHARD_GRAD_OP): counted in 16 bits, next to the shards"
        )
    if kind.startswith("fsdp") and accumulate > 1:
        gradient, gradient_shards = 2 if half else weight_bytes, 1
        notes.append(
            "FSDP with gradient accumulation sums gradients unsharded (no_sync): counted as a whole copy on each device"
        )
    if kind in ("zero1", "zero2", "zero3"):
        bucket = sharding.bucket if sharding.bucket is not None else (width or 0) ** 2
        buffers = 2 * bucket * (2 if sharding.has_two_buckets else 1)
        what = {
            "zero1": "ZeRO-1: optimizer state is sharded, gradients and weights are not",
            "zero2": "ZeRO-2: gradients and optimizer state are sharded, weights are not",
            "zero3": "ZeRO-3: weights, gradients and optimizer state are sharded",
        }[kind]
        notes.append(f"{what}: counted so, with {buffers / 2**30:.2f} GiB of buckets")
    if kind == "zero3":
        notes.append(
            f"ZeRO-3 keeps up to {sharding.live_parameters / 1e9:g} billion weights gathered "
            "(stage3_max_live_parameters): counted as gathered"
        )
    stored = StoredBytes(
        parameter=stored_parameter,
        gradient=gradient,
        state=None if has_our_state else state,
        parameter_shards=parameter_shards,
        gradient_shards=gradient_shards,
        state_shards=state_shards,
        keeps_gradients=keeps,
        update=4 if is_deepspeed and not sharding.offloaded else 0,
        buffers=buffers,
        unsharded=sharding.live_parameters if is_sharded else 0,
    )
    return Divided(mesh, stored, precision, sharding.offloaded, notes)
