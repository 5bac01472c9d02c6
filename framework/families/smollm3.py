"""SmolLM 3: Llama's layers; every fourth one has no rotary positions (NoPE, arXiv 2501.18795).

In models with windows, the layers without rotary positions have one, unless config.json lists the layers.
"""

from __future__ import annotations

from plimsoll.framework.config import Config, component
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.llama import (
    Llama,
    common_facts,
    layer_types,
    layer_windows,
    llama_decoder,
    rope_facts,
    with_windows,
)
from plimsoll.framework.weights.family import ModelFamily


def _rotating_layers(facts: ConfigFacts) -> list[bool]:
    """Return whether each layer has rotary positions.

    Raises:
        ValueError: `no_rope_layers` is not a list of integers with one for each layer.
    """
    num_layers = facts.size("num_hidden_layers")
    flags = facts.any("no_rope_layers", None)
    if flags is None:
        interval = facts.size("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    is_list = isinstance(flags, list) and all(isinstance(flag, int) and not isinstance(flag, bool) for flag in flags)
    # transformers ignores the rest of a longer list.
    if not is_list or len(flags) < num_layers:
        raise facts.error("no_rope_layers", f"1 (rotary positions) or 0 (none) for each of {num_layers} layers")
    return [flag != 0 for flag in flags[:num_layers]]


def _windows(facts: ConfigFacts, rotates: list[bool]) -> list[int | None]:
    """Return the attention window of each layer.

    Raises:
        ValueError: `layer_types` lists layers with a window that the other fields do not give them.
    """
    has_windows = facts.flag("use_sliding_window", False)
    window = facts.size("sliding_window", None, null=True) if has_windows else None
    kinds = layer_types(facts)
    if kinds is None:
        return [None if one else window for one in rotates]
    # Without the flag, only some of transformers' attention implementations apply the window of these layers.
    if "sliding_attention" in kinds and not has_windows:
        raise facts.error("use_sliding_window", "true, because some layers are sliding_attention")
    return layer_windows(kinds, window, facts)


@component
class SmolLM3(ModelFamily):
    """SmolLM3ForCausalLM."""

    architectures = {"SmolLM3ForCausalLM": "smollm3"}
    scored = {"SmolLM3ForSequenceClassification": "SmolLM3ForCausalLM"}
    names = Llama.names

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        biases = fields.flag("attention_bias", False)
        model = llama_decoder(
            fields,
            kv_heads=4,
            theta=2_000_000.0,
            tied=True,
            qkv_bias=biases,
            output_bias=biases,
            mlp_bias=fields.flag("mlp_bias", False),
        )
        rotary = model.stack.pattern[0].attention.rotary
        rotates = _rotating_layers(fields)
        return with_windows(model, _windows(fields, rotates), [rotary if one else None for one in rotates])

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`. Raises ValueError if all layers are those of Llama."""
        blocks = list(model.stack.pattern)
        facts = common_facts(model)
        rotaries = [block.attention.rotary for block in blocks if block.attention.rotary is not None]
        has_windows = facts["sliding_window"] is not None
        if len(rotaries) == len(blocks) and not has_windows:
            raise ValueError("all layers have an attention.rotary, and none has an attention.window")
        if rotaries:
            facts |= rope_facts(rotaries[0])
        flags = [int(block.attention.rotary is not None) for block in blocks]
        return {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            **facts,
            "attention_bias": blocks[0].attention.linear.bias,
            "mlp_bias": blocks[0].mlp.linear.bias,
            "no_rope_layers": flags * (model.stack.num_layers // len(flags)),
            "use_sliding_window": has_windows,
            # transformers' default would be an id beyond small vocabularies.
            "pad_token_id": None,
        }
