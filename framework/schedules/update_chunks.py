"""Splits a parameter group into chunks that are updated one after the other, and a tensor into row blocks.

A chunk is the smallest part that the optimizer's update locality allows: rows of one tensor if the update is
elementwise, one tensor if its elements depend on each other, otherwise a whole layer. Small parameters share one
chunk.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax

from plimsoll.framework.layout import TensorSpec, flatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import ParamGroup
from plimsoll.framework.learner.update import LayerTrainState
from plimsoll.framework.optimizers.update_locality import UpdateLocality

# Maximum number of elements in a row block.
BLOCK = 1 << 21
# A layer's tensor below this size in bytes is not worth its own loop.
_SMALL = 1 << 20
# The rows of a block are a multiple of this: the tile of the narrowest dtype.
_ROWS = 32


class UpdateChunk(NamedTuple):
    """A chunk of a parameter group.

    Attributes:
        paths: paths of its parameters within the stage.
        by: "all" updates all layers vmapped, "layer" one layer after the other, "rows" one row block after the other.
    """

    paths: tuple[str, ...]
    by: Literal["all", "layer", "rows"]


def split_into_chunks(learner: Learner, group: ParamGroup, specs: LayerTrainState) -> list[UpdateChunk]:
    """Split a group into chunks.

    Args:
        learner: the learner, which knows the update locality of the group's optimizer.
        group: the parameter group to split.
        specs: TensorSpecs of the weights, gradients, optimizer state and averages to update.
    """
    update_locality = learner.update_locality(group)
    # Some optimizers name their state differently when they see only part of their parameters.
    if update_locality == "layer" or not learner.get_group_state(group).separable():
        return [UpdateChunk(group.paths, "layer")]
    # Offloaded leaves always go through a loop; otherwise all of them would be on the device at the same time.
    moved_paths = _find_offloaded_paths(specs)
    layer_specs = flatten(learner.layer_specs(group))
    large_paths = [path for path in group.paths if path in moved_paths or _is_large(layer_specs[path])]
    small_paths = tuple(path for path in group.paths if path not in large_paths)
    weight_specs = flatten(specs.weights)
    is_stacked = group.length is not None
    chunks = []
    if small_paths:
        chunks.append(UpdateChunk(small_paths, "all"))
    for path in large_paths:
        by = "rows" if _splits_by_rows(weight_specs[path], update_locality, is_stacked=is_stacked) else "layer"
        chunks.append(UpdateChunk((path,), by))
    return chunks


def is_offloaded(spec: TensorSpec) -> bool:
    """Return whether a leaf is in host memory."""
    return spec.memory_kind != "device"


def num_blocks(shape: tuple[int, ...]) -> int:
    """Return the smallest number of equal row blocks of at most BLOCK elements; 1 if rows do not divide evenly."""
    rows = shape[0]
    # Rounded up.
    fewest = -(-math.prod(shape) // BLOCK)
    if fewest <= 1:
        return 1
    for blocks in range(fewest, rows // _ROWS + 1):
        if rows % blocks == 0 and rows // blocks % _ROWS == 0:
            return blocks
    return 1


def _find_offloaded_paths(specs: LayerTrainState) -> set[str]:
    """Return the paths of the parameters whose weights, gradients, optimizer state or averages are in host memory."""
    paths: set[Any] = {spec.owner for spec in jax.tree.leaves(specs.entry) if is_offloaded(spec)}
    for part in (specs.weights, specs.grads, specs.average):
        for path, spec in flatten(part).items():
            if is_offloaded(spec):
                paths.add(path)
    return paths


def _is_large(layer_spec: TensorSpec) -> bool:
    """Return whether a layer's tensor is worth its own loop; vectors never are."""
    return len(layer_spec.shape) > 1 and layer_spec.num_bytes >= _SMALL


def _splits_by_rows(spec: TensorSpec, update_locality: UpdateLocality, *, is_stacked: bool) -> bool:
    """Return whether a tensor is updated in row blocks.

    Args:
        spec: spec of the parameter.
        update_locality: update locality of the optimizer.
        is_stacked: whether its axes are [layers, rows, columns] instead of [rows, columns].
    """
    column_axis = 2 if is_stacked else 1
    # Blocks are taken inside `shard_map`, where a row that is sharded over devices is incomplete.
    row_is_whole = not any(spec.mesh_axes[column_axis:])
    return update_locality == "element" or (update_locality == "row" and row_is_whole)
