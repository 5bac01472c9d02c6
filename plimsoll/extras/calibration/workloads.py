"""Workloads that measure the speed of a device: several kinds of work, each in several sizes.

A workload runs in a loop inside one program, so that the start of the program matters little. Each iteration depends on
the result of the previous one; otherwise the compiler would remove it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from plimsoll.framework.plan.step_time.device_rates import WorkKind

# Sides of square matrix products: from one attention head to a layer of a large model.
_SIDES = (32, 64, 128, 256, 512, 1024)
_LARGE_SIDES = (2048, 4096, 8192)
_BATCHED_SIDES = (16, 32, 64, 128)
# Matrix products in attention are batched over heads and sequences.
_HEADS = 16
# Sizes of arrays in float32 elements: from arrays that fit in a cache to ones that do not.
_MEMORY_LENGTHS = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 23, 1 << 24, 1 << 26)
_LENGTHS = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)
_COLUMNS = 256
# A chain of this many multiply-adds is compute-bound, not memory-bound.
_CHAIN = 16


class Workload(NamedTuple):
    """One size of one kind of work.

    Attributes:
        kind: kind of work.
        size: position on the kind's curve.
        amount: work of one iteration, in the unit of `size`; for memory, the bytes that are moved.
        iteration: one iteration: computes the next value from a value and the other operands.
        start: initial value.
        others: the other operands.
    """

    kind: WorkKind
    size: float
    amount: float
    iteration: Callable[..., Any]
    start: jax.Array
    others: tuple[jax.Array, ...] = ()


def workloads(platform: str) -> Iterator[Workload]:
    """Yield all workloads for a platform. Accelerators get larger ones, and matrix products in bfloat16."""
    is_cpu = platform == "cpu"
    for side in _SIDES if is_cpu else (*_SIDES, *_LARGE_SIDES):
        yield _product("product f32", jnp.float32, side)
        if not is_cpu:
            yield _product("product bf16", jnp.bfloat16, side)
    for length in _MEMORY_LENGTHS:
        yield _memory(length)
    if is_cpu:
        # On accelerators these rates do not matter: attention kernels are fused, and memory bandwidth bounds the rest.
        yield from map(_batch_matmul, _BATCHED_SIDES)
        yield from map(_arithmetic, _LENGTHS)
        yield from map(_transcendental, _LENGTHS)


def _product(kind: WorkKind, dtype: Any, side: int) -> Workload:
    """Return a square matrix product. The weights of 1 / side keep values near one."""
    weights = jnp.full((side, side), 1.0 / side, dtype)
    flops = 2.0 * side**3
    return Workload(kind, flops, flops, jnp.matmul, jnp.ones((side, side), dtype), (weights,))


def _batch_matmul(side: int) -> Workload:
    """Return products of small matrices, one for each head."""
    shape = (_HEADS, side, side)
    weights = jnp.full(shape, 1.0 / side, jnp.float32)
    flops = 2.0 * side**3
    return Workload(
        kind="batched product",
        size=flops,
        amount=_HEADS * flops,
        iteration=jnp.matmul,
        start=jnp.ones(shape, jnp.float32),
        others=(weights,),
    )


def _memory(length: int) -> Workload:
    """Return one multiply-add of two arrays: it reads both and writes one, in place of the first."""
    shape = (length // _COLUMNS, _COLUMNS)
    other = jnp.full(shape, 0.5, jnp.float32)
    return Workload(
        kind="memory",
        size=8.0 * length,
        amount=12.0 * length,
        iteration=lambda value, other: value * 0.5 + other,
        start=jnp.ones(shape, jnp.float32),
        others=(other,),
    )


def _arithmetic(length: int) -> Workload:
    """Return a chain of multiply-adds in registers."""

    def iteration(value: jax.Array) -> jax.Array:
        for step in range(_CHAIN):
            value = value * 0.9 + 0.01 * step
        return value

    operations = 2.0 * _CHAIN * length
    return Workload("arithmetic", operations, operations, iteration, jnp.ones(length, jnp.float32))


def _transcendental(length: int) -> Workload:
    """Return exponentials and hyperbolic tangents, as in activations and softmaxes."""
    operations = 3.0 * length
    return Workload(
        kind="transcendental",
        size=operations,
        amount=operations,
        iteration=lambda value: jnp.tanh(jnp.exp(jnp.tanh(value)) * 0.5),
        start=jnp.ones(length, jnp.float32),
    )
