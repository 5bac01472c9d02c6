"""OLMo 2 (arXiv 2501.00656) and OLMoE (arXiv 2409.02060): queries and keys are normalized over all heads together.

OLMo 2 normalizes the output of a branch instead of its input. OLMoE is a mixture of experts with norms like Llama's.
"""

from __future__ import annotations

from plimsoll.framework.config import Config, component, config_for
from plimsoll.framework.families.decoders import llama_model, mixture
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.llama import activation, common_facts, decoder_names, rope
from plimsoll.framework.families.mixtures import count_experts, mixture_names, refuse_losses
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.weights.family import ModelFamily


def _decoder(facts: ConfigFacts, theta: float, scaling: Config | None) -> Config:
    """Build a Llama of these sizes whose queries and keys are normalized over all heads."""
    heads = facts.size("num_attention_heads")
    kv_heads = facts.size("num_key_value_heads", None, null=True)
    eps = facts.number("rms_norm_eps", 1e-5)
    biases = facts.flag("attention_bias", False)
    model = llama_model(
        layers=facts.size("num_hidden_layers"),
        heads=heads,
        kv_heads=None if kv_heads == heads else kv_heads,
        dim=facts.size("hidden_size"),
        hidden=facts.size("intermediate_size"),
        vocab_size=facts.size("vocab_size"),
        theta=theta,
        eps=eps,
        qkv_bias=biases,
        tied=facts.flag("tie_word_embeddings", False),
        rope_scaling=scaling,
    )
    block = model.stack.pattern[0]
    block.attention.output_bias = biases
    block.attention.qk_norm = config_for(RMSNorm, eps=eps)
    block.attention.qk_norm_over = "all"
    block.mlp.activation = activation(facts, "hidden_act", "silu")
    return model


def olmo2_decoder(facts: ConfigFacts, theta: float, scaling: Config | None) -> Config:
    """Build a model of these sizes that normalizes the output of each branch, and whose layers are all alike."""
    model = _decoder(facts, theta, scaling)
    block = model.stack.pattern[0]
    block.post_norm = block.norm
    block.norm = None
    head_dim = facts.size("head_dim", None, null=True)
    # Set only if it differs from our default, which is the width divided by the number of heads.
    if head_dim is not None and head_dim * block.attention.num_heads != model.dim:
        block.attention.head_dim = head_dim
    return model


def _common_facts(model: Config, feed_forward: Config | None = None) -> dict[str, object]:
    """Return the fields of config.json that both families have."""
    facts = common_facts(model, feed_forward)
    # No layer has a window.
    del facts["layer_types"]
    del facts["sliding_window"]
    return facts | {"attention_bias": model.stack.pattern[0].attention.linear.bias}


@component
class Olmo2(ModelFamily):
    """Olmo2ForCausalLM."""

    architectures = {"Olmo2ForCausalLM": "olmo2"}
    scored = {"Olmo2ForSequenceClassification": "Olmo2ForCausalLM"}
    names = decoder_names(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        return olmo2_decoder(fields, *rope(fields))

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`."""
        return {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", **_common_facts(model)}


@component
class Olmoe(ModelFamily):
    """OlmoeForCausalLM. Its balance loss is a training setting, see `mixtures`."""

    architectures = {"OlmoeForCausalLM": "olmoe"}
    names = decoder_names(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm") | mixture_names(
        "mlp.gate", "mlp.experts.{expert}", gate="gate_proj", up="up_proj", down="down_proj"
    )

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        refuse_losses(fields)
        model = _decoder(fields, *rope(fields))
        block = model.stack.pattern[0]
        head_dim = fields.size("head_dim", None, null=True)
        if head_dim is not None and head_dim * block.attention.num_heads != model.dim:
            raise fields.error(
                "head_dim", "the width divided by the number of heads, because queries are normalized over all heads"
            )
        # Only some of transformers' attention implementations apply a window here.
        if fields.any("sliding_window", None) is not None:
            raise fields.error("sliding_window", "null: attention sees all earlier tokens")
        block.attention.clip_qkv = fields.number("clip_qkv", None, null=True)
        num_experts, num_chosen = count_experts(fields, 64, 8)
        block.mlp = mixture(
            experts=num_experts,
            top_k=num_chosen,
            hidden=block.mlp.hidden,
            activation=block.mlp.activation,
            normalize=fields.flag("norm_topk_prob", False),
            balance=0.0,
        )
        return model

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`."""
        block = model.stack.pattern[0]
        return {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            **_common_facts(model, block.mlp.experts),
            "clip_qkv": block.attention.clip_qkv,
            "num_experts": block.mlp.num_experts,
            "num_experts_per_tok": block.mlp.router.top_k,
            "norm_topk_prob": block.mlp.router.normalize,
        }
