"""Update rules: an optax transformation, or a function `(weights, gradient, state) -> (weights, state)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import optax

from plimsoll.extras.functions.encoding import Tree
from plimsoll.framework.optimizers.clipping import limit_update_rms

# An update rule that is a plain function.
RuleFunction = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


class UpdateRule(Protocol):
    """Update rule for the weights of a module. Weights that are not floats are None in all trees."""

    def initial_state(self, weights: Tree) -> Tree:
        """Return the state before the first update."""
        ...

    def update(self, weights: Tree, gradient: Tree, state: Tree) -> tuple[Tree, Tree]:
        """Return (new weights, new state)."""
        ...


@dataclass(frozen=True)
class OptaxRule:
    """Update rule that applies an optax transformation.

    Attributes:
        optimizer: the transformation.
        max_update_rms: each tensor's update is scaled down to this root mean square; None for no limit.
    """

    optimizer: optax.GradientTransformation
    max_update_rms: float | None

    def initial_state(self, weights: Tree) -> Tree:
        """See `UpdateRule`."""
        return self.optimizer.init(weights)

    def update(self, weights: Tree, gradient: Tree, state: Tree) -> tuple[Tree, Tree]:
        """See `UpdateRule`."""
        updates, new_state = self.optimizer.update(gradient, state, weights)
        return self.add_updates(weights, updates), new_state

    def add_updates(self, weights: Tree, updates: Tree) -> Tree:
        """Return the weights after applying the optimizer's updates."""
        if self.max_update_rms is not None:
            # The updates already include the learning rate, so the limit is relative to a rate of 1.
            updates = limit_update_rms(updates, self.max_update_rms, 1.0)
        return optax.apply_updates(weights, updates)


@dataclass(frozen=True)
class FunctionRule:
    """Update rule of a plain function. Its initial state is empty, `()`, unless the caller passes one."""

    function: RuleFunction

    def initial_state(self, weights: Tree) -> Tree:
        """See `UpdateRule`."""
        return ()

    def update(self, weights: Tree, gradient: Tree, state: Tree) -> tuple[Tree, Tree]:
        """See `UpdateRule`."""
        return self.function(weights, gradient, state)


def as_rule(optimizer_or_rule: Any, name: str, max_update_rms: float | None) -> UpdateRule:
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
        return OptaxRule(optimizer_or_rule, max_update_rms)
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


def all_finite(gradient: Tree) -> jax.Array:
    """Return whether a gradient has neither infinities nor NaN, a bool scalar."""
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)]
    return jnp.stack(finite).all()
