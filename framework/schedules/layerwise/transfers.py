"""Transfers between host and device that layer programs carry out for each other while they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from plimsoll.framework.schedules.layerwise.programs import Array, ArrayPlacement, Programs, Tree

NumberedLeaves = dict[str, Any]  # leaves of a tree by their index in it


class TransferKey(NamedTuple):
    """The name of a tree that moves between host and device.

    Attributes:
        role: its name among the arguments of a program, which is the same for all layers.
        index: index of the layer; None for a tree of a stage.
    """

    role: str
    index: int | None = None


class TransferQueue:
    """Calls programs that, while they compute, also move arrays between host and device for other programs.

    A layer's arrays are fetched while the previous layer computes, and written back while the next layer computes,
    into the memory of the arrays that they replace. The arrays themselves tell which of them are in host memory.
    """

    def __init__(self, programs: Programs):
        self._programs = programs
        # Offloaded leaves that the next call should fetch. All dicts here are keyed by the key of a tree, and below
        # it by the index of a leaf, see `_index_offloaded_leaves`.
        self._requested: dict[TransferKey, NumberedLeaves] = {}
        # Leaves that were fetched, and not taken yet.
        self._arrived: dict[TransferKey, NumberedLeaves] = {}
        # New leaves that the next call should write to the host.
        self._leaving: dict[TransferKey, NumberedLeaves] = {}
        # The old leaves in host memory that they overwrite.
        self._destinations: dict[TransferKey, NumberedLeaves] = {}
        # Leaves that were written, and not requested yet.
        self._stored: dict[TransferKey, NumberedLeaves] = {}
        # All leaves of a tree passed to `put`, in order, with None for those that go to the host.
        self._staying: dict[TransferKey, list[Array]] = {}

    def request(self, key: TransferKey, tree: Tree) -> None:
        """Request that the next call fetches the offloaded leaves of a tree to the device.

        Args:
            key: name of the tree.
            tree: its arrays, in the memory in which they are stored.
        """
        offloaded = _index_offloaded_leaves(tree)
        if offloaded:
            self._requested[key] = offloaded

    def take(self, key: TransferKey, tree: Tree) -> Tree:
        """Return a requested tree on the device.

        Args:
            key: name of the tree.
            tree: its arrays, in the memory in which they are stored.
        """
        offloaded = _index_offloaded_leaves(tree)
        if not offloaded:
            return tree
        if key not in self._arrived:
            self.request(key, tree)
            self.flush()
        arrived = self._arrived.pop(key)
        leaves, treedef = jax.tree.flatten(tree)
        for i in range(len(leaves)):
            if str(i) in offloaded:
                leaves[i] = arrived[str(i)]
        return jax.tree.unflatten(treedef, leaves)

    def put(self, key: TransferKey, new: Tree, old: Tree) -> None:
        """Replace `old` with `new`; the next call writes offloaded leaves to host memory.

        Args:
            key: name of the tree.
            new: the new arrays, on the device.
            old: the old arrays, in the memory in which they are stored; those in host memory are overwritten.
        """
        leaves = jax.tree.leaves(new)
        destinations = _index_offloaded_leaves(old)
        if destinations:
            self._destinations[key] = destinations
            self._leaving[key] = {number: leaves[int(number)] for number in destinations}
        self._staying[key] = [None if str(i) in destinations else leaf for i, leaf in enumerate(leaves)]

    def get_stored(self, key: TransferKey, like: Tree) -> Tree:
        """Return a tree passed to `put`, each leaf in the memory that it is stored in, in the structure of `like`."""
        if key in self._leaving:
            self.flush()
        stored = self._stored.pop(key, {})
        staying = self._staying.pop(key)
        leaves = [stored.get(str(i), leaf) for i, leaf in enumerate(staying)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def flush(self) -> None:
        """Carry out pending transfers now, without a computation that hides them."""
        if self._requested or self._destinations:
            self("move", tuple, out=())

    def __call__(
        self, name: str, function: Callable[..., Any], *args: Tree, donate: Iterable[int] = (), out: Any
    ) -> Tree:
        """Run a program together with the pending transfers; see `Programs`."""
        # Arguments are named by their role, not by their layer, so that all layers share a program.
        requested_roles = _assign_roles(self._requested)
        destination_roles = _assign_roles(self._destinations)
        arriving = {role: self._requested[key] for key, role in requested_roles.items()}
        leaving = {role: self._leaving[key] for key, role in destination_roles.items()}
        destinations = {role: self._destinations[key] for key, role in destination_roles.items()}
        self._requested = {}
        self._leaving = {}
        self._destinations = {}

        # The host arrays to overwrite come first: without a GPU, the GPU compiler assigns donated memory to results
        # by their shapes only.
        numbers = (0, *(number + 3 for number in donate))
        stored, arrived, results = self._programs(
            name,
            _with_transfers(name, function),
            destinations,
            leaving,
            arriving,
            *args,
            donate=numbers,
            out=_placements_with_transfers(arriving, destinations, out),
        )
        for key, role in destination_roles.items():
            self._stored[key] = stored[role]
        for key, role in requested_roles.items():
            self._arrived[key] = arrived[role]
        return results


def _with_transfers(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that it also moves arrays; `name` appears in profiles and compiler output."""

    def moving(destinations: Tree, going: Tree, coming: Tree, *args: Tree) -> Tree:
        stored = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), going)
        arrived = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), coming)
        return stored, arrived, function(*args)

    moving.__name__ = name.replace(" ", "_")
    return moving


def _placements_with_transfers(arriving: Tree, destinations: Tree, out: Any) -> Callable[[Tree], Tree]:
    """Return the placement of a `_with_transfers` function's results; `out` places those of the wrapped function."""

    def shardings(results: Tree) -> Tree:
        arrived = jax.tree.map(
            lambda x: ArrayPlacement(ArrayPlacement.from_array(x).sharding.with_memory_kind("device")), arriving
        )
        stored = jax.tree.map(ArrayPlacement.from_array, destinations)
        return stored, arrived, out(results[2]) if callable(out) else out

    return shardings


def _assign_roles(keys: Iterable[TransferKey]) -> dict[TransferKey, str]:
    """Return the keys' roles, made unique."""
    roles: dict[TransferKey, str] = {}
    for key in keys:
        role = key.role
        roles[key] = role if role not in roles.values() else f"{role} {len(roles)}"
    return roles


def _index_offloaded_leaves(tree: Tree) -> NumberedLeaves:
    """Return the leaves of a tree that are in host memory, by their index."""
    offloaded = {}
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        if ArrayPlacement.from_array(leaf).kind != "device":
            offloaded[str(i)] = leaf
    return offloaded
