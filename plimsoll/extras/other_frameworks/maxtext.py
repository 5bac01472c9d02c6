"""MaxText: scripts and YAML files on top of its base.yml, and overrides such as per_device_batch_size=4."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from plimsoll.extras.other_frameworks.foreign_run import (
    ForeignConfigError,
    ForeignMesh,
    ForeignModel,
    ForeignRun,
    ModelShape,
    StoredBytes,
)
from plimsoll.extras.other_frameworks.mapping import REMAT
from plimsoll.extras.other_frameworks.models import find_flavor, list_flavors
from plimsoll.extras.other_frameworks.settings import Settings

NAME = "MaxText"
_SKIPPED = (
    r"run_name|steps|.*_output_directory|dataset.*|tokenizer.*|enable_checkpointing|async_checkpointing|checkpoint.*"
    r"|.*profiler.*|profile.*|gcs_metrics|enable_tensorboard|enable_dropout|learning_rate.*|warmup.*|cosine.*|adam_.*"
    r"|reuse_example_batch|use_iota_embed|log_.*|eval_.*|hf_.*|grain_.*|tfds_.*|.*_dir|.*_path|base_config|scan_layers"
    r"|param_scan_axis|sa_.*|fused_.*|allow_split_physical_axes|rope_.*|normalization_layer_epsilon|dropout.*|steps"
    r"|gradient_clipping_threshold|data_shuffle_seed|init_weights_seed|stack_.*|jax_.*|libtpu.*|xla_.*|compiled_.*"
    r"|monitor_.*|goodput.*|enable_goodput.*|report_.*|metrics_.*|collect_.*|enable_single.*|load_.*|save_.*|force_.*"
    r"|max_segments_per_seq|use_vertex.*|vertex.*|num_epoch|packing|prompt.*|autoregressive.*|decode_.*|prefill_.*"
    r"|inference.*|cost_estimate.*|megablox|sparse_matmul|tile_.*|w[io]_tile.*|router_.*|load_balance_loss.*|logits_dot.*"
    r"|cast_logits.*|float32_.*|z_loss.*|use_post_.*|final_logits.*|attn_logits.*|sliding_window_size|chunk_attn.*"
    r"|use_qk_norm|qk_.*|nope_.*|interleave_moe.*|hardware|.*_axis_rules|logical.*|mesh_axes|data_sharding|context_.*"
    r"|skip_.*|num_slices|internal_.*|enable_data.*|dump_.*|hlo_.*|upload.*|tensors_on_device|optimize_mesh.*|model_call.*"
    r"|quantize_kvcache|kv_quant.*|shard_mode|custom_mesh.*|norm_topk_prob|routed_.*|n_routing.*|topk_routing.*|mscale.*"
    r"|normalize_embedding_logits|enable_nnx|pure_nnx.*|use_ragged.*|ragged_.*|muon_.*|opt_.*beta.*|vision.*|image.*"
)
_AXES = {"data": "replicas", "fsdp": "shards", "fsdp_transpose": "shards", "tensor": "tensors", "expert": "experts"}
# quantization -> our recipe.
_QUANTIZATION = {"int8": "int8_row", "fp8": "fp8_tensor", "fp8_full": "fp8_tensor", "nanoo_fp8": "fp8_tensor"}
# Tensors of the custom policy -> names of our saved activations.
_TENSORS = {
    "query_proj": ("query",),
    "key_proj": ("key",),
    "value_proj": ("value",),
    "qkv_proj": ("query", "key", "value"),
    "context": ("attention",),
    "attention_out": ("output",),
    "out_proj": ("output",),
    "mlpwi": ("mlp_gate", "mlp_up"),
    "mlpwi_0": ("mlp_gate",),
    "mlpwi_1": ("mlp_up",),
    "mlpwo": ("mlp_down",),
}


def is_config(names: Mapping[str, Any]) -> bool:
    """Return whether names of settings are those of MaxText."""
    own = (
        "per_device_batch_size",
        "remat_policy",
        "base_emb_dim",
        "ici_fsdp_parallelism",
        "max_target_length",
        "base_config",
    )
    return any(name in names for name in own) and "micro_batch_size" not in names


def read(values: Mapping[str, Any], source: str, devices: int | None) -> ForeignRun:
    """Read a run from MaxText's settings.

    Args:
        values: {name: value}; names that are missing have the values of MaxText's base.yml.
        source: name of the file.
        devices: number of devices of the target; None takes the product of the parallel sizes.

    Raises:
        ForeignConfigError: a setting is missing, or has an invalid value.
    """
    settings = Settings(values, source, _SKIPPED)
    if settings.flag("use_dpo"):
        raise settings.error("use_dpo", "trains with a reference model, which is not read for MaxText")
    for name in ("teacher_overrides", "trainer_devices_fraction", "loss_algo", "decode_sampling_strategy_"):
        if settings.values.get(name):
            raise settings.error(
                name, "is of distillation or of reinforcement learning, which are not read for MaxText"
            )
    if "inference" in str(settings.values.get("base_config", "")):
        raise settings.error("base_config", "is a file for inference; expected that of a training run")
    if settings.text("attention") == "dot_product":
        settings.note(
            "attention = 'dot_product' keeps the scores of a layer; counted as a fused kernel, which needs less"
        )
    model = _read_model(settings)
    topology = settings.text("compile_topology")
    slices = max(1, settings.integer("compile_topology_num_slices", 1))
    machine = None
    if topology and "-" in topology:
        machine = topology if slices == 1 else f"{slices}x{topology}"
    mesh = _read_mesh(settings, devices, source)
    per_device = settings.number("per_device_batch_size", 12.0)
    accumulate = settings.positive("gradient_accumulation_steps", 1)
    total_rows = per_device * mesh.devices
    if mesh.rows == 1 and mesh.tensors == 1 and mesh.stages == 1 and total_rows % mesh.batch_groups:
        raise settings.error(
            "per_device_batch_size", f"= {per_device}: {total_rows:g} rows for {mesh.batch_groups} groups"
        )
    rows = total_rows / mesh.batch_groups
    if rows != int(rows):
        settings.note(f"{rows:g} rows for each group of devices: counted as {math.ceil(rows)}")
    rows = math.ceil(rows)
    if mesh.stages > 1:
        microbatches = settings.integer("num_pipeline_microbatches", -1)
        microbatches = mesh.stages if microbatches < 1 else microbatches
        if rows % microbatches:
            raise settings.error("num_pipeline_microbatches", f"= {microbatches} does not divide {rows} rows")
        accumulate *= microbatches
        rows //= microbatches
        settings.note("MaxText's pipeline keeps the inputs of all microbatches: counted as 1F1B, as our pipeline runs")
    precision = _read_precision(settings)
    optimizer = _read_optimizer(settings)
    return ForeignRun(
        framework=NAME,
        model=model,
        mesh=mesh,
        seq_len=settings.positive("max_target_length", 2048),
        rows=rows,
        accumulate=accumulate,
        remat=_read_remat(settings),
        precision=precision,
        optimizer=optimizer,
        stored=_read_stored(mesh, precision, optimizer),
        offloaded=_read_offloading(settings),
        whole_logits=settings.integer("num_vocab_tiling", 1) <= 1,
        low_precision=_read_quantization(settings),
        machine=machine,
        read=settings.read,
        skipped=settings.skipped,
        unknown=settings.unknown,
        notes=tuple(settings.notes),
    )


def _read_model(settings: Settings) -> ForeignModel:
    """Return the model by its name, or by the sizes of base.yml and of the settings."""
    name = settings.text("model_name", "default")
    own_sizes = [key for key in settings.values if key.startswith("base_") and key.endswith(("dim", "heads", "layers"))]
    if name != "default" and not settings.flag("override_model_config"):
        hub_id, shape = find_flavor("maxtext", "", name)
        if hub_id is None and shape is None:
            known = ", ".join(list_flavors("maxtext"))
            raise settings.error("model_name", f"= {name!r} is not known here; known: {known}")
        overrides = {}
        if "base_num_decoder_layers" in settings:
            overrides["model.stack.num_layers"] = str(settings.positive("base_num_decoder_layers"))
        return ForeignModel(name, hub_id=hub_id, shape=shape, overrides=overrides)
    scale = settings.number("global_parameter_scale", 1)
    widths = _find_scales(scale, settings)
    experts = settings.positive("num_experts", 1)
    hidden = settings.positive("base_mlp_dim", 7168) << widths["hidden"]
    activations = settings.raw("mlp_activations", ["silu", "linear"])
    decoder = settings.text("decoder_block", "llama2")
    if decoder in ("deepseek", "qwen3_next", "gemma3", "gpt_oss", "llama4"):
        settings.note(f"decoder_block = {decoder!r}: counted as layers of Llama with these sizes")
    expert_hidden = settings.integer("base_moe_mlp_dim", -1)
    if settings.integer("first_num_dense_layers", 0) > 0 and not settings.positive("base_mlp_dim"):
        raise settings.error("base_mlp_dim", "is missing")
    shape = ModelShape(
        layers=settings.positive("base_num_decoder_layers", 16) << widths["layers"],
        dim=settings.positive("base_emb_dim", 2048) << widths["dim"],
        heads=settings.positive("base_num_query_heads", 16) << widths["heads"],
        kv_heads=settings.positive("base_num_kv_heads", 16) << widths["heads"],
        hidden=hidden,
        vocab_size=settings.positive("vocab_size", 32000),
        head_dim=settings.positive("head_dim", 128),
        gated=not isinstance(activations, (list, str)) or "linear" in activations,
        tied=settings.flag("logits_via_embedding"),
        experts=experts if experts > 1 else 0,
        top_k=settings.positive("num_experts_per_tok", 1),
        expert_hidden=(expert_hidden if expert_hidden > 0 else hidden) if experts > 1 else 0,
        shared_hidden=settings.integer("shared_experts", 0) * max(0, expert_hidden) if experts > 1 else 0,
        dense_layers=settings.integer("first_num_dense_layers", 0) if experts > 1 else 0,
    )
    settings.mark_read(own_sizes)
    label = f"the model of base.yml, {scale:g} times as large" if scale != 1 else "the model of base.yml"
    return ForeignModel(name if name != "default" else label, shape=shape)


def _find_scales(scale: float, settings: Settings) -> dict[str, int]:
    """Return by how many doublings each size grows: heads and MLPs first, then the width, then the depth."""
    doublings = math.log2(scale) if scale > 0 else -1
    if doublings < 0 or doublings != int(doublings):
        raise settings.error("global_parameter_scale", f"= {scale:g}; expected a power of two")
    cycles, rest = divmod(int(doublings), 3)
    return {"heads": cycles + (rest > 0), "hidden": cycles + (rest > 0), "dim": cycles + (rest > 1), "layers": cycles}


def _read_mesh(settings: Settings, devices: int | None, source: str) -> ForeignMesh:
    """Return the mesh: the product of both networks' sizes for each axis, one of which may be -1."""
    sizes = {"replicas": 1, "shards": 1, "tensors": 1, "experts": 1, "rows": 1, "stages": 1}
    axes = _AXES | {
        "sequence": "rows",
        "context": "rows",
        "context_usp_ulysses": "rows",
        "tensor_sequence": "tensors",
        "tensor_transpose": "tensors",
        "pipeline": "stages",
    }
    open_axis = ""
    defaults = {"ici_fsdp": -1}
    for network in ("ici", "dcn"):
        for axis, part in axes.items():
            name = f"{network}_{axis}_parallelism"
            size = settings.integer(name, defaults.get(f"{network}_{axis}", 1))
            if size == -1 and network == "dcn":
                # The number of slices, which is 1 unless the target has several; those are replicas.
                continue
            if size == -1:
                open_axis = part
                continue
            if size < 1:
                raise settings.error(name, f"= {size}; expected a size, or -1")
            sizes[part] *= size
    for network in ("ici", "dcn"):
        for axis in ("diloco", "autoregressive", "context_autoregressive"):
            if settings.integer(f"{network}_{axis}_parallelism", 1) > 1:
                raise settings.error(f"{network}_{axis}_parallelism", "is not an axis of a training run that is read")
    known = math.prod(sizes.values())
    if devices is not None and devices % known:
        raise ForeignConfigError(
            f"{source}: the parallel sizes {known} do not divide {devices} devices; expected a target with a multiple"
        )
    if open_axis and devices is not None:
        sizes[open_axis] *= devices // known
    elif devices is not None and devices != known:
        sizes["replicas"] *= devices // known
        settings.note(f"the parallel sizes are for {known} devices: counted with {devices // known} replicas")
    return ForeignMesh(
        sizes["replicas"], sizes["shards"], sizes["tensors"], sizes["rows"], sizes["stages"], 1, sizes["experts"]
    )


