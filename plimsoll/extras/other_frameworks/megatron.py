"""Megatron-LM: launch scripts, argument lists, and YAML files with its arguments (also those of NeMo)."""

from __future__ import annotations

import re
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
from plimsoll.extras.other_frameworks.models import find_hub_id, get_vocab_size
from plimsoll.extras.other_frameworks.settings import Settings

NAME = "Megatron-LM"
# Arguments that change neither memory nor time.
_SKIPPED = (
    r"(min_|max_|decoupled_|override_|use_checkpoint_)?lr.*|decoupled_min_lr|override_opt.*|use_checkpoint_opt.*"
    r"|weight_decay.*|(start|end)_weight_decay|adam_.*|clip_grad|sgd_momentum|init_method.*|seed|data_.*|per_split.*"
    r"|(train|valid|test)_data_path|split|num_workers|tokenizer_.*|tiktoken_.*|vocab_(file|extra_ids)|merge_file"
    r"|mock_data|reset_.*|eod_mask_loss|dataloader_type|no_?_mmap.*|(train|exit|lr)_(iters|samples|interval).*"
    r"|train_(iters|samples|sync.*)|exit_.*|eval_.*|skip_train|save.*|load.*|no_(save|load|ckpt).*|finetune|ckpt_.*"
    r"|dist_ckpt.*|use_dist_ckpt|async_save|auto_detect_ckpt_format|use_persistent_ckpt_worker|use_mp_args.*"
    r"|log_.*|tensorboard_.*|wandb_.*|timing_.*|profile.*|use_pytorch_profiler|record_memory.*|manual_gc.*|empty_unused.*"
    r"|distributed_(timeout|backend).*|master_(addr|port)|node_rank|rdzv_.*|local_rank|log_dir|tee|redirects"
    r"|use_mcore_models|use_legacy_models|transformer_impl|attention_softmax_in_fp32|no_masked.*|no_bias.*|no_rope.*"
    r"|no_gradient_acc.*|no_async_tensor.*|apply_query_key_layer_scaling|apply_layernorm_1p|norm_epsilon|rotary_.*"
    r"|use_rope_scaling|rope_.*|use_rotary_position_embeddings|no_position_embedding|(no_)?create_attention.*"
    r"|overlap_.*|no_overlap.*|delay_.*|tp_comm.*|no_align.*|ddp_(num|average|pad).*|initial_loss_scale|loss_scale.*"
    r"|min_loss_scale|hysteresis|check_for.*|no_check.*|rerun_.*|error_injection.*|moe_aux.*|moe_router_(load|dtype|score"
    r"|pre|enable|bias|fusion|num_groups|group_topk|topk_scaling).*|moe_z_loss.*|moe_permute.*|moe_per_layer.*"
    r"|moe_grouped_gemm|moe_token_dispatcher.*|moe_enable_deepep|use_tp_pp.*|deterministic.*|inference_.*|yaml_cfg"
    r"|calculate_per_token_loss|attention_dropout|hidden_dropout|dist_url|use_fused.*|no_fused.*|fim_.*|bias_.*"
    r"|cuda_.*|enable_experimental|te_rng.*|inprocess.*|high_priority.*|nccl_.*|use_sharp|sharp_.*|timer.*|spec"
    r"|hf_.*|export_.*|bert_.*|num_dataset.*|kitchen.*|use_flash_attn|disable_(symmetric|jit).*|dist_.*|step_batch.*"
    r"|fp8_(amax|margin|interval|wgrad).*|first_last_.*|decrease_batch.*|no_create_.*|sft|legacy.*|replication.*"
    r"|ft_.*|use_cpu_init.*|no_initialization|perform_init.*|group_query_attention|data_parallel_random_init|mup.*|mscale.*|moe_flex.*|moe_router_force.*|megatron_fsdp_grad_comm.*"
    r"|use_ring_exchange.*|context_parallel_load.*|cp_comm_type|hierarchical.*|mtp_loss.*|scatter_gather.*|no_scatter.*"
    r"|tokenizer|cross_entropy_fusion_impl|logging_.*|init_model_with.*|straggler.*|use_nccl_ub|fsdp_double.*|quick_geglu|glu_linear.*|num_gpus|microbatch_group.*|fsdp_manual.*|DDP_impl|accumulate_allreduce.*|no_use_tok.*|result_.*|goodput.*|attention_backend_|variable_seq_lengths|grad_reduce_.*|train_sync.*|max_tokens_to_oom|make_vocab_size_divisible_by"
)
# Values of --tokenizer-type whose vocabulary is fixed.
_TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "TikTokenizer": 131072}
# fp8_recipe -> our recipe.
_FP8 = {"delayed": "fp8_delayed", "tensorwise": "fp8_tensor", "blockwise": "fp8_block", "mxfp8": "mxfp8"}
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
# Names of NeMo's and Megatron-Bridge's fields that differ from the arguments.
_NEMO = {
    "encoder_seq_length": "seq_length",
    "seq_length": "seq_length",
    "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "num_moe_experts": "num_experts",
    "init_method_std": "init_method_std",
}


