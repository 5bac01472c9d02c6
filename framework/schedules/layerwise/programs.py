"""A step made of several compiled programs: they are compiled once by kind, called from Python, and can be rehearsed.

A rehearsal runs the same Python code with arrays that have no bytes. It compiles every kind of program that comes up,
and counts what is alive at each call: so many bytes are needed, before any array exists.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from framework.devices.executables import HostBytes
from framework.layout import StateLayout, TensorSpec, path_name

Kinds = dict[str, int]  # bytes of one device by memory kind


class Compiled(NamedTuple):
    """A program: what runs it, its peak on the device in bytes, arguments included; about: what else the compiler said;
    the shapes and places of its results, and its jaxpr."""

    run: Any
    peak: int
    about: Any = None
    results: tuple[Any, Any] = ((), ())
    jaxpr: Any = None


Compile = Callable[[Any, HostBytes], Compiled]  # of (jax.stages.Lowered, what of it is in host memory)


@dataclass(frozen=True)
class Place:
    """Where an array is: its sharding, and its kind of memory, which a sharding of a GPU that is not here forgets."""

    sharding: Any
    kind: str = "device"

    @staticmethod
    def of(x: Any) -> Place:
        """Of an array, or of what has its shape and sharding."""
        return x.place if isinstance(x, Ghost) else Place(x.sharding, x.sharding.memory_kind or "device")

    def bytes(self, x: Any) -> int:
        """Of one device's part of an array of that shape and dtype."""
        return math.prod(self.sharding.shard_shape(x.shape)) * x.dtype.itemsize


class Ghost:
    """An array without bytes; it is alive as long as somebody refers to it or until it is donated."""

    def __init__(self, like: Any, place: Place, ledger: Ledger, label: str):
        self.shape, self.dtype, self.place, self._ledger = like.shape, like.dtype, place, ledger
        self.nbytes = place.bytes(like)
        ledger.live[place.kind] += self.nbytes
        ledger.alive[id(self)] = label, place.kind, self.nbytes

    def delete(self) -> None:
        """It was donated."""
        if self._ledger.alive.pop(id(self), None):
            self._ledger.live[self.place.kind] -= self.nbytes

    __del__ = delete


class Ledger:
    """What a rehearsal counts: bytes of one device, or of its host's memory.

    Attributes:
      live, alive: now; by memory kind, and by array: (label, kind, bytes).
      calls: the programs, in order. peak: on the device during the worst call.
      worst: that call's program, and what was alive then. host_peak: in host memory.
      moved: between host and device.
    """

    def __init__(self) -> None:
        self.live: Kinds = {"device": 0, "pinned_host": 0}
        self.alive: dict[int, tuple[str, str, int]] = {}
        self.calls: list[Compiled] = []
        self.peak, self.host_peak, self.moved = 0, 0, 0
        self.worst: tuple[Compiled, list[tuple[str, str, int]]] | None = None

    def count(self, program: Compiled, peak: int) -> None:
        """A call, and what the device has while it runs."""
        self.calls.append(program)
        if peak > self.peak:
            self.peak, self.worst = peak, (program, list(self.alive.values()))


