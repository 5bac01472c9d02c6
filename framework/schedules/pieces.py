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

from framework.layout import TensorSpec, fetch_leaf, flatten, store_leaf, unflatten
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

Flat = dict[str, Any]
FlatBundle = tuple[Flat, Flat, Flat, Flat]

_GRADS, _ENTRY = 1, 2  # of a bundle's parts: weights, gradients, optimizer state, averages
BLOCK = 1 << 21  # elements
_SMALL = 1 << 20  # bytes of a unit's tensor that is not worth a loop of its own
_ROWS = 32  # a block's rows are a multiple: the tile of the narrowest dtype


class Piece(NamedTuple):
    """Parameters of a group that are updated at once, and how: all units mapped, unit by unit, or by blocks of rows."""

    paths: tuple[str, ...]
    by: Literal["all", "unit", "rows"]


def pieces_of(learner: Learner, group: Group, specs: Bundle) -> list[Piece]:
    """A group's pieces. `specs`: the TensorSpecs of the bundle that is to be updated."""
    reach = learner.reach(group)
    if reach == "unit" or not learner.separable(group):
        return [Piece(group.paths, "unit")]
    moved = {spec.owner for spec in jax.tree.leaves(specs[_ENTRY]) if _hosted(spec)}
    moved |= {path for part in (0, _GRADS, 3) for path, spec in flatten(specs[part]).items() if _hosted(spec)}
    unit = flatten(learner.unit_specs(group))
    large = [p for p in group.paths if p in moved or (len(unit[p].shape) > 1 and unit[p].num_bytes >= _SMALL)]
    rest = tuple(path for path in group.paths if path not in large)
    flat = flatten(specs[0])

    def by(path: str) -> Literal["unit", "rows"]:
        columns = flat[path].mesh_axes[1 if group.length is None else 2 :]
        return "rows" if reach == "element" or (reach == "row" and not any(columns)) else "unit"

    return [*([Piece(rest, "all")] if rest else []), *(Piece((path,), by(path)) for path in large)]


def update_group(
    learner: Learner,
    mesh: Mesh,
    group: Group,
    bundle: Bundle,
    specs: Bundle,
    decision: Decision,
    index: jax.Array | None = None,
) -> Update:
    """A group's update, with the numbers of `all_units`.

    Args:
        learner, mesh, group: whose.
        bundle: weights, gradients, optimizer state and averages, each where `specs` says.
        specs: TensorSpecs in the structure of the bundle.
        decision: see `Learner.decide`.
        index: update this unit only, the gradients being those of this unit alone; None means all units.
    """
    old: Any = tuple(flatten(part) for part in bundle)  # every piece starts from the old counters
    weights, entry, average = old[0], old[2], old[3]
    flat_specs = tuple(flatten(part) for part in specs)
    done: list[Flat] = []
    for piece in pieces_of(learner, group, specs):
        part = learner.part(group, piece.paths, bundle[2])
        names = piece.paths, piece.paths, tuple(flatten(part)), tuple(path for path in piece.paths if path in average)
        flat: Any = tuple({name: x[name] for name in own} for x, own in zip(old, names, strict=True))
        run = _Run(
            learner.unit_update(group),
            jax.tree.structure(part),
            [{name: spec[name] for name in own} for spec, own in zip(flat_specs, names, strict=True)],
            stacked=group.length is not None,
            rows=piece.by == "rows",
            single=index is not None,
            writes_first=mesh.devices.flat[0].platform == "cpu",
        )
        if piece.by == "all" and index is None:
            new = run.all(replace(group, paths=piece.paths), flat, decision)
        else:
            # State is fetched by this index: not before its gradients are there, nor before the last piece but one is
            # done. The compiler would fetch everything as early as it can.
            start, (grads, before) = jax.lax.optimization_barrier(
                (jnp.int32(0) if index is None else index, (run.on_device(flat[1]), done[-2] if len(done) > 1 else {}))
            )
            weights = weights | before
            flat = (flat[0], flat[1] | grads, *flat[2:])
            new = (run.sharded(mesh) if piece.by == "rows" and mesh.size > 1 else run)(flat, decision, start)
            done.append(new[0])
        weights, entry, average = weights | new[0], entry | new[1], average | new[2]
    return in_structure(bundle[0], weights), in_structure(bundle[2], entry), in_structure(bundle[3], average)


