"""Our nearest setting to a fact of the public record: config, target and overrides, or why there is none."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from plimsoll.extras.other_frameworks.mapping import LOW_PRECISION_TARGETS, REMAT, get_precision_overrides
from plimsoll.framework.families.published import load_published_models
from tools.bench.public_record import PublicFact, Settings

# Maps the source's names of machines to ours. "A100" means 80 GB; sources that mean 40 GB are named separately.
_TARGETS = {
    "A100": "a100-80", "A100 40 GB": "a100-40", "A100 40 GB SXM4": "a100-40", "A100 80 GB": "a100-80",
    "A100 or H100": "a100-80", "A10G 24 GB": "a10", "H100": "h100", "H100 80 GB": "h100", "H200": "h200",
    "H100 96 GB HBM2e, 500 W": "h100",
    "RTX 4090": "4090", "RTX 5090": "5090", "RTX A6000": "a6000", "RTX 6000 Ada 48 GB": "rtx6000ada",
    "RTX PRO 6000": "rtxpro6000", "GH200": "gh200", "v4": "v4", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e",
    "tpu7x": "tpu7x",
    # A card of each size, for sources that state only the memory.
    "GPU with 8 GB": "rtx4060ti-8", "GPU with 12 GB": "rtx3060", "GPU with 16 GB": "rtx4060ti-16",
    "GPU with 24 GB": "4090", "GPU with 40 GB": "a100-40", "GPU with 48 GB": "a6000", "GPU with 80 GB": "a100-80",
}  # fmt: skip
# Cloud TPU names count cores for these, with two cores per chip.
_CORES_COUNTED = ("v4", "v5p", "tpu7x")
# The largest slice of these; more chips are several slices.
_LARGEST_SLICE = {"v5e": 256, "v6e": 256}
# Machines that differ from our target only in memory: GiB that a program may use, 0.92 of the memory CUDA reports,
# the limit when the facts were planned.
_MEMORY_GIB = {"H100 96 GB HBM2e, 500 W": 86.1}
# Sources whose rows are those of a group of devices that shard rows or tensors. Others count the rows of a device.
_COUNT_ROWS_OF_A_GROUP = ("pytorch/torchtitan",)
_NOT_OURS = {"ZeRO-2": "gradients and state are cut, weights are not"}
# Maps the source's words for what is offloaded to the fields of `memory` that offload it.
_OFFLOADED_FIELDS = {
    "each layer's input in host memory": ("activations",),
    "the 8-bit state in host memory, as the card is full": ("optimizer_state",),
    "gradients, optimizer state and float32 masters in host memory, the CPU updates": ("gradients", "optimizer_state"),
    "parameters, gradients and state in host memory (fsdp_cpu_offload); the update runs on the CPU": (
        "parameters",
        "gradients",
        "optimizer_state",
    ),
    "parameters, gradients, state and saved activations in host memory": (
        "parameters",
        "gradients",
        "optimizer_state",
        "activations",
    ),
    "parameters, gradients, state and layer inputs in host memory; the update runs on the CPU": (
        "parameters",
        "gradients",
        "optimizer_state",
        "activations",
    ),
    "frozen parameters and layer inputs in host memory": ("parameters", "activations"),
    "frozen parameters and saved activations in host memory": ("parameters", "activations"),
    "saved activations in host memory": ("activations",),
}
# Maps the source's words for how arrays are sharded to the axes of our mesh.
_MESH_AXES = {"FSDP": "fsdp", "tensors": "model", "data": "data", "rows cut": "seq"}
_MESH_PART = re.compile(r"(FSDP|tensors|data|rows cut) over (\d+)")
_PIPELINE = re.compile(r"pipeline (?:over|of) (\d+)(?: in (\d+) chunks)?")
_LORA_TARGETS = {
    "q and v": "attention/(query|value)",
    "q, v, output and the MLP": "attention/(query|value|output)|mlp",
    "all linear layers": "attention|mlp",
    # Our embedding tables cannot have adapters.
    "all linear layers and the head": "attention|mlp",
}
_RANK = re.compile(r"rank (\d+) on ([\w, ]+?)(?:, [\d,]+ trainable)?$")


class NearestSetting(NamedTuple):
    """The plan nearest to a fact.

    Attributes:
        config: value of --config.
        target: value of --target.
        overrides: overrides of the config's fields, by path.
        device_memory_gib: memory of a device in GiB, if it differs from the target's.
    """

    config: str
    target: str
    overrides: dict[str, str]
    device_memory_gib: float | None = None


class NotPlannedError(ValueError):
    """None of our settings comes near; the text explains why."""


def nearest_setting(fact: PublicFact, shapes: Path) -> NearestSetting:
    """Return the setting nearest to a fact.

    Args:
        fact: the published fact.
        shapes: folder to write the shapes of unpublished models to.

    Raises:
        NotPlannedError: nothing comes near, or the source leaves too much unspecified.
    """
    _refuse_others(fact)
    fact = dataclasses.replace(fact, settings=dataclasses.replace(fact.settings, **(fact.settings.assumed or {})))
    settings = fact.settings
    if settings.seq_len is None:
        raise NotPlannedError("the source does not say how long a row is")
    if settings.rows_per_device is None and settings.global_batch is None:
        raise NotPlannedError("the source does not say how many rows a device has")
    overrides = {"data.seq_len": str(settings.seq_len), "data.global_batch_size": str(_global_batch(fact))}
    overrides |= _mesh(fact)
    overrides |= _training(settings)
    overrides |= _pipeline(fact)
    overrides |= _adapters(settings)
    return NearestSetting(_config(fact, shapes), _target(fact), overrides, _MEMORY_GIB.get(fact.machine))


def _refuse_others(fact: PublicFact) -> None:
    settings = fact.settings
    if fact.not_of_the_step is not None:
        raise NotPlannedError(fact.not_of_the_step)
    described = f"{settings.precision} {settings.sharding}"
    if match := _PIPELINE.search(settings.sharding or ""):
        count = _count_repeats(fact)
        if count % (int(match[1]) * int(match[2] or 1)):
            raise NotPlannedError(f"the stages of a pipeline are alike: {match[1]} do not divide {count} equal repeats")
    for phrase, reason in _NOT_OURS.items():
        if phrase in described:
            raise NotPlannedError(reason)
    if "float8" in described and "B-A" in fact.model:
        raise NotPlannedError("products of experts in FP8")
    if settings.method == "adapter":
        raise NotPlannedError("LLaMA-Adapter is not one of our methods")
    if settings.quantization == "bnb.nf4-dq":
        raise NotPlannedError("double quantization: ours keeps the scales in float32")
    if fact.machine not in _TARGETS:
        raise NotPlannedError(f"no such machine: {fact.machine}")
    if fact.verdict == "needs" and settings.seq_len is None:
        raise NotPlannedError("a rule of thumb, with no setting")


def _config(fact: PublicFact, shapes: Path) -> str:
    prefix = {"lora": "lora:", "qlora": "qlora:"}.get(fact.settings.method, "hf:")
    if fact.hub_id is not None:
        return prefix + fact.hub_id
    if fact.shape is None or "model_type" not in fact.shape:
        raise NotPlannedError("the shape of the model was not published")
    folder = shapes / re.sub(r"\W+", "-", fact.model)
    folder.mkdir(parents=True, exist_ok=True)
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[fact.shape["model_type"]]
    fields: dict[str, Any] = {
        "architectures": [architecture],
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
    devices = _devices(fact)
    if not name.startswith(("v", "tpu")):
        return name if devices == 1 else f"{name}x{devices}"
    largest = _LARGEST_SLICE.get(name, devices)
    if devices > largest:
        return f"{devices // largest}x{name}-{largest}"
    count = 2 * devices if name in _CORES_COUNTED else devices
    return f"{name}-{count}"


def _devices(fact: PublicFact) -> int:
    return fact.settings.devices_used or fact.devices


def _mesh(fact: PublicFact) -> dict[str, str]:
    """Return the axes of the mesh, if the source specifies what is sharded over how many devices."""
    sizes = {_MESH_AXES[what]: count for what, count in _MESH_PART.findall(fact.settings.sharding or "")}
    return {f"mesh.{axis}": count for axis, count in ({"data": "1", "fsdp": "1"} | sizes).items()} if sizes else {}


def _count_repeats(fact: PublicFact) -> int:
    """Return how often a model repeats its pattern of layers."""
    shape = fact.shape if fact.hub_id is None else load_published_models()[fact.hub_id].config
    assert shape is not None, fact.model
    # gpt-oss alternates between layers with and without a window.
    period = 2 if shape["model_type"] == "gpt_oss" else 1
    num_layers = shape["num_hidden_layers"]
    assert isinstance(num_layers, int), fact.model
    return num_layers // period


def _pipeline(fact: PublicFact) -> dict[str, str]:
    """Return the overrides of a pipeline, whose source gives the rows of a microbatch and those of an update.

    Weights are sharded over the devices that are left. Theirs are replicas, which share only the optimizer state.
    """
    settings = fact.settings
    match = _PIPELINE.search(settings.sharding or "")
    if match is None:
        return {}
    assert settings.rows_per_device is not None
    assert settings.global_batch is not None
    groups = _devices(fact) // int(match[1])
    for what, count in _MESH_PART.findall(settings.sharding or ""):
        groups //= int(count) if what in ("tensors", "rows cut") else 1
    return {
        "mesh.fsdp": str(groups),
        "mesh.pipe": match[1],
        "mesh.pipe_chunks": match[2] or "1",
        "data.global_batch_size": str(settings.global_batch),
        "learner.accumulate": str(settings.global_batch // (settings.rows_per_device * groups)),
    }


def _global_batch(fact: PublicFact) -> int:
    # The rows computed at a time matter, not those of an update: accumulated gradients take as much memory as
    # gradients. With offloading, the update takes as long for more rows, so the rate depends on their number.
    if fact.settings.rows_per_device is not None:
        groups = _devices(fact)
        if fact.source.repository in _COUNT_ROWS_OF_A_GROUP:
            for what, count in _MESH_PART.findall(fact.settings.sharding or ""):
                groups //= int(count) if what in ("tensors", "rows cut") else 1
        return fact.settings.rows_per_device * groups * _accumulation(fact.settings)
    assert fact.settings.global_batch is not None
    return fact.settings.global_batch


def _accumulation(settings: Settings) -> int:
    is_offloaded = settings.offload not in (None, "none")
    return settings.accumulation or 1 if is_offloaded else 1


def _training(settings: Settings) -> dict[str, str]:
    overrides = {}
    if _accumulation(settings) > 1:
        overrides["learner.accumulate"] = str(_accumulation(settings))
    if settings.attention == "splash, operands in float32":
        overrides["model.stack.pattern.0.attention.kernel_dtype"] = "float32"
    if settings.loss == "whole":
        overrides["model.head.chunk_tokens"] = "0"
    overrides |= get_precision_overrides(settings.precision or "", is_full=settings.method == "full")
    if settings.optimizer and "8bit" in settings.optimizer:
        overrides |= {"learner.optimizer": "adamw8bit", "learner.optimizer.learning_rate": "1e-4"}
    if "backward" in f"{settings.update} {settings.optimizer}":
        # Their recipes do not clip.
        overrides |= {"memory.update": "in_backward", "learner.clip": "none"}
    if "float8" in (settings.precision or ""):
        # All linear layers but the head, with a scale for each array, as torchao and Transformer Engine do by default.
        overrides["model.precision"] = json.dumps({LOW_PRECISION_TARGETS: "fp8_tensor"})
    if settings.remat is not None:
        if settings.remat not in REMAT:
            raise NotPlannedError(f"what a layer keeps is not one of our policies: {settings.remat}")
        overrides["memory.remat"] = REMAT[settings.remat]
    return overrides | _offloading(settings)


def _offloading(settings: Settings) -> dict[str, str]:
    """Return the overrides that offload arrays to host memory; on a GPU, only layer programs can move them."""
    if settings.offload in (None, "none"):
        return {}
    offloaded = _OFFLOADED_FIELDS.get(settings.offload)
    if offloaded is None:
        raise NotPlannedError(f"in host memory: {settings.offload}")
    overrides = {"memory.update": "layer_programs"} | {f"memory.{field}": "pinned_host" for field in offloaded}
    if "backward" in f"{settings.update} {settings.optimizer}":
        overrides["memory.gradients"] = "none"
    return overrides


def _adapters(settings: Settings) -> dict[str, str]:
    if settings.method not in ("lora", "qlora"):
        return {}
    # bitsandbytes quantizes all linear layers, including those without adapters; torchtune only those with adapters.
    overrides = {} if settings.quantization is None else {"model.lora.base_targets": "."}
    match = _RANK.match(settings.lora or "")
    if match is None or match[2] not in _LORA_TARGETS:
        # Adapters are small, so it hardly matters which layers have them.
        return overrides
    return overrides | {"model.lora.rank": match[1], "model.lora.targets": _LORA_TARGETS[match[2]]}
