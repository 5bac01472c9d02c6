"""A step made of several compiled programs: they are compiled once by kind, called from Python, and can be rehearsed.

A rehearsal runs the same Python code with arrays that have no bytes. It compiles every kind of program that comes up,
and counts what is alive at each call: so many bytes are needed, before any array exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from framework.devices.executables import HostBytes
from framework.layout import StateLayout, TensorSpec, path_name

Kinds = dict[str, int]  # bytes of one device by memory kind
Array = Any  # a jax.Array, or in a rehearsal a Ghost
Tree = Any  # a pytree of these, or of shapes
LiveArray = tuple[str, str, int]  # label, memory kind, bytes of one device


class Compiled(NamedTuple):
    """A compiled program.

    Attributes:
      run: runs it on arrays.
      peak: bytes that it needs on the device, arguments included.
      about: what else the compiler said.
      results: the shapes and the Places of its results.
      jaxpr: what it computes.
      host_temp: bytes of its temporaries in host memory, where the compiler knows them.
      moved: bytes that it moves between host and device, where its text says so.
    """

    run: Any
    peak: int
    about: Any = None
    results: tuple[Any, Any] = ((), ())
    jaxpr: Any = None
    host_temp: int = 0
    moved: int = 0


Compile = Callable[[Any, HostBytes], Compiled]  # of (jax.stages.Lowered, what of it is in host memory)


@dataclass(frozen=True)
class Place:
    """Where an array is: its sharding, and its kind of memory, which a sharding of a GPU that is not here forgets."""

    sharding: Any
    kind: str = "device"

    @staticmethod
    def of(x: Array) -> Place:
        """The place of an array, or of what has its shape and sharding."""
        if isinstance(x, Ghost):
            return x.place
        return Place(x.sharding, x.sharding.memory_kind or "device")

    def bytes(self, x: Array) -> int:
        """The bytes of one device's part of an array of that shape and dtype."""
        shard_shape = self.sharding.shard_shape(x.shape)
        return math.prod(shard_shape) * x.dtype.itemsize


class Ghost:
    """An array without bytes; it is alive as long as somebody refers to it or until it is donated."""

    def __init__(
        self,
        like: Array,
        place: Place,
        ledger: Ledger,
        label: str,
    ):
        self.shape = like.shape
        self.dtype = like.dtype
        self.place = place
        self._ledger = ledger
        self.nbytes = place.bytes(like)
        ledger.live[place.kind] += self.nbytes
        ledger.alive[id(self)] = label, place.kind, self.nbytes

    def delete(self) -> None:
        """Takes it off the ledger: it was donated, or nobody refers to it any more."""
        if self._ledger.alive.pop(id(self), None):
            self._ledger.live[self.place.kind] -= self.nbytes

    __del__ = delete


class Ledger:
    """What a rehearsal counts: bytes of one device, or of its host's memory.

    Attributes:
      live: bytes of the arrays that are alive now, by memory kind.
      alive: these arrays, by the ids of their ghosts.
      calls: the programs, in order.
      peak: bytes on the device during the worst call.
      host_peak: bytes in host memory at most.
      moved: bytes that went between host and device.
      worst: the program of the worst call, and what was alive then.
      once: the calls are made before the first step, and not in each step.
    """

    def __init__(self) -> None:
        self.live: Kinds = {"device": 0, "pinned_host": 0}
        self.alive: dict[int, LiveArray] = {}
        self.calls: list[Compiled] = []
        self.peak = 0
        self.host_peak = 0
        self.moved = 0
        self.worst: tuple[Compiled, list[LiveArray]] | None = None
        self.once = False

    def count(self, program: Compiled, peak: int) -> None:
        """Counts a call, during which the device has `peak` bytes."""
        self.calls.append(program)
        if peak > self.peak:
            self.peak = peak
            self.worst = program, list(self.alive.values())


