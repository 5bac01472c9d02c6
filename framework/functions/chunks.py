"""Chunks of an optimizer's update: one parameter, or a slice of its first axis, with the state that belongs to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import optax

from framework.functions.encoding import Tree
from framework.functions.mixing import influence
from framework.layout import TensorSpec, flatten
from framework.optimizers.offload import tagged
from framework.optimizers.reach import Reach, probe

# Leaves of a state, or their specs, by path.
Leaves = dict[str, Any]


@dataclass(frozen=True)
class Chunk:
    """One parameter, and how its update is cut.

    Attributes:
      number: of the parameter, in the order of the leaves.
      slices: how many slices of the first axis are updated one after the other.
      state_structure: the treedef of the state of an optimizer that has this parameter alone.
      state_paths: where the leaves of that state are in the whole one.
      sliced_paths: those of them that are cut along with the parameter; counters are not.
    """

    number: int
    slices: int
    state_structure: Any
    state_paths: tuple[str, ...]
    sliced_paths: frozenset[str]


@dataclass(frozen=True)
class Plan:
    """How an update goes.

    Attributes:
      specs: TensorSpecs of the state by path, with the memory kind of each.
      chunks: in the order of the parameters.
    """

    specs: Leaves
    chunks: list[Chunk]


class Planner:
    """Plans the updates of one optimizer.

    Attributes:
      optimizer: the transformation.
      pattern: a regex on the paths of the state, for what is in host memory.
      chunk_bytes: a parameter with more is cut, where it may be.
    """

    def __init__(self, optimizer: optax.GradientTransformationExtraArgs, pattern: str, chunk_bytes: int):
        self.optimizer = optimizer
        self.pattern = pattern
        self.chunk_bytes = chunk_bytes
        # The results of trials, by the shape of the parameter: a trial compiles.
        self._reaches: dict[tuple[int, ...], Reach] = {}

    def plan(self, params: Tree) -> Plan:
        """The plan for parameters of these shapes.

        Raises:
            ValueError: the pattern matches nothing, or the optimizer looks at several tensors together.
        """
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        state = jax.eval_shape(self.optimizer.init, shapes)
        specs = flatten(tagged(jax.tree.map(_spec, state), self.pattern, "pinned_host"))
        chunks = [self._chunk(shapes, number) for number in range(len(jax.tree.leaves(shapes)))]
        self._check(shapes, state, chunks)
        return Plan(specs, chunks)

    def _chunk(self, shapes: Tree, number: int) -> Chunk:
        param = jax.tree.leaves(shapes)[number]
        state = self._state_of(shapes, number, param)
        whole = Chunk(number, 1, jax.tree.structure(state), tuple(flatten(state)), frozenset())
        slices = _num_slices(param, self.chunk_bytes)
        if slices == 1 or self._reach(param) not in ("element", "row"):
            return whole
        slice_shape = jax.ShapeDtypeStruct((param.shape[0] // slices, *param.shape[1:]), param.dtype)
        slice_state = self._state_of(shapes, number, slice_shape)
        if jax.tree.structure(slice_state) != whole.state_structure:
            return whole
        slice_leaves = flatten(slice_state)
        sliced_paths = {path for path, leaf in flatten(state).items() if leaf.shape != slice_leaves[path].shape}
        return Chunk(number, slices, whole.state_structure, whole.state_paths, frozenset(sliced_paths))

    def _state_of(self, shapes: Tree, number: int, param: Any) -> Tree:
        """The state where all parameters but one are left out."""
        return jax.eval_shape(self.optimizer.init, alone(shapes, number, param))

    def _reach(self, param: Any) -> Reach:
        if param.shape not in self._reaches:
            self._reaches[param.shape] = probe(self.optimizer, {"parameter": TensorSpec(param.shape, param.dtype)})
        return self._reaches[param.shape]

    def _check(self, shapes: Tree, state: Tree, chunks: list[Chunk]) -> None:
        """Raises ValueError when chunks cannot be updated one after the other."""

        def update(params: Tree, gradients: Tree, state: Tree) -> tuple[Tree, Tree]:
            return self.optimizer.update(gradients, state, params)

        reaching = influence(update, shapes, state)
        number_of_chunks = dict.fromkeys(flatten(state), 0)
        for chunk in chunks:
            for path in chunk.state_paths:
                number_of_chunks[path] += 1
        reaching_state = dict(zip(flatten(state), reaching.state, strict=True))
        is_shared_and_reached = any(count != 1 and reaching_state[path] for path, count in number_of_chunks.items())
        if reaching.mixes or is_shared_and_reached:
            raise ValueError(
                "stream: the optimizer looks at several tensors together, as clipping by the global norm does, and "
                "would see one at a time; leave the clip out, and give its factor to `update` as gradient_factor"
            )


def alone(tree: Tree, number: int, leaf: Any) -> Tree:
    """The tree with one leaf, and None in the place of all others."""
    structure = jax.tree.structure(tree)
    leaves = [leaf if index == number else None for index in range(structure.num_leaves)]
    return jax.tree.unflatten(structure, leaves)


def _spec(leaf: Any) -> TensorSpec:
    return TensorSpec(leaf.shape, leaf.dtype)


def _num_slices(param: Any, chunk_bytes: int) -> int:
    """The fewest slices of the first axis that have no more bytes each; one where there are no axes to cut along."""
    if len(param.shape) < 2:
        return 1
    num_bytes = math.prod(param.shape) * param.dtype.itemsize
    rows = param.shape[0]
    for slices in range(1, rows):
        if rows % slices == 0 and num_bytes <= slices * chunk_bytes:
            return slices
    return rows
