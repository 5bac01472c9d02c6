"""Experts with a fixed capacity: choices above it are dropped (Lepikhin et al. 2020, arXiv 2006.16668).

Every sequence has its own slots, so which choices are dropped depends neither on the other sequences of a batch nor
on how they are distributed over devices and microbatches. C is the number of slots of an expert in a sequence.
Padding takes no slot, and does not add to the capacity: a sequence has the same slots no matter how far its row is
padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.layers.experts.groups import rows_or_zeros
from plimsoll.framework.layout import Nested

# A product that should be an integer may be one bit above it.
_ROUNDING = 1.0 - 1e-6


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """The slot of each choice.

    Attributes:
        slots_BSK: int32, e * C + c; E * C for a dropped choice.
        tokens_BEC: int32, the token of each slot; S for an empty one.
        is_kept_BSK: bool, whether the choice has a slot.
    """

    slots_BSK: jax.Array
    tokens_BEC: jax.Array
    is_kept_BSK: jax.Array


def find_tokens(batch: Mapping[str, jax.Array]) -> jax.Array | None:
    """Return which positions are not padding, bool[B, S]; None if the batch has neither array.

    Args:
        batch: has `segments`, which are 0 in padding; or `weights`: no counted target depends on positions after the
            last counted target.
    """
    if "segments" in batch:
        return batch["segments"] != 0
    if "weights" in batch:
        is_counted_BS = (batch["weights"] > 0).astype(jnp.int32)
        return jax.lax.cummax(is_counted_BS, axis=1, reverse=True) > 0
    return None


def assign_slots(
    experts_BSK: jax.Array, num_experts: int, capacity: float, is_token_BS: jax.Array | None = None
) -> Slots:
    """Assign slots: first choices come before second ones, and earlier tokens before later ones.

    Args:
        experts_BSK: int32, the choices.
        num_experts: E.
        capacity: in a sequence of n tokens, an expert has this times K * n / E slots, rounded up; C is the number for
            n = S.
        is_token_BS: False in padding, which has no slot; None if all positions are tokens.
    """
    batch, length, top_k = experts_BSK.shape
    share = np.float32(capacity * top_k / num_experts * _ROUNDING)
    count = min(length, math.ceil(np.float32(length) * share))
    # In the order in which slots are assigned.
    experts_BN = experts_BSK.swapaxes(1, 2).reshape(batch, top_k * length)
    chosen_BNE = jax.nn.one_hot(experts_BN, num_experts, dtype=jnp.int32)
    limit_B1: jax.Array | int = count
    if is_token_BS is not None:
        chosen_BNE = chosen_BNE * jnp.tile(is_token_BS, (1, top_k))[..., None]
        num_tokens_B1 = jnp.sum(is_token_BS, axis=1, keepdims=True, dtype=jnp.float32)
        limit_B1 = jnp.ceil(num_tokens_B1 * share).astype(jnp.int32)
    before_BNE = jnp.cumsum(chosen_BNE, axis=1) - chosen_BNE
    queue_BN = jnp.sum(before_BNE * chosen_BNE, axis=-1)
    is_kept_BN = (queue_BN < limit_B1) & jnp.any(chosen_BNE, axis=-1)
    slots_BN = jnp.where(is_kept_BN, experts_BN * count + queue_BN, num_experts * count)
    tokens_N = jnp.tile(jnp.arange(length, dtype=jnp.int32), top_k)

    def scatter_tokens(slots_N: jax.Array) -> jax.Array:
        empty = jnp.full(num_experts * count, length, jnp.int32)
        # The index of dropped choices is past the last slot.
        return empty.at[slots_N].set(tokens_N, mode="drop")

    tokens_BEC = jax.vmap(scatter_tokens)(slots_BN).reshape(batch, num_experts, count)

    slots_BSK = slots_BN.reshape(batch, top_k, length).swapaxes(1, 2)
    is_kept_BSK = is_kept_BN.reshape(batch, top_k, length).swapaxes(1, 2)
    return Slots(slots_BSK, tokens_BEC, is_kept_BSK)


def dispatch(x_BSD: jax.Array, slots: Slots) -> jax.Array:
    """Return the token of each slot, [B, E, C, D]; zeros for empty slots."""
    return jax.vmap(rows_or_zeros)(x_BSD, slots.tokens_BEC)


def multiply_stored(
    x: jax.Array, weights: Nested, dense: Callable[[Nested], jax.Array], transpose: bool, sizes: jax.Array | None
) -> jax.Array:
    """Multiply slots [B, E, C, in] by their experts' stored weights.

    See `framework.layers.experts.expert_storage.Multiply`.
    """
    weight_EIO = dense(weights)
    return jnp.einsum("beco,eio->beci" if transpose else "beci,eio->beco", x, weight_EIO)


def collect(y_BECD: jax.Array, slots: Slots) -> jax.Array:
    """Return the result of each choice, [B, S, K, D]; zeros for dropped ones."""
    batch, num_experts, count, dim = y_BECD.shape
    y_BPD = y_BECD.reshape(batch, num_experts * count, dim)
    return jax.vmap(rows_or_zeros)(y_BPD, slots.slots_BSK)
