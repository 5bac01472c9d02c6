"""Passes what comes before a device's positions along `seq`: the last inputs of a convolution, and recurrent states.

Each device of the axis has contiguous positions of a row. A linear recurrence maps the state before them to the state
after them:

    S_after = A S_before + F,

where A is the device's transition, and F its state for S_before = 0. All devices compute A and F at the same time. The
state before a device then follows from those of all earlier devices, in log2(R) exchanges between R devices (Hillis and
Steele 1986; for linear recurrences, Blelloch 1990): after each one, a device knows A and F of twice as many earlier
devices. So no device waits for the recurrence of another one, and a device holds two states at a time, not R. The
gradients of states pass in the other direction, by the transposed transitions.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from plimsoll.framework.layers.kernels_call import LENGTH_AXIS

T = TypeVar("T")


def pass_states(transition: jax.Array, state: jax.Array, shards: int, *, reverse: bool = False) -> jax.Array:
    """Return the state before a device's positions, inside `shard_map`; zeros on the first device.

    Args:
        transition: A, [..., H, H], or [..., 1, 1] for a factor.
        state: F, [..., H, V].
        shards: R, the number of devices along seq.
        reverse: pass states to previous devices, and return the state after a device's positions.
    """
    direction = -1 if reverse else 1

    def receive(tree: T, distance: int) -> T:
        ends = ((source, source + direction * distance) for source in range(shards))
        routes = [(source, target) for source, target in ends if 0 <= target < shards]
        # Devices without a sender receive zeros: the map of every state to 0, which is right before the first device.
        return jax.tree.map(lambda x: jax.lax.ppermute(x, LENGTH_AXIS, routes), tree)

    # The number of earlier devices that `state` and `transition` take into account.
    covered = 1
    if shards == 2:
        return receive(state, covered)
    transition, state = receive((transition, state), covered)
    while covered < shards - 1:
        if 2 * covered >= shards - 1:
            # Nothing comes before the last states that are added.
            return state + apply_transition(transition, receive(state, covered))
        earlier_transition, earlier_state = receive((transition, state), covered)
        state = state + apply_transition(transition, earlier_state)
        transition = apply_transition(transition, earlier_transition)
        covered *= 2
    return state


def apply_transition(transition: jax.Array, state: jax.Array) -> jax.Array:
    """Return A S for A [..., H, H] or [..., 1, 1], in full precision, because its error spreads to all later tokens."""
    if transition.shape[-1] == 1:
        return transition * state
    return jnp.matmul(transition, state, precision=jax.lax.Precision.HIGHEST)


def receive_previous(x_BL: jax.Array, count: int, shards: int) -> jax.Array:
    """Return the `count` positions before a device's own, [B, count, ...], inside `shard_map`.

    Args:
        x_BL: the device's positions, [B, L, ...].
        count: number of positions; they may be those of several devices. Before the row, they are zeros.
        shards: the number of devices along seq.
    """
    length = x_BL.shape[1]
    parts: list[jax.Array] = []
    for distance in range(1, -(-count // length) + 1):
        num_taken = min(length, count - (distance - 1) * length)
        part = x_BL[:, length - num_taken :]
        pairs = [(source, source + distance) for source in range(shards - distance)]
        parts.insert(0, jax.lax.ppermute(part, LENGTH_AXIS, pairs) if pairs else jnp.zeros_like(part))
    return jnp.concatenate(parts, axis=1) if parts else x_BL[:, :0]
