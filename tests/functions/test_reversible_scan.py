"""Values and gradients of reversible_scan equal those of jax.lax.scan; unsupported uses are refused by name."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import plimsoll as pl
from plimsoll.extras.functions.reversible_scan import make_layer

LAYERS = 6
DIM = 4


class Layers(NamedTuple):
    """A stack: both directions of its layers, and their arguments."""

    forward: Callable[..., Any]
    inverse: Callable[..., Any]
    weights: Any
    x: Any
    xs: Any = None


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def normal(seed: int, *shape: int, dtype: str = "float64") -> jax.Array:
    return jnp.asarray(0.5 * np.random.default_rng(seed).standard_normal(shape), dtype)


def matrices(seed: int) -> dict[str, jax.Array]:
    return {"f": normal(seed, LAYERS, DIM, DIM), "g": normal(seed + 1, LAYERS, DIM, DIM)}


STREAMS = (3, DIM)


def linear() -> Layers:
    """Return couplings that are linear in x."""
    pair = pl.additive_coupling(lambda w, x: x @ w["f"], lambda w, x: x @ w["g"])
    return Layers(*pair, matrices(0), (normal(2, *STREAMS), normal(3, *STREAMS)))


def nonlinear() -> Layers:
    pair = pl.additive_coupling(lambda w, x: jnp.tanh(x @ w["f"]), lambda w, x: jnp.sin(x @ w["g"]) * x)
    return Layers(*pair, matrices(0), (normal(2, *STREAMS), normal(3, *STREAMS)))


def with_inputs() -> Layers:
    """Return layers whose weights include integers, and whose per-layer inputs include keys, integers and booleans.

    Both also include floats.
    """

    def f(w: Any, x: jax.Array, layer: Any) -> jax.Array:
        keep = jax.random.bernoulli(layer["key"], 0.7, x.shape)
        return jnp.tanh(x @ w["f"] + layer["shift"]) * keep * w["code"]

    def g(w: Any, x: jax.Array, layer: Any) -> jax.Array:
        return jnp.where(layer["flag"], jnp.sin(x @ w["g"]), 0.1 * layer["shift"])

    weights = {**matrices(0), "code": jnp.arange(LAYERS, dtype=jnp.int8)}
    xs = {
        "key": jax.random.split(jax.random.key(0), LAYERS),
        "shift": normal(4, LAYERS, DIM),
        "flag": jnp.arange(LAYERS) % 3 > 0,
        "old_key": jnp.zeros((LAYERS, 2), jnp.uint32),
    }
    return Layers(*pl.additive_coupling(f, g), weights, (normal(2, *STREAMS), normal(3, *STREAMS)), xs)


def handwritten() -> Layers:
    """Return a triangular map with both directions written by hand, over a dict with an integer and a key."""

    def forward(w: Any, x: Any) -> Any:
        noise = jax.random.normal(x["key"], x["b"].shape)
        scale = jnp.exp(jnp.tanh(x["a"] @ w["f"]))
        return {**x, "b": x["b"] * scale + noise + x["a"] @ w["g"], "count": x["count"] + 1}

    def inverse(w: Any, y: Any) -> Any:
        noise = jax.random.normal(y["key"], y["b"].shape)
        scale = jnp.exp(jnp.tanh(y["a"] @ w["f"]))
        return {**y, "b": (y["b"] - noise - y["a"] @ w["g"]) / scale, "count": y["count"] - 1}

    x = {"a": normal(2, *STREAMS), "b": normal(3, *STREAMS), "count": jnp.int32(0), "key": jax.random.key(7)}
    return Layers(forward, inverse, matrices(0), x)


def trees() -> Layers:
    """Return couplings whose two streams are trees of different structure; one contains complex numbers."""

    def f(w: Any, x: Any) -> Any:
        return {"re": jnp.tanh(x[0] @ w["f"]), "complex": 1j * x[1] * w["f"][0]}

    def g(w: Any, x: Any) -> Any:
        return [jnp.sin(x["re"] @ w["g"]), jnp.real(x["complex"] * x["complex"])]

    first = {"re": normal(2, *STREAMS), "complex": normal(5, DIM) + 1j * normal(6, DIM)}
    second = [normal(3, *STREAMS), normal(4, DIM)]
    return Layers(*pl.additive_coupling(f, g), matrices(0), (first, second))


def opaque_coupling() -> Layers:
    """Return a coupling with wrapped functions, so that the scan does not recognize the coupling."""
    layers = with_inputs()
    return layers._replace(forward=lambda *args: layers.forward(*args), inverse=lambda *args: layers.inverse(*args))


ALL = [linear, nonlinear, with_inputs, handwritten, trees, opaque_coupling]


def plain_scan(layers: Layers) -> Any:
    def body(x: Any, layer: Any) -> tuple[Any, None]:
        return layers.forward(layer[0], x, *layer[1:]), None

    stacks = (layers.weights,) if layers.xs is None else (layers.weights, layers.xs)
    y, _ = jax.lax.scan(body, layers.x, stacks)
    return y


def reversible(layers: Layers) -> Any:
    return pl.reversible_scan(layers.forward, layers.inverse, layers.weights, layers.x, layers.xs)


def numbers(tree: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def loss(y: Any) -> jax.Array:
    """Return a scalar that depends on every element in a different way."""
    total = jnp.float64(0.0)
    for leaf in numbers(y):
        coefficients = jnp.cos(jnp.arange(leaf.size, dtype=jnp.float64)).reshape(leaf.shape)
        total = total + jnp.sum(coefficients * jnp.abs(leaf) ** 2) + jnp.sum(jnp.real(leaf) * coefficients)
    return total


def gradients(run: Callable[[Layers], Any], layers: Layers) -> Any:
    def compute_loss(weights: Any, x: Any, xs: Any) -> jax.Array:
        return loss(run(layers._replace(weights=weights, x=x, xs=xs)))

    return jax.grad(compute_loss, (0, 1, 2), allow_int=True)(layers.weights, layers.x, layers.xs)


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert [leaf.dtype for leaf in jax.tree.leaves(actual)] == [leaf.dtype for leaf in jax.tree.leaves(expected)]
    pairs = list(zip(numbers(actual), numbers(expected), strict=True))
    assert pairs
    for one, other in pairs:
        scale = np.abs(other).max()
        assert scale > 0
        assert np.abs(one - other).max() <= tolerance * scale


@pytest.mark.pairs
@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_values_and_gradients_match_a_plain_scan(make: Callable[[], Layers], jit: bool) -> None:
    layers = make()
    compute_gradients = functools.partial(gradients, layers=layers)
    expected = compute_gradients(plain_scan)
    actual = jax.jit(lambda: compute_gradients(reversible))() if jit else compute_gradients(reversible)
    # Leaves without a gradient are float0 in both.
    assert_close(actual, expected)
    # The forward program is the same, so the values are equal bit for bit.
    y = reversible(layers)
    for one, other in zip(jax.tree.leaves(y), jax.tree.leaves(plain_scan(layers)), strict=True):
        assert jnp.array_equal(one, other)


@pytest.mark.pairs
def test_a_wrong_inverse_shows_in_the_gradients() -> None:
    """The comparison above can fail, because the backward pass does call the inverse."""
    layers = handwritten()

    def wrong(w: Any, y: Any) -> Any:
        x = layers.inverse(w, y)
        return {**x, "b": x["b"] * 1.01}

    expected = gradients(plain_scan, layers)
    with pytest.raises(AssertionError):
        assert_close(gradients(reversible, layers._replace(inverse=wrong)), expected)


def test_coupling_is_evaluated_once_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a coupling calls its two functions, with 3 matrix products for each.

    These are the value, and the cotangents of weights and x. Unknown functions also cost the inverse.
    """

    def products(run: Callable[[], Any]) -> int:
        text = str(jax.make_jaxpr(run)())
        return text.count("dot_general")

    layers = nonlinear()
    known = products(lambda: gradients(reversible, layers))
    renamed = layers._replace(forward=lambda *args: layers.forward(*args))
    unknown = products(lambda: gradients(reversible, renamed))
    # The forward loop has 2 products.
    assert known == 2 + 6
    assert unknown == 2 + 2 + 6
    assert_close(gradients(reversible, renamed), gradients(reversible, layers))


