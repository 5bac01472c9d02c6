"""OLMo 3 (arXiv 2512.13961): OLMo 2 with windows in three of four layers, which do not take part in rotary scaling.

The layers with a window have rotary positions of their own, which are not scaled in published models; the others see
all earlier tokens.
"""

from __future__ import annotations

from plimsoll.framework.config import Config, component, config_for
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.llama import (
    common_facts,
    layer_types,
    layer_windows,
    rope,
    rope_parameters,
    with_windows,
)
from plimsoll.framework.families.olmo import Olmo2, olmo2_decoder
from plimsoll.framework.layers.rotary import Rotary
from plimsoll.framework.weights.family import ModelFamily

_FULL, _SLIDING = "full_attention", "sliding_attention"
_THETA = 500_000.0


def _rotary(facts: ConfigFacts, kind: str) -> Config:
    """Build the rotary positions of one kind of layer.

    transformers 5 writes one object for each kind into `rope_parameters`. transformers 4 wrote `rope_theta` and
    `rope_scaling`; there the scaling applies only to layers without a window.

    Raises:
        ValueError: `rope_parameters` has objects other than those of the two kinds, transformers would ignore a
            field of the object, `rope` refuses it, or theta is that of transformers 4 for layers with a window.
    """
    by_kind = facts.part("rope_parameters") or ConfigFacts({}, "rope_parameters.")
    if set(by_kind.values) - {_FULL, _SLIDING}:
        raise facts.error("rope_parameters", f"an object of {_FULL} and one of {_SLIDING}")
    stated = by_kind.part(kind)
    rotary: dict[str, object] = {"rope_type": "default"}
    # An empty object may get its type from `rope_scaling`, under its older name.
    if kind in by_kind:
        rotary = dict(stated.values) if stated is not None else {}
    scaling = facts.part("rope_scaling")
    if kind == _FULL and scaling is not None:
        rotary |= scaling.values
    if "rope_theta" not in rotary:
        theta = facts.number("rope_theta", _THETA)
        if kind == _SLIDING and theta != _THETA:
            # transformers 4 used it in all layers, but 5.23 only in those without a window.
            expected = f"{_THETA}, or a rope_theta in each object of rope_parameters, as some layers are {_SLIDING}"
            raise facts.error("rope_theta", expected)
        rotary["rope_theta"] = theta
    if rotary.get("truncate", True) is not True:
        expected = "true: transformers ignores this field in the object of one kind of layer"
        raise ConfigFacts(rotary, f"rope_parameters.{kind}.").error("truncate", expected)
    # transformers ignores `original_max_position_embeddings` outside of these objects.
    outer_names = ("max_position_embeddings", "partial_rotary_factor")
    outer = {name: facts.values[name] for name in outer_names if name in facts.values}
    theta, scaling_config = rope(ConfigFacts({"max_position_embeddings": 2048, **outer, "rope_parameters": rotary}))
    return config_for(Rotary, theta=theta, scaling=scaling_config)


@component
class Olmo3(ModelFamily):
    """Olmo3ForCausalLM."""

    architectures = {"Olmo3ForCausalLM": "olmo3"}
    scored = {"Olmo3ForSequenceClassification": "Olmo3ForCausalLM"}
    names = Olmo2.names

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        model = olmo2_decoder(fields, _THETA, None)
        kinds = layer_types(fields)
        if kinds is None:
            kinds = [_SLIDING if (layer + 1) % 4 else _FULL for layer in range(model.stack.num_layers)]
        windows = layer_windows(kinds, fields.size("sliding_window", 4096, null=True), fields)
        rotary_by_kind = {kind: _rotary(fields, kind) for kind in set(kinds)}
        return with_windows(model, windows, [rotary_by_kind[kind] for kind in kinds])

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`. Raises ValueError for models without windows, which are OLMo 2's."""
        facts = common_facts(model)
        for name in ("rope_theta", "rope_scaling"):
            facts.pop(name, None)
        rotary_by_kind = {}
        for block in model.stack.pattern:
            kind = _FULL if block.attention.window is None else _SLIDING
            rotary_by_kind[kind] = rope_parameters(block.attention.rotary)
        if _SLIDING not in rotary_by_kind:
            raise ValueError("no layer has an attention.window")
        return {
            "architectures": ["Olmo3ForCausalLM"],
            "model_type": "olmo3",
            **facts,
            "attention_bias": model.stack.pattern[0].attention.linear.bias,
            "rope_parameters": rotary_by_kind,
        }
