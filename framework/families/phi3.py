"""Phi-3, Phi-3.5 and Phi-4 (arXiv 2404.14219, 2412.08905): Llama's layers, with fused matrices in the files.

Queries, keys and values are one tensor, and so are gate and up. Phi-4-mini rotates three quarters of each head. The
long versions have LongRoPE: they are read for sequences of up to `original_max_position_embeddings`.
"""

from __future__ import annotations

from dataclasses import replace

from plimsoll.framework.config import Config, component
from plimsoll.framework.families.decoders import llama_model
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.llama import activation, check_uniform_window, common_facts, decoder_names, rope
from plimsoll.framework.families.rope_scaling import longrope_facts, longrope_scaling, rotary_dim, rotary_part
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.weights.family import ModelFamily
from plimsoll.framework.weights.source import LAYER, Source

_LAYER = f"model.layers.{LAYER}"
_ORIGINAL_LENGTH = "original_max_position_embeddings"
# Other names that transformers accepts for longrope in models of this family.
_LONGROPE = ("longrope", "su", "yarn")


def _names() -> dict[str, Source]:
    """Return {our path: their tensor}. A model's sizes determine the spans of queries, keys and values in theirs."""
    names = decoder_names(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
    for name in ("query", "key", "value"):
        names[f"attention/{name}/weight"] = Source(f"{_LAYER}.self_attn.qkv_proj.weight", transpose=True)
    for index, name in enumerate(("gate", "up")):
        fused_name = f"{_LAYER}.mlp.gate_up_proj.weight"
        names[f"mlp/{name}/weight"] = Source(fused_name, transpose=True, fused_part=(index, 2))
    # Layers have no biases, and heads have no norms.
    return {ours: theirs for ours, theirs in names.items() if not ours.endswith("bias") and "key_norm" not in ours}


@component
class Phi3(ModelFamily):
    """Phi3ForCausalLM. Ignores dropout in config.json; use `model.*.dropout` instead."""

    architectures = {"Phi3ForCausalLM": "phi3"}
    scored = {"Phi3ForSequenceClassification": "Phi3ForCausalLM"}
    names = _names()
    # Published directories refer to code that has since become part of transformers.
    has_custom_code = True

    def places(self, model: CausalLM) -> dict[str, list[Source]]:
        """See `ModelFamily.places`."""
        sources = super().places(model)
        for path, path_sources in sources.items():
            parent, _, kind = path.rpartition("/")
            block, _, name = parent.rpartition("/attention/")
            if kind != "weight" or name not in ("query", "key", "value"):
                continue
            sizes = [model.base_specs[f"{block}/attention/{one}/weight"].shape[-1] for one in ("query", "key", "value")]
            first = sum(sizes[: ("query", "key", "value").index(name)])
            sources[path] = [replace(source, span=(first, sum(sizes))) for source in path_sources]
        return sources

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        dim = fields.size("hidden_size")
        heads = fields.size("num_attention_heads")
        kv_heads = fields.size("num_key_value_heads", None, null=True)
        head_dim = fields.size("head_dim", None, null=True) or dim // heads
        turned = rotary_dim(fields, head_dim)
        theta, scaling = _rope(fields, (turned or head_dim) // 2)
        model = llama_model(
            layers=fields.size("num_hidden_layers"),
            heads=heads,
            kv_heads=None if kv_heads == heads else kv_heads,
            dim=dim,
            hidden=fields.size("intermediate_size"),
            vocab_size=fields.size("vocab_size"),
            theta=theta,
            eps=fields.number("rms_norm_eps", 1e-5),
            tied=fields.flag("tie_word_embeddings", False),
            rope_scaling=scaling,
        )
        block = model.stack.pattern[0]
        block.mlp.activation = activation(fields, "hidden_act", "silu")
        block.attention.rotary.rotary_dim = turned
        # Set only if it differs from our default, which is the width divided by the number of heads.
        if head_dim * heads != dim:
            block.attention.head_dim = head_dim
        window = fields.size("sliding_window", None, null=True)
        check_uniform_window(fields, window)
        block.attention.window = window
        return model

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`."""
        facts = common_facts(model)
        del facts["layer_types"]
        attention = model.stack.pattern[0].attention
        rotary = attention.rotary
        if rotary is None:
            raise ValueError("stack.pattern.0.attention.rotary = None")
        if rotary.rotary_dim is not None:
            head_dim = attention.head_dim or model.dim // attention.num_heads
            facts["partial_rotary_factor"] = rotary_part(rotary.rotary_dim, head_dim)
        if rotary.scaling is not None:
            facts["rope_scaling"] = longrope_facts(rotary.scaling)
            facts[_ORIGINAL_LENGTH] = rotary.scaling.original_length
        # transformers' default would be an id beyond small vocabularies.
        return {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **facts, "pad_token_id": None}


def _rope(facts: ConfigFacts, num_frequencies: int) -> tuple[float, Config | None]:
    """Return (theta, scaling), where the scaling is longrope or None.

    Raises:
        ValueError: the scaling is a different one, or `rope` refuses it.
    """
    scaling = facts.part("rope_scaling") or facts.part("rope_parameters") or ConfigFacts({}, "rope_parameters.")
    kind = scaling.any("rope_type", scaling.any("type", "default"))
    if kind not in ("default", *_LONGROPE):
        raise ValueError(f"config.json: rope scaling {scaling.values}; expected rope_type default or longrope")
    # `rope` reads theta, and refuses two objects that differ.
    plain = dict(facts.values)
    for name in ("rope_scaling", "rope_parameters"):
        value = plain.get(name)
        if isinstance(value, dict) and value:
            plain[name] = value | {"rope_type": "default"}
    theta, _ = rope(ConfigFacts(plain), partial=True)
    if kind == "default":
        return theta, None
    # transformers uses this field even if the object has another value.
    length = facts.size(_ORIGINAL_LENGTH, 4096, least=2)
    return theta, longrope_scaling(facts, scaling, length=length, num_frequencies=num_frequencies)