def is_arguments(names: Mapping[str, Any]) -> bool:
    """Return whether names of flags are those of Megatron-LM."""
    return "num_layers" in names and "hidden_size" in names and "num_attention_heads" in names


def is_training(names: Mapping[str, Any]) -> bool:
    """Return whether arguments are those of a run that trains, and not of one that generates text."""
    return any(name in names for name in ("train_iters", "train_samples", "lr", "global_batch_size", "weight_decay"))


def read_nemo(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's arguments of a NeMo or Megatron-Bridge YAML file: {name: value}."""
    arguments: dict[str, Any] = {}
    for section in ("model", "train", "training", "dataset", "ddp", "optimizer"):
        part = values.get(section)
        if isinstance(part, dict):
            arguments |= {
                _NEMO.get(str(key), str(key)): value
                for key, value in part.items()
                if not isinstance(value, (dict, list))
            }
    model, trainer = (part if isinstance(part, dict) else {} for part in (values.get("model"), values.get("trainer")))
    if isinstance(trainer.get("devices"), int):
        arguments["nproc_per_node"] = trainer["devices"]
    if isinstance(trainer.get("num_nodes"), int):
        arguments["nnodes"] = trainer["num_nodes"]
    precision = str(trainer.get("precision", ""))
    if "bf16" in precision:
        arguments["bf16"] = True
    optimizer = (model.get("optim") or {}).get("name", "")
    if optimizer in ("distributed_fused_adam", "mcore_distributed_optim"):
        arguments["use_distributed_optimizer"] = True
    activation = str(arguments.pop("activation", ""))
    if activation in ("swiglu", "fast-swiglu"):
        arguments["swiglu"] = True
    if activation == "squared-relu":
        arguments["squared_relu"] = True
    if str(arguments.get("normalization", "")).lower() == "rmsnorm":
        arguments["normalization"] = "RMSNorm"
    if arguments.pop("bias", None) is False:
        arguments["disable_bias_linear"] = True
    if arguments.pop("share_embeddings_and_output_weights", True) is False:
        arguments["untie_embeddings_and_output_weights"] = True
    if isinstance(arguments.get("num_query_groups"), int):
        arguments["group_query_attention"] = True
    return {name: value for name, value in arguments.items() if value is not None}


def read(values: Mapping[str, Any], source: str, devices: int | None) -> ForeignRun:
    """Read a run from Megatron-LM's arguments.

    Args:
        values: {name of an argument with underscores: value}.
        source: name of the file.
        devices: number of devices of the target; None takes the file's.

    Raises:
        ForeignConfigError: an argument is missing, or has an invalid value.
    """
    settings = Settings(values, source, _SKIPPED)
    _refuse_other_models(settings)
    if settings.text("attention_backend") in ("unfused", "local"):
        settings.note("--attention-backend unfused: counted as a fused kernel, which saves no matrix of scores")
    tensors = settings.positive("tensor_model_parallel_size", 1)
    stages = settings.positive("pipeline_model_parallel_size", 1)
    rows_shared = settings.positive("context_parallel_size", 1)
    experts = settings.positive("expert_model_parallel_size", 1)
    if "nnodes" in settings and "nproc_per_node" not in settings:
        settings.note(f"{settings.text('nnodes')} nodes: counted with 8 devices each")
    given = settings.positive("nproc_per_node", 8 if "nnodes" in settings else 1) * settings.positive("nnodes", 1)
    least = tensors * stages * rows_shared
    stated = given if "nproc_per_node" in settings or "nnodes" in settings else None
    total = devices or stated or least * experts
    if devices is None and stated is not None and stated % least:
        total = least * experts
        settings.note(
            f"the file starts {stated} processes, and its parallel sizes need a multiple of {least}: counted for "
            f"{total}"
        )
    elif devices is not None and stated is not None and stated != devices:
        settings.note(f"the file starts {stated} processes: planned for {devices}, as --target has")
    if total % least:
        raise ForeignConfigError(
            f"{source}: tensor x pipeline x context parallel = {tensors} x {stages} x {rows_shared} = {least} does not "
            f"divide {total} devices"
        )
    data = total // least
    experts = _place_experts(settings, experts, tensors, data)
    rows = settings.positive("micro_batch_size", 1)
    batch = settings.positive("global_batch_size", _read_first_batch(settings) or rows * data)
    if batch % (rows * data):
        settings.note(
            f"--global-batch-size {batch} is no multiple of {rows} x {data} rows: counted as the next multiple"
        )
    accumulate = -(-batch // (rows * data))
    chunks = _read_chunks(settings, stages)
    model = _read_model(settings, tensors)
    seq_len = settings.positive("seq_length")
    stored, mesh, precision = _read_state(
        settings, ForeignMesh(1, 1, tensors, rows_shared, stages, chunks, experts), data, accumulate
    )
    if accumulate < stages and stages > 1:
        settings.note(f"{accumulate} microbatches do not fill a pipeline of {stages} stages")
    return ForeignRun(
        framework=NAME,
        model=model,
        mesh=mesh,
        seq_len=seq_len,
        rows=rows,
        accumulate=accumulate,
        remat=_read_remat(settings, stages),
        precision=precision,
        optimizer=_read_optimizer(settings),
        stored=stored,
        offloaded=_read_offloading(settings),
        # Logits in 16 bits, the softmax in float32, and its gradient in 16 bits; the fused loss works in place.
        logit_bytes=6 if settings.flag("cross_entropy_loss_fusion") else 8,
        low_precision=_read_fp8(settings),
        read=settings.read,
        skipped=settings.skipped,
        unknown=settings.unknown,
        notes=tuple(settings.notes),
    )


def _read_first_batch(settings: Settings) -> int | None:
    """Return the first batch of --step-batch-size-schedule, such as "0:384 200B:768"; None if there is no schedule."""
    match = re.match(r"\s*0:(\d+)", settings.text("step_batch_size_schedule"))
    if match is None:
        return None
    if "global_batch_size" not in settings:
        settings.note(f"the batch grows during the run: planned for the first one, {match[1]} rows")
    return int(match[1])


def _place_experts(settings: Settings, experts: int, tensors: int, data: int) -> int:
    """Return over how many data-parallel devices experts are divided, in addition to those of tensor parallelism.

    Megatron-LM divides experts over other groups of devices than the rest: --expert-model-parallel-size times
    --expert-tensor-parallel-size devices have one copy of all experts.
    """
    expert_tensors = settings.positive("expert_tensor_parallel_size", tensors)
    copies = experts * expert_tensors
    if copies <= tensors:
        if copies < tensors:
            settings.note(
                f"experts are divided over {copies} devices: counted as over {tensors}, like the other tensors"
            )
        return 1
    wanted = copies // tensors
    placed = max(size for size in range(1, data + 1) if data % size == 0 and wanted % size == 0)
    if placed * tensors != copies:
        settings.note(f"experts are divided over {copies} devices: counted as over {placed * tensors}")
    return placed


def _refuse_other_models(settings: Settings) -> None:
    names = (
        "hybrid_override_pattern",
        "hybrid_layer_pattern",
        "is_hybrid_model",
        "encoder_num_layers",
        "decoder_num_layers",
    )
    for name in names:
        if name in settings:
            raise settings.error(f"--{name.replace('_', '-')}", "is of a hybrid or encoder model, which is not read")
    if settings.text("tokenizer_type").startswith("BertWordPiece") or "decoder_seq_length" in settings:
        raise ForeignConfigError(f"{settings.source}: BERT and T5 are not decoders, which is what is read")
    if any(name.startswith(("grpo_", "rl_")) or name == "perform_rl_step" for name in settings.values):
        raise ForeignConfigError(f"{settings.source}: a run that generates answers between its steps is not read")
    if any(name.startswith(("cuda_graph", "enable_cuda_graph")) for name in settings.values):
        settings.note("memory of CUDA graphs is not counted")
    if settings.text("experimental_attention_variant"):
        settings.note("--experimental-attention-variant: counted as attention to all tokens")


def _read_chunks(settings: Settings, stages: int) -> int:
    """Return the chunks of layers per stage of an interleaved pipeline."""
    if stages == 1:
        return 1
    if "num_virtual_stages_per_pipeline_rank" in settings:
        return settings.positive("num_virtual_stages_per_pipeline_rank")
    if "num_layers_per_virtual_pipeline_stage" in settings:
        layers = settings.positive("num_layers_per_virtual_pipeline_stage")
        return max(1, settings.positive("num_layers") // (stages * layers))
    for name in (
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout",
    ):
        if settings.raw(name) is not None:
            settings.note(f"--{name.replace('_', '-')}: counted as stages of equal size")
    return 1


def _read_model(settings: Settings, tensors: int) -> ForeignModel:
    """Return the model, from its sizes."""
    layers = settings.positive("num_layers")
    if (extra := settings.integer("mtp_num_layers", 0)) > 0:
        layers += extra
        settings.note(f"--mtp-num-layers {extra}: counted as {extra} more layer(s), without the projection before it")
    dim = settings.positive("hidden_size")
    heads = settings.positive("num_attention_heads")
    hidden = settings.positive("ffn_hidden_size", _default_hidden(settings, dim))
    experts = settings.integer("num_experts", 0)
    is_rotary = settings.text("position_embedding_type", "learned_absolute") in ("rope", "yarn", "none", "mrope")
    is_rotary = is_rotary or settings.flag("use_rotary_position_embeddings")
    is_gated = settings.flag("swiglu")
    settings.flag("squared_relu")
    is_layer_norm = settings.text("normalization", "LayerNorm") != "RMSNorm"
    positions = settings.positive("max_position_embeddings", settings.positive("seq_length"))
    if settings.flag("multi_latent_attention"):
        return _read_latent_model(settings, layers, dim, heads, hidden, experts, tensors)
    if "linear_attention_freq" in settings or settings.text("window_size"):
        settings.note("windows and linear attention are counted as attention to all tokens")
    is_grouped = settings.flag("group_query_attention") or "num_query_groups" in settings
    kv_heads = settings.positive("num_query_groups", 1) if is_grouped else heads
    shape = ModelShape(
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=kv_heads,
        hidden=hidden,
        vocab_size=_read_vocab_size(settings, tensors),
        head_dim=settings.positive("kv_channels", dim // heads),
        gated=is_gated,
        tied=not settings.flag("untie_embeddings_and_output_weights"),
        biased=not settings.flag("disable_bias_linear") or settings.flag("add_qkv_bias"),
        layer_norm=is_layer_norm,
        learned_positions=None if is_rotary else positions,
        qk_norm=settings.flag("qk_layernorm"),
        experts=experts,
        top_k=settings.positive("moe_router_topk", 2) if experts else 1,
        expert_hidden=settings.positive("moe_ffn_hidden_size", hidden) if experts else 0,
        shared_hidden=settings.integer("moe_shared_expert_intermediate_size", 0) if experts else 0,
        dense_layers=_count_dense_layers(settings) if experts else 0,
    )
    return ForeignModel(f"{layers} layers of width {dim}", shape=shape)


def _default_hidden(settings: Settings, dim: int) -> int:
    """Return Megatron's default inner width of an MLP."""
    if settings.flag("swiglu"):
        # As in megatron/training/arguments.py: two thirds of four times the width, a multiple of 64.
        return int((4 * dim * 2 / 3) / 64) * 64
    return 4 * dim


def _read_latent_model(
    settings: Settings, layers: int, dim: int, heads: int, hidden: int, experts: int, tensors: int
) -> ForeignModel:
    """Return a model with latent attention, as DeepSeek's are."""
    dense = _count_dense_layers(settings)
    query_rank = settings.raw("q_lora_rank")
    sizes: dict[str, object] = {
        "model.dim": dim,
        "model.vocab_size": _read_vocab_size(settings, tensors),
        "model.stack.num_layers": layers - dense,
        "model.first.num_layers": max(1, dense),
        "model.first.pattern.0.mlp.hidden": hidden,
        "model.stack.pattern.0.mlp.num_experts": experts,
        "model.stack.pattern.0.mlp.router.top_k": settings.positive("moe_router_topk", 2),
        "model.stack.pattern.0.mlp.experts.hidden": settings.positive("moe_ffn_hidden_size", hidden),
        "model.stack.pattern.0.mlp.shared.hidden": settings.integer("moe_shared_expert_intermediate_size", 0),
        "model.stack.pattern.0.mlp.router.groups": 1,
        "model.stack.pattern.0.mlp.router.top_groups": 1,
    }
    if not experts or not sizes["model.stack.pattern.0.mlp.shared.hidden"]:
        raise settings.error("--multi-latent-attention", "is read with --num-experts and shared experts only")
    if not dense:
        settings.note("the first layer is counted as one without experts")
        sizes["model.stack.num_layers"] = layers - 1
    for part in ("first", "stack"):
        attention = f"model.{part}.pattern.0.attention."
        sizes |= {
            f"{attention}num_heads": heads,
            f"{attention}kv_rank": settings.positive("kv_lora_rank", 32),
            f"{attention}query_rank": "none" if query_rank in (None, "None") else query_rank,
            f"{attention}plain_dim": settings.positive("qk_head_dim", 128),
            f"{attention}rotary_dim": settings.positive("qk_pos_emb_head_dim", 64),
            f"{attention}value_dim": settings.positive("v_head_dim", 128),
            f"{attention}scale": "none",
        }
    for name in ("kv_channels", "qk_layernorm", "untie_embeddings_and_output_weights", "disable_bias_linear"):
        settings.raw(name)
    overrides = {path: str(value) for path, value in sizes.items()}
    name = f"{layers} layers of width {dim} with latent attention"
    return ForeignModel(name, hub_id="deepseek-ai/DeepSeek-V3", overrides=overrides)


def _count_dense_layers(settings: Settings) -> int:
    """Return the number of layers without experts before the others, from --moe-layer-freq."""
    text = settings.text("moe_layer_freq", "1").replace(" ", "")
    if match := re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", text):
        return int(match[1])
    if re.fullmatch(r"\[0(,0)*(,1)+\]", text):
        return text.count("0")
    if text not in ("1", "([1]*1)"):
        settings.note(f"--moe-layer-freq {text}: counted as experts in all layers")
    return 0


def _read_vocab_size(settings: Settings, tensors: int) -> int:
    """Return the padded size of the vocabulary."""
    kind = settings.text("tokenizer_type")
    if "vocab_size" in settings:
        size = settings.positive("vocab_size") + (kind == "NullTokenizer")
    elif kind in _TOKENIZERS:
        size = _TOKENIZERS[kind]
    elif not kind and ("merge_file" in settings or "gpt2-vocab.json" in str(settings.values.get("vocab_file"))):
        # The tokenizer of files with merges.
        size = _TOKENIZERS["GPT2BPETokenizer"]
    elif match := re.search(r"[._](\d+)k\.(?:vocab|model)", settings.text("tokenizer_model")):
        size = int(match[1]) * 1000
        if match[1] == "128":
            size = 131072
        settings.note(
            f"the vocabulary is counted as {size}, by the name of the tokenizer's file; --vocab-size=N sets it"
        )
    else:
        known = get_vocab_size(find_hub_id(settings.text("tokenizer_model")))
        if known is None:
            raise settings.error(
                "--vocab-size", "is not given, and its tokenizer is not known here; give --vocab-size=N after the file"
            )
        size = known
    multiple = settings.positive("make_vocab_size_divisible_by", 128) * tensors
    return -(-size // multiple) * multiple


def _read_state(
    settings: Settings, mesh: ForeignMesh, data: int, accumulate: int
) -> tuple[StoredBytes, ForeignMesh, str]:
    """Return (what is stored, the mesh with its data-parallel axes, the words of the precision)."""
    is_half = settings.flag("bf16") or settings.flag("fp16")
    if settings.flag("fp16"):
        settings.note("--fp16: counted as bfloat16, which has as many bytes")
    in_bf16 = settings.flag("grad_reduce_in_bf16") or settings.text("main_grads_dtype") == "bf16"
    # Of Megatron-FSDP.
    in_bf16 = in_bf16 or settings.text("megatron_fsdp_main_grads_dtype") == "bf16"
    gradient = 2 if in_bf16 and is_half else 4
    master = 0 if not is_half else 4
    moments = 8
    if settings.flag("use_precision_aware_optimizer"):
        master = _BYTES.get(settings.text("main_params_dtype", "fp32"), 4) * bool(is_half)
        first = _BYTES.get(settings.text("exp_avg_dtype", "fp32"), 4)
        moments = first + _BYTES.get(settings.text("exp_avg_sq_dtype", "fp32"), 4)
    name = _read_optimizer(settings)
    if name == "optax.sgd":
        moments = 4
    strategy = settings.text("data_parallel_sharding_strategy", "no_shard")
    uses_fsdp = (
        settings.flag("use_megatron_fsdp") or settings.flag("use_custom_fsdp") or settings.flag("use_torch_fsdp2")
    )
    if settings.flag("use_torch_fsdp2"):
        strategy = "optim_grads_params"
    shards = data * mesh.rows
    # Expert devices are data-parallel devices that have other experts.
    replicas = data // mesh.experts
    parameter = 2 if is_half else 4
    state_shards = gradient_shards = parameter_shards = 1
    is_distributed = settings.flag("use_distributed_optimizer")
    if is_distributed or (uses_fsdp and strategy != "no_shard"):
        state_shards = shards
    if uses_fsdp and strategy in ("optim_grads", "optim_grads_params"):
        gradient_shards = shards
    if uses_fsdp and strategy == "optim_grads_params":
        parameter_shards = shards
    if parameter_shards > 1:
        shared = ForeignMesh(1, replicas, mesh.tensors, mesh.rows, mesh.stages, mesh.chunks, mesh.experts)
    else:
        shared = ForeignMesh(replicas, 1, mesh.tensors, mesh.rows, mesh.stages, mesh.chunks, mesh.experts)
    if state_shards == 1 and data > 1:
        settings.note("without --use-distributed-optimizer, each data-parallel device has all of the optimizer state")
    elif data > 1:
        settings.note(
            f"optimizer state is sharded over {state_shards} devices, gradients over {gradient_shards}, weights over "
            f"{parameter_shards}"
        )
    if int(settings.number("num_distributed_optimizer_instances", 1)) > 1:
        instances = settings.positive("num_distributed_optimizer_instances")
        state_shards = max(1, state_shards // instances)
    stored = StoredBytes(
        parameter=parameter,
        gradient=gradient,
        state=master + moments,
        parameter_shards=parameter_shards,
        gradient_shards=gradient_shards,
        state_shards=state_shards,
        # Gradients are summed in one contiguous buffer.
        keeps_gradients=True,
        divides_inputs=settings.flag("sequence_parallel"),
    )
    precision = "bfloat16, float32 master" if is_half else "float32"
    return stored, shared, precision


def _read_remat(settings: Settings, stages: int) -> str:
    """Return our policy of what is recomputed."""
    granularity = settings.text("recompute_granularity")
    if not granularity:
        if settings.flag("recompute_activations"):
            granularity = "selective"
        elif settings.flag("checkpoint_activations") or "activations_checkpoint_method" in settings:
            # Names of earlier versions.
            settings.mark_read(["activations_checkpoint_method", "activations_checkpoint_num_layers"])
            granularity = "full"
    if granularity == "full":
        method = settings.text("recompute_method", "uniform")
        count = settings.positive("recompute_num_layers", 1)
        if method == "block":
            layers = settings.positive("num_layers")
            if stages == 1 and count < layers:
                return f"full:{count},none"
            per_stage = -(-layers // stages)
            if count < per_stage:
                settings.note(
                    f"{count} of {per_stage} layers of a stage are recomputed; counted as none, which needs more memory"
                )
                return "none"
            return "full"
        if count > 1:
            settings.note(f"--recompute-num-layers {count}: counted as 1, which saves the input of each layer")
        return "full"
    if granularity == "selective":
        modules = settings.text("recompute_modules", "core_attn").replace(",", " ").strip("[]").split()
        if "mlp" in modules:
            return "save:query,key,value,attention,output"
        others = sorted(set(modules) - {"core_attn"})
        if others:
            settings.note(f"--recompute-modules {' '.join(others)}: counted as saved, which needs more memory")
        return "none"
    if granularity:
        raise settings.error("--recompute-granularity", f"= {granularity!r}; expected full or selective")
    return "none"


def _read_optimizer(settings: Settings) -> str:
    name = settings.text("optimizer", "adam").lower()
    if name == "adam":
        return "adamw"
    if "muon" in name:
        return "muon"
    if name == "sgd":
        return "optax.sgd"
    raise settings.error("--optimizer", f"= {name!r}; read are adam, sgd and muon")


def _read_offloading(settings: Settings) -> tuple[str, ...]:
    fields = []
    if settings.flag("optimizer_cpu_offload"):
        fraction = settings.number("optimizer_offload_fraction", 1.0)
        fields.append("optimizer_state")
        if fraction < 1:
            settings.note(f"--optimizer-offload-fraction {fraction:g}: counted as all of the state in host memory")
    if settings.flag("cpu_offloading") or settings.flag("fine_grained_activation_offloading"):
        fields.append("activations")
        settings.note("offloaded activations are counted as all that a layer saves")
    return tuple(fields)


def _read_fp8(settings: Settings) -> str | None:
    form = settings.text("fp8_format") or settings.text("fp8")
    if settings.text("fp4_format"):
        settings.note("--fp4-format: counted as 8-bit products")
        return "fp8_tensor"
    if not form or form.lower() in ("none", "false"):
        return None
    if settings.flag("fp8_param_gather"):
        settings.note(
            "--fp8-param-gather: 8-bit weights and their transposed copies have the bytes of bfloat16 weights"
        )
    recipe = settings.text("fp8_recipe", "delayed")
    return _FP8.get(recipe, "fp8_tensor")
