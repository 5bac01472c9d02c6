"""Chunked cross-entropy compared to the plain one: values and gradients, z-loss, soft cap, and uneven weights."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy.special import log_softmax

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.chunked_loss import Chunks
from plimsoll.framework.layers.head import LMHead
from tests.support import small

B, S, D, V = 2, 12, 8, 11
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(B, S, D)), jnp.float32)
PARAMS = {
    "table": jnp.asarray(RNG.normal(size=(V, D)), jnp.float32),
    "norm": {"scale": jnp.asarray(RNG.normal(size=D), jnp.float32)},
}
BATCH = {
    "targets": jnp.asarray(RNG.integers(0, V, (B, S)), jnp.int32),
    "weights": jnp.asarray(RNG.random((B, S)) * (RNG.random((B, S)) > 0.3), jnp.float32),
}
TERMS = {"plain": {}, "z-loss": {"z_loss": 0.1}, "soft cap": {"softcap": 2.0}, "both": {"z_loss": 0.1, "softcap": 2.0}}


def context(dtype=jnp.float32) -> Context:
    return Context(batch=BATCH, num_targets=jnp.sum(BATCH["weights"]), training=True, compute_dtype=dtype)


def make_chunked_loss(chunk_tokens: int, **fields):
    """Return (params, x) -> (3 * loss, nll) for the head; the factor 3, as its loss is not always the objective."""
    head = config_for(LMHead, dim=D, vocab_size=V, chunk_tokens=chunk_tokens, **fields).instantiate()

    def loss(params, x):
        ctx = context()
        _, out = head.apply(head.prepare(params, ctx), x, ctx, {})
        return 3.0 * out.loss, out.metrics["nll"]

    return loss


def plain(z_loss: float = 0.0, softcap: float | None = None):
    """Return the same function by its definition, with all logits at once."""

    def loss(params, x):
        h = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * params["norm"]["scale"]
        logits = h @ params["table"].T
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        log_probabilities = jax.nn.log_softmax(logits)
        picked = jnp.sum(log_probabilities * jax.nn.one_hot(BATCH["targets"], V), axis=-1)
        weights = BATCH["weights"] / jnp.sum(BATCH["weights"])
        nll = -jnp.sum(weights * picked)
        z = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
        return 3.0 * (nll + z_loss * jnp.sum(weights * z**2)), nll

    return loss


def evaluate(loss):
    (value, nll), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(PARAMS, X)
    return float(value), float(nll), small.arrays(grads)


@pytest.fixture(scope="module")
def expected():
    return {name: evaluate(plain(**terms)) for name, terms in TERMS.items()}


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("terms", "chunk_tokens"),
    # 24 tokens: all at once (in two ways), in 2 chunks, in 3 (7 tokens are too few for 2), in chunks of one position,
    # and of 1 token. The last two are the same, because a chunk has at least one position of every sequence.
    [(name, 6) for name in TERMS] + [("both", tokens) for tokens in (0, 24, 12, 7, 2, 1)] + [("plain", 0)],
)
def test_chunks_equal_the_plain_definition(expected, terms, chunk_tokens):
    loss, nll, grads = evaluate(make_chunked_loss(chunk_tokens, **TERMS[terms]))
    expected_loss, expected_nll, expected_grads = expected[terms]
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    np.testing.assert_allclose(nll, expected_nll, rtol=1e-6)
    small.assert_close(grads, expected_grads, 2e-6)


@pytest.mark.parametrize("gradient_tokens", [6, 12])
def test_chunk_groups_equal_the_plain_definition(expected, gradient_tokens):
    """Sum the table's gradient over four groups of one chunk, and over two groups of two."""
    _, _, grads = evaluate(make_chunked_loss(6, gradient_tokens=gradient_tokens, **TERMS["both"]))
    small.assert_close(grads, expected["both"][2], 2e-6)


