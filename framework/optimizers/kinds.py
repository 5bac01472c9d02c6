"""Kinds of parameters (matrix, table, other), by the roles of their axes, for optimizers that treat them apart."""

from __future__ import annotations

from typing import Literal

from framework.layout import Nested, ParameterSpec, flatten

Kind = Literal["matrix", "table", "other"]
TABLE_ROLES = {"vocab", "position"}


def kind(spec: ParameterSpec) -> Kind:
    """A "table" has a row for each token or position (embedding, head); a "matrix" is what else has two axes; "other"
    are vectors, and what has more axes."""
    if TABLE_ROLES & {*spec.roles}:
        return "table"
    return "matrix" if len(spec.shape) == 2 else "other"


def kinds(specs: Nested) -> dict[str, Kind]:
    """{path: kind} of a unit's parameters."""
    return {path: kind(spec) for path, spec in flatten(specs).items()}


def kind_of(found: dict[str, Kind], path: str, ndim: int) -> Kind:
    """A parameter's kind; by its number of axes where `found` does not have it."""
    return found.get(path) or ("matrix" if ndim == 2 else "other")
