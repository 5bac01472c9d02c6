"""The config, the target and the overrides of ours that come nearest to a run of another framework.

The tables of words are shared with `tools/bench/record_settings.py`, which maps published measurements to our fields.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from plimsoll.extras.other_frameworks.foreign_run import ForeignConfigError, ForeignRun, ModelShape

# Maps other frameworks' words for what a layer saves to memory.remat.
REMAT = {
    "full (each layer)": "full",
    "none": "none",
    # torchtitan saves attention, and the first, third, fifth and seventh of a layer's products.
    "selective (torchtitan)": "save:query,value,attention,mlp_gate,mlp_down",
    # MaxText's policies, by their names in src/maxtext/layers/decoders.py.
    "minimal": "save:query,key,value,output,mlp_gate,mlp_up,mlp_down",
    "minimal_flash": "save:query,key,value,attention,output,mlp_gate,mlp_up,mlp_down",
    "minimal_with_context": "save:query,key,value,attention,output,mlp_gate,mlp_up,mlp_down",
    "save_dot_except_mlpwi": "save:query,key,value,output,mlp_down",
    "save_dot_except_mlp": "save:query,key,value,output",
    "save_dot_with_context_except_mlp": "save:query,key,value,attention,output",
    "save_qkv_proj": "save:query,key,value",
    "save_out_proj": "save:output",
    "qkv projections in host memory, the rest again": "offload:query,key,value",
    # MaxText's custom policy, by the tensors that a recipe names, without mlpwo: the backward pass does not need the
    # result of the down projection.
    "custom: layer inputs in host memory": "offload",
    "custom: layer inputs and qkv projections in host memory": "offload:input,query,key,value",
    "custom: layer inputs, qkv and output projections in host memory": "offload:input,query,key,value,output",
    "custom: layer inputs, qkv projections and attention saved": "save:query,key,value,attention",
    "custom: key and value saved, layer inputs in host memory": "save:key,value;offload:input",
    "results of products saved": "save:query,key,value,attention,output,mlp_gate,mlp_up",
    # Megatron-LM's selective recomputation repeats the core of attention, which a flash kernel does anyway.
    "selective (Megatron-LM)": "none",
}
# Maps words for the dtypes of a run to fields of ours.
PRECISIONS = {
    "bfloat16, float32 master": {},
    "float8 and bfloat16": {},
    # Float32 weights need no master copy.
    "float32 weights, bfloat16 products": {"model.param_dtype": "float32", "learner.master_dtype": "none"},
    "float32": {
        "model.param_dtype": "float32",
        "model.compute_dtype": "float32",
        "learner.master_dtype": "none",
        "learner.moment_dtype": "none",
    },
    "all bfloat16": {"learner.master_dtype": "none", "learner.moment_dtype": "bfloat16"},
}
# The regex of a model's linear layers except its head, whose products run in 8 bits.
LOW_PRECISION_TARGETS = "attention|mlp"
_MIXTURE = "model.stack.pattern.0.mlp."
_ATTENTION = "model.stack.pattern.0.attention."


@dataclass(frozen=True)
class PlanFlags:
    """The flags of our plan.

    Attributes:
        config: value of --config.
        overrides: overrides of the config's fields, by path.
        notes: what the flags only approximate.
    """

    config: str
    overrides: dict[str, str]
    notes: list[str] = field(default_factory=list)


def get_precision_overrides(words: str, *, is_full: bool) -> dict[str, str]:
    """Return the overrides for the dtypes of a run.

    Args:
        words: a key of PRECISIONS, or other words, which need no override.
        is_full: all weights are trained; adapters are in float32 and need no rounding.
    """
    overrides = dict(PRECISIONS.get(words, {}))
    if words == "all bfloat16" and is_full:
        overrides["learner.rounding"] = "stochastic"
    return overrides


def build_flags(run: ForeignRun) -> PlanFlags:
    """Return the flags that describe a run.

    Raises:
        ForeignConfigError: our configs cannot describe it.
    """
    config, overrides = _choose_config(run)
    notes: list[str] = []
    if "model.vocab_size" in overrides:
        overrides["data.tokenizer.vocab_size"] = overrides["model.vocab_size"]
    overrides |= {"data.seq_len": str(run.seq_len), "data.global_batch_size": str(run.global_rows)}
    if run.accumulate > 1:
        overrides["learner.accumulate"] = str(run.accumulate)
    overrides |= _describe_mesh(run, overrides, notes)
    overrides |= _set_published_dtype(run)
    overrides |= get_precision_overrides(run.precision, is_full=run.method == "full")
    if run.low_precision is not None:
        overrides["model.precision"] = json.dumps({LOW_PRECISION_TARGETS: run.low_precision})
    if run.optimizer != "adamw":
        if run.optimizer not in ("adamw8bit", "lion"):
            # Rules of the config set the weight decay, which not all optimizers have.
            overrides["learner.rules"] = "[]"
        overrides |= {"learner.optimizer": run.optimizer, "learner.optimizer.learning_rate": "1e-4"}
    if run.whole_logits:
        overrides["model.head.chunk_tokens"] = "0"
    overrides["memory.remat"] = run.remat
    if run.offloaded:
        # On a GPU, only layer programs can move arrays between device and host memory.
        is_tpu = run.machine is not None and run.machine.startswith(("v", "tpu"))
        overrides["memory.update"] = "streamed" if is_tpu else "layer_programs"
        overrides |= {f"memory.{name}": "pinned_host" for name in run.offloaded}
    if run.adapter is not None:
        overrides["model.lora.rank"] = str(run.adapter.rank)
        if run.adapter.targets is not None:
            overrides["model.lora.targets"] = run.adapter.targets
        if run.base == "int8":
            # bitsandbytes quantizes all linear layers but the head, including those without adapters.
            overrides |= {"model.lora.base": "int8", "model.lora.base_targets": "."}
    return PlanFlags(config, overrides | dict(run.overrides), notes)


def _choose_config(run: ForeignRun) -> tuple[str, dict[str, str]]:
    """Return (value of --config, overrides of the model)."""
    prefix = {"full": "hf:", "lora": "lora:", "qlora": "qlora:"}[run.method]
    if run.model.hub_id is not None:
        return prefix + run.model.hub_id, dict(run.model.overrides)
    if run.model.shape is None:
        raise ForeignConfigError(f"{run.framework}: no shape is known of the model {run.model.name!r}")
    config, overrides = describe_shape(run.model.shape)
    if run.method != "full":
        overrides |= {"model.lora": "LoRA", "learner.master_dtype": "none", "learner.moment_dtype": "none"}
        overrides["learner.rules"] = "[]"
        if run.method == "qlora":
            overrides |= {"model.lora.base": "nf4", "model.lora.base_targets": "."}
    return config, overrides | dict(run.model.overrides)


def describe_shape(shape: ModelShape) -> tuple[str, dict[str, str]]:
    """Return (the named config that has such layers, the overrides that give it the sizes of a shape)."""
    if shape.heads % shape.kv_heads:
        raise ForeignConfigError(f"{shape.kv_heads} key heads do not divide {shape.heads} query heads")
    is_gpt2 = shape.layer_norm and shape.learned_positions is not None and not shape.experts
    config = "gpt2-124m" if is_gpt2 else "llama2-7b"
    if shape.experts:
        config = "glm-4.5-air" if shape.dense_layers else "mixtral-8x7b"
    sizes: dict[str, object] = {
        "model.dim": shape.dim,
        "model.vocab_size": shape.vocab_size,
        "model.stack.num_layers": shape.layers - shape.dense_layers * bool(shape.experts),
        "model.head.tied": shape.tied,
    }
    blocks = [_ATTENTION]
    if shape.experts and shape.dense_layers:
        sizes["model.first.num_layers"] = shape.dense_layers
        sizes["model.first.pattern.0.mlp.hidden"] = shape.hidden
        blocks.append("model.first.pattern.0.attention.")
    for block in blocks:
        sizes[f"{block}num_heads"] = shape.heads
        sizes[f"{block}num_kv_heads"] = shape.kv_heads
        sizes[f"{block}head_dim"] = shape.head_dim or shape.dim // shape.heads
        sizes[f"{block}linear.bias"] = shape.biased
        if config == "glm-4.5-air":
            # Its heads are partly rotated, which takes the same time.
            sizes[f"{block}rotary.rotary_dim"] = None
        if shape.qk_norm:
            sizes[f"{block}qk_norm"] = "RMSNorm"
    if shape.experts:
        sizes[f"{_MIXTURE}num_experts"] = shape.experts
        sizes[f"{_MIXTURE}router.top_k"] = shape.top_k
        sizes[f"{_MIXTURE}experts.hidden"] = shape.expert_hidden or shape.hidden
        if shape.shared_hidden and not shape.dense_layers:
            sizes[f"{_MIXTURE}shared"] = "MLP"
            sizes |= {f"{_MIXTURE}shared.activation": "silu", f"{_MIXTURE}shared.gated": True}
        if shape.shared_hidden:
            sizes[f"{_MIXTURE}shared.hidden"] = shape.shared_hidden
        elif shape.dense_layers:
            sizes[f"{_MIXTURE}shared"] = None
    else:
        sizes[f"{_MIXTURE}hidden"] = shape.hidden
        sizes[f"{_MIXTURE}gated"] = shape.gated
        sizes[f"{_MIXTURE}linear.bias"] = shape.biased
        if not shape.gated and not is_gpt2:
            sizes[f"{_MIXTURE}activation"] = "gelu"
    if is_gpt2:
        sizes["model.embed.max_positions"] = shape.learned_positions
    return config, {path: _format(value) for path, value in sizes.items()}


def _describe_mesh(run: ForeignRun, overrides: dict[str, str], notes: list[str]) -> dict[str, str]:
    """Return the overrides of the mesh, and add notes about what they approximate."""
    mesh = run.mesh
    axes = {
        "data": mesh.replicas,
        "fsdp": mesh.shards,
        "model": mesh.tensors,
        "seq": mesh.rows,
        "pipe": mesh.stages,
        "pipe_chunks": mesh.chunks,
        "expert": mesh.experts,
    }
    described = {f"mesh.{axis}": str(size) for axis, size in axes.items() if size > 1 or axis in ("data", "fsdp")}
    if mesh.stages > 1:
        layers = _count_layers(run, overrides)
        parts = mesh.stages * mesh.chunks
        if layers is not None and layers % parts:
            padded = -(-layers // parts) * parts
            described["model.stack.num_layers"] = str(padded)
            notes.append(
                f"{layers} layers do not divide into {parts} equal parts of a pipeline: counted as {padded}, so that "
                "each part is as large as the largest"
            )
    return described


def _set_published_dtype(run: ForeignRun) -> dict[str, str]:
    """Return the overrides of dtypes that a config of a model published in float32 would not have."""
    if run.model.hub_id is None or "bfloat16" not in run.precision:
        return {}
    # Imported here, because the package imports JAX.
    from plimsoll.framework.families.published import load_published_models

    published = load_published_models().get(run.model.hub_id)
    if published is None or published.config.get("torch_dtype", "float32") != "float32":
        return {}
    dtypes = {"model.param_dtype": "bfloat16", "model.compute_dtype": "bfloat16"}
    return dtypes | (
        {"learner.master_dtype": "float32", "learner.moment_dtype": "float32"} if run.method == "full" else {}
    )


def _count_layers(run: ForeignRun, overrides: dict[str, str]) -> int | None:
    """Return the number of layers of the stack; None if it is not known without building the model."""
    if "model.stack.num_layers" in overrides:
        return int(overrides["model.stack.num_layers"])
    if run.model.hub_id is None:
        return None
    # Imported here, because the package imports JAX.
    from plimsoll.framework.families.published import load_published_models

    published = load_published_models().get(run.model.hub_id)
    layers = None if published is None else published.config.get("num_hidden_layers")
    return layers if isinstance(layers, int) else None


def _format(value: object) -> str:
    """Return a value as the command line has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else str(value)