def _read_remat(settings: Settings) -> str:
    policy = settings.text("remat_policy", "full")
    if policy in ("full", "none"):
        return policy
    if policy == "qkv_proj_offloaded":
        return REMAT["qkv projections in host memory, the rest again"]
    if policy == "custom":
        return _read_custom_policy(settings)
    if policy == "minimal_offloaded":
        return "offload:query,key,value,output,mlp_gate,mlp_up,mlp_down"
    plain = policy.removesuffix("_and_quantization").replace("minimal_with_quantization", "minimal")
    if plain != policy:
        settings.note(f"remat_policy = {policy!r}: quantized inputs are counted as computed again")
    if plain not in REMAT:
        raise settings.error("remat_policy", f"= {policy!r}, which is not known here")
    return REMAT[plain]


def _read_custom_policy(settings: Settings) -> str:
    places: dict[str, list[str]] = {"device": [], "offload": []}
    for tensor, names in {"decoder_layer_input": ("input",), **_TENSORS}.items():
        place = settings.text(tensor, "device" if tensor == "decoder_layer_input" else "remat")
        if place not in ("device", "offload", "remat"):
            raise settings.error(tensor, f"= {place!r}; expected remat, device or offload")
        # The backward pass does not need the result of the down projection.
        if place != "remat" and tensor != "mlpwo":
            places[place] += [name for name in names if name not in places[place]]
    saved = [name for name in places["device"] if name != "input"]
    offloaded = places["offload"]
    if offloaded == ["input"] and not saved:
        return "offload"
    parts = [f"save:{','.join(saved)}"] if saved else []
    parts += [f"offload:{','.join(offloaded)}"] if offloaded else []
    return ";".join(parts) or "full"


