"""Exchange of tokens along the `expert` axis: each token travels only to the devices of its experts.

A row is one choice of a token. Every device sorts the rows of its own tokens by expert, so the rows for one expert are
a slice, and all devices know the sizes of all slices. A device receives the rows of its experts in the order of a
queue: by expert, and by the device that sends them. In each round it receives the next rows of the queue, as many as
its buffer holds, already sorted by expert. It computes them and returns the results to where the rows came from.

A buffer has room for a multiple of the even share of rows, so one round is usually enough. A router may send all rows
to one device; the rounds after the first run only if some device has rows left. So every row is computed whatever the
router chooses, and memory does not depend on it.

P is the number of devices along the axis, E the number of experts on each, G = P * E, M the number of rows of a
device's own tokens, and N the number of rows of its buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from plimsoll.framework.layers.base import Kernels
from plimsoll.framework.layers.custom_gradients import dense_cotangent, zero_cotangent
from plimsoll.framework.layers.experts.groups import rows_or_zeros
from plimsoll.framework.layout import PyTree

AXIS = "expert"
# Prefix of the name of a scope around the loop over the rounds after the first one. The number of rounds that an even
# router needs follows; framework/plan/grouped_products.py counts the loop by it.
FURTHER_ROUNDS = "further_rounds_"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slices:
    """Slices of a device's rows; a slice is the rows of one expert that travel from one device to another.

    Attributes:
        starts: int32[G], first row in this device's array.
        sizes: int32[G], number of rows; may be 0.
        remote_starts: int32[G], first row in the array of the other device.
    """

    starts: jax.Array
    sizes: jax.Array
    remote_starts: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Round:
    """The rows that one device sends and receives in a round.

    Attributes:
        sent: slices of its own rows, by expert of all devices.
        received: slices of its buffer, by sending device, and by local expert.
        sizes_E: int32, the number of rows of each local expert in the buffer.
    """

    sent: Slices
    received: Slices
    sizes_E: jax.Array


def plan_round(counts_PG: jax.Array, device: jax.Array | int, index: jax.Array | int, room: int) -> Round:
    """Plan what one device sends and receives in a round.

    Args:
        counts_PG: int32, the number of rows that each device has for each expert.
        device: index of this device along the axis.
        index: index of the round.
        room: number of rows that a device receives in a round, at most.
    """
    num_devices, num_experts = counts_PG.shape
    num_local = num_experts // num_devices
    # The axes are: receiving device, its expert, and sending device (S = P). The last two are the order of a queue.
    counts_PES = counts_PG.reshape(num_devices, num_devices, num_local).transpose(1, 2, 0)
    shape = counts_PES.shape
    queue_ends = jnp.cumsum(counts_PES.reshape(num_devices, -1), axis=1, dtype=jnp.int32).reshape(shape)
    queue_starts = queue_ends - counts_PES
    # The round takes the rows of the queue from `first` on.
    first = index * room
    starts_PES = jnp.clip(queue_starts - first, 0, room)
    sizes_PES = jnp.clip(queue_ends - first, 0, room) - starts_PES
    taken_before = jnp.clip(first - queue_starts, 0, counts_PES)
    sender_starts_PG = jnp.cumsum(counts_PG, axis=1, dtype=jnp.int32) - counts_PG
    sender_starts_PES = sender_starts_PG.reshape(num_devices, num_devices, num_local).transpose(1, 2, 0) + taken_before

    def select_sent(array_PES: jax.Array) -> jax.Array:
        return array_PES[:, :, device].reshape(-1)

    def select_received(array_PES: jax.Array) -> jax.Array:
        return array_PES[device].T.reshape(-1)

    return Round(
        sent=Slices(select_sent(sender_starts_PES), select_sent(sizes_PES), select_sent(starts_PES)),
        received=Slices(select_received(starts_PES), select_received(sizes_PES), select_received(sender_starts_PES)),
        sizes_E=jnp.sum(sizes_PES[device], axis=-1),
    )


def count_rounds(counts_PG: jax.Array, room: int) -> jax.Array:
    """Return the number of rounds until every device has received all of its rows, an int32 scalar of at least 1."""
    num_devices = counts_PG.shape[0]
    totals_P = jnp.sum(counts_PG.reshape(num_devices, num_devices, -1), axis=(0, 2))
    return jnp.maximum(1, (jnp.max(totals_P) + room - 1) // room)


@dataclass(frozen=True)
class Transport:
    """Moves slices of rows between the devices of the axis.

    Attributes:
        is_ragged: use `jax.lax.ragged_all_to_all`, which XLA has for TPU and GPU; otherwise a loop of all-to-alls.
        mesh_axes: names of all axes of the mesh.
        kernels: see `Context.kernels`.
        even_rows: number of rows that a device sends, and receives from an even router, for a plan.
    """

    is_ragged: bool
    mesh_axes: tuple[str, ...]
    kernels: Kernels | None = None
    even_rows: int = 0

    def move(self, rows_MD: jax.Array, num_rows: int, slices: Slices, arriving_sizes: jax.Array) -> jax.Array:
        """Return the rows that arrive at this device, [num_rows, D]; zeros where none do.

        Args:
            rows_MD: this device's rows.
            num_rows: number of rows of the result.
            slices: what leaves this device, G slices by receiving device.
            arriving_sizes: int32[G], the sizes of what arrives, by sending device.
        """
        if self.kernels is not None:
            return self.kernels.exchange_rows(rows_MD, num_rows, AXIS, even_rows=self.even_rows)
        output = jnp.zeros((num_rows, rows_MD.shape[1]), rows_MD.dtype)
        if not self.is_ragged:
            return self._move_in_steps(rows_MD, output, slices, arriving_sizes)
        return jax.lax.ragged_all_to_all(
            rows_MD, output, slices.starts, slices.sizes, slices.remote_starts, arriving_sizes, axis_name=AXIS
        )

    def agree_on_most(self, count: jax.Array) -> jax.Array:
        """Return the largest count of all devices of the mesh.

        A loop that contains collectives has to run equally often on all devices: also on those that do not exchange
        rows with each other, because one collective operation of a program serves all groups of devices.
        """
        return jax.lax.pmax(count, self.mesh_axes)

    def _move_in_steps(
        self, rows_MD: jax.Array, output: jax.Array, slices: Slices, arriving_sizes: jax.Array
    ) -> jax.Array:
        """Move slices by all-to-alls of fixed size, which together carry as many rows as the smaller array has."""
        num_devices = jax.lax.axis_size(AXIS)
        by_device = (num_devices, -1)
        starts_PE = slices.starts.reshape(by_device)
        sizes_PE = slices.sizes.reshape(by_device)
        arriving_starts = jax.lax.all_to_all(slices.remote_starts, AXIS, 0, 0, tiled=True)
        arriving_starts_PE = arriving_starts.reshape(by_device)
        arriving_sizes_PE = arriving_sizes.reshape(by_device)
        dim = rows_MD.shape[1]
        step_rows = -(-min(rows_MD.shape[0], output.shape[0]) // num_devices)
        most_rows = jnp.max(jnp.sum(sizes_PE, axis=1))
        num_steps = self.agree_on_most((most_rows + step_rows - 1) // step_rows)

        def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            index, output = carry
            positions = index * step_rows + jnp.arange(step_rows, dtype=jnp.int32)
            leaving = _find_rows(positions, starts_PE, sizes_PE, missing=rows_MD.shape[0])
            block = rows_or_zeros(rows_MD, leaving.reshape(-1))
            block = jax.lax.all_to_all(block, AXIS, 0, 0, tiled=True)
            arriving = _find_rows(positions, arriving_starts_PE, arriving_sizes_PE, missing=output.shape[0])
            # The index of places in the block that hold no row is past the last row.
            output = output.at[arriving.reshape(-1)].set(block.reshape(-1, dim), mode="drop")
            return index + 1, output

        _, output = jax.lax.while_loop(lambda carry: carry[0] < num_steps, step, (jnp.int32(0), output))
        return output


def _find_rows(positions: jax.Array, starts_PE: jax.Array, sizes_PE: jax.Array, missing: int) -> jax.Array:
    """Return the rows at positions of the concatenated slices of each device, int32[P, positions].

    Args:
        positions: int32, the same positions for each device.
        starts_PE: first row of each slice.
        sizes_PE: number of rows of each slice.
        missing: the result for positions after the last slice.
    """
    ends_PE = jnp.cumsum(sizes_PE, axis=1, dtype=jnp.int32)
    slices = jnp.sum(ends_PE[:, None, :] <= positions[:, None], axis=-1)
    is_row = slices < sizes_PE.shape[1]
    shifts_PE = starts_PE - (ends_PE - sizes_PE)
    shifts = jnp.take_along_axis(shifts_PE, jnp.where(is_row, slices, 0), axis=1)
    return jnp.where(is_row, positions + shifts, missing)


def send_rows(transport: Transport, rows_MD: jax.Array, round_: Round, num_rows: int) -> jax.Array:
    """Send a round's rows to the devices of their experts, and return the rows that arrive, [N, D].

    Args:
        transport: how rows move.
        rows_MD: rows of this device's tokens, sorted by expert.
        round_: the round.
        num_rows: N, at least the `room` of the round.
    """
    return _move(rows_MD, round_, _MoveOptions(transport, num_rows, returns=False))


def return_rows(transport: Transport, rows_ND: jax.Array, round_: Round, num_rows: int) -> jax.Array:
    """Undo `send_rows`: return the results of this device's rows, [M, D]; zeros for rows of other rounds.

    Args:
        transport: how rows move.
        rows_ND: results of the rows that `send_rows` returned.
        round_: the round.
        num_rows: M.
    """
    return _move(rows_ND, round_, _MoveOptions(transport, num_rows, returns=True))


@dataclass(frozen=True)
class _MoveOptions:
    """Options of a move of rows.

    Attributes:
        transport: moves rows between devices.
        num_rows: number of rows after the move.
        returns: whether results return to the devices of their tokens.
    """

    transport: Transport
    num_rows: int
    returns: bool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _MoveResiduals:
    """The round of a move, and the number of rows before it."""

    round: Round
    num_rows: int = field(metadata={"static": True})


def _move_rows(rows_MD: jax.Array, round_: Round, options: _MoveOptions) -> jax.Array:
    leaving, arriving = round_.sent, round_.received
    if options.returns:
        leaving, arriving = arriving, leaving
    return options.transport.move(rows_MD, options.num_rows, leaving, arriving.sizes)


def _move_forward(rows_MD: jax.Array, round_: Round, options: _MoveOptions) -> tuple[jax.Array, _MoveResiduals]:
    # Not `_move`: memory.remat = none saves no result of a function with its own gradient (`remat._all_but_weights`).
    return _move_rows(rows_MD, round_, options), _MoveResiduals(round_, rows_MD.shape[0])


def _move_backward(options: _MoveOptions, saved: _MoveResiduals, grad: jax.Array) -> tuple[jax.Array, Round]:
    # JAX's own rule for `ragged_all_to_all` would also compute a gradient of the array that is written to.
    opposite = _MoveOptions(options.transport, saved.num_rows, not options.returns)
    return _move(grad, saved.round, opposite), jax.tree.map(zero_cotangent, saved.round)


_move = jax.custom_vjp(_move_rows, nondiff_argnums=(2,))
_move.defvjp(_move_forward, _move_backward)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _SumResiduals:
    """Residuals of a sum over rounds: those of the first round, and what the others are computed from again.

    Attributes:
        pull: the pullback of the first round, a function of the gradient.
        leaves: leaves of the arguments.
        routing: arguments without gradient.
        num_rounds: int32, the number of rounds.
        is_varied: for each leaf, whether it is differentiated.
    """

    pull: Callable[[jax.Array], tuple[list[jax.Array]]]
    leaves: list[jax.Array]
    routing: PyTree
    num_rounds: jax.Array
    is_varied: tuple[bool, ...] = field(metadata={"static": True})


def sum_rounds(
    run_round: Callable[[Any, Any, jax.Array | int], jax.Array],
    arguments: PyTree,
    routing: PyTree,
    num_rounds: jax.Array,
    even_rounds: int,
) -> jax.Array:
    """Return the sum of run_round(arguments, routing, index) over all rounds.

    Only the first round saves residuals. The backward pass computes the other rounds again, one at a time, so neither
    pass needs more memory for more rounds.

    Args:
        run_round: computes one round; it closes over no traced array.
        arguments: tree of arrays that may be differentiated.
        routing: tree of integer arrays.
        num_rounds: int32, at least 1, the same on all devices of the mesh.
        even_rounds: number of rounds that an even router needs, for counting a program's work.
    """
    leaves, structure = jax.tree.flatten(arguments)
    add_further_rounds = partial(_add_further_rounds, scope=f"{FURTHER_ROUNDS}{even_rounds - 1}")

    def run(leaves: Sequence[jax.Array], routing: PyTree, index: jax.Array | int) -> jax.Array:
        return run_round(jax.tree.unflatten(structure, leaves), routing, index)

    @jax.custom_vjp
    def total(leaves: list[jax.Array], routing: PyTree, num_rounds: jax.Array) -> jax.Array:
        first = run(leaves, routing, 0)
        return add_further_rounds(first, num_rounds, lambda index: run(leaves, routing, index))

    def forward(
        leaf_primals: list[CustomVJPPrimal], routing_primals: PyTree, num_rounds_primal: CustomVJPPrimal
    ) -> tuple[jax.Array, _SumResiduals]:
        is_varied = tuple(bool(leaf.perturbed) for leaf in leaf_primals)
        leaves = [leaf.value for leaf in leaf_primals]
        routing, num_rounds = jax.tree.map(
            lambda primal: primal.value,
            (routing_primals, num_rounds_primal),
            is_leaf=lambda node: isinstance(node, CustomVJPPrimal),
        )
        varied = _select(leaves, is_varied)
        first, pull = jax.vjp(lambda varied: run(_replace(leaves, is_varied, varied), routing, 0), varied)
        result = add_further_rounds(first, num_rounds, lambda index: run(leaves, routing, index))
        return result, _SumResiduals(pull, leaves, routing, num_rounds, is_varied)

    def backward(
        saved: _SumResiduals, grad: jax.Array | SymbolicZero
    ) -> tuple[list[jax.Array | np.ndarray], PyTree, jax.Array | np.ndarray]:
        result_grad = dense_cotangent(grad)
        varied = _select(saved.leaves, saved.is_varied)

        def differentiate(index: jax.Array) -> list[jax.Array]:
            _, pull = jax.vjp(
                lambda varied: run(_replace(saved.leaves, saved.is_varied, varied), saved.routing, index), varied
            )
            return pull(result_grad)[0]

        (first_grads,) = saved.pull(result_grad)
        varied_grads = add_further_rounds(first_grads, saved.num_rounds, differentiate)
        zeros = [zero_cotangent(leaf) for leaf in saved.leaves]
        leaf_grads = _replace(zeros, saved.is_varied, varied_grads)
        return leaf_grads, jax.tree.map(zero_cotangent, saved.routing), zero_cotangent(saved.num_rounds)

    total.defvjp(forward, backward, symbolic_zeros=True)
    return total(leaves, routing, num_rounds)


def _add_further_rounds(
    first: PyTree, num_rounds: jax.Array, compute: Callable[[jax.Array], PyTree], scope: str
) -> PyTree:
    """Return first + compute(1) + ... + compute(num_rounds - 1), computed one after the other."""

    def add(carry: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
        index, total = carry
        return index + 1, jax.tree.map(jnp.add, total, compute(index))

    with jax.named_scope(scope):
        _, total = jax.lax.while_loop(lambda carry: carry[0] < num_rounds, add, (jnp.int32(1), first))
    return total


def _select(leaves: Sequence[jax.Array], is_selected: Sequence[bool]) -> list[jax.Array]:
    return [leaf for leaf, selected in zip(leaves, is_selected, strict=True) if selected]


def _replace(leaves: Sequence[Any], is_replaced: Sequence[bool], values: Sequence[jax.Array]) -> list[Any]:
    """Return the leaves, where those with is_replaced are replaced by `values`, in order."""
    remaining = iter(values)
    return [next(remaining) if replaced else leaf for leaf, replaced in zip(leaves, is_replaced, strict=True)]


def count_buffer_rows(num_rows: int, factor: float, most_rows: int) -> int:
    """Return the number of rows that a device receives in a round, at most.

    Args:
        num_rows: M, which is also an even share of the rows.
        factor: multiple of the even share.
        most_rows: number of rows if all tokens of all devices choose this device's experts.
    """
    return min(most_rows, max(1, math.ceil(factor * num_rows)))
