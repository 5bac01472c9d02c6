"""DeepSeek-V2 (arXiv 2405.04434): latent attention, shared experts, dense first layers.

DeepSeek-V3 has its own file, which shares the functions of this one.

This follows transformers' own code, which replaced the code published with the weights. Where the two differ, in
`norm_topk_prob` and in `scoring_func`, a config.json is refused.
"""

from __future__ import annotations

from plimsoll.framework.config import Config, component
from plimsoll.framework.families.decoders import deepseek_model
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.llama import activation, activation_fact, decoder_names, rope, rope_facts
from plimsoll.framework.families.mixtures import mixture_names
from plimsoll.framework.layers.rotary_scaling import attention_scale
from plimsoll.framework.weights.family import ModelFamily
from plimsoll.framework.weights.source import Source

_LAYER = "model.layers.{layer}"
_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_ATTENTION = {
    "query": "q_proj",
    "query_down": "q_a_proj",
    "query_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_up": "kv_b_proj",
    "output": "o_proj",
}


def deepseek_mixture_names() -> dict[str, Source]:
    """Return {our path: their tensors} for mixtures with routed and shared experts."""
    names = mixture_names("mlp.gate", "mlp.experts.{expert}", **_PROJECTIONS)
    for ours, theirs in _PROJECTIONS.items():
        linear = f"{_LAYER}.mlp.shared_experts.{theirs}"
        names[f"mlp/shared/{ours}/weight"] = Source(f"{linear}.weight", transpose=True)
        names[f"mlp/shared/{ours}/bias"] = Source(f"{linear}.bias")
    return names


