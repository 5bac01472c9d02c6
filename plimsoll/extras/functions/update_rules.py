"""Update rules: an optax transformation, or a function `(weights, gradient, state) -> (weights, state)`.

`refuse_mixing` checks, by tracing a rule, whether it looks at several tensors together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import optax

from plimsoll.framework.layout import PyTree
from plimsoll.framework.optimizers.clipping import limit_update_rms
from plimsoll.framework.optimizers.partition import PartitionedGradientTransformation
from plimsoll.framework.optimizers.update_locality import Inputs, find_result_inputs

# An optimizer: an optax transformation, perhaps one of `framework.optimizers`.
Optimizer = optax.GradientTransformation | PartitionedGradientTransformation
# An update rule that is a plain function.
RuleFunction = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


@dataclass(frozen=True)
class OptaxRule:
    """Update rule that applies an optax transformation. Weights that are not floats are None in all trees.

    Attributes:
        optimizer: the transformation.
        max_update_rms: each tensor's update is scaled down to this root mean square; None for no limit.
    """

    optimizer: Optimizer
    max_update_rms: float | None

    def initial_state(self, weights: PyTree) -> PyTree:
        """Return the state before the first update."""
        return self.optimizer.init(weights)

    def update(self, weights: PyTree, gradient: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return (new weights, new state)."""
        updates, new_state = self.optimizer.update(gradient, state, weights)
        return self.add_updates(weights, updates), new_state

    def add_updates(self, weights: PyTree, updates: PyTree) -> PyTree:
        """Return the weights after applying the optimizer's updates."""
        if self.max_update_rms is not None:
            # The updates already include the learning rate, so the limit is relative to a rate of 1.
            updates = limit_update_rms(updates, self.max_update_rms, 1.0)
        return optax.apply_updates(weights, updates)


@dataclass(frozen=True)
class FunctionRule:
    """Update rule of a plain function. Its initial state is empty, `()`, unless the caller passes one."""

    function: RuleFunction

    def initial_state(self, weights: PyTree) -> PyTree:
        """Return the state before the first update."""
        return ()

    def update(self, weights: PyTree, gradient: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return (new weights, new state)."""
        return self.function(weights, gradient, state)


UpdateRule = OptaxRule | FunctionRule


def as_rule(optimizer_or_rule: Optimizer | RuleFunction, name: str, max_update_rms: float | None) -> UpdateRule:
    """Return the rule of an optax transformation or of a function.

    Args:
        optimizer_or_rule: the transformation or function.
        name: name of the module, for messages.
        max_update_rms: see `OptaxRule`.

    Raises:
        TypeError: it is neither.
        ValueError: the optimizer draws noise from a seed that only a full training run has, or `max_update_rms` is
            given with a function.
    """
    if hasattr(optimizer_or_rule, "init") and hasattr(optimizer_or_rule, "update"):
        # Set by framework.optimizers.partition: such an update takes a separate seed for each layer.
        if getattr(optimizer_or_rule, "draws", False):
            raise ValueError(
                f"{name}: this optimizer needs a seed, which only a training run provides; use an optimizer without one"
            )
        return OptaxRule(cast(Optimizer, optimizer_or_rule), max_update_rms)
    if not callable(optimizer_or_rule):
        raise TypeError(
            f"{name}: expected an optax transformation or a function (weights, gradient, state) -> (weights, state), "
            f"given {optimizer_or_rule!r}"
        )
    if max_update_rms is not None:
        raise ValueError(
            f"{name}: max_update_rms = {max_update_rms} with a rule that is a function, whose updates are not "
            "visible; limit them in the function, or pass an optax transformation"
        )
    return FunctionRule(cast(RuleFunction, optimizer_or_rule))


def all_finite(gradient: PyTree) -> jax.Array:
    """Return whether a gradient has neither infinities nor NaN, a bool scalar."""
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)]
    return jnp.stack(finite).all()


# --- rules that look at several tensors ------------------------------------------------------------------------------

# (weights, gradient, state) -> (new weights, new state)
UpdateFunction = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


@dataclass(frozen=True)
class Influence:
    """Tensors whose gradients can influence the results of an update, over any number of steps: one bit per tensor.

    Attributes:
        weights: bit sets for the tensors, in the order of the leaves.
        state: bit sets for the leaves of the state.
    """

    weights: list[Inputs]
    state: list[Inputs]

    @property
    def mixes(self) -> bool:
        """Return whether the update of a tensor may depend on the gradient of another one."""
        return any(sources & ~(1 << number) for number, sources in enumerate(self.weights))


def trace_influence(update: UpdateFunction, weights: PyTree, state: PyTree) -> Influence:
    """Trace the influence of gradients through an update and, through the state, through later updates.

    Every path in the program counts as an influence, even one that carries nothing (`x * 0`).

    Args:
        update: the update rule, a function of arrays.
        weights, state: arguments of the rule: arrays or their shapes.
    """
    shapes = jax.tree.map(_shape, (weights, weights, state))
    traced = jax.make_jaxpr(update)(*shapes)
    result_inputs = find_result_inputs(traced.jaxpr)
    num_weights = len(jax.tree.leaves(weights))
    param_bits = [1 << number for number in range(num_weights)]
    num_state = len(result_inputs) - num_weights
    state_sources = [0] * num_state
    # Repeated until nothing changes, because gradients may reach later updates through the state.
    while True:
        # Weights carry the influence of their own gradients from earlier steps.
        input_sources = [*param_bits, *param_bits, *state_sources]
        result_sources = []
        for inputs in result_inputs:
            # All tensors that influence any of the inputs.
            union = 0
            for number, sources in enumerate(input_sources):
                if inputs >> number & 1:
                    union |= sources
            result_sources.append(union)
        new_state_sources = result_sources[num_weights:]
        if new_state_sources == state_sources:
            return Influence(result_sources[:num_weights], state_sources)
        state_sources = [old | new for old, new in zip(state_sources, new_state_sources, strict=True)]


def refuse_mixing(rule: UpdateRule, weights: PyTree, state: PyTree, name: str) -> None:
    """Check that a rule updates each tensor of a module from that tensor's gradient only.

    If a module has a single tensor, an optax transformation is checked on two tensors of its shape. A user's function
    cannot be checked in this case: with one tensor, global and per-tensor rules look the same.

    Args:
        rule: the update rule.
        weights, state: arguments of the rule: arrays or their shapes.
        name: name of the module, for the message.

    Raises:
        ValueError: the rule looks at several tensors together.
    """
    mixes = trace_influence(rule.update, weights, state).mixes
    if not mixes and len(jax.tree.leaves(weights)) == 1 and isinstance(rule, OptaxRule):
        shapes = jax.tree.map(_shape, weights)
        two_tensors = {"first": shapes, "second": shapes}
        try:
            two_states = jax.eval_shape(rule.initial_state, two_tensors)
            mixes = trace_influence(rule.update, two_tensors, two_states).mixes
        except (TypeError, ValueError):
            # A transformation made for one tree structure (a tree of labels) accepts no other.
            pass
    if mixes:
        raise ValueError(
            f"{name}: the rule looks at several tensors together, as clipping by the global norm does, but it would "
            "see only those of this module; clip by tensor (optax.clip_by_block_rms, max_update_rms), or pass "
            "mixes=True if the rule is meant to see only this module"
        )


def _shape(leaf: PyTree) -> PyTree:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf
