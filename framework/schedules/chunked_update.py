"""Updates a parameter group chunk by chunk; of its offloaded state, only two chunks are on the device.

`update_chunks.py` splits a group into chunks. `chunk_update.py` and `chunk_loop.py` update a single chunk. This file
runs the chunks one after the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from plimsoll.framework.layout import Nested, flatten
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import ParamGroup
from plimsoll.framework.learner.state import unflatten_like
from plimsoll.framework.learner.update import LayerTrainState, LayerUpdate
from plimsoll.framework.schedules.chunk_loop import update_in_loop, update_in_shards
from plimsoll.framework.schedules.chunk_update import ChunkUpdate, Flat, FlatTrainState, FlatUpdate
from plimsoll.framework.schedules.update_chunks import UpdateChunk, split_into_chunks


class _PreparedChunk(NamedTuple):
    """The update of a chunk, and the chunk's leaves."""

    update: ChunkUpdate
    leaves: FlatTrainState


def update_group(
    learner: Learner,
    mesh: Mesh,
    group: ParamGroup,
    train_state: LayerTrainState,
    specs: LayerTrainState,
    decision: Decision,
    index: jax.Array | None = None,
) -> LayerUpdate:
    """Update a group, with the same numbers as `update_all_layers`.

    Args:
        learner, mesh, group: the learner, the device mesh, and the parameter group to update.
        train_state: weights, gradients, optimizer state and averages, each in the memory of its spec.
        specs: TensorSpecs in the structure of `train_state`.
        decision: see `Learner.decide`.
        index: index of the only layer to update; the gradients are then that layer's only. None updates all layers.
    """
    # Every chunk starts from the old counters; chunks that share a counter all write the same value.
    old, flat_specs = (
        FlatTrainState(flatten(trees.weights), flatten(trees.grads), flatten(trees.entry), flatten(trees.average))
        for trees in (train_state, specs)
    )
    updated = FlatUpdate(old.weights, old.entry, old.average)
    # New weights of the chunks that were updated in a loop so far.
    updated_weights: list[Flat] = []
    for chunk in split_into_chunks(learner, group, specs):
        prepared = _prepare_chunk(
            learner, mesh, group, chunk, train_state.entry, old, flat_specs, single=index is not None
        )
        if chunk.by == "all" and index is None:
            chunk_group = replace(group, paths=chunk.paths)
            new = prepared.update.update_at_once(chunk_group, prepared.leaves, decision)
        else:
            last_but_one = updated_weights[-2] if len(updated_weights) > 1 else {}
            new, last_but_one = _update_in_loop(prepared, mesh, decision, index, last_but_one)
            updated = updated._replace(weights=updated.weights | last_but_one)
            updated_weights.append(new.weights)
        updated = FlatUpdate(*(leaves | new_leaves for leaves, new_leaves in zip(updated, new, strict=True)))
    return LayerUpdate(
        unflatten_like(train_state.weights, updated.weights),
        unflatten_like(train_state.entry, updated.entry),
        unflatten_like(train_state.average, updated.average),
    )


def _update_in_loop(
    prepared: _PreparedChunk, mesh: Mesh, decision: Decision, index: jax.Array | None, last_but_one: Flat
) -> tuple[FlatUpdate, Flat]:
    """Update a chunk layer by layer, or in row blocks: (new values, `last_but_one`).

    Args:
        prepared: the chunk.
        mesh: the device mesh of the layout.
        decision, index: see `update_group`.
        last_but_one: new weights of the chunk before the previous one; {} if there is none.
    """
    update, leaves = prepared
    # The compiler would fetch everything as early as possible. State is fetched at this index, which the barrier
    # makes available only when its gradients are ready and the chunk before the previous one is done.
    start = jnp.int32(0) if index is None else index
    device_grads = update.select_device_grads(leaves.grads)
    start, (device_grads, last_but_one) = jax.lax.optimization_barrier((start, (device_grads, last_but_one)))
    leaves = leaves._replace(grads=leaves.grads | device_grads)
    # Row blocks are taken from each device's own rows; the partitioner would all-gather the leaf to slice it.
    if update.rows and mesh.size > 1:
        new = update_in_shards(update, mesh, leaves, decision, start)
    else:
        new = update_in_loop(update, leaves, decision, start)
    return new, last_but_one


def _prepare_chunk(
    learner: Learner,
    mesh: Mesh,
    group: ParamGroup,
    chunk: UpdateChunk,
    entry: Nested,
    old: FlatTrainState,
    specs: FlatTrainState,
    *,
    single: bool,
) -> _PreparedChunk:
    """Return the update of a chunk, and the chunk's leaves.

    Args:
        learner, mesh, group: the learner, the device mesh, and the parameter group.
        chunk: a chunk of the group.
        entry: the group's optimizer state.
        old, specs: the group's leaves, and their TensorSpecs.
        single: whether only one layer is updated.
    """
    chunk_entry = learner.get_group_state(group).part(chunk.paths, entry)
    averaged_paths = tuple(path for path in chunk.paths if path in old.average)
    paths = chunk.paths, chunk.paths, tuple(flatten(chunk_entry)), averaged_paths
    update = ChunkUpdate(
        update=learner.make_layer_update(group),
        entry_structure=jax.tree.structure(chunk_entry),
        specs=_select_leaves(specs, paths),
        stacked=group.length is not None,
        rows=chunk.by == "rows",
        single=single,
        writes_first=mesh.devices.flat[0].platform == "cpu",
    )
    return _PreparedChunk(update, _select_leaves(old, paths))


def _select_leaves(flat: FlatTrainState, paths: tuple[tuple[str, ...], ...]) -> FlatTrainState:
    """Select leaves by path.

    Args:
        flat: weights, gradients, optimizer state and averages, by path.
        paths: the paths to select from each of these, in the same order.
    """
    parts = zip(flat, paths, strict=True)
    return FlatTrainState(*({path: leaves[path] for path in part_paths} for leaves, part_paths in parts))
