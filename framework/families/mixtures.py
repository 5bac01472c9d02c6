"""Mixtral (arXiv 2401.04088) and Qwen3-MoE (arXiv 2505.09388): Llama-like decoders with mixtures of experts.

The losses that keep the load of experts balanced are not part of the published models: in training, transformers adds
one over all layers together if `output_router_logits` is set. Here they are settings of the router, with a default
of 0.
"""

from __future__ import annotations

from plimsoll.framework.config import Config, component, config_for
from plimsoll.framework.families.decoders import llama_model, mixture
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.llama import (
    activation,
    check_uniform_window,
    common_facts,
    decoder_names,
    get_windows,
    rope,
    shortest_period,
)
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.weights.family import ModelFamily
from plimsoll.framework.weights.source import Source

_LAYER = "model.layers.{layer}"


def mixture_names(router: str, expert: str, **projections: str) -> dict[str, Source]:
    """Return {our path: their tensors} for the mixture of a block.

    Args:
        router: their name of the router's weight.
        expert: their name of one expert, with {expert} for its index.
        projections: their names of an expert's projections, by our names.
    """
    names = {"mlp/router/weight": Source(f"{_LAYER}.{router}.weight", transpose=True)}
    for ours, theirs in projections.items():
        names[f"mlp/experts/{ours}"] = Source(f"{_LAYER}.{expert}.{theirs}.weight", transpose=True)
    return names


def shared_expert_names() -> dict[str, Source]:
    """Return {our path: their tensor} of the shared expert and its gate."""
    names = {"mlp/shared_gate/weight": Source(f"{_LAYER}.mlp.shared_expert_gate.weight", transpose=True)}
    for name in ("gate", "up", "down"):
        names[f"mlp/shared/{name}/weight"] = Source(f"{_LAYER}.mlp.shared_expert.{name}_proj.weight", transpose=True)
    return names


def count_experts(facts: ConfigFacts, num_default: int, chosen_default: int) -> tuple[int, int]:
    """Return the number of experts, which has two possible field names, and the number that are active per token.

    Args:
        facts: fields of config.json.
        num_default, chosen_default: the architecture's defaults if config.json does not set them.

    Raises:
        ValueError: a token would be routed to more experts than there are.
    """
    names = ("num_local_experts", "num_experts")
    present_names = [name for name in names if name in facts.values]
    num_experts = facts.size_by_names(*names) if present_names else num_default
    num_chosen = facts.size("num_experts_per_tok", chosen_default)
    if num_chosen > num_experts:
        name = present_names[0] if present_names else names[0]
        raise facts.error("num_experts_per_tok", f"at most {name} = {num_experts}")
    return num_experts, num_chosen


def gated_mixture(
    fields: ConfigFacts, *, experts: int, top_k: int, normalize: bool, hidden: int, shared: int
) -> Config:
    """Build a layer's mixture with a shared expert that has a gate.

    Args:
        fields: fields of config.json.
        experts, top_k: number of experts, and of those that a token is routed to.
        normalize: whether the shares of a token's experts sum to 1.
        hidden, shared: the architecture's widths of an expert and of the shared one if config.json does not set them.
    """
    name = activation(fields, "hidden_act", "silu")
    moe = mixture(
        experts=experts,
        top_k=top_k,
        hidden=fields.size("moe_intermediate_size", hidden),
        activation=name,
        normalize=normalize,
        # The balance loss is a setting of training, not of the published model.
        balance=0.0,
    )
    shared_hidden = fields.size("shared_expert_intermediate_size", shared)
    moe.shared = config_for(MLP, hidden=shared_hidden, activation=name, gated=True)
    moe.shared_gate = config_for(Linear)
    return moe


def find_gated_mixture(blocks: list[Config]) -> Config:
    """Return the first mixture with a gated shared expert. Raises ValueError if there is none."""
    for block in blocks:
        if block.mlp.takes("num_experts") and block.mlp.shared_gate is not None:
            return block.mlp
    raise ValueError("no layer has a mixture with a gated shared expert")


def gated_mixture_facts(blocks: list[Config]) -> dict[str, object]:
    """Return the fields of config.json for the mixtures of a stack's pattern, the inverse of `gated_mixture`."""
    moe = find_gated_mixture(blocks)
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "moe_intermediate_size": moe.experts.hidden,
        "shared_expert_intermediate_size": moe.shared.hidden,
    }


def refuse_losses(facts: ConfigFacts) -> None:
    """Raise ValueError for additions that transformers makes in training to the loss or to the experts' inputs."""
    if facts.flag("output_router_logits", False):
        raise facts.error("output_router_logits", "false: the balance loss is a setting of training, router.balance")
    if facts.any("router_jitter_noise", 0.0) != 0:
        raise facts.error("router_jitter_noise", "0: noise is a setting of training, router.jitter")


def _decoder(
    facts: ConfigFacts, *, kv_heads: int, hidden: int, theta: float, scaling: Config | None, eps: float
) -> Config:
    """Build a Llama of these sizes, whose layers have no mixtures yet."""
    heads = facts.size("num_attention_heads")
    model = llama_model(
        layers=facts.size("num_hidden_layers"),
        heads=heads,
        # None is our default for equal numbers of heads; configs are compared field by field.
        kv_heads=None if kv_heads == heads else kv_heads,
        dim=facts.size("hidden_size"),
        hidden=hidden,
        vocab_size=facts.size("vocab_size"),
        theta=theta,
        eps=eps,
        tied=facts.flag("tie_word_embeddings", False),
        rope_scaling=scaling,
    )
    model.stack.pattern[0].attention.output_bias = False
    return model