@pytest.mark.pairs
@pytest.mark.parametrize("make", [nonlinear, opaque_coupling])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_arrays_that_the_functions_close_over_have_gradients_too(make: Callable[[], Layers], jit: bool) -> None:
    """The gradients are those of jax.lax.scan, also with integers and keys among the arrays, and in nested jits."""
    layers = make()
    key = jax.random.key(3)

    def compute_loss(run: Callable[[Layers], Any], scale: jax.Array, shift: jax.Array) -> jax.Array:
        codes = jnp.arange(DIM) + jnp.int32(jnp.round(0.0 * scale))
        traced_key = jax.random.fold_in(key, codes[0])

        def branch(w: Any, x: jax.Array, *layer_xs: Any) -> jax.Array:
            noise = jax.random.normal(traced_key, x.shape)
            return jnp.tanh(x @ w["f"] * scale + shift + codes) + noise * scale

        forward, inverse = pl.additive_coupling(branch, lambda w, x, *layer_xs: x @ w["g"] * shift)
        if make is opaque_coupling:
            bound = forward
            forward = lambda *args: bound(*args)  # noqa: E731
        return loss(run(layers._replace(forward=forward, inverse=inverse)))

    arguments = (jnp.float64(0.3), normal(9, DIM))

    def both(run: Callable[[Layers], Any]) -> Any:
        inner = functools.partial(compute_loss, run)
        gradient = jax.grad(jax.jit(inner) if jit else inner, (0, 1))
        return jax.jit(gradient)(*arguments) if jit else gradient(*arguments)

    assert_close(both(reversible), both(plain_scan))


