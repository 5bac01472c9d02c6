"""Checks whether an update rule looks at several tensors together, by tracing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from plimsoll.extras.functions.encoding import Tree
from plimsoll.extras.functions.rules import OptaxRule, UpdateRule
from plimsoll.framework.optimizers.update_locality import Inputs, find_result_inputs

# (weights, gradient, state) -> (new weights, new state)
UpdateFunction = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


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


def trace_influence(update: UpdateFunction, weights: Tree, state: Tree) -> Influence:
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
        result_sources = [_union(inputs, input_sources) for inputs in result_inputs]
        new_state_sources = result_sources[num_weights:]
        if new_state_sources == state_sources:
            return Influence(result_sources[:num_weights], state_sources)
        state_sources = [old | new for old, new in zip(state_sources, new_state_sources, strict=True)]


def refuse_mixing(rule: UpdateRule, weights: Tree, state: Tree, name: str) -> None:
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
        mixes = _mixes_two_tensors(rule, weights)
    if mixes:
        raise ValueError(
            f"{name}: the rule looks at several tensors together, as clipping by the global norm does, but it would "
            "see only those of this module; clip by tensor (optax.clip_by_block_rms, max_update_rms), or pass "
            "mixes=True if the rule is meant to see only this module"
        )


def _mixes_two_tensors(rule: OptaxRule, weights: Tree) -> bool:
    shapes = jax.tree.map(_shape, weights)
    two_tensors = {"first": shapes, "second": shapes}
    try:
        state = jax.eval_shape(rule.initial_state, two_tensors)
        return trace_influence(rule.update, two_tensors, state).mixes
    except (TypeError, ValueError):
        # A transformation made for one tree structure (a tree of labels) accepts no other.
        return False


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf


def _union(inputs: Inputs, input_sources: list[Inputs]) -> Inputs:
    """Return all tensors that influence any of a set of inputs."""
    union = 0
    for number, sources in enumerate(input_sources):
        if inputs >> number & 1:
            union |= sources
    return union
