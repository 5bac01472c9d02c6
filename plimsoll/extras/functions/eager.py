"""Updates inside the backward pass of any function: `eager` for a part of it, `eager_weights` for shared weights.

Such a part is called a module here. It is a `jax.custom_vjp` whose backward pass computes the gradient of the weights,
updates them, and returns the new weights and state where JAX expects cotangents. The gradient is then freed: LOMO (Lv
et al. 2023, arXiv 2306.09782) in one line around a part of the forward pass. Checkpointing is independent:
`jax.checkpoint` can go inside or outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import jax

from plimsoll.extras.functions.module_updates import UpdateOptions, Updater, make_updater, mark_update
from plimsoll.extras.functions.trained_weights import Trained, decode, encode, record_use, wrap_static
from plimsoll.extras.functions.update_rules import Optimizer, RuleFunction
from plimsoll.framework.layout import PyTree

# (a `Trained`, its floats, inputs) -> outputs. Only the floats and inputs are differentiated.
ForwardFunction = Callable[[Trained, PyTree, PyTree], PyTree]
# cotangents of the outputs -> (gradient of the floats, cotangents of the inputs)
PullBack = Callable[[PyTree], tuple[PyTree, PyTree]]


class _Eager:
    """Common part of modules and shared weights: initialization and the backward pass."""

    def __init__(self, forward: ForwardFunction, updater: Updater):
        self.name = updater.name
        self._updater = updater
        self._apply = _make_apply(forward, updater)

    def init(self, weights: PyTree, state: PyTree | None = None) -> Trained:
        """Return the weights with the initial state of their optimizer.

        Args:
            weights: any pytree. Float arrays are trained; other leaves stay as they are.
            state: optimizer state to start from; None for the initial one, which is `()` for a plain function.

        Raises:
            ValueError: there are no floats to train, some of the weights are already trained, or the rule looks at
                several tensors together (see `mixes` of `eager`).
        """
        encoded_weights, floats = self._updater.encode_weights(weights)
        state = self._updater.prepare_state(floats, state)
        return Trained(encoded_weights, encode(state), self.name)


class EagerModule(_Eager):
    """A part of a forward pass that is updated in the backward pass; made by `eager`."""

    def __init__(self, function: Callable[..., PyTree], updater: Updater):
        def forward(trained: Trained, floats: PyTree, inputs: PyTree) -> PyTree:
            return function(trained.weights_with(floats), *decode(inputs))

        super().__init__(forward, updater)

    def __call__(self, trained: Trained, *inputs: PyTree) -> PyTree:
        """Return the module's outputs for its inputs.

        Args:
            trained: result of `init` or of the previous update.
            inputs: pytrees of arrays of any dtype, PRNG keys, and hashable values that are not arrays. They may
                include the `Trained` of another module that is used inside this one.

        Raises:
            ValueError: the same weights are used twice in a function that is being differentiated.
        """
        record_use(trained, self.name)
        return self._apply(trained, wrap_static(inputs))


class EagerWeights(_Eager):
    """Weights that are updated after the backward pass has covered all their uses; made by `eager_weights`."""

    def __init__(self, updater: Updater):
        def forward(trained: Trained, floats: PyTree, inputs: PyTree) -> PyTree:
            return floats

        super().__init__(forward, updater)

    def __call__(self, trained: Trained) -> PyTree:
        """Return the weights, to be used any number of times.

        Args:
            trained: result of `init` or of the previous update.

        Raises:
            ValueError: called twice in a function that is being differentiated.
        """
        record_use(trained, self.name)
        return trained.weights_with(self._apply(trained, ()))


def eager(
    function: Callable[..., PyTree], optimizer_or_rule: Optimizer | RuleFunction, **options: Unpack[UpdateOptions]
) -> EagerModule:
    """Make a module: a part of a forward pass whose weights are updated inside the backward pass.

        layer = pl.eager(function, optax.adamw(1e-3), name="layer")
        trained = layer.init(weights)
        y = layer(trained, x)                    # function(weights, x)
        trained = jax.grad(loss)(trained, ...)   # new weights and state; no gradient is left

    `jax.grad` cannot detect some errors. If the loss does not depend on a module, it returns zeros instead of the old
    weights. It does not notice two uses of the same weights in a loop or under `jax.jit` or `jax.checkpoint`; two
    direct uses raise an error. `value_and_update` finds all of these before anything runs. It is too late to change a
    gradient after `jax.grad` (unscaling, a mean over microbatches or over the devices of a shard_map): do that in the
    loss or in the rule.

    Complexity: the arithmetic of `jax.grad` and of the optimizer. For modules with P bytes of weights and S bytes of
    state in total, used one after another and donated, a step holds P + S, the gradient of the largest module, and the
    residuals of the forward pass. `jax.grad` followed by optax holds all gradients: 2 P + S.

    Args:
        function: `function(weights, *inputs) -> outputs`, all pytrees. The float arrays among its weights are trained.
        optimizer_or_rule: an optax transformation, a `stream` (its state stays in host memory), or a function
            `(weights, gradient, state) -> (weights, state)`. Weights that are not floats are None in all three trees.
        options: `name`, `skip_nonfinite`, `max_update_rms` and `mixes`, see `UpdateOptions`.

    Raises:
        TypeError: `optimizer_or_rule` is none of the three, or there is no such option.
        ValueError: the optimizer needs a seed, or `max_update_rms` is given with a function.
    """
    return EagerModule(function, make_updater(optimizer_or_rule, **options))


def eager_weights(optimizer_or_rule: Optimizer | RuleFunction, **options: Unpack[UpdateOptions]) -> EagerWeights:
    """Make weights that several parts of a forward pass share, updated once by the sum of their gradients.

        shared = pl.eager_weights(optax.adamw(1e-3), name="embedding")
        weights = shared(shared.init(weights))   # use it as often as you like

    The backward pass holds their gradient from their last use in the forward pass to the first one. Complexity and
    errors are those of `eager`.

    Args:
        optimizer_or_rule: see `eager`.
        options: see `eager`.
    """
    return EagerWeights(make_updater(optimizer_or_rule, **options))


def _make_apply(forward: ForwardFunction, updater: Updater) -> Callable[[Trained, PyTree], PyTree]:
    """Return the function whose backward pass updates the weights."""

    @jax.custom_vjp
    def apply(trained: Trained, inputs: PyTree) -> PyTree:
        return forward(trained, trained.floats, inputs)

    def apply_forward(trained: Trained, inputs: PyTree) -> tuple[PyTree, tuple[Trained, PullBack]]:
        def call_with_floats(floats: PyTree, inputs: PyTree) -> PyTree:
            return forward(trained, floats, inputs)

        outputs, pull_back = jax.vjp(call_with_floats, trained.floats, inputs)
        # The update needs weights and state, so they are residuals too.
        return outputs, (trained, pull_back)

    def apply_backward(residuals: tuple[Trained, PullBack], cotangents: PyTree) -> tuple[Trained, PyTree]:
        trained, pull_back = residuals
        gradient, input_cotangents = pull_back(cotangents)
        # The backward pass of everything before the module waits for the update, so that gradients do not pile up.
        new, input_cotangents = updater.apply_update(trained, gradient, input_cotangents)
        return mark_update(new, updater.name), input_cotangents

    apply.defvjp(apply_forward, apply_backward)
    return apply
