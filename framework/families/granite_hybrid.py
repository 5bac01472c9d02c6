"""Granite 4.0-H: layers of Mamba-2 (arXiv 2405.21060) and of attention, with multipliers of fixed size.

Multipliers scale the embeddings, the output of each branch, and the logits of attention and of the model. Each layer
has a shared MLP, and most models have a mixture of experts in addition. Attention has no positions, or rotary ones.
"""

from __future__ import annotations

import math

from plimsoll.framework.config import Config, component, config_for
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.llama import (
    activation_fact,
    decoder_names,
    llama_decoder,
    rope_parameters,
    shortest_period,
)
from plimsoll.framework.families.mixtures import refuse_losses
from plimsoll.framework.layers.base import Layer
from plimsoll.framework.layers.block import Block
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.mamba2 import Mamba2
from plimsoll.framework.weights.family import ModelFamily
from plimsoll.framework.weights.source import Source, split_source

_LAYER = "model.layers.{layer}"
_MIXER = f"{_LAYER}.mamba"
# Kinds of layers in config.json, the first as transformers 5 writes it, the second as in published files.
_LINEAR = ("linear_attention", "mamba")
_FULL = ("full_attention", "attention")
# As transformers writes infinity, which JSON does not have.
_INFINITY = {"__float__": "Infinity"}


def _feed_forward_names(ours: str, theirs: str) -> dict[str, Source]:
    """Return the sources of a gated MLP or of experts, whose gate and up are one tensor.

    Args:
        ours: our path of a projection, with {name} for its name.
        theirs: their name of the parent.
    """
    names = {}
    for part, name in enumerate(("gate", "up")):
        tensor = f"{_LAYER}.{theirs}.input_linear.weight"
        names[ours.format(name=name)] = Source(tensor, transpose=True, fused_part=(part, 2))
    names[ours.format(name="down")] = Source(f"{_LAYER}.{theirs}.output_linear.weight", transpose=True)
    return names


# The parameters of Mamba-2 that are tensors of their own.
_MIXER_NAMES = {
    "log_rate": Source(f"{_MIXER}.A_log"),
    "step_bias": Source(f"{_MIXER}.dt_bias"),
    "skip": Source(f"{_MIXER}.D"),
    "norm/scale": Source(f"{_MIXER}.norm.weight"),
    "output/weight": Source(f"{_MIXER}.out_proj.weight", transpose=True),
    "output/bias": Source(f"{_MIXER}.out_proj.bias"),
}


