"""Llama 2 and 3, Mistral, Qwen2, Qwen2.5 and Qwen3: RMSNorm, rotary positions, gated MLP, the same names of tensors.

Defaults that a config.json leaves out are those of transformers' configuration classes.
"""

from __future__ import annotations

from typing import Any

from configs.parts import llama_model
from framework.config import Config, component, config_for
from framework.layers.norm import RMSNorm
from framework.layers.rotary import LinearScaling, Llama3Scaling
from framework.pretrained import Family, Source

ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
_LAYER = "model.layers.{layer}"


def decoder_names(**norms: str) -> dict[str, Source]:
    """Names as all that descend from Llama use them; `norms` are those of a block, by ours."""
    names = {
        "embed/token": Source("model.embed_tokens.weight"),
        "head/norm/scale": Source("model.norm.weight"),
        "head/table": Source("lm_head.weight"),
        "attention/query_norm/scale": Source(f"{_LAYER}.self_attn.q_norm.weight"),
        "attention/key_norm/scale": Source(f"{_LAYER}.self_attn.k_norm.weight"),
    }
    names |= {f"{ours}/scale": Source(f"{_LAYER}.{theirs}.weight") for ours, theirs in norms.items()}
    linear = {f"attention/{name}": f"self_attn.{name[0]}_proj" for name in ("query", "key", "value", "output")}
    linear |= {f"mlp/{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    for ours, theirs in linear.items():
        names[f"{ours}/weight"] = Source(f"{_LAYER}.{theirs}.weight", transpose=True)
        names[f"{ours}/bias"] = Source(f"{_LAYER}.{theirs}.bias")
    return names


def activation(name: str) -> str:
    """Ours of transformers'. Raises ValueError for an unknown one."""
    if name not in ACTIVATIONS:
        raise ValueError(f"config.json: hidden_act = {name!r}; expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def activation_fact(ours: str) -> str:
    """The inverse of `activation`. Raises ValueError for one that transformers has not."""
    if ours not in ACTIVATIONS.values():
        raise ValueError(f"mlp.activation = {ours}")
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)


def rope(facts: dict[str, Any]) -> tuple[float, Config | None]:
    """(theta, scaling) of a config.json, as transformers 4 or 5 writes it. Raises ValueError for an unknown scaling."""
    scaling = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta", facts.get("rope_theta", 10_000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "llama3":
        fields = {name: scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor")}
        length = scaling.get("original_max_position_embeddings", facts.get("max_position_embeddings"))
        return theta, config_for(Llama3Scaling, **fields, original_length=length)
    if kind == "linear":
        return theta, config_for(LinearScaling, factor=scaling["factor"])
    if kind != "default" or scaling.get("partial_rotary_factor", facts.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"config.json: rope scaling {scaling}; expected rope_type default, linear or llama3")
    return theta, None


def rope_facts(rotary: Config) -> dict[str, Any]:
    """The inverse of `rope`."""
    facts: dict[str, Any] = {"rope_theta": rotary.theta}
    if rotary.scaling is None:
        return facts
    scaling = dict(rotary.scaling.leaves())
    if (length := scaling.pop("original_length", None)) is None:
        return {**facts, "rope_scaling": {"rope_type": "linear", **scaling}}
    return {**facts, "rope_scaling": {"rope_type": "llama3", **scaling, "original_max_position_embeddings": length}}


def with_windows(model: Config, windows: list[int | None]) -> Config:
    """The model with layer i attending to windows[i] positions: the shortest pattern that repeats."""
    count = len(windows)
    period = next(p for p in range(1, count + 1) if count % p == 0 and windows == windows[:p] * (count // p))
    blocks = [model.stack.pattern[0].copy() for _ in range(period)]
    for block, window in zip(blocks, windows, strict=False):
        block.attention.window = window
    model.stack.pattern = blocks
    return model


def windows_of(model: Config) -> list[int | None]:
    """The inverse of `with_windows`."""
    pattern = [block.attention.window for block in model.stack.pattern]
    return pattern * (model.stack.num_layers // len(pattern))


def common_facts(model: Config) -> dict[str, Any]:
    """config.json's fields that all of them have."""
    block, windows = model.stack.pattern[0], windows_of(model)
    attention, heads = block.attention, block.attention.num_heads
    facts = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": block.mlp.hidden,
        "num_hidden_layers": model.stack.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": attention.num_kv_heads or heads,
        "head_dim": attention.head_dim or model.dim // heads,
        "rms_norm_eps": block.norm.eps,
        "tie_word_embeddings": model.head.tied,
        "hidden_act": activation_fact(block.mlp.activation),
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
    }
    return facts | ({} if attention.rotary is None else rope_facts(attention.rotary))


@component
class Llama(Family):
    """LlamaForCausalLM and what differs from it by biases, windows, and norms of queries and keys."""

    architectures = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
    names = decoder_names(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")

    def model(self, facts: dict[str, Any]) -> Config:
        """As Family.model."""
        (kind,) = set(facts["architectures"]) & set(self.architectures)
        heads, dim, layers = facts["num_attention_heads"], facts["hidden_size"], facts["num_hidden_layers"]
        theta, scaling = rope(facts)
        kv_heads, eps = facts.get("num_key_value_heads"), facts.get("rms_norm_eps", 1e-6)
        biases = facts.get("attention_bias", False)
        model = llama_model(
            layers=layers,
            heads=heads,
            kv_heads=None if kv_heads == heads else kv_heads,
            dim=dim,
            hidden=facts["intermediate_size"],
            vocab_size=facts["vocab_size"],
            theta=theta,
            eps=eps,
            qkv_bias=biases or kind == "Qwen2ForCausalLM",
            tied=facts.get("tie_word_embeddings", False),
            rope_scaling=scaling,
        )
        block = model.stack.pattern[0]
        block.attention.output_bias = biases
        block.mlp.activation = activation(facts.get("hidden_act", "silu"))
        block.mlp.linear.bias = facts.get("mlp_bias", False)
        head_dim = facts.get("head_dim") or (128 if kind == "Qwen3ForCausalLM" else None)
        if head_dim is not None and head_dim * heads != dim:
            block.attention.head_dim = head_dim
        if kind == "Qwen3ForCausalLM":
            block.attention.qk_norm = config_for(RMSNorm, eps=eps)
        window = facts.get("sliding_window")
        if kind == "LlamaForCausalLM" or not facts.get("use_sliding_window", kind == "MistralForCausalLM"):
            window = None
        kinds = facts.get("layer_types")
        if kinds is None:  # Qwen's first layers see everything
            full = 0 if kind == "MistralForCausalLM" else facts.get("max_window_layers", 28)
            kinds = ["full_attention"] * min(full, layers) + ["sliding_attention"] * max(0, layers - full)
        return with_windows(model, [window if of == "sliding_attention" else None for of in kinds])

    def facts(self, model: Config) -> dict[str, Any]:
        """As Family.facts; all that can be is written as LlamaForCausalLM."""
        attention, facts = model.stack.pattern[0].attention, common_facts(model)
        types = facts.pop("layer_types")
        if attention.qk_norm is not None:
            kind, own = "Qwen3ForCausalLM", {"layer_types": types, "use_sliding_window": "sliding_attention" in types}
        elif attention.linear.bias and attention.output_bias is False:
            kind, own = "Qwen2ForCausalLM", {"layer_types": types, "use_sliding_window": "sliding_attention" in types}
        else:
            kind, own = ("MistralForCausalLM" if facts["sliding_window"] else "LlamaForCausalLM"), {}
        if kind in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
            own["attention_bias"] = attention.linear.bias
        if kind == "LlamaForCausalLM":
            own["mlp_bias"] = model.stack.pattern[0].mlp.linear.bias
        return {"architectures": [kind], "model_type": kind.removesuffix("ForCausalLM").lower(), **facts, **own}
