"""Layers that run backwards: the input is found again from the output, so the backward pass needs nothing kept.

`Reversible` is the protocol; `TwoStream` makes it of any block with residual branches (Gomez et al. 2017, RevNets,
arXiv 1707.04585; Kitaev et al. 2020, Reformer, arXiv 2001.04451).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from framework.layers.base import Context, Layer, Out
from framework.layout import Nested

FRACTION_BITS = 12


class Reversible(Layer):
    """A layer whose input can be found from its output."""

    def reverse(
        self, weights: Nested, carry: Any, cts: tuple[Any, Any], ctx: Context, layer_state: Nested
    ) -> tuple[Any, Nested, Any]:
        """Runs the layer backwards. Inverse and gradient share one evaluation of what is expensive.

        Args:
            weights: prepared, as `apply` has them.
            carry: what `apply` returned.
            cts: the cotangents of that carry, and of Out.loss (None where there is no loss).
            ctx, layer_state: as `apply` had them: random draws are made again by the same keys.

        Returns:
            (the carry that `apply` was given, the gradients of the weights, the cotangent of that carry).
        """
        raise NotImplementedError(f"{type(self).__name__}.reverse")


class TwoStream(Reversible):
    """A block whose branches are added to two streams in turn: x1 += F(x2), x2 += G(x1), and so on.

    Subtracting the branches again, in reverse order, gives the input: to rounding with streams in float32, bit for bit
    in "fixed" point. That is float32 too: branches are rounded to multiples of 2^-12, of which float32 holds and adds
    those below 2^12 exactly. Above that it is as good as float32; the metric `out_of_range` counts such elements. The
    gradient passes the rounding as if there was none.

    Args:
        block: has `branches` and `branch`, see framework.layers.block.
        streams: "float32" or "fixed".
    """

    def __init__(self, block: Any, streams: Literal["float32", "fixed"]):
        self.block, self.fixed = block, streams == "fixed"

    def children(self) -> dict[str, Layer]:
        """The block's: parameters have the paths that they have without streams."""
        return self.block.children()

    def enter(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What flows through the stack, of what comes into it: two equal streams, in float32 or wider."""
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.fixed:
            x = without_signed_zeros(rounded(x))  # a zero comes back without a sign
        return x, x

    def leave(self, carry: tuple[jax.Array, jax.Array], ctx: Context) -> jax.Array:
        """What comes out of the stack: the mean of both."""
        return (0.5 * (carry[0] + carry[1])).astype(ctx.compute_dtype)

    def _branch(self, name: str, weights: Nested, x: jax.Array, ctx: Context, state: Nested) -> tuple[jax.Array, Out]:
        # Apart from what stands around it: were it merged with that, the same sums might be rounded in other ways
        # forward and backward.
        x = jax.lax.optimization_barrier(x) if self.fixed else x
        h, out = self.block.branch(name, weights, x, ctx, state)
        h = h.astype(x.dtype)
        return (rounded(jax.lax.optimization_barrier(h)) if self.fixed else h), out

    def apply(self, weights: Nested, carry: Any, ctx: Context, layer_state: Nested) -> tuple[Any, Out]:
        """Both streams x_BSD -> both streams."""
        streams, outs = list(carry), {}
        for i, name in enumerate(self.block.branches):
            h, outs[name] = self._branch(name, weights, streams[1 - i % 2], ctx, layer_state)
            streams[i % 2] = streams[i % 2] + h
        out = Out.merge(outs)
        if self.fixed:
            over = sum(jnp.sum(jnp.abs(x) >= 2.0 ** (24 - FRACTION_BITS), dtype=jnp.float32) for x in streams)
            out = replace(out, metrics={**out.metrics, "out_of_range": over})
        return tuple(streams), out

    def reverse(
        self, weights: Nested, carry: Any, cts: tuple[Any, Any], ctx: Context, layer_state: Nested
    ) -> tuple[Any, Nested, Any]:
        """See `Reversible`."""
        streams, grads, stream_cts, loss_ct = list(carry), {}, list(cts[0]), cts[1]
        for i, (name, used) in reversed(list(enumerate(self.block.branches.items()))):
            goal, source = i % 2, 1 - i % 2

            def branch(own: Nested, x: jax.Array, name: str = name) -> tuple[jax.Array, jax.Array | None]:
                h, out = self._branch(name, own, x, ctx, layer_state)
                return h, out.loss

            own = {key: weights[key] for key in used}
            (h, loss), pull = jax.vjp(branch, own, streams[source])
            streams[goal] = streams[goal] - h
            own_ct, ct = pull((stream_cts[goal], None if loss is None else loss_ct))
            stream_cts[source] = stream_cts[source] + ct
            # This branch's gradients are done before the next one's activations are there: a compiler might keep both.
            # The order in which they stand here is that of v5e's schedule too (tests/tools/test_memory_vs_depth.py).
            streams, stream_cts, done = jax.lax.optimization_barrier((streams, stream_cts, floats(own_ct)))
            grads |= filled(done, own_ct)
        return tuple(streams), grads, tuple(stream_cts)


@jax.custom_jvp
def rounded(x: jax.Array) -> jax.Array:
    """x, rounded to a multiple of 2^-12; its derivative is taken to be 1."""
    return jnp.round(x * 2.0**FRACTION_BITS) * 2.0**-FRACTION_BITS


rounded.defjvps(lambda tangent, out, x: tangent)


@jax.custom_jvp
def without_signed_zeros(x: jax.Array) -> jax.Array:
    """x, with zeros in place of negative zeros; its derivative is 1, at zero too."""
    return jnp.where(x == 0.0, jnp.zeros_like(x), x)


without_signed_zeros.defjvps(lambda tangent, out, x: tangent)


def floats(tree: Any) -> Any:
    """The tree with None in place of integers, which have no gradient, and of their gradients."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, tree)


def filled(floats: Any, tree: Any) -> Any:
    """The inverse: `tree` with its floats replaced."""
    return jax.tree.map(lambda f, x: x if f is None else f, floats, tree, is_leaf=lambda x: x is None)
