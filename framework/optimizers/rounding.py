"""Rounding of weights that have no precise copy: stochastic, and with a compensation (Kahan).

A bfloat16 weight has eight bits: an update of less than 1/512 of it is lost when it is rounded to nearest, each time.
Rounded up or down at random, by how near either is, it is right on average (Gupta et al. 2015, arXiv 1502.02551,
section 3; for training in bfloat16 Zamirai et al. 2020, arXiv 2010.06192, section 4, which also has Kahan's sums).

The noise is a hash of the element's place in the whole tensor, so a device makes that of its own shard alone, and the
result is the same on any mesh, in any schedule and for any block of rows.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from framework.layout import Nested, name_hash, path_name

Rounding = Literal["nearest", "stochastic", "kahan"]


class Origin(NamedTuple):
    """Where a block lies in its tensor: the index of its first element in each dimension, and the tensor's shape."""

    start: tuple[Any, ...]
    shape: tuple[int, ...]


def check_dtypes(rounding: str, dtypes: set[Any]) -> None:
    """Raises ValueError when weights of these dtypes would not be rounded so."""
    narrow = {dtype for dtype in dtypes if jnp.promote_types(dtype, jnp.float32) != dtype}
    wanted = {jnp.dtype("bfloat16")} if rounding == "stochastic" else narrow
    if rounding != "nearest" and (not narrow or narrow - wanted):
        found, other = ", ".join(sorted(map(str, dtypes))), "" if rounding == "stochastic" else " or float16"
        raise ValueError(
            f"learner.rounding = {rounding} with weights in {found}: expected model.param_dtype = bfloat16{other}, or "
            "learner.rounding = nearest"
        )


def mix(x: jax.Array) -> jax.Array:
    """MurmurHash3's finalizer (Appleby 2011), a bijection of uint32 in which every bit depends on all."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def fold(seed: jax.Array, *numbers: Any) -> jax.Array:
    """A uint32 seed for these numbers."""
    for number in numbers:
        seed = mix(seed ^ mix(jnp.asarray(number, jnp.uint32) + jnp.uint32(0x9E3779B9)))
    return seed


def fold_name(seed: jax.Array, name: str) -> jax.Array:
    """A uint32 seed for a name."""
    return fold(seed, np.uint32(name_hash(name)))


def noise(seed: jax.Array, shape: tuple[int, ...], origin: Origin | None = None) -> jax.Array:
    """Uniform random bits, uint32 of `shape`: those of the elements' places in the whole tensor.

    Args:
        seed: uint32 scalar.
        shape: of the block, or of the tensor where `origin` is None.
        origin: where the block lies.
    """
    start, whole = origin or Origin((0,) * len(shape), shape)
    place = jnp.zeros(shape, jnp.uint32)
    for axis, first in enumerate(start):
        stride = math.prod(whole[axis + 1 :]) % (1 << 32)
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis) + jnp.asarray(first).astype(jnp.uint32)
        place += index * jnp.uint32(stride)
    return mix(mix(place + jnp.uint32(0x9E3779B9)) ^ seed)


def round_stochastically(x: jax.Array, dtype: Any, bits: jax.Array) -> jax.Array:
    """f32 (or wider) x in bfloat16: one of its two neighbours, each with the probability that makes x the mean.

    16 random bits are added to those that are cut off. What is not finite stays so; nothing finite becomes infinite.

    Args:
        x: [...], f32 or wider (then rounded to f32 first).
        dtype: bfloat16, or float32 or wider, which nothing is cut off for.
        bits: uint32 [...], uniform.
    """
    if jnp.dtype(dtype) != jnp.bfloat16:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    raw, high = jax.lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32(0xFFFF0000)
    down, moved = (jax.lax.bitcast_convert_type(r & high, jnp.float32) for r in (raw, raw + (bits >> 16)))
    rounded = jnp.where(jnp.isfinite(moved), moved, down)  # the largest bfloat16 stays
    return jnp.where(jnp.isfinite(x), rounded, x).astype(dtype)


def cut_off(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """(x rounded to nearest in a narrower dtype, what that left out, in the same dtype).

    With `reduce_precision`, as XLA takes a cast there and back for nothing where it may keep excess precision.
    """
    bits = jnp.finfo(dtype)
    near = jax.lax.reduce_precision(x, bits.nexp, bits.nmant)
    return near.astype(dtype), (x - near).astype(dtype)


def upcast(rounding: Rounding, weights: Nested, compensation: Nested | None) -> Nested:
    """The weights in the dtype in which their update is computed.

    Args:
        rounding: see `Learner`; "nearest" computes the update in the weights' own dtype.
        weights: arrays of any shapes.
        compensation: in the structure of the weights, what rounding cut off from them before; or None.
    """
    if rounding == "nearest":
        return weights
    wide_weights = jax.tree.map(lambda weight: weight.astype(jnp.promote_types(weight.dtype, jnp.float32)), weights)
    if compensation is None:
        return wide_weights
    return jax.tree.map(lambda weight, cut: weight + cut.astype(weight.dtype), wide_weights, compensation)


def rounded(
    rounding: Rounding, new: Nested, old: Nested, seed: jax.Array, origin: Origin | None
) -> tuple[Nested, Nested]:
    """(new weights in the dtypes of the old ones, what rounding cut off from them): "stochastic", or "kahan".

    Args:
        rounding: see `Learner`; not "nearest".
        new: float32 or wider.
        old: the weights before the update; only their dtypes count.
        seed: uint32 scalar, of this update.
        origin: where blocks lie in their tensors; None where the weights are whole.

    Returns:
        The second tree is empty for "stochastic", which keeps nothing.
    """
    if rounding == "stochastic":

        def drawn(path: Any, precise: jax.Array, weight: jax.Array) -> jax.Array:
            bits = noise(fold_name(seed, path_name(path)), precise.shape, origin)
            return round_stochastically(precise, weight.dtype, bits)

        return jax.tree_util.tree_map_with_path(drawn, new, old), {}
    pairs = jax.tree.map(lambda precise, weight: cut_off(precise, weight.dtype), new, old)
    near = jax.tree.map(lambda _, pair: pair[0], new, pairs)
    left_out = jax.tree.map(lambda _, pair: pair[1], new, pairs)
    return near, left_out
