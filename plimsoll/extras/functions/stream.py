"""`stream`: keeps the state of any optax transformation in host memory, with one chunk at a time on the device.

Offloading as in apple/axlearn#867, with the streaming that its review asked for: there, all of the state is fetched
before the update. In a config, `memory.optimizer_state` and `memory.update` do this and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from plimsoll.extras.functions.encoding import Tree
from plimsoll.extras.functions.streamed_update import ResultFunction, StreamedUpdate
from plimsoll.extras.functions.weight_chunks import UpdatePlanner
from plimsoll.framework.layout import flatten, store_leaf


def stream(
    optimizer: optax.GradientTransformation, *, pattern: str = ".*", chunk_bytes: int = 16 << 20
) -> optax.GradientTransformationExtraArgs:
    """Keep the state of an optimizer in host memory, and bring it to the device one chunk at a time.

        optimizer = pl.stream(optax.adamw(1e-3))
        state = optimizer.init(params)
        updates, state = optimizer.update(gradients, state, params)   # inside the step that is jitted

    The state has the structure, shapes and values of the optimizer's own state. Leaves that match are in memory of the
    kind `pinned_host`, and a jitted step keeps them there. Vectors, scalars and leaves under 1 MiB stay on the device.
    The updates reuse the memory of the gradients if these are not needed afterwards. With `eager` or `eager_scan`, the
    streamed optimizer updates a module or a layer in the backward pass, so only one gradient exists at a time.

    Donate both parameters and state, in this order. Without donation the state is in host memory twice. If only the
    state is donated, JAX 0.10 pairs donated and returned arrays by shape and may place new parameters into the state's
    host memory, where the program fails with an error about memory kinds.

    `update` has one more argument: `gradient_factor`, a float scalar that multiplies all gradients. To clip by the
    exact global norm, pass min(1, limit / optax.global_norm(gradients)).

    Complexity of an update of P parameters with S bytes of state: the optimizer's own arithmetic. S bytes cross the
    host link in each direction, one chunk after another. In addition to parameters, gradients and updates, the device
    holds one chunk: `chunk_bytes` of a parameter, or a whole one if it cannot be sliced, with its old and new state.

    Args:
        optimizer: any transformation whose update of a tensor depends only on that tensor's gradients, and that works
            without the other tensors (they are None).
        pattern: a regex, searched in the paths of the state, such as "0/mu/layers/query"; see `offload_optimizer`.
        chunk_bytes: a parameter with more bytes is updated in slices of at most this size if a trial shows that the
            optimizer treats the slices independently. Slices are along the first axis, and also along the second if
            the optimizer works by element. Other parameters are updated whole.

    Raises:
        ValueError: from `init` and `update`: the pattern matches nothing, the optimizer looks at several tensors
            together, or `params` is missing.
    """
    streamed = StreamedOptimizer(UpdatePlanner(optax.with_extra_args_support(optimizer), pattern, chunk_bytes))
    return optax.GradientTransformationExtraArgs(streamed.init, streamed.update)


@dataclass(frozen=True)
class StreamedOptimizer:
    """A streamed optimizer: the two functions of an optax transformation, and the per-layer update for `eager_scan`."""

    planner: UpdatePlanner

    def init(self, params: Tree) -> Tree:
        """Return the initial optimizer state, with matching leaves in host memory."""
        return self.store_state(params, self.planner.optimizer.init(params))

    def store_state(self, params: Tree, state: Tree) -> Tree:
        """Move a state, or a stack of states of layers with such parameters, to its memory kinds."""
        specs = self.planner.plan(params).specs
        stored = [store_leaf(specs[path], jnp.asarray(leaf)) for path, leaf in flatten(state).items()]
        return jax.tree.unflatten(jax.tree.structure(state), stored)

    def update(
        self,
        updates: Tree,
        state: Tree,
        params: Tree | None = None,
        *,
        gradient_factor: jax.Array | float | None = None,
        **extra_args: Any,
    ) -> tuple[Tree, Tree]:
        """Return (updates, new state) for all parameters."""
        if params is None:
            raise ValueError("stream: expected update(gradients, state, params), given no parameters")
        plan = self.planner.plan(params)
        streamed = StreamedUpdate(self.planner.optimizer, plan, params, gradient_factor, extra_args)
        return streamed.run(updates, state)

    def update_layer(
        self,
        gradients: Tree,
        state: Tree,
        params: Tree,
        layer: jax.Array | int,
        is_applied: jax.Array | None,
        result: ResultFunction,
    ) -> tuple[Tree, Tree]:
        """Return (results for one layer's parameters, the state of all layers with that layer's state updated).

        Args:
            gradients, params: gradients and parameters of the layer.
            state: a stack of all layers' states, [L, ...]; the state of one layer, [...], goes with `layer` = 0.
            layer: index of the layer, an integer.
            is_applied: a bool scalar, whether to store the new state; None: always.
            result: (parameter, update) -> the result, for arrays or slices of them.
        """
        plan = self.planner.plan(params)
        streamed = StreamedUpdate(self.planner.optimizer, plan, params, None, {}, layer, is_applied, result)
        return streamed.run(gradients, state)


def as_streamed_optimizer(optimizer: Any) -> StreamedOptimizer | None:
    """Return the `StreamedOptimizer` behind an optimizer that `stream` made; None for any other optimizer."""
    # An optax transformation has no field for it, but its `update` is a method of the StreamedOptimizer.
    owner = getattr(getattr(optimizer, "update", None), "__self__", None)
    return owner if isinstance(owner, StreamedOptimizer) else None
