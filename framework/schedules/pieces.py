"""An update that goes through a group's weights and state a piece at a time; only pieces come to the device.

A piece is the least that the optimizer's reach allows: rows of one tensor where each element is updated by itself, one
tensor where its elements depend on each other, else a whole unit. What is small is updated together.

Rows are blocks of each device's own shard, so they are taken inside `shard_map`: [L, R, C] is seen as
[L * blocks, R / blocks, C], which moves nothing, and a block is one index of the leading dimension. (TPU slices host
memory in one dimension only.) Weights and state are the loop's carry and are updated in place: a loop that only read a
stack might hold a relaid copy of all of it. The next piece is fetched while one is updated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from framework.layout import Nested, TensorSpec, fetch_leaf, flatten, store_leaf, unflatten
from framework.learner.learner import Learner
from framework.learner.units import (
    Bundle,
    Decision,
    Group,
    UnitUpdate,
    Update,
    all_units,
    in_structure,
    unit_at,
    with_unit,
)
from framework.optimizers.rounding import Origin

Flat = dict[str, Any]  # leaves (arrays or specs) by path
Rows = Literal["unit", "rows"]

_WEIGHTS = 0  # the parts of a bundle
_GRADS = 1
_ENTRY = 2  # optimizer state
_AVERAGE = 3
BLOCK = 1 << 21  # elements
_SMALL = 1 << 20  # bytes of a unit's tensor that is not worth a loop of its own
_ROWS = 32  # a block's rows are a multiple: the tile of the narrowest dtype


class FlatBundle(NamedTuple):
    """A `Bundle` whose trees are dicts by path, or what belongs to each of its leaves."""

    weights: Flat
    grads: Flat
    entry: Flat
    average: Flat


class FlatUpdate(NamedTuple):
    """An `Update` whose trees are dicts by path."""

    weights: Flat
    entry: Flat
    average: Flat


class Piece(NamedTuple):
    """Parameters of a group that are updated at once, and how: all units mapped, unit by unit, or by blocks of rows."""

    paths: tuple[str, ...]
    by: Literal["all", "unit", "rows"]


def pieces_of(learner: Learner, group: Group, specs: Bundle) -> list[Piece]:
    """Divides a group into pieces.

    Args:
        learner, group: whose parameters.
        specs: the TensorSpecs of the bundle that is to be updated.
    """
    reach = learner.reach(group)
    # Some optimizers name their state otherwise when they see a part of their parameters.
    if reach == "unit" or not learner.state_of(group).separable():
        return [Piece(group.paths, "unit")]
    # Whatever is in host memory goes through a loop, or all of it would come to the device at once.
    moved_paths = {spec.owner for spec in jax.tree.leaves(specs[_ENTRY]) if _hosted(spec)}
    for part in (_WEIGHTS, _GRADS, _AVERAGE):
        for path, spec in flatten(specs[part]).items():
            if _hosted(spec):
                moved_paths.add(path)
    unit_specs = flatten(learner.unit_specs(group))

    def is_large(path: str) -> bool:
        spec = unit_specs[path]
        return len(spec.shape) > 1 and spec.num_bytes >= _SMALL

    large_paths = [path for path in group.paths if path in moved_paths or is_large(path)]
    small_paths = tuple(path for path in group.paths if path not in large_paths)
    weight_specs = flatten(specs[_WEIGHTS])
    # Axes are [units, rows, columns] in a stack, else [rows, columns].
    column_axis = 1 if group.length is None else 2

    def by(path: str) -> Rows:
        # A row that is cut over devices is not whole inside `shard_map`, where blocks of rows are taken.
        row_is_whole = not any(weight_specs[path].mesh_axes[column_axis:])
        if reach == "element" or (reach == "row" and row_is_whole):
            return "rows"
        return "unit"

    pieces = [Piece((path,), by(path)) for path in large_paths]
    if small_paths:
        pieces.insert(0, Piece(small_paths, "all"))
    return pieces


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
    # Every piece starts from the old counters: those that pieces share, each writes with the same value.
    old = FlatBundle(*(flatten(part) for part in bundle))
    flat_specs = FlatBundle(*(flatten(part) for part in specs))
    weights = old.weights
    entry = old.entry
    average = old.average
    updated_weights: list[Flat] = []  # of the pieces so far that were updated in a loop
    for piece in pieces_of(learner, group, specs):
        run, flat = _prepared(
            learner,
            mesh,
            group,
            piece,
            bundle[_ENTRY],
            old,
            flat_specs,
            single=index is not None,
        )
        if piece.by == "all" and index is None:
            new = run.mapped(replace(group, paths=piece.paths), flat, decision)
        else:
            last_but_one = updated_weights[-2] if len(updated_weights) > 1 else {}
            new, last_but_one = _looped(run, mesh, flat, decision, index, last_but_one)
            weights = weights | last_but_one
            updated_weights.append(new.weights)
        weights = weights | new.weights
        entry = entry | new.entry
        average = average | new.average
    new_weights = in_structure(bundle[_WEIGHTS], weights)
    new_entry = in_structure(bundle[_ENTRY], entry)
    new_average = in_structure(bundle[_AVERAGE], average)
    return new_weights, new_entry, new_average


def _looped(
    run: _Run,
    mesh: Mesh,
    flat: FlatBundle,
    decision: Decision,
    index: jax.Array | None,
    last_but_one: Flat,
) -> tuple[FlatUpdate, Flat]:
    """Updates a piece unit by unit, or by rows: (what is new, `last_but_one`).

    Args:
        run: the piece's update.
        mesh: of the layout.
        flat: the piece's leaves.
        decision, index: see `update_group`.
        last_but_one: the new weights of the last piece but one; {} for none.
    """
    # The compiler would fetch everything as early as it can. State is fetched by this index: not before
    # its gradients are there, nor before the last piece but one is done.
    start = jnp.int32(0) if index is None else index
    device_grads = run.on_device(flat.grads)
    start, (device_grads, last_but_one) = jax.lax.optimization_barrier((start, (device_grads, last_but_one)))
    flat = flat._replace(grads=flat.grads | device_grads)
    # Blocks are those of a device's own rows; the partitioner would gather the leaf to slice it.
    run_piece = run.sharded(mesh) if run.rows and mesh.size > 1 else run
    return run_piece(flat, decision, start), last_but_one


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
) -> tuple[_Run, FlatBundle]:
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
    run = _Run(
        update=learner.unit_update(group),
        entry_structure=jax.tree.structure(piece_entry),
        specs=_selected(specs, paths),
        stacked=group.length is not None,
        rows=piece.by == "rows",
        single=single,
        writes_first=mesh.devices.flat[0].platform == "cpu",
    )
    return run, _selected(old, paths)


def _selected(flat: FlatBundle, paths: tuple[tuple[str, ...], ...]) -> FlatBundle:
    """The leaves of a bundle that have these paths, given for each of its parts."""
    parts = zip(flat, paths, strict=True)
    return FlatBundle(*({path: leaves[path] for path in part_paths} for leaves, part_paths in parts))


@dataclass(frozen=True)
class _Run:
    """The update of one piece.

    Attributes:
      update: of one unit.
      entry_structure: the treedef of the piece's optimizer state.
      specs: TensorSpecs of the piece's leaves.
      stacked: whether leaves have a leading axis of units.
      rows: whether the piece is updated by blocks of rows.
      single: whether one unit alone is updated: gradients are its own, without an axis of units.
      writes_first: whether the next piece comes after one was written: XLA for CPU would copy a stack that is read
        beside.
      in_shards: whether arrays are a device's own shards.
    """

    update: UnitUpdate
    entry_structure: Any
    specs: FlatBundle
    stacked: bool
    rows: bool
    single: bool
    writes_first: bool
    in_shards: bool = False

    def on_device(self, grads: Flat) -> Flat:
        """The gradients that are not in host memory."""
        return {path: grad for path, grad in grads.items() if not _hosted(self.specs.grads[path])}

    def mapped(
        self,
        group: Group,
        flat: FlatBundle,
        decision: Decision,
    ) -> FlatUpdate:
        """Updates all units at once."""

        def update(bundle: Bundle, decision: Decision) -> Update:
            return all_units(group, self.update, bundle, decision)

        return self._apply(update, flat, decision)

    def unit(self, flat: FlatBundle, decision: Decision) -> FlatUpdate:
        """Updates one unit, or one block of its rows."""

        def update(bundle: Bundle, decision: Decision) -> Update:
            return self.update(*bundle, decision)

        return self._apply(update, flat, decision)

    def _apply(
        self,
        update: Callable[[Bundle, Decision], Update],
        flat: FlatBundle,
        decision: Decision,
    ) -> FlatUpdate:
        """Calls `update` with nested trees."""
        entry_leaves = [flat.entry[path] for path in self.specs.entry]
        entry = jax.tree.unflatten(self.entry_structure, entry_leaves)
        # Optimizer state has a structure of its own (optax's NamedTuples); the others are nested dicts.
        bundle = unflatten(flat.weights), unflatten(flat.grads), entry, unflatten(flat.average)
        new_weights, new_entry, new_average = update(bundle, decision)
        return FlatUpdate(flatten(new_weights), flatten(new_entry), flatten(new_average))

    def sharded(self, mesh: Mesh) -> Callable[[FlatBundle, Decision, jax.Array], FlatUpdate]:
        """The same update, with each device updating the rows of its own shard."""
        parts = [{path: PartitionSpec(*spec.mesh_axes) for path, spec in part.items()} for part in self.specs]
        axes = FlatBundle(*parts)
        replicated = PartitionSpec()
        return jax.shard_map(
            replace(self, in_shards=True),
            mesh=mesh,
            in_specs=(axes, replicated, replicated),
            out_specs=FlatUpdate(axes.weights, axes.entry, axes.average),
            check_vma=False,
        )

    def __call__(
        self,
        flat: FlatBundle,
        decision: Decision,
        start: jax.Array,
    ) -> FlatUpdate:
        """Updates piece by piece, from the unit at index `start`: all units, or this one.

        The index may be no constant: a slice of host memory would be simplified to one in two dimensions.
        """
        weight_path = next(iter(flat.weights))
        # A piece by rows has one parameter, whose shape says how many blocks there are.
        shape = flat.weights[weight_path].shape[self.stacked :]
        blocks = _num_blocks(shape) if self.rows else 1
        # By rows, what is not shaped like the parameter (a counter) is the unit's: read and written for each block.
        unit_leaves = {}
        if self.rows:
            unit_leaves = {path: x for path, x in flat.entry.items() if x.shape[self.stacked :] != shape}
        views = [
            {path: self._view(part, x, blocks, is_uncut=path in unit_leaves) for path, x in leaves.items()}
            for part, leaves in enumerate(flat)
        ]
        bundle = FlatBundle(*views)
        loop = _PieceLoop(
            self,
            weight_path,
            shape,
            blocks,
            start,
            decision,
            bundle.grads,
            unit_leaves,
        )
        new = loop.run(FlatUpdate(bundle.weights, bundle.entry, bundle.average))
        return FlatUpdate(
            _in_shapes(new.weights, flat.weights),
            _in_shapes(new.entry, flat.entry),
            _in_shapes(new.average, flat.average),
        )

    def _view(
        self,
        part: int,
        x: jax.Array,
        blocks: int,
        *,
        is_uncut: bool,
    ) -> jax.Array:
        """A leaf as [units * blocks, rows of a block, ...]; an optimizer's leaf that is not cut in blocks as it is."""
        if part == _ENTRY and is_uncut:
            return x
        has_units = self.stacked and not (part == _GRADS and self.single)
        units = x.shape[0] if has_units else 1
        unit_shape = x.shape[1:] if has_units else x.shape
        # Rows are split within a leading dimension, which moves no byte.
        if blocks == 1:
            return x.reshape(units, *unit_shape)
        return x.reshape(units * blocks, unit_shape[0] // blocks, *unit_shape[1:])

    def decision_at(
        self,
        decision: Decision,
        start: jax.Array,
        step: jax.Array,
        blocks: int,
        origin: Callable[[jax.Array], Origin],
    ) -> Decision:
        """The decision for the unit and the block that are updated in this step, which noise is drawn by."""
        own = decision
        # Noise is drawn by layer and by the block's place in its tensor, so that neither units that are
        # updated alone nor blocks and shards change it.
        if self.stacked:
            own = decision._replace(layer=decision.layer + start + step // blocks)
        return own._replace(origin=origin(step)) if self.rows else own


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
    """

    piece: _Run
    weight_path: str
    shape: tuple[int, ...]
    blocks: int
    start: jax.Array
    decision: Decision
    grads: Flat
    unit_leaves: Flat

    def run(self, state: FlatUpdate) -> FlatUpdate:
        """Updates all steps' pieces of `state`, whose leaves are [units * blocks, ...]."""
        steps = next(iter(self.grads.values())).shape[0]
        ahead = self._taken(state, jnp.int32(0), ahead=True)
        # Where pieces are fetched ahead, the last one is updated after the loop, which would fetch one for nothing.
        turns = steps if steps > 1 and not any(ahead) else steps - 1
        if turns:
            state, ahead = jax.lax.fori_loop(0, turns, self._body, (state, ahead))
        if turns < steps:
            state = self._step(jnp.int32(turns), state, ahead)
        return state

    def _body(self, step: jax.Array, carry: tuple[FlatUpdate, FlatBundle]) -> tuple[FlatUpdate, FlatBundle]:
        state, ahead = carry
        # Elsewhere than on CPU the next piece is on its way while this one is updated.
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
        """Updates one piece; `ahead` are its leaves that were fetched in the step before."""
        late = self._taken(state, step, ahead=False)
        leaves = FlatBundle(*(x | y for x, y in zip(late, ahead, strict=True)))
        decision = self.piece.decision_at(self.decision, self.start, step, self.blocks, self._origin)
        new = self.piece.unit(leaves, decision)
        return FlatUpdate(
            self._written(_WEIGHTS, state.weights, new.weights, step),
            self._written(_ENTRY, state.entry, new.entry, step),
            self._written(_AVERAGE, state.average, new.average, step),
        )

    def _taken(
        self,
        state: FlatUpdate,
        step: jax.Array,
        *,
        ahead: bool,
    ) -> FlatBundle:
        """A step's piece on the device: of leaves that come ahead of their turn, or of the others."""
        # A unit's counter is the old one for each block, whatever the blocks before wrote.
        bundle = FlatBundle(state.weights, self.grads, state.entry | self.unit_leaves, state.average)
        taken_parts: list[Flat] = []
        for part, (leaves, specs) in enumerate(zip(bundle, self.piece.specs, strict=True)):
            taken = {}
            for path, spec in specs.items():
                if _comes_ahead(spec) == ahead:
                    index = self._index(part, path, step)
                    taken[path] = fetch_leaf(spec, _take(leaves[path], index))
            taken_parts.append(taken)
        return FlatBundle(*taken_parts)

    def _written(
        self,
        part: int,
        stacks: Flat,
        new: Flat,
        step: jax.Array,
    ) -> Flat:
        """The leaves of one part of the bundle, with a step's new piece in them."""
        specs = self.piece.specs[part]
        new_stacks = {}
        for path, leaf in new.items():
            stored_leaf = store_leaf(specs[path], leaf)
            index = self._index(part, path, step)
            new_stacks[path] = _put(stacks[path], stored_leaf, index)
        return new_stacks

    def _index(
        self,
        part: int,
        path: str,
        step: jax.Array,
    ) -> Any:
        """Where a leaf has a step's piece; () for a leaf that is no stack and goes whole."""
        if part == _ENTRY and path in self.unit_leaves:
            return self.start + step // self.blocks if self.piece.stacked else ()
        # Gradients on the device are of one unit, if that alone is updated.
        if part == _GRADS and not _hosted(self.piece.specs.grads[path]):
            return step
        return self.start * self.blocks + step

    def _origin(self, step: jax.Array) -> Origin:
        """Where a block of the only parameter begins, in the whole tensor of a unit."""
        spec = self.piece.specs.weights[self.weight_path]
        block_rows = self.shape[0] // self.blocks
        first: list[Any] = [step % self.blocks * block_rows]
        first += [0] * len(self.shape[1:])
        axes = spec.mesh_axes[self.piece.stacked :] if self.piece.in_shards else ()
        # In shards, rows are counted from the shard's beginning.
        for dim, names in enumerate(axes):
            offset = jax.lax.axis_index(names) * self.shape[dim] if names else 0
            first[dim] += offset
        return Origin(tuple(first), spec.shape[self.piece.stacked :])


def _in_shapes(leaves: Flat, like: Flat) -> Flat:
    return {path: leaf.reshape(like[path].shape) for path, leaf in leaves.items()}


def _hosted(spec: TensorSpec) -> bool:
    return spec.memory_kind != "device"


def _comes_ahead(spec: TensorSpec) -> bool:
    """Whether a leaf is fetched a step ahead: host leaves are, but not those of single bytes, which XLA for TPU (libtpu
    0.0.42) cannot read ahead in a loop that writes them: "A cycle is detected while visiting instruction
    %dynamic_slice"."""
    return _hosted(spec) and spec.dtype.itemsize > 1


def _take(x: jax.Array, index: Any) -> jax.Array:
    return x if isinstance(index, tuple) else unit_at(x, index)


def _put(x: jax.Array, piece: jax.Array, index: Any) -> jax.Array:
    return piece if isinstance(index, tuple) else with_unit(x, piece, index)


def _num_blocks(shape: tuple[int, ...]) -> int:
    """The fewest blocks of equally many rows that hold at most BLOCK elements each; 1 where rows do not divide so."""
    rows = shape[0]
    # Rounded up.
    fewest = -(-math.prod(shape) // BLOCK)
    if fewest <= 1:
        return 1
    for blocks in range(fewest, rows // _ROWS + 1):
        if rows % blocks == 0 and rows // blocks % _ROWS == 0:
            return blocks
    return 1