@pytest.mark.pairs
@pytest.mark.parametrize("make", [with_inputs, handwritten])
def test_mapped_and_recomputed(make: Callable[[], Layers]) -> None:
    """This covers jax.vmap over x, and jax.checkpoint."""
    layers = make()

    def compute_gradient(run: Callable[[Layers], Any], x: Any) -> Any:
        def compute_loss(x: Any) -> jax.Array:
            return loss(run(layers._replace(x=x)))

        return jax.grad(jax.checkpoint(compute_loss), allow_int=True)(x)

    def three(leaf: jax.Array) -> jax.Array:
        stack = jnp.stack([leaf] * 3)
        return stack + jnp.arange(3.0).reshape(3, 1, 1) if numbers([leaf]) else stack

    batch = jax.tree.map(three, layers.x)
    expected = jax.vmap(functools.partial(compute_gradient, plain_scan))(batch)
    assert_close(jax.vmap(functools.partial(compute_gradient, reversible))(batch), expected)


@pytest.mark.pairs
def test_dtypes_may_be_mixed() -> None:
    """Weights are bfloat16 and float32, streams float32 and float64, and one branch computes in bfloat16.

    Each gradient has the dtype of its array, and equals that of the plain scan up to the rounding of a bfloat16 sum.
    """

    def f(w: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x.astype(jnp.bfloat16) @ w["f"])

    def g(w: Any, x: jax.Array) -> jax.Array:
        return jnp.sin(x @ w["g"])

    weights = {"f": normal(0, LAYERS, DIM, DIM, dtype="bfloat16"), "g": normal(1, LAYERS, DIM, DIM, dtype="float32")}
    x = (normal(2, *STREAMS, dtype="float32"), normal(3, *STREAMS, dtype="float64"))
    layers = Layers(*pl.additive_coupling(f, g), weights, x)
    actual = gradients(reversible, layers)
    assert actual[0]["f"].dtype == jnp.bfloat16
    assert actual[0]["g"].dtype == jnp.float32
    assert_close(actual, gradients(plain_scan, layers), 2e-2)


def test_equinox_layers() -> None:
    """The modules have functions among their leaves and are stacked by jax.vmap."""
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), (2, LAYERS))

    def make_stack(keys: jax.Array) -> Any:
        make = eqx.filter_vmap(lambda key: eqx.nn.MLP(DIM, DIM, 8, 2, key=key, dtype=jnp.float64))
        return make(keys)

    weights = (make_stack(keys[0]), make_stack(keys[1]))
    assert any(callable(leaf) for leaf in jax.tree.leaves(weights))
    pair = pl.additive_coupling(lambda w, x: jax.vmap(w[0])(x), lambda w, x: jax.vmap(w[1])(x))
    layers = Layers(*pair, weights, (normal(2, *STREAMS), normal(3, *STREAMS)))

    @eqx.filter_grad
    def expected(weights: Any) -> jax.Array:
        dynamic, static = eqx.partition(weights, eqx.is_array)

        def body(x: Any, layer: Any) -> tuple[Any, None]:
            return layers.forward(eqx.combine(layer, static), x), None

        return loss(jax.lax.scan(body, layers.x, dynamic)[0])

    actual = eqx.filter_grad(lambda weights: loss(reversible(layers._replace(weights=weights))))(weights)
    assert_close(eqx.filter(actual, eqx.is_array), eqx.filter(expected(weights), eqx.is_array))


def test_no_layers_leave_x_as_it_is() -> None:
    layers = linear()
    empty = jax.tree.map(lambda stack: stack[:0], layers.weights)
    assert reversible(layers._replace(weights=empty)) == layers.x


# --- refusals --------------------------------------------------------------------------------------------------------


def compute_loss_for(first: jax.Array) -> jax.Array:
    layers = nonlinear()
    return loss(reversible(layers._replace(x=(first, layers.x[1]))))


