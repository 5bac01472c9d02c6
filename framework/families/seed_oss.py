"""Seed-OSS (ByteDance, 2025): Llama's layers, with separate settings for the biases of queries, keys and values, of
the output projection of attention, and of the MLP.

Dropout (`attention_dropout`, `residual_dropout`) is ignored in config.json; use `model.*.dropout` instead.
"""

from __future__ import annotations

from plimsoll.framework.config import Config, component
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.llama import Llama, check_uniform_window, common_facts, llama_decoder
from plimsoll.framework.weights.family import ModelFamily


@component
class SeedOss(ModelFamily):
    """SeedOssForCausalLM."""

    architectures = {"SeedOssForCausalLM": "seed_oss"}
    scored = {"SeedOssForSequenceClassification": "SeedOssForCausalLM"}
    names = Llama.names

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        check_uniform_window(fields, None)
        return llama_decoder(
            fields,
            kv_heads=8,
            head_dim=128,
            qkv_bias=fields.flag("attention_bias", True),
            output_bias=fields.flag("attention_out_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
        )

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`. Raises ValueError for biases that a model of Llama or Qwen2 can have."""
        facts = common_facts(model)
        del facts["layer_types"]
        del facts["sliding_window"]
        block = model.stack.pattern[0]
        qkv_bias = block.attention.linear.bias
        output_bias = qkv_bias if block.attention.output_bias is None else block.attention.output_bias
        mlp_bias = block.mlp.linear.bias
        if qkv_bias == output_bias or (qkv_bias and not mlp_bias):
            raise ValueError(f"biases: {qkv_bias} in attention, {output_bias} in its output, {mlp_bias} in the MLP")
        return {
            "architectures": ["SeedOssForCausalLM"],
            "model_type": "seed_oss",
            **facts,
            "attention_bias": qkv_bias,
            "attention_out_bias": output_bias,
            "mlp_bias": mlp_bias,
        }
