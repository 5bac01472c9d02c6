"""The nearest setting of ours to a fact of the public record: config, target and overrides, or why there is none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from tools.bench.public_record import PublicFact, Settings

# The source's words for machines, and ours; the 40 GB of "A100" are named where a source means them.
_TARGETS = {
    "A100": "a100-80", "A100 40 GB": "a100-40", "A100 40 GB SXM4": "a100-40", "A100 80 GB": "a100-80",
    "A100 or H100": "a100-80", "A10G 24 GB": "a10", "H100": "h100", "H100 80 GB": "h100", "H200": "h200",
    "RTX 4090": "4090", "RTX A6000": "a6000", "RTX 6000 Ada 48 GB": "rtx6000ada", "RTX PRO 6000": "rtxpro6000",
    "v4": "v4", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e",
}  # fmt: skip
# Cloud counts the cores of these, of which a chip has two.
_CORES_COUNTED = ("v4", "v5p")
_NOT_OURS = {
    "float8": "products in FP8",
    "tensors over": "tensors and pipelines are cut in ways that a mesh of ours has not",
    "pipeline": "tensors and pipelines are cut in ways that a mesh of ours has not",
    "rows cut over": "rows cut over devices beside FSDP",
    "ZeRO-2": "gradients and state are cut, weights are not",
}
_REMAT = {"full (each layer)": "full", "none": "none", "selective (torchtitan)": "dots", "full": "full"}
_LORA_TARGETS = {
    "q and v": "attention/(query|value)",
    "q, v, output and the MLP": "attention/(query|value|output)|mlp",
    "all linear layers": "attention|mlp",
}
_RANK = re.compile(r"rank (\d+) on ([\w, ]+?)(?:, [\d,]+ trainable)?$")


class NearestSetting(NamedTuple):
    """A plan that comes nearest to a fact.

    Attributes:
        config: as --config takes it.
        target: as --target takes it.
        overrides: of the config's fields, by path.
    """

    config: str
    target: str
    overrides: dict[str, str]


class NotPlannedError(ValueError):
    """There is no setting of ours that comes near; the text says why."""


def nearest_setting(fact: PublicFact, shapes: Path) -> NearestSetting:
    """The setting that comes nearest to a fact.

    Args:
        fact: what was published.
        shapes: a folder, in which the shapes of models are written that were not published.

    Raises:
        NotPlannedError: nothing comes near, or the source leaves too much unsaid.
    """
    settings = fact.settings
    _refuse_others(fact)
    if settings.seq_len is None:
        raise NotPlannedError("the source does not say how long a row is")
    if settings.rows_per_device is None and settings.global_batch is None:
        raise NotPlannedError("the source does not say how many rows a device has")
    overrides = {"data.seq_len": str(settings.seq_len), "data.global_batch_size": str(_global_batch(fact))}
    overrides |= _training(settings)
    overrides |= _adapters(settings)
    return NearestSetting(_config(fact, shapes), _target(fact), overrides)


def _refuse_others(fact: PublicFact) -> None:
    settings = fact.settings
    described = f"{settings.precision} {settings.sharding}"
    for words, reason in _NOT_OURS.items():
        if words in described and f"{words} over 1" not in described:
            raise NotPlannedError(reason)
    if settings.method == "adapter":
        raise NotPlannedError("LLaMA-Adapter is not one of our methods")
    if settings.quantization == "bnb.nf4-dq":
        raise NotPlannedError("double quantization: ours keeps the scales in float32")
    if fact.machine not in _TARGETS:
        raise NotPlannedError(f"no such machine: {fact.machine}")
    if fact.verdict == "needs":
        raise NotPlannedError("a rule of thumb, with no setting")


def _config(fact: PublicFact, shapes: Path) -> str:
    prefix = {"lora": "lora:", "qlora": "qlora:"}.get(fact.settings.method, "hf:")
    if fact.hub_id is not None:
        return prefix + fact.hub_id
    if fact.shape is None or "model_type" not in fact.shape:
        raise NotPlannedError("the shape of the model was not published")
    folder = shapes / re.sub(r"\W+", "-", fact.model)
    folder.mkdir(parents=True, exist_ok=True)
    fields: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "head_dim": fact.shape["hidden_size"] // fact.shape["num_attention_heads"],
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(fields | fact.shape))
    return prefix + str(folder)


def _target(fact: PublicFact) -> str:
    name = _TARGETS[fact.machine]
    if not name.startswith("v"):
        return name if fact.devices == 1 else f"{name}x{fact.devices}"
    count = 2 * fact.devices if name in _CORES_COUNTED else fact.devices
    return f"{name}-{count}"


def _global_batch(fact: PublicFact) -> int:
    # The rows that are computed at a time decide, not those of an update: gradients that add up take
    # as much room as gradients.
    if fact.settings.rows_per_device is not None:
        return fact.settings.rows_per_device * fact.devices
    assert fact.settings.global_batch is not None
    return fact.settings.global_batch


def _training(settings: Settings) -> dict[str, str]:
    overrides = {}
    if settings.precision == "all bfloat16":
        overrides |= {"learner.master_dtype": "none", "learner.moment_dtype": "bfloat16"}
        # Adapters are in float32 here, and need no rounding.
        if settings.method == "full":
            overrides["learner.rounding"] = "stochastic"
    if settings.optimizer and "8bit" in settings.optimizer:
        overrides["learner.optimizer"] = "adamw8bit"
    if "backward" in f"{settings.update} {settings.optimizer}":
        # Their recipes do not clip.
        overrides |= {"memory.update": "in_backward", "learner.clip": "none"}
    if settings.remat in _REMAT:
        overrides["memory.remat"] = _REMAT[settings.remat]
    if settings.offload and "layer's input in host memory" in settings.offload:
        raise NotPlannedError("activations in host memory on a GPU, where XLA's gradients of them are wrong")
    if settings.offload and settings.offload != "none":
        raise NotPlannedError(f"in host memory: {settings.offload}")
    return overrides


def _adapters(settings: Settings) -> dict[str, str]:
    if settings.method not in ("lora", "qlora"):
        return {}
    match = _RANK.match(settings.lora or "")
    if match is None or match[2] not in _LORA_TARGETS:
        # Adapters are small: their place hardly counts.
        return {}
    return {"model.lora.rank": match[1], "model.lora.targets": _LORA_TARGETS[match[2]]}
