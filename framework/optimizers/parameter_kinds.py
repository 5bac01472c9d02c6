"""Kinds of parameters (matrix, table, ...) by the roles of their axes, for optimizers that treat them differently."""

from __future__ import annotations

from typing import Literal

from plimsoll.framework.layout import Nested, ParameterSpec, flatten

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