class Programs:
    """Programs by kind.

    Args:
        jit: jax.jit with the compiler's options.
        compile: see `Compile`.
        layout: knows the places of TensorSpecs.
    """

    def __init__(
        self,
        jit: Any,
        compile: Compile,
        layout: StateLayout,
    ):
        self._jit = jit
        self.compile = compile
        self._layout = layout
        self._compiled: dict[Any, Compiled] = {}
        self._ledger: Ledger | None = None
        # The devices of a CPU share a pool of threads, and in a collective each holds one until all have come: programs
        # that run at once could wait for each other's threads, until XLA ends the process.
        devices = layout.mesh.devices
        self._waits = devices.size > 1 and devices.flat[0].platform == "cpu"

    def __len__(self) -> int:
        return len(self._compiled)

    def rehearse(self, driver: Callable[..., Any], *trees: Tree) -> Ledger:
        """Runs `driver` with ghosts of the arrays or TensorSpecs in `trees`, and compiles what comes up on the way."""
        ledger = Ledger()
        self._ledger = ledger
        try:
            # The ghosts have no name here: the driver alone is to refer to them.
            driver(*_ghosts(ledger, "", trees, jax.tree.map(self._place, trees)))
        finally:
            self._ledger = None
        return ledger

    def _place(self, x: Array | TensorSpec) -> Place:
        if isinstance(x, TensorSpec):
            return Place(self._layout.sharding(x), x.memory_kind)
        return Place.of(x)

    def __call__(
        self,
        name: Any,
        function: Callable[..., Any],
        *args: Tree,
        donate: Iterable[int] = (),
        out: Any,
    ) -> Tree:
        """`function(*args)` by the program of that name and that structure of arguments.

        Args:
            name: says which function it is, with all that is not in the structure of its arguments.
            function: pure.
            args: trees of arrays.
            donate: numbers of the arguments that are gone afterwards.
            out: TensorSpecs or Places of the results, or a function of their shapes that returns those; in place of
                one, a kind of memory, where the compiler may choose the rest.
        """
        # Shapes are no part of the key: a name's arguments differ in nothing but their structure.
        key = name, jax.tree.structure(args)
        if self._ledger is None:
            results = self._compiled[key].run(*args)
            return jax.block_until_ready(results) if self._waits else results
        if key not in self._compiled:
            self._make(key, function, args, tuple(donate), out)
        return self._rehearsed(self._ledger, key, args, tuple(donate))

    def _make(
        self,
        key: Any,
        function: Callable[..., Any],
        args: Tree,
        donate: tuple[int, ...],
        out: Any,
    ) -> None:
        """Compiles a program; see `__call__`."""

        def abstract(ghost: Ghost) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(ghost.shape, ghost.dtype, sharding=ghost.place.sharding)

        abstract_args = jax.tree.map(abstract, args)
        if callable(out):
            out = out(jax.eval_shape(function, *abstract_args))
        places = self._result_places(function, abstract_args, out)
        # Every argument is kept, as all are counted. Every result has a sharding, as donated memory is given to a
        # result of the same kind of memory only where all kinds are known.
        shardings = jax.tree.map(lambda place: place.sharding, places)
        jitted = self._jit(function, donate_argnums=donate, out_shardings=shardings, keep_unused=True)
        traced = jitted.trace(*abstract_args)
        donated_args = [args[i] for i in donate]
        result_bytes = jax.tree.map(lambda x, place: place.bytes(x) * (place.kind != "device"), traced.out_info, places)
        hosted = HostBytes(_hosted_bytes(args), sum(jax.tree.leaves(result_bytes)), _hosted_bytes(donated_args))
        compiled = self.compile(traced.lower(), hosted)
        self._compiled[key] = compiled._replace(results=(traced.out_info, places), jaxpr=traced.jaxpr)

    def _result_places(
        self,
        function: Callable[..., Any],
        abstract_args: Tree,
        out: Any,
    ) -> Tree:
        """The Places of a program's results, of `out` without the function; see `__call__`."""
        if any(isinstance(leaf, str) for leaf in jax.tree.leaves(out)):
            # The compiler chooses shardings when it compiles, so the program is compiled twice: the second
            # time with those, in the memory that `out` asks for.
            lowered = self._jit(function, keep_unused=True).lower(*abstract_args)
            chosen_shardings = lowered.compile().output_shardings

            def chosen_place(kind: Any, sharding: Any) -> Any:
                return Place(sharding.with_memory_kind(kind), kind) if isinstance(kind, str) else kind

            out = jax.tree.map(chosen_place, out, chosen_shardings)
        return jax.tree.map(lambda x: x if isinstance(x, Place) else self._place(x), out)

    def _rehearsed(
        self,
        ledger: Ledger,
        key: Any,
        args: Tree,
        donate: tuple[int, ...],
    ) -> Tree:
        """Counts a call of a compiled program; the ghosts of its results."""
        compiled = self._compiled[key]
        # An array that is an argument twice is counted once.
        ghost_by_id = {id(ghost): ghost for ghost in jax.tree.leaves(args)}
        ghosts = list(ghost_by_id.values())
        argument_bytes = sum(ghost.nbytes for ghost in ghosts if ghost.place.kind == "device")
        # The program's own peak includes its arguments, and the others stay where they are beside it.
        ledger.count(compiled, compiled.peak + ledger.live["device"] - argument_bytes)
        donated_ghosts = jax.tree.leaves([args[i] for i in donate])
        # A donated host array is the room for a result, and nothing is read from it.
        ledger.moved += _hosted_bytes(ghosts) - _hosted_bytes(donated_ghosts)
        for ghost in donated_ghosts:
            ghost.delete()
        results = _ghosts(ledger, str(key[0]), *compiled.results)
        ledger.moved += _hosted_bytes(results)
        ledger.host_peak = max(ledger.host_peak, ledger.live["pinned_host"])
        return results


def _ghosts(
    ledger: Ledger,
    name: str,
    trees: Tree,
    places: Tree,
) -> Tree:
    """Ghosts of trees of shapes, labelled by name and path."""

    def ghost(keypath: Any, x: Array, place: Place) -> Ghost:
        return Ghost(x, place, ledger, f"{name}/{path_name(keypath)}")

    return jax.tree_util.tree_map_with_path(ghost, trees, places)


def _hosted_bytes(tree: Tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree) if x.place.kind != "device")
