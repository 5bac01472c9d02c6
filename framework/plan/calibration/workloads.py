"""The workloads that show how fast a device is: each one kind of work, in several sizes.

A workload runs in a loop inside one program, so that the start of the program weighs little. What a turn computes is
needed by the next one, or the compiler would leave it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from framework.plan.calibration.rates import Kind

# The sides of square products: from one head of attention to a layer of a large model.
_SIDES = (32, 64, 128, 256, 512, 1024)
_LARGE_SIDES = (2048, 4096, 8192)
_BATCHED_SIDES = (16, 32, 64, 128)
# Products of attention have one matrix for each head and sequence.
_HEADS = 16
# The sizes of arrays in float32 elements: from what stays in a cache to what does not.
_MEMORY_LENGTHS = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 23, 1 << 24, 1 << 26)
_LENGTHS = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)
_COLUMNS = 256
# So many multiply-adds one after the other are bound by arithmetic, not by memory.
_CHAIN = 16


class Workload(NamedTuple):
    """One size of one kind of work.

    Attributes:
        kind: of work.
        size: by which the kind's curve is read.
        amount: of a turn, in the unit of `size` or, of memory, in bytes that are moved.
        turn: computes the next value from a value and the other operands.
        start: the first value.
        others: the other operands.
    """

    kind: Kind
    size: float
    amount: float
    turn: Callable[..., Any]
    start: jax.Array
    others: tuple[jax.Array, ...] = ()


def workloads(platform: str) -> Iterator[Workload]:
    """All workloads for devices of a platform; accelerators have larger ones, and products in bfloat16."""
    is_cpu = platform == "cpu"
    for side in _SIDES if is_cpu else (*_SIDES, *_LARGE_SIDES):
        yield _product("product f32", jnp.float32, side)
        if not is_cpu:
            yield _product("product bf16", jnp.bfloat16, side)
    for length in _MEMORY_LENGTHS:
        yield _memory(length)
    if is_cpu:
        # Elsewhere fused attention kernels and the width of memory leave these nothing to say.
        yield from map(_batched_product, _BATCHED_SIDES)
        yield from map(_arithmetic, _LENGTHS)
        yield from map(_transcendental, _LENGTHS)


def _product(kind: Kind, dtype: Any, side: int) -> Workload:
    """A square product; the factor keeps values near one."""
    weights = jnp.full((side, side), 1.0 / side, dtype)
    flops = 2.0 * side**3
    return Workload(kind, flops, flops, jnp.matmul, jnp.ones((side, side), dtype), (weights,))


def _batched_product(side: int) -> Workload:
    """Products of small matrices, one for each head."""
    shape = (_HEADS, side, side)
    weights = jnp.full(shape, 1.0 / side, jnp.float32)
    flops = 2.0 * side**3
    return Workload(
        kind="batched product",
        size=flops,
        amount=_HEADS * flops,
        turn=jnp.matmul,
        start=jnp.ones(shape, jnp.float32),
        others=(weights,),
    )


def _memory(length: int) -> Workload:
    """One multiply-add of arrays: two are read, one is written in the place of the first."""
    shape = (length // _COLUMNS, _COLUMNS)
    other = jnp.full(shape, 0.5, jnp.float32)
    return Workload(
        kind="memory",
        size=8.0 * length,
        amount=12.0 * length,
        turn=lambda value, other: value * 0.5 + other,
        start=jnp.ones(shape, jnp.float32),
        others=(other,),
    )


def _arithmetic(length: int) -> Workload:
    """A chain of multiply-adds in registers."""

    def turn(value: jax.Array) -> jax.Array:
        for step in range(_CHAIN):
            value = value * 0.9 + 0.01 * step
        return value

    operations = 2.0 * _CHAIN * length
    return Workload("arithmetic", operations, operations, turn, jnp.ones(length, jnp.float32))


def _transcendental(length: int) -> Workload:
    """Exponentials and hyperbolic tangents, as activations and softmaxes have."""
    operations = 3.0 * length
    return Workload(
        kind="transcendental",
        size=operations,
        amount=operations,
        turn=lambda value: jnp.tanh(jnp.exp(jnp.tanh(value)) * 0.5),
        start=jnp.ones(length, jnp.float32),
    )