def _set_head_dim(model: Config, head_dim: int | None) -> None:
    attention = model.stack.pattern[0].attention
    # Set only if it differs from our default, which is the width divided by the number of heads.
    if head_dim is not None and head_dim * attention.num_heads != model.dim:
        attention.head_dim = head_dim


@component
class Mixtral(ModelFamily):
    """MixtralForCausalLM."""

    architectures = {"MixtralForCausalLM": "mixtral"}
    scored = {"MixtralForSequenceClassification": "MixtralForCausalLM"}
    names = decoder_names(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm") | mixture_names(
        "block_sparse_moe.gate", "block_sparse_moe.experts.{expert}", gate="w1", up="w3", down="w2"
    )

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        refuse_losses(fields)
        theta, scaling = rope(fields, 1_000_000.0)
        heads = fields.size("num_attention_heads")
        hidden = fields.size("intermediate_size")
        model = _decoder(
            fields,
            kv_heads=fields.size("num_key_value_heads", 8, null=True) or heads,
            hidden=hidden,
            theta=theta,
            scaling=scaling,
            eps=fields.number("rms_norm_eps", 1e-5),
        )
        _set_head_dim(model, fields.size("head_dim", None, null=True))
        block = model.stack.pattern[0]
        block.attention.window = fields.size("sliding_window", None, null=True)
        check_uniform_window(fields, block.attention.window)
        num_experts, num_chosen = count_experts(fields, 8, 2)
        block.mlp = mixture(
            experts=num_experts,
            top_k=num_chosen,
            hidden=hidden,
            activation=activation(fields, "hidden_act", "silu"),
            # The balance loss is a setting of training, not of the published model.
            balance=0.0,
        )
        return model

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`."""
        moe = model.stack.pattern[0].mlp
        facts = common_facts(model, moe.experts)
        del facts["layer_types"]
        return facts | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.router.top_k,
        }


@component
class Qwen3MoE(ModelFamily):
    """Qwen3MoeForCausalLM: query and key norms, and layers without a mixture if config.json has any."""

    architectures = {"Qwen3MoeForCausalLM": "qwen3_moe"}
    scored = {"Qwen3MoeForSequenceClassification": "Qwen3MoeForCausalLM"}
    names = decoder_names(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm") | mixture_names(
        "mlp.gate", "mlp.experts.{expert}", gate="gate_proj", up="up_proj", down="down_proj"
    )

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        refuse_losses(fields)
        theta, scaling = rope(fields)
        eps = fields.number("rms_norm_eps", 1e-6)
        model = _decoder(
            fields,
            kv_heads=fields.size("num_key_value_heads", 4),
            hidden=fields.size("intermediate_size", 6144),
            theta=theta,
            scaling=scaling,
            eps=eps,
        )
        # Unlike in other families, transformers does not accept null here.
        _set_head_dim(model, fields.size("head_dim") if "head_dim" in facts else None)
        block = model.stack.pattern[0]
        block.attention.qk_norm = config_for(RMSNorm, eps=eps)
        biases = fields.flag("attention_bias", False)
        block.attention.linear.bias = biases
        block.attention.output_bias = biases
        window = None
        if fields.flag("use_sliding_window", False):
            window = fields.size("sliding_window", 4096, null=True)
        check_uniform_window(fields, window)
        block.attention.window = window
        block.mlp.activation = activation(fields, "hidden_act", "silu")
        sparse_block = block.copy()
        num_experts, num_chosen = count_experts(fields, 128, 8)
        sparse_block.mlp = mixture(
            experts=num_experts,
            top_k=num_chosen,
            hidden=fields.size("moe_intermediate_size", 768),
            activation=block.mlp.activation,
            normalize=fields.flag("norm_topk_prob", False),
            # The balance loss is a setting of training, not of the published model.
            balance=0.0,
        )
        blocks = [sparse_block if is_sparse else block for is_sparse in sparse_layers(fields)]
        # The shorter the pattern, the fewer blocks a stack compiles.
        model.stack.pattern = [one.copy() for one in blocks[: shortest_period(blocks)]]
        return model

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`."""
        pattern = model.stack.pattern
        mixtures = [block.mlp for block in pattern if block.mlp.takes("num_experts")]
        dense = [block.mlp for block in pattern if not block.mlp.takes("num_experts")]
        if not mixtures:
            raise ValueError("no layer has a mixture of experts")
        attention = pattern[0].attention
        facts = common_facts(model, dense[0] if dense else mixtures[0].experts)
        del facts["layer_types"]
        layers = list(pattern) * (model.stack.num_layers // len(pattern))
        return facts | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "attention_bias": attention.linear.bias,
            "use_sliding_window": get_windows(model)[0] is not None,
            "num_experts": mixtures[0].num_experts,
            "num_experts_per_tok": mixtures[0].router.top_k,
            "moe_intermediate_size": mixtures[0].experts.hidden,
            "norm_topk_prob": mixtures[0].router.normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, block in enumerate(layers) if not block.mlp.takes("num_experts")],
        }


def sparse_layers(facts: ConfigFacts) -> list[bool]:
    """Return whether each layer has a mixture. Raises ValueError if mlp_only_layers is not a list of integers."""
    step = facts.size("decoder_sparse_step", 1)
    dense_layers = facts.any("mlp_only_layers", None)
    if dense_layers is None:
        dense_layers = []
    is_list = isinstance(dense_layers, list)
    # In Python, True is an integer.
    if not is_list or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in dense_layers):
        raise facts.error("mlp_only_layers", "a list of layer numbers")
    layers = range(facts.size("num_hidden_layers"))
    return [layer not in dense_layers and (layer + 1) % step == 0 for layer in layers]
