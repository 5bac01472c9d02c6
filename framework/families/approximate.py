"""Approximate shapes of decoders that we cannot train, for the analytical estimate of a plan.

Memory and time of a decoder follow from few sizes, which all architectures have, under different names. The result has
their layers, heads, widths and experts, and otherwise the layers of Llama or DeepSeek.
"""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.framework.config import Config, component, config_for
from plimsoll.framework.families.decoders import deepseek_model, llama_model, mixture, with_dense_first
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.weights.family import ModelFamily

# Names of the same size in config.json, in the order in which they are tried.
_DIM = ("hidden_size", "n_embd", "d_model", "model_dim", "embedding_size", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KEY_HEADS = ("num_key_value_heads", "num_attention_groups", "multi_query_group_num", "n_head_kv", "num_kv_heads")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "d_kv")
_HIDDEN = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff", "mlp_hidden_size")
_VOCAB_SIZE = ("vocab_size", "padded_vocab_size")
_TIED = ("tie_word_embeddings", "share_embeddings", "tied_embeddings")
_ACTIVATION = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "ffn_act_fn")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
_CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts", "moe_top_k")
_EXPERT_HIDDEN = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "expert_intermediate_size")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SHARED_HIDDEN = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
_DENSE_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "n_dense_layers")
# Such layers have no keys of earlier tokens; their sizes have no common names.
_OTHER_LAYERS = ("mamba", "ssm", "linear_attention", "recurrent", "rwkv", "conv")
# Activations of MLPs with two matrices instead of three.
_PLAIN_ACTIVATIONS = ("relu", "relu2", "squared_relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


@component
class ApproximateDecoder(ModelFamily):
    """A decoder of any architecture, described only by its sizes. It can be planned, but has no weights.

    Args:
        reason: why we cannot train the model, for messages.
    """

    def __init__(self, *, reason: str):
        self.reason = reason

    def model(self, facts: dict[str, object]) -> Config:
        """Return the config of a model of the same sizes. Raise ValueError if a size is missing."""
        fields = ConfigFacts(facts)
        dim = _size(fields, _DIM)
        layers = _size(fields, _LAYERS)
        heads = _size(fields, _HEADS)
        hidden = _size(fields, _HIDDEN, default=4 * dim)
        vocab_size = _size(fields, _VOCAB_SIZE)
        tied = _first(fields, _TIED) is True
        num_experts = _size(fields, _EXPERTS, default=0)
        num_dense = _size(fields, _DENSE_LAYERS, default=0)
        if "kv_lora_rank" in fields:
            return _build_latent(fields, dim=dim, layers=layers, heads=heads, hidden=hidden, vocab_size=vocab_size)
        key_heads = _size(fields, _KEY_HEADS, default=1 if _first(fields, ("multi_query",)) is True else heads)
        if heads % key_heads:
            raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
        model = llama_model(
            layers=layers, heads=heads, kv_heads=key_heads, dim=dim, hidden=hidden, vocab_size=vocab_size, tied=tied
        )
        dense = model.stack.pattern[0]
        head_dim = _size(fields, _HEAD_DIM, default=max(1, dim // heads))
        # Set only if it differs from the default, which is the width divided by the number of heads.
        if head_dim * heads != dim:
            dense.attention.head_dim = head_dim
        dense.mlp.gated = _first(fields, _ACTIVATION) not in _PLAIN_ACTIVATIONS
        if num_experts < 2:
            return model
        sparse = dense.copy()
        expert_hidden = _size(fields, _EXPERT_HIDDEN, default=hidden)
        sparse.mlp = mixture(experts=num_experts, top_k=_size(fields, _CHOSEN_EXPERTS, default=1), hidden=expert_hidden)
        shared_hidden = _shared_hidden(fields, expert_hidden)
        if shared_hidden:
            sparse.mlp.shared = config_for(MLP, hidden=shared_hidden, activation="silu", gated=True)
        model.stack.pattern = [sparse]
        return with_dense_first(model, dense, num_dense)


def describe_shape(facts: dict[str, object], reason: str) -> list[str]:
    """Return the lines that a plan prints about a model with an approximate shape.

    Args:
        facts: the model's config.json, or its part about the language model.
        reason: why it cannot be trained.
    """
    lines = [
        f"this model can be planned, but not trained: {reason.partition('; known: ')[0]}",
        "its shape is approximate: layers, heads, widths and experts are those of config.json, all else is as in Llama",
    ]
    kinds = facts.get("layer_types") or facts.get("layers_block_type") or []
    texts = [*kinds, *facts] if isinstance(kinds, list) else list(facts)
    if any(word in str(text) for text in texts for word in _OTHER_LAYERS):
        lines.append("layers without attention (Mamba, linear attention), if there are any, are planned as attention")
    return lines


def select_text_part(facts: dict[str, object]) -> dict[str, object]:
    """Return the fields of the language model of a model that reads images or sound too; other fields unchanged."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        part = facts.get(name)
        if isinstance(part, dict) and part:
            tied = {"tie_word_embeddings": facts["tie_word_embeddings"]} if "tie_word_embeddings" in facts else {}
            return {**tied, **select_text_part(part)}
    return facts


def _build_latent(fields: ConfigFacts, *, dim: int, layers: int, heads: int, hidden: int, vocab_size: int) -> Config:
    """Build a model with latent attention; with no experts, all of its layers are dense."""
    num_experts = _size(fields, _EXPERTS, default=0)
    expert_hidden = _size(fields, _EXPERT_HIDDEN, default=hidden)
    return deepseek_model(
        layers=layers,
        num_first=_size(fields, _DENSE_LAYERS, default=0) if num_experts else layers,
        heads=heads,
        dim=dim,
        hidden=hidden,
        vocab_size=vocab_size,
        kv_rank=_size(fields, ("kv_lora_rank",)),
        query_rank=_size(fields, ("q_lora_rank",), default=0) or None,
        experts=max(num_experts, 2),
        top_k=_size(fields, _CHOSEN_EXPERTS, default=1),
        expert_hidden=expert_hidden,
        shared_hidden=_shared_hidden(fields, expert_hidden) or expert_hidden,
        plain_dim=_size(fields, ("qk_nope_head_dim",), default=128),
        rotary_dim=_size(fields, ("qk_rope_head_dim",), default=64),
        value_dim=_size(fields, ("v_head_dim",), default=128),
        tied=_first(fields, _TIED) is True,
    )


def _shared_hidden(fields: ConfigFacts, expert_hidden: int) -> int:
    """Return the width of all shared experts together; 0 without them."""
    return _size(fields, _SHARED_HIDDEN, default=expert_hidden * _size(fields, _SHARED_EXPERTS, default=0))


def _first(fields: ConfigFacts, names: Sequence[str]) -> object:
    """Return the value of the first of these fields that is present; None if none is."""
    return next((fields.values[name] for name in names if name in fields), None)


def _size(fields: ConfigFacts, names: Sequence[str], default: int | None = None) -> int:
    """Return the integer of the first of these fields that is present.

    Some configs give one number per layer. They are averaged, so that the sum over all layers stays the same.

    Raises:
        ValueError: none is present and there is no default, or the value is no size.
    """
    name = next((name for name in names if name in fields), None)
    if name is None:
        if default is None:
            raise ValueError(f"config.json: no field '{names[0]}' (or {', '.join(names[1:])}), which a plan needs")
        return default
    value = fields.values[name]
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        return round(sum(value) / len(value))
    return fields.size(name, least=0 if default is not None else 1)
