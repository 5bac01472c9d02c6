"""Precision: the dtypes in which weights are updated, gradients are summed, and moments and averages are stored.

An update is computed in the dtype of the master copy if there is one, otherwise in the dtype of the weights. If
weights narrower than float32 are not rounded to nearest, it is computed in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import Nested, OptStateSpec, ParameterSpec, path_name
from plimsoll.framework.optimizers.partition import mirrors_parameter
from plimsoll.framework.optimizers.rounding import BlockOrigin, Rounding, fold_name, noise, round_stochastically


@dataclass(frozen=True)
class Precision:
    """The dtypes of updates, and the rounding of narrow weights.

    Attributes:
        rounding, master_dtype, moment_dtype: see `Learner`; dtypes are NumPy's, or None.
    """

    rounding: Rounding
    master_dtype: Any
    moment_dtype: Any

    def update_dtype(self, spec: ParameterSpec) -> Any:
        """Return the dtype in which a parameter's update is computed."""
        if self.rounding != "nearest":
            return _wide(spec.dtype)
        return spec.dtype if self.master_dtype is None else self.master_dtype

    def gradient_dtype(self, spec: ParameterSpec) -> Any:
        """Return the dtype in which gradients are summed over microbatches: that of the update, at least float32."""
        return _wide(self.update_dtype(spec))

    def average_dtype(self, spec: ParameterSpec) -> Any:
        """Return the dtype of a parameter's moving average: that of the update, at least float32.

        With a decay over 0.99, the steps of a bfloat16 average are smaller than its resolution, and it stays at its
        initial value.
        """
        return _wide(self.update_dtype(spec))

    def keeps_master(self, specs: Iterable[ParameterSpec]) -> bool:
        """Return whether the optimizer state of these parameters has a master copy: one of them has another dtype."""
        if self.master_dtype is None:
            return False
        return any(spec.dtype != self.master_dtype for spec in specs)

    def compensates(self, specs: Iterable[ParameterSpec]) -> bool:
        """Return whether the optimizer state of these parameters stores their rounding errors (Kahan)."""
        if self.rounding != "kahan":
            return False
        return any(spec.dtype != self.update_dtype(spec) for spec in specs)

    def in_storage(self, spec: OptStateSpec) -> OptStateSpec:
        """Return the spec of an optimizer state leaf between steps: moments are stored in `moment_dtype`."""
        if self.moment_dtype is not None and mirrors_parameter(spec):
            return replace(spec, dtype=self.moment_dtype)
        return spec

    def widen(self, state: Any, weights: Nested) -> Any:
        """Return a stored optimizer state in the dtypes in which its update is computed.

        Args:
            state: the stored state. Moments with a narrower `moment_dtype` are cast to the dtype of the update; other
                leaves keep their dtype.
            weights: weights in the dtype of the update.
        """
        if self.moment_dtype is None:
            return state
        weight_dtypes = [leaf.dtype for leaf in jax.tree.leaves(weights)]
        wide = jnp.result_type(self.moment_dtype, *weight_dtypes)
        return jax.tree.map(lambda leaf: leaf.astype(wide) if leaf.dtype == self.moment_dtype else leaf, state)

    @property
    def draws(self) -> bool:
        """Return whether updates draw noise: for weights, or for moments in bfloat16."""
        return self.rounding == "stochastic" or self.moment_dtype == jnp.bfloat16

    def narrow(self, state: Any, in_storage: Any, seed: jax.Array, origin: BlockOrigin | None) -> Any:
        """Return an optimizer state after its update, in the dtypes in which it is stored.

        Moments in bfloat16 are rounded stochastically. An average that moves by less than 1/512 of itself, as with b2
        = 0.999, would not move at all if it were rounded to nearest.

        Args:
            state: the state after the update, in the dtypes that `widen` returns.
            in_storage: the state before the update, as it is stored; only its dtypes are used.
            seed: uint32 scalar, of this update of the layer.
            origin: positions of blocks in their tensors; None for whole tensors.
        """
        if self.moment_dtype != jnp.bfloat16:
            return jax.tree.map(lambda new, old: new.astype(old.dtype), state, in_storage)

        def round_leaf(keypath: Any, new: jax.Array, old: jax.Array) -> jax.Array:
            if old.dtype != jnp.bfloat16 or new.dtype == old.dtype:
                return new.astype(old.dtype)
            # "moment" is folded in because the weights of the same name draw from the same seed.
            leaf_seed = fold_name(fold_name(seed, "moment"), path_name(keypath))
            return round_stochastically(new, old.dtype, noise(leaf_seed, new.shape, origin))

        return jax.tree_util.tree_map_with_path(round_leaf, state, in_storage)


def _wide(dtype: Any) -> Any:
    """Return the dtype, or float32 if that is wider."""
    return jnp.promote_types(dtype, jnp.float32)
