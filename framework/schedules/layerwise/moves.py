"""What programs of layers carry for each other: arrays that come from the host, and go there, while others compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from framework.schedules.layerwise.programs import Array, Place, Programs, Tree

NumberedLeaves = dict[str, Any]  # leaves of a tree by their numbers in it


class MoveKey(NamedTuple):
    """The name of a tree that moves between host and device.

    Attributes:
      role: its name among the arguments of a program, which is the same for all units.
      index: the unit's; None for a tree of a stage.
    """

    role: str
    index: int | None = None


class Moves:
    """Calls programs that also carry arrays between host and device for others, while they compute.

    So a layer's arrays come while the layer before it computes, and go while the next one does; what goes is written in
    the place of what it replaces. Which arrays are in host memory is read off the arrays.
    """

    def __init__(self, programs: Programs):
        self._programs = programs
        # All of these are by the key of a tree. Below it, leaves are by their numbers, see `_numbered`.
        # Hosted leaves that are to come with the next call.
        self._wanted: dict[MoveKey, NumberedLeaves] = {}
        # Leaves that have come, and that nobody took yet.
        self._arrived: dict[MoveKey, NumberedLeaves] = {}
        # New leaves that are to go with the next call.
        self._leaving: dict[MoveKey, NumberedLeaves] = {}
        # The old hosted leaves whose memory these take.
        self._room: dict[MoveKey, NumberedLeaves] = {}
        # Leaves that have gone, and that nobody asked for yet.
        self._stored: dict[MoveKey, NumberedLeaves] = {}
        # All leaves of a tree that was put, in order, with None for those that go to the host.
        self._staying: dict[MoveKey, list[Array]] = {}

    def want(self, key: MoveKey, tree: Tree) -> None:
        """Asks for what of a tree is in host memory to come to the device with the next call."""
        hosted = _numbered(tree)
        if hosted:
            self._wanted[key] = hosted

    def take(self, key: MoveKey, tree: Tree) -> Tree:
        """A tree that was asked for, on the device."""
        hosted = _numbered(tree)
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
        """`new`, on the device, takes the place of `old`: what of that is in host memory is written there with the next
        call."""
        leaves = jax.tree.leaves(new)
        room = _numbered(old)
        if room:
            self._room[key] = room
            self._leaving[key] = {number: leaves[int(number)] for number in room}
        self._staying[key] = [None if str(i) in room else leaf for i, leaf in enumerate(leaves)]

    def placed(self, key: MoveKey, like: Tree) -> Tree:
        """What was put, where it belongs, in the structure of `like`."""
        if key in self._leaving:
            self.flush()
        stored = self._stored.pop(key, {})
        staying = self._staying.pop(key)
        leaves = [stored.get(str(i), leaf) for i, leaf in enumerate(staying)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def flush(self) -> None:
        """Moves what waits, without a program to do it beside."""
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
        """See `Programs`."""
        # A program's arguments go by what they are, not by whose: those of all layers are the same.
        wanted_roles = _roles(self._wanted)
        room_roles = _roles(self._room)
        arriving = {role: self._wanted[key] for key, role in wanted_roles.items()}
        leaving = {role: self._leaving[key] for key, role in room_roles.items()}
        room = {role: self._room[key] for key, role in room_roles.items()}
        self._wanted = {}
        self._leaving = {}
        self._room = {}

        # The places come first: a GPU's compiler without a GPU gives donated memory to results by their shapes alone.
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
    """`function`, which also carries arrays; `name` is what profiles and the compiler call it."""

    def moving(room: Tree, going: Tree, coming: Tree, *args: Tree) -> Tree:
        stored = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), going)
        arrived = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), coming)
        return stored, arrived, function(*args)

    moving.__name__ = name.replace(" ", "_")
    return moving


def _places_with_moves(arriving: Tree, room: Tree, out: Any) -> Callable[[Tree], Tree]:
    """Where the results of a function of `_with_moves` go; `out` says it of those of the function itself."""

    def shardings(results: Tree) -> Tree:
        arrived = jax.tree.map(lambda x: Place(Place.of(x).sharding.with_memory_kind("device")), arriving)
        stored = jax.tree.map(Place.of, room)
        return stored, arrived, out(results[2]) if callable(out) else out

    return shardings


def _roles(keys: Iterable[MoveKey]) -> dict[MoveKey, str]:
    """The keys' roles, made unique."""
    roles: dict[MoveKey, str] = {}
    for key in keys:
        role = key.role
        roles[key] = role if role not in roles.values() else f"{role} {len(roles)}"
    return roles


def _numbered(tree: Tree) -> NumberedLeaves:
    """The leaves of a tree that are in host memory, by their numbers."""
    hosted = {}
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        if Place.of(leaf).kind != "device":
            hosted[str(i)] = leaf
    return hosted