def latent_names() -> dict[str, Source]:
    """Return {our path: their tensors} of models with latent attention and mixtures with shared experts."""
    names = decoder_names(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
    for ours, theirs in _ATTENTION.items():
        names[f"attention/{ours}/weight"] = Source(f"{_LAYER}.self_attn.{theirs}.weight", transpose=True)
        names[f"attention/{ours}/bias"] = Source(f"{_LAYER}.self_attn.{theirs}.bias")
    names["attention/query_norm/scale"] = Source(f"{_LAYER}.self_attn.q_a_layernorm.weight")
    names["attention/kv_norm/scale"] = Source(f"{_LAYER}.self_attn.kv_a_layernorm.weight")
    return names | deepseek_mixture_names()


@component
class DeepseekV2(ModelFamily):
    """DeepseekV2ForCausalLM."""

    architectures = {"DeepseekV2ForCausalLM": "deepseek_v2"}
    scored = {"DeepseekV2ForSequenceClassification": "DeepseekV2ForCausalLM"}
    names = latent_names()
    has_custom_code = True

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        refuse_contradiction(fields, "scoring_func", "softmax", "softmax, which transformers always uses")
        if fields.flag("norm_topk_prob", False):
            raise fields.error("norm_topk_prob", "false: transformers ignores this field, and other code does not")
        method = fields.text("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise fields.error("topk_method", "greedy or group_limited_greedy")
        model = latent_model(fields, num_first=fields.size("first_k_dense_replace", 0, least=0))
        biases = fields.flag("mlp_bias", False)
        for block in list_blocks(model):
            if not block.mlp.takes("num_experts"):
                block.mlp.linear.bias = biases
                continue
            block.mlp.shared.linear.bias = biases
            router = block.mlp.router
            # transformers never normalizes the shares; norm_topk_prob is refused above.
            router.normalize = False
            router.scale = fields.number("routed_scaling_factor", 1.0)
            if method == "group_limited_greedy":
                router.groups = fields.size("n_group")
                router.top_groups = fields.size("topk_group")
                check_groups(fields, router, block.mlp.num_experts)
        return model

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`."""
        blocks = list_blocks(model)
        dense = [block.mlp for block in blocks if not block.mlp.takes("num_experts")]
        facts = latent_facts(model)
        router = find_shared_mixture(model).router
        facts |= {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "mlp_bias": dense[0].linear.bias if dense else find_shared_mixture(model).shared.linear.bias,
            "norm_topk_prob": False,
            "routed_scaling_factor": router.scale,
            "topk_method": "greedy",
        }
        if router.groups > 1:
            facts |= {"topk_method": "group_limited_greedy", "n_group": router.groups, "topk_group": router.top_groups}
        return facts


def refuse_contradiction(fields: ConfigFacts, name: str, expected: object, text: str) -> None:
    """Raise ValueError if a field that transformers ignores contradicts what it computes."""
    if fields.any(name, expected) != expected:
        raise fields.error(name, text)


def check_groups(fields: ConfigFacts, router: Config, num_experts: int) -> None:
    """Raise ValueError if the groups have different sizes, or the chosen groups have too few experts."""
    if num_experts % router.groups:
        raise fields.error("n_group", f"a divisor of n_routed_experts = {num_experts}")
    group_size = num_experts // router.groups
    if router.top_groups > router.groups or router.top_groups * group_size < router.top_k:
        raise fields.error(
            "topk_group",
            f"at most n_group = {router.groups}, and groups that have num_experts_per_tok = {router.top_k} experts",
        )


def latent_model(
    fields: ConfigFacts,
    *,
    num_first: int,
    kv_heads: int | None = None,
    hidden: int = 11008,
    expert_hidden: int = 1407,
    num_shared: int = 2,
) -> Config:
    """Build our model from config.json, without the settings of biases and of the router.

    Args:
        fields: fields of config.json.
        num_first: number of layers without a mixture, counted from the first.
        kv_heads, hidden, expert_hidden, num_shared: defaults for the number of heads of keys (None for that of
            queries), the widths, and the number of shared experts, if config.json does not set them.
    """
    theta, scaling = rope(fields)
    heads = fields.size("num_attention_heads")
    # In latent attention every head has its own keys and values; the field only repeats the number of heads.
    if fields.size("num_key_value_heads", kv_heads, null=True) not in (None, heads):
        raise fields.error("num_key_value_heads", f"num_attention_heads = {heads}, because each head has its own keys")
    refuse_contradiction(fields, "moe_layer_freq", 1, "1: every layer after first_k_dense_replace has a mixture")
    num_experts = fields.size_by_names("n_routed_experts", "num_experts")
    top_k = fields.size("num_experts_per_tok")
    if top_k > num_experts:
        raise fields.error("num_experts_per_tok", f"at most n_routed_experts = {num_experts}")
    expert_hidden = fields.size("moe_intermediate_size", expert_hidden)
    model = deepseek_model(
        layers=fields.size("num_hidden_layers"),
        num_first=num_first,
        heads=heads,
        dim=fields.size("hidden_size"),
        hidden=fields.size("intermediate_size", hidden),
        vocab_size=fields.size("vocab_size"),
        kv_rank=fields.size("kv_lora_rank", 512),
        query_rank=fields.size("q_lora_rank", 1536, null=True),
        plain_dim=fields.size("qk_nope_head_dim", 128),
        rotary_dim=fields.size("qk_rope_head_dim", 64),
        value_dim=fields.size("v_head_dim", 128),
        theta=theta,
        rope_scaling=scaling,
        eps=fields.number("rms_norm_eps", 1e-6),
        experts=num_experts,
        top_k=top_k,
        expert_hidden=expert_hidden,
        shared_hidden=expert_hidden * fields.size("n_shared_experts", num_shared),
        tied=fields.flag("tie_word_embeddings", False),
        activation=activation(fields, "hidden_act", "silu"),
        # The balance loss is a setting of training, not of the published model.
        balance=0.0,
    )
    if fields.size("qk_rope_head_dim", 64) % 2:
        raise fields.error("qk_rope_head_dim", "an even number")
    biases = fields.flag("attention_bias", False)
    scale = _logit_scale(fields, scaling, model.stack.pattern[0].attention)
    for block in list_blocks(model):
        block.attention.bias = biases
        block.attention.scale = scale
    return model


def _logit_scale(fields: ConfigFacts, scaling: Config | None, attention: Config) -> float | None:
    """Return the scale of the logits, which `mscale_all_dim` changes; None for the usual factor.

    Raises:
        ValueError: the scaling next to the field does not have it; transformers would apply it anyway.
    """
    rope_fields = fields.part("rope_scaling") or fields.part("rope_parameters")
    if scaling is None or rope_fields is None or not rope_fields.any("mscale_all_dim", None):
        return None
    if not scaling.takes("mscale_all_dim"):
        raise rope_fields.error("mscale_all_dim", "nothing, because rope_type is not yarn")
    factor = attention_scale(scaling.factor, scaling.mscale_all_dim)
    return (attention.plain_dim + attention.rotary_dim) ** -0.5 * factor**2


def list_blocks(model: Config) -> list[Config]:
    """Return one layer of each kind, first ones first."""
    first = [] if model.first is None else list(model.first.pattern)
    return [*first, *model.stack.pattern]


def find_shared_mixture(model: Config) -> Config:
    """Return the mixture of a model's layers. Raises ValueError if no layer has one with shared experts."""
    for block in list_blocks(model):
        if block.mlp.takes("num_experts") and block.mlp.shared is not None:
            return block.mlp
    raise ValueError("no layer has a mixture with shared experts")


def latent_facts(model: Config) -> dict[str, object]:
    """Return the fields of config.json that do not depend on the router's settings."""
    mixture = find_shared_mixture(model)
    blocks = list_blocks(model)
    dense = [block.mlp for block in blocks if not block.mlp.takes("num_experts")]
    attention = blocks[0].attention
    num_first = 0 if model.first is None else model.first.num_layers
    shared, remainder = divmod(mixture.shared.hidden, mixture.experts.hidden)
    if remainder:
        raise ValueError(f"shared.hidden = {mixture.shared.hidden} is not a multiple of {mixture.experts.hidden}")
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": dense[0].hidden if dense else mixture.experts.hidden,
        "num_hidden_layers": num_first + model.stack.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads,
        "kv_lora_rank": attention.kv_rank,
        "q_lora_rank": attention.query_rank,
        "qk_nope_head_dim": attention.plain_dim,
        "qk_rope_head_dim": attention.rotary_dim,
        "v_head_dim": attention.value_dim,
        "attention_bias": attention.bias,
        "rms_norm_eps": blocks[0].norm.eps,
        "tie_word_embeddings": model.head.tied,
        "hidden_act": activation_fact(mixture.experts.activation),
        "first_k_dense_replace": num_first,
        "moe_layer_freq": 1,
        "n_routed_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.router.top_k,
        "moe_intermediate_size": mixture.experts.hidden,
        "n_shared_experts": shared,
        **rope_facts(attention.rotary),
    }
