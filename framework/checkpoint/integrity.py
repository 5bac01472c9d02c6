"""Checksums of arrays: 64 bits per leaf, independent of its sharding, memory kind and number of processes.

The checksum of a leaf has two independent 32-bit lanes. Each lane is the sum, modulo 2^32, over the elements of a
bijective mix of the element's bits with its linear index (row-major, in the logical array). Addition is commutative and
associative, so every mesh, device count, memory kind or reduction order gives the same number, and reshaping does not
change it. For a given index the mix is a bijection, so one flipped bit changes one summand and is CERTAIN to change the
sum; any other difference goes undetected with a probability of about 2^-64. The checksum protects against accidents,
not against forgery.

One jitted program sums all leaves in place: each device sums its own shard, and the scalars are added up. Mixing and
reduction fuse, so there are no temporaries: XLA:CPU fuses a variadic `lax.reduce`, while two separate `jnp.sum` calls
wrote every mixed word to memory and took 25 times as long. The mix is MurmurHash3's finalizer (Austin Appleby, public
domain). The second lane uses the "lowbias32" constants of Chris Wellons' hash prospector (public domain).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.devices import executables
from plimsoll.framework.layout import SplitArray

# An offloaded leaf is copied to the device in chunks of at most this size, if its leading axis allows.
_CHUNK_BYTES = 64 << 20
_HOST_KINDS = ("pinned_host", "unpinned_host")

# Unsigned integer dtypes by size in bytes.
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}

_WORD = 1 << 32
_Lanes = tuple[jax.Array, jax.Array]
# The low or high 32 bits of the linear indices of elements, uint32.
IndexWord = jax.Array | np.uint32
# An array, or its shape, dtype and sharding.
ArrayOrSpec = jax.Array | jax.ShapeDtypeStruct


@dataclass(frozen=True)
class LeafPart:
    """A leaf, or a part of it along its first axis, as a term of the leaf's checksum.

    Attributes:
        num_chunks: see `count_chunks`.
        start: linear index of the part's first element in the leaf.
        is_long: whether the leaf has more than 2^32 elements, so the high half of an index is not always 0.
    """

    num_chunks: int
    start: int
    is_long: bool


def checksums(arrays: Mapping[str, jax.Array | SplitArray]) -> dict[str, str]:
    """Compute the checksum of each array, by name, as 16 hexadecimal digits.

    A `SplitArray` has the checksum of the whole array.

    Arrays may have any shape (including 0-d and empty), sharding and memory kind, and may hold booleans, integers,
    floats or complex numbers of any width. Collective: all processes must call it with the same arrays.

    Raises:
        TypeError: the bits of a leaf are not accessible, as for a typed PRNG key.
    """
    # A program runs on one set of devices, but a tree may contain leaves that were never put on the mesh, for example
    # a counter.
    groups: dict[tuple[frozenset[object], Mesh | None], dict[str, jax.Array | SplitArray]] = {}
    for name, x in arrays.items():
        is_number = x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.number)
        if not is_number:
            raise TypeError(f"{name}: expected numbers or booleans, got {x.dtype}; store jax.random.key_data of a key")
        sharding = x.parts[0].sharding if isinstance(x, SplitArray) else x.sharding
        # A program accepts arrays of only one mesh with explicit axes.
        explicit_mesh = None
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            is_explicit = AxisType.Explicit in sharding.mesh.axis_types
            explicit_mesh = sharding.mesh if is_explicit else None
        groups.setdefault((frozenset(sharding.device_set), explicit_mesh), {})[name] = x
    lanes_by_name: dict[str, list[int]] = {}
    for group in groups.values():
        sums = np.asarray(executables.call(_program, *arguments(group)))
        first_row = 0
        for name, x in group.items():
            num_parts = len(x.parts) if isinstance(x, SplitArray) else 1
            part_sums = sums[first_row : first_row + num_parts].astype(np.uint64)
            lanes_by_name[name] = [int(lane) % _WORD for lane in part_sums.sum(axis=0)]
            first_row += num_parts
    return {name: "{:08x}{:08x}".format(*lanes_by_name[name]) for name in arrays}


def arguments(
    arrays: Mapping[str, ArrayOrSpec | SplitArray],
) -> tuple[list[ArrayOrSpec], tuple[LeafPart, ...], NamedSharding | None]:
    """Return the arguments of `_program` for arrays or ShapeDtypeStructs with shardings; all must share devices."""
    leaves: list[ArrayOrSpec] = []
    parts = []
    for x in arrays.values():
        start = 0
        for part in x.parts if isinstance(x, SplitArray) else (x,):
            leaves.append(part)
            # Computed here, outside jit, because tracers have no shardings.
            parts.append(LeafPart(count_chunks(part), start, x.size > _WORD))
            start += part.size
    out = None
    for x in leaves:
        if isinstance(x.sharding, NamedSharding):
            # Replicated, so that every process can read the sums.
            out = NamedSharding(x.sharding.mesh, PartitionSpec())
            break
    return leaves, tuple(parts), out


@functools.partial(jax.jit, static_argnums=(1, 2))
def _program(leaves: list[jax.Array], parts: tuple[LeafPart, ...], out: NamedSharding | None) -> jax.Array:
    """Compute both lanes of N leaves or parts of leaves: uint32[N, 2], replicated."""
    rows: list[jax.Array] = []
    for x, part in zip(leaves, parts, strict=True):
        lanes = leaf_sum(x, part)
        rows.append(jnp.stack(lanes))
    sums = jnp.stack(rows)
    return sums if out is None else lax.with_sharding_constraint(sums, out)


def count_chunks(x: ArrayOrSpec) -> int:
    """Return the number of chunks along axis 0 for copying an offloaded leaf to the device; 0 for a device leaf.

    A leaf that is sharded along axis 0 is not split, because slicing that axis would gather it.
    """
    if x.sharding.memory_kind not in _HOST_KINDS:
        return 0
    shard = x.sharding.shard_shape(x.shape)
    if x.ndim < 2 or 0 in x.shape:
        return 1
    num_rows = shard[0]
    if num_rows != x.shape[0]:
        return 1
    shard_bytes = math.prod(shard) * x.dtype.itemsize
    min_chunks = math.ceil(shard_bytes / _CHUNK_BYTES)
    # All chunks have the same shape, so their number divides the rows. If no smaller divisor is large enough, each row
    # is a chunk.
    divisors = (n for n in range(1, num_rows + 1) if num_rows % n == 0)
    return next(n for n in divisors if n >= min_chunks or n == num_rows)


def leaf_sum(x: jax.Array, part: LeafPart) -> _Lanes:
    """Compute both lanes of one leaf. An offloaded leaf is copied to the device, whole or in chunks.

    Arithmetic on arrays in host memory is an error inside jit.
    """
    zero = jnp.uint32(0)
    if x.size == 0:
        return zero, zero
    start_low = np.uint32(part.start % _WORD)
    start_high = np.uint32(part.start // _WORD)
    if part.num_chunks < 2:
        on_device = jax.device_put(x, jax.memory.Space.Device) if part.num_chunks else x
        return _sum(on_device, start_low, start_high, part.is_long)
    rows = x.shape[0] // part.num_chunks

    def add(i: jax.Array, lanes: _Lanes) -> _Lanes:
        chunk = lax.dynamic_slice_in_dim(x, i * rows, rows, axis=0)
        low, high = _multiply(i.astype(jnp.uint32), chunk.size)
        if part.start:
            low = low + start_low
            carry = (low < start_low).astype(jnp.uint32)
            high = high + start_high + carry
        on_device = jax.device_put(chunk, jax.memory.Space.Device)
        return _add(lanes, _sum(on_device, low, high, part.is_long))

    # A loop instead of one expression per chunk, so that the device holds only one chunk at a time.
    return lax.fori_loop(0, part.num_chunks, add, (zero, zero))


# Jitted separately, so that leaves of the same shape are traced and lowered only once.
@functools.partial(jax.jit, static_argnums=3)
def _sum(x: jax.Array, low: IndexWord, high: IndexWord, long: bool) -> _Lanes:
    """Compute both lanes of an array whose first element has the 64-bit index (high, low) in its leaf.

    Args:
        x: array to sum.
        low: low 32 bits of the index.
        high: high 32 bits of the index.
        long: the leaf has more than 2^32 elements, so the high half of an index is not always 0.
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
            # If an unsigned sum is smaller than a summand, it has overflowed: carry.
            high = high + step_high
            carry = (low < step_low).astype(jnp.uint32)
            high = high + carry
        stride *= x.shape[axis]
    zeros = (np.uint32(0), np.uint32(0))
    axes = tuple(range(x.ndim))
    # One variadic reduction of both lanes instead of two sums; see the module docstring.
    first_word, *other_words = _words(x)
    total = lax.reduce(_mix(first_word, low, high, 0), zeros, _add, axes)
    for k, word in enumerate(other_words, 1):
        total = _add(total, lax.reduce(_mix(word, low, high, k), zeros, _add, axes))
    return total


