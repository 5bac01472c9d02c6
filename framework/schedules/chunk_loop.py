"""The update of a chunk in a loop over its layers, or over blocks of their rows.

Row blocks are taken inside `shard_map`, from each device's own shard: [L, R, C] is viewed as [L * blocks, R / blocks,
C], which moves no data, and a block is one index of the leading dimension. (TPU can slice host memory only along one
dimension.) Weights and state are the loop carry and are updated in place: a loop that only reads a stack might keep a
copy of all of it in another layout. While one step updates its leaves, the next step's leaves are fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from plimsoll.framework.layout import TensorSpec, fetch_leaf, store_leaf
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.update import slice_layer, write_layer
from plimsoll.framework.optimizers.rounding import BlockOrigin
from plimsoll.framework.schedules.chunk_update import ChunkUpdate, Flat, FlatTrainState, FlatUpdate
from plimsoll.framework.schedules.update_chunks import is_offloaded, num_blocks

# (path, step) -> index of the step's layer or row block in a leaf; () for a leaf that is used whole.
IndexOf = Callable[[str, jax.Array], Any]


def update_in_shards(
    chunk: ChunkUpdate, mesh: Mesh, flat: FlatTrainState, decision: Decision, start: jax.Array
) -> FlatUpdate:
    """Update a chunk in row blocks; each device updates the rows of its own shard.

    Args:
        chunk: the chunk's update.
        mesh: the device mesh of the layout.
        flat, decision, start: see `update_in_loop`.
    """
    parts = [{path: PartitionSpec(*spec.mesh_axes) for path, spec in part.items()} for part in chunk.specs]
    axes = FlatTrainState(*parts)
    replicated = PartitionSpec()
    update = jax.shard_map(
        partial(update_in_loop, chunk, in_shards=True),
        mesh=mesh,
        in_specs=(axes, replicated, replicated),
        out_specs=FlatUpdate(axes.weights, axes.entry, axes.average),
        check_vma=False,
    )
    return update(flat, decision, start)


def update_in_loop(
    chunk: ChunkUpdate, flat: FlatTrainState, decision: Decision, start: jax.Array, *, in_shards: bool = False
) -> FlatUpdate:
    """Update a chunk layer by layer, or row block by row block.

    Args:
        chunk: the chunk's update.
        flat: the chunk's leaves, each in the memory of its spec.
        decision: see `Learner.decide`.
        start: index of the first layer, int32. All layers are updated, or only this one. It must not be a constant:
            XLA would simplify a slice of host memory at a constant index to a slice in two dimensions.
        in_shards: whether arrays are a device's own shards.
    """
    weight_path = next(iter(flat.weights))
    # A chunk that is split by rows has one parameter, whose shape determines the number of blocks.
    shape = flat.weights[weight_path].shape[chunk.stacked :]
    blocks = num_blocks(shape) if chunk.rows else 1
    # In row blocks, state that is not shaped like the parameter (a counter) belongs to the layer: each block reads
    # and writes it.
    layer_leaves = {}
    if chunk.rows:
        layer_leaves = {path: x for path, x in flat.entry.items() if x.shape[chunk.stacked :] != shape}
    split = partial(_split_into_blocks, blocks=blocks, stacked=chunk.stacked)
    weights = {path: split(x) for path, x in flat.weights.items()}
    # The gradients of a single layer have no layer axis.
    split_grad = partial(split, stacked=chunk.stacked and not chunk.single)
    grads = {path: split_grad(x) for path, x in flat.grads.items()}
    entry = {path: x if path in layer_leaves else split(x) for path, x in flat.entry.items()}
    average = {path: split(x) for path, x in flat.average.items()}
    loop = _ChunkLoop(chunk, weight_path, shape, blocks, start, decision, grads, layer_leaves, in_shards)
    new = loop.run(FlatUpdate(weights, entry, average))
    return FlatUpdate(
        _reshape_like(new.weights, flat.weights),
        _reshape_like(new.entry, flat.entry),
        _reshape_like(new.average, flat.average),
    )


@dataclass(frozen=True)
class _ChunkLoop:
    """The loop over the layers of a chunk, or over the blocks of their rows.

    Attributes:
        chunk: the chunk's update.
        weight_path: path of the chunk's first parameter, which is the only one when it is split by rows.
        shape: shape of that parameter without the layer axis; the shard's shape when in shards.
        blocks: number of row blocks per layer.
        start: index of the first layer.
        decision: see `Learner.decide`.
        grads: the gradients, [layers * blocks, ...].
        layer_leaves: old leaves of the optimizer state that are not split into blocks. All blocks of a layer read
            these old values, not the values that the previous block wrote.
        in_shards: whether arrays are a device's own shards.
    """

    chunk: ChunkUpdate
    weight_path: str
    shape: tuple[int, ...]
    blocks: int
    start: jax.Array
    decision: Decision
    grads: Flat
    layer_leaves: Flat
    in_shards: bool

    def run(self, state: FlatUpdate) -> FlatUpdate:
        """Run all steps on `state`, whose leaves are [layers * blocks, ...]."""
        steps = next(iter(self.grads.values())).shape[0]
        prefetched = self._fetch_leaves(state, jnp.int32(0), prefetched=True)
        # With prefetching, the last step runs after the loop: inside the loop it would prefetch leaves that nothing
        # uses.
        num_iterations = steps if steps > 1 and not any(prefetched) else steps - 1
        if num_iterations:
            state, prefetched = jax.lax.fori_loop(0, num_iterations, self._body, (state, prefetched))
        if num_iterations < steps:
            state = self._step(jnp.int32(num_iterations), state, prefetched)
        return state

    def _body(self, step: jax.Array, carry: tuple[FlatUpdate, FlatTrainState]) -> tuple[FlatUpdate, FlatTrainState]:
        state, prefetched = carry
        # Except on CPU, the next step's leaves are fetched while this step updates its own.
        if self.chunk.writes_first:
            state = self._step(step, state, prefetched)
            return state, self._fetch_leaves(state, step + 1, prefetched=True)
        next_prefetched = self._fetch_leaves(state, step + 1, prefetched=True)
        return self._step(step, state, prefetched), next_prefetched

    def _step(self, step: jax.Array, state: FlatUpdate, prefetched: FlatTrainState) -> FlatUpdate:
        """Update one layer or block; `prefetched` holds the leaves that the previous step prefetched."""
        late = self._fetch_leaves(state, step, prefetched=False)
        leaves = FlatTrainState(*(x | y for x, y in zip(late, prefetched, strict=True)))
        new = self.chunk.update_step(leaves, self._decision_at(step))
        specs = self.chunk.specs
        return FlatUpdate(
            _write_step(specs.weights, state.weights, new.weights, step, self._stack_index),
            _write_step(specs.entry, state.entry, new.entry, step, self._entry_index),
            _write_step(specs.average, state.average, new.average, step, self._stack_index),
        )

    def _fetch_leaves(self, state: FlatUpdate, step: jax.Array, *, prefetched: bool) -> FlatTrainState:
        """Return a step's leaves on the device: the prefetched ones if `prefetched`, otherwise the others."""
        specs = self.chunk.specs
        # Each block uses the layer's old counter, whatever earlier blocks wrote.
        entry = state.entry | self.layer_leaves
        return FlatTrainState(
            _fetch_step(_select_prefetched(specs.weights, prefetched), state.weights, step, self._stack_index),
            _fetch_step(_select_prefetched(specs.grads, prefetched), self.grads, step, self._grads_index),
            _fetch_step(_select_prefetched(specs.entry, prefetched), entry, step, self._entry_index),
            _fetch_step(_select_prefetched(specs.average, prefetched), state.average, step, self._stack_index),
        )

    def _stack_index(self, path: str, step: jax.Array) -> Any:
        """Return the index of a step's layer or rows in weights, averages and all offloaded leaves."""
        return self.start * self.blocks + step

    def _grads_index(self, path: str, step: jax.Array) -> Any:
        """Return the index in the gradients. On the device they hold only one layer if only one layer is updated."""
        if not is_offloaded(self.chunk.specs.grads[path]):
            return step
        return self._stack_index(path, step)

    def _entry_index(self, path: str, step: jax.Array) -> Any:
        """Return the index in the optimizer state; () for a leaf that is not stacked and is used whole."""
        if path in self.layer_leaves:
            return self.start + step // self.blocks if self.chunk.stacked else ()
        return self._stack_index(path, step)

    def _decision_at(self, step: jax.Array) -> Decision:
        """Return the decision for the layer and block of a step.

        Noise is drawn by layer and by the block's position in its tensor, so that the noise does not depend on
        whether layers are updated separately, nor on blocks or shards.
        """
        decision = self.decision
        if self.chunk.stacked:
            decision = replace(decision, layer=decision.layer + self.start + step // self.blocks)
        if self.chunk.rows:
            decision = replace(decision, origin=self._origin(step))
        return decision

    def _origin(self, step: jax.Array) -> BlockOrigin:
        """Return the position of a row block of the only parameter in a layer's whole tensor."""
        spec = self.chunk.specs.weights[self.weight_path]
        block_rows = self.shape[0] // self.blocks
        first: list[Any] = [step % self.blocks * block_rows]
        first += [0] * len(self.shape[1:])
        axes = spec.mesh_axes[self.chunk.stacked :] if self.in_shards else ()
        # In shards, indices start at the shard's offset in the tensor.
        for dim, names in enumerate(axes):
            offset = jax.lax.axis_index(names) * self.shape[dim] if names else 0
            first[dim] += offset
        return BlockOrigin(tuple(first), spec.shape[self.chunk.stacked :])


def _split_into_blocks(x: jax.Array, *, blocks: int, stacked: bool) -> jax.Array:
    """View a leaf [layers, rows, ...], or [rows, ...] if not stacked, as [layers * blocks, rows per block, ...]."""
    num_layers = x.shape[0] if stacked else 1
    layer_shape = x.shape[1:] if stacked else x.shape
    # Splitting a leading dimension moves no data.
    if blocks == 1:
        return x.reshape(num_layers, *layer_shape)
    return x.reshape(num_layers * blocks, layer_shape[0] // blocks, *layer_shape[1:])


def _reshape_like(leaves: Flat, like: Flat) -> Flat:
    """Return the leaves in the shapes of the leaves `like`; undoes `_split_into_blocks`."""
    return {path: leaf.reshape(like[path].shape) for path, leaf in leaves.items()}


def _select_prefetched(specs: Flat, prefetched: bool) -> Flat:
    """Return the specs of the leaves that are fetched one step ahead, or of the others.

    Offloaded leaves are fetched ahead, except those with one-byte elements, which some optimizers have. XLA for TPU
    (libtpu 0.0.42) cannot prefetch these in a loop that writes them: "A cycle is detected while visiting instruction
    %dynamic_slice".
    """

    def is_prefetched(spec: TensorSpec) -> bool:
        return is_offloaded(spec) and spec.dtype.itemsize > 1

    return {path: spec for path, spec in specs.items() if is_prefetched(spec) == prefetched}


def _fetch_step(specs: Flat, stacks: Flat, step: jax.Array, index_of: IndexOf) -> Flat:
    """Fetch a step's layer or rows to the device, for all stacks that have specs."""
    leaves = {}
    for path, spec in specs.items():
        index = index_of(path, step)
        is_whole = isinstance(index, tuple)
        leaf = stacks[path] if is_whole else slice_layer(stacks[path], index)
        leaves[path] = fetch_leaf(spec, leaf)
    return leaves


def _write_step(specs: Flat, stacks: Flat, new: Flat, step: jax.Array, index_of: IndexOf) -> Flat:
    """Write a step's new layer or rows into the stacks."""
    new_stacks = {}
    for path, leaf in new.items():
        stored_leaf = store_leaf(specs[path], leaf)
        index = index_of(path, step)
        is_whole = isinstance(index, tuple)
        new_stacks[path] = stored_leaf if is_whole else write_layer(stacks[path], stored_leaf, index)
    return new_stacks
