"""Checksums of arrays: 64 bits per leaf that do not depend on how, where or over how many processes it is stored.

A leaf's checksum is the sum, modulo 2^32 and in two independent lanes, over its elements of a bijective mix of the
element's bits with its linear index (row-major, in the logical array). Addition is commutative and associative, so any
mesh, device count, memory kind or order of reduction gives the same number, and reshaping does not change it. For a
given index the mix is a bijection, so one flipped bit changes one summand and is CERTAIN to change the sum; any other
difference goes unnoticed with probability about 2^-64. It is made against accidents, not against forgery.

All leaves are summed by one jitted program over the arrays as they lie: each device sums its own shard, and the scalars
are added up. Mixing and reduction fuse, so there are no temporaries: XLA:CPU fuses a variadic `lax.reduce`, while two
separate `jnp.sum` wrote every mixed word to memory and took 25 times as long. The mix is MurmurHash3's finalizer
(Austin Appleby, public domain), in the second lane with the "lowbias32" constants of Chris Wellons' hash prospector
(public domain).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from framework.devices import executables

# A leaf that lives on the host is moved to the device in pieces of this size, where its leading axis allows.
_PIECE_BYTES = 64 << 20

_WORD = 1 << 32
_Lanes = tuple[jax.Array, jax.Array]


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """The checksum of each array, by name, as 16 hexadecimal digits; any shape (0-d and empty included), sharding and
    memory; booleans, integers, floats and complex numbers of any width. Collective: every process asks for the same.
    Raises TypeError: a leaf has no bits to look at, such as a typed PRNG key."""
    # One program runs on one set of devices; a tree may hold, say, a counter that was never put on the mesh.
    groups: dict[frozenset[Any], dict[str, jax.Array]] = {}
    for name, x in arrays.items():
        if not (x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.number)):
            raise TypeError(f"{name}: expected numbers or booleans, got {x.dtype}; store jax.random.key_data of a key")
        groups.setdefault(frozenset(x.sharding.device_set), {})[name] = x
    sums: dict[str, list[int]] = {}
    for group in groups.values():
        sums |= zip(group, np.asarray(executables.call(_program, *arguments(group))).tolist(), strict=True)
    return {name: "{:08x}{:08x}".format(*sums[name]) for name in arrays}


def arguments(arrays: Mapping[str, Any]) -> tuple[list[Any], tuple[int, ...], NamedSharding | None]:
    """What `_program` takes for arrays, or ShapeDtypeStructs with shardings, that all share their devices."""
    mesh = next((x.sharding.mesh for x in arrays.values() if isinstance(x.sharding, NamedSharding)), None)
    out = None if mesh is None else NamedSharding(mesh, PartitionSpec())  # so that every process can read it
    # Decided from the shardings given, never from tracers, which have none.
    return list(arrays.values()), tuple(pieces(x) for x in arrays.values()), out


@functools.partial(jax.jit, static_argnums=(1, 2))
def _program(leaves: list[jax.Array], counts: tuple[int, ...], out: NamedSharding | None) -> jax.Array:
    """uint32[N, 2]: both lanes of N leaves, replicated."""
    sums = jnp.stack([jnp.stack(leaf_sum(x, n)) for x, n in zip(leaves, counts, strict=True)])
    return sums if out is None else lax.with_sharding_constraint(sums, out)


def pieces(x: Any) -> int:
    """Into how many pieces along axis 0 a host leaf is cut; 0: it lives on the device. Not along a sharded axis, as
    slicing that would gather it."""
    if x.sharding.memory_kind not in ("pinned_host", "unpinned_host"):
        return 0
    shard = x.sharding.shard_shape(x.shape)
    if x.ndim < 2 or shard[0] != x.shape[0] or 0 in x.shape:
        return 1
    wanted = math.ceil(math.prod(shard) * x.dtype.itemsize / _PIECE_BYTES)
    return next(n for n in range(1, shard[0] + 1) if shard[0] % n == 0 and (n >= wanted or n == shard[0]))


def leaf_sum(x: jax.Array, pieces: int) -> _Lanes:
    """Both lanes of one leaf. Arithmetic on a host array is an error inside jit: move it, whole or in pieces."""
    zero, long = jnp.uint32(0), x.size > _WORD
    if x.size == 0:
        return zero, zero
    if pieces < 2:
        return _sum(jax.device_put(x, jax.memory.Space.Device) if pieces else x, np.uint32(0), np.uint32(0), long)
    rows = x.shape[0] // pieces

    def add(i: jax.Array, lanes: _Lanes) -> _Lanes:
        piece = lax.dynamic_slice_in_dim(x, i * rows, rows, axis=0)
        low, high = _multiply(i.astype(jnp.uint32), piece.size)
        return _add(lanes, _sum(jax.device_put(piece, jax.memory.Space.Device), low, high, long))

    return lax.fori_loop(0, pieces, add, (zero, zero))


@functools.partial(jax.jit, static_argnums=3)  # so that leaves of one shape are traced and lowered once
def _sum(x: jax.Array, low: Any, high: Any, long: bool) -> _Lanes:
    """Both lanes of an array whose first element has the 64-bit index (high, low) in its leaf.

    `long`: the leaf has more than 2^32 elements, so the high half of an index is not always 0.
    """
    low = jnp.broadcast_to(jnp.uint32(low), x.shape)
    high = jnp.broadcast_to(jnp.uint32(high), x.shape) if long else np.uint32(0)
    stride = 1
    for axis in reversed(range(x.ndim)):
        step_low, step_high = _multiply(lax.broadcasted_iota(jnp.uint32, x.shape, axis), stride)
        low = low + step_low
        if long:
            high = high + step_high + (low < step_low).astype(jnp.uint32)  # with the carry
        stride *= x.shape[axis]
    zeros, axes = (np.uint32(0), np.uint32(0)), tuple(range(x.ndim))
    return functools.reduce(
        _add, (lax.reduce(_mix(word, low, high, k), zeros, _add, axes) for k, word in enumerate(_words(x)))
    )


def _add(p: Any, q: Any) -> _Lanes:
    return p[0] + q[0], p[1] + q[1]


def _words(x: jax.Array) -> list[jax.Array]:
    """The bits of each element as one or more uint32 arrays of the same shape; bijective in the element's bits."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(lax.real(x)), *_words(lax.imag(x))]
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    if x.dtype.itemsize == 8:
        both = lax.bitcast_convert_type(x, jnp.uint32)
        return [both[..., 0], both[..., 1]]
    if x.dtype.itemsize == 1:
        bits = (jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo)(x.dtype).bits
        if bits < 8:  # int4, float4 and the like: padded in memory, so they are told apart by value
            return [lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)]
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return [lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)]


