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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from framework.devices import executables

# A leaf that lives on the host is moved to the device in pieces of this size, where its leading axis allows.
_PIECE_BYTES = 64 << 20
_HOST_KINDS = ("pinned_host", "unpinned_host")

# The unsigned integer by its size in bytes.
_UNSIGNED = {
    1: jnp.uint8,
    2: jnp.uint16,
    4: jnp.uint32,
}

_WORD = 1 << 32
_Lanes = tuple[jax.Array, jax.Array]


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """The checksum of each array, by name, as 16 hexadecimal digits; any shape (0-d and empty included), sharding and
    memory; booleans, integers, floats and complex numbers of any width. Collective: every process asks for the same.

    Raises:
        TypeError: a leaf has no bits to look at, such as a typed PRNG key.
    """
    # One program runs on one set of devices; a tree may hold, say, a counter that was never put on the mesh.
    groups: dict[tuple[frozenset[Any], Mesh | None], dict[str, jax.Array]] = {}
    for name, x in arrays.items():
        is_number = x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.number)
        if not is_number:
            raise TypeError(f"{name}: expected numbers or booleans, got {x.dtype}; store jax.random.key_data of a key")
        devices = frozenset(x.sharding.device_set)
        groups.setdefault((devices, _explicit_mesh(x)), {})[name] = x
    lanes_by_name: dict[str, list[int]] = {}
    for group in groups.values():
        sums = np.asarray(executables.call(_program, *arguments(group)))
        lanes_by_name |= zip(group, sums.tolist(), strict=True)
    return {name: "{:08x}{:08x}".format(*lanes_by_name[name]) for name in arrays}


def _explicit_mesh(x: jax.Array) -> Mesh | None:
    """The mesh of an array whose type has it: one program takes arrays of one such mesh only."""
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    is_explicit = AxisType.Explicit in sharding.mesh.axis_types
    return sharding.mesh if is_explicit else None


def arguments(arrays: Mapping[str, Any]) -> tuple[list[Any], tuple[int, ...], NamedSharding | None]:
    """What `_program` takes for arrays, or ShapeDtypeStructs with shardings, that all share their devices."""
    leaves = list(arrays.values())
    out = None
    for x in leaves:
        if isinstance(x.sharding, NamedSharding):
            # Replicated, so that every process can read the sums.
            out = NamedSharding(x.sharding.mesh, PartitionSpec())
            break
    # Decided here, outside jit, as the tracers inside have no shardings.
    counts = tuple(pieces(x) for x in leaves)
    return leaves, counts, out


@functools.partial(jax.jit, static_argnums=(1, 2))
def _program(
    leaves: list[jax.Array],
    counts: tuple[int, ...],
    out: NamedSharding | None,
) -> jax.Array:
    """uint32[N, 2]: both lanes of N leaves, replicated."""
    rows: list[jax.Array] = []
    for x, count in zip(leaves, counts, strict=True):
        lanes = leaf_sum(x, count)
        rows.append(jnp.stack(lanes))
    sums = jnp.stack(rows)
    return sums if out is None else lax.with_sharding_constraint(sums, out)


def pieces(x: Any) -> int:
    """Into how many pieces along axis 0 a host leaf is cut; 0: it lives on the device. Not along a sharded axis, as
    slicing that would gather it."""
    if x.sharding.memory_kind not in _HOST_KINDS:
        return 0
    shard = x.sharding.shard_shape(x.shape)
    if x.ndim < 2 or 0 in x.shape:
        return 1
    num_rows = shard[0]
    if num_rows != x.shape[0]:
        return 1
    shard_bytes = math.prod(shard) * x.dtype.itemsize
    min_pieces = math.ceil(shard_bytes / _PIECE_BYTES)
    # All pieces have one shape, so their number divides the rows; where no divisor is large enough,
    # each row is a piece.
    divisors = (n for n in range(1, num_rows + 1) if num_rows % n == 0)
    return next(n for n in divisors if n >= min_pieces or n == num_rows)


def leaf_sum(x: jax.Array, pieces: int) -> _Lanes:
    """Both lanes of one leaf. Arithmetic on a host array is an error inside jit: move it, whole or in pieces."""
    zero = jnp.uint32(0)
    long = x.size > _WORD
    if x.size == 0:
        return zero, zero
    if pieces < 2:
        on_device = jax.device_put(x, jax.memory.Space.Device) if pieces else x
        return _sum(on_device, np.uint32(0), np.uint32(0), long)
    rows = x.shape[0] // pieces

    def add(i: jax.Array, lanes: _Lanes) -> _Lanes:
        piece = lax.dynamic_slice_in_dim(x, i * rows, rows, axis=0)
        low, high = _multiply(i.astype(jnp.uint32), piece.size)
        on_device = jax.device_put(piece, jax.memory.Space.Device)
        return _add(lanes, _sum(on_device, low, high, long))

    # A loop, and not one expression per piece, so that one piece at a time is on the device.
    return lax.fori_loop(0, pieces, add, (zero, zero))


