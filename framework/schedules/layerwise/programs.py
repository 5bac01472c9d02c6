"""Compiles and calls the programs of a step that consists of several, and dry-runs such a step.

Each program is compiled once and then called from Python. A dry run executes the same Python code with abstract arrays:
it compiles every program that is called, and adds up the memory of all live arrays at each call. So the memory of a
step is known before any array exists. `TransferQueue` calls the programs together with transfers of offloaded arrays.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
from jax.sharding import Sharding

from plimsoll.framework.devices.bfc_pool import BfcPool, is_default_allocator
from plimsoll.framework.devices.executables import HostBytes
from plimsoll.framework.layout import PyTree, StateLayout, TensorSpec, path_name
from plimsoll.framework.terminal.phases import phase

ProgramKey: TypeAlias = tuple[Hashable, Hashable]  # name, and structure of the arguments
# In a dry run arrays are abstract.
Array: TypeAlias = "jax.Array | AbstractArray"

# --- compiled programs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerProgram:
    """A compiled program.

    Attributes:
        run: runs it on arrays; None if it was compiled for an absent machine.
        peak: bytes that it needs on the device, arguments included.
        about: further information from the compiler.
        results: the shapes of its results.
        placements: the `ArrayPlacement`s of its results.
        jaxpr: the program's jaxpr.
        host_temp: bytes of its temporaries in host memory, if the compiler reports them.
        moved: bytes that it moves between host and device, if the program's text shows them.
    """

    run: Any
    peak: int
    about: Any = None
    results: PyTree = ()
    placements: PyTree = ()
    jaxpr: Any = None
    host_temp: int = 0
    moved: int = 0


# (lowered program, its bytes in host memory) -> compiled program
Compile = Callable[[jax.stages.Lowered, HostBytes], LayerProgram]


@dataclass(frozen=True)
class ArrayPlacement:
    """The placement of an array: sharding, and memory kind, which the sharding of an unattached GPU loses."""

    sharding: Sharding
    kind: str = "device"

    @staticmethod
    def from_array(x: Array) -> ArrayPlacement:
        """Return the placement of an array, or of an object with shape and sharding."""
        if isinstance(x, AbstractArray):
            return x.placement
        return ArrayPlacement(x.sharding, x.sharding.memory_kind or "device")

    def bytes(self, x: Array | jax.ShapeDtypeStruct) -> int:
        """Return the bytes per device of an array with the shape and dtype of `x`."""
        shard_shape = self.sharding.shard_shape(x.shape)
        return math.prod(shard_shape) * x.dtype.itemsize


# --- the memory of a dry run -----------------------------------------------------------------------------------------


class AbstractArray:
    """An array without data; it is alive until it is donated or no references to it remain.

    Args:
        like: an object with the array's shape and dtype.
        placement: the array's placement.
        tracker: the memory tracker that counts it while it is alive.
        label: its name in reports.
    """

    def __init__(
        self, like: Array | jax.ShapeDtypeStruct, placement: ArrayPlacement, tracker: MemoryTracker, label: str
    ):
        self.shape = like.shape
        self.dtype = like.dtype
        self.placement = placement
        self._tracker = tracker
        self.nbytes = placement.bytes(like)
        tracker.live[placement.kind] += self.nbytes
        tracker.alive[id(self)] = LiveArray(label, placement.kind, self.nbytes)
        self._block = tracker.allocate(self.nbytes) if placement.kind == "device" else None

    def delete(self, *, is_donated: bool = False) -> None:
        """Remove the array from the memory tracker, after it was donated or lost its last reference."""
        if self._tracker.alive.pop(id(self), None):
            self._tracker.live[self.placement.kind] -= self.nbytes
            self._tracker.free(self._block, self.nbytes if is_donated else None)

    __del__ = delete


@dataclass(frozen=True)
class LiveArray:
    """An array that is alive during a dry run.

    Attributes:
        label: its name in reports: the program that returned it, and its path in the results.
        kind: the memory kind.
        bytes: bytes per device.
    """

    label: str
    kind: str
    bytes: int


class MemoryTracker:
    """Counts the memory of a dry run: bytes per device, and of the device's host memory.

    Args:
        pool: simulates the device's allocator; None if it leaves nothing empty.

    Attributes:
        live: bytes per device of the arrays that are alive now, by memory kind.
        alive: these arrays, by the id of the `AbstractArray`.
        calls: the programs, in order.
        peak: bytes on the device during the call that needs the most.
        host_peak: maximum bytes in host memory.
        moved: bytes moved between host and device.
        worst: the program of the call that needs the most, and the arrays alive during it.
        once: whether the calls are made once before the first step, instead of in each step.
    """

    def __init__(self, pool: BfcPool | None = None) -> None:
        self.live: dict[str, int] = {"device": 0, "pinned_host": 0}
        self.alive: dict[int, LiveArray] = {}
        self.calls: list[LayerProgram] = []
        self.peak = 0
        self.host_peak = 0
        self.moved = 0
        self.worst: tuple[LayerProgram, list[LiveArray]] | None = None
        self.once = False
        self._pool = pool
        # Blocks of the arrays that the current program takes over, by the arrays' bytes.
        self._donated_blocks: dict[int, list[int]] = {}

    @property
    def allocated(self) -> int:
        """The peak, including what the device's allocator leaves empty in its blocks and between them."""
        return self.peak if self._pool is None else max(self.peak, self._pool.end)

    def allocate(self, size: int) -> int | None:
        """Return the block of a new array on the device, which may be that of a donated array."""
        if self._pool is None:
            return None
        donated_blocks = self._donated_blocks.get(size)
        return donated_blocks.pop() if donated_blocks else self._pool.allocate(size)

    def free(self, block: int | None, donated_bytes: int | None = None) -> None:
        """Free an array's block, or if it was donated, keep it for a result of `donated_bytes` until `end_call`."""
        if block is None or self._pool is None:
            return
        if donated_bytes is None:
            self._pool.free(block)
        else:
            self._donated_blocks.setdefault(donated_bytes, []).append(block)

    def end_call(self, temp_bytes: int) -> None:
        """Allocate and free a program's temporaries, after its results; free donated arrays that no result reuses."""
        if self._pool is None:
            return
        self._pool.free(self._pool.allocate(temp_bytes))
        for blocks in self._donated_blocks.values():
            for block in blocks:
                self._pool.free(block)
        self._donated_blocks = {}

    def count(self, program: LayerProgram, peak: int) -> None:
        """Record a call during which the device holds `peak` bytes."""
        self.calls.append(program)
        if peak > self.peak:
            self.peak = peak
            self.worst = program, list(self.alive.values())


