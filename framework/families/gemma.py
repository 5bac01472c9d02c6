"""Gemma 2 (arXiv 2408.00118): norms around each branch, capped logits, layers of local and global attention."""

from __future__ import annotations

from plimsoll.framework.config import Config, component, config_for
from plimsoll.framework.families.decoders import llama_model
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.llama import (
    activation,
    common_facts,
    decoder_names,
    layer_types,
    layer_windows,
    rope,
    with_windows,
)
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.weights.family import ModelFamily

GEMMA_NAMES = decoder_names(
    attention_norm="input_layernorm",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def gemma_decoder(facts: ConfigFacts, theta: float, scaling: Config | None) -> Config:
    """Build the common part of Gemma 2 and 3: a model whose layers are all alike and see all earlier tokens."""
    dim = facts.size("hidden_size")
    eps = facts.number("rms_norm_eps", 1e-6)
    head_dim = facts.size("head_dim", 256)
    model = llama_model(
        layers=facts.size("num_hidden_layers"),
        heads=facts.size("num_attention_heads"),
        kv_heads=facts.size("num_key_value_heads", 4),
        dim=dim,
        hidden=facts.size("intermediate_size"),
        vocab_size=facts.size("vocab_size"),
        theta=theta,
        eps=eps,
        qkv_bias=facts.flag("attention_bias", False),
        tied=facts.flag("tie_word_embeddings", True),
        rope_scaling=scaling,
    )
    model.embed.scale = dim**0.5
    block = model.stack.pattern[0]
    # Gemma stores the scales of its norms as differences from 1.
    norm = config_for(RMSNorm, eps=eps, zero_centered=True)
    post_norm = norm.copy()
    head_norm = norm.copy()
    block.norm = norm
    block.post_norm = post_norm
    model.head.norm = head_norm
    block.attention.output_bias = block.attention.linear.bias
    block.attention.head_dim = head_dim
    # None stands for our default, which equals this scale in all but one of the published sizes.
    scale = facts.number("query_pre_attn_scalar", 256) ** -0.5
    block.attention.scale = None if scale == head_dim**-0.5 else scale
    block.mlp.activation = activation(facts, "hidden_activation", "gelu_pytorch_tanh")
    return model


def gemma_facts(model: Config) -> dict[str, object]:
    """Return the fields of config.json that Gemma 2 and 3 share, with rotary positions in Gemma 2's form."""
    facts = common_facts(model)
    attention = model.stack.pattern[0].attention
    head_dim = attention.head_dim or model.dim // attention.num_heads
    scalar = head_dim if attention.scale is None else attention.scale**-2
    # Inverting the scale yields a published integer only up to rounding.
    if abs(scalar - round(scalar)) < 1e-6:
        scalar = round(scalar)
    return facts | {
        "hidden_activation": facts.pop("hidden_act"),
        "attention_bias": attention.linear.bias,
        "final_logit_softcapping": model.head.softcap,
        "query_pre_attn_scalar": scalar,
    }


@component
class Gemma2(ModelFamily):
    """Gemma2ForCausalLM."""

    architectures = {"Gemma2ForCausalLM": "gemma2"}
    scored = {"Gemma2ForSequenceClassification": "Gemma2ForCausalLM"}
    names = GEMMA_NAMES

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        theta, scaling = rope(fields)
        model = gemma_decoder(fields, theta, scaling)
        model.stack.pattern[0].attention.softcap = fields.number("attn_logit_softcapping", 50.0, null=True)
        model.head.softcap = fields.number("final_logit_softcapping", 30.0, null=True)
        # Local and global attention alternate if config.json does not list the layers.
        layers = model.stack.num_layers
        alternating_kinds = ["sliding_attention", "full_attention"] * layers
        kinds = layer_types(fields) or alternating_kinds[:layers]
        window = fields.size("sliding_window", 4096, null=True)
        return with_windows(model, layer_windows(kinds, window, fields))

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`."""
        return gemma_facts(model) | {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "attn_logit_softcapping": model.stack.pattern[0].attention.softcap,
        }
