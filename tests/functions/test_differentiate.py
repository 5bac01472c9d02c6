"""`differentiate`, `partition` and `combine`: gradients of only the trained part of any pytree."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import plimsoll as pl


def params() -> Any:
    """Return a tree with a list, integers, and a leaf that is not an array."""
    weight = jnp.arange(6.0).reshape(2, 3)
    return {"layer": {"weight": weight, "steps": jnp.arange(3)}, "others": [jnp.ones(3), jnp.tanh]}


def loss(tree: Any, x: jax.Array) -> jax.Array:
    activation = tree["others"][1]
    return jnp.sum(activation(x @ tree["layer"]["weight"]) + tree["others"][0] ** 2)


X: Any = np.asarray([0.1, -0.2], np.float32)


def test_gradient_matches_jax_on_trained_leaves_only():
    value, gradient = pl.differentiate(loss, trainable="weight")(params(), X)
    assert float(value) == pytest.approx(float(loss(params(), X)))
    assert jax.tree.structure(gradient) == jax.tree.structure(pl.partition(params(), "weight").trained)
    assert gradient["others"] == [None, None]
    assert gradient["layer"]["steps"] is None

    def loss_for_weight(weight: jax.Array) -> jax.Array:
        tree = params()
        tree["layer"]["weight"] = weight
        return loss(tree, X)

    np.testing.assert_allclose(gradient["layer"]["weight"], jax.grad(loss_for_weight)(params()["layer"]["weight"]))


def test_auxiliary_results_and_named_arguments():
    def with_aux(tree: Any, *, x: jax.Array) -> tuple[jax.Array, str]:
        return loss(tree, x), "aux"

    (value, aux), gradient = pl.differentiate(with_aux, trainable="others/0", has_aux=True)(params(), x=X)
    assert aux == "aux"
    assert float(value) == pytest.approx(float(loss(params(), X)))
    np.testing.assert_allclose(gradient["others"][0], 2 * np.ones(3))


@pytest.mark.pairs
def test_optax_trains_the_trained_part():
    optimizer = optax.adam(0.1)
    trained, frozen = pl.partition(params(), "weight")
    moments = optimizer.init(trained)
    whole = pl.combine(trained, frozen)
    _, gradient = pl.differentiate(loss, trainable="weight")(whole, X)
    updates, _ = optimizer.update(gradient, moments, trained)
    updated = pl.combine(optax.apply_updates(trained, updates), frozen)
    # Adam's first step has the size of the learning rate, against the gradient's sign.
    expected = whole["layer"]["weight"] - 0.1 * jnp.sign(gradient["layer"]["weight"])
    np.testing.assert_allclose(updated["layer"]["weight"], expected, rtol=1e-5)
    assert updated["others"][1] is jnp.tanh
    np.testing.assert_array_equal(updated["layer"]["steps"], np.arange(3))


def test_parts_make_the_whole_again():
    first, second = pl.partition(params(), "others")
    whole = pl.combine(first, second)
    assert jax.tree.structure(whole) == jax.tree.structure(params())
    assert first["layer"] == {"weight": None, "steps": None}
    # Leaves that are not arrays are never trained, whatever the regex.
    assert first["others"][1] is None


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("wieght", ["matches none of 4 leaves", "nearest: 'layer/weight'"]),
        ("steps", ["no leaf of a floating-point dtype", "layer/steps (int32)"]),
        ("others/1", ["no leaf of a floating-point dtype"]),
        ("(", ["is not a regular expression"]),
    ],
)
def test_a_regex_that_trains_nothing_is_an_error(pattern: str, words: list[str]):
    with pytest.raises(ValueError) as error:
        pl.differentiate(loss, trainable=pattern)(params(), X)
    for word in words:
        assert word in str(error.value)
