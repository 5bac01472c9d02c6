"""`stream`: the state of any optax transformation in host memory, a chunk of it on the device at a time.

Offloading as in apple/axlearn#867, whose review asked for streaming: there, all of the state is fetched before the
update. In a config, `memory.optimizer_state` and `memory.update` do this and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from framework.functions.chunks import Planner
from framework.functions.encoding import Tree
from framework.functions.streamed_update import Result, StreamedUpdate
from framework.layout import flatten, store_leaf


def stream(
    optimizer: optax.GradientTransformation,
    *,
    pattern: str = ".*",
    chunk_bytes: int = 16 << 20,
) -> optax.GradientTransformationExtraArgs:
    """Keeps the state of an optimizer in host memory, and brings it to the device a chunk at a time.

        optimizer = pl.stream(optax.adamw(1e-3))
        state = optimizer.init(params)
        updates, state = optimizer.update(gradients, state, params)   # inside the step that is jitted

    The state has the structure, shapes and values that the optimizer's own has; what matches is in memory of the kind
    `pinned_host`, and a jitted step keeps it there. Vectors, scalars and leaves under 1 MiB stay on the device. The
    updates take the place of the gradients where these are not needed afterwards. Given to `eager` or `eager_scan`, the
    streamed optimizer updates a piece or a layer in the backward pass, so that there is never more than one's gradient.

    Donate parameters and state, both and in this order. Without donation the state is on the host twice; with that of
    the state alone, JAX 0.10 pairs donated and returned arrays by their shapes, and may want to have new parameters in
    the state's place on the host, where the program ends with an error about memory kinds.

    `update` has one more argument: `gradient_factor`, a float scalar by which all gradients are multiplied. For a clip
    by the exact global norm it is min(1, limit / optax.global_norm(gradients)).

    Complexity of an update of P parameters with S bytes of state: the optimizer's own arithmetic; S bytes cross the
    link to the host in either direction, a chunk after the other. Beside parameters, gradients and updates the device
    holds one chunk: `chunk_bytes` of a parameter, or a whole one that may not be cut, with its state, old and new.

    Args:
        optimizer: any transformation whose update of a tensor depends on that tensor's gradients alone, and that can do
            without the other tensors (None in their place).
        pattern: a regex, searched in the paths of the state, such as "0/mu/layers/query"; see `offload_optimizer`.
        chunk_bytes: a parameter with more bytes is updated by slices with as many at most, where a trial shows that
            the optimizer updates each slice as if it were alone: slices of the first axis, or of the second as well
            where it works by element. Others are updated whole.

    Raises:
        ValueError: by `init` and `update`: the pattern matches nothing, the optimizer looks at several tensors
            together, or `params` are not given.
    """
    streamed = Stream(Planner(optax.with_extra_args_support(optimizer), pattern, chunk_bytes))
    return optax.GradientTransformationExtraArgs(streamed.init, streamed.update)


@dataclass(frozen=True)
class Stream:
    """A streamed optimizer: the two functions of an optax transformation, and what `eager_scan` needs of it."""

    planner: Planner

    def init(self, params: Tree) -> Tree:
        """The state of the optimizer, stored where it lives."""
        return self.placed(params, self.planner.optimizer.init(params))

    def placed(self, params: Tree, state: Tree) -> Tree:
        """A state, or a stack of states of layers with such parameters, stored where it lives."""
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
        """(updates, new state) of all parameters."""
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
        result: Result,
    ) -> tuple[Tree, Tree]:
        """(results for one layer's parameters, the state of all layers with that layer's new one).

        Args:
            gradients, params: of the layer.
            state: a stack of all layers' states, [L, ...]; that of one layer, [...], goes with `layer` = 0.
            layer: an integer, which one it is.
            is_applied: a bool scalar, whether the state becomes the new one; None: it does.
            result: (parameter, update) -> the result, of arrays or slices of them.
        """
        plan = self.planner.plan(params)
        streamed = StreamedUpdate(self.planner.optimizer, plan, params, None, {}, layer, is_applied, result)
        return streamed.run(gradients, state)


def stream_of(optimizer: Any) -> Stream | None:
    """What `stream` made an optimizer of; None if the optimizer is anything else."""
    owner = getattr(getattr(optimizer, "update", None), "__self__", None)
    return owner if isinstance(owner, Stream) else None
