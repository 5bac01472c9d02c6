"""gpt-oss (arXiv 2508.10925): attention sinks and biases, windows in every second layer, experts with biases.

Its experts clamp the factors that they multiply, and are published in MXFP4 (framework/weights/mxfp4.py). In the
files, the outputs of the gate and of `up` are interleaved along one axis.
"""

from __future__ import annotations

from plimsoll.framework.config import Config, component
from plimsoll.framework.families.decoders import gpt_oss_model
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.llama import (
    common_facts,
    decoder_names,
    layer_types,
    layer_windows,
    rope,
    with_windows,
)
from plimsoll.framework.families.mixtures import count_experts, refuse_losses
from plimsoll.framework.weights.family import ModelFamily
from plimsoll.framework.weights.source import Source

_EXPERTS = "model.layers.{layer}.mlp.experts"
_ROUTER = "model.layers.{layer}.mlp.router"
# transformers' default if config.json has neither `rope_parameters` nor `rope_scaling`.
_DEFAULT_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _names() -> dict[str, Source]:
    names = decoder_names(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
    names["attention/sinks"] = Source("model.layers.{layer}.self_attn.sinks")
    names["mlp/router/weight"] = Source(f"{_ROUTER}.weight", transpose=True)
    names["mlp/router/bias"] = Source(f"{_ROUTER}.bias")
    for number, ours in enumerate(("gate", "up")):
        fused_part = (number, 2)
        names[f"mlp/experts/{ours}"] = Source(f"{_EXPERTS}.gate_up_proj", fused_part=fused_part, interleaved=True)
        names[f"mlp/experts/{ours}_bias"] = Source(
            f"{_EXPERTS}.gate_up_proj_bias", fused_part=fused_part, interleaved=True
        )
    names["mlp/experts/down"] = Source(f"{_EXPERTS}.down_proj")
    names["mlp/experts/down_bias"] = Source(f"{_EXPERTS}.down_proj_bias")
    return names


@component
class GptOss(ModelFamily):
    """GptOssForCausalLM."""

    architectures = {"GptOssForCausalLM": "gpt_oss"}
    scored = {"GptOssForSequenceClassification": "GptOssForCausalLM"}
    names = _names()
    takes_float16 = False

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        refuse_losses(fields)
        # An empty `rope_scaling` counts as absent, but empty `rope_parameters` mean no scaling.
        if fields.any("rope_parameters", None) is None and not fields.any("rope_scaling", None):
            facts = {**facts, "rope_parameters": _DEFAULT_SCALING}
        theta, scaling = rope(ConfigFacts(facts), 150_000.0)
        layers = fields.size("num_hidden_layers", 36)
        heads = fields.size("num_attention_heads", 64)
        num_experts, num_chosen = count_experts(fields, 128, 4)
        model = gpt_oss_model(
            layers=layers,
            heads=heads,
            kv_heads=fields.size("num_key_value_heads", 8, null=True) or heads,
            head_dim=fields.size("head_dim", 64),
            dim=fields.size("hidden_size", 2880),
            hidden=fields.size("intermediate_size", 2880),
            experts=num_experts,
            top_k=num_chosen,
            vocab_size=fields.size("vocab_size", 201_088),
            theta=theta,
            rope_scaling=scaling,
            eps=fields.number("rms_norm_eps", 1e-5),
            bias=fields.flag("attention_bias", True),
            alpha=fields.number("swiglu_alpha", 1.702),
            limit=fields.number("swiglu_limit", 7.0),
            tied=fields.flag("tie_word_embeddings", False),
        )
        alternating_kinds = ["sliding_attention", "full_attention"] * layers
        kinds = layer_types(fields) or alternating_kinds[:layers]
        window = fields.size("sliding_window", 128, null=True)
        return with_windows(model, layer_windows(kinds, window, fields))

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`."""
        block = model.stack.pattern[0]
        moe = block.mlp
        if not moe.takes("num_experts") or moe.experts.gating is None:
            raise ValueError("layers are not mixtures of experts with a clamped SwiGLU")
        return common_facts(model, moe.experts) | {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": block.attention.linear.bias,
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.router.top_k,
            "swiglu_alpha": moe.experts.gating.alpha,
            "swiglu_limit": moe.experts.gating.limit,
        }
