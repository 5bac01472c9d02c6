"""LLaMA-Factory: its settings in the names of the Hugging Face Trainer, which it is built on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plimsoll.extras.other_frameworks.settings import Settings

NAME = "LLaMA-Factory"
# Regex of its settings that change neither memory nor time.
SKIPPED = (
    r"template|stage|max_samples|plot_loss|flash_attn|quantization_(method|type)|train_on_prompt|mask_history|val_size"
    r"|overwrite_cache|media_dir|interleave_probs|mix_strategy|tokenized_path|cache_dir|loraplus.*|pref_(loss|beta|ftx)"
    r"|dpo_label_smoothing|simpo_gamma|adapter_name_or_path|upcast_layernorm|resize_vocab|rope_scaling|use_fast_tokenizer"
    r"|split_special_tokens|compute_accuracy|include_.*|use_rslora|create_new_adapter|packing|neat_packing"
)
_RENAMED = {
    "lora_rank": "lora_r",
    "additional_target": "lora_modules_to_save",
    "cutoff_len": "max_length",
    "enable_liger_kernel": "use_liger_kernel",
    "double_quantization": "bnb_4bit_use_double_quant",
}
_TRAINERS = {"pt": "sft", "sft": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto"}


def is_config(names: Mapping[str, Any]) -> bool:
    """Return whether names of settings are those of LLaMA-Factory."""
    return "finetuning_type" in names or ("stage" in names and ("template" in names or "cutoff_len" in names))


def translate(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the settings in the names of the Trainer and TRL, with LLaMA-Factory's defaults.

    Args:
        values: {name: value}.
        source: name of the file, for messages.

    Raises:
        ForeignConfigError: the run is of a kind that is not read.
    """
    settings = Settings(values, source, SKIPPED)
    method = settings.text("finetuning_type", "lora").lower()
    if method not in ("lora", "full"):
        raise settings.error("finetuning_type", f"= {method!r}; read are full and lora")
    stage = settings.text("stage", "sft").lower()
    if stage not in _TRAINERS:
        raise settings.error("stage", f"= {stage!r}; read are {', '.join(_TRAINERS)}")
    names = [name for name in values if name not in _TAKEN and (method == "lora" or not name.startswith("lora_"))]
    translated = {_RENAMED.get(name, name): values[name] for name in names}
    # Neither loss has a reference model.
    has_no_reference = settings.text("pref_loss") in ("orpo", "simpo")
    translated["trainer_type"] = "orpo" if stage == "dpo" and has_no_reference else _TRAINERS[stage]
    translated["use_peft"] = method == "lora"
    translated.setdefault("max_length", 2048)
    translated["gradient_checkpointing"] = not settings.flag("disable_gradient_checkpointing")
    has_half = settings.flag("bf16") or settings.flag("fp16") or settings.flag("pure_bf16")
    # Weights that are trained are cast to float32, unless all of training is in bfloat16.
    is_float32 = not has_half or (method == "full" and not settings.flag("pure_bf16"))
    translated["dtype"] = "float32" if is_float32 else "float16" if settings.flag("fp16") else "bfloat16"
    if method == "lora":
        translated.setdefault("lora_r", 8)
        target = settings.raw("lora_target", "all")
        names = target if isinstance(target, list) else [name.strip() for name in str(target).split(",")]
        translated["lora_target_modules"] = "all-linear" if names == ["all"] else names
        translated |= _read_quantization(settings)
    if settings.flag("use_unsloth"):
        # Its loss is computed by a fused kernel.
        translated["use_liger_kernel"] = True
    for name, optimizer in _OPTIMIZERS.items():
        if settings.flag(name):
            translated["optim"] = optimizer
    return translated


_OPTIMIZERS = {
    "use_galore": "galore_adamw",
    "use_apollo": "apollo_adamw",
    "use_adam_mini": "adam_mini",
    "use_muon": "muon",
}
# Settings that become others.
_TAKEN = (
    *("finetuning_type", "disable_gradient_checkpointing", "lora_target", "quantization_bit", "pure_bf16"),
    *("use_unsloth", *_OPTIMIZERS),
)


def _read_quantization(settings: Settings) -> dict[str, bool]:
    """Return the Trainer's flags for the storage of the frozen weights."""
    if "quantization_bit" not in settings:
        return {}
    bits = settings.integer("quantization_bit")
    if bits == 8:
        return {"load_in_8bit": True}
    if bits != 4:
        raise settings.error("quantization_bit", f"= {bits}; read are 4 and 8")
    is_double = settings.flag("double_quantization", True)
    return {"load_in_4bit": True, "bnb_4bit_use_double_quant": is_double}
