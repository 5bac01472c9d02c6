"""Uses that would be silently wrong are refused, with the name of the module in the error."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import plimsoll as pl
from tests.support.eager import X, dense

# numpy arrays, because JAX arrays would stay on the device while other tests count live arrays.
WEIGHTS: Any = {"kernel": np.eye(6, dtype=np.float32), "bias": np.zeros(6, np.float32)}
LAYER = pl.eager(dense, optax.sgd(0.1), name="dense")
OTHER = pl.eager(dense, optax.sgd(0.1), name="other")
INPUT: Any = np.asarray(X, np.float32)
SHARED = pl.eager_weights(optax.sgd(0.1), name="shared")
STACK = pl.eager_scan(lambda weights, x, _: (dense(weights, x), None), optax.sgd(0.1), name="stack")


KINDS = {"module": LAYER, "shared weights": SHARED, "stack": STACK}


def make_weights(layer: Any) -> Any:
    """Return the weights, as a stack of one layer if `layer` is STACK."""
    return jax.tree.map(lambda leaf: leaf[None], WEIGHTS) if layer is STACK else WEIGHTS


def output(layer: Any, trained: pl.Trained, x: jax.Array) -> jax.Array:
    """Return the output of a module, a stack, or a dense layer with shared weights for x."""
    if layer is SHARED:
        return dense(SHARED(trained), x)
    return jax.tree.leaves(layer(trained, x))[0]


def once(trained: pl.Trained) -> jax.Array:
    return LAYER(trained, INPUT).sum()


def in_a_loop(trained: pl.Trained) -> jax.Array:
    return jax.lax.scan(lambda x, _: (LAYER(trained, x), None), INPUT, None, length=2)[0].sum()


def in_one_branch(trained: pl.Trained) -> jax.Array:
    return jax.lax.cond(INPUT[0, 0] > 0, once, lambda trained: 0.0, trained)


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "twice": (lambda trained: once(trained) * once(trained), "'dense' is used twice"),
    "twice_jitted": (jax.jit(lambda trained: once(trained) * once(trained)), "'dense' is used twice"),
    "twice_checkpointed": (lambda trained: jax.checkpoint(once)(trained) * once(trained), "'dense' is used twice"),
    "by_two": (jax.jit(lambda t: once(t) + OTHER(t, INPUT).sum()), "'dense' is used twice, by dense, other"),
    "loop": (in_a_loop, "'dense' is used twice"),
    "branch": (in_one_branch, "'dense' is used in some branches"),
    "penalty": (
        lambda t: once(t) + jnp.square(t.weights["kernel"]).sum(),
        "'dense' is also used outside its eager call",
    ),
    "read": (lambda trained: jnp.square(trained.weights["kernel"]).sum(), "'dense' is not used by an eager call"),
    "unused": (lambda trained: jnp.sum(INPUT), "'dense' is not used: the loss does not depend on it"),
    "stopped": (lambda trained: jax.lax.stop_gradient(once(trained)), "'dense' is not used: the loss does not"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_traced_backward_pass_is_read_before_it_runs(name: str) -> None:
    loss, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        pl.value_and_update(loss)(LAYER.init(WEIGHTS))


@pytest.mark.pairs
@pytest.mark.parametrize(
    "loss",
    [
        once,
        jax.jit(once),
        jax.checkpoint(once),
        lambda trained: jax.lax.cond(INPUT[0, 0] > 0, once, lambda trained: 2 * once(trained), trained),
    ],
    ids=["plain", "jit", "checkpoint", "cond"],
)
def test_one_use_is_accepted_wherever_it_is(loss: Callable[..., jax.Array]) -> None:
    value, new = pl.value_and_update(loss)(LAYER.init(WEIGHTS))
    expected_value, expected = jax.value_and_grad(loss)(LAYER.init(WEIGHTS))
    assert value == expected_value
    assert jnp.array_equal(new.weights["kernel"], expected.weights["kernel"])
    assert not jnp.array_equal(new.weights["kernel"], WEIGHTS["kernel"])


@pytest.mark.pairs
@pytest.mark.parametrize("kind", KINDS)
def test_jax_grad_refuses_a_second_use_that_it_sees(kind: str) -> None:
    layer = KINDS[kind]

    def loss(trained: pl.Trained) -> jax.Array:
        outputs = [output(layer, trained, INPUT).sum() for _ in range(2)]
        return outputs[0] * outputs[1]

    trained = layer.init(make_weights(layer))
    with pytest.raises(ValueError, match=f"{layer.name!r} is used twice"):
        jax.grad(loss)(trained)
    # An evaluation may use it any number of times, jitted or not.
    assert jnp.isfinite(loss(trained))
    assert jnp.isfinite(jax.jit(loss)(trained))


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_over_the_backward_pass(kind: str) -> None:
    layer = KINDS[kind]
    trained = layer.init(make_weights(layer))

    def loss(trained: pl.Trained, x: jax.Array) -> jax.Array:
        return output(layer, trained, x).sum()

    # vmap of the forward pass works.
    assert jax.vmap(loss, (None, 0))(trained, INPUT).shape == (4,)
    with pytest.raises(ValueError, match=f"{layer.name}: jax.vmap over its backward pass"):
        jax.vmap(jax.grad(loss), (None, 0))(trained, INPUT)
    if layer is not SHARED:
        # Shared weights are different: all rows use them, and they are updated once.
        with pytest.raises(ValueError, match=f"{layer.name}: jax.vmap over its backward pass"):
            jax.grad(lambda trained: jax.vmap(loss, (None, 0))(trained, INPUT).sum())(trained)


@pytest.mark.pairs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_jitted", [False, True])
def test_second_derivatives(is_jitted: bool, kind: str) -> None:
    layer = KINDS[kind]
    trained = layer.init(make_weights(layer))

    def loss(trained: pl.Trained, x: jax.Array) -> jax.Array:
        return jnp.square(output(layer, trained, x)).sum()

    def twice(x: jax.Array) -> jax.Array:
        weights_gradient, input_gradient = jax.grad(loss, (0, 1))(trained, x)
        return weights_gradient.weights["kernel"].sum() + input_gradient.sum()

    with pytest.raises(ValueError, match=f"{layer.name}: it is updated in the backward pass, which has no derivative"):
        jax.grad(jax.jit(twice) if is_jitted else twice)(INPUT)


MIXING = {
    "global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "finiteness": optax.apply_if_finite(optax.sgd(0.1), 3),
}


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize(
    "weights", [WEIGHTS, {"kernel": np.eye(6, dtype=np.float32)}], ids=["two tensors", "one tensor"]
)
def test_a_rule_that_looks_at_all_parameters(name: str, weights: Any) -> None:
    with pytest.raises(ValueError, match="dense: the rule looks at several tensors together"):
        pl.eager(dense, MIXING[name], name="dense").init(weights)
    # The rule is checked before the layer is called (this layer does not return a pair, so calling it would fail).
    layer: Any = dense
    with pytest.raises(ValueError, match="dense: the rule looks at several tensors together"):
        pl.eager_scan(layer, MIXING[name], name="dense").init(jax.tree.map(lambda leaf: leaf[None], weights))
    pl.eager(dense, MIXING[name], name="dense", mixes=True).init(weights)


def test_a_function_that_looks_at_all_tensors() -> None:
    def rule(weights: Any, gradient: Any, state: Any) -> tuple[Any, Any]:
        norm = optax.tree.norm(gradient)
        return jax.tree.map(lambda w, g: w - g / norm, weights, gradient), state

    with pytest.raises(ValueError, match="dense: the rule looks at several tensors together"):
        pl.eager(dense, rule, name="dense").init(WEIGHTS)


def test_weights_that_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="dense: its weights have no array of floats"):
        LAYER.init({"table": jnp.arange(3), "scale": 1.0})
    with pytest.raises(ValueError, match="dense: its weights have an array of complex64"):
        LAYER.init({"kernel": jnp.ones(3, jnp.complex64)})
    with pytest.raises(ValueError, match="other: its weights contain 'dense', which is already trained"):
        OTHER.init({"inner": LAYER.init(WEIGHTS)})
    with pytest.raises(TypeError, match="dense: expected the Trained of `init`, given dict"):
        LAYER(WEIGHTS, INPUT)  # pyright: ignore[reportArgumentType]


def test_invalid_rules_are_refused() -> None:
    with pytest.raises(TypeError, match="dense: expected an optax transformation or a function"):
        pl.eager(dense, 0.1, name="dense")
    with pytest.raises(ValueError, match=r"dense: max_update_rms = 1\.0 with a rule that is a function"):
        pl.eager(dense, lambda weights, gradient, state: (weights, state), name="dense", max_update_rms=1.0)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda weights, gradient, state: ({"kernel": weights["kernel"]}, state), "weights of another structure"),
        (lambda weights, gradient, state: (weights, (0,)), "state of another structure"),
        (lambda w, g, s: ({**w, "bias": w["bias"][None]}, s), r"weights of the shape \(1, 6\)"),
    ],
    ids=["structure", "state", "shape"],
)
def test_a_rule_that_returns_something_else(rule: Any, message: str) -> None:
    layer = pl.eager(dense, rule, name="dense", mixes=True)
    with pytest.raises(ValueError, match=f"dense: the rule returned {message}"):
        jax.grad(call_once(layer))(layer.init(WEIGHTS))


def call_once(layer: Any) -> Callable[[pl.Trained], jax.Array]:
    return lambda trained: layer(trained, INPUT).sum()
