"""The layout of the training state: specs of arrays, paths of trees, and the table of all leaves."""

from plimsoll.framework.layout.initialization import fold_in_name, initialize, name_hash
from plimsoll.framework.layout.specs import (
    Initializer,
    MemoryKind,
    MeshAxes,
    OptStateSpec,
    ParameterSpec,
    TensorSpec,
    constrain_row_major,
    copy_partition,
    fetch_leaf,
    fetch_tree,
    move_to_host,
    store_leaf,
)
from plimsoll.framework.layout.split_array import SplitArray, SplitSpec
from plimsoll.framework.layout.table import StateLayout, StateLeaf, nearest_divisors
from plimsoll.framework.layout.train_state import GROUPS, UNSAVED_GROUPS, Group, TrainState
from plimsoll.framework.layout.trees import (
    Nested,
    PyTree,
    fill_none,
    flatten,
    floats,
    key_name,
    merge,
    path_name,
    unflatten,
)

__all__ = [
    "GROUPS",
    "UNSAVED_GROUPS",
    "Group",
    "Initializer",
    "MemoryKind",
    "MeshAxes",
    "Nested",
    "OptStateSpec",
    "ParameterSpec",
    "PyTree",
    "SplitArray",
    "SplitSpec",
    "StateLayout",
    "StateLeaf",
    "TensorSpec",
    "TrainState",
    "constrain_row_major",
    "copy_partition",
    "fetch_leaf",
    "fetch_tree",
    "fill_none",
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