# --- programs by name ------------------------------------------------------------------------------------------------

# Each needs about 1 GiB of host memory.
_COMPILE_THREADS = 4


class Programs:
    """Compiled programs, by name and structure of their arguments.

    Args:
        jit: jax.jit with the compiler's options.
        layout: the layout, which places TensorSpecs.
    """

    def __init__(self, jit: Callable[..., jax.stages.Wrapped], layout: StateLayout):
        self._jit = jit
        self._layout = layout
        self._compiled: dict[ProgramKey, LayerProgram] = {}
        # The compile function and the memory tracker of the current dry run, if there is one.
        self._dry_run: tuple[Compile, MemoryTracker] | None = None
        # The devices of a CPU share a thread pool, and in a collective each device holds a thread until all have
        # arrived. Programs that run concurrently could wait for each other's threads, until XLA aborts the process.
        devices = layout.mesh.devices
        self._platform: str = devices.flat[0].platform
        self._waits = devices.size > 1 and self._platform == "cpu"
        # XLA for GPU compiles a program mostly on one core.
        self._num_threads = min(_COMPILE_THREADS, os.cpu_count() or 1) if self._platform == "gpu" else 1

    def __len__(self) -> int:
        return len(self._compiled)

    def dry_run(self, compile: Compile, driver: Callable[..., object], *trees: PyTree) -> MemoryTracker:
        """Dry-run `driver`, and compile each program it calls.

        Args:
            compile: compiles a program.
            driver: the Python code of the step.
            trees: its arguments, as arrays or TensorSpecs; it gets abstract arrays instead.
        """
        tracker = MemoryTracker(BfcPool() if self._platform == "gpu" and is_default_allocator() else None)
        if self._num_threads > 1:
            self._compile_together(compile, driver, trees)
        self._call(driver, trees, compile, tracker)
        return tracker

    def _call(self, driver: Callable[..., object], trees: PyTree, compile: Compile, tracker: MemoryTracker) -> None:
        """Call `driver` with abstract arrays."""
        # Like the caller of a real step, this name keeps the arguments alive until the end, except donated ones.
        arguments = _make_abstract_arrays(tracker, "", trees, jax.tree.map(self._get_placement, trees))
        self._dry_run = compile, tracker
        try:
            driver(*arguments)
        finally:
            self._dry_run = None

    def _compile_together(self, compile: Compile, driver: Callable[..., object], trees: PyTree) -> None:
        """Compile the programs that `driver` calls, several at a time; their memory is not known yet."""
        futures: list[Future[LayerProgram]] = []
        num_known = len(self._compiled)
        with ThreadPoolExecutor(self._num_threads) as pool:

            def submit(lowered: jax.stages.Lowered, offloaded: HostBytes) -> LayerProgram:
                futures.append(pool.submit(compile, lowered, offloaded))
                return LayerProgram(None, 0)

            try:
                self._call(driver, trees, submit, MemoryTracker())
                with phase(f"compiling {len(futures)} programs") if futures else nullcontext():
                    compiled = [future.result() for future in futures]
            finally:
                pool.shutdown(cancel_futures=True)
                traced = dict(itertools.islice(self._compiled.items(), num_known, None))
                for key in traced:
                    del self._compiled[key]
        for (key, program), result in zip(traced.items(), compiled, strict=True):
            self._compiled[key] = replace(
                result, results=program.results, placements=program.placements, jaxpr=program.jaxpr
            )

    def _get_placement(self, x: Array | TensorSpec | ArrayPlacement) -> ArrayPlacement:
        if isinstance(x, ArrayPlacement):
            return x
        if isinstance(x, TensorSpec):
            return ArrayPlacement(self._layout.sharding(x), x.memory_kind)
        return ArrayPlacement.from_array(x)

    def __call__(
        self,
        name: Hashable,
        function: Callable[..., PyTree],
        *args: PyTree,
        donate: Iterable[int] = (),
        out: PyTree | Callable[[PyTree], PyTree],
    ) -> PyTree:
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
        donate = tuple(donate)
        if self._dry_run is None:
            results = self._compiled[key].run(*args)
            return jax.block_until_ready(results) if self._waits else results
        compile, tracker = self._dry_run
        if key not in self._compiled:
            self._compiled[key] = self._compile(compile, function, args, donate, out)
        compiled = self._compiled[key]
        # An array that is passed twice is counted once.
        array_by_id = {id(abstract_array): abstract_array for abstract_array in jax.tree.leaves(args)}
        abstract_arrays = list(array_by_id.values())
        argument_bytes = sum(
            abstract_array.nbytes for abstract_array in abstract_arrays if abstract_array.placement.kind == "device"
        )
        # The program's own peak includes its arguments; all other arrays stay allocated in addition.
        live_bytes = tracker.live["device"]
        tracker.count(compiled, compiled.peak + live_bytes - argument_bytes)
        donated_arrays = jax.tree.leaves([args[i] for i in donate])
        # A donated host array is the destination of a result; nothing is read from it.
        tracker.moved += _offloaded_bytes(abstract_arrays) - _offloaded_bytes(donated_arrays)
        for abstract_array in donated_arrays:
            abstract_array.delete(is_donated=True)
        results = _make_abstract_arrays(tracker, str(name), compiled.results, compiled.placements)
        # The peak consists of arguments, results that reuse no donated argument, and temporaries.
        tracker.end_call(max(0, compiled.peak - argument_bytes - (tracker.live["device"] - live_bytes)))
        tracker.moved += _offloaded_bytes(results)
        tracker.host_peak = max(tracker.host_peak, tracker.live["pinned_host"])
        return results

    def _compile(
        self,
        compile: Compile,
        function: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        donate: tuple[int, ...],
        out: PyTree | Callable[[PyTree], PyTree],
    ) -> LayerProgram:
        """Compile a program; see `__call__`."""
        abstract_args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.placement.sharding), args
        )
        if callable(out):
            out = out(jax.eval_shape(function, *abstract_args))
        if any(isinstance(leaf, str) for leaf in jax.tree.leaves(out)):
            # The compiler chooses shardings when it compiles, so the program is compiled twice: the second time with
            # these shardings, in the memory kinds of `out`.
            lowered = self._jit(function, keep_unused=True).lower(*abstract_args)
            chosen_shardings = lowered.compile().output_shardings

            def choose_placement(x: object, sharding: Sharding) -> object:
                return ArrayPlacement(sharding.with_memory_kind(x), x) if isinstance(x, str) else x

            out = jax.tree.map(choose_placement, out, chosen_shardings)
        placements = jax.tree.map(self._get_placement, out)
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
        compiled = compile(traced.lower(), offloaded)
        return replace(compiled, results=traced.out_info, placements=placements, jaxpr=traced.jaxpr)


