"""An update that goes through a group's weights and state a piece at a time; only pieces come to the device.

What a piece is, `division.py` says, and how one is updated, `piece_update.py` and `piece_loop.py`; here pieces take
their turns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from framework.layout import Nested, flatten
from framework.learner.learner import Learner
from framework.learner.units import (
    Bundle,
    Decision,
    Group,
    Update,
    in_structure,
)
from framework.schedules.division import Piece, pieces_of
from framework.schedules.piece_loop import update_in_loop, update_in_shards
from framework.schedules.piece_update import Flat, FlatBundle, FlatUpdate, PieceUpdate


class _PreparedPiece(NamedTuple):
    """The update of a piece, and its leaves."""

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
    """Updates a group, with the numbers of `all_units`.

    Args:
        learner, mesh, group: whose.
        bundle: weights, gradients, optimizer state and averages, each where `specs` says.
        specs: TensorSpecs in the structure of the bundle.
        decision: see `Learner.decide`.
        index: update this unit only, the gradients being those of this unit alone; None means all units.
    """
    old_weights, _, old_entry, old_average = bundle
    # Every piece starts from the old counters: those that pieces share, each writes with the same value.
    old = FlatBundle(*(flatten(part) for part in bundle))
    flat_specs = FlatBundle(*(flatten(part) for part in specs))
    updated = FlatUpdate(old.weights, old.entry, old.average)
    # The new weights of the pieces so far that were updated in a loop.
    updated_weights: list[Flat] = []
    for piece in pieces_of(learner, group, specs):
        prepared = _prepared(
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
    """Updates a piece unit by unit, or by rows: (what is new, `last_but_one`).

    Args:
        prepared: the piece.
        mesh: of the layout.
        decision, index: see `update_group`.
        last_but_one: the new weights of the last piece but one; {} for none.
    """
    update, leaves = prepared
    # The compiler would fetch everything as early as it can. State is fetched by this index: not before
    # its gradients are there, nor before the last piece but one is done.
    start = jnp.int32(0) if index is None else index
    device_grads = update.unhosted(leaves.grads)
    start, (device_grads, last_but_one) = jax.lax.optimization_barrier((start, (device_grads, last_but_one)))
    leaves = leaves._replace(grads=leaves.grads | device_grads)
    # Blocks are those of a device's own rows; the partitioner would gather the leaf to slice it.
    if update.rows and mesh.size > 1:
        new = update_in_shards(update, mesh, leaves, decision, start)
    else:
        new = update_in_loop(update, leaves, decision, start)
    return new, last_but_one


def _prepared(
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
    """The update of a piece, and its leaves.

    Args:
        learner, mesh, group: whose.
        piece: of the group.
        entry: the group's optimizer state.
        old, specs: the group's leaves and their TensorSpecs.
        single: whether one unit alone is updated.
    """
    piece_entry = learner.state_of(group).part(piece.paths, entry)
    averaged_paths = tuple(path for path in piece.paths if path in old.average)
    paths = piece.paths, piece.paths, tuple(flatten(piece_entry)), averaged_paths
    update = PieceUpdate(
        update=learner.unit_update(group),
        entry_structure=jax.tree.structure(piece_entry),
        specs=_selected(specs, paths),
        stacked=group.length is not None,
        rows=piece.by == "rows",
        single=single,
        writes_first=mesh.devices.flat[0].platform == "cpu",
    )
    return _PreparedPiece(update, _selected(old, paths))


def _selected(flat: FlatBundle, paths: tuple[tuple[str, ...], ...]) -> FlatBundle:
    """The leaves of a bundle that have these paths, given for each of its parts."""
    parts = zip(flat, paths, strict=True)
    return FlatBundle(*({path: leaves[path] for path in part_paths} for leaves, part_paths in parts))
