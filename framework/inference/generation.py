"""Generation: continues prompts with a KV cache, and returns the text one token at a time.

Three functions are compiled once per shape: prefill reads the prompts, decode generates one token per row, and extend
reads the tokens that follow a cached prompt, such as the next message of a conversation. Prompts are padded on the left
to one of a few common lengths, so that all rows write the same slot of the cache; see layers/attention_cache.py. The
cache is [U, B, C, K, H] per layer of the pattern (U is its number of repeats), sharded over data and fsdp (B) and over
model (K). Layers of linear attention have a state instead, whose size does not depend on C.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from plimsoll.framework.data.tokenizers import Tokenizer
from plimsoll.framework.inference.sampling import Sampling, SamplingArrays, choose
from plimsoll.framework.layers.attention_cache import SLOTTED
from plimsoll.framework.layers.base import BATCH_AXES, Context, batch_shards
from plimsoll.framework.layout import Nested, TensorSpec, TrainState, key_name, merge
from plimsoll.framework.program.program import Program
from plimsoll.framework.terminal.phases import SHORT, phase

# Maximum number of tokens to read at once after a cached prompt. Their attention logits over the whole cache are
# materialized in float32, so a longer text is read from the beginning instead, with the attention kernel.
_MOST_NEW_TOKENS = 512

# The parameters and buffers of a model.
ModelArrays = tuple[Nested, Nested]


@dataclass
class _CachedPrompt:
    """The cache of a prompt and its continuation, reused if a longer prompt starts with the same tokens.

    Attributes:
        tokens: tokens whose keys and values are in the cache.
        first_B: int32[B], the slot of the first token.
        capacity: number of slots.
        cache: the arrays, [U, B, C, K, H] per layer of the pattern.
    """

    tokens: list[int]
    first_B: np.ndarray
    capacity: int
    cache: Nested


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachePosition:
    """The place in a cache where a function reads its tokens.

    Attributes:
        count: int32, number of tokens before the padding; None if there is no padding.
        first_B: int32[B], cache slot of the first token of each row.
        index: int32, number of the decoding step; None if it is not a decoding step.
        slot: int32, cache slot of the first of the tokens to read.
    """

    count: jax.Array | np.ndarray | None
    first_B: jax.Array | np.ndarray
    index: jax.Array | np.ndarray | None
    slot: jax.Array | np.ndarray


@dataclass(frozen=True)
class ForwardOutput:
    """The results of a model's forward pass up to its head.

    Attributes:
        x_BSD: output of the last layer, before the head's norm.
        head_weights: prepared weights of the head.
        caches: cache entries of each stack, by stage: [U, B, C, K, H]. The axes are repeats of the pattern, rows,
            positions, key heads and head width; latents count as one head. Empty unless the context has a cache.
    """

    x_BSD: jax.Array
    head_weights: Nested
    caches: Nested


class InferenceForward:
    """A model's forward pass that copies offloaded parameters to the device as needed.

    It holds no arrays, because compiled functions keep a reference to it and would keep the arrays alive.

    Args:
        program: program of the experiment on its mesh.
        params: parameters of the model; only their shardings are read.
    """

    def __init__(self, program: Program, params: Nested):
        self.program = program
        self.model = program.experiment.language_model
        # Find the memory here, because tracers inside jit have none.
        self._storage_specs = self.model.stage_specs(jax.tree.map(_get_spec, params))

    def __call__(self, arrays: ModelArrays, ctx: Context) -> ForwardOutput:
        """Run the model. Call it inside jit.

        For an offloaded stack, the device holds the weights of one repeat of the layer pattern at a time.
        """
        params, buffers = arrays
        x_BSD, outs = self.model.compute_hidden(params, ctx, buffers, self._storage_specs)
        head_weights = self.model.head_weights(params, ctx, self._storage_specs)
        caches = {name: out.layer_state for name, out in outs.items() if out.layer_state}
        return ForwardOutput(x_BSD, head_weights, caches)


def _get_spec(x: jax.Array) -> TensorSpec:
    """Return the spec of an array: its shape, dtype and memory."""
    in_host_memory = x.sharding.memory_kind != "device"
    return TensorSpec(x.shape, x.dtype, memory_kind="pinned_host" if in_host_memory else "device")


class Generator:
    """Continues prompts; keep the instance to reuse its compiled functions.

    Args:
        program: program of the experiment on its mesh.
        state: state with the groups parameter (or ema), frozen and buffer.
        averaged: use the moving averages of the weights.
    """

    def __init__(self, program: Program, state: TrainState, *, averaged: bool = False):
        self._cached: _CachedPrompt | None = None
        # The property raises ValueError if the model has no language head.
        _ = program.experiment.language_model.language_head
        self._program = program
        weights = program.weights(state, averaged=averaged)
        self._arrays = (weights, state.buffer)
        forward = InferenceForward(program, weights)
        # `_shard_cache` sets the sharding of the cache inside the functions.
        out_shardings = (program.replicated, None)
        jit = partial(program.jit, static_argnums=0, out_shardings=out_shardings)
        self._prefill = jit(partial(_prefill, forward))
        # The cache is donated, so it is updated in place and there is never a second one.
        self._decode = jit(partial(_decode, forward), donate_argnums=2)
        self._extend = jit(partial(_extend, forward), donate_argnums=2)
        self._grow = program.jit(partial(_grow, forward), static_argnums=0)

    def __call__(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Return the tokens that follow each prompt; see `stream`."""
        rows: list[list[int]] = [[] for _ in prompts]
        for tokens in self.stream(prompts, sampling):
            for row, token in zip(rows, tokens, strict=True):
                if token is not None:
                    row.append(token)
        return rows

    def check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Check that the model can continue these prompts.

        Raises:
            ValueError: a prompt is empty, has ids outside the vocabulary, or needs more positions than the model has.
        """
        model = self._program.experiment.language_model
        longest = max(map(len, prompts), default=0)
        if not all(prompts):
            raise ValueError("generation needs prompts of at least one token each")
        # JAX does not raise an error for a lookup outside the embedding table.
        largest = max((max(row) for row in prompts), default=0)
        if largest >= model.vocab_size:
            raise ValueError(f"a prompt has the token {largest}; expected less than vocab_size = {model.vocab_size}")
        limit = model.max_positions
        if limit is not None and longest + sampling.max_new_tokens > limit:
            raise ValueError(
                f"a prompt of {longest} tokens and max_new_tokens = {sampling.max_new_tokens} are over the model's "
                f"{limit} positions (model.embed.max_positions or rotary.scaling.original_length)"
            )

    def stream(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keep_cache: bool = False
    ) -> Iterator[list[int | None]]:
        """Yield, per step, the next token of each row, or None for rows that have ended. Ends when all rows have.

        Args:
            prompts: token ids, of any lengths.
            sampling: sampling settings.
            keep_cache: for a single prompt, keep the cache for a later, longer prompt that starts with the same
                tokens. The cache stays on the device until the next prompt.

        Raises:
            ValueError: see `check`; raised by this call, not when the first token is requested.
        """
        self.check(prompts, sampling)
        return self._steps(prompts, sampling, keep_cache and len(prompts) == 1) if prompts else iter(())

    def _steps(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, keep_cache: bool
    ) -> Iterator[list[int | None]]:
        shards = batch_shards(self._program.mesh.shape)
        # The number of rows must be a multiple of the batch shards.
        num_rows = -(-len(prompts) // shards) * shards
        settings = sampling.to_arrays(self._program.experiment.language_model.vocab_size, num_rows)
        stop_ids = set(sampling.stop_ids)
        running = [True] * len(prompts)
        # Each function is compiled on its first call with these shapes.
        with phase("compiling and reading the prompt", patience=SHORT):
            token_B, cached = self._read(prompts, sampling, settings, keep_cache)
            token_B.block_until_ready()
        try:
            for index in range(sampling.max_new_tokens):
                last_B = token_B
                # Start the next token before reading this one, so that the device stays busy.
                if index + 1 < sampling.max_new_tokens:
                    slot = np.asarray(cached.first_B[0] + len(cached.tokens), np.int32)
                    position = CachePosition(None, cached.first_B, np.asarray(index + 1, np.int32), slot)
                    first_call = phase("compiling the decoding step", patience=SHORT) if index == 0 else nullcontext()
                    with first_call:
                        token_B, cached.cache = self._decode(
                            sampling.kind, self._arrays, cached.cache, last_B, position, settings
                        )
                # Rows that were added to fill the mesh come last; drop them.
                values = np.asarray(last_B)[: len(prompts)].tolist()
                if index + 1 < sampling.max_new_tokens:
                    cached.tokens.append(values[0])
                running = [runs and value not in stop_ids for runs, value in zip(running, values, strict=True)]
                if not any(running):
                    return
                yield [value if runs else None for runs, value in zip(running, values, strict=True)]
        finally:
            # Keep the cache even if the caller stops early. If the program failed, the donated cache no longer exists.
            is_intact = not any(leaf.is_deleted() for leaf in jax.tree.leaves(cached.cache))
            self._cached = cached if keep_cache and is_intact else None

    def _read(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, settings: SamplingArrays, keep_cache: bool
    ) -> tuple[jax.Array, _CachedPrompt]:
        """Read prompts; returns the first new token of each row, and the cache of the prompts."""
        # Drop this reference, so that two caches never exist at the same time.
        cached, self._cached = self._cached, None
        if cached is not None and keep_cache:
            (prompt,) = prompts
            # Always read the last token: its logits give the first new token.
            num_cached = min(_count_common(cached.tokens, prompt), len(prompt) - 1)
            # A state cannot be taken back to an earlier token.
            is_whole = num_cached == len(cached.tokens)
            paths = [path for path, _ in jax.tree.leaves_with_path(cached.cache)]
            is_usable = num_cached > 0 and (is_whole or all(map(_is_slotted, paths)))
            if is_usable and len(prompt) - num_cached <= _MOST_NEW_TOKENS:
                token_B = self._read_rest(cached, prompt, num_cached, sampling, settings)
                return token_B, cached
        del cached
        length = bucket(max(map(len, prompts)))
        # Pad on the left, and repeat the last prompt to fill the rows.
        num_rows = len(settings.keys)
        tokens_BS = np.zeros((num_rows, length), np.int32)
        first_B = np.zeros(num_rows, np.int32)
        for row in range(num_rows):
            prompt = prompts[min(row, len(prompts) - 1)]
            first_B[row] = length - len(prompt)
            tokens_BS[row, first_B[row] :] = prompt
        # One cache slot per prompt token and per new token.
        capacity = bucket(length + sampling.max_new_tokens)
        token_B, cache = self._prefill((sampling.kind, capacity), self._arrays, tokens_BS, first_B, settings)
        return token_B, _CachedPrompt(list(prompts[0]), first_B, capacity, cache)

    def _read_rest(
        self,
        cached: _CachedPrompt,
        prompt: Sequence[int],
        num_cached: int,
        sampling: Sampling,
        settings: SamplingArrays,
    ) -> jax.Array:
        """Read the part of a prompt that is not in the cache, and extend the cache; returns the first new token, [B].

        Args:
            cached: cache of another prompt; afterwards, of this one.
            prompt: token ids; the first `num_cached` are in the cache.
            num_cached: number of tokens not to read again.
            sampling: sampling settings.
            settings: the same settings as arrays.
        """
        num_rows = len(cached.first_B)
        new_tokens = prompt[num_cached:]
        slot = int(cached.first_B[0]) + num_cached
        tokens_BS = np.zeros((num_rows, bucket(len(new_tokens))), np.int32)
        tokens_BS[:, : len(new_tokens)] = new_tokens
        capacity = bucket(slot + max(tokens_BS.shape[1], len(new_tokens) + sampling.max_new_tokens))
        if capacity > cached.capacity:
            cached.cache = self._grow(capacity - cached.capacity, cached.cache)
            cached.capacity = capacity
        position = CachePosition(
            np.asarray(len(new_tokens), np.int32), cached.first_B, None, np.asarray(slot, np.int32)
        )
        token_B, cached.cache = self._extend(sampling.kind, self._arrays, cached.cache, tokens_BS, position, settings)
        cached.tokens = list(prompt)
        return token_B


def _prefill(
    forward: InferenceForward,
    static: tuple[str, int],
    arrays: ModelArrays,
    tokens_BS: jax.Array,
    first_B: jax.Array,
    settings: SamplingArrays,
) -> tuple[jax.Array, Nested]:
    """Compute the first new token of each row, and the cache of the prompts with room for `capacity` positions."""
    kind, capacity = static
    logits_BV, cache = read_prompts(forward, capacity, arrays, tokens_BS, first_B)
    return choose(kind, logits_BV, settings, jnp.int32(0)), cache


def read_prompts(
    forward: InferenceForward, capacity: int, arrays: ModelArrays, tokens_BS: jax.Array, first_B: jax.Array
) -> tuple[jax.Array, Nested]:
    """Compute the logits_BV of the first new token of each row, and the cache of the prompts. Call it inside jit.

    Args:
        forward: forward pass of the model.
        capacity: number of positions that the cache has room for.
        arrays: parameters and buffers of the model.
        tokens_BS: prompts, padded on the left.
        first_B: first column of each prompt.
    """
    length = tokens_BS.shape[1]
    position_BS = jnp.arange(length) - first_B[:, None]
    # Padding is a separate segment, 0, so that no prompt token attends to it.
    batch = {
        "tokens": tokens_BS,
        "positions": jnp.maximum(position_BS, 0),
        "segments": (position_BS >= 0).astype(jnp.int32),
    }
    ctx = replace(forward.program.evaluation_context(batch), cache=True)
    out = forward(arrays, ctx)
    cache = _shard_cache(_pad_cache(out.caches, capacity - length), ctx)
    # Prompts are padded on the left, so the last token of each is in the last column.
    last_B1D = out.x_BSD[:, -1:]
    logits_B1V = forward.model.language_head.logits(out.head_weights, last_B1D, ctx)
    return logits_B1V[:, 0], cache


def _decode(
    forward: InferenceForward,
    kind: str,
    arrays: ModelArrays,
    cache: Nested,
    token_B: jax.Array,
    position: CachePosition,
    settings: SamplingArrays,
) -> tuple[jax.Array, Nested]:
    """Compute the next token of each row, and the cache with the keys and values of `token_B`."""
    logits_BV, cache = read_tokens(forward, arrays, cache, token_B[:, None], position)
    assert position.index is not None
    token_B = choose(kind, logits_BV, settings, position.index)
    return token_B, cache


def _extend(
    forward: InferenceForward,
    kind: str,
    arrays: ModelArrays,
    cache: Nested,
    tokens_BS: jax.Array,
    position: CachePosition,
    settings: SamplingArrays,
) -> tuple[jax.Array, Nested]:
    """Read `count` more tokens after a cached prompt; returns the first new token of each row, and the cache."""
    logits_BV, cache = read_tokens(forward, arrays, cache, tokens_BS, position)
    return choose(kind, logits_BV, settings, jnp.int32(0)), cache


def read_tokens(
    forward: InferenceForward, arrays: ModelArrays, cache: Nested, tokens_BS: jax.Array, position: CachePosition
) -> tuple[jax.Array, Nested]:
    """Compute the logits_BV after the last token of each row, and the cache with the keys and values of the tokens.

    Call it inside jit.

    Args:
        forward, arrays: as for `read_prompts`.
        cache: cache of the preceding tokens, with room for S more.
        tokens_BS: tokens that follow the cached ones, padded on the right.
        position: their place in the cache.
    """
    slot, count = position.slot, position.count
    position_BS = (slot - position.first_B)[:, None]
    batch = {"first": position.first_B, "slot": slot}
    if count is not None:
        step_S = jnp.arange(tokens_BS.shape[1])
        # Padding gets the last token's position, because a model with learned positions may have no further ones. Its
        # cache entries are beyond all visible slots, and are overwritten before those slots become visible.
        position_BS = position_BS + jnp.minimum(step_S, count - 1)
        batch["segments"] = jnp.broadcast_to(step_S < count, tokens_BS.shape).astype(jnp.int32)
    ctx = forward.program.evaluation_context({**batch, "tokens": tokens_BS, "positions": position_BS})
    ctx = replace(ctx, cache=True)
    params, buffers = arrays
    # The layers read the cache together with their own buffers.
    buffers = merge(buffers, cache)
    out = forward((params, buffers), ctx)

    # All layers write the same slots in all rows, so this is one slice update instead of a scatter.
    def write(path: KeyPath, entry: jax.Array, new: jax.Array) -> jax.Array:
        if not _is_slotted(path):
            return new.astype(entry.dtype)
        return jax.lax.dynamic_update_slice_in_dim(entry, new, slot, axis=2)

    cache = _shard_cache(jax.tree.map_with_path(write, cache, out.caches), ctx)
    last_B1D = out.x_BSD if count is None else jax.lax.dynamic_slice_in_dim(out.x_BSD, count - 1, 1, axis=1)
    logits_B1V = forward.model.language_head.logits(out.head_weights, last_B1D, ctx)
    return logits_B1V[:, 0], cache


def _grow(forward: InferenceForward, num_more: int, cache: Nested) -> Nested:
    """Grow the cache by `num_more` positions, and shard it over the mesh."""
    return _shard_cache(_pad_cache(cache, num_more), forward.program.evaluation_context({}))


def _pad_cache(cache: Nested, num_more: int) -> Nested:
    """Pad the cache with `num_more` positions."""
    pad = [(0, 0)] * 5
    pad[2] = (0, num_more)
    return jax.tree.map_with_path(lambda path, x: jnp.pad(x, pad) if _is_slotted(path) else x, cache)


def _is_slotted(path: KeyPath) -> bool:
    """Return whether an array of a cache has an axis of slots: [U, B, C, K, H]."""
    return key_name(path[-1]) in SLOTTED


def _count_common(tokens: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    count = 0
    for token, other_token in zip(tokens, other, strict=False):
        if token != other_token:
            break
        count += 1
    return count


def _shard_cache(cache: Nested, ctx: Context) -> Nested:
    """Shard the cache: rows over the batch axes, and heads over `model` if their number is divisible by it."""

    def shard_entry(path: KeyPath, x: jax.Array) -> jax.Array:
        # States are [U, B, N, H, V]; inputs of convolutions are [U, B, T, E], with the channels of all heads.
        heads_axis = 2 if key_name(path[-1]) == "state" else 3
        is_divisible = ctx.mesh is not None and x.shape[heads_axis] % ctx.mesh.shape["model"] == 0
        axes: list[str | tuple[str, ...] | None] = [None] * x.ndim
        axes[1] = BATCH_AXES
        axes[heads_axis] = "model" if is_divisible else None
        return ctx.constrain(x, *axes)

    return jax.tree.map_with_path(shard_entry, cache)


def bucket(length: int) -> int:
    """Round a length up to one of a few: multiples of 16, and from 128 on eight lengths per doubling."""
    # Round an n-bit length to a multiple of 2^(n - 4): there are eight such multiples with n bits.
    num_bits = (length - 1).bit_length()
    unit = 1 << max(0, num_bits - 4)
    unit = max(16, unit)
    return -(-length // unit) * unit


class TextStream:
    """Decodes tokens to text incrementally: never yields partial characters, or anything from the first stop on."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self.tokenizer = tokenizer
        self.stops = [stop for stop in stops if stop]
        self.ended = False
        # Text that may turn out to be the beginning of a stop string.
        self._held = ""
        # A character may span several tokens: the decoder waits for its last byte.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int | None) -> str:
        """Return the text that is final after this token; None ends the row."""
        if self.ended:
            return ""
        data = b"" if token is None else self.tokenizer.decode_bytes([token])
        new_text = self._utf8.decode(data, final=token is None)
        text = self._held + new_text
        self._held = ""
        stop_positions = [text.find(stop) for stop in self.stops]
        stop_positions = [position for position in stop_positions if position >= 0]
        self.ended = bool(stop_positions) or token is None
        if self.ended:
            end = min(stop_positions, default=len(text))
            return text[:end]
        # Hold back the longest suffix of the text that is a prefix of a stop string.
        num_held = 0
        for stop in self.stops:
            for length in range(1, len(stop)):
                if text.endswith(stop[:length]):
                    num_held = max(num_held, length)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]


def stream_text(
    generator: Generator,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    stops: Sequence[str] = (),
    *,
    keep_cache: bool = False,
) -> Iterator[list[str]]:
    """Yield, per step, the new text of each row; ends when all rows have.

    Args:
        generator, prompts, sampling, keep_cache: as for `Generator.stream`.
        tokenizer: tokenizer of the model.
        stops: strings that end a row.
    """
    streams = [TextStream(tokenizer, stops) for _ in prompts]
    for tokens in generator.stream(prompts, sampling, keep_cache=keep_cache):
        yield [stream.push(token) for stream, token in zip(streams, tokens, strict=True)]
        # The generator does not know about stop strings, so it would continue.
        if all(stream.ended for stream in streams):
            return
    yield [stream.push(None) for stream in streams]