def _make_abstract_arrays(tracker: MemoryTracker, name: str, trees: PyTree, placements: PyTree) -> PyTree:
    """Create abstract arrays for trees of shapes, labeled by name and path."""
    return jax.tree_util.tree_map_with_path(
        lambda keypath, x, placement: AbstractArray(x, placement, tracker, f"{name}/{path_name(keypath)}"),
        trees,
        placements,
    )


def _offloaded_bytes(tree: PyTree) -> int:
    """Return the bytes of a tree's abstract arrays that are in host memory."""
    return sum(x.nbytes for x in jax.tree.leaves(tree) if x.placement.kind != "device")


# --- transfers between host and device -------------------------------------------------------------------------------

NumberedLeaves = dict[str, Array]  # leaves of a tree by their index in it


@dataclass(frozen=True)
class TransferKey:
    """The name of a tree that moves between host and device.

    Attributes:
        role: its name among the arguments of a program, which is the same for all layers.
        index: index of the layer; None for a tree of a stage.
        microbatch: index of the microbatch, among those that pass through the layer together.
    """

    role: str
    index: int | None = None
    microbatch: int = 0


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
        self._staying: dict[TransferKey, list[Array | None]] = {}

    def request(self, key: TransferKey, tree: PyTree) -> None:
        """Request that the next call fetches the offloaded leaves of a tree to the device.

        Args:
            key: name of the tree.
            tree: its arrays, in the memory in which they are stored.
        """
        offloaded = _index_offloaded_leaves(tree)
        if offloaded:
            self._requested[key] = offloaded

    def take(self, key: TransferKey, tree: PyTree) -> PyTree:
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
        for number, leaf in arrived.items():
            leaves[int(number)] = leaf
        return jax.tree.unflatten(treedef, leaves)

    def put(self, key: TransferKey, new: PyTree, old: PyTree) -> None:
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

    def get_stored(self, key: TransferKey, like: PyTree) -> PyTree:
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
        self,
        name: str,
        function: Callable[..., PyTree],
        *args: PyTree,
        donate: Iterable[int] = (),
        out: PyTree | Callable[[PyTree], PyTree],
    ) -> PyTree:
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

        def moving(destinations: PyTree, going: PyTree, coming: PyTree, *args: PyTree) -> PyTree:
            stored = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), going)
            arrived = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), coming)
            return _interleave(stored, arrived), function(*args)

        # The name appears in profiles and compiler output.
        moving.__name__ = name.replace(" ", "_")

        def place_results(results: PyTree) -> PyTree:
            stored = jax.tree.map(ArrayPlacement.from_array, destinations)
            arrived = jax.tree.map(
                lambda x: ArrayPlacement(ArrayPlacement.from_array(x).sharding.with_memory_kind("device")), arriving
            )
            return _interleave(stored, arrived), out(results[1]) if callable(out) else out

        # The host arrays to overwrite come first: without a GPU, the GPU compiler assigns donated memory to results
        # by their shapes only.
        moved, results = self._programs(
            name,
            moving,
            destinations,
            leaving,
            arriving,
            *args,
            donate=(0, *(number + 3 for number in donate)),
            out=place_results,
        )
        stored, arrived = _separate(moved, destinations, arriving)
        for key, role in destination_roles.items():
            self._stored[key] = stored[role]
        for key, role in requested_roles.items():
            self._arrived[key] = arrived[role]
        return results


