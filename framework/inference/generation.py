"""Generation: continues prompts with a key/value cache, and gives their text a token at a time.

Two functions are compiled, once per shape: one reads the prompts, one makes a token of each row. Prompts are padded on
the left to a common length (of which there are few), so that all rows write the same slot of the cache, see
layers/attention_cache.py. The cache is [U, B, C, K, H] per layer of the pattern, over data and fsdp and over model.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from framework.data.tokenizers import Tokenizer
from framework.inference.sampling import Sampling, choose, row_keys
from framework.layers.base import BATCH_AXES, Context, Out
from framework.layout import Nested
from framework.program.program import Program


class Forward:
    """A model's forward pass that brings parameters in host memory to the device. Holds no arrays: functions that are
    compiled keep it, and would keep them.

    Args:
        program: the experiment on its mesh.
        params: where its parameters live.
    """

    def __init__(self, program: Program, params: Nested):
        self.program, self.model = program, program.experiment.language_model
        self._places = self.model.stage_specs(jax.tree.map(lambda x: x.sharding, params))

    def __call__(self, arrays: tuple[Nested, Nested], ctx: Context) -> tuple[jax.Array, Nested, dict[str, Out]]:
        """Inside jit: x_BSD before the head, the head's prepared weights, and the Out of each stage. Of a hosted stack
        one unit's weights are on the device at a time."""
        params, buffers = arrays
        x_BSD, outs = self.model.hidden(params, ctx, buffers, self._places)
        return x_BSD, self.model.head_weights(params, ctx, self._places), outs


