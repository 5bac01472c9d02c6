"""Additive couplings: two streams, each updated in turn by a function of the other, are invertible for any functions.

Gomez et al. 2017, The Reversible Residual Network, arXiv:1707.04585; Kitaev et al. 2020, Reformer, arXiv:2001.04451.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import PyTree

# (weights, stream) -> the update of the other stream; per-layer inputs, if any, are a third argument.
Branch = Callable[..., PyTree]
# (first stream, second stream), as taken and returned by each direction of a coupling.
Streams = tuple[PyTree, PyTree]


@dataclass(frozen=True)
class StreamCoupling:
    """Both directions of an additive coupling; see `additive_coupling`."""

    f: Branch
    g: Branch

    def forward(self, weights: PyTree, x: Streams, *layer_xs: PyTree) -> Streams:
        """Map (x1, x2) to (y1, y2)."""
        x1, x2 = _two_streams(x)
        y1 = add_branch(x1, self.f(weights, x2, *layer_xs))
        y2 = add_branch(x2, self.g(weights, y1, *layer_xs))
        return y1, y2

    def inverse(self, weights: PyTree, y: Streams, *layer_xs: PyTree) -> Streams:
        """Map (y1, y2) to (x1, x2)."""
        y1, y2 = _two_streams(y)
        x2 = subtract_branch(y2, self.g(weights, y1, *layer_xs))
        x1 = subtract_branch(y1, self.f(weights, x2, *layer_xs))
        return x1, x2


def additive_coupling(f: Branch, g: Branch) -> tuple[Callable[..., Streams], Callable[..., Streams]]:
    """Make an invertible layer out of two functions that need not be invertible.

        y1 = x1 + f(weights, x2)        x2 = y2 - g(weights, y1)
        y2 = x2 + g(weights, y1)        x1 = y1 - f(weights, x2)

    Args:
        f: (weights, x2) -> an array, or a tree of arrays, with the shapes of x1. The result is cast to the dtype of
            x1, so float32 streams can have bfloat16 branches.
        g: (weights, y1) -> an array, or a tree of arrays, with the shapes of x2.
            If a scan has per-layer inputs, f and g both take the layer's inputs as a third argument.

    Returns:
        (forward, inverse), each (weights, (x1, x2)) -> a pair, for `reversible_scan`, which evaluates f and g of such
        a pair only once in its backward pass. The inverse recovers x up to the rounding of the streams' dtype, see
        `reconstruction_error`.

    Complexity: f and g once in either direction, and one addition for each element of the streams.

    Raises:
        TypeError: from forward and inverse, if there are not exactly two streams, or they are not floats.
    """
    coupling = StreamCoupling(f, g)
    return coupling.forward, coupling.inverse


def find_coupling(forward: Callable[..., PyTree], inverse: Callable[..., PyTree]) -> StreamCoupling | None:
    """Return the coupling that `forward` and `inverse` belong to; None if they are any other functions."""
    coupling = getattr(inverse, "__self__", None)
    if not isinstance(coupling, StreamCoupling):
        return None
    is_pair = forward == coupling.forward and inverse == coupling.inverse
    return coupling if is_pair else None


def add_branch(stream: PyTree, branch: PyTree) -> PyTree:
    """Return the stream plus the branch, in the stream's dtype."""
    return jax.tree.map(lambda x, h: x + h.astype(x.dtype), stream, branch)


def subtract_branch(stream: PyTree, branch: PyTree) -> PyTree:
    """Return the stream minus the branch, in the stream's dtype."""
    return jax.tree.map(lambda y, h: y - h.astype(y.dtype), stream, branch)


def _two_streams(x: Streams) -> Streams:
    """Return the two streams of x. Raise TypeError if there are not two, or if they are not floats."""
    if not isinstance(x, tuple | list) or len(x) != 2:
        raise TypeError(f"additive_coupling: expected two streams, (x1, x2), got {jax.tree.structure(x)}")
    for leaf in jax.tree.leaves(x):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(f"additive_coupling: expected streams of floats, got {leaf.dtype}{list(leaf.shape)}")
    first, second = x
    return first, second