@dataclass(frozen=True)
class _Run:
    """The update of one piece. Bundles are flat here: dicts by path."""

    update: UnitUpdate
    entry: Any  # the structure of the piece's optimizer state
    specs: list[Flat]  # of weights, gradients, optimizer state, averages
    stacked: bool
    rows: bool
    single: bool  # of the units, one is updated: gradients are its own
    writes_first: bool  # the next piece comes after one was written: XLA for CPU would copy a stack that is read beside
    in_shards: bool = False  # arrays are a device's own shards

    def on_device(self, grads: Flat) -> Flat:
        """The gradients that are not on the host."""
        return {name: x for name, x in grads.items() if not _hosted(self.specs[_GRADS][name])}

    def _apply(self, update: Callable[..., Update], flat: FlatBundle, decision: Decision) -> tuple[Flat, Flat, Flat]:
        weights, grads, entry, average = flat
        state = jax.tree.unflatten(self.entry, [entry[name] for name in self.specs[2]])
        new = update((unflatten(weights), unflatten(grads), state, unflatten(average)), decision)
        return flatten(new[0]), flatten(new[1]), flatten(new[2])

    def all(self, group: Group, flat: FlatBundle, decision: Decision) -> tuple[Flat, Flat, Flat]:
        """All units mapped."""
        return self._apply(lambda bundle, decision: all_units(group, self.update, bundle, decision), flat, decision)

    def sharded(self, mesh: Mesh) -> Any:
        """Itself, with each device updating the rows of its own shard."""
        axes = tuple({name: PartitionSpec(*spec.mesh_axes) for name, spec in part.items()} for part in self.specs)
        whole = PartitionSpec()
        out = axes[0], axes[2], axes[3]
        own = replace(self, in_shards=True)
        return jax.shard_map(own, mesh=mesh, in_specs=(axes, whole, whole), out_specs=out, check_vma=False)

    def __call__(self, flat: FlatBundle, decision: Decision, start: jax.Array) -> tuple[Flat, Flat, Flat]:
        """Piece by piece, from the unit of that index: all units, or this one.

        The index may be no constant: a slice of host memory would be simplified to one in two dimensions.
        """
        weight = next(iter(flat[0]))
        shape = flat[0][weight].shape[self.stacked :]
        blocks = _num_blocks(shape) if self.rows else 1
        # By rows, what is not shaped like the parameter (a counter) is the unit's: read and written for each block.
        shared = {name for name, x in flat[2].items() if self.rows and x.shape[self.stacked :] != shape}
        before = {name: flat[2][name] for name in shared}

        def view(part: int, name: str, x: jax.Array) -> jax.Array:
            if part == _ENTRY and name in shared:
                return x
            stacked = self.stacked and not (part == _GRADS and self.single)
            units, unit = (x.shape[0], x.shape[1:]) if stacked else (1, x.shape)
            return x.reshape(units * blocks, unit[0] // blocks, *unit[1:]) if blocks > 1 else x.reshape(units, *unit)

        views: Any = tuple({name: view(part, name, x) for name, x in tree.items()} for part, tree in enumerate(flat))
        grads = views[_GRADS]
        count = next(iter(grads.values())).shape[0]

        def at(part: int, name: str, step: jax.Array) -> Any:
            if part == _ENTRY and name in shared:
                return start + step // blocks if self.stacked else ()
            own = part == _GRADS and not _hosted(self.specs[part][name])  # of one unit, if that alone is updated
            return step if own else start * blocks + step

        def taken(done: tuple[Flat, Flat, Flat], step: jax.Array, *, ahead: bool) -> list[Flat]:
            """A piece of each leaf that comes ahead of its turn, on the device; or of the others."""
            parts = enumerate(zip((done[0], grads, done[1] | before, done[2]), self.specs, strict=True))
            return [
                {n: fetch_leaf(s, _take(x[n], at(part, n, step))) for n, s in specs.items() if _comes_ahead(s) == ahead}
                for part, (x, specs) in parts
            ]

        def origin(step: jax.Array) -> Origin:
            """Of a block of the only parameter."""
            spec, first = self.specs[0][weight], [step % blocks * (shape[0] // blocks), *[0] * len(shape[1:])]
            axes = spec.mesh_axes[self.stacked :] if self.in_shards else ()
            for dim, names in enumerate(axes):
                first[dim] += jax.lax.axis_index(names) * shape[dim] if names else 0
            return Origin(tuple(first), spec.shape[self.stacked :])

        def one(step: jax.Array, done: tuple[Flat, Flat, Flat], here: list[Flat]) -> tuple[Flat, Flat, Flat]:
            unit: Any = tuple(a | b for a, b in zip(taken(done, step, ahead=False), here, strict=True))
            own = decision._replace(layer=decision.layer + start + step // blocks) if self.stacked else decision
            own = own._replace(origin=origin(step)) if self.rows else own
            new = self._apply(lambda bundle, decision: self.update(*bundle, decision), unit, own)

            def put(part: int, old: Flat, new: Flat) -> Flat:
                specs = self.specs[part]
                return {n: _put(old[n], store_leaf(specs[n], x), at(part, n, step)) for n, x in new.items()}

            return put(0, done[0], new[0]), put(_ENTRY, done[1], new[1]), put(3, done[2], new[2])

        def body(step: jax.Array, carry: Any) -> Any:
            done, here = carry
            if self.writes_first:
                done = one(step, done, here)
                return done, taken(done, step + 1, ahead=True)
            following = taken(done, step + 1, ahead=True)
            return one(step, done, here), following

        done = views[0], views[_ENTRY], views[3]
        here = taken(done, jnp.int32(0), ahead=True)
        # Where pieces are fetched ahead, the last one is updated after the loop, which would fetch one for nothing.
        turns = count if count > 1 and not any(here) else count - 1
        if turns:
            done, here = jax.lax.fori_loop(0, turns, body, (done, here))
        if turns < count:
            done = one(jnp.int32(turns), done, here)
        old = flat[0], flat[_ENTRY], flat[3]
        return tuple({n: x.reshape(o[n].shape) for n, x in d.items()} for d, o in zip(done, old, strict=True))  # type: ignore[return-value]


def _hosted(spec: TensorSpec) -> bool:
    return spec.memory_kind != "device"


def _comes_ahead(spec: TensorSpec) -> bool:
    """Host leaves; not those of single bytes, which XLA for TPU (libtpu 0.0.42) cannot read ahead in a loop that writes
    them: "A cycle is detected while visiting instruction %dynamic_slice"."""
    return _hosted(spec) and spec.dtype.itemsize > 1


def _take(x: jax.Array, index: Any) -> jax.Array:
    return x if isinstance(index, tuple) else unit_at(x, index)


def _put(x: jax.Array, piece: jax.Array, index: Any) -> jax.Array:
    return piece if isinstance(index, tuple) else with_unit(x, piece, index)


def _num_blocks(shape: tuple[int, ...]) -> int:
    """The fewest blocks of equally many rows that hold at most BLOCK elements each."""
    rows, wish = shape[0], -(-math.prod(shape) // BLOCK)
    fits = (n for n in range(wish, rows // _ROWS + 1) if rows % n == 0 and rows // n % _ROWS == 0)
    return next(fits, 1) if wish > 1 else 1
