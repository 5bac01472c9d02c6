"""The layout of the training state: specs of arrays, paths of trees, and the table of all leaves."""

from plimsoll.framework.layout.initial import fold_in_name, initialize, name_hash
from plimsoll.framework.layout.moves import fetch_leaf, fetch_tree, store_leaf
from plimsoll.framework.layout.specs import (
    GROUPS,
    Group,
    Initializer,
    MemoryKind,
    MeshAxes,
    OptStateSpec,
    ParameterSpec,
    TensorSpec,
    copy_partition,
    move_to_host,
)
from plimsoll.framework.layout.table import Leaf, StateLayout, nearest_divisors
from plimsoll.framework.layout.trees import Nested, filled, flatten, floats, key_name, merge, path_name, unflatten

__all__ = [
    "GROUPS",
    "Group",
    "Initializer",
    "Leaf",
    "MemoryKind",
    "MeshAxes",
    "Nested",
    "OptStateSpec",
    "ParameterSpec",
    "StateLayout",
    "TensorSpec",
    "copy_partition",
    "fetch_leaf",
    "fetch_tree",
    "filled",
    "flatten",
    "floats",
    "fold_in_name",
    "initialize",
    "key_name",
    "merge",
    "move_to_host",
    "name_hash",
    "nearest_divisors",
    "path_name",
    "store_leaf",
    "unflatten",
]
