"""Qwen3-Next and Qwen3.5, text only: three layers of Gated DeltaNet (arXiv 2412.06464) to each layer of attention.

Attention has an output gate, norms of queries and keys, and rotates a quarter of each head. Norms store scale - 1,
except those of Gated DeltaNet. Mixtures of experts have a shared expert with a gate. The heads for multi-token
prediction (`mtp.*`) of published files are left out, as in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from plimsoll.framework.config import Config, component, config_for
from plimsoll.framework.families.decoders import llama_model
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.llama import (
    activation,
    activation_fact,
    decoder_names,
    rope,
    rope_parameters,
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
from plimsoll.framework.families.rope_scaling import rotary_dim, rotary_part
from plimsoll.framework.layers.base import Layer
from plimsoll.framework.layers.block import Block
from plimsoll.framework.layers.gated_delta_net import GatedDeltaNet
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.weights.family import ModelFamily
from plimsoll.framework.weights.source import Source, split_source

_LAYER = "model.layers.{layer}"
_MIXER = f"{_LAYER}.linear_attn"
# The prefix of the language model's tensors in the files of a model that reads images too.
_NESTED_PREFIX = "model.language_model."
_FULL, _LINEAR = "full_attention", "linear_attention"
# The part of a head that rotates, if config.json does not say.
_ROTATED_PART = 0.25


_NAMES = {
    **decoder_names(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
    **mixture_names("mlp.gate", "mlp.experts.{expert}", gate="gate_proj", up="up_proj", down="down_proj"),
    **shared_expert_names(),
}
# The parameters of Gated DeltaNet that are tensors of their own.
_MIXER_NAMES = {
    "norm/scale": Source(f"{_MIXER}.norm.weight"),
    "log_rate": Source(f"{_MIXER}.A_log"),
    "decay_bias": Source(f"{_MIXER}.dt_bias"),
    "output/weight": Source(f"{_MIXER}.out_proj.weight", transpose=True),
}


class _HybridFamily(ModelFamily):
    """Base class of both families: attention with an output gate, and the names of all tensors but the projections."""

    names = _NAMES

    def find_source(self, name: str, layer: Layer | None) -> Source | None:
        """See `ModelFamily.find_source`. The heads of a layer determine how its fused tensors are divided."""
        parent, _, rest = name.partition("/")
        if not isinstance(layer, Block) or parent != "attention":
            return super().find_source(name, layer)
        mixer = layer.attention
        if isinstance(mixer, GatedDeltaNet):
            return self._mixer_sources(mixer).get(rest)
        for kind in ("weight", "bias"):
            # A projection computes the query and the gate of each head.
            tensor = Source(f"{_LAYER}.self_attn.q_proj.{kind}", transpose=kind == "weight")
            paths = [f"query/{kind}", f"gate/{kind}"]
            if rest in paths:
                return split_source(tensor, paths, [mixer.head_dim] * 2, mixer.num_heads)[rest]
        return super().find_source(name, layer)

    def _mixer_sources(self, mixer: GatedDeltaNet) -> dict[str, Source]:
        """Return {our path: their tensor} for the parameters of a layer's Gated DeltaNet."""
        return {**_MIXER_NAMES, **_conv_sources(mixer), **self._projection_sources(mixer)}

    def _projection_sources(self, mixer: GatedDeltaNet) -> dict[str, Source]:
        """Return {our path: their tensor} of the projections of a layer's Gated DeltaNet."""
        raise NotImplementedError


