"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464) and Mamba-2, computed in chunks.

Each head has a state S [H, V], which returns a value for a key. A token first decays it, and then corrects the value
that it returns for the token's key k; b is the rate of the correction:

    S_t = a_t S_(t-1) + b_t k_t (v_t - k_t a_t S_(t-1)),        o_t = q_t S_t

With G_t = log a_1 + ... + log a_t since the start of a chunk, the updates u_t of a chunk solve a triangular system
(section 3.3 of the paper, in the WY form of Bischof and Van Loan 1987), and everything else is a matrix product:

    u_t + sum_(i<t) b_t exp(G_t - G_i) (k_t k_i) u_i = b_t (v_t - exp(G_t) k_t S_0)
    o_t = exp(G_t) q_t S_0 + sum_(i<=t) exp(G_t - G_i) (q_t k_i) u_i
    S_C = exp(G_C) S_0 + sum_i exp(G_C - G_i) k_i u_i

Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) has the same recurrence without the correction: q_t, k_t, v_t and b_t are
its C_t, B_t, x_t and step size. Its u_t need no system, and the rest is the same:

    S_t = a_t S_(t-1) + b_t k_t v_t,        o_t = q_t S_t,        u_t = b_t v_t

Chunks are processed in blocks of several. The backward pass keeps one state per block and recomputes the rest, so it
needs memory for S / (chunk * chunks_per_block) states, not for one state per token.

Axis letters: N heads of values, K heads of queries and keys, R = N / K, H channels of a key, V channels of a value, C
tokens of a chunk, M chunks of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.framework.layers.custom_gradients import zero_cotangent

