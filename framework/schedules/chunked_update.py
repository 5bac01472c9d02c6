"""Updates a parameter group chunk by chunk; of its offloaded state, only two chunks are on the device.

A chunk is the smallest part that the optimizer's update locality allows: rows of one tensor if the update is
elementwise, one tensor if its elements depend on each other, otherwise a whole layer. Small parameters share one
chunk. Chunks are updated one after the other: `split_into_chunks` makes them, `update_group` runs them, and
`_ChunkLoop` updates one of them layer by layer, or row block by row block.

Row blocks are taken inside `shard_map`, from each device's own shard: [L, R, C] is viewed as [L * blocks, R / blocks,
C], which moves no data, and a block is one index of the leading dimension. (TPU can slice host memory only along one
dimension.) Weights and state are the loop carry and are updated in place: a loop that only reads a stack might keep a
copy of all of it in another layout. While one step updates its leaves, the next step's leaves are fetched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from plimsoll.framework.layout import (
    Nested,
    OptStateSpec,
    StateLayout,
    TensorSpec,
    fetch_leaf,
    flatten,
    store_leaf,
    unflatten,
)
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.group_optimizer import unflatten_like
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import ParamGroup
from plimsoll.framework.learner.update import (
    GroupLeaves,
    LayerTrainState,
    LayerUpdate,
    LayerUpdateFn,
    Leaf,
    slice_layer,
    update_all_layers,
    write_layer,
)
from plimsoll.framework.optimizers.rounding import BlockOrigin
from plimsoll.framework.optimizers.update_locality import UpdateLocality

# Maximum number of elements in a row block.
BLOCK = 1 << 21
# A layer's tensor below this size in bytes is not worth its own loop.
_SMALL = 1 << 20
# The rows of a block are a multiple of this: the tile of the narrowest dtype.
_ROWS = 32

Arrays = dict[str, jax.Array]  # leaves by path

# --- chunks of a group -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateChunk:
    """A chunk of a parameter group.

    Attributes:
        paths: paths of its parameters within the stage.
        by: "all" updates all layers vmapped, "layer" one layer after the other, "rows" one row block after the other.
    """

    paths: tuple[str, ...]
    by: Literal["all", "layer", "rows"]


def split_into_chunks(update: LayerUpdateFn, specs: GroupLeaves[TensorSpec]) -> list[UpdateChunk]:
    """Split a group into chunks.

    Args:
        update: the update of one layer of the group.
        specs: specs of the weights, gradients, optimizer state and averages to update.
    """
    group = update.optimizer.group
    update_locality = update.measure_locality()
    # Some optimizers name their state differently when they see only part of their parameters.
    if update_locality == "layer" or not update.optimizer.separable():
        return [UpdateChunk(group.paths, "layer")]
    # Offloaded leaves always go through a loop; otherwise all of them would be on the device at the same time.
    offloaded_paths = {
        spec.owner for spec in specs.entry.values() if isinstance(spec, OptStateSpec) and spec.is_offloaded
    }
    for part in (specs.weights, specs.grads, specs.average):
        offloaded_paths |= {path for path, spec in part.items() if spec.is_offloaded}
    layer_specs: dict[str, TensorSpec] = flatten(update.optimizer.layer_specs)
    small_paths = []
    large_chunks = []
    for path in group.paths:
        layer_spec = layer_specs[path]
        # Vectors are never worth their own loop.
        is_large = len(layer_spec.shape) > 1 and layer_spec.num_bytes >= _SMALL
        if path in offloaded_paths or is_large:
            in_rows = _splits_by_rows(specs.weights[path], update_locality, is_stacked=group.length is not None)
            large_chunks.append(UpdateChunk((path,), "rows" if in_rows else "layer"))
        else:
            small_paths.append(path)
    small_chunks = [UpdateChunk(tuple(small_paths), "all")] if small_paths else []
    return small_chunks + large_chunks


def _splits_by_rows(spec: TensorSpec, update_locality: UpdateLocality, *, is_stacked: bool) -> bool:
    """Return whether a tensor is updated in row blocks.

    Args:
        spec: spec of the parameter.
        update_locality: update locality of the optimizer.
        is_stacked: whether its axes are [layers, rows, columns] instead of [rows, columns].
    """
    column_axis = 2 if is_stacked else 1
    # Blocks are taken inside `shard_map`, where a row that is sharded over devices is incomplete.
    row_is_whole = not any(spec.mesh_axes[column_axis:])
    return update_locality == "element" or (update_locality == "row" and row_is_whole)


def num_blocks(shape: tuple[int, ...]) -> int:
    """Return the smallest number of equal row blocks of at most BLOCK elements; 1 if rows do not divide evenly."""
    rows = shape[0]
    # Rounded up.
    fewest = -(-math.prod(shape) // BLOCK)
    if fewest <= 1:
        return 1
    for blocks in range(fewest, rows // _ROWS + 1):
        if rows % blocks == 0 and rows // blocks % _ROWS == 0:
            return blocks
    return 1


# --- the update of a group -------------------------------------------------------------------------------------------


def train_state_specs(layout: StateLayout, learner: Learner, group: ParamGroup, gradients: Nested) -> LayerTrainState:
    """Return the specs of a group's weights, gradients, optimizer state and averages.

    Args:
        layout, learner, group: the layout of the training state, the learner, and the parameter group.
        gradients: specs of the group's gradients, as the layout shards them or as the learner declares them.
    """
    specs = layout.specs
    weights = learner.select(specs.parameter, group)
    # Optimizer state is already keyed by stage and group; the others are selected from trees of all parameters.
    entry = specs.optimizer[group.stage][group.label]
    average = learner.select(specs.ema, group) if specs.ema else {}
    return LayerTrainState(weights, jax.tree.map(layout.fit, gradients), entry, average)


def update_group(
    update: LayerUpdateFn,
    mesh: Mesh,
    train_state: LayerTrainState,
    specs: LayerTrainState,
    decision: Decision,
    index: jax.Array | None = None,
) -> LayerUpdate:
    """Update a group, with the same numbers as `update_all_layers`.

    Args:
        update: the update of one layer of the group.
        mesh: the device mesh.
        train_state: weights, gradients, optimizer state and averages, each in the memory of its spec.
        specs: TensorSpecs in the structure of `train_state`.
        decision: see `Learner.decide`.
        index: index of the only layer to update; the gradients are then that layer's only. None updates all layers.
    """
    # Every chunk starts from the old counters; chunks that share a counter all write the same value.
    old: GroupLeaves[jax.Array] = GroupLeaves.from_train_state(train_state)
    flat_specs: GroupLeaves[TensorSpec] = GroupLeaves.from_train_state(specs)
    weights = old.weights
    entry = old.entry
    average = old.average
    # New weights of the chunks that were updated in a loop so far.
    looped_weights: list[Arrays] = []
    for chunk in split_into_chunks(update, flat_specs):
        chunk_entry = update.optimizer.part(chunk.paths, train_state.entry)
        chunk_update = ChunkUpdate(
            update=update,
            entry=chunk_entry,
            specs=_select_leaves(flat_specs, chunk.paths, tuple(flatten(chunk_entry))),
            stacked=update.optimizer.group.length is not None,
            rows=chunk.by == "rows",
            single=index is not None,
            writes_first=mesh.devices.flat[0].platform == "cpu",
        )
        leaves = _select_leaves(old, chunk.paths, tuple(chunk_update.specs.entry))
        if chunk.by == "all" and index is None:
            new = chunk_update.apply(partial(update_all_layers, update), leaves, decision)
        else:
            # Double buffering: a chunk is fetched while the previous one is updated, and no earlier. The compiler
            # would fetch everything as early as possible. State is fetched at the index `start`, which the barrier
            # makes available only when the chunk's gradients are ready and the chunk before the previous one is done.
            start = jnp.int32(0) if index is None else index
            done = looped_weights[-2] if len(looped_weights) > 1 else {}
            grad_specs = chunk_update.specs.grads
            device_grads = {path: x for path, x in leaves.grads.items() if not grad_specs[path].is_offloaded}
            start, (device_grads, done) = jax.lax.optimization_barrier((start, (device_grads, done)))
            weights = weights | done
            leaves = replace(leaves, grads=leaves.grads | device_grads)
            # Row blocks are taken from each device's own rows; the partitioner would all-gather the leaf to slice it.
            if chunk_update.rows and mesh.size > 1:
                new = _update_in_shards(chunk_update, mesh, leaves, decision, start)
            else:
                new = _ChunkLoop(chunk_update, leaves, decision, start).run()
            looped_weights.append(new.weights)
        weights = weights | new.weights
        entry = entry | new.entry
        average = average | new.average
    return LayerUpdate(
        weights=unflatten_like(train_state.weights, weights),
        entry=unflatten_like(train_state.entry, entry),
        average=unflatten_like(train_state.average, average),
    )


def _select_leaves(
    leaves: GroupLeaves[Leaf], paths: tuple[str, ...], entry_paths: tuple[str, ...]
) -> GroupLeaves[Leaf]:
    """Select the leaves of some parameters.

    Args:
        leaves: the leaves of a group.
        paths: paths of the parameters.
        entry_paths: paths of their optimizer state.
    """
    return GroupLeaves(
        weights={path: leaves.weights[path] for path in paths},
        grads={path: leaves.grads[path] for path in paths},
        entry={path: leaves.entry[path] for path in entry_paths},
        average={path: leaves.average[path] for path in paths if path in leaves.average},
    )


@dataclass(frozen=True)
class ChunkUpdate:
    """The update of one chunk.

    Attributes:
        update: the update of one layer.
        entry: the chunk's optimizer state before the update, in its own structure.
        specs: specs of the chunk's leaves.
        stacked: whether leaves have a leading layer axis.
        rows: whether the chunk is updated in row blocks.
        single: whether only one layer is updated; its gradients then have no layer axis.
        writes_first: whether a step's results are written before the next step's leaves are read. XLA for CPU would
            copy a stack that is read while it is written.
    """

    update: LayerUpdateFn
    entry: Nested
    specs: GroupLeaves[TensorSpec]
    stacked: bool
    rows: bool
    single: bool
    writes_first: bool

    def apply(
        self,
        update: Callable[[LayerTrainState, Decision], LayerUpdate],
        leaves: GroupLeaves[jax.Array],
        decision: Decision,
    ) -> GroupLeaves[jax.Array]:
        """Call `update` with nested trees; return the new leaves, without gradients."""
        entry = unflatten_like(self.entry, leaves.entry)
        # Optimizer state keeps its own structure (optax's NamedTuples); the others are nested dicts.
        train_state = LayerTrainState(
            unflatten(leaves.weights), unflatten(leaves.grads), entry, unflatten(leaves.average)
        )
        new = update(train_state, decision)
        return GroupLeaves(flatten(new.weights), {}, flatten(new.entry), flatten(new.average))


# --- the update of a chunk in a loop ---------------------------------------------------------------------------------


def _update_in_shards(
    chunk: ChunkUpdate, mesh: Mesh, leaves: GroupLeaves[jax.Array], decision: Decision, start: jax.Array
) -> GroupLeaves[jax.Array]:
    """Update a chunk in row blocks; each device updates the rows of its own shard.

    Args:
        chunk: the chunk's update.
        mesh: the device mesh of the layout.
        leaves, decision, start: see `_ChunkLoop`.
    """
    axes = jax.tree.map(lambda spec: PartitionSpec(*spec.mesh_axes), chunk.specs)
    replicated = PartitionSpec()

    def update_shard(leaves: GroupLeaves[jax.Array], decision: Decision, start: jax.Array) -> GroupLeaves[jax.Array]:
        return _ChunkLoop(chunk, leaves, decision, start, in_shards=True).run()

    update_shards = jax.shard_map(
        update_shard,
        mesh=mesh,
        in_specs=(axes, replicated, replicated),
        out_specs=replace(axes, grads={}),
        check_vma=False,
    )
    return update_shards(leaves, decision, start)


class _ChunkLoop:
    """The update of a chunk layer by layer, or row block by row block.

    Args:
        chunk: the chunk's update.
        leaves: the chunk's leaves, each in the memory of its spec.
        decision: see `Learner.decide`.
        start: index of the first layer, int32. All layers are updated, or only this one. It must not be a constant:
            XLA would simplify a slice of host memory at a constant index to a slice in two dimensions.
        in_shards: whether arrays are a device's own shards.
    """

    def __init__(
        self,
        chunk: ChunkUpdate,
        leaves: GroupLeaves[jax.Array],
        decision: Decision,
        start: jax.Array,
        *,
        in_shards: bool = False,
    ):
        self.chunk = chunk
        self.leaves = leaves
        self.decision = decision
        self.start = start
        self.in_shards = in_shards
        # A chunk that is split by rows has one parameter, whose shape determines the number of blocks; in shards, it is
        # the shape of the shard.
        self.weight_path = next(iter(leaves.weights))
        self.shape = leaves.weights[self.weight_path].shape[chunk.stacked :]
        self.blocks = num_blocks(self.shape) if chunk.rows else 1
        # In row blocks, state that is not shaped like the parameter (a counter) belongs to the layer. All blocks of a
        # layer read its old value, not the one that the previous block wrote.
        self.layer_leaves: Arrays = {}
        if chunk.rows:
            self.layer_leaves = {p: x for p, x in leaves.entry.items() if x.shape[chunk.stacked :] != self.shape}
        # All leaves as [layers * blocks, ...], except those of `layer_leaves`. The gradients of a single layer have no
        # layer axis.
        stacked = chunk.stacked
        weights = {path: self._split(x, stacked=stacked) for path, x in leaves.weights.items()}
        grads = {path: self._split(x, stacked=stacked and not chunk.single) for path, x in leaves.grads.items()}
        entry = {}
        for path, x in leaves.entry.items():
            entry[path] = x if path in self.layer_leaves else self._split(x, stacked=stacked)
        average = {path: self._split(x, stacked=stacked) for path, x in leaves.average.items()}
        self.blocked_leaves: GroupLeaves[jax.Array] = GroupLeaves(weights, grads, entry, average)

    def run(self) -> GroupLeaves[jax.Array]:
        """Update all layers or blocks; return the chunk's new leaves, without gradients."""
        state = replace(self.blocked_leaves, grads={})
        steps = next(iter(self.blocked_leaves.grads.values())).shape[0]
        prefetched = self._fetch_leaves(state, jnp.int32(0), prefetched=True)
        # With prefetching, the last step runs after the loop: inside the loop it would prefetch leaves that nothing
        # uses.
        num_iterations = steps if steps > 1 and not jax.tree.leaves(prefetched) else steps - 1
        if num_iterations:
            state, prefetched = jax.lax.fori_loop(0, num_iterations, self._body, (state, prefetched))
        if num_iterations < steps:
            state = self._step(jnp.int32(num_iterations), state, prefetched)
        joined: dict[str, Arrays] = {}
        for part, new_leaves in state.parts.items():
            joined[part] = {path: x.reshape(self.leaves.parts[part][path].shape) for path, x in new_leaves.items()}
        return GroupLeaves(**joined)

    def _split(self, x: jax.Array, *, stacked: bool) -> jax.Array:
        """View a leaf [layers, rows, ...], or [rows, ...] if not stacked, as [layers * blocks, rows per block, ...]."""
        num_layers = x.shape[0] if stacked else 1
        layer_shape = x.shape[1:] if stacked else x.shape
        # Splitting a leading dimension moves no data.
        if self.blocks == 1:
            return x.reshape(num_layers, *layer_shape)
        return x.reshape(num_layers * self.blocks, layer_shape[0] // self.blocks, *layer_shape[1:])

    def _body(
        self, step: jax.Array, carry: tuple[GroupLeaves[jax.Array], GroupLeaves[jax.Array]]
    ) -> tuple[GroupLeaves[jax.Array], GroupLeaves[jax.Array]]:
        state, prefetched = carry
        # Except on CPU, the next step's leaves are fetched while this step updates its own.
        if self.chunk.writes_first:
            state = self._step(step, state, prefetched)
            return state, self._fetch_leaves(state, step + 1, prefetched=True)
        next_prefetched = self._fetch_leaves(state, step + 1, prefetched=True)
        return self._step(step, state, prefetched), next_prefetched

    def _step(
        self, step: jax.Array, state: GroupLeaves[jax.Array], prefetched: GroupLeaves[jax.Array]
    ) -> GroupLeaves[jax.Array]:
        """Update one layer or block; `prefetched` holds the leaves that the previous step prefetched."""
        late = self._fetch_leaves(state, step, prefetched=False)
        leaves = GroupLeaves(**{part: x | prefetched.parts[part] for part, x in late.parts.items()})
        decision = self._decision_at(step)
        new = self.chunk.apply(self.chunk.update, leaves, decision)
        written: dict[str, Arrays] = {}
        for part, new_leaves in new.parts.items():
            specs = self.chunk.specs.parts[part]
            stacks = state.parts[part]
            written[part] = {}
            for path, leaf in new_leaves.items():
                stored_leaf = store_leaf(specs[path], leaf)
                index = self._index(part, path, step)
                written[part][path] = stored_leaf if index is None else write_layer(stacks[path], stored_leaf, index)
        return GroupLeaves(**written)

    def _fetch_leaves(
        self, state: GroupLeaves[jax.Array], step: jax.Array, *, prefetched: bool
    ) -> GroupLeaves[jax.Array]:
        """Return a step's leaves on the device: the prefetched ones if `prefetched`, otherwise the others.

        Offloaded leaves are fetched one step ahead, except those with one-byte elements, which some optimizers have.
        XLA for TPU (libtpu 0.0.42) cannot prefetch these in a loop that writes them: "A cycle is detected while
        visiting instruction %dynamic_slice".
        """
        # Each block uses the layer's old counter, whatever earlier blocks wrote.
        sources = replace(state, grads=self.blocked_leaves.grads, entry=state.entry | self.layer_leaves)
        fetched: dict[str, Arrays] = {}
        for part, specs in self.chunk.specs.parts.items():
            fetched[part] = {}
            for path, spec in specs.items():
                is_prefetched = spec.is_offloaded and spec.dtype.itemsize > 1
                if is_prefetched != prefetched:
                    continue
                index = self._index(part, path, step)
                stack = sources.parts[part][path]
                fetched[part][path] = fetch_leaf(spec, stack if index is None else slice_layer(stack, index))
        return GroupLeaves(**fetched)

    def _index(self, part: str, path: str, step: jax.Array) -> jax.Array | None:
        """Return the index of a step's layer or rows in a leaf; None for a leaf that is not stacked and is used whole.

        Args:
            part: the leaf's part of `GroupLeaves`.
            path: the leaf's path.
            step: the step.
        """
        # On the device there are only the gradients of one layer if only one layer is updated.
        if part == "grads" and not self.chunk.specs.grads[path].is_offloaded:
            return step
        if part == "entry" and path in self.layer_leaves:
            return self.start + step // self.blocks if self.chunk.stacked else None
        return self.start * self.blocks + step

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
        first: list[jax.Array | int] = [step % self.blocks * block_rows]
        first += [0] * len(self.shape[1:])
        axes = spec.mesh_axes[self.chunk.stacked :] if self.in_shards else ()
        # In shards, indices start at the shard's offset in the tensor.
        for dim, names in enumerate(axes):
            offset = jax.lax.axis_index(names) * self.shape[dim] if names else 0
            first[dim] += offset
        return BlockOrigin(tuple(first), spec.shape[self.chunk.stacked :])
