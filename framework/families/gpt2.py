"""GPT-2 (Radford et al. 2019). Its Conv1D stores [in, out] as we do; query, key and value are one fused matrix."""

from __future__ import annotations

from plimsoll.framework.config import Config, component
from plimsoll.framework.families.decoders import gpt2_model
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.llama import activation, activation_fact
from plimsoll.framework.weights.family import ModelFamily
from plimsoll.framework.weights.source import Source

_LAYER = "transformer.h.{layer}"


def _names() -> dict[str, Source]:
    """Return {our path: their tensor}."""
    names = {"embed/token": Source("transformer.wte.weight"), "embed/position": Source("transformer.wpe.weight")}
    # torch calls the scale of a norm its weight.
    for ours, theirs in (("scale", "weight"), ("bias", "bias")):
        names[f"head/norm/{ours}"] = Source(f"transformer.ln_f.{theirs}")
        names[f"attention_norm/{ours}"] = Source(f"{_LAYER}.ln_1.{theirs}")
        names[f"mlp_norm/{ours}"] = Source(f"{_LAYER}.ln_2.{theirs}")
    for kind in ("weight", "bias"):
        for index, name in enumerate(("query", "key", "value")):
            # The fused matrix consists of three equal parts side by side.
            fused_name = f"{_LAYER}.attn.c_attn.{kind}"
            names[f"attention/{name}/{kind}"] = Source(fused_name, fused_part=(index, 3))
        names[f"attention/output/{kind}"] = Source(f"{_LAYER}.attn.c_proj.{kind}")
        names[f"mlp/up/{kind}"] = Source(f"{_LAYER}.mlp.c_fc.{kind}")
        names[f"mlp/down/{kind}"] = Source(f"{_LAYER}.mlp.c_proj.{kind}")
    return names


@component
class GPT2(ModelFamily):
    """GPT2LMHeadModel. Ignores dropout in config.json; use `model.*.dropout` instead."""

    architectures = {"GPT2LMHeadModel": "gpt2"}
    scored = {"GPT2ForSequenceClassification": "GPT2LMHeadModel"}
    names = _names()
    # Older files store the causal mask as a tensor.
    ignored = r"\.attn\.(masked_)?bias$"

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        if fields.flag("scale_attn_by_inverse_layer_idx", False):
            raise fields.error(
                "scale_attn_by_inverse_layer_idx", "false: all layers scale attention logits by the same factor"
            )
        # transformers also accepts a second name for each of these.
        dim = fields.size_by_names("n_embd", "hidden_size")
        heads = fields.size_by_names("n_head", "num_attention_heads")
        model = gpt2_model(
            layers=fields.size_by_names("n_layer", "num_hidden_layers"),
            heads=heads,
            dim=dim,
            vocab_size=fields.size("vocab_size"),
            positions=fields.size_by_names("n_positions", "max_position_embeddings"),
        )
        block = model.stack.pattern[0]
        eps = fields.number("layer_norm_epsilon", 1e-5)
        block.norm.eps = model.head.norm.eps = eps
        block.attention.scale = None if fields.flag("scale_attn_weights", True) else 1.0
        block.mlp.hidden = fields.size("n_inner", None, null=True) or 4 * dim
        block.mlp.activation = activation(fields, "activation_function", "gelu_new")
        model.head.tied = fields.flag("tie_word_embeddings", True)
        return model

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`."""
        block = model.stack.pattern[0]
        if block.norm is None:
            raise ValueError("stack.pattern.0.norm = None")
        facts = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": model.vocab_size,
            "n_positions": model.embed.max_positions,
            "n_embd": model.dim,
            "n_layer": model.stack.num_layers,
            "n_head": block.attention.num_heads,
            "n_inner": block.mlp.hidden,
            "activation_function": activation_fact(block.mlp.activation),
            "layer_norm_epsilon": block.norm.eps,
            "tie_word_embeddings": model.head.tied,
        }
        # Scales other than the default and 1 have no field; `export_config` detects the difference.
        if block.attention.scale is not None:
            facts["scale_attn_weights"] = False
        return facts
