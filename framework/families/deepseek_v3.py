"""DeepSeek-V3 (arXiv 2412.19437) and R1: the layers of DeepSeek-V2 with another router.

The router takes sigmoids instead of a softmax, and adds a bias to the score of each expert for the choice, which kept
the load even in pretraining. The heads for multi-token prediction in published files are left out, as in
transformers.
"""

from __future__ import annotations

from plimsoll.framework.config import Config, component
from plimsoll.framework.families.deepseek import (
    check_groups,
    find_shared_mixture,
    latent_facts,
    latent_model,
    latent_names,
    list_blocks,
    refuse_contradiction,
)
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.mixtures import refuse_losses
from plimsoll.framework.weights.family import ModelFamily
from plimsoll.framework.weights.source import Source

SELECTION_BIAS = {"mlp/router/selection_bias": Source("model.layers.{layer}.mlp.gate.e_score_correction_bias")}


def set_sigmoid_router(fields: ConfigFacts, moe: Config, *, scale: float, groups: int, top_groups: int) -> None:
    """Let the router of a mixture choose by sigmoids and selection biases, within groups of experts.

    Args:
        fields: fields of config.json.
        moe: the mixture.
        scale, groups, top_groups: the architecture's defaults if config.json does not set them.

    Raises:
        ValueError: the groups do not fit the experts.
    """
    router = moe.router
    router.score = "sigmoid"
    router.selection_bias = True
    router.normalize = fields.flag("norm_topk_prob", True)
    router.scale = fields.number("routed_scaling_factor", scale)
    router.groups = fields.size("n_group", groups)
    router.top_groups = fields.size("topk_group", top_groups)
    router.group_score = "best_two"
    check_groups(fields, router, moe.num_experts)
    if router.groups > 1 and moe.num_experts // router.groups < 2:
        raise fields.error("n_group", f"at most half of n_routed_experts = {moe.num_experts}")


def sigmoid_router_facts(router: Config) -> dict[str, object]:
    """Return the fields of config.json for a router, the inverse of `set_sigmoid_router`.

    Raises:
        ValueError: the router has another score, or no selection biases.
    """
    if router.score != "sigmoid" or not router.selection_bias:
        raise ValueError(f"router.score = {router.score}, router.selection_bias = {router.selection_bias}")
    return {
        "norm_topk_prob": router.normalize,
        "routed_scaling_factor": router.scale,
        "n_group": router.groups,
        "topk_group": router.top_groups,
    }


@component
class DeepseekV3(ModelFamily):
    """DeepseekV3ForCausalLM."""

    architectures = {"DeepseekV3ForCausalLM": "deepseek_v3"}
    scored = {"DeepseekV3ForSequenceClassification": "DeepseekV3ForCausalLM"}
    names = latent_names() | SELECTION_BIAS
    has_custom_code = True
    # As in transformers: the layer after the 61 of DeepSeek-V3 predicts further tokens.
    ignored = r"rotary_emb\.inv_freq$|^model\.layers\.61\."

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        refuse_losses(fields)
        refuse_contradiction(fields, "scoring_func", "sigmoid", "sigmoid, which transformers always uses")
        refuse_contradiction(fields, "topk_method", "noaux_tc", "noaux_tc, which transformers always uses")
        model = latent_model(
            fields,
            num_first=fields.size("first_k_dense_replace", 3, least=0),
            kv_heads=128,
            hidden=18432,
            expert_hidden=2048,
            num_shared=1,
        )
        is_interleaved = fields.flag("rope_interleave", True)
        for block in list_blocks(model):
            block.attention.interleaved = is_interleaved
            if block.mlp.takes("num_experts"):
                set_sigmoid_router(fields, block.mlp, scale=2.5, groups=8, top_groups=4)
        return model

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`."""
        return {
            **latent_facts(model),
            **sigmoid_router_facts(find_shared_mixture(model).router),
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "rope_interleave": model.stack.pattern[0].attention.interleaved,
        }
