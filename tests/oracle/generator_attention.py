"""Replaces some attention layers of a random model with linear attention or state-space layers.

Also draws gates, partly rotated heads, and factors on branches and logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.oracle import experiments as plain

if TYPE_CHECKING:
    from tests.oracle.generator import Dice


def with_gates(dice: Dice, model: plain.Model, *, is_sensitive: bool) -> plain.Model:
    """Return the model with gates in some attention layers and shared experts, and partly rotated heads in some.

    Args:
        dice: source of randomness.
        model: model to change, without linear attention.
        is_sensitive: the optimizer turns gradients that are only rounding error into full updates.
    """
    layers = []
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, plain.Attention)
        attention = replace(attention, output_gate=dice.chance(0.25))
        rotary_dim = dice.pick(range(2, attention.head_dim, 2))
        # As without rotation, attention ignores biases of keys in channels that do not rotate.
        has_key_bias = attention.bias or (attention.qk_norm is not None and attention.qk_norm.kind == "layer")
        if dice.chance(0.3) and attention.rope_theta is not None and not (has_key_bias and is_sensitive):
            attention = replace(attention, rotary_dim=rotary_dim)
        if dice.chance(0.5) and isinstance(mlp, plain.Mixture) and mlp.shared is not None:
            mlp = replace(mlp, shared_gate=True)
        layers.append(replace(layer, attention=attention, mlp=mlp))
    return replace(model, layers=tuple(layers))


def with_linear_attention(dice: Dice, model: plain.Model) -> plain.Model:
    """Return the model, in three of ten cases with at least one layer of linear attention."""
    if not dice.chance(0.3):
        return model
    key_heads = dice.pick([1, 2, 2, 4, 4, 8])
    always = dice.between(0, len(model.layers) - 1)
    layers = []
    for index, layer in enumerate(model.layers):
        if index == always or dice.chance(0.3):
            # Mostly the same count in all layers, because a mesh must divide all of them.
            count = key_heads if dice.chance(0.8) else dice.pick([1, 2, 4])
            layer = replace(layer, attention=_linear_attention(dice, count))
        layers.append(layer)
    return _with_layers(model, layers)


def _with_layers(model: plain.Model, layers: list[plain.Layer]) -> plain.Model:
    """Return the model with other layers, and without 8-bit weights if their codes would not fill words."""
    model = replace(model, layers=tuple(layers))
    lora = model.lora
    if lora is not None and not all(has_whole_words(layer.attention) for layer in layers):
        model = replace(model, lora=replace(lora, base=None))
    return model


def with_state_space(dice: Dice, model: plain.Model) -> plain.Model:
    """Return the model, in a quarter of the cases with at least one state-space layer."""
    if not dice.chance(0.25):
        return model
    groups = dice.pick([1, 1, 1, 2, 4])
    heads = groups * dice.pick([2, 4] if groups == 1 else [1, 2, 3])
    always = dice.between(0, len(model.layers) - 1)
    layers = []
    for index, layer in enumerate(model.layers):
        if index == always or dice.chance(0.3):
            layer = replace(layer, attention=_state_space(dice, heads, groups))
        layers.append(layer)
    return _with_layers(model, layers)


def _state_space(dice: Dice, heads: int, groups: int) -> plain.StateSpace:
    return plain.StateSpace(
        heads=heads,
        groups=groups,
        state_dim=dice.pick([1, 2, 3, 8]),
        # The norm of a single channel would be its sign, which has no gradient.
        head_dim=dice.pick([2, 4, 4, 5]),
        conv_width=dice.pick([1, 2, 3, 4, 4]),
        conv_bias=dice.chance(0.7),
        bias=dice.chance(0.3),
        min_step=dice.pick([0.0, 0.0, 0.3]),
        max_step=dice.pick([None, None, 1.0]),
        norm_eps=dice.pick([1e-6, 1e-5, 1e-3]),
        # With 1, a row has more chunks than the eight of a block.
        chunk=dice.pick([1, 2, 3, 5, 64]),
    )


def with_factors(dice: Dice, model: plain.Model) -> plain.Model:
    """Return the model, in a fifth of the cases with factors on the branches and on the logits."""
    if not dice.chance(0.2):
        return model
    branch_scale = dice.pick([0.3, 0.7])
    layers = tuple(replace(layer, branch_scale=branch_scale) for layer in model.layers)
    return replace(model, layers=layers, logit_divisor=dice.pick([0.6, 3.0]))


def _linear_attention(dice: Dice, key_heads: int) -> plain.LinearAttention:
    return plain.LinearAttention(
        heads=key_heads * dice.pick([1, 1, 2, 3] if key_heads < 8 else [1]),
        key_heads=key_heads,
        # A single channel would have no gradient: its length is always 1.
        key_dim=dice.pick([2, 3, 4, 8]),
        value_dim=dice.pick([2, 4, 4, 5]),
        conv_width=dice.pick([1, 2, 3, 4, 4]),
        bias=dice.chance(0.3),
        norm_eps=dice.pick([1e-6, 1e-5, 1e-3]),
        # With 1, a row has more chunks than the eight of a block.
        chunk=dice.pick([1, 2, 3, 5, 64]),
    )


def has_whole_words(attention: plain.Attention | plain.LinearAttention | plain.StateSpace) -> bool:
    """Return whether the inputs of the output projection come in fours, as the 8-bit codes of a word do."""
    width = attention.value_dim if isinstance(attention, plain.LinearAttention) else attention.head_dim
    return attention.heads * width % 4 == 0