@pytest.mark.parametrize("derivative", [jax.jacfwd, lambda f: lambda x: jax.jvp(f, (x,), (x,))], ids=["jacfwd", "jvp"])
def test_forward_mode_is_refused_by_name(derivative: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"reversible_scan: no forward-mode derivatives.*jax\.grad"):
        derivative(compute_loss_for)(normal(2, *STREAMS))
    # If the function is jitted, JAX itself refuses.
    with pytest.raises(TypeError, match="forward-mode"):
        derivative(jax.jit(compute_loss_for))(normal(2, *STREAMS))


@pytest.mark.pairs
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_second_derivatives_are_refused_by_name(jit: bool) -> None:
    first = jax.jit(jax.grad(compute_loss_for)) if jit else jax.grad(compute_loss_for)
    for second in (jax.grad(lambda x: first(x).sum()), jax.jacfwd(first)):
        with pytest.raises(TypeError, match="reversible_scan: no second derivatives"):
            second(normal(2, *STREAMS))


def test_mismatched_shapes_are_named() -> None:
    layers = linear()
    short = {**layers.weights, "g": layers.weights["g"][1:]}
    with pytest.raises(ValueError, match=r"expected one L for all.*weights\['f'\] has 6 layers, weights\['g'\] has 5"):
        reversible(layers._replace(weights=short))
    with pytest.raises(ValueError, match=r"xs: expected an array \[L, \.\.\.\], got a scalar"):
        reversible(layers._replace(xs=jnp.float64(1.0)))
    with pytest.raises(ValueError, match=r"expected arrays .* among weights and xs, got none"):
        reversible(layers._replace(weights={}))
    with pytest.raises(TypeError, match=r"expected two streams, \(x1, x2\), got PyTreeDef"):
        reversible(layers._replace(x=layers.x[0]))
    with pytest.raises(TypeError, match=r"expected streams of floats, got int64\[3\]"):
        reversible(layers._replace(x=(layers.x[0], jnp.arange(3))))


@pytest.mark.parametrize("name", ["forward", "inverse"])
def test_a_changed_carry_is_named(name: str) -> None:
    layers = handwritten()
    original = getattr(layers, name)

    def narrower(w: Any, x: Any) -> Any:
        result = original(w, x)
        return {**result, "b": result["b"].astype(jnp.float32)}

    def fewer(w: Any, x: Any) -> Any:
        return {"b": original(w, x)["b"]}

    with pytest.raises(ValueError, match=rf"{name}: expected x\['b'\] to stay float64\[3, 4\], got float32\[3, 4\]"):
        reversible(layers._replace(**{name: narrower}))
    with pytest.raises(ValueError, match=rf"{name}: expected a result like x, PyTreeDef.*got PyTreeDef"):
        reversible(layers._replace(**{name: fewer}))


# --- drift -----------------------------------------------------------------------------------------------------------


def test_inverse_error_is_reported_by_dtype() -> None:
    """Over 256 layers, bfloat16 streams drift, while float32 streams with the same branches hardly do."""
    count = 256
    weights = normal(0, count, DIM, DIM, dtype="bfloat16")
    pair = pl.additive_coupling(
        lambda w, x: jnp.tanh(x.astype(w.dtype) @ w), lambda w, x: jnp.sin(x.astype(w.dtype) @ w)
    )

    def worst(dtype: str) -> float:
        x = (normal(2, *STREAMS, dtype=dtype), normal(3, *STREAMS, dtype=dtype))
        errors = jax.jit(functools.partial(pl.reconstruction_error, *pair))(weights, x)
        assert set(errors) == {"0", "1"}
        assert all(error.dtype == jnp.float32 for error in errors.values())
        return max(float(error) for error in errors.values())

    assert worst("bfloat16") > 0.05
    assert 0 < worst("float32") < 1e-3
    assert worst("float64") < 1e-12


def test_the_error_is_the_one_by_hand() -> None:
    """The carry is halved, and its inverse is off by a known amount; the largest element is 2."""
    x = {"a": jnp.asarray([1.0, -2.0]), "zero": jnp.zeros(2), "n": jnp.arange(2)}

    def inverse(w: Any, y: Any) -> Any:
        return {"a": 2 * y["a"] + w, "zero": y["zero"] - w, "n": y["n"]}

    errors = pl.reconstruction_error(lambda w, x: {**x, "a": x["a"] / 2}, inverse, jnp.asarray([0.5]), x)
    assert {name: float(error) for name, error in errors.items()} == {"a": 0.25, "zero": 0.5}


def test_coupling_inverse_must_match_its_forward() -> None:
    """The inverse of another coupling is treated as an unknown function."""
    layers = linear()
    other = nonlinear()
    shapes = (layers.weights,)
    mixed = make_layer(layers.forward, other.inverse, shapes, layers.x)
    matching = make_layer(layers.forward, layers.inverse, shapes, layers.x)
    assert type(mixed) is not type(matching)
