"""Streamed updates equal those of optax, with state in host memory before and after each step."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import plimsoll as pl
from plimsoll.framework.layout import flatten
from tests.support.eager import OPTIMIZERS, assert_equal, random

# Offloaded leaves have at least 1 MiB.
SHAPES = {"stack": (4, 256, 256), "matrix": (512, 512), "vector": (8,)}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def parameters() -> dict[str, Any]:
    return {"layers": [random(0, *SHAPES["stack"])], "head": (random(1, 512, 512), random(2, 8))}


def make_gradients(params: Any, seed: int) -> Any:
    return jax.tree.map(lambda leaf: jnp.sin(leaf * 5 + seed), params)


def steps(optimizer: Any, params: Any, **extra_args: Any) -> tuple[Any, Any, Any]:
    """Run three jitted steps that donate parameters and state.

    Returns:
        The parameters, the state, and the memory kinds of the state by path.
    """

    def step(params: Any, state: Any, seed: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(make_gradients(params, seed), state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step, donate_argnums=(0, 1))
    state = optimizer.init(params)
    params = jax.tree.map(jnp.copy, params)
    for seed in range(3):
        params, state = jitted(params, state, seed)
    return params, state, {path: leaf.sharding.memory_kind for path, leaf in flatten(state).items()}


@pytest.mark.once("adamw")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_streamed_updates_are_optaxs(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    new_params, new_state, kinds = steps(pl.stream(optimizer, chunk_bytes=1 << 20), parameters())
    expected_params, expected_state, _ = steps(optimizer, parameters())
    assert_equal((new_params, jax.device_get(new_state)), (expected_params, jax.device_get(expected_state)))
    for path, leaf in flatten(new_state).items():
        is_large = leaf.ndim > 1 and leaf.size * leaf.dtype.itemsize >= 1 << 20
        assert kinds[path] == ("pinned_host" if is_large else "device"), path


CONDITIONAL: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.01),
    "sign": lambda: optax.sign_sgd(0.01),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(0.01), 2).gradient_transformation(),
    "conditionally_transform": lambda: optax.conditionally_transform(optax.adamw(0.01), lambda step: step % 2 == 0),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.adamw(0.01), lambda step: step > 0),
}


@pytest.mark.pairs
@pytest.mark.parametrize("name", CONDITIONAL)
def test_optimizers_without_state_and_with_branches(name: str) -> None:
    optimizer = CONDITIONAL[name]()
    new_params, new_state, _ = steps(pl.stream(optimizer, chunk_bytes=1 << 20), parameters())
    expected_params, expected_state, _ = steps(optimizer, parameters())
    assert_equal((new_params, jax.device_get(new_state)), (expected_params, jax.device_get(expected_state)))


@pytest.mark.pairs
@pytest.mark.parametrize(("shape", "chunk_bytes"), [((4, 256, 512), 1 << 18), ((4, 8, 128, 64), 1 << 16)], ids=str)
def test_two_axes_are_sliced(shape: tuple[int, ...], chunk_bytes: int) -> None:
    """One index of the first axis has more bytes than a chunk, so the second axis is sliced too."""
    params = {"stack": random(0, *shape)}
    optimizer = pl.stream(optax.adamw(0.01), chunk_bytes=chunk_bytes)
    assert get_loop_lengths(optimizer, params) == [params["stack"].nbytes // chunk_bytes]
    new_params, new_state, _ = steps(optimizer, params)
    expected_params, expected_state, _ = steps(optax.adamw(0.01), params)
    assert_equal((new_params, jax.device_get(new_state)), (expected_params, jax.device_get(expected_state)))


def test_a_pattern_chooses_the_leaves() -> None:
    _, _, kinds = steps(pl.stream(optax.adamw(0.01), pattern="nu/layers"), parameters())
    assert [path for path, kind in kinds.items() if kind == "pinned_host"] == ["0/nu/layers/0"]
    with pytest.raises(ValueError, match="pattern 'nope' matches none"):
        pl.stream(optax.adamw(0.01), pattern="nope").init(parameters())


@pytest.mark.pairs
def test_gradient_clip_factor_is_exact() -> None:
    factor = 0.25
    new_params, _, _ = steps(pl.stream(optax.lion(0.01)), parameters(), gradient_factor=factor)
    # Lion's step is a sign, so scaling the gradients changes only the momentum; SGD's step shows it directly.
    scaled = optax.chain(optax.scale(factor), optax.lion(0.01))
    expected, _, _ = steps(scaled, parameters())
    assert_equal(new_params, expected)
    streamed, _, _ = steps(pl.stream(optax.sgd(0.1, momentum=0.9)), parameters(), gradient_factor=factor)
    expected, _, _ = steps(optax.chain(optax.scale(factor), optax.sgd(0.1, momentum=0.9)), parameters())
    assert_equal(streamed, expected)


@pytest.mark.pairs
def test_updates_with_another_dtype_than_the_gradients() -> None:
    params = {"kernel": random(0, 1024, 512).astype(jnp.float32)}
    optimizer = optax.chain(optax.stateless(lambda updates, _: jax.tree.map(wide, updates)), optax.adam(0.01))
    streamed = pl.stream(optimizer, chunk_bytes=1 << 20)
    gradients = {"kernel": jnp.sin(params["kernel"]).astype(jnp.bfloat16)}
    updates, state = jax.jit(streamed.update)(gradients, streamed.init(params), params)
    expected, expected_state = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    assert updates["kernel"].dtype == jnp.float32
    np.testing.assert_allclose(updates["kernel"], expected["kernel"], rtol=1e-6)
    assert state[1][0].count == expected_state[1][0].count == 1


def wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.float32)


def get_loop_lengths(optimizer: Any, params: Any) -> list[int]:
    """Return the number of iterations of each loop of an update; 0 for a while loop, which reads it from an array."""
    state = optimizer.init(params)
    program = jax.make_jaxpr(optimizer.update)(params, state, params)
    lengths = {"scan": lambda eqn: eqn.params["length"], "while": lambda eqn: 0}
    return [lengths[eqn.primitive.name](eqn) for eqn in program.jaxpr.eqns if eqn.primitive.name in lengths]


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("optimizer", "turns"),
    [(optax.adamw(0.01), [4, 2]), (optax.contrib.muon(0.01), [4, 0]), (optax.lamb(0.01), [0, 0])],
    ids=["element", "matrix", "tensor"],
)
def test_updates_are_chunked_where_possible(optimizer: Any, turns: list[int]) -> None:
    """Layers have 1 MiB each and the matrix 2 MiB; a rule that looks at a whole tensor is not sliced."""
    params = {"a": random(0, 4, 256, 512), "b": random(1, 512, 512)}
    assert get_loop_lengths(pl.stream(optimizer, chunk_bytes=1 << 20), params) == turns


@pytest.mark.parametrize(
    "optimizer",
    [optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), optax.apply_if_finite(optax.adam(0.1), 3)],
    ids=["norm", "finite"],
)
def test_global_optimizers_are_refused(optimizer: Any) -> None:
    with pytest.raises(ValueError, match="stream: the optimizer looks at several tensors together"):
        pl.stream(optimizer).init(parameters())


def test_parameters_are_needed() -> None:
    optimizer = pl.stream(optax.adam(0.1))
    params = parameters()
    update: Callable[..., Any] = optimizer.update
    with pytest.raises(ValueError, match="given no parameters"):
        update(params, optimizer.init(params))
