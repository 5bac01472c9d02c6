"""`stream`: the state of any optax transformation in host memory, a chunk of it on the device at a time.

Offloading as in apple/axlearn#867, whose review asked for streaming: there, all of the state is fetched before the
update. In a config, `memory.optimizer_state` and `memory.update` do this and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from framework.functions.chunks import Chunk, Leaves, Plan, Planner, alone
from framework.functions.encoding import Tree
from framework.layout import fetch_leaf, flatten, store_leaf


def stream(
    optimizer: optax.GradientTransformation,
    *,
    pattern: str = ".*",
    chunk_bytes: int = 16 << 20,
) -> optax.GradientTransformationExtraArgs:
    """Keeps the state of an optimizer in host memory, and brings it to the device a chunk at a time.

        optimizer = pl.stream(optax.adamw(1e-3))
        state = optimizer.init(params)
        updates, state = optimizer.update(gradients, state, params)   # inside the step that is jitted

    The state has the structure, shapes and values that the optimizer's own has; what matches is in memory of the kind
    `pinned_host`, and a jitted step keeps it there. Vectors, scalars and leaves under 1 MiB stay on the device. The
    updates take the place of the gradients where these are not needed afterwards.

    Donate parameters and state, both and in this order. Without donation the state is on the host twice; with that of
    the state alone, JAX 0.10 pairs donated and returned arrays by their shapes, and may want to have new parameters in
    the state's place on the host, where the program ends with an error about memory kinds.

    `update` has one more argument: `gradient_factor`, a float scalar by which all gradients are multiplied. For a clip
    by the exact global norm it is min(1, limit / optax.global_norm(gradients)).

    Args:
        optimizer: any transformation whose update of a tensor depends on that tensor's gradients alone, and that can do
            without the other tensors (None in their place).
        pattern: a regex, searched in the paths of the state, such as "0/mu/layers/query"; see `offload_optimizer`.
        chunk_bytes: a parameter with more bytes is updated by slices with as many at most, where a trial shows that
            the optimizer updates each slice as if it were alone: slices of the first axis, or of the second as well
            where it works by element. Others are updated whole.

    Raises:
        ValueError: by `init` and `update`: the pattern matches nothing, the optimizer looks at several tensors
            together, or `params` are not given.
    """
    planner = Planner(optax.with_extra_args_support(optimizer), pattern, chunk_bytes)

    def init(params: Tree) -> Tree:
        plan = planner.plan(params)
        state = planner.optimizer.init(params)
        stored = [store_leaf(plan.specs[path], jnp.asarray(leaf)) for path, leaf in flatten(state).items()]
        return jax.tree.unflatten(jax.tree.structure(state), stored)

    def update(
        updates: Tree,
        state: Tree,
        params: Tree | None = None,
        *,
        gradient_factor: jax.Array | float | None = None,
        **extra_args: Any,
    ) -> tuple[Tree, Tree]:
        if params is None:
            raise ValueError("stream: expected update(gradients, state, params), given no parameters")
        plan = planner.plan(params)
        streamed = _StreamedUpdate(planner.optimizer, plan, params, gradient_factor, extra_args)
        return streamed.run(updates, state)

    return optax.GradientTransformationExtraArgs(init, update)


class _ChunkCarry(NamedTuple):
    """What the loop over the slices of a parameter carries.

    Attributes:
      gradient: [slices, *slice]; of the slices that were updated, the update, where the dtypes agree.
      update: likewise, where they do not agree; else None.
      state: the leaves that are the chunk's, by path; [slices, *slice], or [1, ...] of one that is not cut.
    """

    gradient: jax.Array
    update: jax.Array | None
    state: Leaves


@dataclass(frozen=True)
class _StreamedUpdate:
    """One update of all parameters.

    Attributes:
      optimizer, plan: what is computed, and in which chunks.
      params: the parameters.
      gradient_factor: what gradients are multiplied by; None for one.
      extra_args: of the optimizer's update.
    """

    optimizer: optax.GradientTransformationExtraArgs
    plan: Plan
    params: Tree
    gradient_factor: jax.Array | float | None
    extra_args: dict[str, Any]

    def run(self, gradients: Tree, state: Tree) -> tuple[Tree, Tree]:
        """(updates, new state)."""
        gradient_leaves, structure = jax.tree.flatten(gradients)
        old_leaves = flatten(state)
        new_leaves = dict(old_leaves)
        updates = []
        for chunk in self.plan.chunks:
            # Each chunk reads the old counters, whatever the chunks before made of them.
            chunk_leaves = {path: old_leaves[path] for path in chunk.state_paths}
            update, new_chunk_leaves = self._updated(chunk, gradient_leaves[chunk.number], chunk_leaves)
            updates.append(update)
            new_leaves |= new_chunk_leaves
        new_state = jax.tree.unflatten(jax.tree.structure(state), new_leaves.values())
        return jax.tree.unflatten(structure, updates), new_state

    def _updated(self, chunk: Chunk, gradient: jax.Array, state: Leaves) -> tuple[jax.Array, Leaves]:
        """A parameter's update and its new state."""
        param = jax.tree.leaves(self.params)[chunk.number]
        if chunk.slices == 1 and not any(self._is_hosted(path) for path in state):
            return self._update_of(chunk, gradient, state, param)
        sliced = {}
        for path, leaf in state.items():
            is_cut = path in chunk.state_slice_shapes
            sliced[path] = _cut(leaf, chunk.state_slice_shapes[path] if is_cut else leaf.shape)
        gradient_slices = _cut(gradient, chunk.slice_shape)
        param_slices = _cut(param, chunk.slice_shape)
        update_dtype = self._update_dtype(chunk, gradient, state, param)
        update = None
        if update_dtype != gradient.dtype:
            update = jnp.zeros(gradient_slices.shape, update_dtype)

        def turn(index: jax.Array, carry: _ChunkCarry) -> _ChunkCarry:
            return self._turn(chunk, param_slices, sliced, index, carry)

        # A loop keeps the compiler from fetching the state of all chunks before the first is updated. It would take a
        # loop of one turn apart, so it is not to know that there is one.
        turns = chunk.slices if chunk.slices > 1 else jax.lax.optimization_barrier(jnp.int32(1))
        carry = jax.lax.fori_loop(0, turns, turn, _ChunkCarry(gradient_slices, update, sliced))
        new_state = {path: leaf.reshape(state[path].shape) for path, leaf in carry.state.items()}
        result = carry.gradient if carry.update is None else carry.update
        return result.reshape(gradient.shape), new_state

    def _turn(
        self,
        chunk: Chunk,
        params: jax.Array,
        old_state: Leaves,
        index: jax.Array,
        carry: _ChunkCarry,
    ) -> _ChunkCarry:
        """Updates one slice: fetches its state, and writes it back."""

        def place(path: str) -> Any:
            return index if path in chunk.state_slice_shapes else 0

        # What is not sliced is read as it was before the first slice.
        state = {}
        for path, leaf in carry.state.items():
            stack = leaf if chunk.slices == 1 or path in chunk.state_slice_shapes else old_state[path]
            state[path] = fetch_leaf(self.plan.specs[path], _slice(stack, place(path)))
        gradient = _slice(carry.gradient, index)
        update, new_state = self._update_of(chunk, gradient, state, _slice(params, index))
        new_leaves = {}
        for path, leaf in new_state.items():
            stored = store_leaf(self.plan.specs[path], leaf)
            new_leaves[path] = _with_slice(carry.state[path], stored, place(path))
        if carry.update is None:
            return _ChunkCarry(_with_slice(carry.gradient, update, index), None, new_leaves)
        return _ChunkCarry(carry.gradient, _with_slice(carry.update, update, index), new_leaves)

    def _update_of(
        self, chunk: Chunk, gradient: jax.Array, state: Leaves, param: jax.Array
    ) -> tuple[jax.Array, Leaves]:
        """The optimizer's update of one parameter or slice, which it sees alone; the state is on the device."""
        if self.gradient_factor is not None:
            gradient = gradient * jnp.asarray(self.gradient_factor, gradient.dtype)
        chunk_state = jax.tree.unflatten(chunk.state_structure, [state[path] for path in chunk.state_paths])
        updates, new_state = self.optimizer.update(
            alone(self.params, chunk.number, gradient),
            chunk_state,
            alone(self.params, chunk.number, param),
            **self.extra_args,
        )
        new_leaves = {}
        for path, leaf in flatten(new_state).items():
            new_leaves[path] = leaf.astype(state[path].dtype)
        [update] = jax.tree.leaves(updates)
        return update, new_leaves

    def _update_dtype(self, chunk: Chunk, gradient: jax.Array, state: Leaves, param: jax.Array) -> Any:
        # Shapes, unlike the arrays, are in no memory.
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (gradient, state, param))
        update, _ = jax.eval_shape(partial(self._update_of, chunk), *shapes)
        return update.dtype

    def _is_hosted(self, path: str) -> bool:
        return self.plan.specs[path].memory_kind != "device"


def _cut(leaf: jax.Array, slice_shape: tuple[int, ...]) -> jax.Array:
    """An array as [slices, *slice_shape], which moves nothing."""
    # TPU slices host memory in one dimension only: a slice is an index of the first axis.
    return leaf.reshape(-1, *slice_shape)


def _slice(leaf: jax.Array, index: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)


def _with_slice(leaf: jax.Array, part: jax.Array, index: Any) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(leaf, part, index, 0)
