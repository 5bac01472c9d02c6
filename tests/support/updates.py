"""Compares the learner's updates with plain optax on unstacked leaves, a list of per-layer trees."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from plimsoll.framework.layout import ParameterSpec, flatten
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.learner import Learner

LAYERS = 3
Trees = list[Any]


def decide(learner: Learner, loss: Any, grads: Any, step: Any = 0) -> Decision:
    """Return the learner's decision for these gradients at a step; the first by default."""
    counter = {
        "step": jnp.asarray(step, jnp.int32),
        "skipped": jnp.int32(0),
        "grad_norm": jnp.float32(0),
        "rng": jnp.zeros(2, jnp.uint32),
    }
    return learner.decide(loss, learner.norm(grads), counter)


def specs(dtype: str = "float32") -> dict[str, Any]:
    """Return specs of two single stages and a stack of three layers: wide, tall, square matrices, biases, a scale."""

    def spec(*shape: int, layers: bool = False) -> ParameterSpec:
        one = ParameterSpec(shape, dtype, roles=("axis",) * len(shape))
        return one.stacked(LAYERS) if layers else one

    block = {
        "wide": {"weight": spec(8, 12, layers=True), "bias": spec(12, layers=True)},
        "high": {"weight": spec(12, 8, layers=True)},
        "square": {"weight": spec(8, 8, layers=True)},
    }
    return {"embed": {"token": spec(16, 8)}, "stack": {"block0": block}, "head": {"norm": {"scale": spec(8)}}}


def draw(seed: int, dtype: str = "float32", scale: float = 1.0) -> Any:
    """Return random leaves with the shapes of `specs`; their magnitudes differ, as those of gradients do."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray(scale * rng.exponential() * rng.standard_normal(s.shape), dtype), specs(dtype)
    )


def gradients(steps: int, dtype: str = "float32") -> Trees:
    """Return `steps` trees of gradients."""
    return [draw(1000 + step, dtype, scale=0.3) for step in range(steps)]


def unstack(tree: Any) -> Any:
    """Return {"embed": ..., "stack": [layer 0, layer 1, layer 2], "head": ...}; trees without a stack stay."""
    if "stack" not in tree:
        return tree
    stacks = jax.device_get(tree["stack"])  # on the device, each shape and layer would compile a separate program
    return {**tree, "stack": [jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), stacks) for i in range(LAYERS)]}


class LearnerState(NamedTuple):
    """State that the learner updates."""

    params: Any
    optimizer: Any
    ema: Any


def start(learner: Learner, params: Any) -> LearnerState:
    """Return the initial state; init is jitted."""
    first = jax.jit(learner.init)(params)
    return LearnerState(first.weights, first.entry, first.average)


def stepper(learner: Learner) -> Callable[..., LearnerState]:
    """Return the jitted function (state, loss, gradients, number of the step) -> state."""

    def step(learner_state: LearnerState, loss: jax.Array, grads: Any, number: Any = 0) -> LearnerState:
        decision = decide(learner, loss, grads, number)
        new = learner.update(learner_state.params, grads, learner_state.optimizer, learner_state.ema, decision)
        return LearnerState(new.weights, new.entry, new.average)

    return jax.jit(step)


def ours(learner: Learner, params: Any, grads: Trees) -> list[LearnerState]:
    """Return the learner's state after each step."""
    learner_state, step, history = start(learner, params), stepper(learner), []
    for number, tree in enumerate(grads):
        learner_state = step(learner_state, jnp.float32(1.0), tree, number)
        history.append(learner_state)
    return history


def plain(optimizer: optax.GradientTransformation, params: Any, grads: Trees) -> tuple[Trees, Any]:
    """Return the unstacked parameters after each step of plain optax, and the last optimizer state."""
    params = unstack(params)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    history = []
    for tree in grads:
        params, state = step(params, state, unstack(tree))
        history.append(params)
    return history, state


def worst(actual: Trees, expected: Trees) -> float:
    """Return the largest difference of any leaf at any step, relative to the leaf's largest element."""
    errors = []
    for left, right in zip(actual, expected, strict=True):
        left, right = flatten(left), flatten(right)
        assert left.keys() == right.keys()
        for path in left:
            a, b = (np.asarray(side[path], np.float64) for side in (left, right))
            errors.append(np.abs(a - b).max() / np.abs(b).max())
    return float(max(errors))
