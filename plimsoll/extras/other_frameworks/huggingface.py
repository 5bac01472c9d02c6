"""Hugging Face: YAML recipes of TRL and alignment-handbook, arguments of the Trainer, DeepSpeed JSON with a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plimsoll.extras.other_frameworks import llama_factory
from plimsoll.extras.other_frameworks.foreign_run import (
    Adapter,
    ForeignConfigError,
    ForeignModel,
    ForeignRun,
    Objective,
)
from plimsoll.extras.other_frameworks.models import find_model, get_width
from plimsoll.extras.other_frameworks.settings import Settings
from plimsoll.extras.other_frameworks.sharding import Sharding, divide, read_fsdp

NAME = "Hugging Face Trainer"
_SKIPPED = (
    r"model_revision|trust_remote_code|use_flash_attention_2|chat_template.*|dataset.*|data_.*"
    r"|preprocessing.*|do_.*|eval.*|logging.*|log_.*|learning_rate|lr_.*|warmup.*|weight_decay|max_steps|num_train_epochs"
    r"|output_.*|overwrite.*|hub_.*|push_to_hub|report_to|run_name|save_.*|seed|tee|adam_.*|max_grad_norm|ddp_.*"
    r"|dataloader_.*|remove_unused.*|gradient_checkpointing_kwargs|lora_(alpha|dropout|bias|task_type)|lora_weight.*"
    r"|beta|loss_type|label_.*|max_prompt_length|max_completion_length|truncation.*|neftune.*|torchdynamo|tf32|group_by.*"
    r"|wandb.*|trackio.*|eos_token|pad_token|system_prompt|resume.*|ignore_.*|use_cache|master_.*|main_process.*"
    r"|machine_rank|node_rank|rdzv.*|config_file|config|num_warmup_steps|print_loss|enable_tensorboard|tensorboard_.*"
    r"|model_code_revision|use_fast.*|bnb_4bit_(quant_type|compute_dtype)|torch_compile.*|compile|deepcompile|shuffle.*"
    r"|max_train_samples|max_eval.*|tokenizer.*|completion_only_loss|assistant_only_loss|average_tokens.*|project.*"
    r"|activation_checkpointing_kwargs|bench_steps|warmup_steps|bind_cores.*|hostfile|include|exclude|deterministic"
    r"|master_addr|lora_learning_rate|train_file|validation_.*|block_size_|use_wandb|per_device_eval_batch_size|end_lr"
    r"|disable_dropout|lr|profile.*|leaf_module|padding_free|packing_strategy|num_padding.*|random_ltd|dropout|backend|analyzing.*|only_optimize_lora|generate_during_eval|precompute_ref_log_probs|metric_.*|greater_is_better|optim_args|hf_.*|passes"
)
# Other names of the same settings: name -> ours here.
_ALIASES = {
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "torch_dtype": "dtype",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "seq_length": "max_length",
    "seq_len": "max_length",
    "block_size": "max_length",
    "batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "activation_checkpointing": "gradient_checkpointing",
    "num_gpus": "num_processes",
    "nproc_per_node": "num_processes",
    "num_nodes": "num_machines",
    "nnodes": "num_machines",
    "lora_dim": "lora_r",
    "peft_lora_r": "lora_r",
    "use_liger": "use_liger_kernel",
    "deepspeed_config": "deepspeed",
    "use_peft_lora": "use_peft",
}
# optim -> (our optimizer, whether it keeps AdamW's two moments in the dtype of the weights).
OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "adamw_torch_xla": "adamw",
    "adamw": "adamw",
    "adam": "adamw",
    "paged_adamw": "adamw",
    "paged_adamw_32bit": "adamw",
    "adamw_bnb_8bit": "adamw8bit",
    "adamw_8bit": "adamw8bit",
    "paged_adamw_8bit": "adamw8bit",
    "adamw_torch_8bit": "adamw8bit",
    "ao_adamw_8bit": "adamw8bit",
    "lion": "lion",
    "lion_32bit": "lion",
    "paged_lion_32bit": "lion",
    "lion_pytorch": "lion",
    "adafactor": "adafactor",
    "muon": "muon",
    "adam_mini": "adam_mini",
    "dion": "muon",
    "adalomo": "adalomo",
    "apollo_adamw": "apollo",
    "apollo_mini": "apollo_mini",
    "galore_adamw": "galore",
    "galore_adamw_layerwise": "galore",
    "sgd": "optax.sgd",
    "optimi_adamw": "adamw",
    "ao_adamw_fp8": "adamw8bit",
    "ao_adamw_4bit": "adamw8bit",
    "adamw_torch_4bit": "adamw8bit",
    "lion_8bit": "lion",
    "came_pytorch": "adafactor",
    "schedule_free_adamw": "adamw",
    "adopt_adamw": "adamw",
    "rmsprop": "optax.rmsprop",
}
# Optimizers whose state is not exactly that of ours -> the difference.
_INEXACT = {
    "ao_adamw_4bit": "moments of 4 bits are counted as 8 bits",
    "adamw_torch_4bit": "moments of 4 bits are counted as 8 bits",
    "lion_8bit": "a momentum of 8 bits is counted as 32 bits",
    "came_pytorch": "CAME's additional statistics, which are vectors, are not counted",
    "dion": "Dion's state is counted as Muon's",
    "schedule_free_adamw": "the third copy of the weights is not counted",
    "adopt_adamw": "ADOPT's state is counted as AdamW's",
}
# Linear layers of transformers -> ours.
_LAYERS = {
    "q_proj": "attention/query",
    "k_proj": "attention/key",
    "v_proj": "attention/value",
    "o_proj": "attention/output",
    "out_proj": "attention/output",
    "qkv_proj": "attention/(query|key|value)",
    "c_attn": "attention/(query|key|value)",
    "query_key_value": "attention/(query|key|value)",
    "gate_proj": "mlp/gate",
    "up_proj": "mlp/up",
    "down_proj": "mlp/down",
    "gate_up_proj": "mlp/(gate|up)",
    "w1": "mlp/gate",
    "w2": "mlp/down",
    "w3": "mlp/up",
    "fc1": "mlp/up",
    "fc2": "mlp/down",
    "dense_h_to_4h": "mlp/up",
    "dense_4h_to_h": "mlp/down",
}
# Bytes per logit at the peak of the loss in transformers: the log-softmax, its gradient and that of the logits, all in
# float32. The logits are freed before the backward pass (tools/bench/torch_reserved.py traces such a step).
LOGIT_BYTES = 12.0
_TABLES = ("embed_tokens", "lm_head", "embed_in", "embed_out", "wte")


def is_recipe(names: Mapping[str, Any]) -> bool:
    """Return whether names of settings are those of a recipe of TRL, alignment-handbook or the Trainer."""
    return "model_name_or_path" in names or ("per_device_train_batch_size" in names and "base_model" not in names)


def has_fsdp(values: Mapping[str, Any]) -> bool:
    """Return whether the Trainer's `fsdp` is on."""
    return _join_words(values.get("fsdp", "")).strip() not in ("", "False", "None")


