"""GLM-4.5 to 4.7 (arXiv 2508.06471): grouped-query attention, partial rotary positions, experts as in DeepSeek-V3.

The heads for multi-token prediction in published files are left out, as in transformers.
"""

from __future__ import annotations

from plimsoll.framework.config import Config, component, config_for
from plimsoll.framework.families.decoders import llama_model, mixture, with_dense_first
from plimsoll.framework.families.deepseek import deepseek_mixture_names, find_shared_mixture, list_blocks
from plimsoll.framework.families.deepseek_v3 import SELECTION_BIAS, set_sigmoid_router, sigmoid_router_facts
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.llama import activation, common_facts, decoder_names, rope
from plimsoll.framework.families.mixtures import refuse_losses
from plimsoll.framework.families.rope_scaling import rotary_dim, rotary_part
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.weights.family import ModelFamily

# The part of a head that rotates, if config.json does not say.
_ROTATED_PART = 0.5


@component
class Glm4MoE(ModelFamily):
    """Glm4MoeForCausalLM."""

    architectures = {"Glm4MoeForCausalLM": "glm4_moe"}
    names = {
        **decoder_names(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
        **deepseek_mixture_names(),
        **SELECTION_BIAS,
    }
    # As in transformers: the layers after those of GLM-4.5 and of GLM-4.5-Air predict further tokens.
    ignored = r"rotary_emb\.inv_freq$|^model\.layers\.(46|92)\."

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        refuse_losses(fields)
        dim = fields.size("hidden_size")
        heads = fields.size("num_attention_heads", 96)
        kv_heads = fields.size("num_key_value_heads", 8)
        eps = fields.number("rms_norm_eps", 1e-5)
        theta, scaling = rope(fields, partial=True)
        model = llama_model(
            layers=fields.size("num_hidden_layers"),
            heads=heads,
            kv_heads=None if kv_heads == heads else kv_heads,
            dim=dim,
            hidden=fields.size("intermediate_size", 10944),
            vocab_size=fields.size("vocab_size"),
            theta=theta,
            eps=eps,
            qkv_bias=fields.flag("attention_bias", False),
            tied=fields.flag("tie_word_embeddings", False),
            rope_scaling=scaling,
        )
        dense = model.stack.pattern[0]
        dense.mlp.activation = activation(fields, "hidden_act", "silu")
        attention = dense.attention
        head_dim = fields.size("head_dim", dim // heads)
        # Set only if it differs from our default, which is the width divided by the number of heads.
        if head_dim * heads != dim:
            attention.head_dim = head_dim
        attention.rotary.rotary_dim = rotary_dim(fields, head_dim, _ROTATED_PART)
        if fields.flag("use_qk_norm", False):
            attention.qk_norm = config_for(RMSNorm, eps=eps)
        model.stack.pattern = [dense.copy()]
        model.stack.pattern[0].mlp = _mixture(fields, dense.mlp.activation)
        return with_dense_first(model, dense, fields.size("first_k_dense_replace", 1, least=0))

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`."""
        moe = find_shared_mixture(model)
        blocks = list_blocks(model)
        dense = [block.mlp for block in blocks if not block.mlp.takes("num_experts")]
        attention = blocks[0].attention
        if attention.rotary is None:
            raise ValueError("attention.rotary = None")
        head_dim = attention.head_dim or model.dim // attention.num_heads
        num_first = 0 if model.first is None else model.first.num_layers
        facts = common_facts(model, dense[0] if dense else moe.experts)
        # No layer has a window.
        del facts["layer_types"]
        del facts["sliding_window"]
        return {
            **facts,
            **sigmoid_router_facts(moe.router),
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "num_hidden_layers": num_first + model.stack.num_layers,
            "attention_bias": attention.linear.bias,
            "use_qk_norm": attention.qk_norm is not None,
            "partial_rotary_factor": rotary_part(attention.rotary.rotary_dim or head_dim, head_dim),
            "first_k_dense_replace": num_first,
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.router.top_k,
            "moe_intermediate_size": moe.experts.hidden,
            "n_shared_experts": moe.shared.hidden // moe.experts.hidden,
        }


def _mixture(fields: ConfigFacts, activation_name: str) -> Config:
    """Build the mixture of a layer, with its shared experts.

    Raises:
        ValueError: a token would be routed to more experts than there are, or the groups do not fit.
    """
    names = [name for name in ("n_routed_experts", "num_local_experts") if name in fields.values]
    num_experts = fields.size_by_names(*names) if names else 128
    top_k = fields.size("num_experts_per_tok", 8)
    if top_k > num_experts:
        raise fields.error("num_experts_per_tok", f"at most n_routed_experts = {num_experts}")
    hidden = fields.size("moe_intermediate_size", 1408)
    # The balance loss is a setting of training, not of the published model.
    moe = mixture(experts=num_experts, top_k=top_k, hidden=hidden, activation=activation_name, balance=0.0)
    shared_hidden = hidden * fields.size("n_shared_experts", 1)
    moe.shared = config_for(MLP, hidden=shared_hidden, activation=activation_name, gated=True)
    set_sigmoid_router(fields, moe, scale=1.0, groups=1, top_groups=1)
    return moe
