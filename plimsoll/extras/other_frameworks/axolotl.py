"""axolotl: YAML files with base_model, adapter, sequence_len, micro_batch_size, ..."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plimsoll.extras.other_frameworks.foreign_run import Adapter, ForeignConfigError, ForeignRun, Objective
from plimsoll.extras.other_frameworks.huggingface import (
    LOGIT_BYTES,
    count_devices,
    note_adapter,
    read_lora_targets,
    read_optimizer,
)
from plimsoll.extras.other_frameworks.models import find_model, get_width
from plimsoll.extras.other_frameworks.settings import Settings
from plimsoll.extras.other_frameworks.sharding import Sharding, divide, read_fsdp

NAME = "axolotl"
_SKIPPED = (
    r"base_model_.*|model_type|tokenizer.*|processor_type|hub_.*|datasets|test_datasets|dataset_.*|pretraining_dataset"
    r"|val_set_size|output_dir|wandb_.*|mlflow_.*|comet_.*|use_wandb|lora_(model_dir|alpha|dropout|fan_in.*|on_cpu)"
    r"|lora_(mlp|qkv|o|embedding)_kernel|num_epochs|max_steps|lr_.*|learning_rate|.*_lr|cosine.*|train_on_inputs"
    r"|group_by_length|strict|tf32|fp32|resume.*|auto_resume.*|logging_steps|log_.*|xformers_.*"
    r"|flash_(attention|attn).*|sdp_attention|flex_attention|s2_attention|warmup.*|eval.*|evals_per_epoch|saves_per_epoch"
    r"|save_.*|weight_decay|max_grad_norm|adam_.*|special_tokens|tokens|added_tokens.*|chat_template.*|default_system.*"
    r"|seed|debug|early_stopping.*|local_rank|ddp.*|dataloader_.*|pad_to_sequence_len|eval_sample_packing|sample_packing_.*"
    r"|remove_unused_columns|skip_prepare.*|excess_length.*|trust_remote_code|do_.*|neftune.*|is_.*_derived_model|bos_token"
    r"|optim_args|unfrozen_parameters_|shuffle.*|streaming|loss_watchdog.*|gc_steps|torch_compile.*|use_tensorboard|type"
    r"|gradient_checkpointing_kwargs|flash_optimum|profiler.*|cut_cross_entropy_|liger_(rope|rms_norm|glu.*|layer_norm)"
    r"|liger_swiglu|image_.*|freeze_mm_modules|overrides_of_.*|reward_model_|dpo_.*|rl_beta|kto_.*|orpo_.*|peft_.*"
    r"|bnb_config_kwargs|gptq.*|experimental_.*|use_kernels|scattermoe.*|quantize_moe_.*|activation_offloading_"
    r"|revision_of_model|micro_batch_size_|mean_resizing.*|shrink_embeddings|resize_token.*|flex_attn_.*|fp8_enable.*|include_tokens.*|relora_.*|jagged.*"
    r"|reinit_weights|dpo_label.*|hf_use_auth_token|push_dataset.*|sonicmoe.*|total_num_tokens|eot_tokens|model_config|model_quantization.*|num_labels|center_rewards.*|swanlab.*|plugins_"
)
_PARALLEL = ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree", "expert_parallel_size")


def is_config(names: Mapping[str, Any]) -> bool:
    """Return whether names of settings are those of axolotl."""
    return "base_model" in names and ("micro_batch_size" in names or "sequence_len" in names or "datasets" in names)


def read(values: Mapping[str, Any], source: str, devices: int | None, sharding: Sharding) -> ForeignRun:
    """Read a run from an axolotl file.

    Args:
        values: {name: value}.
        source: name of the file.
        devices: number of devices of the target; None takes one.
        sharding: how the state is divided, from the file that `deepspeed` names.

    Raises:
        ForeignConfigError: a setting is missing, or has an invalid value.
    """
    settings = Settings(values, source, _SKIPPED)
    if settings.text("attn_implementation") == "eager":
        settings.note("eager attention keeps the scores of all pairs of tokens: not counted")
    objective = _read_objective(settings)
    model = find_model(settings.text("base_model"), source)
    sharding = _read_sharding(settings, sharding)
    total = count_devices(settings, sharding, devices)
    method, adapter, base = _read_adapter(settings)
    if (unfrozen := settings.raw("unfrozen_parameters")) is not None:
        settings.note(
            f"unfrozen_parameters ({len(unfrozen)} patterns): counted as all weights trained, which needs more memory"
        )
    if settings.flag("reward_model") or settings.flag("process_reward_model"):
        settings.note("a reward model has a head with one output: counted with the head of the language model")
    accumulate = settings.positive("gradient_accumulation_steps", sharding.accumulate or 1)
    rows = settings.positive("micro_batch_size", 1)
    if not settings.flag("sample_packing"):
        settings.note("rows are padded to the longest of their batch; the plan is for rows of the maximum length")
    half_text = settings.text("bf16", "auto").lower()
    is_half = half_text not in ("false", "none") or settings.flag("fp16") or settings.flag("bfloat16")
    weights = "bfloat16" if is_half else "float32"
    name = settings.text("optimizer", "adamw_torch_fused")
    optimizer = read_optimizer(settings, name)
    divided = divide(
        sharding,
        source=source,
        devices=total,
        accumulate=accumulate,
        is_full=method == "full",
        weights=weights,
        half=is_half,
        has_our_state=optimizer != "adamw",
        width=get_width(model),
    )
    for note in divided.notes:
        settings.note(note)
    note_adapter(settings, adapter)
    if settings.flag("relora"):
        settings.note("ReLoRA's merges between steps are not counted")
    overrides = {}
    if name == "optimi_adamw" and method == "full":
        overrides["learner.rounding"] = "kahan"
    offloaded = divided.offloaded
    checkpointing = settings.text("gradient_checkpointing", "false").lower()
    if checkpointing in ("offload", "unsloth", "offload_disk") or settings.text(
        "activation_offloading"
    ).lower() not in ("", "false"):
        offloaded = (*offloaded, "activations")
    is_fused = settings.flag("liger_fused_linear_cross_entropy") or settings.flag("chunked_cross_entropy")
    plugins = " ".join(map(str, settings.raw("plugins", []) or []))
    is_fused = is_fused or "cut_cross_entropy" in plugins or settings.flag("cut_cross_entropy")
    return ForeignRun(
        framework=NAME,
        model=model,
        mesh=divided.mesh,
        seq_len=settings.positive("sequence_len", 512),
        rows=rows,
        accumulate=accumulate,
        method=method,
        remat="full" if checkpointing not in ("false", "none", "0") else sharding.remat or "none",
        precision=divided.precision,
        optimizer=optimizer,
        objective=objective,
        stored=divided.stored,
        adapter=adapter,
        base=base,
        offloaded=offloaded,
        whole_logits=not is_fused,
        low_precision="fp8_tensor" if settings.flag("fp8") else None,
        overrides=overrides,
        logit_bytes=LOGIT_BYTES,
        read=settings.read,
        skipped=settings.skipped,
        unknown=settings.unknown,
        notes=tuple(settings.notes),
    )


def _read_objective(settings: Settings) -> Objective:
    kind = settings.text("rl").lower()
    if kind in ("", "none", "false"):
        return "tokens"
    if kind in ("grpo", "gdpo", "ebft"):
        raise settings.error("rl", f"= {kind!r}: a run that generates answers between its steps is not read")
    if kind in ("orpo", "simpo"):
        settings.note("pairs of answers: twice the rows")
        return "pairs"
    if settings.text("adapter"):
        settings.note("pairs of answers: twice the rows; the reference is the model without its adapters")
        return "pairs"
    settings.note("pairs of answers: twice the rows, and the reference model's weights, in 16 bits, on the device")
    return "pairs with a reference"


def _read_adapter(settings: Settings) -> tuple[Any, Adapter | None, str | None]:
    """Return (method, adapter, storage of the frozen weights)."""
    name = settings.text("adapter").lower()
    in_4_bits = settings.flag("load_in_4bit")
    in_8_bits = settings.flag("load_in_8bit")
    if name in ("", "none"):
        if in_4_bits or in_8_bits:
            settings.note("a quantized model is loaded without adapters: counted as trained in bfloat16")
        return "full", None, None
    if name not in ("lora", "qlora", "dora"):
        raise settings.error("adapter", f"= {name!r}; read are lora and qlora")
    if settings.flag("peft_use_dora") or name == "dora":
        settings.note("DoRA's magnitudes, which are vectors, and its norms of the weights are not counted")
    if settings.flag("gptq"):
        settings.note("GPTQ weights of 4 bits are counted as NF4")
        in_4_bits = True
    targets = settings.raw("lora_target_modules")
    pattern = None if settings.flag("lora_target_linear") else read_lora_targets(settings, targets)
    if settings.raw("lora_target_parameters"):
        settings.note("lora_target_parameters (adapters of experts) are not counted")
    saved = settings.raw("lora_modules_to_save", []) or []
    tables = sum(str(one) in ("embed_tokens", "lm_head") for one in saved)
    # Without load_in_4bit, qlora would be refused by axolotl.
    method = "qlora" if in_4_bits or name == "qlora" else "lora"
    bitsandbytes = settings.section("bnb_config_kwargs")
    # axolotl's own settings for bitsandbytes quantize the scales too.
    is_double = method == "qlora" and bool(bitsandbytes.get("bnb_4bit_use_double_quant", True))
    adapter = Adapter(settings.positive("lora_r", 8), pattern, tables, double_quantized=is_double)
    return method, adapter, "int8" if in_8_bits and method == "lora" else None


def _read_sharding(settings: Settings, sharding: Sharding) -> Sharding:
    """Return how the state is divided: by FSDP, by DeepSpeed, or not."""
    words = settings.raw("fsdp", []) or []
    words = " ".join(map(str, words)) if isinstance(words, list) else str(words)
    section = settings.section("fsdp_config")
    version = settings.text("fsdp_version", str(section.get("fsdp_version", "1")))
    path = settings.text("deepspeed")
    if words or section:
        sharding = read_fsdp({**section, "fsdp_version": version}, settings.source, words)
    elif path and sharding.kind == "ddp":
        match = re.search(r"zero([123])", path)
        if match is None:
            raise ForeignConfigError(
                f"{settings.source}: deepspeed names {path}, which was not found; give that file too"
            )
        offloaded = ("gradients", "optimizer_state") if "offload" in path else ()
        offloaded = (*offloaded, "parameters") if "offload_all" in path else offloaded
        kinds = {"1": "zero1", "2": "zero2", "3": "zero3"}
        sharding = replace(
            sharding,
            kind=kinds[match[1]],
            bucket=None,
            offloaded=offloaded,
            live_parameters=0 if match[1] != "3" else 1_000_000_000,
            notes=(f"{path} was not found: counted as what its name says, with buckets of a width squared",),
        )
    rows = settings.positive("context_parallel_size", settings.positive("sequence_parallel_degree", 1))
    tensors = settings.positive("tensor_parallel_size", 1)
    if settings.positive("expert_parallel_size", 1) > 1:
        settings.note("expert_parallel_size: counted as experts sharded like the other weights")
    replicas = settings.positive("dp_replicate_size", 1)
    shards = settings.integer("dp_shard_size", 0)
    stated = shards * replicas * rows * tensors if shards > 0 else None
    if stated is None and replicas * rows * tensors > 1:
        stated = replicas * rows * tensors
    return replace(sharding, rows=rows, tensors=tensors, replicas=replicas, devices=sharding.devices or stated)
