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

**Over mesh.seq**: each device has contiguous tokens of a row. Everything is linear in the state before them, S_before:

    o_t = o_t for S_before = 0, + r_t S_before,        S_after = A S_before + F

r_t is the query times the transitions since the device's first token, and A is the product of all of them. Without
corrections, transitions are factors, so r_t = exp(G_t) q_t. With corrections, r and A are H more columns of outputs and
states: those of a state that starts as the identity, for values of 0. `pass_states` then gives S_before from A and F of
the earlier devices, as in LASP-2 (Sun et al. 2025, arXiv 2502.07563), whose transitions are 1, and in the context
parallelism of flash-linear-attention. In the backward pass, the gradient of S_before is that of all outputs,
sum_t r_t^T do_t, and the gradient of S_after is passed back in the same way. So the rest is the backward pass of one
device, and no gradient passes through r or A.

Axis letters: N heads of values, K heads of queries and keys, R = N / K, H channels of a key, V channels of a value, C
tokens of a chunk, M chunks of a block, T blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.framework.layers.custom_gradients import zero_cotangent
from plimsoll.framework.layers.state_passing import apply_transition, pass_states, receive_previous
from plimsoll.framework.layers.unit_lower import invert_unit_lower

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
    shards: int = 1,
    corrects: bool = True,
    query_scale: float = 1.0,
    unit_eps: float | None = None,
    platform: str | None = None,
    chunk: int = CHUNK,
    chunks_per_block: int = CHUNKS_PER_BLOCK,
) -> tuple[jax.Array, jax.Array | None]:
    """Run the recurrence over all tokens, in float32 or wider.

    Args:
        query_BSKH: queries; value head n uses key head n // (N / K).
        key_BSKH: keys. With corrections, the recurrence is stable if their length is 1.
        value_BSNV: values.
        log_decay_BSN: log of the decay a, at most 0.
        beta_BSN: rate of the correction b, in [0, 1]; without corrections, the factor on the values, at least 0.
        segments_BS: int32, the document of each token; a document starts with a state of zeros. None: one document.
        state_BNHV: state before the first token; None for zeros. It belongs to the document of the first token.
        shards: number of devices along seq that divide the rows. If there are several, this runs inside `shard_map`,
            with the device's tokens as arguments and results, and without `state_BNHV`.
        corrects: whether a token corrects the value of its key; if not, it adds b times its value, as in Mamba-2.
        query_scale: factor on the queries.
        unit_eps: divide queries and keys by the root of their sum of squares plus this number first; None: do not.
        platform: where it runs, such as "tpu"; None for that of this process.
        chunk: tokens of a chunk.
        chunks_per_block: chunks for which the backward pass keeps a single state.

    Returns:
        (outputs [B, S, N, V] in the dtype of the values; state after the last token, [B, N, H, V]; None with shards).
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
    before_B1 = first_of_chunks[:, :1]
    if shards > 1:
        # The first device receives 0. Its tokens have no state before them, so it does not matter if they have it, too.
        before_B1 = receive_previous(segments_BS, 1, shards)
    previous = jnp.concatenate([before_B1, last_of_chunks[:, :-1]], axis=1)
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
    outputs: jax.Array
    last_state: jax.Array | None
    if shards > 1:
        assert state_BNHV is None, "the state before a device's tokens is that of the previous device"
        outputs, last_state = _run_shard(shards, wide, inputs, documents), None
    else:
        if state_BNHV is None:
            state_BNHV = jnp.zeros((B, N, H, V), wide)
        state = state_BNHV.astype(wide).reshape(B, K, R, H, V)
        state, outputs = _run_blocks(state, inputs, documents)
        last_state = state.reshape(B, N, H, V)
    # [blocks, B, K, R, M, C, V] to [B, S, N, V].
    outputs = jnp.moveaxis(outputs, (1, 0, 4, 5, 2, 3), (0, 1, 2, 3, 4, 5)).reshape(B, -1, N, V)
    return outputs[:, :S].astype(value_BSNV.dtype), last_state


# Not `jax.checkpoint`: inside a layer that is itself under `jax.checkpoint`, the layer's policy would decide.
@jax.custom_vjp
def _run_blocks(state: jax.Array, inputs: _Inputs, documents: _Documents) -> tuple[jax.Array, jax.Array]:
    """Run all blocks: the state after the last one, and the outputs of each."""

    def run(state: jax.Array, block: tuple[_Inputs, _Documents]) -> tuple[jax.Array, jax.Array]:
        return _run_block(state, *block)

    return jax.lax.scan(run, state, (inputs, documents))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Residuals:
    """What the backward pass needs of all blocks: the states before each, [T, B, K, R, H, V], and the arguments."""

    states: jax.Array
    inputs: _Inputs
    documents: _Documents


def _run_blocks_forward(
    state: jax.Array, inputs: _Inputs, documents: _Documents
) -> tuple[tuple[jax.Array, jax.Array], _Residuals]:
    """Run all blocks, and keep the state before each."""

    def run(state: jax.Array, block: tuple[_Inputs, _Documents]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        new_state, outputs = _run_block(state, *block)
        return new_state, (state, outputs)

    last_state, (states, outputs) = jax.lax.scan(run, state, (inputs, documents))
    return (last_state, outputs), _Residuals(states, inputs, documents)


def _run_blocks_backward(residuals: _Residuals, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    """Recompute each block from the state before it, from the last block to the first."""
    state_ct, outputs_ct = cotangents
    blocks = (residuals.states, residuals.inputs, residuals.documents, outputs_ct)
    state_ct, inputs_ct = jax.lax.scan(_pull_back_block, state_ct, blocks, reverse=True)
    return state_ct, inputs_ct, jax.tree.map(zero_cotangent, residuals.documents)


_run_blocks.defvjp(_run_blocks_forward, _run_blocks_backward)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Readers:
    """The r_t, which read from the state before a device's tokens.

    Attributes:
        query: [T, B, K, R, M, C, H]; without corrections [T, B, K, 1, M, C, H], to be multiplied by `decay`.
        decay: [T, B, K, R, M, C], from before the device's first token to each token; 0 in later documents. None with
            corrections.
    """

    query: jax.Array
    decay: jax.Array | None

    def read(self, state: jax.Array) -> jax.Array:
        """Return r_t S for S [B, K, R, H, V] as [T, B, K, R, M, C, V]."""
        query = self.query.astype(state.dtype)
        if self.decay is None:
            return jnp.einsum("tbkrmch,bkrhv->tbkrmcv", query, state)
        return self.decay[..., None] * jnp.einsum("tbkmch,bkrhv->tbkrmcv", query[:, :, :, 0], state)

    def pull_back(self, outputs_ct: jax.Array) -> jax.Array:
        """Return the gradient of S, [B, K, R, H, V], from that of r_t S."""
        query = self.query.astype(outputs_ct.dtype)
        if self.decay is None:
            return jnp.einsum("tbkrmch,tbkrmcv->bkrhv", query, outputs_ct)
        return jnp.einsum("tbkmch,tbkrmcv->bkrhv", query[:, :, :, 0], self.decay[..., None] * outputs_ct)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run_shard(shards: int, wide: jnp.dtype, inputs: _Inputs, documents: _Documents) -> jax.Array:
    """Run the blocks of a device whose state comes from the previous device, inside `shard_map`; return the outputs.

    Args:
        shards: number of devices along seq.
        wide: dtype of states.
        inputs, documents: of all blocks.
    """
    return _run_shard_forward(shards, wide, inputs, documents)[0]


def _run_shard_forward(
    shards: int, wide: jnp.dtype, inputs: _Inputs, documents: _Documents
) -> tuple[jax.Array, tuple[_Residuals, _Readers, jax.Array]]:
    """Return outputs, and the residuals: those of the blocks, the readers, and the transition A."""
    _, B, K, R, _, _, V = inputs.value.shape
    H = inputs.key.shape[-1]
    start = jnp.zeros((B, K, R, H, V), wide)
    if inputs.corrects:
        identity = jnp.broadcast_to(jnp.eye(H, dtype=wide), (B, K, R, H, H))

        def run(both: jax.Array, block: tuple[_Inputs, _Documents]) -> tuple[jax.Array, list[jax.Array]]:
            new, outputs = _run_block(both, *block)
            # Separate arrays, so that the outputs of all blocks are not copied to be split.
            return new, [*jnp.split(both, [V], axis=-1), *jnp.split(outputs, [V], axis=-1)]

        last, arrays = jax.lax.scan(run, jnp.concatenate([start, identity], axis=-1), (inputs, documents))
        states, transitions, outputs, queries = arrays
        state, transition = jnp.split(last, [V], axis=-1)
        residuals = _Residuals(states, inputs, documents)
        readers = _Readers(queries, decay=None)
    else:
        (state, outputs), residuals = _run_blocks_forward(start, inputs, documents)
        states = residuals.states
        decay = _decay_from_start(inputs.log_decay.astype(wide), documents)
        query, _ = _prepare_keys(inputs, wide)
        readers = _Readers(query[:, :, :, None], decay)
        after_blocks = decay[..., -1, -1, None, None]
        transition = after_blocks[-1]
        transitions = jnp.concatenate([jnp.ones_like(after_blocks[:1]), after_blocks[:-1]])
    before = pass_states(transition, state, shards)
    outputs = outputs + readers.read(before)
    residuals = replace(residuals, states=states + apply_transition(transitions, before))
    # With corrections, a query per value head and token is saved: not more precisely than the gradient it multiplies.
    saved = inputs.value.dtype if inputs.corrects else readers.query.dtype
    return outputs, (residuals, replace(readers, query=readers.query.astype(saved)), transition)


def _run_shard_backward(
    shards: int, wide: jnp.dtype, saved: tuple[_Residuals, _Readers, jax.Array], outputs_ct: jax.Array
) -> tuple[Any, ...]:
    """Get the gradient of the last state from the next devices; the rest is the backward pass of all blocks."""
    residuals, readers, transition = saved
    state_ct = pass_states(transition.mT, readers.pull_back(outputs_ct), shards, reverse=True)
    _, *cotangents = _run_blocks_backward(residuals, (state_ct, outputs_ct))
    return tuple(cotangents)


_run_shard.defvjp(_run_shard_forward, _run_shard_backward)


def _decay_from_start(log_decay: jax.Array, documents: _Documents) -> jax.Array:
    """Return the decay from before the first token to each token, 0 in other documents; [T, B, K, R, M, C]."""
    T, B, K, R, M, C = log_decay.shape
    by_token = jnp.moveaxis(log_decay, 0, 3).reshape(B, K, R, T * M * C)
    total = jnp.moveaxis(jnp.cumsum(by_token, axis=-1).reshape(B, K, R, T, M, C), 3, 0)
    before_first = documents.before_chunk[0, :, 0]
    inherits_TBMC = documents.of_token == before_first[:, None, None]
    return jnp.exp(jnp.where(inherits_TBMC[:, :, None, None], total, -jnp.inf))


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
    query, key = _prepare_keys(inputs, state.dtype)
    value = inputs.value.astype(state.dtype)
    log_decay = inputs.log_decay.astype(state.dtype)
    beta = inputs.beta.astype(state.dtype)
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
        if state.shape[-1] > V:
            # Further columns of the state have values of 0.
            updates = jnp.pad(updates, [(0, 0)] * (updates.ndim - 1) + [(0, state.shape[-1] - V)])
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


def _prepare_keys(inputs: _Inputs, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Return the queries and keys of the recurrence, normalized and scaled, in another dtype."""
    query = inputs.query.astype(dtype)
    key = inputs.key.astype(dtype)
    if inputs.unit_eps is not None:
        query = _normalize(query, inputs.unit_eps)
        key = _normalize(key, inputs.unit_eps)
    return query * inputs.query_scale, key


def _normalize(x: jax.Array, eps: float) -> jax.Array:
    """Divide x by its length along the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)
