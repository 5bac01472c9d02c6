"""Replaces some feed-forward blocks of a random model with randomly drawn mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.oracle import experiments as plain

if TYPE_CHECKING:
    from tests.oracle.generator import Dice


def with_mixtures(dice: Dice, model: plain.Model, *, is_sensitive: bool) -> plain.Model:
    """Return the model, in one of three cases with at least one mixture.

    Args:
        dice: source of randomness.
        model: model to change.
        is_sensitive: the optimizer turns gradients that are only rounding error into full updates.
    """
    if not dice.chance(1 / 3):
        return model
    experts = dice.pick([2, 3, 4, 4, 4, 5])
    always = dice.between(0, len(model.layers) - 1)
    layers = []
    for index, layer in enumerate(model.layers):
        if index == always or dice.chance(0.6):
            assert isinstance(layer.mlp, plain.MLP)
            # Mostly the same count in all layers, because a mesh must divide all of them.
            count = experts if dice.chance(0.7) else dice.between(2, 5)
            layer = replace(layer, mlp=_mixture(dice, layer.mlp, count, is_sensitive=is_sensitive))
        layers.append(layer)
    return replace(model, layers=tuple(layers), lora=None if model.lora is None else _lora(dice, model.lora))


def list_widths(mlp: plain.MLP | plain.Mixture) -> list[int]:
    """Return the hidden widths of a layer's feed-forward blocks: its MLP, or its experts and shared block."""
    blocks = [mlp] if isinstance(mlp, plain.MLP) else [mlp.expert, mlp.shared]
    return [block.hidden for block in blocks if block is not None]


def _mixture(dice: Dice, expert: plain.MLP, count: int, *, is_sensitive: bool) -> plain.Mixture:
    """Return a mixture whose experts are like the block that they replace."""
    top_k = dice.between(1, min(count, 3))
    score = dice.pick(["softmax", "softmax", "softmax_chosen", "sigmoid"])
    normalize = dice.chance(0.5)
    if top_k == 1 and is_sensitive:
        # The share of a single expert would be 1 for any logits, whose gradient would then be only rounding error.
        normalize = False
        score = "softmax" if score == "softmax_chosen" else score
    shared = replace(expert, hidden=4 * dice.between(2, 4), gated=dice.chance(0.5)) if dice.chance(0.4) else None
    router = plain.Router(
        experts=count,
        top_k=top_k,
        score=score,
        normalize=normalize,
        scale=dice.pick([1.0, 1.0, 2.5]),
        balance=dice.pick([0.0, 0.1, 1.0]),
        balance_over=dice.pick(["sequence", "batch"]),
        z=dice.pick([0.0, 0.0, 1e-2]),
        bias=dice.chance(0.3),
    )
    return plain.Mixture(router, expert, shared)


def _lora(dice: Dice, lora: plain.LoRA) -> plain.LoRA:
    """Return the adapters, sometimes extended to experts; the base weights are then floats."""
    # With the target `mlp`, there may be no linear layer left that matches.
    if lora.targets != "mlp" and dice.chance(0.5):
        return lora
    return replace(lora, targets=dice.pick(["experts|.", "experts/", "experts/(gate|up)|attention"]), base=None)