# Before Qwen3Next, which has the same layers: a model without a config.json is exported in the newer format.
@component
class Qwen35(_HybridFamily):
    """Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM, whose projections are divided in another way."""

    architectures = {"Qwen3_5ForCausalLM": "qwen3_5_text", "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text"}
    scored = {"Qwen3_5TextForSequenceClassification": "Qwen3_5ForCausalLM"}
    multimodal = {
        "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    }
    ignored = r"rotary_emb\.inv_freq$|^mtp\.|^model\.visual\."

    def _projection_sources(self, mixer: GatedDeltaNet) -> dict[str, Source]:
        """Return the sources of the projections: queries, keys and values are in one tensor."""
        keys = mixer.num_key_heads * mixer.key_dim
        sources = split_source(
            Source(f"{_MIXER}.in_proj_qkv.weight", transpose=True),
            ["query/weight", "key/weight", "value/weight"],
            [keys, keys, mixer.num_heads * mixer.value_dim],
        )
        for ours, theirs in (("gate", "z"), ("beta", "b"), ("decay", "a")):
            sources[f"{ours}/weight"] = Source(f"{_MIXER}.in_proj_{theirs}.weight", transpose=True)
        return sources

    def match_names(self, places: dict[str, list[Source]], names: Collection[str]) -> dict[str, list[Source]]:
        """See `ModelFamily.match_names`. Published files have a prefix, and the experts of a layer in two tensors."""
        prefix = "model."
        if any(name.startswith(_NESTED_PREFIX) for name in names):
            prefix = _NESTED_PREFIX
        matched: dict[str, list[Source]] = {}
        for path, sources in places.items():
            matched[path] = []
            for source in sources:
                renamed = replace(source, name=re.sub(r"^model\.", prefix, source.name))
                fused = _fuse_experts(renamed)
                matched[path].append(renamed if fused is None or fused.name not in names else fused)
        return matched

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        refuse_losses(fields)
        (kind,) = set(fields.any("architectures")) & set(self.architectures)
        if kind == "Qwen3_5ForCausalLM":
            mlp = _mlp(fields, fields.size("intermediate_size", 12288))
        else:
            num_experts, num_chosen = count_experts(fields, 256, 8)
            mlp = gated_mixture(fields, experts=num_experts, top_k=num_chosen, normalize=True, hidden=512, shared=512)
        return _hybrid(fields, [mlp] * fields.size("num_hidden_layers"))

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`."""
        blocks = list(model.stack.pattern)
        is_sparse = blocks[0].mlp.takes("num_experts")
        kind = "Qwen3_5MoeForCausalLM" if is_sparse else "Qwen3_5ForCausalLM"
        own = gated_mixture_facts(blocks) if is_sparse else {"intermediate_size": blocks[0].mlp.hidden}
        return {**_facts(model), **own, "architectures": [kind], "model_type": self.architectures[kind]}


@component
class Qwen3Next(_HybridFamily):
    """Qwen3NextForCausalLM."""

    architectures = {"Qwen3NextForCausalLM": "qwen3_next"}
    scored = {"Qwen3NextForSequenceClassification": "Qwen3NextForCausalLM"}
    ignored = r"rotary_emb\.inv_freq$|^mtp\."

    def _projection_sources(self, mixer: GatedDeltaNet) -> dict[str, Source]:
        """Return the sources of the projections: one group for each key head, with its heads of values."""
        per_key = mixer.num_heads // mixer.num_key_heads
        values = per_key * mixer.value_dim
        return split_source(
            Source(f"{_MIXER}.in_proj_qkvz.weight", transpose=True),
            ["query/weight", "key/weight", "value/weight", "gate/weight"],
            [mixer.key_dim, mixer.key_dim, values, values],
            mixer.num_key_heads,
        ) | split_source(
            Source(f"{_MIXER}.in_proj_ba.weight", transpose=True),
            ["beta/weight", "decay/weight"],
            [per_key, per_key],
            mixer.num_key_heads,
        )

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        refuse_losses(fields)
        num_experts, num_chosen = count_experts(fields, 512, 10)
        normalize = fields.flag("norm_topk_prob", True)
        moe = gated_mixture(fields, experts=num_experts, top_k=num_chosen, normalize=normalize, hidden=512, shared=512)
        dense = _mlp(fields, fields.size("intermediate_size", 5632))
        mlps = [moe if is_sparse else dense for is_sparse in sparse_layers(fields)]
        return _hybrid(fields, mlps)

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`."""
        blocks = list(model.stack.pattern)
        layers = blocks * (model.stack.num_layers // len(blocks))
        dense = [block.mlp for block in blocks if not block.mlp.takes("num_experts")]
        return {
            **_facts(model),
            **gated_mixture_facts(blocks),
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "intermediate_size": dense[0].hidden if dense else 5632,
            "norm_topk_prob": find_gated_mixture(blocks).router.normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, block in enumerate(layers) if not block.mlp.takes("num_experts")],
        }


def _fuse_experts(source: Source) -> Source | None:
    """Return the source of a parameter of all experts together, [E, 2F, D] or [E, D, F]; None for other parameters."""
    found = re.fullmatch(r"(.+\.experts)\.\{expert\}\.(gate|up|down)_proj\.weight", source.name)
    if found is None:
        return None
    parent, name = found.groups()
    if name == "down":
        return Source(f"{parent}.down_proj", transpose=True)
    return Source(f"{parent}.gate_up_proj", transpose=True, fused_part=(("gate", "up").index(name), 2))


def _conv_sources(mixer: GatedDeltaNet) -> dict[str, Source]:
    """Return the sources of the convolutions, which are one tensor [E, 1, W]."""
    keys = mixer.num_key_heads * mixer.key_dim
    tensor = Source(f"{_MIXER}.conv1d.weight", transpose=True, has_channel_axis=True)
    names = ["query_conv", "key_conv", "value_conv"]
    return split_source(tensor, names, [keys, keys, mixer.num_heads * mixer.value_dim])


def _mlp(fields: ConfigFacts, hidden: int) -> Config:
    return config_for(MLP, hidden=hidden, activation=activation(fields, "hidden_act", "silu"), gated=True)


def _hybrid(fields: ConfigFacts, mlps: list[Config]) -> Config:
    """Build the model, given the MLP or mixture of each layer."""
    layers = fields.size("num_hidden_layers")
    heads = fields.size("num_attention_heads", 16)
    head_dim = fields.size("head_dim", 256)
    eps = fields.number("rms_norm_eps", 1e-6)
    theta, scaling = rope(fields, partial=True)
    model = llama_model(
        layers=layers,
        heads=heads,
        kv_heads=fields.size("num_key_value_heads"),
        dim=fields.size("hidden_size"),
        hidden=1,
        vocab_size=fields.size("vocab_size"),
        theta=theta,
        eps=eps,
        tied=fields.flag("tie_word_embeddings", False),
        rope_scaling=scaling,
    )
    norm = config_for(RMSNorm, eps=eps, zero_centered=True)
    model.head.norm = norm.copy()
    block = model.stack.pattern[0]
    block.norm = norm.copy()
    attention = block.attention
    attention.qk_norm = norm.copy()
    attention.output_gate = True
    attention.head_dim = head_dim
    attention.rotary.rotary_dim = rotary_dim(fields, head_dim, _ROTATED_PART)
    biases = fields.flag("attention_bias", False)
    attention.linear.bias = biases
    attention.output_bias = biases
    linear = config_for(
        GatedDeltaNet,
        num_heads=fields.size("linear_num_value_heads", 32),
        num_key_heads=fields.size("linear_num_key_heads", 16),
        key_dim=fields.size("linear_key_head_dim", 128),
        value_dim=fields.size("linear_value_head_dim", 128),
        conv_width=fields.size("linear_conv_kernel_dim", 4),
        norm_eps=eps,
    )
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.error("hidden_act", "silu, which the convolutions of Gated DeltaNet apply too")
    blocks = []
    for kind, mlp in zip(_layer_kinds(fields, layers), mlps, strict=True):
        one = block.copy()
        one.attention = (attention if kind == _FULL else linear).copy()
        one.mlp = mlp.copy()
        blocks.append(one)
    # The shorter the pattern, the fewer blocks a stack compiles.
    model.stack.pattern = blocks[: shortest_period(blocks)]
    return model


def _layer_kinds(fields: ConfigFacts, layers: int) -> list[str]:
    """Return the kind of each layer. Raises ValueError if `layer_types` has another length or other kinds."""
    kinds = fields.any("layer_types", None)
    if kinds is None:
        interval = fields.size("full_attention_interval", 4)
        return [_LINEAR if (layer + 1) % interval else _FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {_FULL, _LINEAR}:
        raise fields.error("layer_types", f"{_FULL} or {_LINEAR} for each of {layers} layers")
    return kinds


def _find(blocks: list[Config], name: str) -> Config:
    """Return the first attention that has a field. Raises ValueError if no layer's has it."""
    for block in blocks:
        if block.attention.takes(name):
            return block.attention
    raise ValueError(f"no layer has an attention with {name}")


def _facts(model: Config) -> dict[str, object]:
    """Return the fields of config.json that all these models have."""
    blocks = list(model.stack.pattern)
    attention = _find(blocks, "output_gate")
    linear = _find(blocks, "num_key_heads")
    mlp = blocks[0].mlp
    kinds = [_LINEAR if block.attention.takes("num_key_heads") else _FULL for block in blocks]
    head_dim = attention.head_dim or model.dim // attention.num_heads
    rotary = attention.rotary
    # An inner object: transformers reads the part of a head from there.
    rotary_facts = rope_parameters(rotary)
    rotary_facts["partial_rotary_factor"] = rotary_part(rotary.rotary_dim or head_dim, head_dim)
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": model.stack.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
        "head_dim": head_dim,
        "attention_bias": attention.linear.bias,
        "rms_norm_eps": blocks[0].norm.eps,
        "tie_word_embeddings": model.head.tied,
        "hidden_act": activation_fact((mlp.experts if mlp.takes("num_experts") else mlp).activation),
        "linear_num_value_heads": linear.num_heads,
        "linear_num_key_heads": linear.num_key_heads or linear.num_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.conv_width,
        "layer_types": kinds * (model.stack.num_layers // len(kinds)),
        "rope_parameters": rotary_facts,
    }
