"""Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671): Qwen2's attention, and mixtures with a gated shared expert."""

from __future__ import annotations

from plimsoll.framework.config import Config, component
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.llama import (
    check_uniform_window,
    common_facts,
    decoder_names,
    get_windows,
    llama_decoder,
    shortest_period,
)
from plimsoll.framework.families.mixtures import (
    count_experts,
    find_gated_mixture,
    gated_mixture,
    gated_mixture_facts,
    mixture_names,
    refuse_losses,
    shared_expert_names,
    sparse_layers,
)
from plimsoll.framework.weights.family import ModelFamily


@component
class Qwen2MoE(ModelFamily):
    """Qwen2MoeForCausalLM."""

    architectures = {"Qwen2MoeForCausalLM": "qwen2_moe"}
    scored = {"Qwen2MoeForSequenceClassification": "Qwen2MoeForCausalLM"}
    names = {
        **decoder_names(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
        **mixture_names("mlp.gate", "mlp.experts.{expert}", gate="gate_proj", up="up_proj", down="down_proj"),
        **shared_expert_names(),
    }

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        refuse_losses(fields)
        # transformers lets every second layer attend to a window then, and not those that the field's name suggests.
        if fields.flag("use_sliding_window", False):
            raise fields.error("use_sliding_window", "false: attention sees all earlier tokens")
        check_uniform_window(fields, None)
        model = llama_decoder(fields, kv_heads=16, qkv_bias=fields.flag("qkv_bias", True))
        dense = model.stack.pattern[0]
        num_experts, num_chosen = count_experts(fields, 60, 4)
        sparse = dense.copy()
        sparse.mlp = gated_mixture(
            fields,
            experts=num_experts,
            top_k=num_chosen,
            normalize=fields.flag("norm_topk_prob", False),
            hidden=1408,
            shared=5632,
        )
        blocks = [sparse if is_sparse else dense for is_sparse in sparse_layers(fields)]
        # The shorter the pattern, the fewer blocks a stack compiles.
        model.stack.pattern = [block.copy() for block in blocks[: shortest_period(blocks)]]
        return model

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`."""
        blocks = list(model.stack.pattern)
        if any(get_windows(model)):
            raise ValueError("stack.pattern.0.attention.window is not None")
        moe = find_gated_mixture(blocks)
        dense = [block.mlp for block in blocks if not block.mlp.takes("num_experts")]
        facts = common_facts(model, dense[0] if dense else moe.experts)
        del facts["layer_types"]
        del facts["sliding_window"]
        layers = blocks * (model.stack.num_layers // len(blocks))
        return {
            **facts,
            **gated_mixture_facts(blocks),
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "qkv_bias": blocks[0].attention.linear.bias,
            "norm_topk_prob": moe.router.normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, block in enumerate(layers) if not block.mlp.takes("num_experts")],
        }
