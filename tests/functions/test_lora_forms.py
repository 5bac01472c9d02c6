"""Each way that a matrix with an adapter may be used in a program, one at a time; and the uses that are refused."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import plimsoll as pl
from tests.support.adapters import TOLERANCE, assert_close, assert_equals_merged, random_adapters

ROWS, COLUMNS, LAYERS = 6, 10, 3


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def params() -> Any:
    """Return matrix [6, 10], square [6, 6], and stacks of three of each."""
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "matrix": jax.random.normal(keys[0], (ROWS, COLUMNS), "float64"),
        "square": jax.random.normal(keys[1], (ROWS, ROWS), "float64"),
        "stack": jax.random.normal(keys[2], (LAYERS, ROWS, COLUMNS), "float64"),
        "squares": jax.random.normal(keys[3], (LAYERS, ROWS, ROWS), "float64"),
    }


def x() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (4, ROWS), "float64")


@jax.custom_vjp
def product_with_custom_jvp(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return x @ matrix


product_with_custom_jvp.defvjp(
    lambda x, matrix: (x @ matrix, (x, matrix)), lambda kept, grad: (grad @ kept[1].T, kept[0].T @ grad)
)


@jax.custom_jvp
def square_product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.square(x @ matrix)


@square_product.defjvp
def _(primals: Any, tangents: Any) -> Any:
    x, matrix = primals
    y = x @ matrix
    return jnp.square(y), 2 * y * (tangents[0] @ matrix + x @ tangents[1])


def scan_with_carry(p: Any, x: jax.Array) -> jax.Array:
    """Use a matrix in the carry of a loop that passes it on unchanged."""
    body = lambda carry, _: ((jnp.tanh(carry[0] @ carry[1]), carry[1]), None)  # noqa: E731
    (y, _), _ = lax.scan(body, (x, p["square"]), None, length=2)
    return y


def scan_with_outputs(p: Any, x: jax.Array) -> jax.Array:
    _, outputs = lax.scan(lambda carry, layer: (carry, carry @ layer), x, p["stack"], reverse=True)
    return outputs


def scan_over_rows(p: Any, x: jax.Array) -> jax.Array:
    """Scan over the rows of a matrix; all iterations share one B."""

    def body(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        return total + x[:, 0] * jnp.sin(jnp.arange(COLUMNS, dtype="float64") @ row), None

    return lax.scan(body, jnp.zeros(4), p["matrix"])[0]


def while_loop(p: Any, x: jax.Array) -> jax.Array:
    def body(state: Any) -> Any:
        count, y = state
        return count + 1, jnp.tanh(y @ p["square"])

    return lax.while_loop(lambda state: state[0] < 2, body, (0, x))[1]


def experts(p: Any, x: jax.Array) -> jax.Array:
    """Multiply each row by its own matrix, looked up in a stack."""
    return jnp.einsum("bi,bio->bo", x, p["stack"][jnp.asarray([2, 0, 1, 2])])


PATHS: dict[str, Callable[[Any, jax.Array], jax.Array]] = {
    "right": lambda p, x: x @ p["matrix"],
    "left": lambda p, x: p["matrix"].T @ x.T,
    "a vector": lambda p, x: x[0] @ p["matrix"],
    "along outputs": lambda p, x: (x @ p["matrix"]) @ p["matrix"].T,
    "vmap": lambda p, x: jax.vmap(lambda row: row @ p["matrix"])(x),
    "vmap over a stack": lambda p, x: jax.vmap(lambda layer: x @ layer)(p["stack"]),
    "einsum over a stack": lambda p, x: jnp.einsum("bi,lio->lbo", x, p["stack"]),
    "both axes": lambda p, x: jnp.einsum("io,bi,co->bc", p["matrix"], x, jnp.sin(jnp.arange(20.0)).reshape(2, 10)),
    "cast": lambda p, x: (x.astype("float32") @ p["matrix"].astype("float32")).astype("float64"),
    "heads": lambda p, x: jnp.einsum("bi,ihd->bhd", x, p["matrix"].reshape(ROWS, 2, 5)),
    "flat heads": lambda p, x: x @ p["matrix"].reshape(ROWS, 2, 5).reshape(ROWS, COLUMNS),
    "broadcast": lambda p, x: jnp.einsum("bi,bio->bo", x, jnp.broadcast_to(p["matrix"], (4, ROWS, COLUMNS))),
    "some outputs": lambda p, x: x @ p["matrix"][:, 2:7],
    "every other output": lambda p, x: x @ p["matrix"][:, ::2],
    "some inputs": lambda p, x: x[:, 1:4] @ p["matrix"][1:4],
    "thirds": lambda p, x: sum(x @ part for part in jnp.split(p["square"], 3, axis=1)),
    "times a number": lambda p, x: x @ (p["matrix"] * 0.3) + x @ (2.0 * p["matrix"]) + x @ (p["matrix"] / 7),
    "a layer by number": lambda p, x: x @ p["stack"][1],
    "a layer by computed number": lambda p, x: x @ lax.dynamic_index_in_dim(p["stack"], jnp.argmax(x[0]) % 3, 0, False),
    "stacked as layers and blocks": lambda p, x: x @ p["stack"].reshape(LAYERS, 1, ROWS, COLUMNS)[2, 0],
    "lookup": lambda p, x: p["matrix"][jnp.asarray([[0, 5], [5, 2]])],
    "lookup by take": lambda p, x: jnp.take(p["matrix"], jnp.asarray([1, 1, 9]), axis=0, mode="fill", fill_value=1.0),
    "lookup of columns": lambda p, x: jnp.take(p["matrix"], jnp.asarray([1, 8]), axis=1),
    "lookup of matrices": experts,
    "scan": lambda p, x: lax.scan(lambda c, layer: (jnp.tanh(c @ layer), None), x, p["squares"])[0],
    "scan over rows": scan_over_rows,
    "scan with outputs": scan_with_outputs,
    "scan with the matrix as a constant": lambda p, x: lax.scan(lambda c, _: (c @ p["square"], None), x, length=2)[0],
    "scan with the matrix in the carry": scan_with_carry,
    "for": lambda p, x: lax.fori_loop(0, LAYERS, lambda i, y: jnp.tanh(y @ p["squares"][i]), x),
    "cond": lambda p, x: lax.cond(x[0, 0] > 0, lambda y: y @ p["square"], lambda y: jnp.sin(y @ p["square"].T), x),
    "switch": lambda p, x: lax.switch(1, [lambda y: y, lambda y: y @ p["square"]], x),
    "jit": lambda p, x: jax.jit(lambda matrix, y: y @ matrix)(p["matrix"], x),
    "checkpoint": lambda p, x: jax.checkpoint(lambda matrix, y: jnp.sin(y @ matrix))(p["matrix"], x),
    "checkpoint that keeps products": lambda p, x: jax.checkpoint(
        lambda matrix, y: jnp.sin(y @ matrix), policy=jax.checkpoint_policies.dots_saveable
    )(p["matrix"], x),
    "custom_vjp": lambda p, x: product_with_custom_jvp(x, p["matrix"]),
    "custom_jvp": lambda p, x: square_product(x, p["matrix"]),
    "an activation with its own derivative": lambda p, x: jax.nn.relu(x @ p["matrix"]),
}


def used_matrices(loss: Callable[..., jax.Array]) -> str:
    """Return a regex of the matrices that a function of `params()` depends on."""
    gradient = jax.jit(jax.grad(loss))(params(), x())
    return f"^({'|'.join(path for path in params() if jnp.any(gradient[path]))})$"


@pytest.mark.pairs
@pytest.mark.parametrize("name", PATHS)
def test_it_is_exact(name: str):
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(PATHS[name](p, x)))

    used = used_matrices(loss)
    # With the cast, the products are rounded to float32.
    tolerance = 1e-5 if name == "cast" else TOLERANCE
    adapters = random_adapters(params(), used)
    assert_equals_merged(loss, params(), adapters, x(), tolerance=tolerance)


# In these cases the function itself makes an array of that size: a cast, a product with a number, the layout in which
# XLA multiplies a whole stack, and the residuals of a loop that indexes a stack (a scan over the stack has none).
COSTLY = {"cast", "times a number", "einsum over a stack", "vmap over a stack", "for"}


@pytest.mark.pairs
@pytest.mark.parametrize("name", PATHS)
def test_nothing_has_the_size_that_the_matrix_has(name: str):
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(PATHS[name](p, x)))

    used = used_matrices(loss)
    adapters = pl.lora_init(jax.random.key(0), params(), used, rank=2)
    step = jax.jit(jax.value_and_grad(pl.with_lora(loss), argnums=1))
    if name in COSTLY:
        with pytest.raises(pl.FrozenBufferError):
            pl.check_frozen(step, params(), adapters, x(), frozen=used.replace("^", "^p/"))
    else:
        pl.check_frozen(step, params(), adapters, x(), frozen=used.replace("^", "^p/"))


QUANTIZED_PATHS: dict[str, Callable[[Any, jax.Array], jax.Array]] = {
    "right": lambda p, x: x @ p["matrix"],
    "left": lambda p, x: p["matrix"].T @ x.T,
    "cast and heads": lambda p, x: jnp.einsum("bi,ihd->bhd", x, p["matrix"].astype("float64").reshape(64, 2, 5)),
    "halves": lambda p, x: sum(x @ part for part in jnp.split(p["matrix"], 2, axis=1)),
    "a layer by number": lambda p, x: x @ p["stack"][1],
    "a layer by computed number": lambda p, x: x @ lax.dynamic_index_in_dim(p["stack"], jnp.argmax(x[0]) % 3, 0, False),
    "scan": lambda p, x: lax.scan(lambda c, layer: (c + x @ layer, None), jnp.zeros((4, 10)), p["stack"])[0],
    "vmap": lambda p, x: jax.vmap(lambda layer: x @ layer)(p["stack"]),
    "cond": lambda p, x: lax.cond(x[0, 0] < 9, lambda y: y @ p["matrix"], lambda y: 2 * y[:, :10], x),
    "checkpoint": lambda p, x: jax.checkpoint(lambda matrix, y: jnp.sin(y @ matrix))(p["matrix"], x),
}


@pytest.mark.first(2)
@pytest.mark.parametrize("name", QUANTIZED_PATHS)
def test_it_is_exact_in_4_bits(name: str):
    function = QUANTIZED_PATHS[name]
    path = "stack" if "layer" in name or name in ("scan", "vmap") else "matrix"
    shape = (LAYERS, 64, 10) if path == "stack" else (64, 10)
    arrays = {path: jax.random.normal(jax.random.key(0), shape, "float64")}
    stored = pl.lora_quantize(arrays, path)
    rows = jax.random.normal(jax.random.key(1), (4, 64), "float64") / 8

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(function(p, x)))

    assert_equals_merged(loss, stored, random_adapters(stored, path), rows)


@pytest.mark.pairs
def test_all_transformations_around_it():
    p = params()
    adapters = random_adapters(p, "matrix")
    with_adapters = pl.with_lora(lambda p, x: jnp.sin(x @ p["matrix"]))

    def apply_merged(adapters: Any, x: jax.Array) -> jax.Array:
        return jnp.sin(x @ pl.lora_merge(p, adapters)["matrix"])

    # A batch of two adapters for one matrix.
    two = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), adapters)
    both = jax.vmap(with_adapters, in_axes=(None, 0, None))(p, two, x())
    assert_close(both, jax.vmap(apply_merged, in_axes=(0, None))(two, x()))
    rows = jax.jit(jax.vmap(with_adapters, in_axes=(None, None, 0)))(p, adapters, x())
    assert_close(rows, apply_merged(adapters, x()))
    tangents = jax.tree.map(jnp.ones_like, adapters)
    _, forward = jax.jvp(lambda one: with_adapters(p, one, x()), (adapters,), (tangents,))
    _, expected = jax.jvp(lambda one: apply_merged(one, x()), (adapters,), (tangents,))
    assert_close(forward, expected)

    def curvature(function: Any) -> Any:
        return jax.grad(lambda one: jnp.sum(jnp.square(jax.tree.leaves(jax.grad(function)(one))[0])))(adapters)

    second = curvature(lambda one: jnp.sum(with_adapters(p, one, x())))
    for given, wanted in zip(
        jax.tree.leaves(second), jax.tree.leaves(curvature(lambda one: jnp.sum(apply_merged(one, x())))), strict=True
    ):
        assert_close(given, wanted)


def test_inner_jit_results_keep_their_shardings():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    by_rows = NamedSharding(mesh, P("data"))
    inner = jax.jit(lambda matrix, x: x @ matrix, out_shardings=by_rows)
    step = jax.jit(pl.with_lora(lambda p, x: inner(p["matrix"], x)))
    assert step(params(), random_adapters(params(), "matrix"), x()).sharding.is_equivalent_to(by_rows, 2)


def weight_gradient(function: Callable[..., jax.Array]) -> jax.Array:
    """Return the gradient of a function's sum with respect to W, through the adapter's computation."""
    adapters = random_adapters(params(), "matrix")
    return jax.grad(lambda p: jnp.sum(function(p, adapters, x())))(params())["matrix"]


@pytest.mark.pairs
def test_the_matrix_itself_may_be_trained_as_well():
    def plain(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sin(x @ p["matrix"])

    expected = weight_gradient(lambda p, adapters, x: plain(pl.lora_merge(p, adapters), x))
    assert_close(weight_gradient(pl.with_lora(plain)), expected)


def test_a_matrix_that_is_not_differentiated_stays_so():
    def loss_without_gradient(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x @ lax.stop_gradient(p["matrix"])))

    adapters = random_adapters(params(), "matrix")
    gradient = jax.grad(pl.with_lora(loss_without_gradient), argnums=1)(params(), adapters, x())
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(gradient))


def grown_carry(p: Any, x: jax.Array) -> jax.Array:
    """Use a matrix in a loop that changes it in the carry."""
    return x @ lax.fori_loop(0, 2, lambda _, matrix: matrix * 1.5 + 0.1, p["matrix"])


REFUSED: dict[str, tuple[Callable[[Any, jax.Array], jax.Array], str]] = {
    "a sum": (lambda p, x: x @ (p["matrix"] + 1.0), "`add` at .*test_lora_forms.py"),
    "a norm": (lambda p, x: jnp.sum(jnp.square(p["matrix"])), "`(square|integer_pow)` at .*test_lora_forms.py"),
    "two matrices": (lambda p, x: p["square"] @ p["matrix"], "`dot_general` at .*test_lora_forms.py"),
    "a matrix with both axes in one": (lambda p, x: x[0, 0] * p["matrix"].reshape(-1), "`reshape` at"),
    "elements": (lambda p, x: p["matrix"][jnp.asarray([1, 2]), jnp.asarray([3, 4])], "`gather` at"),
    "a sum over a stack": (lambda p, x: x @ jnp.sum(p["stack"], axis=0), "`reduce_sum` at"),
    "concatenated": (lambda p, x: x @ jnp.concatenate([p["matrix"], p["square"]], axis=1), "`concatenate` at"),
    "fewer bits": (lambda p, x: x @ p["matrix"].astype("float8_e4m3fn").astype("float64"), "`convert_element_type` at"),
    "a result": (lambda p, x: p["matrix"], "the function's results"),
    "a branch's result": (lambda p, x: lax.cond(x[0, 0] > 0, lambda m: 2 * m, lambda m: m, p["matrix"]), "`cond` at"),
    "a changing carry": (grown_carry, "`(scan|while)` at"),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", REFUSED)
def test_other_uses_are_refused_or_materialized_on_request(name: str):
    function, place = REFUSED[name]
    # Some refused functions use two matrices or a stack.
    paths = {"two matrices": "matrix|square$", "concatenated": "matrix|square$", "a sum over a stack": "stack"}
    adapters = random_adapters(params(), paths.get(name, "matrix"))
    with pytest.raises(pl.AdapterError, match=f"(matrix|square|stack): the matrix reaches {place}"):
        pl.with_lora(function)(params(), adapters, x())
    # This regex matches other matrices.
    with pytest.raises(pl.AdapterError):
        pl.with_lora(function, materialize="squares")(params(), adapters, x())

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(function(p, x)))

    tolerance = 0.2 if name == "fewer bits" else TOLERANCE
    assert_equals_merged(loss, params(), adapters, x(), tolerance=tolerance, materialize=".")


def test_inputs_to_a_4bit_matrix_are_not_sliced():
    stored = pl.lora_quantize({"w": jnp.ones((128, 4))}, "w")
    with pytest.raises(pl.AdapterError, match="w: the matrix reaches `slice`"):
        pl.with_lora(lambda p, x: x @ p["w"][:64])(stored, {}, jnp.ones((2, 64)))


@pytest.mark.pairs
def test_rows_from_a_4bit_matrix_are_refused():
    quantized = pl.lora_quantize({"embed": jnp.ones((64, 4))}, "embed")
    with pytest.raises(pl.AdapterError, match="embed: the matrix reaches `gather`"):
        pl.with_lora(lambda p, index: p["embed"][index])(quantized, {}, jnp.asarray([3]))
    rows = pl.with_lora(lambda p, index: p["embed"][index], materialize="embed")(quantized, {}, jnp.asarray([3]))
    np.testing.assert_array_equal(rows, np.ones((1, 4)))


@pytest.mark.pairs
def test_narrow_dtypes_sum_in_float32():
    """x A is scaled by 1/3 before it is rounded; the result is not a rounded third of a rounded value."""
    adapters = {"w": pl.Adapter(jnp.full((256, 1), 1.0), jnp.ones((1, 2)), 1 / 3)}
    frozen = {"w": jnp.zeros((256, 2), "bfloat16")}
    result = pl.with_lora(lambda p, x: x @ p["w"])(frozen, adapters, jnp.ones((1, 256), "bfloat16"))
    assert result.dtype == jnp.bfloat16
    np.testing.assert_array_equal(result, jnp.full((1, 2), 256 / 3, "bfloat16"))


def test_invalid_regex_is_named_immediately() -> None:
    with pytest.raises(ValueError, match=r"materialize = '\(' is not a regular expression"):
        pl.with_lora(lambda params, x: x, materialize="(")
