"""Layers of `eager_scan` match `jax.grad` of a scan and optax in float64; each layer has its own optimizer state."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import plimsoll as pl
from plimsoll.framework.plan.jaxpr_analysis import scan_counts
from tests.support.eager import DIM, OPTIMIZERS, X, assert_equal, dense, eager_steps, random

LAYERS = 3


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def make_stacked_weights() -> dict[str, jax.Array]:
    return {"kernel": random(0, LAYERS, DIM, DIM), "bias": random(1, LAYERS, DIM)}


def dropout_layer(weights: Any, carry: Any, x: Any, scale: jax.Array) -> tuple[Any, Any]:
    """A layer with a key, a per-layer offset, a shared scale, an integer in the carry, and additional outputs."""
    hidden, count = carry
    key, offset = x
    kept = jax.random.bernoulli(key, 0.7, hidden.shape)
    y = dense(weights, jnp.where(kept, hidden, 0)) * scale + offset
    return (y, count + kept.sum(dtype="int32")), {"mean": y.mean(), "kept": kept.sum()}


def inputs() -> tuple[Any, Any, jax.Array]:
    """Return (carry, xs, shared scale)."""
    xs = (jax.random.split(jax.random.key(5), LAYERS), random(6, LAYERS))
    return (jnp.asarray(X), jnp.int32(0)), xs, jnp.asarray(1.3)


def run_scan(layer: Callable[..., Any], weights: Any, carry: Any, xs: Any, scale: jax.Array) -> tuple[Any, Any]:
    def body(carry: Any, item: Any) -> tuple[Any, Any]:
        layer_weights, x = item
        return layer(layer_weights, carry, x, scale)

    return jax.lax.scan(body, carry, (weights, xs))


def compute_loss(outputs: tuple[Any, Any]) -> jax.Array:
    (hidden, _), ys = outputs
    return jnp.sum(jnp.sin(hidden)) + ys["mean"].sum()


def steps_by_layer(loss: Callable[..., jax.Array], optimizer: Any, weights: Any) -> tuple[Any, Any]:
    """Return (weights, state) after three steps of `jax.grad`, and of optax for each layer separately."""

    # Jitted like the loop, because optax computes powers of the count in float32, which XLA rounds differently.
    @jax.jit
    def update_layer(layer: Any, gradient: Any, state: Any) -> tuple[Any, Any]:
        updates, new_state = optimizer.update(gradient, state, layer)
        return optax.apply_updates(layer, updates), new_state

    layers = unstack(weights)
    states = [optimizer.init(layer) for layer in layers]
    for _ in range(3):
        gradients = unstack(jax.jit(jax.grad(loss))(stack_trees(layers)))
        pairs = [update_layer(*arguments) for arguments in zip(layers, gradients, states, strict=True)]
        layers, states = map(list, zip(*pairs, strict=True))
    return stack_trees(layers), stack_trees(states)


def unstack(tree: Any) -> list[Any]:
    leaves, structure = jax.tree.flatten(tree)
    return [jax.tree.unflatten(structure, [leaf[index] for leaf in leaves]) for index in range(LAYERS)]


def stack_trees(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@pytest.mark.pairs
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_stack_ends_where_optax_ends(name: str, is_checkpointed: bool) -> None:
    optimizer = OPTIMIZERS[name]()
    layer = jax.checkpoint(dropout_layer) if is_checkpointed else dropout_layer
    stack = pl.eager_scan(layer, optimizer, name="stack")
    weights = make_stacked_weights()
    trained = {"stack": stack.init(weights)}
    new_weights, new_state = eager_steps(lambda trained: compute_loss(stack(trained["stack"], *inputs())), trained)
    expected = steps_by_layer(
        lambda weights: compute_loss(run_scan(dropout_layer, weights, *inputs())), optimizer, weights
    )
    assert_equal((new_weights["stack"], new_state["stack"]), expected)


@pytest.mark.pairs
def test_outputs_and_input_gradients_match_a_scan() -> None:
    stack = pl.eager_scan(dropout_layer, optax.sgd(0.1), name="stack")
    weights = make_stacked_weights()
    trained = stack.init(weights)
    (hidden, count), (keys, offsets), scale = inputs()
    assert_equal(
        stack(trained, (hidden, count), (keys, offsets), scale),
        run_scan(dropout_layer, weights, (hidden, count), (keys, offsets), scale),
    )

    def stack_loss(hidden: jax.Array, offsets: jax.Array, scale: jax.Array) -> jax.Array:
        return compute_loss(stack(trained, (hidden, count), (keys, offsets), scale))

    def scan_loss(hidden: jax.Array, offsets: jax.Array, scale: jax.Array) -> jax.Array:
        return compute_loss(run_scan(dropout_layer, weights, (hidden, count), (keys, offsets), scale))

    arguments = (hidden, offsets, scale)
    assert_equal(jax.grad(stack_loss, (0, 1, 2))(*arguments), jax.grad(scan_loss, (0, 1, 2))(*arguments))


def test_nonfinite_gradient_skips_only_its_own_layer() -> None:
    def layer(weights: Any, carry: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
        return carry, jnp.sum(weights * factor)

    stack = pl.eager_scan(layer, optax.adam(0.1), name="stack")
    trained = stack.init(jnp.ones((LAYERS, DIM)))
    factors = jnp.array([1.0, jnp.inf, 1.0])
    new = jax.grad(lambda trained: stack(trained, jnp.zeros(()), factors)[1].sum())(trained)
    np.testing.assert_array_equal(new.state[0].count, [1, 0, 1])
    np.testing.assert_allclose(new.weights[:, 0], [0.9, 1.0, 0.9], rtol=1e-6)


@pytest.mark.pairs
def test_scan_over_an_eager_layer_gives_the_same() -> None:
    """Only the memory differs, not the result."""
    optimizer = optax.adamw(0.01)
    stack = pl.eager_scan(dropout_layer, optimizer, name="stack")
    module = pl.eager(dropout_layer, optimizer, name="stack")
    trained = stack.init(make_stacked_weights())
    stack_loss = jax.grad(lambda trained: compute_loss(stack(trained, *inputs())))(trained)
    _, scan_loss = pl.value_and_update(lambda trained: compute_loss(run_scan(module, trained, *inputs())))(trained)
    assert_equal(scan_loss, stack_loss)


def test_forward_copies_no_weights_and_no_shared_inputs() -> None:
    stack = pl.eager_scan(jax.checkpoint(dropout_layer), optax.sgd(0.1), name="stack")
    trained = stack.init(make_stacked_weights())
    carry, xs, scale = inputs()
    program = jax.make_jaxpr(jax.grad(lambda trained: compute_loss(stack(trained, carry, xs, scale))))(trained)
    forward = next(eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan")
    _, num_carry = scan_counts(forward.params)
    shapes = [var.aval.shape for var in forward.outvars[num_carry:]]
    # Each layer has two outputs and its input.
    assert sorted(shapes) == [(LAYERS,), (LAYERS,), (LAYERS, *X.shape)]


def test_stacks_must_agree_on_their_length() -> None:
    stack = pl.eager_scan(dropout_layer, optax.sgd(0.1), name="stack")
    with pytest.raises(ValueError, match=r"stack: expected arrays \[L, \.\.\.\] with the same number of layers"):
        stack.init({"kernel": random(0, 3, DIM, DIM), "bias": random(0, 2, DIM)})
    carry, xs, scale = inputs()
    with pytest.raises(ValueError, match=r"stack: expected arrays \[L, \.\.\.\] with the same number of layers"):
        stack(stack.init(make_stacked_weights()), carry, jax.tree.map(lambda x: x[:2], xs), scale)