class Programs:
    """Programs by kind.

    Args:
        jit: jax.jit with the compiler's options.
        compile: see `Compile`.
        layout: knows the places of TensorSpecs.
    """

    def __init__(self, jit: Any, compile: Compile, layout: StateLayout):
        self._jit, self.compile, self._layout = jit, compile, layout
        self._found: dict[Any, Compiled] = {}
        self._ledger: Ledger | None = None
        # The devices of a CPU share a pool of threads, and in a collective each holds one until all have come: programs
        # that run at once could wait for each other's threads, until XLA ends the process.
        devices = layout.mesh.devices
        self._waits = devices.size > 1 and devices.flat[0].platform == "cpu"

    def __len__(self) -> int:
        return len(self._found)

    def rehearse(self, driver: Callable[..., Any], *trees: Any) -> Ledger:
        """Runs `driver` with ghosts of the arrays or TensorSpecs in `trees`, and compiles what comes up on the way."""
        self._ledger = ledger = Ledger()
        try:
            driver(*_ghosts(ledger, "", trees, jax.tree.map(self._place, trees)))
        finally:
            self._ledger = None
        return ledger

    def _place(self, x: Any) -> Place:
        return Place(self._layout.sharding(x), x.memory_kind) if isinstance(x, TensorSpec) else Place.of(x)

    def __call__(
        self, name: Any, function: Callable[..., Any], *args: Any, donate: Iterable[int] = (), out: Any
    ) -> Any:
        """`function(*args)` by the program of that name and that structure of arguments.

        Args:
            name: says which function it is, with all that is not in the structure of its arguments.
            function: pure.
            args: trees of arrays.
            donate: numbers of the arguments that are gone afterwards.
            out: TensorSpecs or Places of the results, or a function of their shapes that returns those; in place of
                one, a kind of memory, where the compiler may choose the rest.
        """
        key = name, jax.tree.structure(args)
        if self._ledger is None:
            results = self._found[key].run(*args)
            return jax.block_until_ready(results) if self._waits else results
        if key not in self._found:
            self._make(key, function, args, tuple(donate), out)
        return self._rehearsed(self._ledger, key, args, tuple(donate))

    def _make(self, key: Any, function: Any, args: Any, donate: tuple[int, ...], out: Any) -> None:
        abstract = jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape, g.dtype, sharding=g.place.sharding), args)
        if callable(out):
            out = out(jax.eval_shape(function, *abstract))
        if any(isinstance(leaf, str) for leaf in jax.tree.leaves(out)):
            found = self._jit(function, keep_unused=True).lower(*abstract).compile().output_shardings
            out = jax.tree.map(lambda s, f: Place(f.with_memory_kind(s), s) if isinstance(s, str) else s, out, found)
        places = jax.tree.map(lambda x: x if isinstance(x, Place) else self._place(x), out)
        # Every argument is kept, as all are counted. Every result has a sharding, as donated memory is given to a
        # result of the same kind of memory only where all kinds are known.
        shardings = jax.tree.map(lambda place: place.sharding, places)
        jitted = self._jit(function, donate_argnums=donate, out_shardings=shardings, keep_unused=True)
        traced = jitted.trace(*abstract)
        left = [args[i] for i in donate]
        given = jax.tree.map(lambda x, place: place.bytes(x) * (place.kind != "device"), traced.out_info, places)
        hosted = HostBytes(_hosted_bytes(args), sum(jax.tree.leaves(given)), _hosted_bytes(left))
        compiled = self.compile(traced.lower(), hosted)
        self._found[key] = compiled._replace(results=(traced.out_info, places), jaxpr=traced.jaxpr)

    def _rehearsed(self, ledger: Ledger, key: Any, args: Any, donate: tuple[int, ...]) -> Any:
        found, ghosts = self._found[key], list({id(g): g for g in jax.tree.leaves(args)}.values())
        here = sum(g.nbytes for g in ghosts if g.place.kind == "device")
        ledger.count(found, found.peak + ledger.live["device"] - here)
        gone = jax.tree.leaves([args[i] for i in donate])
        ledger.moved += _hosted_bytes(ghosts) - _hosted_bytes(gone)
        for leaf in gone:
            leaf.delete()
        results = _ghosts(ledger, str(key[0]), *found.results)
        ledger.moved += _hosted_bytes(results)
        ledger.host_peak = max(ledger.host_peak, ledger.live["pinned_host"])
        return results


def _ghosts(ledger: Ledger, name: str, trees: Any, places: Any) -> Any:
    def one(keypath: Any, x: Any, place: Place) -> Ghost:
        return Ghost(x, place, ledger, f"{name}/{path_name(keypath)}")

    return jax.tree_util.tree_map_with_path(one, trees, places)


def _hosted_bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree) if x.place.kind != "device")