class Generator:
    """Continues prompts; keep it for as long as its compiled functions are of use.

    Args:
        program: the experiment on its mesh.
        state: with the groups parameter (or ema), frozen and buffer.
        averaged: use the moving averages.
    """

    def __init__(self, program: Program, state: Nested, *, averaged: bool = False):
        self._program, self._arrays = program, (program.weights(state, averaged=averaged), state["buffer"])
        forward = Forward(program, self._arrays[0])
        cache = NamedSharding(program.mesh, PartitionSpec(None, BATCH_AXES, None, "model", None))
        jit = functools.partial(program.jit, static_argnums=0, out_shardings=(program.replicated, cache))
        self._prefill = jit(functools.partial(_prefill, forward))
        self._decode = jit(functools.partial(_decode, forward), donate_argnums=2)

    def __call__(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """The tokens that follow each prompt; see `stream`."""
        rows: list[list[int]] = [[] for _ in prompts]
        for tokens in self.stream(prompts, sampling):
            for row, token in zip(rows, tokens, strict=True):
                row.extend([] if token is None else [token])
        return rows

    def check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Raises ValueError: a prompt is empty, has ids that the model has not, or more positions than it has are
        needed."""
        model, longest = self._program.experiment.language_model, max(map(len, prompts), default=0)
        if not all(prompts):
            raise ValueError("generation needs prompts of at least one token each")
        if (largest := max((max(row) for row in prompts), default=0)) >= model.vocab_size:
            raise ValueError(f"a prompt has the token {largest}; model.vocab_size = {model.vocab_size}")
        limit = model.embed.max_positions
        if limit is not None and longest + sampling.max_new_tokens > limit:
            raise ValueError(
                f"a prompt of {longest} tokens and max_new_tokens = {sampling.max_new_tokens} are over the model's "
                f"{limit} positions (model.embed.max_positions)"
            )

    def stream(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[list[int | None]]:
        """Per step, the next token of each row, None for rows that have ended. Ends when all have. Raises ValueError as
        `check`.

        Args:
            prompts: token ids, of any lengths.
            sampling: how to choose.
        """
        self.check(prompts, sampling)
        return self._steps(prompts, sampling) if prompts else iter(())

    def _steps(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[list[int | None]]:
        shards = self._program.mesh.shape["data"] * self._program.mesh.shape["fsdp"]
        rows = [*prompts, *[prompts[-1]] * (-len(prompts) % shards)]
        length = bucket(max(map(len, rows)))
        capacity = bucket(length + sampling.max_new_tokens)
        tokens, first = np.zeros((len(rows), length), np.int32), np.array([length - len(row) for row in rows], np.int32)
        for index, row in enumerate(rows):
            tokens[index, first[index] :] = row
        vocab, top_k = self._program.experiment.language_model.vocab_size, sampling.top_k
        filtered = top_k is not None or sampling.top_p < 1.0
        kind = "greedy" if sampling.temperature == 0.0 else "filtered" if filtered else "all"
        chosen = {
            "keys": row_keys(sampling.seed, len(rows)),
            "temperature": np.float32(sampling.temperature),
            "top_k": np.int32(min(top_k or vocab, vocab)),
            "top_p": np.float32(sampling.top_p),
        }
        arrays, stop, running = self._arrays, {*sampling.stop_ids}, [True] * len(prompts)
        token_B, cache = self._prefill((kind, capacity), arrays, tokens, first, chosen)
        for index in range(sampling.max_new_tokens):
            last, done = token_B, index + 1 == sampling.max_new_tokens
            if not done:  # the device works on the next token while this one is looked at
                where = {"slot": np.int32(length + index), "first": first, "index": np.int32(index + 1)}
                token_B, cache = self._decode((kind,), arrays, cache, last, where, chosen)
            values = [int(token) for token in np.asarray(last)[: len(prompts)]]
            running = [alive and value not in stop for alive, value in zip(running, values, strict=True)]
            if not any(running):
                return
            yield [value if alive else None for alive, value in zip(running, values, strict=True)]


def _context(forward: Forward, batch: Nested) -> Context:
    return replace(forward.program.evaluation_context(batch), cache=True)


def _prefill(forward: Forward, static: tuple[str, int], arrays: Any, tokens_BS: Any, first_B: Any, chosen: Any) -> Any:
    """The first new token of each row, and the cache of all before it."""
    kind, capacity = static
    length = tokens_BS.shape[1]
    position_BS = jnp.arange(length) - first_B[:, None]
    batch = {"tokens": tokens_BS, "positions": jnp.maximum(position_BS, 0)}
    batch["segments"] = (position_BS >= 0).astype(jnp.int32)
    ctx = _context(forward, batch)
    x_BSD, head, outs = forward(arrays, ctx)
    pad = [(0, 0), (0, 0), (0, capacity - length), (0, 0), (0, 0)]
    cache = jax.tree.map(lambda new: jnp.pad(new, pad), outs["stack"].layer_state)
    logits_B1V = forward.model.head.logits(head, x_BSD[:, -1:], ctx)
    return choose(kind, logits_B1V[:, 0], chosen, jnp.int32(0)), cache


def _decode(
    forward: Forward, static: Any, arrays: Any, cache: Nested, token_B: Any, where: Any, chosen: Any
) -> tuple[jax.Array, Nested]:
    """One more token of each row, and the cache with the last one."""
    first_B, slot = where["first"], where["slot"]
    batch = {"tokens": token_B[:, None], "positions": (slot - first_B)[:, None], "first": first_B, "slot": slot}
    ctx, (params, buffers) = _context(forward, batch), arrays
    x_B1D, head, outs = forward((params, {**buffers, "stack": cache}), ctx)
    write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis=2)  # noqa: E731
    cache = jax.tree.map(write, cache, outs["stack"].layer_state)
    logits_B1V = forward.model.head.logits(head, x_B1D, ctx)
    return choose(static[0], logits_B1V[:, 0], chosen, where["index"]), cache


def bucket(length: int) -> int:
    """The next of few lengths: multiples of 16, and from 128 on eight to each doubling."""
    unit = max(16, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // unit) * unit


class TextStream:
    """Tokens as text, a token at a time: no half characters, and nothing from the first of the `stops` on."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self.tokenizer, self.stops, self.ended, self._held = tokenizer, [stop for stop in stops if stop], False, ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int | None) -> str:
        """The text that has become certain; None ends it."""
        if self.ended:
            return ""
        data = b"" if token is None else self.tokenizer.decode_bytes([token])
        text, self._held = self._held + self._utf8.decode(data, final=token is None), ""
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        self.ended = bool(found) or token is None
        if self.ended:
            return text[: min(found, default=len(text))]
        begun = [n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        cut = len(text) - max(begun, default=0)
        self._held = text[cut:]
        return text[:cut]


def stream_text(
    generator: Generator, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], sampling: Sampling, stops: Any = ()
) -> Iterator[list[str]]:
    """Per step, the new text of each row; ends when all rows have. `stops` are texts that end a row."""
    streams = [TextStream(tokenizer, stops) for _ in prompts]
    for tokens in generator.stream(prompts, sampling):
        yield [stream.push(token) for stream, token in zip(streams, tokens, strict=True)]
        if all(stream.ended for stream in streams):
            return
    yield [stream.push(None) for stream in streams]