def _join_words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def read(values: Mapping[str, Any], source: str, devices: int | None, sharding: Sharding) -> ForeignRun:
    """Read a run from a recipe or arguments.

    Args:
        values: {name: value}.
        source: name of the file.
        devices: number of devices of the target; None takes the file's.
        sharding: how the state is divided, from a DeepSpeed or accelerate file.

    Raises:
        ForeignConfigError: a setting is missing, or has an invalid value.
    """
    framework, skipped = NAME, _SKIPPED
    if llama_factory.is_config(values):
        framework, skipped = llama_factory.NAME, f"{_SKIPPED}|{llama_factory.SKIPPED}"
        values = llama_factory.translate(values, source)
    settings = Settings({_ALIASES.get(name, name): value for name, value in values.items()}, source, skipped)
    if "num_generations" in settings:
        raise ForeignConfigError(f"{source}: a run that generates answers between its steps (PPO, GRPO) is not read")
    if settings.text("model_name_or_path") in ("", "True"):
        raise ForeignConfigError(
            f"{source}: names no model; give --model=ORG/NAME, or a folder with a config.json, after the file"
        )
    model = find_model(settings.text("model_name_or_path"), source)
    sharding = _read_trainer_sharding(settings, sharding)
    total = count_devices(settings, sharding, devices)
    is_trl = any(name in settings for name in ("use_peft", "dataset_name", "dataset_mixture", "max_length", "beta"))
    rows = settings.positive("per_device_train_batch_size", sharding.micro_rows or 8)
    accumulate = settings.positive("gradient_accumulation_steps", sharding.accumulate or 1)
    objective = _read_objective(settings)
    if "max_length" not in settings:
        settings.note("the file states no row length: counted as 1024 tokens, the default of TRL")
    if not settings.flag("packing"):
        settings.note("rows are padded to the longest of their batch; the plan is for rows of the maximum length")
    if settings.text("attn_implementation") == "eager":
        settings.note("eager attention keeps the scores of all pairs of tokens: not counted")
    adapter = read_adapter(settings)
    method = "full" if adapter is None else "qlora" if settings.flag("load_in_4bit") else "lora"
    if adapter is None and (settings.flag("load_in_4bit") or settings.flag("load_in_8bit")):
        settings.note("a quantized model is loaded without adapters: counted as trained in its own dtype")
    weights, half = _read_dtypes(settings, is_trl, sharding)
    optimizer = read_optimizer(settings, settings.text("optim", "adamw_torch"))
    divided = divide(
        sharding,
        source=source,
        devices=total,
        accumulate=accumulate,
        is_full=adapter is None,
        weights=weights,
        half=half,
        has_our_state=optimizer != "adamw",
        width=get_width(model),
    )
    for note in divided.notes:
        settings.note(note)
    note_adapter(settings, adapter)
    if "ref_model" in settings:
        # `_read_objective` decides whether a reference exists; its name changes no bytes, but it counts as read.
        settings.raw("ref_model")
    return ForeignRun(
        framework=framework,
        model=model,
        mesh=divided.mesh,
        seq_len=settings.positive("max_length", 1024),
        rows=rows,
        accumulate=accumulate,
        method=method,
        remat=_read_remat(settings, sharding, is_trl),
        precision=divided.precision,
        optimizer=optimizer,
        objective=objective,
        stored=divided.stored,
        adapter=adapter,
        base="int8" if settings.flag("load_in_8bit") and method == "lora" else None,
        offloaded=divided.offloaded,
        whole_logits=not (settings.flag("use_liger_kernel") or settings.flag("use_liger_loss")),
        logit_bytes=LOGIT_BYTES,
        read=settings.read,
        skipped=settings.skipped,
        unknown=settings.unknown,
        notes=tuple(settings.notes),
    )