@pytest.mark.pairs
def test_evaluation_equals_training(expected):
    """Without differentiation, a different rule of the custom derivative runs."""
    loss, nll = jax.jit(make_chunked_loss(6, **TERMS["both"]))(PARAMS, X)
    np.testing.assert_allclose((loss, nll), expected["both"][:2], rtol=1e-6)


def test_bf16_hidden_states_give_f32_losses_and_bf16_gradients(expected):
    head = config_for(LMHead, dim=D, vocab_size=V, chunk_tokens=6, **TERMS["both"]).instantiate()
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)

    def loss(params, x):
        ctx = context(jnp.bfloat16)
        return head.apply(head.prepare(params, ctx), x, ctx, {})[1].loss

    value, (grads, dx) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(half, X.astype(jnp.bfloat16))
    assert value.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves((grads, dx))} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(3 * value, expected["both"][0], rtol=2e-2)


def test_loss_is_computed_from_the_returned_logits():
    head = config_for(LMHead, dim=D, vocab_size=V, softcap=2.0).instantiate()
    ctx = context()

    @jax.jit
    def both(params, x):
        weights = head.prepare(params, ctx)
        return head.logits(weights, x, ctx), head.apply(weights, x, ctx, {})[1]

    logits, out = both(PARAMS, X)
    assert (logits.shape, logits.dtype) == ((B, S, V), jnp.float32)
    assert float(jnp.abs(logits).max()) < 2.0
    targets, counted = np.asarray(BATCH["targets"]), np.asarray(BATCH["weights"])
    nll = -np.take_along_axis(log_softmax(np.asarray(logits), axis=-1), targets[..., None], -1)[..., 0]
    expected = np.sum(nll * counted) / np.sum(counted)
    np.testing.assert_allclose(out.metrics["nll"], expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["chunk_tokens", "gradient_tokens"])
def test_a_negative_chunk_is_an_error(name):
    with pytest.raises(ValueError, match=rf"{name}: expected 0 \(all at once\) or more, given -1"):
        config_for(LMHead, dim=D, vocab_size=V, **{name: -1}).instantiate()


@pytest.mark.parametrize(
    ("chunk_tokens", "gradient_tokens", "expected"),
    # The batch has 2 sequences of 12 positions, on one device.
    [(6, 0, (4, 1)), (6, 24, (4, 1)), (6, 12, (4, 2)), (6, 6, (4, 4)), (6, 1, (4, 4)), (6, 8, (4, 4)), (0, 1, (1, 1))],
)
def test_groups_divide_the_chunks_and_keep_their_bound(chunk_tokens, gradient_tokens, expected):
    head = config_for(
        LMHead, dim=D, vocab_size=V, chunk_tokens=chunk_tokens, gradient_tokens=gradient_tokens
    ).instantiate()
    assert head.chunks(B, S, context()) == Chunks(*expected)


