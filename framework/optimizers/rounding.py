"""Rounding of weights without a precise copy: stochastic, or with error compensation (Kahan).

A bfloat16 weight has eight bits, so rounding to nearest loses any update of less than 1/512 of it, every time. Rounded
up or down at random, in proportion to the distances, it is correct on average (Gupta et al. 2015, arXiv 1502.02551,
section 3; for training in bfloat16 Zamirai et al. 2020, arXiv 2010.06192, section 4, which also has Kahan summation).

The noise is a hash of the element's position in the whole tensor. So a device generates only the noise of its own
shard, and the result is the same on any mesh, in any schedule and for any block of rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from plimsoll.framework.layout import Nested, flatten, name_hash

Rounding = Literal["nearest", "stochastic", "kahan"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockOrigin:
    """Location of a block in its tensor.

    Attributes:
        start: the index of the block's first element in each dimension; integer scalars.
        shape: the tensor's shape.
    """

    start: tuple[ArrayLike, ...]
    shape: tuple[int, ...] = field(metadata={"static": True})


def check_dtypes(rounding: str, dtypes: Collection[np.dtype]) -> None:
    """Raise ValueError if weights of these dtypes do not support this rounding."""
    if rounding == "nearest":
        return
    narrow = {dtype for dtype in dtypes if jnp.promote_types(dtype, jnp.float32) != dtype}
    if rounding == "stochastic":
        # The implementation is for bfloat16, whose bits are the upper half of a float32.
        supported = {jnp.dtype("bfloat16")}
        alternative = ""
    else:
        supported = narrow
        alternative = " or float16"
    if not narrow or narrow - supported:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(
            f"learner.rounding = {rounding} with weights in {names}: expected model.param_dtype = "
            f"bfloat16{alternative}, or learner.rounding = nearest"
        )


def mix(x: jax.Array) -> jax.Array:
    """Apply MurmurHash3's finalizer (Appleby 2011), a bijection of uint32 in which every bit depends on all."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def fold(seed: jax.Array, *numbers: ArrayLike) -> jax.Array:
    """Return a uint32 seed derived from `seed` and these numbers, in this order."""
    for number in numbers:
        # 2^32 divided by the golden ratio, because `mix` maps zero to itself.
        word = jnp.asarray(number, jnp.uint32) + jnp.uint32(0x9E3779B9)
        seed = mix(seed ^ mix(word))
    return seed


def fold_name(seed: jax.Array, name: str) -> jax.Array:
    """Return a uint32 seed derived from `seed` and a name."""
    return fold(seed, np.uint32(name_hash(name)))


def noise(seed: jax.Array, shape: tuple[int, ...], origin: BlockOrigin | None = None) -> jax.Array:
    """Return uniform random bits, uint32 of `shape`, that depend only on the seed and positions in the whole tensor.

    Args:
        seed: uint32 scalar.
        shape: shape of the block, or of the tensor if `origin` is None.
        origin: location of the block in the tensor.
    """
    if origin is None:
        origin = BlockOrigin((0,) * len(shape), shape)
    position = jnp.zeros(shape, jnp.uint32)
    for axis, first in enumerate(origin.start):
        # Modulo 2^32, like all of the arithmetic here: larger tensors repeat their noise.
        stride = math.prod(origin.shape[axis + 1 :]) % (1 << 32)
        index_in_block = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        index = index_in_block + jnp.asarray(first).astype(jnp.uint32)
        position += index * jnp.uint32(stride)
    return mix(mix(position + jnp.uint32(0x9E3779B9)) ^ seed)


def round_stochastically(x: jax.Array, dtype: DTypeLike, bits: jax.Array) -> jax.Array:
    """Round x to one of its two neighbors in bfloat16, with probabilities that make x the expected value.

    16 random bits are added to the bits that are cut off. Non-finite values stay; no finite value becomes infinite.

    Args:
        x: values [...], float32 or wider (first rounded to float32).
        dtype: bfloat16, or float32 or wider, where nothing is cut off.
        bits: uniform random bits, uint32 [...].
    """
    if jnp.dtype(dtype) != jnp.bfloat16:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    raw = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # The upper half of a float32 is the nearest bfloat16 toward zero.
    upper_half = jnp.uint32(0xFFFF0000)
    raw_with_noise = raw + (bits >> 16)
    towards_zero = jax.lax.bitcast_convert_type(raw & upper_half, jnp.float32)
    random_round = jax.lax.bitcast_convert_type(raw_with_noise & upper_half, jnp.float32)
    # A value that would be rounded up from the largest bfloat16 to infinity is rounded toward zero instead.
    finite = jnp.where(jnp.isfinite(random_round), random_round, towards_zero)
    return jnp.where(jnp.isfinite(x), finite, x).astype(dtype)


def split_rounding_error(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return (x rounded to nearest in a narrower dtype, the rounding error in the same dtype)."""
    bits = jnp.finfo(dtype)
    # Not a cast there and back, because XLA drops such a pair if it may keep excess precision.
    nearest = jax.lax.reduce_precision(x, bits.nexp, bits.nmant)
    return nearest.astype(dtype), (x - nearest).astype(dtype)


def upcast(rounding: Rounding, weights: Nested, compensation: Nested | None) -> Nested:
    """Return the weights in the dtype in which their update is computed.

    Args:
        rounding: see `Learner`; "nearest" computes the update in the weights' own dtype.
        weights: arrays of any shapes.
        compensation: earlier rounding errors, in the structure of the weights; or None.
    """
    if rounding == "nearest":
        return weights
    wide_weights = jax.tree.map(lambda weight: weight.astype(jnp.promote_types(weight.dtype, jnp.float32)), weights)
    if compensation is None:
        return wide_weights
    return jax.tree.map(lambda weight, error: weight + error.astype(weight.dtype), wide_weights, compensation)


def round_weights(
    rounding: Rounding, new: Nested, old: Nested, seed: jax.Array, origin: BlockOrigin | None
) -> tuple[Nested, Nested]:
    """Return (new weights in the dtypes of the old ones, the rounding errors for the next update).

    Args:
        rounding: "stochastic" or "kahan", see `Learner`.
        new: new weights in float32 or wider.
        old: the weights before the update; only their dtypes are used.
        seed: uint32 scalar for this update.
        origin: location of blocks in their tensors; None if the weights are whole.

    Returns:
        The second tree is empty for "stochastic", which keeps no errors.
    """
    structure = jax.tree.structure(new)
    rounded = []
    errors = []
    for (path, precise), weight in zip(flatten(new).items(), jax.tree.leaves(old), strict=True):
        if rounding == "stochastic":
            # Without the names, tensors of one shape would have the same noise.
            bits = noise(fold_name(seed, path), precise.shape, origin)
            rounded.append(round_stochastically(precise, weight.dtype, bits))
        else:
            nearest, error = split_rounding_error(precise, weight.dtype)
            rounded.append(nearest)
            errors.append(error)
    return structure.unflatten(rounded), structure.unflatten(errors) if errors else {}
