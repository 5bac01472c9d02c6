"""`stream`: keeps the state of any optax transformation in host memory, with one chunk at a time on the device.

Offloading as in apple/axlearn#867, with the streaming that its review asked for: there, all of the state is fetched
before the update. In a config, `memory.optimizer_state` and `memory.update` do this and more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from plimsoll.extras.functions.update_rules import trace_influence
from plimsoll.framework.layout import PyTree, TensorSpec, fetch_leaf, flatten, store_leaf
from plimsoll.framework.learner.update import slice_layer, write_layer
from plimsoll.framework.optimizers.offload import tag_large_matches
from plimsoll.framework.optimizers.update_locality import UpdateLocality, probe


def stream(
    optimizer: optax.GradientTransformation, *, pattern: str = ".*", chunk_bytes: int = 16 << 20
) -> optax.GradientTransformationExtraArgs:
    """Keep the state of an optimizer in host memory, and bring it to the device one chunk at a time.

        optimizer = pl.stream(optax.adamw(1e-3))
        state = optimizer.init(params)
        updates, state = optimizer.update(gradients, state, params)   # inside the step that is jitted

    The state has the structure, shapes and values of the optimizer's own state. Leaves that match are in memory of the
    kind `pinned_host`, and a jitted step keeps them there. Vectors, scalars and leaves under 1 MiB stay on the device.
    The updates reuse the memory of the gradients if these are not needed afterwards. With `eager` or `eager_scan`, the
    streamed optimizer updates a module or a layer in the backward pass, so only one gradient exists at a time.

    Donate both parameters and state, in this order. Without donation the state is in host memory twice. If only the
    state is donated, JAX 0.10 pairs donated and returned arrays by shape and may place new parameters into the state's
    host memory, where the program fails with an error about memory kinds.

    `update` has one more argument: `gradient_factor`, a float scalar that multiplies all gradients. To clip by the
    exact global norm, pass min(1, limit / optax.global_norm(gradients)).

    Complexity of an update of P parameters with S bytes of state: the optimizer's own arithmetic. S bytes cross the
    host link in each direction, one chunk after another. In addition to parameters, gradients and updates, the device
    holds one chunk: `chunk_bytes` of a parameter, or a whole one if it cannot be sliced, with its old and new state.

    Args:
        optimizer: any transformation whose update of a tensor depends only on that tensor's gradients, and that works
            without the other tensors (they are None).
        pattern: a regex, searched in the paths of the state, such as "0/mu/layers/query"; see `offload_optimizer`.
        chunk_bytes: a parameter with more bytes is updated in slices of at most this size if a trial shows that the
            optimizer treats the slices independently. Slices are along the first axis, and also along the second if
            the optimizer works by element. Other parameters are updated whole.

    Raises:
        ValueError: from `init` and `update`: the pattern matches nothing, the optimizer looks at several tensors
            together, or `params` is missing.
    """
    streamed = StreamedOptimizer(UpdatePlanner(optax.with_extra_args_support(optimizer), pattern, chunk_bytes))
    return optax.GradientTransformationExtraArgs(streamed.init, streamed.update)


@dataclass(frozen=True)
class StreamedOptimizer:
    """A streamed optimizer: the two functions of an optax transformation, and the per-layer update for `eager_scan`."""

    planner: UpdatePlanner

    def init(self, params: PyTree) -> PyTree:
        """Return the initial optimizer state, with matching leaves in host memory."""
        return self.store_state(params, self.planner.optimizer.init(params))

    def store_state(self, params: PyTree, state: PyTree) -> PyTree:
        """Move a state, or a stack of states of layers with such parameters, to its memory kinds."""
        specs = self.planner.plan(params).specs
        stored = [store_leaf(specs[path], jnp.asarray(leaf)) for path, leaf in flatten(state).items()]
        return jax.tree.unflatten(jax.tree.structure(state), stored)

    def update(
        self,
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        gradient_factor: jax.Array | float | None = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, PyTree]:
        """Return (updates, new state) for all parameters."""
        if params is None:
            raise ValueError("stream: expected update(gradients, state, params), given no parameters")
        plan = self.planner.plan(params)
        streamed = StreamedUpdate(self.planner.optimizer, plan, params, gradient_factor, extra_args)
        return streamed.run(updates, state)

    def update_layer(
        self,
        gradients: PyTree,
        state: PyTree,
        params: PyTree,
        layer: jax.Array | int,
        is_applied: jax.Array | None,
        result: ResultFunction,
    ) -> tuple[PyTree, PyTree]:
        """Return (results for one layer's parameters, the state of all layers with that layer's state updated).

        Args:
            gradients, params: gradients and parameters of the layer.
            state: a stack of all layers' states, [L, ...]; the state of one layer, [...], goes with `layer` = 0.
            layer: index of the layer, an integer.
            is_applied: a bool scalar, whether to store the new state; None: always.
            result: (parameter, update) -> the result, for arrays or slices of them.
        """
        plan = self.planner.plan(params)
        streamed = StreamedUpdate(self.planner.optimizer, plan, params, None, {}, layer, is_applied, result)
        return streamed.run(gradients, state)


def as_streamed_optimizer(optimizer: object) -> StreamedOptimizer | None:
    """Return the `StreamedOptimizer` behind an optimizer that `stream` made; None for any other optimizer."""
    # An optax transformation has no field for it, but its `update` is a method of the StreamedOptimizer.
    owner = getattr(getattr(optimizer, "update", None), "__self__", None)
    return owner if isinstance(owner, StreamedOptimizer) else None


# --- one update ------------------------------------------------------------------------------------------------------

# Leaves of an optimizer state by path.
Leaves = dict[str, jax.Array]
# (parameter, update) -> an array of the same shape.
ResultFunction = Callable[[jax.Array, jax.Array], jax.Array]


def select_update(param: jax.Array, update: jax.Array) -> jax.Array:
    """Return the update itself; a `ResultFunction`."""
    return update


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _ChunkCarry:
    """Carry of the loop over the slices of a parameter.

    Attributes:
        gradient: [slices, *slice]. Slices that were updated hold the result instead, if the dtypes agree.
        update: the results [slices, *slice] if the dtypes do not agree; else None.
        state: the chunk's state leaves by path: [slices, *slice], or [1, ...] for a leaf that is not sliced. For
            stacked layers, [layers * slices, *slice] or [layers, ...].
    """

    gradient: jax.Array
    update: jax.Array | None
    state: Leaves


@dataclass(frozen=True)
class StreamedUpdate:
    """One update of all parameters, or of those of one layer whose state is part of a stack.

    Attributes:
        optimizer, plan: the optimizer, and the chunks of its update.
        params: the parameters.
        gradient_factor: factor that multiplies all gradients; None for 1.
        extra_args: extra arguments of the optimizer's update.
        layer: index of the layer in the stacked state, an integer; 0 if the state is not a stack.
        is_applied: a bool scalar, whether to store the new state; None: always.
        result: (parameter, update) -> the value that `run` returns for them, slice by slice.
    """

    optimizer: optax.GradientTransformationExtraArgs
    plan: UpdatePlan
    params: PyTree
    gradient_factor: jax.Array | float | None
    extra_args: dict[str, PyTree]
    layer: jax.Array | int = 0
    is_applied: jax.Array | None = None
    result: ResultFunction = select_update

    def run(self, gradients: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return (updates, or the values that `result` computes from them; new state)."""
        gradient_leaves, structure = jax.tree.flatten(gradients)
        old_leaves = flatten(state)
        new_leaves = dict(old_leaves)
        updates = []
        for chunk in self.plan.chunks:
            # Each chunk reads the old counters, even if earlier chunks have updated them.
            chunk_leaves = {path: old_leaves[path] for path in chunk.state_paths}
            update, new_chunk_leaves = self._update_chunk(chunk, gradient_leaves[chunk.number], chunk_leaves)
            updates.append(update)
            new_leaves |= new_chunk_leaves
        new_state = jax.tree.unflatten(jax.tree.structure(state), new_leaves.values())
        return jax.tree.unflatten(structure, updates), new_state

    def _update_chunk(self, chunk: WeightChunk, gradient: jax.Array, state: Leaves) -> tuple[jax.Array, Leaves]:
        """Return a parameter's update and its new state."""
        param = jax.tree.leaves(self.params)[chunk.number]
        stacks = {path: _reshape_to_slices(leaf, self._slice_shape(chunk, path)) for path, leaf in state.items()}
        is_offloaded = any(self.plan.specs[path].is_offloaded for path in state)
        # A loop is only needed to transfer state, or to update slices in turn.
        if chunk.slices == 1 and not is_offloaded:
            layer_state = {path: slice_layer(stack, self.layer) for path, stack in stacks.items()}
            update, new_state = self._update_param(chunk, gradient, layer_state, param)
            new_stacks = {path: write_layer(stack, new_state[path], self.layer) for path, stack in stacks.items()}
        else:
            update, new_stacks = self._update_by_slices(chunk, gradient, stacks, param)
        return update, {path: stack.reshape(state[path].shape) for path, stack in new_stacks.items()}

    def _update_by_slices(
        self, chunk: WeightChunk, gradient: jax.Array, stacks: Leaves, param: jax.Array
    ) -> tuple[jax.Array, Leaves]:
        gradient_slices = _reshape_to_slices(gradient, chunk.slice_shape)
        param_slices = _reshape_to_slices(param, chunk.slice_shape)
        update_dtype = self._update_dtype(chunk, gradient, param)
        update = None
        if update_dtype != gradient.dtype:
            update = jnp.zeros(gradient_slices.shape, update_dtype)

        def body(index: jax.Array, carry: _ChunkCarry) -> _ChunkCarry:
            return self._update_slice(chunk, param_slices, stacks, index, carry)

        # A loop keeps the compiler from fetching the state of all slices before the first one is updated. The compiler
        # would unroll a loop of one iteration, so the barrier hides the trip count.
        trip_count = chunk.slices if chunk.slices > 1 else jax.lax.optimization_barrier(jnp.int32(1))
        carry = jax.lax.fori_loop(0, trip_count, body, _ChunkCarry(gradient_slices, update, stacks))
        result = carry.gradient if carry.update is None else carry.update
        return result.reshape(gradient.shape), carry.state

    def _update_slice(
        self, chunk: WeightChunk, params: jax.Array, old_stacks: Leaves, index: jax.Array, carry: _ChunkCarry
    ) -> _ChunkCarry:
        """Update one slice: fetch its state, and write it back."""

        def stack_index(path: str) -> jax.Array | int:
            return self.layer * chunk.slices + index if path in chunk.state_slice_shapes else self.layer

        # State leaves that are not sliced are read as they were before the first slice.
        state = {}
        for path, leaf in carry.state.items():
            stack = leaf if chunk.slices == 1 or path in chunk.state_slice_shapes else old_stacks[path]
            state[path] = fetch_leaf(self.plan.specs[path], slice_layer(stack, stack_index(path)))
        gradient = slice_layer(carry.gradient, index)
        update, new_state = self._update_param(chunk, gradient, state, slice_layer(params, index))
        new_leaves = {}
        for path, leaf in new_state.items():
            stored = store_leaf(self.plan.specs[path], leaf)
            new_leaves[path] = write_layer(carry.state[path], stored, stack_index(path))
        if carry.update is None:
            return _ChunkCarry(write_layer(carry.gradient, update, index), None, new_leaves)
        return _ChunkCarry(carry.gradient, write_layer(carry.update, update, index), new_leaves)

    def _update_param(
        self, chunk: WeightChunk, gradient: jax.Array, state: Leaves, param: jax.Array
    ) -> tuple[jax.Array, Leaves]:
        """Return the result for one parameter or slice, as the only one that the optimizer sees; state is on device."""
        if self.gradient_factor is not None:
            gradient = gradient * jnp.asarray(self.gradient_factor, gradient.dtype)
        chunk_state = jax.tree.unflatten(chunk.state_structure, [state[path] for path in chunk.state_paths])
        updates, new_state = self.optimizer.update(
            isolate_leaf(self.params, chunk.number, gradient),
            chunk_state,
            isolate_leaf(self.params, chunk.number, param),
            **self.extra_args,
        )
        new_leaves = {}
        for path, leaf in flatten(new_state).items():
            new_leaf = leaf.astype(state[path].dtype)
            if self.is_applied is not None:
                new_leaf = jnp.where(self.is_applied, new_leaf, state[path])
            new_leaves[path] = new_leaf
        [update] = jax.tree.leaves(updates)
        return self.result(param, update), new_leaves

    def _update_dtype(self, chunk: WeightChunk, gradient: jax.Array, param: jax.Array) -> np.dtype:
        # Shapes only: unlike arrays, they have no memory space.
        def shape(leaf: jax.Array | TensorSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

        state = {path: shape(self.plan.specs[path]) for path in chunk.state_paths}
        update, _ = jax.eval_shape(partial(self._update_param, chunk), shape(gradient), state, shape(param))
        return update.dtype

    def _slice_shape(self, chunk: WeightChunk, path: str) -> tuple[int, ...]:
        """Return the shape of the part of a state leaf that goes with one slice; the full shape if it is not sliced."""
        is_sliced = path in chunk.state_slice_shapes
        return chunk.state_slice_shapes[path] if is_sliced else self.plan.specs[path].shape


def _reshape_to_slices(leaf: jax.Array, slice_shape: tuple[int, ...]) -> jax.Array:
    """Reshape an array to [slices, *slice_shape] without moving data."""
    # TPU slices host memory in one dimension only: a slice is an index of the first axis.
    return leaf.reshape(-1, *slice_shape)


# --- chunks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightChunk:
    """One parameter, and how its update is split into slices.

    Attributes:
        number: index of the parameter in the order of the leaves.
        slices: number of slices, updated one after another.
        slice_shape: shape of one slice of the parameter.
        state_structure: treedef of the optimizer state if this were the only parameter.
        state_paths: paths of the leaves of that state within the full state.
        state_slice_shapes: slice shapes by path, for the state leaves that are sliced along with the parameter.
            Counters are not.
    """

    number: int
    slices: int
    slice_shape: tuple[int, ...]
    state_structure: Any
    state_paths: tuple[str, ...]
    state_slice_shapes: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class UpdatePlan:
    """Layout and order of an update.

    Attributes:
        specs: TensorSpecs of the state by path, each with its memory kind.
        chunks: the chunks, in the order of the parameters.
    """

    specs: dict[str, TensorSpec]
    chunks: list[WeightChunk]


class UpdatePlanner:
    """Plans the updates of one optimizer.

    Attributes:
        optimizer: the optax transformation.
        pattern: a regex on state paths that selects the leaves to keep in host memory.
        chunk_bytes: a parameter with more bytes is sliced if the optimizer allows it.
    """

    def __init__(self, optimizer: optax.GradientTransformationExtraArgs, pattern: str, chunk_bytes: int):
        self.optimizer = optimizer
        self.pattern = pattern
        self.chunk_bytes = chunk_bytes
        # Results of the trials by parameter shape, cached because each trial compiles a program.
        self._localities: dict[tuple[int, ...], UpdateLocality] = {}

    def plan(self, params: PyTree) -> UpdatePlan:
        """Return the plan for parameters of these shapes.

        Raises:
            ValueError: the pattern matches nothing, or the optimizer looks at several tensors together.
        """
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        state = jax.eval_shape(self.optimizer.init, shapes)
        specs = {}
        # An optimizer without state offloads nothing.
        if jax.tree.leaves(state):
            state_specs = jax.tree.map(lambda leaf: TensorSpec(leaf.shape, leaf.dtype), state)
            specs = flatten(tag_large_matches(state_specs, self.pattern, "pinned_host"))
        chunks = [self._make_chunk(shapes, number) for number in range(len(jax.tree.leaves(shapes)))]
        self._check(shapes, state, chunks)
        return UpdatePlan(specs, chunks)

    def _make_chunk(self, shapes: PyTree, number: int) -> WeightChunk:
        param = jax.tree.leaves(shapes)[number]
        state = self._compute_state_shapes(shapes, number, param)
        unsliced = WeightChunk(number, 1, param.shape, jax.tree.structure(state), tuple(flatten(state)), {})
        if len(param.shape) < 2 or math.prod(param.shape) * param.dtype.itemsize <= self.chunk_bytes:
            return unsliced
        if param.shape not in self._localities:
            self._localities[param.shape] = probe(self.optimizer, {"parameter": TensorSpec(param.shape, param.dtype)})
        update_locality = self._localities[param.shape]
        if update_locality not in ("element", "row"):
            return unsliced
        slice_shape = _slice_shape(param, self.chunk_bytes, by_element=update_locality == "element")
        slice_state = self._compute_state_shapes(shapes, number, jax.ShapeDtypeStruct(slice_shape, param.dtype))
        # Some optimizers store another kind of state for other shapes.
        if jax.tree.structure(slice_state) != unsliced.state_structure:
            return unsliced
        state_shapes = {path: leaf.shape for path, leaf in flatten(state).items()}
        slice_shapes = {path: leaf.shape for path, leaf in flatten(slice_state).items()}
        sliced_shapes = {path: shape for path, shape in slice_shapes.items() if shape != state_shapes[path]}
        slices = math.prod(param.shape) // math.prod(slice_shape)
        return replace(unsliced, slices=slices, slice_shape=slice_shape, state_slice_shapes=sliced_shapes)

    def _compute_state_shapes(self, shapes: PyTree, number: int, param: jax.ShapeDtypeStruct) -> PyTree:
        """Return the optimizer state for one parameter only; the others are None."""
        return jax.eval_shape(self.optimizer.init, isolate_leaf(shapes, number, param))

    def _check(self, shapes: PyTree, state: PyTree, chunks: list[WeightChunk]) -> None:
        """Raise ValueError if the chunks cannot be updated one after another."""

        def update(params: PyTree, gradients: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
            return self.optimizer.update(gradients, state, params)

        influences = trace_influence(update, shapes, state)
        chunk_counts = dict.fromkeys(flatten(state), 0)
        for chunk in chunks:
            for path in chunk.state_paths:
                chunk_counts[path] += 1
        state_influences = dict(zip(flatten(state), influences.state, strict=True))
        # A leaf that several chunks write, such as a counter, must not depend on any gradient.
        mixes_state = any(count != 1 and state_influences[path] for path, count in chunk_counts.items())
        if influences.mixes or mixes_state:
            raise ValueError(
                "stream: the optimizer looks at several tensors together, as clipping by the global norm does, and "
                "would see one at a time; remove the clip, and pass its factor to `update` as gradient_factor"
            )


def isolate_leaf(tree: PyTree, number: int, leaf: jax.Array | jax.ShapeDtypeStruct) -> PyTree:
    """Return the tree with one leaf and None for all others."""
    structure = jax.tree.structure(tree)
    leaves = [leaf if index == number else None for index in range(structure.num_leaves)]
    return jax.tree.unflatten(structure, leaves)


def _slice_shape(param: jax.ShapeDtypeStruct, max_bytes: int, *, by_element: bool) -> tuple[int, ...]:
    """Return the shape of the largest slices of at most `max_bytes`, or of the smallest possible ones.

    The first axis is sliced. If the optimizer works by element and one row is still too large, the second axis is
    sliced as well.
    """
    first, second = param.shape[:2]
    row_bytes = math.prod(param.shape) * param.dtype.itemsize // first
    rows = _largest_divisor(first, max_bytes // row_bytes)
    if rows > 1 or not by_element or len(param.shape) < 3:
        return (rows, *param.shape[1:])
    columns = _largest_divisor(second, max_bytes // (row_bytes // second))
    return (1, columns, *param.shape[2:])


def _largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number up to a limit, at least 1."""
    return max(divisor for divisor in range(1, number + 1) if number % divisor == 0 and divisor <= max(limit, 1))
