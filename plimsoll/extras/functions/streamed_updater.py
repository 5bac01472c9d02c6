"""Updater for an optimizer that is a `stream`: the state of the module, or of all layers, stays in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.extras.functions.encoding import Tree, encode, with_floats
from plimsoll.extras.functions.leaves import is_real_float
from plimsoll.extras.functions.rules import OptaxRule, all_finite
from plimsoll.extras.functions.stacks import layer_at, weights_at, with_layer
from plimsoll.extras.functions.stream import StreamedOptimizer
from plimsoll.extras.functions.streamed_update import select_update
from plimsoll.extras.functions.trained import Trained
from plimsoll.extras.functions.update_primitive import apply_barrier
from plimsoll.extras.functions.updater import Updater


@dataclass(frozen=True)
class StreamedUpdater(Updater):
    """An `Updater` that fetches one chunk of the state after another, and writes it back.

    Attributes:
        rule: update rule of the optimizer inside the stream.
        stream: the streamed optimizer, which stores the state.
    """

    rule: OptaxRule
    stream: StreamedOptimizer

    def _init_state(self, floats: Tree) -> Tree:
        self._check_dtypes(floats)
        return self.stream.init(floats)

    def _init_stack_state(self, floats: Tree) -> Tree:
        self._check_dtypes(jax.eval_shape(lambda stack: layer_at(stack, 0), floats))
        # The device creates the state of one layer at a time.
        return jax.lax.map(self.stream.init, floats)

    def _store_state(self, floats: Tree, state: Tree) -> Tree:
        self._check_dtypes(floats)
        return self.stream.store_state(floats, state)

    def _check_dtypes(self, floats: Tree) -> None:
        """Raise ValueError if a state leaf for host memory is not an array of floats."""
        for path, spec in self.stream.planner.plan(floats).specs.items():
            is_encoded = not is_real_float(jax.ShapeDtypeStruct(spec.shape, spec.dtype))
            if spec.memory_kind != "device" and is_encoded:
                raise ValueError(
                    f"{self.name}: its state {path} is {spec.dtype}, which a module stores as floats and cannot keep "
                    "in host memory; exclude it by the pattern= of `stream`"
                )

    def apply_update(self, trained: Trained, gradient: Tree, later: Tree) -> tuple[Trained, Tree]:
        """See `Updater.apply_update`."""
        new_floats, new_state = self._compute_update(trained.floats, gradient, trained.state, 0)
        # State in host memory does not go through the barrier, whose operands are in device memory.
        new_floats, later = apply_barrier((new_floats, later))
        return Trained(with_floats(trained.encoded_weights, new_floats), encode(new_state), trained.name), later

    def get_layer(self, stack: Trained, index: jax.Array) -> Trained:
        """Return the weights only; see `Updater.get_layer`."""
        return weights_at(stack, index)

    def apply_layer_update(
        self, stack: Trained, index: jax.Array, layer: Trained, gradient: Tree, later: Tree
    ) -> tuple[Trained, Tree]:
        """See `Updater.apply_layer_update`."""
        new_floats, new_state = self._compute_update(layer.floats, gradient, stack.state, index)
        new_floats, later = apply_barrier((new_floats, later))
        new_weights = with_floats(stack.encoded_weights, with_layer(stack.floats, new_floats, index))
        return Trained(new_weights, encode(new_state), stack.name), later

    def _compute_update(self, floats: Tree, gradient: Tree, state: Tree, index: Any) -> tuple[Tree, Tree]:
        """Return (new floats of one layer, the state of all layers with that layer's state updated)."""
        is_applied = all_finite(gradient) if self.skip_nonfinite else None

        def new_float(param: jax.Array, update: jax.Array) -> jax.Array:
            new_param = self.rule.add_updates(param, update)
            return new_param if is_applied is None else jnp.where(is_applied, new_param, param)

        # The RMS limit needs a whole tensor's update, so it cannot be applied slice by slice.
        is_sliced = self.rule.max_update_rms is None
        with jax.named_scope(f"update_{self.name}"):
            result = new_float if is_sliced else select_update
            results, new_state = self.stream.update_layer(gradient, state, floats, index, is_applied, result)
            new_floats = results if is_sliced else jax.tree.map(new_float, floats, results)
            return new_floats, new_state
