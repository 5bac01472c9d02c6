"""An update that goes through a group's weights and state chunk by chunk; only chunks are on the device.

`division.py` splits a group into chunks; `piece_update.py` and `piece_loop.py` update a single chunk. This file runs
the chunks one after the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from plimsoll.framework.layout import Nested, flatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.units import (
    Bundle,
    Decision,
    Group,
    Update,
    in_structure,
)
from plimsoll.framework.schedules.division import Piece, pieces_of
from plimsoll.framework.schedules.piece_loop import update_in_loop, update_in_shards
from plimsoll.framework.schedules.piece_update import Flat, FlatBundle, FlatUpdate, PieceUpdate


class _PreparedPiece(NamedTuple):
    """The update of a chunk, and the chunk's leaves."""

    update: PieceUpdate
    leaves: FlatBundle


def update_group(
    learner: Learner,
    mesh: Mesh,
    group: Group,
    bundle: Bundle,
    specs: Bundle,
    decision: Decision,
    index: jax.Array | None = None,
) -> Update:
    """Update a group, with the same numbers as `all_units`.

    Args:
        learner, mesh, group: the learner, the device mesh, and the parameter group to update.
        bundle: weights, gradients, optimizer state and averages, each in the memory of its spec.
        specs: TensorSpecs in the structure of the bundle.
        decision: see `Learner.decide`.
        index: index of the only layer to update; the gradients are then that layer's only. None updates all layers.
    """
    old_weights, _, old_entry, old_average = bundle
    # Every chunk starts from the old counters; chunks that share a counter all write the same value.
    old = FlatBundle(*(flatten(part) for part in bundle))
    flat_specs = FlatBundle(*(flatten(part) for part in specs))
    updated = FlatUpdate(old.weights, old.entry, old.average)
    # New weights of the chunks that were updated in a loop so far.
    updated_weights: list[Flat] = []
    for piece in pieces_of(learner, group, specs):
        prepared = _prepare_chunk(
            learner,
            mesh,
            group,
            piece,
            old_entry,
            old,
            flat_specs,
            single=index is not None,
        )
        if piece.by == "all" and index is None:
            group_of_piece = replace(group, paths=piece.paths)
            new = prepared.update.at_once(group_of_piece, prepared.leaves, decision)
        else:
            last_but_one = updated_weights[-2] if len(updated_weights) > 1 else {}
            new, last_but_one = _in_turn(prepared, mesh, decision, index, last_but_one)
            updated = updated._replace(weights=updated.weights | last_but_one)
            updated_weights.append(new.weights)
        updated = FlatUpdate(*(leaves | new_leaves for leaves, new_leaves in zip(updated, new, strict=True)))
    new_weights = in_structure(old_weights, updated.weights)
    new_entry = in_structure(old_entry, updated.entry)
    new_average = in_structure(old_average, updated.average)
    return new_weights, new_entry, new_average


def _in_turn(
    prepared: _PreparedPiece,
    mesh: Mesh,
    decision: Decision,
    index: jax.Array | None,
    last_but_one: Flat,
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
    device_grads = update.unhosted(leaves.grads)
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
    group: Group,
    piece: Piece,
    entry: Nested,
    old: FlatBundle,
    specs: FlatBundle,
    *,
    single: bool,
) -> _PreparedPiece:
    """Return the update of a chunk, and the chunk's leaves.

    Args:
        learner, mesh, group: the learner, the device mesh, and the parameter group.
        piece: a chunk of the group.
        entry: the group's optimizer state.
        old, specs: the group's leaves, and their TensorSpecs.
        single: whether only one layer is updated.
    """
    piece_entry = learner.state_of(group).part(piece.paths, entry)
    averaged_paths = tuple(path for path in piece.paths if path in old.average)
    paths = piece.paths, piece.paths, tuple(flatten(piece_entry)), averaged_paths
    update = PieceUpdate(
        update=learner.unit_update(group),
        entry_structure=jax.tree.structure(piece_entry),
        specs=_select_leaves(specs, paths),
        stacked=group.length is not None,
        rows=piece.by == "rows",
        single=single,
        writes_first=mesh.devices.flat[0].platform == "cpu",
    )
    return _PreparedPiece(update, _select_leaves(old, paths))


def _select_leaves(flat: FlatBundle, paths: tuple[tuple[str, ...], ...]) -> FlatBundle:
    """Select the leaves of a bundle at the paths given for each of its parts."""
    parts = zip(flat, paths, strict=True)
    return FlatBundle(*({path: leaves[path] for path in part_paths} for leaves, part_paths in parts))
