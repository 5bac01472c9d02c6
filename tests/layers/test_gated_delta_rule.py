"""The chunked recurrence and its gradients, with and without corrections, against one token at a time in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.layers.gated_delta_rule import gated_delta_rule
from plimsoll.framework.layers.unit_lower import invert_unit_lower

B, K, N, H, V = 2, 2, 4, 6, 5


def draw_inputs(length: int, decay: float, documents: bool) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Return (queries, keys, values, log decays, betas and a state; the document of each token).

    Some keys are repeated and some betas are 1, so that corrections replace each other's values.
    """
    rng = np.random.default_rng(length)
    query = rng.standard_normal((B, length, K, H))
    key = rng.standard_normal((B, length, K, H))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    key[:, 3:9] = key[:, 3:4]
    value = rng.standard_normal((B, length, N, V))
    log_decay = -decay * rng.random((B, length, N))
    beta = rng.random((B, length, N))
    beta[:, ::3] = 1.0
    starts = rng.random((B, length)) < (0.06 if documents else 0.0)
    return (query, key, value, log_decay, beta, rng.standard_normal((B, N, H, V))), np.cumsum(starts, 1).astype("int32")


def run_recurrence(
    inputs: tuple[Any, ...], segments: np.ndarray, numpy: Any = np, corrects: bool = True
) -> tuple[list[jax.Array], jax.Array]:
    """Compute equation 10 of arXiv 2412.06464 for each token: outputs [B, N, V] and the last state [B, N, H, V].

    Without corrections, it is the recurrence of arXiv 2405.21060.
    """
    query, key, value, log_decay, beta, state = inputs
    query, key = numpy.repeat(query, N // K, axis=2), numpy.repeat(key, N // K, axis=2)
    outputs = []
    for t in range(key.shape[1]):
        is_same = segments[:, t] == segments[:, max(t - 1, 0)]
        state = state * is_same[:, None, None, None] * numpy.exp(log_decay[:, t])[..., None, None]
        k, b = key[:, t], beta[:, t][..., None]
        found = numpy.einsum("bnh,bnhv->bnv", k, state) if corrects else 0.0
        state = state + k[..., None] * (b * (value[:, t] - found))[:, :, None]
        outputs.append(numpy.einsum("bnh,bnhv->bnv", query[:, t], state))
    return outputs, state


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("decay", [1e-9, 1.0, 25.0], ids=["decay near 1", "decay", "decay near 0"])
@pytest.mark.parametrize(
    ("length", "chunk", "chunks_per_block"), [(37, 16, 8), (130, 16, 2), (64, 64, 8), (9, 64, 8), (257, 256, 1)]
)
def test_chunks_equal_the_recurrence(
    length: int, chunk: int, chunks_per_block: int, decay: float, documents: bool
) -> None:
    inputs, segments = draw_inputs(length, decay, documents)
    expected, last_state = run_recurrence(inputs, segments)
    with jax.enable_x64(True):
        *arrays, state = map(jnp.asarray, inputs)
        outputs, found_state = gated_delta_rule(
            *arrays, segments_BS=segments, state_BNHV=state, chunk=chunk, chunks_per_block=chunks_per_block
        )
        np.testing.assert_allclose(outputs, np.stack(expected, axis=1), atol=1e-10)
        np.testing.assert_allclose(found_state, last_state, atol=1e-10)


@pytest.mark.parametrize("decay", [1e-9, 1.0, 25.0], ids=["decay near 1", "decay", "decay near 0"])
@pytest.mark.parametrize(
    ("length", "chunk", "chunks_per_block"), [(37, 16, 8), (130, 32, 2), (100, 64, 8), (150, 128, 1), (257, 256, 1)]
)
def test_chunks_without_corrections_equal_the_recurrence(
    length: int, chunk: int, chunks_per_block: int, decay: float
) -> None:
    """Keys have any length, and the factors on the values may exceed 1."""
    inputs, segments = draw_inputs(length, decay, documents=length != 100)
    query, key, value, log_decay, beta, state = inputs
    inputs = (query, 2.0 * key, value, log_decay, 3.0 * beta, state)
    expected, last_state = run_recurrence(inputs, segments, corrects=False)
    with jax.enable_x64(True):
        *arrays, state = map(jnp.asarray, inputs)
        outputs, found_state = gated_delta_rule(
            *arrays,
            segments_BS=segments,
            state_BNHV=state,
            corrects=False,
            chunk=chunk,
            chunks_per_block=chunks_per_block,
        )
        np.testing.assert_allclose(outputs, np.stack(expected, axis=1), rtol=0, atol=1e-10)
        np.testing.assert_allclose(found_state, last_state, rtol=0, atol=1e-10)


@pytest.mark.parametrize("corrects", [True, False], ids=["corrections", "no corrections"])
def test_gradients_equal_those_of_the_recurrence(corrects: bool) -> None:
    inputs, segments = draw_inputs(70, 1.0, documents=True)
    rng = np.random.default_rng(0)
    output_weights, state_weights = rng.standard_normal((B, 70, N, V)), rng.standard_normal((B, N, H, V))

    def loss_of_chunks(inputs: tuple[jax.Array, ...]) -> jax.Array:
        *arrays, state = inputs
        outputs, last = gated_delta_rule(
            *arrays, segments_BS=segments, state_BNHV=state, corrects=corrects, chunk=16, chunks_per_block=2
        )
        return jnp.sum(outputs * output_weights) + jnp.sum(last * state_weights)

    def loss_of_tokens(inputs: tuple[jax.Array, ...]) -> jax.Array:
        outputs, last = run_recurrence(inputs, segments, jnp, corrects)
        return jnp.sum(jnp.stack(outputs, axis=1) * output_weights) + jnp.sum(last * state_weights)

    with jax.enable_x64(True):
        arrays = tuple(map(jnp.asarray, inputs))
        found = jax.jit(jax.grad(loss_of_chunks))(arrays)
        expected = jax.jit(jax.grad(loss_of_tokens))(arrays)
        for gradient, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(gradient, wanted, atol=1e-10)


def test_the_backward_pass_keeps_one_state_per_block() -> None:
    """Temporaries grow with the length by the inputs, the outputs, and one state per block."""
    heads, width = 4, 64
    chunk, per_block = 64, 8

    def count_bytes(length: int) -> int:
        shapes = [(1, length, heads, width)] * 3 + [(1, length, heads)] * 2
        arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]

        def loss(*arrays: jax.Array) -> jax.Array:
            return jnp.sum(gated_delta_rule(*arrays, chunk=chunk, chunks_per_block=per_block)[0])

        compiled = jax.jit(jax.grad(loss, argnums=range(5))).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    state_bytes = heads * width * width * 4
    token_bytes = 4 * heads * (3 * width + 2)
    more_tokens = 4096
    more_bytes = count_bytes(2 * more_tokens) - count_bytes(more_tokens)
    kept_bytes = more_tokens // (chunk * per_block) * state_bytes
    # Inputs and outputs in blocks, and their gradients.
    assert more_bytes < kept_bytes + 4 * more_tokens * token_bytes
    assert more_bytes < more_tokens // 8 * state_bytes


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("size", [1, 2, 3, 50, 64, 200])
def test_inverses_of_triangular_matrices(size: int, platform: str):
    """Against numpy's inverse of the whole matrix, gradients too."""
    rng = np.random.default_rng(size)
    lower = np.tril(rng.normal(size=(2, 3, size, size)) / np.sqrt(size), -1)
    weights = rng.normal(size=lower.shape)
    exact = np.linalg.inv(np.eye(size) + lower)
    # The derivative of an inverse M^-1 is -M^-1 dM M^-1.
    gradient = -np.swapaxes(exact, -1, -2) @ weights @ np.swapaxes(exact, -1, -2)
    with jax.enable_x64(True):
        inverse, pull = jax.vjp(lambda x: invert_unit_lower(x, platform), jnp.asarray(lower))
        (pulled,) = pull(jnp.asarray(weights))
    np.testing.assert_allclose(inverse, exact, rtol=0, atol=1e-13 * np.abs(exact).max())
    np.testing.assert_allclose(pulled, gradient, rtol=0, atol=1e-13 * np.abs(gradient).max())


def test_inverses_do_not_amplify_rounding():
    """Equal keys, rates of 1 and no decay: powers of L reach 1e18, while the inverse has elements of -1, 0 and 1."""
    lower = np.tril(np.ones((64, 64)), -1)
    inverse = invert_unit_lower(jnp.asarray(lower, jnp.float32), "cpu")
    np.testing.assert_array_equal(inverse, np.eye(64) - np.eye(64, k=-1))


def test_no_batched_solver_runs_on_a_cpu():
    """Two of them at a time can wait for each other forever."""
    inputs = jnp.zeros((2, 128, 2, 8))
    rates = jnp.zeros((2, 128, 2))

    def run(value: jax.Array) -> jax.Array:
        return jnp.sum(gated_delta_rule(inputs, inputs, value, rates, rates)[0])

    program = jax.jit(jax.value_and_grad(run)).lower(inputs).compile().as_text()
    assert "trsm" not in program
    assert "triangular" not in program
