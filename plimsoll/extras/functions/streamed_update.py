"""One update of parameters whose optimizer state is in host memory: one chunk of it is on the device at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from plimsoll.extras.functions.encoding import Tree
from plimsoll.extras.functions.weight_chunks import Leaves, UpdatePlan, WeightChunk, isolate_leaf
from plimsoll.framework.layout import fetch_leaf, flatten, store_leaf

# (parameter, update) -> an array of the same shape.
ResultFunction = Callable[[jax.Array, jax.Array], jax.Array]


def select_update(param: jax.Array, update: jax.Array) -> jax.Array:
    """Return the update itself; a `ResultFunction`."""
    return update


class _ChunkCarry(NamedTuple):
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
    params: Tree
    gradient_factor: jax.Array | float | None
    extra_args: dict[str, Any]
    layer: jax.Array | int = 0
    is_applied: jax.Array | None = None
    result: ResultFunction = select_update

    def run(self, gradients: Tree, state: Tree) -> tuple[Tree, Tree]:
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
        is_offloaded = any(self.plan.specs[path].memory_kind != "device" for path in state)
        # A loop is only needed to transfer state, or to update slices in turn.
        if chunk.slices == 1 and not is_offloaded:
            layer_state = {path: _slice(stack, self.layer) for path, stack in stacks.items()}
            update, new_state = self._update_param(chunk, gradient, layer_state, param)
            new_stacks = {path: _with_slice(stack, new_state[path], self.layer) for path, stack in stacks.items()}
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

        def stack_index(path: str) -> Any:
            return self.layer * chunk.slices + index if path in chunk.state_slice_shapes else self.layer

        # State leaves that are not sliced are read as they were before the first slice.
        state = {}
        for path, leaf in carry.state.items():
            stack = leaf if chunk.slices == 1 or path in chunk.state_slice_shapes else old_stacks[path]
            state[path] = fetch_leaf(self.plan.specs[path], _slice(stack, stack_index(path)))
        gradient = _slice(carry.gradient, index)
        update, new_state = self._update_param(chunk, gradient, state, _slice(params, index))
        new_leaves = {}
        for path, leaf in new_state.items():
            stored = store_leaf(self.plan.specs[path], leaf)
            new_leaves[path] = _with_slice(carry.state[path], stored, stack_index(path))
        if carry.update is None:
            return _ChunkCarry(_with_slice(carry.gradient, update, index), None, new_leaves)
        return _ChunkCarry(carry.gradient, _with_slice(carry.update, update, index), new_leaves)

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

    def _update_dtype(self, chunk: WeightChunk, gradient: jax.Array, param: jax.Array) -> Any:
        # Shapes only: unlike arrays, they have no memory space.
        def shape(leaf: Any) -> jax.ShapeDtypeStruct:
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


def _slice(leaf: jax.Array, index: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)


def _with_slice(leaf: jax.Array, new_slice: jax.Array, index: Any) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(leaf, new_slice, index, 0)
