"""Kinds of parameters (matrix, table, ...) by the roles of their axes, for optimizers that treat them differently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import jax

from plimsoll.framework.layout import Nested, OptStateSpec, ParameterSpec, PyTree, flatten
from plimsoll.framework.optimizers.partition import PartitionedGradientTransformation

ParameterKind = Literal["matrix", "experts", "table", "other"]
# Axis roles that make a parameter a table.
TABLE_ROLES = {"vocab", "position", "label"}


def classify_parameter(spec: ParameterSpec) -> ParameterKind:
    """Return the kind of a parameter.

    A "table" has a row for each token, position or label (embedding, head). A "matrix" is any other parameter with two
    axes. "experts" is a stack of matrices along the first axis. Vectors and parameters with more axes are "other".
    """
    if TABLE_ROLES & {*spec.roles}:
        return "table"
    if spec.roles[:1] == ("expert",) and len(spec.shape) == 3:
        return "experts"
    return "matrix" if len(spec.shape) == 2 else "other"


def classify_parameters(specs: Nested) -> dict[str, ParameterKind]:
    """Return {path: kind} for the parameters of one update unit."""
    return {path: classify_parameter(spec) for path, spec in flatten(specs).items()}


def get_kind(kind_by_path: dict[str, ParameterKind], path: str, ndim: int) -> ParameterKind:
    """Return a parameter's kind.

    Args:
        kind_by_path: the known kinds, from `classify_parameters`.
        path: path of the parameter.
        ndim: its number of axes, which decides if the path is missing.
    """
    # Without specs (plain optax use) roles are unknown, so a table is treated as a matrix.
    default: ParameterKind = "matrix" if ndim == 2 else "other"
    return kind_by_path.get(path, default)


def label_by_kind(
    kind_by_path: dict[str, ParameterKind], labels: dict[ParameterKind, str], default: str, params: PyTree
) -> PyTree:
    """Return the labels of parameters for `optax.partition`, in the structure of the parameters.

    Args:
        kind_by_path: see `get_kind`.
        labels: label of each kind.
        default: label of all other kinds.
        params: the parameters.
    """
    param_labels = []
    for path, param in flatten(params).items():
        kind = get_kind(kind_by_path, path, len(param.shape))
        param_labels.append(labels.get(kind, default))
    return jax.tree.unflatten(jax.tree.structure(params), param_labels)


def shard_factors(
    derived: PartitionedGradientTransformation,
    is_transposed: Callable[[str, OptStateSpec, ParameterSpec], bool],
    specs: Nested,
) -> PyTree:
    """Return the specs of a state in which low-rank factors have the mesh axes of their matrices.

    The rank is sharded like the axis that it replaces, if the mesh divides it.

    Args:
        derived: the transformation, with a derived partition.
        is_transposed: (path, spec of a leaf of the state, spec of its parameter) -> whether the leaf's axes are in the
            opposite order.
        specs: specs of the parameters.
    """
    owners = flatten(specs)
    state_specs = derived.partition(specs)
    sharded_specs = []
    for path, leaf in flatten(state_specs).items():
        if leaf.owner is not None and len(leaf.shape) == 2:
            mesh_axes = owners[leaf.owner].mesh_axes
            if is_transposed(path, leaf, owners[leaf.owner]):
                mesh_axes = mesh_axes[::-1]
            leaf = replace(leaf, mesh_axes=mesh_axes)
        sharded_specs.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(state_specs), sharded_specs)
