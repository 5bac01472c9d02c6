"""optax's Muon and GaLore for parameters whose roles make them matrices; all other parameters get optax.adamw."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import optax

from plimsoll.framework.config import FiniteNonNegative, Fraction, PositiveFloat, PositiveInt, component
from plimsoll.framework.layout import PyTree
from plimsoll.framework.optimizers.parameter_kinds import (
    ParameterKind,
    classify_parameters,
    label_by_kind,
    shard_factors,
)
from plimsoll.framework.optimizers.partition import PartitionedGradientTransformation, add_partition
from plimsoll.framework.optimizers.per_matrix import per_matrix


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
    """optax.contrib.muon (Jordan et al. 2024): one moment per matrix, whose singular values are equalized. Each expert
    of a mixture has its own matrices.

    Args:
        learning_rate: on AdamW's scale if `consistent_rms` is set.
        adam_learning_rate: learning rate of parameters that are not matrices; None for the same.
        beta: decay rate of the momentum.
        consistent_rms: RMS of a matrix's update for any shape: 0.2 is about AdamW's (Liu et al. 2025,
            arXiv 2502.16982). None scales by sqrt(max(1, out / in)), for learning rates around 0.02.
        weight_decay: decoupled weight decay of all parameters.
        b1, b2: decay rates of AdamW.
    """
    if adam_learning_rate is None:
        adam_learning_rate = learning_rate
    matrix_muon = optax.contrib.muon(
        learning_rate,
        beta=beta,
        weight_decay=weight_decay,
        consistent_rms=consistent_rms,
        # Any axes before the last two index matrices.
        muon_weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(-2, -1),
    )
    adamw = optax.adamw(adam_learning_rate, b1, b2, weight_decay=weight_decay)
    return _OptimizersByKind(matrix_muon, adamw, matrix_kinds=("matrix", "experts")).build()


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
    """optax.contrib.galore (Zhao et al. 2024, arXiv 2403.03507). For a matrix [m, n], m <= n, the state holds the first
    `rank` right singular vectors of a gradient, [n, r], and two moments of its projection onto them, [m, r]:
    (n + 2 m) r numbers. (The paper projects the smaller side: (m + 2 n) r.) Each expert of a mixture has its own.

    Args:
        learning_rate: learning rate of all parameters; the paper uses 0.01 where AdamW uses 0.001.
        rank: rank r of the projection; m if m is smaller.
        update_proj_gap: number of steps with the same projection. The moments are not rotated when it changes.
        scale: factor for the steps of matrices.
        weight_decay, b1, b2: for all parameters, as in optax.adamw.
    """
    matrix_galore = optax.contrib.galore(
        learning_rate, rank, update_proj_gap, scale, optax.scale_by_adam(b1, b2), weight_decay=weight_decay
    )
    # One layer at a time: on CPU, several batched decompositions of jaxlib deadlock waiting for each other's threads.
    sequential_update = jax.custom_batching.sequential_vmap(matrix_galore.update)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        if jax.tree.leaves(updates):
            return sequential_update(updates, state, params)
        # optax's update fails without matrices; the state then holds only counters.
        return updates, jax.tree.map(optax.safe_increment, state)

    safe_galore = optax.GradientTransformation(matrix_galore.init, update)
    adamw = optax.adamw(learning_rate, b1, b2, weight_decay=weight_decay)
    return _OptimizersByKind(safe_galore, adamw, ("matrix",), experts=per_matrix(safe_galore)).build()


@dataclass(frozen=True)
class _OptimizersByKind:
    """A transformation for matrices and one for all other parameters; neither keeps state for the other's.

    Attributes:
        matrices: the transformation for matrices.
        others: the transformation for all other parameters.
        matrix_kinds: kinds that the transformation for matrices handles.
        experts: a third transformation for experts, if the one for matrices does not handle them.
        kind_by_path: kinds of the parameters; for a missing path, the number of axes decides.
    """

    matrices: optax.GradientTransformation
    others: optax.GradientTransformation
    matrix_kinds: tuple[ParameterKind, ...]
    experts: optax.GradientTransformation | None = None
    kind_by_path: dict[str, ParameterKind] = field(default_factory=dict)

    def build(self) -> PartitionedGradientTransformation:
        """Return the combined transformation."""
        # The labels name parts of the state, also in checkpoints.
        labels: dict[ParameterKind, str] = dict.fromkeys(self.matrix_kinds, "matrix")
        optimizers: dict[Hashable, optax.GradientTransformation] = {"matrix": self.matrices, "rest": self.others}
        if self.experts is not None and "experts" in self.kind_by_path.values():
            optimizers["experts"] = self.experts
            labels["experts"] = "experts"
        label = partial(label_by_kind, self.kind_by_path, labels, "rest")
        derived = add_partition(optax.partition(optimizers, label))
        # The projector of a wide matrix is [n, r], so its first axis is the matrix's second one.
        partition = partial(
            shard_factors, derived, lambda path, _, owner: "projector" in path and owner.shape[0] < owner.shape[1]
        )
        return replace(
            derived,
            partition=partition,
            fit_to_specs=lambda specs: replace(self, kind_by_path=classify_parameters(specs)).build(),
        )
