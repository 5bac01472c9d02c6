"""Transfers that layer programs carry out for each other: while one computes, it moves arrays of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from plimsoll.framework.schedules.layerwise.programs import Array, Place, Programs, Tree

NumberedLeaves = dict[str, Any]  # leaves of a tree by their index in it


class MoveKey(NamedTuple):
    """The name of a tree that moves between host and device.

    Attributes:
        role: its name among the arguments of a program, which is the same for all layers.
        index: index of the layer; None for a tree of a stage.
    """

    role: str
    index: int | None = None


class Moves:
    """Calls programs that, while they compute, also move arrays between host and device for other programs.

    A layer's arrays are fetched while the previous layer computes, and written back while the next layer computes,
    into the memory of the arrays that they replace. The arrays themselves tell which of them are in host memory.
    """

    def __init__(self, programs: Programs):
        self._programs = programs
        # Offloaded leaves that the next call should fetch. All dicts here are keyed by the key of a tree, and below
        # it by the index of a leaf, see `_index_offloaded_leaves`.
        self._wanted: dict[MoveKey, NumberedLeaves] = {}
        # Leaves that were fetched, and not taken yet.
        self._arrived: dict[MoveKey, NumberedLeaves] = {}
        # New leaves that the next call should write to the host.
        self._leaving: dict[MoveKey, NumberedLeaves] = {}
        # The old leaves in host memory that they overwrite.
        self._room: dict[MoveKey, NumberedLeaves] = {}
        # Leaves that were written, and not requested yet.
        self._stored: dict[MoveKey, NumberedLeaves] = {}
        # All leaves of a tree passed to `put`, in order, with None for those that go to the host.
        self._staying: dict[MoveKey, list[Array]] = {}

    def want(self, key: MoveKey, tree: Tree) -> None:
        """Request that the next call fetches the offloaded leaves of a tree to the device."""
        hosted = _index_offloaded_leaves(tree)
        if hosted:
            self._wanted[key] = hosted

    def take(self, key: MoveKey, tree: Tree) -> Tree:
        """Return a requested tree on the device."""
        hosted = _index_offloaded_leaves(tree)
        if not hosted:
            return tree
        if key not in self._arrived:
            self.want(key, tree)
            self.flush()
        arrived = self._arrived.pop(key)
        leaves, treedef = jax.tree.flatten(tree)
        for i in range(len(leaves)):
            if str(i) in hosted:
                leaves[i] = arrived[str(i)]
        return jax.tree.unflatten(treedef, leaves)

    def put(
        self,
        key: MoveKey,
        new: Tree,
        old: Tree,
    ) -> None:
        """Replace `old` with `new`, which is on the device; the next call writes offloaded leaves to host memory."""
        leaves = jax.tree.leaves(new)
        room = _index_offloaded_leaves(old)
        if room:
            self._room[key] = room
            self._leaving[key] = {number: leaves[int(number)] for number in room}
        self._staying[key] = [None if str(i) in room else leaf for i, leaf in enumerate(leaves)]

    def placed(self, key: MoveKey, like: Tree) -> Tree:
        """Return a tree passed to `put`, each leaf in the memory that it is stored in, in the structure of `like`."""
        if key in self._leaving:
            self.flush()
        stored = self._stored.pop(key, {})
        staying = self._staying.pop(key)
        leaves = [stored.get(str(i), leaf) for i, leaf in enumerate(staying)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def flush(self) -> None:
        """Carry out pending transfers now, without a computation that hides them."""
        if self._wanted or self._room:
            self("move", tuple, out=())

    def __call__(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Tree,
        donate: Iterable[int] = (),
        out: Any,
    ) -> Tree:
        """Run a program together with the pending transfers; see `Programs`."""
        # Arguments are named by their role, not by their layer, so that all layers share a program.
        wanted_roles = _roles(self._wanted)
        room_roles = _roles(self._room)
        arriving = {role: self._wanted[key] for key, role in wanted_roles.items()}
        leaving = {role: self._leaving[key] for key, role in room_roles.items()}
        room = {role: self._room[key] for key, role in room_roles.items()}
        self._wanted = {}
        self._leaving = {}
        self._room = {}

        # The host arrays to overwrite come first: without a GPU, the GPU compiler assigns donated memory to results
        # by their shapes only.
        numbers = (0, *(number + 3 for number in donate))
        stored, arrived, results = self._programs(
            name,
            _with_moves(name, function),
            room,
            leaving,
            arriving,
            *args,
            donate=numbers,
            out=_places_with_moves(arriving, room, out),
        )
        for key, role in room_roles.items():
            self._stored[key] = stored[role]
        for key, role in wanted_roles.items():
            self._arrived[key] = arrived[role]
        return results


def _with_moves(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that it also moves arrays; `name` appears in profiles and compiler output."""

    def moving(room: Tree, going: Tree, coming: Tree, *args: Tree) -> Tree:
        stored = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), going)
        arrived = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), coming)
        return stored, arrived, function(*args)

    moving.__name__ = name.replace(" ", "_")
    return moving


def _places_with_moves(arriving: Tree, room: Tree, out: Any) -> Callable[[Tree], Tree]:
    """Return the placement of a `_with_moves` function's results; `out` places those of the wrapped function."""

    def shardings(results: Tree) -> Tree:
        arrived = jax.tree.map(lambda x: Place(Place.of(x).sharding.with_memory_kind("device")), arriving)
        stored = jax.tree.map(Place.of, room)
        return stored, arrived, out(results[2]) if callable(out) else out

    return shardings


def _roles(keys: Iterable[MoveKey]) -> dict[MoveKey, str]:
    """Return the keys' roles, made unique."""
    roles: dict[MoveKey, str] = {}
    for key in keys:
        role = key.role
        roles[key] = role if role not in roles.values() else f"{role} {len(roles)}"
    return roles


def _index_offloaded_leaves(tree: Tree) -> NumberedLeaves:
    """Return the leaves of a tree that are in host memory, by their index."""
    hosted = {}
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        if Place.of(leaf).kind != "device":
            hosted[str(i)] = leaf
    return hosted
