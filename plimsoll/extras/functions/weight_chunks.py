"""Chunks of an optimizer update: one parameter, or a slice of its first axis, with the state that belongs to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax

from plimsoll.extras.functions.encoding import Tree
from plimsoll.extras.functions.gradient_influence import trace_influence
from plimsoll.framework.layout import TensorSpec, flatten
from plimsoll.framework.optimizers.offload import tag_large_matches
from plimsoll.framework.optimizers.update_locality import UpdateLocality, probe

# Leaves of an optimizer state, or their specs, by path.
Leaves = dict[str, Any]


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

    specs: Leaves
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

    def plan(self, params: Tree) -> UpdatePlan:
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

    def _make_chunk(self, shapes: Tree, number: int) -> WeightChunk:
        param = jax.tree.leaves(shapes)[number]
        state = self._compute_state_shapes(shapes, number, param)
        unsliced = WeightChunk(number, 1, param.shape, jax.tree.structure(state), tuple(flatten(state)), {})
        if len(param.shape) < 2 or _num_bytes(param) <= self.chunk_bytes:
            return unsliced
        update_locality = self._find_locality(param)
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

    def _compute_state_shapes(self, shapes: Tree, number: int, param: Any) -> Tree:
        """Return the optimizer state for one parameter only; the others are None."""
        return jax.eval_shape(self.optimizer.init, isolate_leaf(shapes, number, param))

    def _find_locality(self, param: Any) -> UpdateLocality:
        if param.shape not in self._localities:
            self._localities[param.shape] = probe(self.optimizer, {"parameter": TensorSpec(param.shape, param.dtype)})
        return self._localities[param.shape]

    def _check(self, shapes: Tree, state: Tree, chunks: list[WeightChunk]) -> None:
        """Raise ValueError if the chunks cannot be updated one after another."""

        def update(params: Tree, gradients: Tree, state: Tree) -> tuple[Tree, Tree]:
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


def isolate_leaf(tree: Tree, number: int, leaf: Any) -> Tree:
    """Return the tree with one leaf and None for all others."""
    structure = jax.tree.structure(tree)
    leaves = [leaf if index == number else None for index in range(structure.num_leaves)]
    return jax.tree.unflatten(structure, leaves)


def _num_bytes(param: Any) -> int:
    return math.prod(param.shape) * param.dtype.itemsize


def _slice_shape(param: Any, max_bytes: int, *, by_element: bool) -> tuple[int, ...]:
    """Return the shape of the largest slices of at most `max_bytes`, or of the smallest possible ones.

    The first axis is sliced. If the optimizer works by element and one row is still too large, the second axis is
    sliced as well.
    """
    first, second = param.shape[:2]
    row_bytes = _num_bytes(param) // first
    rows = _largest_divisor(first, max_bytes // row_bytes)
    if rows > 1 or not by_element or len(param.shape) < 3:
        return (rows, *param.shape[1:])
    columns = _largest_divisor(second, max_bytes // (row_bytes // second))
    return (1, columns, *param.shape[2:])


def _largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number up to a limit, at least 1."""
    return max(divisor for divisor in range(1, number + 1) if number % divisor == 0 and divisor <= max(limit, 1))