@component
class GraniteHybrid(ModelFamily):
    """GraniteMoeHybridForCausalLM."""

    architectures = {"GraniteMoeHybridForCausalLM": "granitemoehybrid"}
    names = {
        **decoder_names(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
        # Without experts, the shared MLP is the only one.
        **_feed_forward_names("mlp/{name}/weight", "shared_mlp"),
        **_feed_forward_names("mlp/shared/{name}/weight", "shared_mlp"),
        **_feed_forward_names("mlp/experts/{name}", "block_sparse_moe"),
        "mlp/router/weight": Source(f"{_LAYER}.block_sparse_moe.router.layer.weight", transpose=True),
    }

    def find_source(self, name: str, layer: Layer | None) -> Source | None:
        """See `ModelFamily.find_source`. The sizes of a Mamba-2 layer determine how its fused tensors are divided."""
        parent, _, rest = name.partition("/")
        if isinstance(layer, Block) and parent == "attention" and isinstance(layer.attention, Mamba2):
            return _mixer_sources(layer.attention).get(rest)
        return super().find_source(name, layer)

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        refuse_losses(fields)
        biases = fields.flag("attention_bias", False)
        has_positions = _has_rotary_positions(fields)
        if not has_positions:
            # transformers does not read them then.
            facts = {name: value for name, value in facts.items() if not name.startswith("rope_")}
        model = llama_decoder(
            ConfigFacts({"intermediate_size": 11008, **facts}), kv_heads=None, qkv_bias=biases, output_bias=biases
        )
        model.embed.scale = _multiplier(fields, "embedding_multiplier")
        model.head.logit_divisor = _multiplier(fields, "logits_scaling")
        attending = model.stack.pattern[0]
        attending.branch_scale = _multiplier(fields, "residual_multiplier")
        attention = attending.attention
        scale = fields.number("attention_multiplier", 1.0)
        # None stands for our default.
        head_dim = attention.head_dim or model.dim // attention.num_heads
        attention.scale = None if scale == head_dim**-0.5 else scale
        if not has_positions:
            attention.rotary = None
        attending.mlp = _mlp(fields, attending.mlp)
        recurrent = attending.copy()
        recurrent.attention = _mixer(fields, model.dim, attending.norm.eps)
        blocks = [recurrent if kind in _LINEAR else attending for kind in _layer_kinds(fields)]
        # The shorter the pattern, the fewer blocks a stack compiles.
        model.stack.pattern = [block.copy() for block in blocks[: shortest_period(blocks)]]
        return model

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`."""
        blocks = list(model.stack.pattern)
        mixers = [block.attention for block in blocks if block.attention.takes("state_dim")]
        attentions = [block.attention for block in blocks if block.attention.takes("num_kv_heads")]
        # Without Mamba-2, only two of the multipliers distinguish these models from Llama.
        if not mixers and model.head.logit_divisor is None and blocks[0].branch_scale is None:
            raise ValueError("no layer has an attention with state_dim")
        kinds = [(_LINEAR if block.attention.takes("state_dim") else _FULL)[0] for block in blocks]
        return {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "vocab_size": model.vocab_size,
            "hidden_size": model.dim,
            "num_hidden_layers": model.stack.num_layers,
            "layer_types": kinds * (model.stack.num_layers // len(kinds)),
            "rms_norm_eps": blocks[0].norm.eps,
            "tie_word_embeddings": model.head.tied,
            "embedding_multiplier": model.embed.scale or 1.0,
            "logits_scaling": model.head.logit_divisor or 1.0,
            "residual_multiplier": blocks[0].branch_scale or 1.0,
            **_attention_facts(model, attentions),
            **_mlp_facts(blocks[0].mlp),
            **_mixer_facts(model, mixers),
        }


def _mixer_sources(mixer: Mamba2) -> dict[str, Source]:
    """Return {our path: their tensor} for the parameters of a layer's Mamba-2."""
    groups = mixer.num_key_heads * mixer.key_dim
    channels = mixer.num_heads * mixer.value_dim
    sources = dict(_MIXER_NAMES)
    for kind in ("weight", "bias"):
        tensor = Source(f"{_MIXER}.in_proj.{kind}", transpose=kind == "weight")
        names = [f"{name}/{kind}" for name in ("gate", "value", "key", "query", "step")]
        sources |= split_source(tensor, names, [channels, channels, groups, groups, mixer.num_heads])
    taps = Source(f"{_MIXER}.conv1d.weight", transpose=True, has_channel_axis=True)
    for tensor, ending in ((taps, "conv"), (Source(f"{_MIXER}.conv1d.bias"), "conv_bias")):
        names = [f"{name}_{ending}" for name in ("value", "key", "query")]
        sources |= split_source(tensor, names, [channels, groups, groups])
    return sources


def _multiplier(fields: ConfigFacts, name: str) -> float | None:
    """Return a multiplier; None for 1."""
    value = fields.number(name, 1.0)
    return None if value == 1.0 else value


def _has_rotary_positions(fields: ConfigFacts) -> bool:
    """Return whether attention has rotary positions. Raises ValueError for other kinds of positions than rope."""
    kind = fields.any("position_embedding_type", None)
    if kind not in (None, "nope", "rope"):
        raise fields.error("position_embedding_type", "rope, nope or null")
    return kind == "rope"


def _layer_kinds(fields: ConfigFacts) -> list[str]:
    """Return the kind of each layer. Raises ValueError if `layer_types` has another length or other kinds."""
    layers = fields.size("num_hidden_layers", 32)
    if "layers_block_type" in fields:
        raise fields.error("layers_block_type", "layer_types instead")
    kinds = fields.any("layer_types", None)
    if kinds is None:
        return [_LINEAR[0]] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {*_LINEAR, *_FULL}:
        raise fields.error("layer_types", f"{_LINEAR[1]} or {_FULL[1]} for each of {layers} layers")
    return kinds


def _mlp(fields: ConfigFacts, dense: Config) -> Config:
    """Return a layer's shared MLP, in a mixture if there are experts.

    Args:
        fields: fields of config.json.
        dense: an MLP of the width of an expert.
    """
    if dense.activation != "silu":
        raise fields.error("hidden_act", "silu, which the convolutions of Mamba-2 apply too")
    shared = dense.copy()
    shared.hidden = fields.size("shared_intermediate_size", 1024)
    num_experts = fields.size("num_local_experts", 8, least=0)
    if num_experts == 0:
        return shared
    num_chosen = fields.size("num_experts_per_tok", 2)
    if num_chosen > num_experts:
        raise fields.error("num_experts_per_tok", f"at most num_local_experts = {num_experts}")
    # The balance loss is a setting of training, not of the published model.
    moe = mixture(experts=num_experts, top_k=num_chosen, hidden=dense.hidden, normalize=False, balance=0.0)
    moe.router.score = "softmax_chosen"
    moe.shared = shared
    return moe


def _mlp_facts(mlp: Config) -> dict[str, object]:
    """Return the fields of config.json for a layer's MLP or mixture, the inverse of `_mlp`."""
    if not mlp.takes("num_experts"):
        facts = {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": mlp.hidden}
        return facts | {"shared_intermediate_size": mlp.hidden, "hidden_act": activation_fact(mlp.activation)}
    if mlp.shared is None:
        raise ValueError("stack.pattern.0.mlp.shared = None")
    return {
        "num_local_experts": mlp.num_experts,
        "num_experts_per_tok": mlp.router.top_k,
        "intermediate_size": mlp.experts.hidden,
        "shared_intermediate_size": mlp.shared.hidden,
        "hidden_act": activation_fact(mlp.experts.activation),
    }


def _mixer(fields: ConfigFacts, dim: int, eps: float) -> Config:
    """Build the Mamba-2 of a layer."""
    heads = fields.size("mamba_n_heads", 128)
    groups = fields.size("mamba_n_groups", 1)
    channels = fields.size("mamba_expand", 2) * dim
    if channels % heads:
        raise fields.error("mamba_n_heads", f"a divisor of mamba_expand * hidden_size = {channels}")
    head_dim = channels // heads
    if fields.any("mamba_d_head", "auto") not in ("auto", head_dim):
        raise fields.error("mamba_d_head", f"mamba_expand * hidden_size / mamba_n_heads = {head_dim}")
    if heads % groups:
        raise fields.error("mamba_n_groups", f"a divisor of mamba_n_heads = {heads}")
    low, high = _step_limits(fields)
    return config_for(
        Mamba2,
        num_heads=heads,
        head_dim=head_dim,
        state_dim=fields.size("mamba_d_state", 256),
        num_groups=groups,
        conv_width=fields.size("mamba_d_conv", 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        linear=config_for(Linear, bias=fields.flag("mamba_proj_bias", False)),
        min_step=low,
        max_step=high,
        norm_eps=eps,
    )


def _step_limits(fields: ConfigFacts) -> tuple[float, float | None]:
    """Return the bounds of the step size; None for no upper bound. Raises ValueError if they are not two numbers."""
    given = fields.any("time_step_limit", [0.0, math.inf])
    limits = [math.inf if limit == _INFINITY else limit for limit in given] if isinstance(given, list) else []
    if len(limits) != 2 or any(isinstance(limit, bool) or not isinstance(limit, int | float) for limit in limits):
        raise fields.error("time_step_limit", "two numbers, the bounds of the step size")
    low, high = limits
    if not 0 <= low < high:
        raise fields.error("time_step_limit", "an upper bound above the lower one, which is at least 0")
    return float(low), None if high == math.inf else float(high)


def _mixer_facts(model: Config, mixers: list[Config]) -> dict[str, object]:
    """Return the fields of config.json for Mamba-2, the inverse of `_mixer`."""
    if not mixers:
        # transformers checks these sizes in models without Mamba-2, too.
        return {"mamba_n_heads": 1}
    mixer = mixers[0]
    channels = mixer.num_heads * mixer.head_dim
    if channels % model.dim:
        raise ValueError(f"num_heads * head_dim = {channels}, which is not a multiple of dim = {model.dim}")
    facts: dict[str, object] = {
        "mamba_n_heads": mixer.num_heads,
        "mamba_n_groups": mixer.num_groups,
        "mamba_d_state": mixer.state_dim,
        "mamba_d_head": mixer.head_dim,
        "mamba_d_conv": mixer.conv_width,
        "mamba_expand": channels // model.dim,
        "mamba_conv_bias": mixer.conv_bias,
        "mamba_proj_bias": mixer.linear.bias,
    }
    if mixer.min_step > 0 or mixer.max_step is not None:
        facts["time_step_limit"] = [mixer.min_step, _INFINITY if mixer.max_step is None else mixer.max_step]
    return facts


def _attention_facts(model: Config, attentions: list[Config]) -> dict[str, object]:
    """Return the fields of config.json for attention, which transformers needs in models without it too."""
    if not attentions:
        return {"num_attention_heads": 1, "num_key_value_heads": 1}
    attention = attentions[0]
    head_dim = attention.head_dim or model.dim // attention.num_heads
    facts: dict[str, object] = {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
        "head_dim": head_dim,
        "attention_bias": attention.linear.bias,
        "attention_multiplier": attention.scale or head_dim**-0.5,
        "position_embedding_type": "nope" if attention.rotary is None else "rope",
    }
    if attention.rotary is not None:
        facts["rope_parameters"] = rope_parameters(attention.rotary)
    return facts