CHUNK = 64
CHUNKS_PER_BLOCK = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Inputs:
    """Inputs of the recurrence for the tokens of a block; for all blocks, with one more axis in front.

    Attributes:
        query, key: [B, K, M, C, H].
        value: [B, K, R, M, C, V].
        log_decay, beta: [B, K, R, M, C].
        corrects, query_scale, unit_eps, platform: see `gated_delta_rule`.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    corrects: bool = field(metadata={"static": True})
    query_scale: float = field(metadata={"static": True})
    unit_eps: float | None = field(metadata={"static": True})
    platform: str = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Documents:
    """The documents of the tokens in blocks.

    Attributes:
        of_token: int32[B, M, C], equal for tokens of the same document.
        before_chunk: int32[B, M], the document of the last token before each chunk.
    """

    of_token: jax.Array
    before_chunk: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Chunk:
    """Terms of a chunk that do not depend on the state; [B, K, R, M, ...] for all chunks of a block.

    Attributes:
        query: [C, H], times the decay since the start of the chunk.
        scores: [C, C], products of queries and keys, times the decay between them.
        updates: [C, V], the u_t for a state of zeros.
        from_state: [C, H], whose product with the state is to be subtracted from the updates; None without corrections.
        key: [C, H], times the decay until the end of the chunk.
        kept: the decay of the state over the whole chunk; 0 if the chunk ends in another document.
    """

    query: jax.Array
    scores: jax.Array
    updates: jax.Array
    from_state: jax.Array | None
    key: jax.Array
    kept: jax.Array


def gated_delta_rule(
    query_BSKH: jax.Array,
    key_BSKH: jax.Array,
    value_BSNV: jax.Array,
    log_decay_BSN: jax.Array,
    beta_BSN: jax.Array,
    *,
    segments_BS: jax.Array | None = None,
    state_BNHV: jax.Array | None = None,
    corrects: bool = True,
    query_scale: float = 1.0,
    unit_eps: float | None = None,
    platform: str | None = None,
    chunk: int = CHUNK,
    chunks_per_block: int = CHUNKS_PER_BLOCK,
) -> tuple[jax.Array, jax.Array]:
    """Run the recurrence over all tokens, in float32 or wider.

    Args:
        query_BSKH: queries; value head n uses key head n // (N / K).
        key_BSKH: keys. With corrections, the recurrence is stable if their length is 1.
        value_BSNV: values.
        log_decay_BSN: log of the decay a, at most 0.
        beta_BSN: rate of the correction b, in [0, 1]; without corrections, the factor on the values, at least 0.
        segments_BS: int32, the document of each token; a document starts with a state of zeros. None: one document.
        state_BNHV: state before the first token; None for zeros. It belongs to the document of the first token.
        corrects: whether a token corrects the value of its key; if not, it adds b times its value, as in Mamba-2.
        query_scale: factor on the queries.
        unit_eps: divide queries and keys by the root of their sum of squares plus this number first; None: do not.
        platform: where it runs, such as "tpu"; None for that of this process.
        chunk: tokens of a chunk.
        chunks_per_block: chunks for which the backward pass keeps a single state.

    Returns:
        (outputs [B, S, N, V] in the dtype of the values, state after the last token, [B, N, H, V]).
    """
    B, S, K, H = key_BSKH.shape
    N, V = value_BSNV.shape[2:]
    R = N // K
    wide = jnp.promote_types(value_BSNV.dtype, jnp.float32)
    # A short row is one block of fewer chunks.
    num_chunks = -(-S // chunk)
    per_block = min(chunks_per_block, num_chunks)
    padding = -S % (chunk * per_block)
    if segments_BS is None:
        segments_BS = jnp.zeros((B, S), jnp.int32)

    def to_blocks(x: jax.Array, heads: tuple[int, ...], fill: str = "constant") -> jax.Array:
        """Return x [B, S, heads, ...] as blocks [blocks, B, *heads, M, C, ...]."""
        # Padding has beta = 0 and no decay, so it does not change the state.
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), mode=fill)
        x = x.reshape(B, -1, per_block, chunk, *heads, *x.shape[2 + bool(heads) :])
        x = jnp.moveaxis(x, 1, 0)
        # The heads go before the tokens.
        return jnp.moveaxis(x, tuple(range(4, 4 + len(heads))), tuple(range(2, 2 + len(heads))))

    documents_TBMC = to_blocks(segments_BS, (), "edge")
    first_of_chunks = documents_TBMC[..., 0].swapaxes(0, 1).reshape(B, -1)
    last_of_chunks = documents_TBMC[..., -1].swapaxes(0, 1).reshape(B, -1)
    # The document of the last token before each chunk; the initial state belongs to that of the first token.
    previous = jnp.concatenate([first_of_chunks[:, :1], last_of_chunks[:, :-1]], axis=1)
    inputs = _Inputs(
        query=to_blocks(query_BSKH, (K,)),
        key=to_blocks(key_BSKH, (K,)),
        value=to_blocks(value_BSNV, (K, R)),
        log_decay=to_blocks(log_decay_BSN, (K, R)),
        beta=to_blocks(beta_BSN, (K, R)),
        corrects=corrects,
        query_scale=query_scale,
        unit_eps=unit_eps,
        platform=platform or jax.default_backend(),
    )
    documents = _Documents(documents_TBMC, previous.reshape(B, -1, per_block).swapaxes(0, 1))
    if state_BNHV is None:
        state_BNHV = jnp.zeros((B, N, H, V), wide)
    state = state_BNHV.astype(wide).reshape(B, K, R, H, V)
    state, outputs = _run_blocks(state, inputs, documents)
    # [blocks, B, K, R, M, C, V] to [B, S, N, V].
    outputs = jnp.moveaxis(outputs, (1, 0, 4, 5, 2, 3), (0, 1, 2, 3, 4, 5)).reshape(B, -1, N, V)
    return outputs[:, :S].astype(value_BSNV.dtype), state.reshape(B, N, H, V)


# Not `jax.checkpoint`: inside a layer that is itself under `jax.checkpoint`, the layer's policy would decide.
@jax.custom_vjp
def _run_blocks(state: jax.Array, inputs: _Inputs, documents: _Documents) -> tuple[jax.Array, jax.Array]:
    """Run all blocks: the state after the last one, and the outputs of each."""

    def run(state: jax.Array, block: tuple[_Inputs, _Documents]) -> tuple[jax.Array, jax.Array]:
        return _run_block(state, *block)

    return jax.lax.scan(run, state, (inputs, documents))


_Residuals = tuple[jax.Array, _Inputs, _Documents]


def _run_blocks_forward(
    state: jax.Array, inputs: _Inputs, documents: _Documents
) -> tuple[tuple[jax.Array, jax.Array], _Residuals]:
    """Run all blocks, and keep the state before each."""

    def run(state: jax.Array, block: tuple[_Inputs, _Documents]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        new_state, outputs = _run_block(state, *block)
        return new_state, (state, outputs)

    last_state, (states, outputs) = jax.lax.scan(run, state, (inputs, documents))
    return (last_state, outputs), (states, inputs, documents)


def _run_blocks_backward(residuals: _Residuals, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    """Recompute each block from the state before it, from the last block to the first."""
    state_ct, outputs_ct = cotangents
    states, inputs, documents = residuals
    blocks = (states, inputs, documents, outputs_ct)
    state_ct, inputs_ct = jax.lax.scan(_pull_back_block, state_ct, blocks, reverse=True)
    return state_ct, inputs_ct, jax.tree.map(zero_cotangent, documents)


_run_blocks.defvjp(_run_blocks_forward, _run_blocks_backward)


@partial(jax.jit, inline=True)
def _pull_back_block(
    state_ct: jax.Array, block: tuple[jax.Array, _Inputs, _Documents, jax.Array]
) -> tuple[jax.Array, _Inputs]:
    """Return the cotangents of the state before a block and of its inputs; for all layers it is traced once."""
    state, inputs, documents, outputs_ct = block

    def run(state: jax.Array, inputs: _Inputs) -> tuple[jax.Array, jax.Array]:
        return _run_block(state, inputs, documents)

    _, pull = jax.vjp(run, state, inputs)
    return pull((state_ct, outputs_ct))


@partial(jax.jit, inline=True)
def _run_block(state: jax.Array, inputs: _Inputs, documents: _Documents) -> tuple[jax.Array, jax.Array]:
    """Run one block: from the state before it to the state after it, and outputs [B, K, R, M, C, V].

    What does not depend on the state is computed for all chunks of the block at once.
    """
    query = inputs.query.astype(state.dtype)
    key = inputs.key.astype(state.dtype)
    value = inputs.value.astype(state.dtype)
    log_decay = inputs.log_decay.astype(state.dtype)
    beta = inputs.beta.astype(state.dtype)
    if inputs.unit_eps is not None:
        query = _normalize(query, inputs.unit_eps)
        key = _normalize(key, inputs.unit_eps)
    query = query * inputs.query_scale
    C, V = value.shape[-2:]
    positions = jnp.arange(C)
    document = documents.of_token
    same_document = document[..., :, None] == document[..., None, :]
    is_before = positions[:, None] >= positions
    visible_BMCC = same_document & is_before
    # Tokens of the document of the state before the chunk, and of that of the state after it.
    inherits_BMC = document == documents.before_chunk[..., None]
    lasts_BMC = document == document[..., -1:]
    total = jnp.cumsum(log_decay, axis=-1)
    # exp(-inf) is 0, also in the gradient; the exponent of a masked pair may be large.
    from_each = total[..., :, None] - total[..., None, :]
    decay = jnp.exp(jnp.where(_add_heads(visible_BMCC), from_each, -jnp.inf))
    from_start = jnp.exp(jnp.where(_add_heads(inherits_BMC), total, -jnp.inf))
    to_end = jnp.exp(jnp.where(_add_heads(lasts_BMC), total[..., -1:] - total, -jnp.inf))

    # Heads of values that share a key share these products.
    scores = jnp.einsum("bkmch,bkmdh->bkmcd", query, key)[:, :, None]
    if inputs.corrects:
        products = jnp.einsum("bkmch,bkmdh->bkmcd", key, key)[:, :, None]
        is_strictly_before = positions[:, None] > positions
        system = jnp.where(is_strictly_before, beta[..., None] * decay * products, 0.0)
        right_sides = jnp.concatenate([value, from_start[..., None] * key[:, :, None]], axis=-1)
        solution = invert_unit_lower(system, inputs.platform) @ (beta[..., None] * right_sides)
        # The updates of a chunk are `updates - from_state @ S_0`.
        updates, from_state = jnp.split(solution, [V], axis=-1)
    else:
        updates, from_state = beta[..., None] * value, None
    query, key = query[:, :, None], key[:, :, None]
    chunks = _Chunk(
        query=from_start[..., None] * query,
        scores=decay * scores,
        updates=updates,
        from_state=from_state,
        key=to_end[..., None] * key,
        kept=from_start[..., -1],
    )
    # [B, K, R, M, ...] to [M, B, K, R, ...].
    state, outputs = jax.lax.scan(_run_chunk, state, jax.tree.map(lambda x: jnp.moveaxis(x, 3, 0), chunks))
    return state, jnp.moveaxis(outputs, 0, 3)


def invert_unit_lower(lower: jax.Array, platform: str) -> jax.Array:
    """Return the inverses of I + L, for strictly lower triangular matrices L [..., C, C]."""
    # On a CPU of two cores, two of XLA's batched solvers at a time wait for each other forever: jaxlib 0.10 splits each
    # batch into tasks of the thread pool that runs the solvers themselves.
    return _invert(lower, platform == "cpu")


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _invert(lower: jax.Array, by_blocks: bool) -> jax.Array:
    return _compute_inverse(lower, by_blocks)


def _compute_inverse(lower: jax.Array, by_blocks: bool) -> jax.Array:
    if by_blocks:
        return _invert_by_blocks(lower)
    identity = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
    return jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True, unit_diagonal=True)


def _invert_forward(lower: jax.Array, by_blocks: bool) -> tuple[jax.Array, jax.Array]:
    inverse = _compute_inverse(lower, by_blocks)
    return inverse, inverse


def _invert_backward(by_blocks: bool, inverse: jax.Array, inverse_ct: jax.Array) -> tuple[jax.Array]:
    # d inverse(M) = -inverse(M) dM inverse(M). The caller sets all elements from the diagonal on to zero.
    return (-_multiply(inverse.mT, _multiply(inverse_ct, inverse.mT)),)


_invert.defvjp(_invert_forward, _invert_backward)


def _invert_by_blocks(lower: jax.Array) -> jax.Array:
    """Return the inverses of I + L from those of their diagonal blocks, which begin with one row each.

    inverse([[A, 0], [B, D]]) = [[inverse(A), 0], [-inverse(D) B inverse(A), inverse(D)]]
    """
    C = lower.shape[-1]
    batch = lower.shape[:-2]
    # Rows of zeros in L are rows of the identity in the inverse, and do not change the others.
    size = 1 << (C - 1).bit_length()
    lower = jnp.pad(lower, [(0, 0)] * len(batch) + [(0, size - C)] * 2)
    # [..., number, width, width].
    inverses = jnp.ones((*batch, size, 1, 1), lower.dtype)
    width = 1
    while width < size:
        number = size // (2 * width)
        pairs = inverses.reshape(*batch, number, 2, width, width)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        # For each pair, the block of L in the rows of the second and the columns of the first.
        tiles = lower.reshape(*batch, number, 2, width, number, 2, width)[..., 1, :, :, 0, :]
        below = jnp.moveaxis(jnp.diagonal(tiles, axis1=-4, axis2=-2), -1, -3)
        corner = -_multiply(second, _multiply(below, first))
        upper_rows = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        lower_rows = jnp.concatenate([corner, second], axis=-1)
        inverses = jnp.concatenate([upper_rows, lower_rows], axis=-2)
        width *= 2
    return inverses[..., 0, :C, :C]


def _multiply(left: jax.Array, right: jax.Array) -> jax.Array:
    """Return the product in full precision, because errors of an inverse spread to all tokens of its chunk."""
    return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)


def _run_chunk(state: jax.Array, chunk: _Chunk) -> tuple[jax.Array, jax.Array]:
    """Run one chunk: from the state before it to the state after it, and outputs [B, K, R, C, V]."""
    updates = chunk.updates
    if chunk.from_state is not None:
        updates = updates - chunk.from_state @ state
    outputs = chunk.query @ state + chunk.scores @ updates
    new_state = chunk.kept[..., None, None] * state + chunk.key.mT @ updates
    return new_state, outputs


def _add_heads(x: jax.Array) -> jax.Array:
    """Insert the axes K and R into an array [B, M, ...] of all heads."""
    return x[:, None, None]


def _normalize(x: jax.Array, eps: float) -> jax.Array:
    """Divide x by its length along the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)
