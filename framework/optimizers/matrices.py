"""Muon and GaLore, optax's, for what is a matrix by its role; embedding, head, vectors and the rest get optax.adamw."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import optax

from framework.config import FiniteNonNegative, Fraction, PositiveFloat, PositiveInt, component
from framework.layout import Nested, OptStateSpec, flatten, path_name
from framework.optimizers.kinds import Kind, kind_of, kinds
from framework.optimizers.partition import PartitionedGradientTransformation, partitioned


@component
def muon(
    *,
    learning_rate: optax.ScalarOrSchedule,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    weight_decay: FiniteNonNegative = 0.0,
    beta: Fraction = 0.95,
    consistent_rms: PositiveFloat | None = 0.2,
    b1: Fraction = 0.9,
    b2: Fraction = 0.999,
) -> PartitionedGradientTransformation:
    """optax.contrib.muon (Jordan et al. 2024): one moment per matrix, whose singular values are made equal.

    Args:
        learning_rate: as AdamW's, with `consistent_rms`.
        adam_learning_rate: of what is no matrix; None means the same.
        beta: of the momentum.
        consistent_rms: the RMS of a matrix's update, whatever its shape: 0.2 is about AdamW's (Liu et al. 2025,
            arXiv 2502.16982). None scales by sqrt(max(1, out / in)), for learning rates around 0.02.
        weight_decay: decoupled, of all; b1, b2: AdamW's.
    """
    rest_rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    own = optax.contrib.muon(learning_rate, beta=beta, weight_decay=weight_decay, consistent_rms=consistent_rms)
    return _by_kind(own, optax.adamw(rest_rate, b1, b2, weight_decay=weight_decay), {})


@component
def galore(
    *,
    learning_rate: optax.ScalarOrSchedule,
    rank: PositiveInt = 128,
    update_proj_gap: PositiveInt = 200,
    scale: PositiveFloat = 0.25,
    weight_decay: FiniteNonNegative = 0.0,
    b1: Fraction = 0.9,
    b2: Fraction = 0.999,
) -> PartitionedGradientTransformation:
    """optax.contrib.galore (Zhao et al. 2024, arXiv 2403.03507): of a matrix [m, n], m <= n, the first `rank` right
    singular vectors of a gradient, [n, r], and two moments of its projection on them, [m, r]: (n + 2 m) r numbers.
    (The paper projects the smaller side: (m + 2 n) r.)

    Args:
        learning_rate: of all; the paper has 0.01 where AdamW has 0.001.
        rank: r; where m is smaller, m.
        update_proj_gap: steps with the same projection. The moments are not rotated when it changes.
        scale: of the matrices' steps.
        weight_decay, b1, b2: of all, as in optax.adamw.
    """
    own = optax.contrib.galore(
        learning_rate, rank, update_proj_gap, scale, optax.scale_by_adam(b1, b2), weight_decay=weight_decay
    )

    # Layers one by one: jaxlib's batched decomposition on CPU waits for threads that wait for it, when several run.
    one_by_one = jax.custom_batching.sequential_vmap(own.update)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        if jax.tree.leaves(updates):
            return one_by_one(updates, state, params)
        return updates, jax.tree.map(optax.safe_increment, state)  # optax's fails without matrices; counters are left

    safe = optax.GradientTransformation(own.init, update)
    return _by_kind(safe, optax.adamw(learning_rate, b1, b2, weight_decay=weight_decay), {})


def _by_kind(matrices: Any, rest: Any, found: dict[str, Kind]) -> PartitionedGradientTransformation:
    """One transformation for matrices, another for the rest; each keeps nothing of what is the other's."""

    def label(path: Any, p: jax.Array) -> str:
        return "matrix" if kind_of(found, path_name(path), len(p.shape)) == "matrix" else "rest"

    both = partitioned(
        optax.partition({"matrix": matrices, "rest": rest}, lambda p: jax.tree_util.tree_map_with_path(label, p))
    )

    def cut(specs: Nested, path: Any, leaf: OptStateSpec) -> OptStateSpec:
        """Factors have their matrix's mesh axes: r is cut as the side it stands for, where the mesh divides it."""
        if leaf.owner is None or len(leaf.shape) != 2:
            return leaf
        owner = flatten(specs)[leaf.owner]
        turned = "projector" in path_name(path) and owner.shape[0] < owner.shape[1]
        return replace(leaf, mesh_axes=owner.mesh_axes[:: -1 if turned else 1])

    return both._replace(
        partition=lambda specs: jax.tree_util.tree_map_with_path(partial(cut, specs), both.partition(specs)),
        of_specs=lambda specs: _by_kind(matrices, rest, kinds(specs)),
    )
