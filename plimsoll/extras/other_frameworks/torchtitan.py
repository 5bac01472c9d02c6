"""torchtitan: TOML job configs, and overrides such as --training.local_batch_size=4."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from plimsoll.extras.other_frameworks.foreign_run import (
    ForeignConfigError,
    ForeignMesh,
    ForeignModel,
    ForeignRun,
    StoredBytes,
)
from plimsoll.extras.other_frameworks.mapping import REMAT
from plimsoll.extras.other_frameworks.models import find_flavor, list_flavors
from plimsoll.extras.other_frameworks.settings import Settings

NAME = "torchtitan"
# Sections and fields that change neither the memory nor the time of a step.
_SKIPPED = (
    r"(job|profiling|metrics|lr_scheduler|checkpoint|comm|experimental|validation|debug|fault_tolerance"
    r"|memory_estimation|dataloader)\..*|model\.(hf_assets_path|tokenizer_path|print_after_conversion|norm_type)"
    r"|optimizer\.(lr|eps|weight_decay|beta1|beta2|fused|foreach|implementation)"
    r"|training\.(dataset.*|max_norm|steps|warmup_steps|gc_.*|dataloader.*|seed|deterministic|data_parallel_type)"
    r"|parallelism\.(enable_async_tensor_parallel|enable_compiled_autograd|context_parallel_(rotate|load).*"
    r"|pipeline_parallel_(schedule|schedule_csv|split_points|expert.*)|expert_parallel_comm_backend|module_fqns.*)"
    r"|activation_checkpoint\.(per_op.*|early_stop|visualize.*|preserve_rng_state|determinism_check|debug)"
    r"|compile\.(backend|.*graph.*)|quantize\.grouped_mm\.(float8|mx)\.fqns|quantize\..*\.(filter_fqns|emulate|enable_fsdp_float8_all_gather|precompute.*)"
    r"|(float8|mx)\.(filter_fqns|emulate|enable_fsdp.*|precompute.*|force_recompute.*)|float8\.recipe_name|mx\.recipe_name"
)
# Names of the fields of earlier versions: name -> today's.
_OLD_NAMES = {
    "training.batch_size": "training.local_batch_size",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.compile": "compile.enable",
    "training.enable_float8_linear": "model.enable_float8_linear",
    "float8.enable_float8_linear": "model.enable_float8_linear",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatches",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
}
_SUFFIXES = re.compile(r"_(flex|varlen|flex_attn|varlen_attn|irope)(_attn)?$")


def is_config(values: Mapping[str, Any]) -> bool:
    """Return whether the sections of a TOML file are those of torchtitan."""
    model = values.get("model")
    return isinstance(model, dict) and "flavor" in model and ("training" in values or "parallelism" in values)


def read(values: Mapping[str, Any], source: str, devices: int | None) -> ForeignRun:
    """Read a run from a job config.

    Args:
        values: {"section.field": value}.
        source: name of the file.
        devices: number of devices of the target; None takes the least that the parallel sizes allow.

    Raises:
        ForeignConfigError: a field is missing, or has an invalid value.
    """
    settings = Settings({_OLD_NAMES.get(name, name): value for name, value in values.items()}, source, _SKIPPED)
    model = _read_model(settings)
    tensors = settings.positive("parallelism.tensor_parallel_degree", 1)
    stages = settings.positive("parallelism.pipeline_parallel_degree", 1)
    rows_shared = settings.positive("parallelism.context_parallel_degree", 1)
    replicas = settings.positive("parallelism.data_parallel_replicate_degree", 1)
    given_shards = settings.integer("parallelism.data_parallel_shard_degree", -1)
    experts = settings.positive("parallelism.expert_parallel_degree", 1)
    least = tensors * stages * rows_shared * replicas
    total = devices
    if total is None:
        total = least * (given_shards if given_shards > 0 else experts)
    shards = given_shards if given_shards > 0 else total // least
    if least * shards != total:
        raise ForeignConfigError(
            f"{source}: replicas {replicas} x shards {shards} x context {rows_shared} x tensors {tensors} x stages "
            f"{stages} = {least * max(shards, 1)}, but there are {total} devices; expected a target with that many"
        )
    if experts > 1 and (shards * rows_shared * tensors) % experts:
        raise ForeignConfigError(
            f"{source}: parallelism.expert_parallel_degree = {experts} does not divide {shards} shards"
        )
    if experts > 1 and shards % experts:
        settings.note(f"experts over {experts} devices with those of tensors: counted as over {shards}")
        experts = shards
    if settings.positive("parallelism.expert_tensor_parallel_degree", 1) > 1:
        settings.note("parallelism.expert_tensor_parallel_degree: counted as experts divided like the other tensors")
    rows = settings.positive("training.local_batch_size", 8)
    groups = replicas * shards
    batch = settings.integer("training.global_batch_size", -1)
    if batch > 0 and batch % (rows * groups):
        raise settings.error("training.global_batch_size", f"= {batch} is no multiple of {rows} rows x {groups} groups")
    accumulate = 1 if batch < 1 else batch // (rows * groups)
    chunks = 1
    micro_rows = rows
    if stages > 1:
        micro_rows = settings.positive("parallelism.pipeline_parallel_microbatch_size", 1)
        if "parallelism.pipeline_parallel_microbatches" in settings:
            micro_rows = max(1, rows // settings.positive("parallelism.pipeline_parallel_microbatches"))
        if rows % micro_rows:
            raise settings.error("parallelism.pipeline_parallel_microbatch_size", f"does not divide {rows} rows")
        accumulate *= rows // micro_rows
        chunks = _read_chunks(settings)
    is_bfloat16 = settings.text("training.dtype", "float32") == "bfloat16"
    settings.raw("training.mixed_precision_reduce")
    compute = settings.text("training.mixed_precision_param", "bfloat16")
    precision = "all bfloat16" if is_bfloat16 else "float32 weights, bfloat16 products"
    if compute == "float32" and not is_bfloat16:
        precision = "float32"
    stored = _read_stored(settings, is_bfloat16, shards * rows_shared, tensors, stages, accumulate)
    offloaded: tuple[str, ...] = ()
    if settings.flag("training.enable_cpu_offload"):
        offloaded = ("parameters", "gradients", "optimizer_state")
        stored = None
    overrides: dict[str, str] = {}
    if settings.flag("optimizer.early_step_in_backward"):
        overrides |= {"memory.update": "in_backward", "learner.clip": "none"}
        stored = None
    if settings.flag("parallelism.disable_loss_parallel") and tensors > 1:
        settings.note("parallelism.disable_loss_parallel: theirs gathers all logits on each device, ours divides them")
    return ForeignRun(
        framework=NAME,
        model=model,
        mesh=ForeignMesh(replicas, shards // experts, tensors, rows_shared, stages, chunks, experts),
        seq_len=settings.positive("training.seq_len", 2048),
        rows=micro_rows,
        accumulate=accumulate,
        remat=_read_remat(settings),
        precision=precision,
        optimizer=_read_optimizer(settings),
        stored=stored,
        offloaded=offloaded,
        logit_bytes=_count_logit_bytes(settings),
        low_precision=_read_low_precision(settings),
        overrides=overrides,
        read=settings.read,
        skipped=settings.skipped,
        unknown=settings.unknown,
        notes=tuple(settings.notes),
    )


def _read_model(settings: Settings) -> ForeignModel:
    family = settings.text("model.name", "llama3").lower()
    flavor = settings.text("model.flavor", "debugmodel")
    plain = _SUFFIXES.sub("", flavor)
    if plain != flavor:
        settings.note(f"model.flavor = {flavor!r}: its masks are counted as attention to all earlier tokens")
    family = re.sub(r"_ft$", "", family)
    hub_id, shape = find_flavor("torchtitan", family, plain)
    if hub_id is None and shape is None:
        known = ", ".join(name for name in list_flavors("torchtitan") if name.startswith(f"{family} "))
        raise settings.error("model.flavor", f"= {flavor!r} of {family!r} is not known here; known: {known or 'none'}")
    return ForeignModel(f"{family} {flavor}", hub_id=hub_id, shape=shape)


def _read_chunks(settings: Settings) -> int:
    schedule = settings.text("parallelism.pipeline_parallel_schedule", "1F1B")
    if "interleaved" in schedule.lower():
        # torchtitan's default: two stages per device.
        return 2
    if schedule.lower() not in ("1f1b", "gpipe"):
        settings.note(f"parallelism.pipeline_parallel_schedule = {schedule!r}: counted as 1F1B")
    if schedule.lower() == "gpipe":
        settings.note("GPipe keeps the activations of all microbatches: counted as 1F1B, which keeps fewer")
    settings.mark_read(
        [
            "parallelism.pipeline_parallel_layers_per_stage",
            "parallelism.pipeline_parallel_first_stage_less_layers",
            "parallelism.pipeline_parallel_last_stage_less_layers",
        ]
    )
    return 1


def _read_stored(
    settings: Settings, is_bfloat16: bool, shards: int, tensors: int, stages: int, accumulate: int
) -> StoredBytes | None:
    """Return what is stored, if other than by our program."""
    reshard = settings.text("parallelism.fsdp_reshard_after_forward", "default")
    stays = reshard == "never" or (reshard == "default" and stages > 1)
    if not stays and stages == 1 and tensors == 1 and accumulate == 1:
        return None
    width = 2 if is_bfloat16 else 4
    if stays and shards > 1:
        settings.note("weights stay gathered after the forward pass (fsdp_reshard_after_forward): counted, in bfloat16")
    return StoredBytes(
        # A sharded copy, and the gathered weights.
        parameter=width / shards + 2 if stays and shards > 1 else width,
        gradient=width,
        state=2 * width,
        parameter_shards=1 if stays and shards > 1 else shards,
        gradient_shards=shards,
        state_shards=shards,
        keeps_gradients=accumulate > 1,
        # Sequence parallelism is a part of its tensor parallelism.
        divides_inputs=True,
    )


def _read_remat(settings: Settings) -> str:
    mode = settings.text("activation_checkpoint.mode", "selective")
    option = settings.text("activation_checkpoint.selective_ac_option", "2")
    settings.raw("activation_checkpoint.memory_budget")
    if mode == "full":
        return "full"
    if mode == "none":
        return "none"
    if mode == "memory_budget":
        settings.note("activation_checkpoint.mode = 'memory_budget': counted as selective, whatever the budget is")
        return REMAT["selective (torchtitan)"]
    if mode != "selective":
        raise settings.error("activation_checkpoint.mode", f"= {mode!r}; expected none, selective or full")
    if option == "op":
        return REMAT["selective (torchtitan)"]
    if not option.isdecimal() or int(option) < 1:
        raise settings.error("activation_checkpoint.selective_ac_option", f"= {option!r}; expected op or a number")
    if int(option) == 1:
        return "full"
    settings.note(
        f"one of every {option} layers is recomputed: counted as products saved in all layers, which has similar bytes"
    )
    return REMAT["selective (torchtitan)"]


def _count_logit_bytes(settings: Settings) -> float:
    """Return the bytes per logit of the loss: compiled, it has no float32 copies."""
    parts = settings.raw("compile.components", ["model", "loss"])
    if settings.flag("compile.enable") and "loss" in parts:
        # Logits and their gradient in 16 bits, and one of them in float32.
        return 8
    # Logits and their gradient in 16 bits, log-softmax and its gradient in float32.
    return 12


def _read_optimizer(settings: Settings) -> str:
    name = settings.text("optimizer.name", "AdamW")
    if name in ("AdamW", "Adam"):
        return "adamw"
    if name in ("Muon", "DistMuon"):
        return "muon"
    raise settings.error("optimizer.name", f"= {name!r}; read are Adam, AdamW and Muon")


def _read_low_precision(settings: Settings) -> str | None:
    converters = settings.raw("model.converters", [])
    names = converters if isinstance(converters, list) else [converters]
    is_float8 = any("float8" in str(name) for name in names) or settings.flag("model.enable_float8_linear")
    recipe = settings.text("quantize.linear.float8.recipe_name", settings.text("float8.recipe_name"))
    if any("mx" in str(name) for name in names):
        return "mxfp8"
    if not is_float8:
        return None
    return "fp8_row" if recipe.startswith("rowwise") else "fp8_tensor"
