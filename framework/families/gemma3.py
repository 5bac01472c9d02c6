"""Gemma 3, text only (arXiv 2503.19786): Gemma 2 without caps, with query and key norms and two kinds of layers.

Most layers are local: they see a window, and their rotary positions have their own base. Every sixth layer is global.
"""

from __future__ import annotations

from plimsoll.framework.config import Config, component, config_for
from plimsoll.framework.families.facts import ConfigFacts
from plimsoll.framework.families.gemma import GEMMA_NAMES, gemma_decoder, gemma_facts
from plimsoll.framework.families.llama import layer_types, layer_windows, rope, rope_facts, with_windows
from plimsoll.framework.layers.rotary import Rotary
from plimsoll.framework.weights.family import ModelFamily

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def _rotary_facts(facts: ConfigFacts) -> tuple[dict[str, object], dict[str, object]]:
    """Return the objects for the rotary positions of global and of local layers.

    transformers 5 writes one object for each kind into `rope_parameters`. transformers 4 wrote `rope_theta`,
    `rope_scaling` and `rope_local_base_freq`; there the scaling applies only to global layers, and takes precedence
    over `rope_parameters`.

    Raises:
        ValueError: `rope_parameters` has objects other than those of the two kinds of layers.
    """
    parameters = facts.part("rope_parameters")
    if parameters is None:
        parameters = ConfigFacts({_GLOBAL: {"rope_type": "default"}}, "rope_parameters.")
    unknown_names = set(parameters.values) - {_GLOBAL, _LOCAL}
    if unknown_names:
        raise facts.error("rope_parameters", f"an object of {_GLOBAL} and one of {_LOCAL}")
    objects = []
    for kind, theta_name, theta in (
        (_GLOBAL, "rope_theta", _GLOBAL_THETA),
        (_LOCAL, "rope_local_base_freq", _LOCAL_THETA),
    ):
        stated = parameters.part(kind)
        rotary: dict[str, object] = dict(stated.values) if stated is not None else {"rope_type": "default"}
        scaling = facts.part("rope_scaling")
        if kind == _GLOBAL and scaling is not None:
            rotary |= scaling.values
        rotary.setdefault("rope_theta", facts.number(theta_name, theta))
        objects.append(rotary)
    global_rotary, local_rotary = objects
    return global_rotary, local_rotary


def _rotary(facts: ConfigFacts, rotary: dict[str, object]) -> Config:
    """Build the rotary positions of one kind of layer. Raises ValueError for other types or what `rope` refuses."""
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    # transformers reads some fields of the other types from places that exist only in flat objects.
    if kind not in ("default", "linear"):
        raise ValueError(f"config.json: rope scaling {rotary}; expected rope_type default or linear")
    stated: dict[str, object] = {"rope_parameters": rotary}
    if "partial_rotary_factor" in facts.values:
        stated["partial_rotary_factor"] = facts.values["partial_rotary_factor"]
    theta, scaling = rope(ConfigFacts(stated))
    return config_for(Rotary, theta=theta, scaling=scaling)


@component
class Gemma3(ModelFamily):
    """Gemma3ForCausalLM."""

    architectures = {"Gemma3ForCausalLM": "gemma3_text"}
    scored = {"Gemma3TextForSequenceClassification": "Gemma3ForCausalLM"}
    names = GEMMA_NAMES

    def model(self, facts: dict[str, object]) -> Config:
        """See `ModelFamily.model`."""
        fields = ConfigFacts(facts)
        global_rotary, local_rotary = (_rotary(fields, rotary) for rotary in _rotary_facts(fields))
        model = gemma_decoder(fields, _GLOBAL_THETA, None)
        model.head.softcap = fields.number("final_logit_softcapping", None, null=True)
        # transformers has the field, but does not use it.
        if fields.any("attn_logit_softcapping", None) is not None:
            raise fields.error("attn_logit_softcapping", "null: attention logits are not capped")
        kinds = layer_types(fields)
        if kinds is None:
            period = fields.size("sliding_window_pattern", 6)
            kinds = []
            for layer in range(model.stack.num_layers):
                kinds.append(_LOCAL if (layer + 1) % period else _GLOBAL)
        windows = layer_windows(kinds, fields.size("sliding_window", 4096, null=True), fields)
        block = model.stack.pattern[0]
        block.attention.qk_norm = block.norm.copy()
        return with_windows(model, windows, [global_rotary if kind == _GLOBAL else local_rotary for kind in kinds])

    def facts(self, model: Config) -> dict[str, object]:
        """See `ModelFamily.facts`."""
        facts = gemma_facts(model)
        rotary_by_kind = {}
        for block in model.stack.pattern:
            if block.attention.rotary is None:
                raise ValueError("attention.rotary = None")
            kind = _GLOBAL if block.attention.window is None else _LOCAL
            rotary_by_kind[kind] = block.attention.rotary
        del facts["rope_theta"]
        facts.pop("rope_scaling", None)
        if _GLOBAL in rotary_by_kind:
            facts |= rope_facts(rotary_by_kind[_GLOBAL])
        if _LOCAL in rotary_by_kind:
            facts["rope_local_base_freq"] = rotary_by_kind[_LOCAL].theta
        return facts | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