def _add(p: _Lanes, q: _Lanes) -> _Lanes:
    return p[0] + q[0], p[1] + q[1]


def _words(x: jax.Array) -> list[jax.Array]:
    """Return the bits of each element as one or more uint32 arrays of the same shape; bijective in those bits."""
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
        # int4, float4 and similar types are padded in memory, so use their values instead of their bits: float32
        # represents each of them exactly.
        if type_info(x.dtype).bits < 8:
            values = x.astype(jnp.float32)
            return [lax.bitcast_convert_type(values, jnp.uint32)]
    unsigned = _UNSIGNED[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, unsigned)
    return [bits.astype(jnp.uint32)]


def _multiply(i: jax.Array, factor: int) -> _Lanes:
    """Return the low and high 32 bits of uint32 i times a 64-bit constant, multiplied in halves because x64 is off."""
    low = np.uint32(factor % _WORD)
    high = np.uint32(factor // _WORD)
    half = np.uint32(0xFFFF)
    # Products of 16-bit halves fit into 32 bits, so no bits are lost before the shifts.
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


def _mix(word: jax.Array, low: IndexWord, high: IndexWord, k: int) -> _Lanes:
    """Apply two bijections to `word`, selected by its index and by k, its position in the element."""
    # The products with odd constants spread neighboring indices over all bits.
    xor_key = low * np.uint32(0x9E3779B1) ^ high * np.uint32(0x85EBCA77)
    xor_key = xor_key ^ np.uint32(k * 0x27D4EB2F % _WORD)
    sum_key = (low ^ np.uint32(0x6A09E667)) * np.uint32(0xC2B2AE3D)
    sum_key = sum_key + high * np.uint32(0x165667B1) + np.uint32(k)
    first_lane = _finalize(word ^ xor_key, shifts=(16, 13, 16), factors=(0x85EBCA6B, 0xC2B2AE35))
    second_lane = _finalize(word + sum_key, shifts=(16, 15, 16), factors=(0x7FEB352D, 0x846CA68B))
    return first_lane, second_lane


def _finalize(h: jax.Array, shifts: tuple[int, int, int], factors: tuple[int, int]) -> jax.Array:
    """Apply xor-shifts and multiplications by odd numbers, which are all invertible."""
    h = h ^ h >> np.uint32(shifts[0])
    h = h * np.uint32(factors[0])
    h = h ^ h >> np.uint32(shifts[1])
    h = h * np.uint32(factors[1])
    return h ^ h >> np.uint32(shifts[2])
