"""Updates inside the backward pass, for a function of one's own: `eager` of a piece, `eager_weights` of shared weights.

A piece is a `jax.custom_vjp` whose backward pass takes the gradient of the weights, updates them, and returns the new
weights and state where JAX expects cotangents. The gradient is then gone: LOMO (Lv et al. 2023, arXiv 2306.09782) as
one line around a part of a forward pass. Nothing is said of checkpointing: `jax.checkpoint` goes inside or outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import jax

from framework.functions.encoding import Tree, decoded, encoded, with_static
from framework.functions.marker import marked
from framework.functions.rules import BareRule
from framework.functions.trained import Trained
from framework.functions.update_options import UpdateOptions, updater_of
from framework.functions.updater import Updater
from framework.functions.uses import USES

# The floats of a `Trained`, and inputs -> outputs: what is differentiated.
Forward = Callable[[Trained, Tree, Tree], Tree]


class _Eager:
    """What a piece and shared weights have in common: the beginning of training, and the backward pass."""

    def __init__(self, forward: Forward, updater: Updater):
        self.name = updater.name
        self._updater = updater
        self._apply = _updating(forward, updater)

    def init(self, weights: Tree, state: Tree | None = None) -> Trained:
        """The weights with the first state of their optimizer.

        Args:
            weights: any pytree: arrays of floats are trained, other leaves are left as they are.
            state: of the optimizer, where it is not the first; a rule that is a function has none of its own, `()`.

        Raises:
            ValueError: there are no floats to train, a part is trained already, or the rule looks at several tensors
                together (see `mixes` of `eager`).
        """
        encoded_weights, floats = self._updater.checked_floats(weights)
        state = self._updater.state_of(floats, state)
        return Trained(encoded_weights, encoded(state), self.name)

    def _used(self, trained: Trained) -> Trained:
        if not isinstance(trained, Trained):
            raise TypeError(f"{self.name}: expected the Trained of `init`, given {type(trained).__name__}")
        USES.note(trained, self.name)
        return trained


class EagerPiece(_Eager):
    """A piece that is updated in the backward pass; made by `eager`."""

    def __init__(self, piece: Callable[..., Tree], updater: Updater):
        def forward(trained: Trained, floats: Tree, inputs: Tree) -> Tree:
            return piece(trained.weights_with(floats), *decoded(inputs))

        super().__init__(forward, updater)

    def __call__(self, trained: Trained, *inputs: Tree) -> Tree:
        """The piece's outputs for its inputs.

        Args:
            trained: of `init`, or of the update before.
            inputs: pytrees of arrays of any dtype, PRNG keys, or what has a hash and is no array; a `Trained` of
                another piece as well, which is used inside this one.

        Raises:
            ValueError: the same weights are used twice in a function that is being differentiated.
        """
        return self._apply(self._used(trained), with_static(inputs))


class EagerWeights(_Eager):
    """Weights that are updated once all their uses have been gone through backward; made by `eager_weights`."""

    def __init__(self, updater: Updater):
        def forward(trained: Trained, floats: Tree, inputs: Tree) -> Tree:
            return floats

        super().__init__(forward, updater)

    def __call__(self, trained: Trained) -> Tree:
        """The weights, to be used as often as one likes.

        Args:
            trained: of `init`, or of the update before.

        Raises:
            ValueError: this is called twice in a function that is being differentiated.
        """
        return trained.weights_with(self._apply(self._used(trained), ()))


def eager(
    piece: Callable[..., Tree],
    optimizer_or_rule: Any | BareRule,
    **options: Unpack[UpdateOptions],
) -> EagerPiece:
    """Makes a piece of a forward pass whose weights are updated inside the backward pass.

        layer = pl.eager(piece, optax.adamw(1e-3), name="layer")
        trained = layer.init(weights)
        y = layer(trained, x)                    # piece(weights, x)
        trained = jax.grad(loss)(trained, ...)   # new weights and state; no gradient is left

    `jax.grad` sees nothing of a piece that the loss does not depend on: its result is then zeros, not the old weights.
    Nor does it see two uses of the same weights in a loop, under `jax.jit` or `jax.checkpoint`; those that it is called
    on directly are refused. `value_and_update` finds all of this before anything runs. What is done to a gradient after
    `jax.grad` (unscaling, a mean over microbatches or over the devices of a shard_map) comes too late: do it in the
    loss or in the rule.

    Complexity: the arithmetic of `jax.grad` and of the optimizer. Of pieces with P bytes of weights and S of state,
    used one after the other and donated, a step holds P + S, the gradient of the largest piece, and what the forward
    pass keeps; `jax.grad` followed by optax holds the gradients of all, 2 P + S.

    Args:
        piece: `piece(weights, *inputs) -> outputs`, pytrees. Of its weights, arrays of floats are trained.
        optimizer_or_rule: an optax transformation, a `stream`, whose state stays on the host, or a function
            `(weights, gradient, state) -> (weights, state)`. Weights that are no floats are None in all three.
        options: `name`, `skip_nonfinite`, `max_update_rms` and `mixes`, see `UpdateOptions`.

    Raises:
        TypeError: `optimizer_or_rule` is none of the three, or there is no such option.
        ValueError: the optimizer needs a seed, or `max_update_rms` is given with a function.
    """
    return EagerPiece(piece, updater_of(optimizer_or_rule, **options))


def eager_weights(optimizer_or_rule: Any | BareRule, **options: Unpack[UpdateOptions]) -> EagerWeights:
    """Makes weights that several parts of a forward pass share, and that are updated once, by the sum of the gradients.

        shared = pl.eager_weights(optax.adamw(1e-3), name="embedding")
        weights = shared(shared.init(weights))   # use it as often as you like

    Their gradient is held from their last use in the forward pass to the first one. The arguments, the complexity, and
    what is raised, are those of `eager`.
    """
    return EagerWeights(updater_of(optimizer_or_rule, **options))


def _updating(forward: Forward, updater: Updater) -> Callable[[Trained, Tree], Tree]:
    """The function whose backward pass updates."""

    @jax.custom_vjp
    def apply(trained: Trained, inputs: Tree) -> Tree:
        return forward(trained, trained.floats, inputs)

    def apply_forward(trained: Trained, inputs: Tree) -> tuple[Tree, Any]:
        def of_floats(floats: Tree, inputs: Tree) -> Tree:
            return forward(trained, floats, inputs)

        outputs, pull_back = jax.vjp(of_floats, trained.floats, inputs)
        return outputs, (trained, pull_back)

    def apply_backward(residuals: Any, cotangents: Tree) -> tuple[Trained, Tree]:
        trained, pull_back = residuals
        gradient, input_cotangents = pull_back(cotangents)
        # What is before the piece waits for the update, so that gradients do not pile up.
        new, input_cotangents = updater.updated(trained, gradient, input_cotangents)
        return marked(new, updater.name), input_cotangents

    apply.defvjp(apply_forward, apply_backward)
    return apply
