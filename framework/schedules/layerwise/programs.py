"""Compiles and calls the programs of a step that consists of several, and dry-runs such a step.

Each program is compiled once and then called from Python. A dry run executes the same Python code with abstract arrays:
it compiles every program that is called, and adds up the memory of all live arrays at each call. So the memory of a
step is known before any array exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from plimsoll.framework.devices.executables import HostBytes
from plimsoll.framework.layout import StateLayout, TensorSpec, path_name

BytesByMemoryKind = dict[str, int]  # bytes per device by memory kind
Array = Any  # a jax.Array, or in a dry run an AbstractArray
Tree = Any  # a pytree of these, or of shapes
LiveArray = tuple[str, str, int]  # label, memory kind, bytes per device


class LayerProgram(NamedTuple):
    """A compiled program.

    Attributes:
        run: runs it on arrays.
        peak: bytes that it needs on the device, arguments included.
        about: further information from the compiler.
        results: the shapes and the `ArrayPlacement`s of its results.
        jaxpr: the program's jaxpr.
        host_temp: bytes of its temporaries in host memory, if the compiler reports them.
        moved: bytes that it moves between host and device, if the program's text shows them.
    """

    run: Any
    peak: int
    about: Any = None
    results: tuple[Any, Any] = ((), ())
    jaxpr: Any = None
    host_temp: int = 0
    moved: int = 0


Compile = Callable[[Any, HostBytes], LayerProgram]  # (jax.stages.Lowered, its bytes in host memory) -> compiled program


@dataclass(frozen=True)
class ArrayPlacement:
    """The placement of an array: sharding, and memory kind, which the sharding of an unattached GPU loses."""

    sharding: Any
    kind: str = "device"

    @staticmethod
    def from_array(x: Array) -> ArrayPlacement:
        """Return the placement of an array, or of an object with shape and sharding."""
        if isinstance(x, AbstractArray):
            return x.placement
        return ArrayPlacement(x.sharding, x.sharding.memory_kind or "device")

    def bytes(self, x: Array) -> int:
        """Return the bytes per device of an array with the shape and dtype of `x`."""
        shard_shape = self.sharding.shard_shape(x.shape)
        return math.prod(shard_shape) * x.dtype.itemsize


class AbstractArray:
    """An array without data; it is alive until it is donated or no references to it remain.

    Args:
        like: an object with the array's shape and dtype.
        placement: the array's placement.
        tracker: the memory tracker that counts it while it is alive.
        label: its name in reports.
    """

    def __init__(self, like: Array, placement: ArrayPlacement, tracker: MemoryTracker, label: str):
        self.shape = like.shape
        self.dtype = like.dtype
        self.placement = placement
        self._tracker = tracker
        self.nbytes = placement.bytes(like)
        tracker.live[placement.kind] += self.nbytes
        tracker.alive[id(self)] = label, placement.kind, self.nbytes

    def delete(self) -> None:
        """Remove the array from the memory tracker, after it was donated or lost its last reference."""
        if self._tracker.alive.pop(id(self), None):
            self._tracker.live[self.placement.kind] -= self.nbytes

    __del__ = delete


class MemoryTracker:
    """Counts the memory of a dry run: bytes per device, and of the device's host memory.

    Attributes:
        live: bytes of the arrays that are alive now, by memory kind.
        alive: label, memory kind and bytes of these arrays, by the id of the `AbstractArray`.
        calls: the programs, in order.
        peak: bytes on the device during the call that needs the most.
        host_peak: maximum bytes in host memory.
        moved: bytes moved between host and device.
        worst: the program of the call that needs the most, and the arrays alive during it.
        once: whether the calls are made once before the first step, instead of in each step.
    """

    def __init__(self) -> None:
        self.live: BytesByMemoryKind = {"device": 0, "pinned_host": 0}
        self.alive: dict[int, LiveArray] = {}
        self.calls: list[LayerProgram] = []
        self.peak = 0
        self.host_peak = 0
        self.moved = 0
        self.worst: tuple[LayerProgram, list[LiveArray]] | None = None
        self.once = False

    def count(self, program: LayerProgram, peak: int) -> None:
        """Record a call during which the device holds `peak` bytes."""
        self.calls.append(program)
        if peak > self.peak:
            self.peak = peak
            self.worst = program, list(self.alive.values())


class Programs:
    """Compiled programs, by name and structure of their arguments.

    Args:
        jit: jax.jit with the compiler's options.
        compile: see `Compile`.
        layout: the layout, which places TensorSpecs.
    """

    def __init__(self, jit: Any, compile: Compile, layout: StateLayout):
        self._jit = jit
        self.compile = compile
        self._layout = layout
        self._compiled: dict[Any, LayerProgram] = {}
        self._tracker: MemoryTracker | None = None
        # The devices of a CPU share a thread pool, and in a collective each device holds a thread until all have
        # arrived. Programs that run concurrently could wait for each other's threads, until XLA aborts the process.
        devices = layout.mesh.devices
        self._waits = devices.size > 1 and devices.flat[0].platform == "cpu"

    def __len__(self) -> int:
        return len(self._compiled)

    def dry_run(self, driver: Callable[..., Any], *trees: Tree) -> MemoryTracker:
        """Dry-run `driver`, and compile each program it calls.

        Args:
            driver: the Python code of the step.
            trees: its arguments, as arrays or TensorSpecs; it gets abstract arrays instead.
        """
        tracker = MemoryTracker()
        self._tracker = tracker
        try:
            # The abstract arrays are not bound to a name here: only the driver may hold references to them.
            driver(*_make_abstract_arrays(tracker, "", trees, jax.tree.map(self._get_placement, trees)))
        finally:
            self._tracker = None
        return tracker

    def _get_placement(self, x: Array | TensorSpec) -> ArrayPlacement:
        if isinstance(x, TensorSpec):
            return ArrayPlacement(self._layout.sharding(x), x.memory_kind)
        return ArrayPlacement.from_array(x)

    def __call__(
        self, name: Any, function: Callable[..., Any], *args: Tree, donate: Iterable[int] = (), out: Any
    ) -> Tree:
        """Compute `function(*args)` with the program for that name and structure of arguments.

        Args:
            name: identifies the function, with everything that the structure of its arguments does not determine.
            function: a pure function.
            args: trees of arrays.
            donate: indices of the arguments that are donated, and invalid afterwards.
            out: TensorSpecs or `ArrayPlacement`s of the results, or a function that returns them given the results'
                shapes. Where there is only a memory kind, the compiler chooses the sharding.
        """
        # Shapes are not part of the key: calls with the same name differ only in the structure of their arguments.
        key = name, jax.tree.structure(args)
        if self._tracker is None:
            results = self._compiled[key].run(*args)
            return jax.block_until_ready(results) if self._waits else results
        if key not in self._compiled:
            self._compile(key, function, args, tuple(donate), out)
        return self._dry_run(self._tracker, key, args, tuple(donate))

    def _compile(self, key: Any, function: Callable[..., Any], args: Tree, donate: tuple[int, ...], out: Any) -> None:
        """Compile a program; see `__call__`."""

        def abstract(abstract_array: AbstractArray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                abstract_array.shape, abstract_array.dtype, sharding=abstract_array.placement.sharding
            )

        abstract_args = jax.tree.map(abstract, args)
        if callable(out):
            out = out(jax.eval_shape(function, *abstract_args))
        placements = self._result_placements(function, abstract_args, out)
        # Unused arguments stay, because the tracker counts all arguments. Every result has a sharding: donated memory
        # is only given to a result of the same memory kind if all kinds are known.
        shardings = jax.tree.map(lambda placement: placement.sharding, placements)
        jitted = self._jit(function, donate_argnums=donate, out_shardings=shardings, keep_unused=True)
        traced = jitted.trace(*abstract_args)
        donated_args = [args[i] for i in donate]
        result_bytes = jax.tree.map(
            lambda x, placement: placement.bytes(x) * (placement.kind != "device"), traced.out_info, placements
        )
        offloaded = HostBytes(
            _offloaded_bytes(args), sum(jax.tree.leaves(result_bytes)), _offloaded_bytes(donated_args)
        )
        compiled = self.compile(traced.lower(), offloaded)
        self._compiled[key] = compiled._replace(results=(traced.out_info, placements), jaxpr=traced.jaxpr)

    def _result_placements(self, function: Callable[..., Any], abstract_args: Tree, out: Any) -> Tree:
        """Return the placements of a program's results, from `out`, which is no longer a function; see `__call__`."""
        if any(isinstance(leaf, str) for leaf in jax.tree.leaves(out)):
            # The compiler chooses shardings when it compiles, so the program is compiled twice: the second time with
            # these shardings, in the memory kinds of `out`.
            lowered = self._jit(function, keep_unused=True).lower(*abstract_args)
            chosen_shardings = lowered.compile().output_shardings

            def resolve_placement(kind: Any, sharding: Any) -> Any:
                return ArrayPlacement(sharding.with_memory_kind(kind), kind) if isinstance(kind, str) else kind

            out = jax.tree.map(resolve_placement, out, chosen_shardings)
        return jax.tree.map(lambda x: x if isinstance(x, ArrayPlacement) else self._get_placement(x), out)

    def _dry_run(self, tracker: MemoryTracker, key: Any, args: Tree, donate: tuple[int, ...]) -> Tree:
        """Record a call of a compiled program; return its results as abstract arrays."""
        compiled = self._compiled[key]
        # An array that is passed twice is counted once.
        array_by_id = {id(abstract_array): abstract_array for abstract_array in jax.tree.leaves(args)}
        abstract_arrays = list(array_by_id.values())
        argument_bytes = sum(
            abstract_array.nbytes for abstract_array in abstract_arrays if abstract_array.placement.kind == "device"
        )
        # The program's own peak includes its arguments; all other arrays stay allocated in addition.
        tracker.count(compiled, compiled.peak + tracker.live["device"] - argument_bytes)
        donated_arrays = jax.tree.leaves([args[i] for i in donate])
        # A donated host array is the destination of a result; nothing is read from it.
        tracker.moved += _offloaded_bytes(abstract_arrays) - _offloaded_bytes(donated_arrays)
        for abstract_array in donated_arrays:
            abstract_array.delete()
        results = _make_abstract_arrays(tracker, str(key[0]), *compiled.results)
        tracker.moved += _offloaded_bytes(results)
        tracker.host_peak = max(tracker.host_peak, tracker.live["pinned_host"])
        return results


def _make_abstract_arrays(tracker: MemoryTracker, name: str, trees: Tree, placements: Tree) -> Tree:
    """Create abstract arrays for trees of shapes, labeled by name and path."""

    def abstract_array(keypath: Any, x: Array, placement: ArrayPlacement) -> AbstractArray:
        return AbstractArray(x, placement, tracker, f"{name}/{path_name(keypath)}")

    return jax.tree_util.tree_map_with_path(abstract_array, trees, placements)


def _offloaded_bytes(tree: Tree) -> int:
    """Return the bytes of a tree's abstract arrays that are in host memory."""
    return sum(x.nbytes for x in jax.tree.leaves(tree) if x.placement.kind != "device")