def _read_trainer_sharding(settings: Settings, sharding: Sharding) -> Sharding:
    """Return the sharding that the Trainer's own arguments choose, if any."""
    words = _join_words(settings.raw("fsdp", ""))
    if has_fsdp(settings.values):
        return replace(read_fsdp(settings.section("fsdp_config"), settings.source, words), devices=sharding.devices)
    if "zero_stage" in settings:
        stage = settings.integer("zero_stage")
        if stage not in (0, 1, 2, 3):
            raise settings.error("zero_stage", f"= {stage}; expected 0, 1, 2 or 3")
        kinds = ("zero0", "zero1", "zero2", "zero3")
        offloaded = ("gradients", "optimizer_state") if settings.flag("offload") and stage else ()
        live = 30_000_000 if stage == 3 else 0
        return replace(sharding, kind=kinds[stage], half=True, offloaded=offloaded, bucket=None, live_parameters=live)
    backend = settings.text("backend")
    if backend == "fsdp":
        return replace(sharding, kind="fsdp", half=True)
    if backend == "deepspeed" and sharding.kind == "ddp":
        return replace(sharding, kind="zero3", half=True, bucket=None, live_parameters=1_000_000_000)
    settings.raw("deepspeed")
    return sharding


def count_devices(settings: Settings, sharding: Sharding, devices: int | None) -> int:
    """Return the number of devices: the target's, or else the files', or else one."""
    machines = settings.positive("num_machines", 1)
    stated = sharding.devices
    if "num_processes" in settings:
        number = settings.positive("num_processes")
        # accelerate counts the processes of all machines, torchrun and deepspeed those of one.
        stated = number if sharding.devices is not None else number * machines
    if devices is not None and stated is not None and stated != devices:
        settings.note(f"the file starts {stated} processes: planned for {devices}, as --target has")
    return devices or stated or 1


def _read_objective(settings: Settings) -> Objective:
    """Return the kind of loss, by the settings that only one trainer has."""
    trainer = settings.text("trainer_type", settings.text("rl")).lower()
    # A recipe does not name its trainer; its folder or its file does.
    words = set() if trainer else set(re.split(r"[^a-z0-9]+", settings.source.lower()))
    if "orpo" in words or trainer == "orpo" or "reward" in trainer:
        settings.note("pairs of answers: twice the rows")
        return "pairs"
    is_pair = bool(words & {"dpo", "apo"}) or trainer in ("dpo", "kto", "ipo", "simpo")
    is_pair = is_pair or "max_prompt_length" in settings or ("beta" in settings and "num_generations" not in settings)
    if not is_pair:
        return "tokens"
    settings.mark_read(["beta", "max_prompt_length", "loss_type"])
    has_adapter = settings.flag("use_peft") or "lora_r" in settings
    if settings.flag("precompute_ref_log_probs"):
        return "pairs"
    if not has_adapter:
        settings.note("pairs of answers: twice the rows, and the reference model's weights, in 16 bits, on the device")
        return "pairs with a reference"
    settings.note("pairs of answers: twice the rows; the reference is the model without its adapters")
    return "pairs"


