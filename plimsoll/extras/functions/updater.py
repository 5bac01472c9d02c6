"""`Updater`: makes the initial state of a module's optimizer, and new weights and state from a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.extras.functions.encoding import Tree, encode, select_floats, with_floats
from plimsoll.extras.functions.gradient_influence import refuse_mixing
from plimsoll.extras.functions.rules import UpdateRule, all_finite
from plimsoll.extras.functions.stacks import layer_at, num_layers, with_layer
from plimsoll.extras.functions.trained import Trained
from plimsoll.extras.functions.update_primitive import apply_barrier


@dataclass(frozen=True)
class Updater:
    """Updates a module by its gradient.

    Attributes:
        name: name of the module.
        rule: the update rule.
        skip_nonfinite: whether a gradient with infinities or NaN leaves weights and state as they are.
        mixes: whether the rule may look at several tensors of the module together.
    """

    name: str
    rule: UpdateRule
    skip_nonfinite: bool
    mixes: bool

    # --- initialization ----------------------------------------------------------------------------------------------

    def encode_weights(self, weights: Tree) -> tuple[Tree, Tree]:
        """Return (the encoded weights, the float weights).

        Raises:
            ValueError: there are no floats, a weight is complex, or some of the weights are already trained.
        """
        for node in jax.tree.leaves(weights, is_leaf=lambda node: isinstance(node, Trained)):
            if isinstance(node, Trained):
                raise ValueError(
                    f"{self.name}: its weights contain {node.name!r}, which is already trained; pass it to the "
                    "module as an input"
                )
        try:
            encoded_weights = encode(weights)
        except ValueError as error:
            raise ValueError(f"{self.name}: its weights have {error}") from None
        floats = select_floats(encoded_weights)
        if not jax.tree.leaves(floats):
            raise ValueError(f"{self.name}: its weights have no array of floats, so there is nothing to train")
        return encoded_weights, floats

    def prepare_state(self, floats: Tree, state: Tree | None) -> Tree:
        """Return the state before the first update: `state` if given, otherwise the rule's initial state.

        Raises:
            ValueError: the rule looks at several tensors together, which `mixes` does not allow.
        """
        if state is None:
            self._check_rule(floats, jax.eval_shape(self.rule.initial_state, floats))
            return _with_arrays(self._init_state(floats))
        given_state = _with_arrays(state)
        self._check_rule(floats, given_state)
        return self._store_state(floats, given_state)

    def prepare_stack_state(self, floats: Tree, state: Tree | None) -> Tree:
        """Return the state of stacked layers, a separate one for each layer: trees of arrays [L, ...]."""
        layer_floats = jax.eval_shape(lambda stack: layer_at(stack, 0), floats)
        if state is None:
            self._check_rule(layer_floats, jax.eval_shape(self.rule.initial_state, layer_floats))
            return _with_arrays(self._init_stack_state(floats))
        given_state = _with_arrays(state)
        num_layers(self.name, (floats, given_state))
        self._check_rule(layer_floats, jax.eval_shape(lambda stack: layer_at(stack, 0), given_state))
        return self._store_state(layer_floats, given_state)

    def _init_state(self, floats: Tree) -> Tree:
        return self.rule.initial_state(floats)

    def _init_stack_state(self, floats: Tree) -> Tree:
        return jax.vmap(self.rule.initial_state)(floats)

    def _store_state(self, floats: Tree, state: Tree) -> Tree:
        """Move a given state, of a module or of a stack with layers like `floats`, to its memory kinds."""
        return state

    def _check_rule(self, floats: Tree, state: Tree) -> None:
        if not self.mixes:
            refuse_mixing(self.rule, floats, state, self.name)

    # --- the update --------------------------------------------------------------------------------------------------

    def apply_update(self, trained: Trained, gradient: Tree, later: Tree) -> tuple[Trained, Tree]:
        """Return the weights and the state after one update.

        Args:
            trained: weights and state before the update.
            gradient: gradient of `trained.floats`, with the same structure.
            later: arrays whose consumers must wait for the update.

        Returns:
            (the new weights and state, `later`).
        """
        return apply_barrier((self._update_or_skip(trained, gradient), later))

    def get_layer(self, stack: Trained, index: jax.Array) -> Trained:
        """Return one layer of a stack, with the part of its state that the update reads on the device."""
        return layer_at(stack, index)

    def apply_layer_update(
        self, stack: Trained, index: jax.Array, layer: Trained, gradient: Tree, later: Tree
    ) -> tuple[Trained, Tree]:
        """Return the stack with one layer's weights and state replaced by the new ones, and `later`.

        Args:
            stack: weights and state of all layers, arrays [L, ...].
            index: index of the layer, an integer.
            layer: the layer as returned by `get_layer`.
            gradient: gradient of the layer.
            later: see `apply_update`.
        """
        new_layer, later = self.apply_update(layer, gradient, later)
        return with_layer(stack, new_layer, index), later

    def _update_or_skip(self, trained: Trained, gradient: Tree) -> Trained:
        """Return the weights and state after the update, or unchanged if the update is skipped."""
        if not self.skip_nonfinite:
            return self._apply_rule(trained, gradient)
        is_finite = all_finite(gradient)

        def update_with_where(trained: Trained, gradient: Tree) -> Trained:
            new = self._apply_rule(trained, gradient)
            return jax.tree.map(lambda new_leaf, leaf: jnp.where(is_finite, new_leaf, leaf), new, trained)

        def update_with_cond(trained: Trained, gradient: Tree) -> Trained:
            return jax.lax.cond(is_finite, self._apply_rule, lambda trained, _: trained, trained, gradient)

        # XLA for CPU drops barriers and would update the weights while it reads the state from the stack that it is
        # about to write, so it would copy whole stacks for every layer. It does not fuse across a branch.
        return jax.lax.platform_dependent(trained, gradient, cpu=update_with_cond, default=update_with_where)

    def _apply_rule(self, trained: Trained, gradient: Tree) -> Trained:
        floats = trained.floats
        state = trained.state
        with jax.named_scope(f"update_{self.name}"):
            new_floats, new_state = self.rule.update(floats, gradient, state)
            new_floats = self._cast_like(new_floats, floats, "weights")
            new_state = self._cast_like(new_state, state, "state")
            return Trained(with_floats(trained.encoded_weights, new_floats), encode(new_state), trained.name)

    def _cast_like(self, new: Tree, old: Tree, what: str) -> Tree:
        """Return the new tree in the dtypes of the old one.

        Raises:
            ValueError: the rule changed the structure of the tree, or a shape.
        """
        if jax.tree.structure(new) != jax.tree.structure(old):
            raise ValueError(
                f"{self.name}: the rule returned {what} of another structure, {jax.tree.structure(new)}; expected "
                f"{jax.tree.structure(old)}"
            )

        def cast_leaf(new_leaf: Any, old_leaf: Any) -> Any:
            if not hasattr(old_leaf, "dtype"):
                return old_leaf
            new_array = jnp.asarray(new_leaf)
            if new_array.shape != old_leaf.shape:
                raise ValueError(
                    f"{self.name}: the rule returned {what} of the shape {new_array.shape}; expected {old_leaf.shape}"
                )
            return new_array.astype(old_leaf.dtype)

        return jax.tree.map(cast_leaf, new, old)


def _with_arrays(state: Tree) -> Tree:
    """Convert the Python numbers of an optimizer's state to arrays, so that they are not constants."""

    def as_array(leaf: Any) -> Any:
        return jnp.asarray(leaf) if isinstance(leaf, (bool, int, float)) else leaf

    return jax.tree.map(as_array, state)
