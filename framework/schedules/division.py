"""The division of a group into the pieces that are updated one after the other, and of a tensor into blocks of rows.

A piece is the least that the optimizer's reach allows: rows of one tensor where each element is updated by itself, one
tensor where its elements depend on each other, else a whole unit. What is small is updated together.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax

from framework.layout import TensorSpec, flatten
from framework.learner.learner import Learner
from framework.learner.units import Bundle, Group
from framework.optimizers.reach import Reach

# The most elements of a block of rows.
BLOCK = 1 << 21
# Bytes of a unit's tensor, below which it is not worth a loop of its own.
_SMALL = 1 << 20
# A block's rows are a multiple: the tile of the narrowest dtype.
_ROWS = 32


class Piece(NamedTuple):
    """Parameters of a group that are updated at once, and how: all units mapped, unit by unit, or by blocks of rows."""

    paths: tuple[str, ...]
    by: Literal["all", "unit", "rows"]


def pieces_of(learner: Learner, group: Group, specs: Bundle) -> list[Piece]:
    """Divides a group into pieces.

    Args:
        learner, group: whose parameters.
        specs: the TensorSpecs of the bundle that is to be updated.
    """
    reach = learner.reach(group)
    # Some optimizers name their state otherwise when they see a part of their parameters.
    if reach == "unit" or not learner.state_of(group).separable():
        return [Piece(group.paths, "unit")]
    # Whatever is in host memory goes through a loop, or all of it would come to the device at once.
    moved_paths = _moved_paths(specs)
    unit_specs = flatten(learner.unit_specs(group))
    large_paths = [path for path in group.paths if path in moved_paths or _is_large(unit_specs[path])]
    small_paths = tuple(path for path in group.paths if path not in large_paths)
    weights, _, _, _ = specs
    weight_specs = flatten(weights)
    is_stacked = group.length is not None
    pieces = []
    if small_paths:
        pieces.append(Piece(small_paths, "all"))
    for path in large_paths:
        by = "rows" if _is_cut(weight_specs[path], reach, is_stacked=is_stacked) else "unit"
        pieces.append(Piece((path,), by))
    return pieces


def is_hosted(spec: TensorSpec) -> bool:
    """Whether a leaf lives in host memory."""
    return spec.memory_kind != "device"


def num_blocks(shape: tuple[int, ...]) -> int:
    """The fewest blocks of equally many rows that hold at most BLOCK elements each; 1 where rows do not divide so."""
    rows = shape[0]
    # Rounded up.
    fewest = -(-math.prod(shape) // BLOCK)
    if fewest <= 1:
        return 1
    for blocks in range(fewest, rows // _ROWS + 1):
        if rows % blocks == 0 and rows // blocks % _ROWS == 0:
            return blocks
    return 1


def _moved_paths(specs: Bundle) -> set[str]:
    """The paths of the parameters of which something is in host memory, weights, gradients, state or averages."""
    weights, grads, entry, average = specs
    paths: set[Any] = {spec.owner for spec in jax.tree.leaves(entry) if is_hosted(spec)}
    for part in (weights, grads, average):
        for path, spec in flatten(part).items():
            if is_hosted(spec):
                paths.add(path)
    return paths


def _is_large(unit_spec: TensorSpec) -> bool:
    """Whether a unit's tensor is worth a loop of its own; vectors never are."""
    return len(unit_spec.shape) > 1 and unit_spec.num_bytes >= _SMALL


def _is_cut(
    spec: TensorSpec,
    reach: Reach,
    *,
    is_stacked: bool,
) -> bool:
    """Whether a tensor is updated by blocks of its rows.

    Args:
        spec: of the parameter.
        reach: the optimizer's.
        is_stacked: whether its axes are [units, rows, columns], else [rows, columns].
    """
    column_axis = 2 if is_stacked else 1
    # A row that is cut over devices is not whole inside `shard_map`, where blocks of rows are taken.
    row_is_whole = not any(spec.mesh_axes[column_axis:])
    return reach == "element" or (reach == "row" and row_is_whole)