def read_adapter(settings: Settings) -> Adapter | None:
    """Return the LoRA adapters of a recipe; None if it trains all weights."""
    if "use_peft" in settings and not settings.flag("use_peft"):
        settings.mark_read([name for name in settings.values if name.startswith("lora_")])
        return None
    if not settings.flag("use_peft") and settings.integer("lora_r", 0) == 0:
        return None
    if settings.flag("use_dora"):
        settings.note("DoRA's magnitudes, which are vectors, and its norms of the weights are not counted")
    if "only_optimize_lora" not in settings and "lora_module_name" in settings:
        settings.note(
            "DeepSpeed-Chat trains all weights next to the adapters without --only_optimize_lora: counted as frozen"
        )
    saved = settings.raw("lora_modules_to_save", [])
    saved = saved if isinstance(saved, list) else str(saved).split()
    tables = sum(str(name) in _TABLES for name in saved)
    targets = settings.raw("lora_target_modules", settings.raw("lora_module_name"))
    double = settings.flag("use_bnb_nested_quant") or settings.flag("bnb_4bit_use_double_quant")
    return Adapter(
        settings.positive("lora_r", 16),
        read_lora_targets(settings, targets),
        tables,
        double_quantized=double and settings.flag("load_in_4bit"),
    )


def read_lora_targets(settings: Settings, targets: Any) -> str | None:
    """Return the regex of our layers that have adapters; None for all.

    Args:
        settings: settings, to add notes to.
        targets: a list of names, a regex, or None.
    """
    if targets is None or targets in ("all-linear", ["all-linear"], "all_linear"):
        return None
    names = targets if isinstance(targets, list) else re.findall(r"[a-z]+\w*_proj\w*|[a-z0-9_]+", str(targets))
    patterns = []
    unknown = []
    for name in names:
        short = str(name).rpartition(".")[2]
        if short in _LAYERS:
            patterns.append(_LAYERS[short])
        elif isinstance(targets, list):
            unknown.append(str(name))
    if unknown:
        settings.note(f"adapters of {', '.join(unknown)} are not counted, or counted with the other layers")
    return "|".join(dict.fromkeys(patterns)) or None


def note_adapter(settings: Settings, adapter: Adapter | None) -> None:
    """Add notes about adapters."""
    if adapter is not None and adapter.saved_tables:
        settings.note(
            f"{adapter.saved_tables} token table(s) trained next to the adapters: counted with 16 bytes per element"
        )


def _read_dtypes(settings: Settings, is_trl: bool, sharding: Sharding) -> tuple[str, bool]:
    """Return (dtype of the weights when they are loaded, whether computation is in 16 bits)."""
    name = settings.text("dtype").lower().removeprefix("torch.")
    if not is_trl and name in ("fp16", "bf16"):
        name = {"fp16": "float16", "bf16": "bfloat16"}[name]
    names = {
        "": "float32",
        "none": "float32",
        "null": "float32",
        "auto": "bfloat16",
        "bf16": "bfloat16",
        "fp16": "float16",
    }
    weights = names.get(name, name)
    if weights not in ("float32", "bfloat16", "float16"):
        raise settings.error("torch_dtype", f"= {name!r}; expected auto, bfloat16, float16 or float32")
    # Engines with half precision cast the weights, whatever their dtype is.
    if not name and not sharding.kind.startswith(("zero", "fsdp")):
        settings.note(
            "the file states no dtype of the weights: counted as float32, as transformers loads them before version 5"
        )
    half = settings.flag("bf16") or settings.flag("fp16")
    return weights, half or weights != "float32"


def read_optimizer(settings: Settings, name: str) -> str:
    """Return our optimizer of a name of the Trainer's.

    Raises:
        ForeignConfigError: it is not known.
    """
    plain = name.lower().replace("optimizernames.", "").replace("-", "_")
    if plain not in OPTIMIZERS:
        raise settings.error("optimizer", f"= {name!r} is not known here; known: {', '.join(OPTIMIZERS)}")
    if plain.startswith("paged"):
        settings.note(f"{name}: its state moves to host memory when the device is full; counted on the device")
    if plain in _INEXACT:
        settings.note(f"{name}: {_INEXACT[plain]}")
    return OPTIMIZERS[plain]


def _read_remat(settings: Settings, sharding: Sharding, is_trl: bool) -> str:
    if "gradient_checkpointing" not in settings:
        if sharding.remat:
            return sharding.remat
        if is_trl:
            settings.note("the file does not state gradient_checkpointing: counted as true, TRL's default")
            return "full"
        return "none"
    return "full" if settings.flag("gradient_checkpointing") else sharding.remat or "none"


def describe_model(model: ForeignModel) -> str:
    """Return the name of a model, and that of its shape if it differs."""
    if model.hub_id is not None and model.hub_id != model.name:
        return f"{model.name} (shape of {model.hub_id})"
    return model.name