def _read_precision(settings: Settings) -> str:
    weights = settings.text("weight_dtype", "float32")
    compute = settings.text("dtype", "bfloat16")
    gradients = settings.text("grad_dtype", "float32")
    if gradients != "float32" and weights == "float32":
        settings.note(f"grad_dtype = {gradients!r}: counted as the dtype of the weights")
    if settings.text("mu_dtype") and settings.text("mu_dtype") != weights:
        settings.note(
            f"mu_dtype = {settings.text('mu_dtype')!r}: counted as {weights}, which needs more or less memory"
        )
    if weights == "bfloat16":
        return "all bfloat16"
    return "float32" if compute == "float32" else "float32 weights, bfloat16 products"


def _read_stored(mesh: ForeignMesh, precision: str, optimizer: str) -> StoredBytes | None:
    """Return what is stored with tensor parallelism, which divides the inputs of layers too; None without it."""
    if mesh.tensors == 1:
        return None
    width = 2 if precision == "all bfloat16" else 4
    shards = mesh.shards * mesh.rows * mesh.experts
    return StoredBytes(
        parameter=width,
        gradient=width,
        state=2 * width if optimizer == "adamw" else None,
        parameter_shards=shards,
        gradient_shards=shards,
        state_shards=shards,
        divides_inputs=True,
    )


def _read_optimizer(settings: Settings) -> str:
    name = settings.text("opt_type", "adamw")
    if name in ("adamw", "adam_pax"):
        return "adamw"
    if name in ("sgd", "muon"):
        return {"sgd": "optax.sgd", "muon": "muon"}[name]
    raise settings.error("opt_type", f"= {name!r}; read are adamw, adam_pax, sgd and muon")


def _read_offloading(settings: Settings) -> tuple[str, ...]:
    fields = []
    if settings.flag("optimizer_memory_host_offload"):
        fields.append("optimizer_state")
    if settings.flag("parameter_memory_host_offload"):
        fields.append("parameters")
    if settings.flag("shard_optimizer_over_data"):
        settings.note("shard_optimizer_over_data: counted as a copy of the optimizer state in each replica")
    return tuple(fields)


def _read_quantization(settings: Settings) -> str | None:
    name = settings.text("quantization")
    if not name or name.lower() in ("none", "null"):
        return None
    if name not in _QUANTIZATION:
        settings.note(f"quantization = {json.dumps(name)}: counted as int8 products")
    return _QUANTIZATION.get(name, "int8_row")