class Moves:
    """Calls programs that also carry arrays between host and device for others, while they compute.

    So a layer's arrays come while the layer before it computes, and go while the next one does; what goes is written in
    the place of what it replaces. Which arrays are in host memory is read off the arrays.
    """

    def __init__(self, programs: Programs):
        self._programs = programs
        self._coming: dict[str, Any] = {}
        self._going: dict[str, Any] = {}
        self._room: dict[str, Any] = {}
        self._here: dict[str, Any] = {}
        self._gone: dict[str, Any] = {}
        self._rest: dict[str, list[Any]] = {}

    def want(self, key: str, tree: Any) -> None:
        """What of a tree is in host memory is to come to the device with the next call."""
        if hosted := _numbered(tree):
            self._coming[key] = hosted

    def take(self, key: str, tree: Any) -> Any:
        """A tree that was wanted, on the device."""
        if not (hosted := _numbered(tree)):
            return tree
        if key not in self._here:
            self.want(key, tree)
            self.flush()
        here = self._here.pop(key)
        leaves, treedef = jax.tree.flatten(tree)
        return jax.tree.unflatten(treedef, [here[str(i)] if str(i) in hosted else x for i, x in enumerate(leaves)])

    def put(self, key: str, new: Any, old: Any) -> None:
        """`new`, on the device, takes the place of `old`: what of that is in host memory is written there with the next
        call."""
        leaves, room = jax.tree.leaves(new), _numbered(old)
        if room:
            self._room[key], self._going[key] = room, {number: leaves[int(number)] for number in room}
        self._rest[key] = [None if str(i) in room else x for i, x in enumerate(leaves)]

    def placed(self, key: str, like: Any) -> Any:
        """What was put, where it belongs, in the structure of `like`."""
        if key in self._going:
            self.flush()
        gone, rest = self._gone.pop(key, {}), self._rest.pop(key)
        return jax.tree.unflatten(jax.tree.structure(like), [gone.get(str(i), x) for i, x in enumerate(rest)])

    def flush(self) -> None:
        """Moves what waits, without a program to do it beside."""
        if self._coming or self._room:
            self("move", tuple, out=())

    def __call__(
        self, name: str, function: Callable[..., Any], *args: Any, donate: Iterable[int] = (), out: Any
    ) -> Any:
        """See `Programs`."""
        # A program's arguments go by what they are, not by whose: those of all layers are the same.
        come, go = _roles(self._coming), _roles(self._room)
        coming = {role: self._coming[key] for key, role in come.items()}
        going, room = ({role: tree[key] for key, role in go.items()} for tree in (self._going, self._room))
        self._coming, self._going, self._room = {}, {}, {}

        def moving(room: Any, going: Any, coming: Any, *args: Any) -> Any:
            gone = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), going)
            here = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), coming)
            return gone, here, function(*args)

        def shardings(results: Any) -> Any:
            here = jax.tree.map(lambda x: Place(Place.of(x).sharding.with_memory_kind("device")), coming)
            return jax.tree.map(Place.of, room), here, out(results[2]) if callable(out) else out

        moving.__name__ = name.replace(" ", "_")
        # The places come first: a GPU's compiler without a GPU gives donated memory to results by their shapes alone.
        numbers = (0, *(number + 3 for number in donate))
        gone, here, results = self._programs(name, moving, room, going, coming, *args, donate=numbers, out=shardings)
        self._gone |= {key: gone[role] for key, role in go.items()}
        self._here |= {key: here[role] for key, role in come.items()}
        return results


def _roles(keys: Iterable[str]) -> dict[str, str]:
    """{key: what is left without numbers, made unique}."""
    roles: dict[str, str] = {}
    for key in keys:
        role = re.sub(" [0-9]+", "", key)
        roles[key] = role if role not in roles.values() else f"{role} {len(roles)}"
    return roles


def _numbered(tree: Any) -> dict[str, Any]:
    """The leaves of a tree that are in host memory, by their numbers."""
    leaves = enumerate(jax.tree.leaves(tree))
    return {str(i): x for i, x in leaves if Place.of(x).kind != "device"}