def _interleave(stored: PyTree, arrived: PyTree) -> list[dict[str, Any]]:
    """Return the leaves of two trees in turns, each in a dict with its path.

    XLA for GPU starts the copies of a program in the order of its results, on a few streams. In turns, copies in both
    directions run at the same time; one tree after the other, they do not.
    """
    trees = (
        [{f"{name}/{path_name(path)}": leaf} for path, leaf in jax.tree.leaves_with_path(tree)]
        for name, tree in (("stored", stored), ("arrived", arrived))
    )
    return [entry for pair in itertools.zip_longest(*trees) for entry in pair if entry is not None]


def _separate(moved: list[dict[str, Any]], stored: PyTree, arrived: PyTree) -> tuple[PyTree, PyTree]:
    """Undo `_interleave`, given trees of the same structures."""
    numbers = itertools.count()
    order = jax.tree.leaves(_interleave(*jax.tree.map(lambda _: next(numbers), (stored, arrived))))
    leaf_by_number = dict(zip(order, jax.tree.leaves(moved), strict=True))
    leaves = [leaf_by_number[number] for number in range(len(moved))]
    return jax.tree.unflatten(jax.tree.structure((stored, arrived)), leaves)


def _assign_roles(keys: Iterable[TransferKey]) -> dict[TransferKey, str]:
    """Return the keys' roles, made unique."""
    roles: dict[TransferKey, str] = {}
    for key in keys:
        role = key.role
        roles[key] = role if role not in roles.values() else f"{role} {len(roles)}"
    return roles


def _index_offloaded_leaves(tree: PyTree) -> NumberedLeaves:
    """Return the leaves of a tree that are in host memory, by their index."""
    offloaded = {}
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        if ArrayPlacement.from_array(leaf).kind != "device":
            offloaded[str(i)] = leaf
    return offloaded
