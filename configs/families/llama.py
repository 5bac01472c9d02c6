"""Llama 2 and 3, Mistral, Qwen2, Qwen2.5 and Qwen3: RMSNorm, rotary positions, gated MLP, the same names of tensors.

Defaults that a config.json leaves out are those of transformers' configuration classes.
"""

from __future__ import annotations

from typing import Any

from configs.families.facts import Facts
from configs.parts import llama_model
from framework.config import Config, component, config_for
from framework.layers.norm import RMSNorm
from framework.layers.rotary import LinearScaling, Llama3Scaling
from framework.weights.pretrained import Family, Source

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
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


def activation(facts: Facts, field: str, default: str) -> str:
    """Ours of transformers'. Raises ValueError for an unknown one."""
    name = facts.text(field, default)
    if name not in ACTIVATIONS:
        raise facts.error(field, f"one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def activation_fact(ours: str) -> str:
    """The inverse of `activation`. Raises ValueError for one that transformers has not."""
    if ours not in ACTIVATIONS.values():
        raise ValueError(f"mlp.activation = {ours}")
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)


def rope(facts: Facts) -> tuple[float, Config | None]:
    """(theta, scaling) of a config.json, as transformers 4 (`rope_scaling`, `rope_theta`) or 5 (`rope_parameters`)
    writes it. Raises ValueError for an unknown scaling, and where both stand and differ."""
    old, new = facts.part("rope_scaling"), facts.part("rope_parameters")
    if old is not None and new is not None and old.values != new.values:
        raise facts.error("rope_scaling", f"the same as rope_parameters ({new.values}), or one of the two")
    scaling = old or new or Facts({}, "rope_parameters.")
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise ValueError(f"config.json: rope_parameters = {scaling.values}; expected the same for all layers")
    theta = (scaling if "rope_theta" in scaling.values else facts).number("rope_theta", 10_000.0)
    for part in (scaling, facts):
        if part.any("partial_rotary_factor", None) not in (None, 1):
            raise part.error("partial_rotary_factor", "1: all elements of a head are turned")
    kind = scaling.any("rope_type", scaling.any("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, config_for(LinearScaling, factor=scaling.number("factor"))
    if kind == "llama3":
        return theta, _llama3_scaling(facts, scaling)
    raise ValueError(f"config.json: rope scaling {scaling.values}; expected rope_type default, linear or llama3")


def _llama3_scaling(facts: Facts, scaling: Facts) -> Config:
    fields = {name: scaling.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    if fields["high_freq_factor"] <= fields["low_freq_factor"]:
        raise scaling.error("high_freq_factor", f"more than low_freq_factor = {fields['low_freq_factor']}")
    name = "original_max_position_embeddings"
    length = scaling.size(name) if name in scaling.values else facts.size("max_position_embeddings")
    if facts.any(name, length) != length:  # transformers takes this one
        raise facts.error(name, f"that of rope_parameters, {length}")
    return config_for(Llama3Scaling, **fields, original_length=length)


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


# What transformers takes for num_key_value_heads where it is absent; None, and null: as many as there are heads.
_KV_HEADS = {"LlamaForCausalLM": None, "MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}


def layer_windows(kinds: list[str], window: int | None, facts: Facts) -> list[int | None]:
    """The window of each layer. Raises ValueError: `layer_types` disagrees with the number of layers or the window."""
    if len(kinds) != facts.size("num_hidden_layers"):
        raise facts.error("layer_types", f"one for each of {facts.size('num_hidden_layers')} layers")
    if window is None and "sliding_attention" in kinds:
        raise facts.error("sliding_window", "a number of tokens, as there are layers of sliding_attention")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def layer_types(facts: Facts) -> list[str] | None:
    """The field of that name, if it is there. Raises ValueError: it is no list of the two kinds that we have."""
    kinds = facts.any("layer_types", None)
    known = ("full_attention", "sliding_attention")
    if kinds is not None and not (isinstance(kinds, list) and all(kind in known for kind in kinds)):
        raise facts.error("layer_types", f"a list of {' and '.join(known)}")
    return kinds


def _windows(kind: str, facts: Facts) -> list[int | None]:
    """Which layers of the architecture see how much, as transformers decides it."""
    layers, kinds = facts.size("num_hidden_layers"), layer_types(facts)
    if kind in ("LlamaForCausalLM", "MistralForCausalLM"):
        # All layers are alike. Mistral has no `use_sliding_window`, Llama no `sliding_window`: both are ignored.
        window = facts.size("sliding_window", 4096, null=True) if kind == "MistralForCausalLM" else None
        alike = ["full_attention" if window is None else "sliding_attention"] * layers
        if kinds not in (None, alike):
            raise facts.error("layer_types", f"{alike[0]} in all layers, which is all that {kind} has")
        return [window] * layers
    window = facts.size("sliding_window", 4096, null=True) if facts.flag("use_sliding_window", False) else None
    if kinds is None:  # Qwen's first layers see everything
        full = facts.size("max_window_layers", 28, least=0)
        kinds = ["full_attention" if window is None or i < full else "sliding_attention" for i in range(layers)]
    return layer_windows(kinds, window, facts)


@component
class Llama(Family):
    """LlamaForCausalLM and what differs from it by biases, windows, and norms of queries and keys."""

    architectures = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
    names = decoder_names(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")

    def model(self, facts: dict[str, Any]) -> Config:
        """As Family.model."""
        (kind,) = set(facts["architectures"]) & set(self.architectures)
        fields = Facts(facts)
        theta, scaling = rope(fields)
        dim, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        kv_heads = fields.size("num_key_value_heads", _KV_HEADS[kind], null=True)
        eps = fields.number("rms_norm_eps", 1e-6)
        # Mistral and Qwen2 have no such field, and transformers ignores it there.
        biases = fields.flag("attention_bias", False) if kind in ("LlamaForCausalLM", "Qwen3ForCausalLM") else False
        model = llama_model(
            layers=fields.size("num_hidden_layers"),
            heads=heads,
            kv_heads=None if kv_heads == heads else kv_heads,
            dim=dim,
            hidden=fields.size("intermediate_size"),
            vocab_size=fields.size("vocab_size"),
            theta=theta,
            eps=eps,
            qkv_bias=biases or kind == "Qwen2ForCausalLM",
            tied=fields.flag("tie_word_embeddings", False),
            rope_scaling=scaling,
        )
        block = model.stack.pattern[0]
        block.attention.output_bias = biases
        block.mlp.activation = activation(fields, "hidden_act", "silu")
        block.mlp.linear.bias = kind == "LlamaForCausalLM" and fields.flag("mlp_bias", False)
        head_dim = fields.size("head_dim", 128 if kind == "Qwen3ForCausalLM" else None, null=True)
        if head_dim is not None and head_dim * heads != dim:
            block.attention.head_dim = head_dim
        if kind == "Qwen3ForCausalLM":
            block.attention.qk_norm = config_for(RMSNorm, eps=eps)
        return with_windows(model, _windows(kind, fields))

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