# Jitted by itself, so that leaves of one shape are traced and lowered once.
@functools.partial(jax.jit, static_argnums=3)
def _sum(x: jax.Array, low: Any, high: Any, long: bool) -> _Lanes:
    """Both lanes of an array whose first element has the 64-bit index (high, low) in its leaf.

    `long`: the leaf has more than 2^32 elements, so the high half of an index is not always 0.
    """
    low = jnp.broadcast_to(jnp.uint32(low), x.shape)
    if long:
        high = jnp.broadcast_to(jnp.uint32(high), x.shape)
    else:
        high = np.uint32(0)
    stride = 1
    for axis in reversed(range(x.ndim)):
        position = lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        step_low, step_high = _multiply(position, stride)
        low = low + step_low
        if long:
            # An unsigned sum that is smaller than a summand has overflowed: that is the carry.
            high = high + step_high
            carry = (low < step_low).astype(jnp.uint32)
            high = high + carry
        stride *= x.shape[axis]
    zeros = (np.uint32(0), np.uint32(0))
    axes = tuple(range(x.ndim))
    # One variadic reduction of both lanes, and not two sums: see the top of the file.
    total: Any = None
    for k, word in enumerate(_words(x)):
        lanes = _mix(word, low, high, k)
        word_sum = lax.reduce(lanes, zeros, _add, axes)
        total = word_sum if total is None else _add(total, word_sum)
    return total


def _add(p: Any, q: Any) -> _Lanes:
    return p[0] + q[0], p[1] + q[1]


def _words(x: jax.Array) -> list[jax.Array]:
    """The bits of each element as one or more uint32 arrays of the same shape; bijective in the element's bits."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        real_words = _words(lax.real(x))
        imag_words = _words(lax.imag(x))
        return [*real_words, *imag_words]
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    if x.dtype.itemsize == 8:
        halves = lax.bitcast_convert_type(x, jnp.uint32)
        return [halves[..., 0], halves[..., 1]]
    if x.dtype.itemsize == 1:
        type_info = jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo
        # int4, float4 and the like are padded in memory, so they are told apart by value: float32
        # holds each of their values exactly.
        if type_info(x.dtype).bits < 8:
            values = x.astype(jnp.float32)
            return [lax.bitcast_convert_type(values, jnp.uint32)]
    unsigned = _UNSIGNED[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, unsigned)
    return [bits.astype(jnp.uint32)]


def _multiply(i: jax.Array, factor: int) -> _Lanes:
    """The low and high 32 bits of uint32 i times a 64-bit constant: x64 is off, so the halves are multiplied."""
    low = np.uint32(factor % _WORD)
    high = np.uint32(factor // _WORD)
    half = np.uint32(0xFFFF)
    # Products of 16-bit halves fit into 32 bits, so nothing is lost before it is shifted.
    i0 = i & half
    i1 = i >> 16
    f0 = low & half
    f1 = low >> 16
    middle = i1 * f0 + (i0 * f0 >> 16)
    upper = i1 * f1 + (middle >> 16)
    upper = upper + ((middle & half) + i0 * f1 >> 16)
    low_product = i * low
    high_product = upper + i * high
    return low_product, high_product


def _mix(word: jax.Array, low: Any, high: Any, k: int) -> _Lanes:
    """Two bijections of `word`, chosen by its index and by k, its place in the element."""
    # The products with odd constants spread neighbouring indices over all bits.
    xor_key = low * np.uint32(0x9E3779B1) ^ high * np.uint32(0x85EBCA77)
    xor_key = xor_key ^ np.uint32(k * 0x27D4EB2F % _WORD)
    sum_key = (low ^ np.uint32(0x6A09E667)) * np.uint32(0xC2B2AE3D)
    sum_key = sum_key + high * np.uint32(0x165667B1) + np.uint32(k)
    first_lane = _finalize(
        word ^ xor_key,
        shifts=(16, 13, 16),
        factors=(0x85EBCA6B, 0xC2B2AE35),
    )
    second_lane = _finalize(
        word + sum_key,
        shifts=(16, 15, 16),
        factors=(0x7FEB352D, 0x846CA68B),
    )
    return first_lane, second_lane


def _finalize(
    h: jax.Array,
    shifts: tuple[int, int, int],
    factors: tuple[int, int],
) -> jax.Array:
    """xor-shifts and products with odd numbers, each of which can be undone."""
    h = h ^ h >> np.uint32(shifts[0])
    h = h * np.uint32(factors[0])
    h = h ^ h >> np.uint32(shifts[1])
    h = h * np.uint32(factors[1])
    return h ^ h >> np.uint32(shifts[2])