def largest_array(text: str) -> int:
    """Return the number of elements of the largest array in the text of a compiled program."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text)
    return max(int(np.prod([int(dim) for dim in shape.split(",")])) for shape in shapes)


@pytest.mark.pairs
@pytest.mark.parametrize("chunk_tokens", [16, 0])
def test_no_training_array_is_as_large_as_the_logits(chunk_tokens):
    """Check the compiled step, forward and backward. Without chunks (0), there is such an array: the test can fail."""
    vocab = 509
    model = small.gpt2(vocab_size=vocab, head__chunk_tokens=chunk_tokens, head__gradient_tokens=chunk_tokens)
    config = small.experiment(model)
    config.data.tokenizer.vocab_size = vocab
    program = small.program(config)
    largest = largest_array(program.jit_step.compiled_step.as_text())
    logits = config.data.global_batch_size * config.data.seq_len * vocab
    assert (largest >= logits) == (chunk_tokens == 0), f"{largest} against {logits}"


@pytest.mark.pairs
@pytest.mark.parametrize("chunk_tokens", [0, 4])
def test_log_prob_gradients_match_a_plain_log_softmax(chunk_tokens):
    """This holds for any function of them: our custom backward pass recomputes the logits."""
    ctx = Context(batch={"targets": jnp.arange(16).reshape(2, 8) % 7})
    keys = jax.random.split(jax.random.key(3), 3)
    x_BSD = jax.random.normal(keys[0], (2, 8, 6))
    table_VD = jax.random.normal(keys[1], (7, 6))
    factors_BS = jax.random.normal(keys[2], (2, 8))
    head = LMHead(vocab_size=7, dim=6, chunk_tokens=chunk_tokens, softcap=5.0)
    norm = {"scale": jnp.ones(6)}

    def ours(x, table):
        log_probs_BS = head.log_probs({"norm": norm, "table": table}, x, ctx)
        return jnp.sum(factors_BS * jnp.sin(log_probs_BS))

    def plain(x, table):
        logits_BSV = jax.nn.log_softmax(head.logits({"norm": norm, "table": table}, x, ctx))
        log_probs_BS = jnp.take_along_axis(logits_BSV, ctx.batch["targets"][..., None], axis=-1)[..., 0]
        return jnp.sum(factors_BS * jnp.sin(log_probs_BS))

    expected = jax.grad(plain, argnums=(0, 1))(x_BSD, table_VD)
    actual = jax.grad(ours, argnums=(0, 1))(x_BSD, table_VD)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_a_row_of_a_million_positions_on_eight_devices():
    """Losses and gradients are those of float64 sums; each device has contiguous positions."""
    length, dim, vocab = 1 << 20, 2, 5
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, length, dim)).astype(np.float32)
    table = rng.normal(size=(vocab, dim)).astype(np.float32)
    targets = rng.integers(0, vocab, (1, length)).astype(np.int32)
    weights = (rng.random((1, length)) > 0.3).astype(np.float32)
    head = config_for(LMHead, dim=dim, vocab_size=vocab, chunk_tokens=1 << 16).instantiate()
    sizes = {"pipe": 1, "data": 1, "fsdp": 1, "expert": 1, "seq": 8, "model": 1}
    mesh = Mesh(np.asarray(jax.devices()).reshape(tuple(sizes.values())), tuple(sizes))
    by_position = NamedSharding(mesh, PartitionSpec(None, "seq"))
    batch = jax.device_put({"targets": targets, "weights": weights}, by_position)

    def loss(table, x):
        ctx = Context(batch=batch, num_targets=jnp.sum(batch["weights"]), training=True, mesh=mesh)
        params = {"table": table, "norm": {"scale": jnp.ones(dim)}}
        return head.apply(head.prepare(params, ctx), x, ctx, {})[1].loss

    found, (table_grad, x_grad) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(
        table, jax.device_put(x, by_position)
    )
    wide = x[0].astype(np.float64)
    scale = 1.0 / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    log_probabilities = log_softmax(wide * scale @ table.T.astype(np.float64), axis=-1)
    share = weights[0].astype(np.float64) / weights.sum(dtype=np.float64)
    expected = -np.sum(share * log_probabilities[np.arange(length), targets[0]])
    logits_grad = share[:, None] * (np.exp(log_probabilities) - np.eye(vocab)[targets[0]])
    expected_table_grad = logits_grad.T @ (wide * scale)
    h_grad = logits_grad @ table.astype(np.float64)
    # The norm removes what is parallel to its result.
    normed = wide * scale
    expected_x_grad = scale * (h_grad - normed * np.mean(h_grad * normed, axis=-1, keepdims=True))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(table_grad, expected_table_grad, rtol=0, atol=1e-5 * np.abs(expected_table_grad).max())
    np.testing.assert_allclose(x_grad[0], expected_x_grad, rtol=0, atol=1e-4 * np.abs(expected_x_grad).max())
