"""Reversible layers: the input is computed from the output, so nothing is saved for the backward pass.

`Reversible` is the protocol; `TwoStream` makes any block with residual branches reversible (Gomez et al. 2017,
RevNets, arXiv 1707.04585; Kitaev et al. 2020, Reformer, arXiv 2001.04451).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp

from plimsoll.framework.layers.base import Carry, Context, Layer, Out
from plimsoll.framework.layout import Nested, PyTree, fill_none, floats

# The cotangents of a layer's output carry and of its loss (None for no loss).
Cotangents = tuple[Carry, jax.Array | None]
# Two residual streams, [B, S, D] each, in float32 or wider.
Streams = tuple[jax.Array, jax.Array]
# Fixed point is float32 in multiples of 2^-12: 12 of its 24 bits remain for the integer part.
FRACTION_BITS = 12


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReversedLayer:
    """Result of a layer that ran in reverse.

    Attributes:
        carry: the input carry of `apply`.
        grads: gradients of the weights, in their structure.
        ct: cotangent of that input carry.
    """

    carry: Carry
    grads: PyTree
    ct: Carry


class Reversible(Layer):
    """A layer whose input can be computed from its output."""

    def reverse(
        self, weights: Nested, carry: Carry, cts: Cotangents, ctx: Context, layer_state: Nested
    ) -> ReversedLayer:
        """Run the layer in reverse. Inverse and gradient share one evaluation of the expensive part.

        Args:
            weights: prepared weights, as in `apply`.
            carry: the output of `apply`.
            cts: the cotangents of that carry and of Out.loss (None if there is no loss).
            ctx, layer_state: the same as in `apply`; the same keys repeat the random draws.

        """
        raise NotImplementedError(f"{type(self).__name__}.reverse")


class TwoStream(Reversible):
    """A block whose branches are added to two streams alternately: x1 += F(x2), x2 += G(x1), and so on.

    Subtracting the branches again, in reverse order, recovers the input: up to rounding with streams in float32, bit
    for bit in "fixed" point. Fixed point also uses float32: branches are rounded to multiples of 2^-12, which float32
    represents and adds exactly below 2^12. Above that, it is as accurate as float32; the metric `out_of_range` counts
    such elements. The gradient ignores the rounding.

    Args:
        block: a layer with `branches` and `branch`, see framework.layers.block.
        streams: "float32" or "fixed".
    """

    def __init__(self, block: Layer, streams: Literal["float32", "fixed"]):
        self.block = block
        self.fixed = streams == "fixed"

    def children(self) -> dict[str, Layer]:
        """Return the block's children: parameters have the same paths as without streams."""
        return self.block.children()

    def enter(self, x: jax.Array) -> Streams:
        """Create the stack's carry from its input: two equal streams, in float32 or wider."""
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.fixed:
            # The inverse returns zeros without a sign.
            x = drop_signed_zeros(round_to_fixed(x))
        return x, x

    def leave(self, carry: Streams, ctx: Context) -> jax.Array:
        """Create the stack's output from its carry: the mean of both streams."""
        first, second = carry
        mean = 0.5 * (first + second)
        return mean.astype(ctx.compute_dtype)

    def _branch(self, name: str, weights: Nested, x: jax.Array, ctx: Context, state: Nested) -> tuple[jax.Array, Out]:
        """Return the output of one branch in the dtype of the streams, rounded if they are in fixed point."""
        # Barriers isolate the branch from the surrounding code: if XLA fused them, the same sums might be rounded
        # differently in the forward and backward pass.
        if self.fixed:
            x = jax.lax.optimization_barrier(x)
        h, out = self.block.branch(name, weights, x, ctx, state)
        h = h.astype(x.dtype)
        if self.fixed:
            h = round_to_fixed(jax.lax.optimization_barrier(h))
        return h, out

    def apply(self, weights: Nested, carry: Streams, ctx: Context, layer_state: Nested) -> tuple[Streams, Out]:
        """Add the branches to both streams of x_BSD."""
        streams = list(carry)
        outs = {}
        for i, name in enumerate(self.block.branches):
            # A branch reads the stream that it is not added to, so that it can be recomputed and subtracted.
            source = 1 - i % 2
            target = i % 2
            h, outs[name] = self._branch(name, weights, streams[source], ctx, layer_state)
            streams[target] = streams[target] + h
        out = Out.merge(outs)
        if self.fixed:
            # Elements of magnitude 2^12 or more, whose sums in fixed point are not exact.
            bound = 2.0 ** (24 - FRACTION_BITS)
            out_of_range = sum(jnp.sum(jnp.abs(x) >= bound, dtype=jnp.float32) for x in streams)
            out = replace(out, metrics={**out.metrics, "out_of_range": out_of_range})
        return (streams[0], streams[1]), out

    def reverse(
        self, weights: Nested, carry: Carry, cts: Cotangents, ctx: Context, layer_state: Nested
    ) -> ReversedLayer:
        """See `Reversible.reverse`."""
        streams = list(carry)
        stream_cts = list(cts[0])
        loss_ct = cts[1]
        grads = {}
        for i, (name, children) in reversed(list(enumerate(self.block.branches.items()))):
            source = 1 - i % 2
            target = i % 2

            def branch(branch_weights: Nested, x: jax.Array, name: str = name) -> tuple[jax.Array, jax.Array | None]:
                h, out = self._branch(name, branch_weights, x, ctx, layer_state)
                return h, out.loss

            branch_weights = {child: weights[child] for child in children}
            (h, loss), pull = jax.vjp(branch, branch_weights, streams[source])
            streams[target] = streams[target] - h
            branch_loss_ct = None if loss is None else loss_ct
            weights_ct, source_ct = pull((stream_cts[target], branch_loss_ct))
            stream_cts[source] = stream_cts[source] + source_ct
            # The barrier finishes this branch's gradients before the next one's activations exist: a compiler might
            # hold both. v5e's schedule also follows the order of this code (tests/tools/test_memory_vs_depth.py).
            barrier_inputs = (streams, stream_cts, floats(weights_ct))
            streams, stream_cts, float_cts = jax.lax.optimization_barrier(barrier_inputs)
            grads |= fill_none(float_cts, weights_ct)
        return ReversedLayer(tuple(streams), grads, tuple(stream_cts))


@jax.custom_jvp
def round_to_fixed(x: jax.Array) -> jax.Array:
    """Round x to a multiple of 2^-12; the derivative is defined as 1."""
    units = jnp.round(x * 2.0**FRACTION_BITS)
    return units * 2.0**-FRACTION_BITS


round_to_fixed.defjvps(lambda tangent, out, x: tangent)


@jax.custom_jvp
def drop_signed_zeros(x: jax.Array) -> jax.Array:
    """Replace negative zeros in x by zeros; the derivative is 1, also at zero."""
    return jnp.where(x == 0.0, jnp.zeros_like(x), x)


drop_signed_zeros.defjvps(lambda tangent, out, x: tangent)