def _multiply(i: jax.Array, factor: int) -> _Lanes:
    """The low and high 32 bits of uint32 i times a 64-bit constant: x64 is off, so the halves are multiplied."""
    low, high = np.uint32(factor % _WORD), np.uint32(factor // _WORD)
    half = np.uint32(0xFFFF)
    i0, i1, f0, f1 = i & half, i >> 16, low & half, low >> 16
    middle = i1 * f0 + (i0 * f0 >> 16)
    upper = i1 * f1 + (middle >> 16) + ((middle & half) + i0 * f1 >> 16)
    return i * low, upper + i * high


def _mix(word: jax.Array, low: Any, high: Any, k: int) -> _Lanes:
    """Two bijections of `word`, chosen by its index and by k, its place in the element."""
    index = low * np.uint32(0x9E3779B1) ^ high * np.uint32(0x85EBCA77) ^ np.uint32(k * 0x27D4EB2F % _WORD)
    other = (low ^ np.uint32(0x6A09E667)) * np.uint32(0xC2B2AE3D) + high * np.uint32(0x165667B1) + np.uint32(k)
    return (
        _finalize(word ^ index, (16, 13, 16), (0x85EBCA6B, 0xC2B2AE35)),
        _finalize(word + other, (16, 15, 16), (0x7FEB352D, 0x846CA68B)),
    )


def _finalize(h: jax.Array, shifts: tuple[int, int, int], factors: tuple[int, int]) -> jax.Array:
    """xor-shifts and products with odd numbers, each of which can be undone."""
    h = (h ^ h >> np.uint32(shifts[0])) * np.uint32(factors[0])
    h = (h ^ h >> np.uint32(shifts[1])) * np.uint32(factors[1])
    return h ^ h >> np.uint32(shifts[2])
