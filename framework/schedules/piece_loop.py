"""The update of a piece in a loop over its units, or over blocks of their rows.

Rows are blocks of each device's own shard, so they are taken inside `shard_map`: [L, R, C] is seen as
[L * blocks, R / blocks, C], which moves nothing, and a block is one index of the leading dimension. (TPU slices host
memory in one dimension only.) Weights and state are the loop's carry and are updated in place: a loop that only read a
stack might hold a relaid copy of all of it. The next step's leaves are fetched while one step updates its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from framework.layout import TensorSpec, fetch_leaf, store_leaf
from framework.learner.units import Decision, unit_at, with_unit
from framework.optimizers.rounding import Origin
from framework.schedules.division import is_hosted, num_blocks
from framework.schedules.piece_update import Flat, FlatBundle, FlatUpdate, PieceUpdate

# Where a leaf has a step's units or rows, by its path and the number of the step; () for a leaf that goes whole.
IndexOf = Callable[[str, jax.Array], Any]


def update_in_shards(
    piece: PieceUpdate,
    mesh: Mesh,
    flat: FlatBundle,
    decision: Decision,
    start: jax.Array,
) -> FlatUpdate:
    """`update_in_loop` of a piece by rows, with each device updating the rows of its own shard."""
    parts = [{path: PartitionSpec(*spec.mesh_axes) for path, spec in part.items()} for part in piece.specs]
    axes = FlatBundle(*parts)
    replicated = PartitionSpec()
    update = jax.shard_map(
        partial(update_in_loop, piece, in_shards=True),
        mesh=mesh,
        in_specs=(axes, replicated, replicated),
        out_specs=FlatUpdate(axes.weights, axes.entry, axes.average),
        check_vma=False,
    )
    return update(flat, decision, start)


def update_in_loop(
    piece: PieceUpdate,
    flat: FlatBundle,
    decision: Decision,
    start: jax.Array,
    *,
    in_shards: bool = False,
) -> FlatUpdate:
    """Updates a piece unit by unit, or block of rows by block of rows.

    Args:
        piece: what is updated, and how.
        flat: the piece's leaves, each where its spec says.
        decision: see `Learner.decide`.
        start: the index of the first unit, int32: all units are updated, or this one. It may be no constant: a slice of
            host memory would be simplified to one in two dimensions.
        in_shards: whether arrays are a device's own shards.
    """
    weight_path = next(iter(flat.weights))
    # A piece by rows has one parameter, whose shape says how many blocks there are.
    shape = flat.weights[weight_path].shape[piece.stacked :]
    blocks = num_blocks(shape) if piece.rows else 1
    # By rows, what is not shaped like the parameter (a counter) is the unit's: read and written for each block.
    unit_leaves = {}
    if piece.rows:
        unit_leaves = {path: x for path, x in flat.entry.items() if x.shape[piece.stacked :] != shape}
    cut = partial(_in_blocks, blocks=blocks, stacked=piece.stacked)
    weights = {path: cut(x) for path, x in flat.weights.items()}
    cut_grad = partial(cut, stacked=piece.stacked and not piece.single)
    grads = {path: cut_grad(x) for path, x in flat.grads.items()}
    entry = {path: x if path in unit_leaves else cut(x) for path, x in flat.entry.items()}
    average = {path: cut(x) for path, x in flat.average.items()}
    loop = _PieceLoop(
        piece,
        weight_path,
        shape,
        blocks,
        start,
        decision,
        grads,
        unit_leaves,
        in_shards,
    )
    new = loop.run(FlatUpdate(weights, entry, average))
    return FlatUpdate(
        _in_shapes(new.weights, flat.weights),
        _in_shapes(new.entry, flat.entry),
        _in_shapes(new.average, flat.average),
    )


@dataclass(frozen=True)
class _PieceLoop:
    """The loop over the units of a piece, or over the blocks of their rows.

    Attributes:
      piece: what is updated, and how.
      weight_path: of the piece's first parameter; by rows it has no other.
      shape: of that parameter, without the axis of units; in shards, of the shard.
      blocks: how many blocks of rows a unit has.
      start: the index of the first unit.
      decision: see `Learner.decide`.
      grads: the gradients, [units * blocks, ...].
      unit_leaves: old leaves of the optimizer state that are not cut in blocks. All blocks of a unit read these, not
        what the block before wrote.
      in_shards: whether arrays are a device's own shards.
    """

    piece: PieceUpdate
    weight_path: str
    shape: tuple[int, ...]
    blocks: int
    start: jax.Array
    decision: Decision
    grads: Flat
    unit_leaves: Flat
    in_shards: bool

    def run(self, state: FlatUpdate) -> FlatUpdate:
        """Updates `state`, whose leaves are [units * blocks, ...], in all steps."""
        steps = next(iter(self.grads.values())).shape[0]
        ahead = self._taken(state, jnp.int32(0), ahead=True)
        # Where leaves are fetched ahead, the last step comes after the loop, which would fetch some for nothing.
        turns = steps if steps > 1 and not any(ahead) else steps - 1
        if turns:
            state, ahead = jax.lax.fori_loop(0, turns, self._body, (state, ahead))
        if turns < steps:
            state = self._step(jnp.int32(turns), state, ahead)
        return state

    def _body(self, step: jax.Array, carry: tuple[FlatUpdate, FlatBundle]) -> tuple[FlatUpdate, FlatBundle]:
        state, ahead = carry
        # Elsewhere than on CPU the next step's leaves are on their way while this one updates its own.
        if self.piece.writes_first:
            state = self._step(step, state, ahead)
            return state, self._taken(state, step + 1, ahead=True)
        next_ahead = self._taken(state, step + 1, ahead=True)
        return self._step(step, state, ahead), next_ahead

    def _step(
        self,
        step: jax.Array,
        state: FlatUpdate,
        ahead: FlatBundle,
    ) -> FlatUpdate:
        """Updates one unit or block; `ahead` are its leaves that were fetched in the step before."""
        late = self._taken(state, step, ahead=False)
        leaves = FlatBundle(*(x | y for x, y in zip(late, ahead, strict=True)))
        new = self.piece.unit(leaves, self._decision_at(step))
        specs = self.piece.specs
        return FlatUpdate(
            _written(specs.weights, state.weights, new.weights, step, self._stack_index),
            _written(specs.entry, state.entry, new.entry, step, self._entry_index),
            _written(specs.average, state.average, new.average, step, self._stack_index),
        )

    def _taken(
        self,
        state: FlatUpdate,
        step: jax.Array,
        *,
        ahead: bool,
    ) -> FlatBundle:
        """A step's leaves on the device: those that come ahead of their turn, or the others."""
        specs = self.piece.specs
        # A unit's counter is the old one for each block, whatever the blocks before wrote.
        entry = state.entry | self.unit_leaves
        return FlatBundle(
            _fetched(_coming(specs.weights, ahead), state.weights, step, self._stack_index),
            _fetched(_coming(specs.grads, ahead), self.grads, step, self._grads_index),
            _fetched(_coming(specs.entry, ahead), entry, step, self._entry_index),
            _fetched(_coming(specs.average, ahead), state.average, step, self._stack_index),
        )

    def _stack_index(self, path: str, step: jax.Array) -> Any:
        """Where weights, averages and whatever is in host memory have a step's units or rows."""
        return self.start * self.blocks + step

    def _grads_index(self, path: str, step: jax.Array) -> Any:
        """Where gradients have them; those on the device are of one unit, if that alone is updated."""
        if not is_hosted(self.piece.specs.grads[path]):
            return step
        return self._stack_index(path, step)

    def _entry_index(self, path: str, step: jax.Array) -> Any:
        """Where the optimizer state has them; () for a leaf that is no stack and goes whole."""
        if path in self.unit_leaves:
            return self.start + step // self.blocks if self.piece.stacked else ()
        return self._stack_index(path, step)

    def _decision_at(self, step: jax.Array) -> Decision:
        """The decision for the unit and the block that are updated in a step, which noise is drawn by.

        Noise is drawn by layer and by the block's place in its tensor, so that neither units that are updated alone
        nor blocks and shards change it.
        """
        decision = self.decision
        if self.piece.stacked:
            decision = decision._replace(layer=decision.layer + self.start + step // self.blocks)
        if self.piece.rows:
            decision = decision._replace(origin=self._origin(step))
        return decision

    def _origin(self, step: jax.Array) -> Origin:
        """Where a block of the only parameter begins, in the whole tensor of a unit."""
        spec = self.piece.specs.weights[self.weight_path]
        block_rows = self.shape[0] // self.blocks
        first: list[Any] = [step % self.blocks * block_rows]
        first += [0] * len(self.shape[1:])
        axes = spec.mesh_axes[self.piece.stacked :] if self.in_shards else ()
        # In shards, rows are counted from the shard's beginning.
        for dim, names in enumerate(axes):
            offset = jax.lax.axis_index(names) * self.shape[dim] if names else 0
            first[dim] += offset
        return Origin(tuple(first), spec.shape[self.piece.stacked :])


def _in_blocks(
    x: jax.Array,
    *,
    blocks: int,
    stacked: bool,
) -> jax.Array:
    """A leaf [units, rows, ...], or [rows, ...] if not stacked, as [units * blocks, rows of a block, ...]."""
    units = x.shape[0] if stacked else 1
    unit_shape = x.shape[1:] if stacked else x.shape
    # Rows are split within a leading dimension, which moves no byte.
    if blocks == 1:
        return x.reshape(units, *unit_shape)
    return x.reshape(units * blocks, unit_shape[0] // blocks, *unit_shape[1:])


def _in_shapes(leaves: Flat, like: Flat) -> Flat:
    return {path: leaf.reshape(like[path].shape) for path, leaf in leaves.items()}


def _coming(specs: Flat, ahead: bool) -> Flat:
    """The specs of the leaves that are fetched a step ahead, or of the others.

    Ahead come host leaves, but not those of single bytes, which some optimizers have. XLA for TPU (libtpu 0.0.42)
    cannot read these ahead in a loop that writes them: "A cycle is detected while visiting instruction %dynamic_slice".
    """

    def comes_ahead(spec: TensorSpec) -> bool:
        return is_hosted(spec) and spec.dtype.itemsize > 1

    return {path: spec for path, spec in specs.items() if comes_ahead(spec) == ahead}


def _fetched(
    specs: Flat,
    stacks: Flat,
    step: jax.Array,
    index_of: IndexOf,
) -> Flat:
    """A step's units or rows of the stacks that have specs, on the device."""
    leaves = {}
    for path, spec in specs.items():
        index = index_of(path, step)
        is_whole = isinstance(index, tuple)
        leaf = stacks[path] if is_whole else unit_at(stacks[path], index)
        leaves[path] = fetch_leaf(spec, leaf)
    return leaves


def _written(
    specs: Flat,
    stacks: Flat,
    new: Flat,
    step: jax.Array,
    index_of: IndexOf,
) -> Flat:
    """The stacks with a step's new units or rows in them."""
    new_stacks = {}
    for path, leaf in new.items():
        stored_leaf = store_leaf(specs[path], leaf)
        index = index_of(path, step)
        is_whole = isinstance(index, tuple)
        new_stacks[path] = stored_leaf if is_whole else with_unit(stacks[path], stored_leaf, index)
    return new_stacks
