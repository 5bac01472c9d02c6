"""The layers that a stack repeats."""

from __future__ import annotations

from typing import Any

from plimsoll.framework.layers.base import Context, Layer, Out
from plimsoll.framework.layers.reversible import Reversible
from plimsoll.framework.layout import Nested


class LayerPattern(Reversible):
    """One repeat of a stack's pattern: its layers in order, with the names block0, block1, ...

    It is reversible if all of its layers are.
    """

    def __init__(self, layers: list[Any]):
        self.layers = {f"block{i}": layer for i, layer in enumerate(layers)}

    def children(self) -> dict[str, Layer]:
        """Return the layers by name."""
        return dict(self.layers)

    def apply(self, weights: Nested, carry: Any, ctx: Context, layer_state: Nested) -> tuple[Any, Out]:
        """Run the layers one after the other."""
        outs = {}
        for name, layer in self.layers.items():
            layer_weights = weights.get(name, {})
            layer_ctx = ctx.fold(name)
            buffers = layer_state.get(name, {})
            carry, outs[name] = layer.apply(layer_weights, carry, layer_ctx, buffers)
        return carry, Out.merge(outs)

    def reverse(
        self, weights: Nested, carry: Any, cts: tuple[Any, Any], ctx: Context, layer_state: Nested
    ) -> tuple[Any, Nested, Any]:
        """Run the layers in reverse, from the last to the first; see `Reversible.reverse`."""
        ct, loss_ct = cts
        grads = {}
        for name, layer in reversed(self.layers.items()):
            layer_weights = weights.get(name, {})
            buffers = layer_state.get(name, {})
            # The losses of layers are summed, so every layer gets the cotangent of the sum.
            layer_cts = (ct, loss_ct)
            carry, grad, ct = layer.reverse(layer_weights, carry, layer_cts, ctx.fold(name), buffers)
            # Gradients have the structure of the weights: a layer without weights has no entry.
            if name in weights:
                grads[name] = grad
        return carry, grads, ct
