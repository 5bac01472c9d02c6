"""Rollout: one compiled program samples answers to a batch of prompts, with the log-probability of each token.

`framework.inference.generation` copies every token to the host to show it. Training does not need that, so here the
loop over tokens runs on the device. It ends when all answers have ended.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.inference.generation import (
    CachePosition,
    InferenceForward,
    ModelArrays,
    bucket,
    read_prompts,
    read_tokens,
)
from plimsoll.framework.layout import Nested
from plimsoll.framework.program.program import Program

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampledAnswers:
    """Answers to the prompts of a batch, on the devices or on the host.

    Attributes:
        tokens: int32[B, A]; 0 after the end.
        log_probs: f32[B, A], the log-probability of each token under the model that sampled it; 0 after the end.
        counts: int32[B], number of tokens of each answer, including the stop token.
    """

    tokens: jax.Array | np.ndarray
    log_probs: jax.Array | np.ndarray
    counts: jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingInputs(Generic[T]):
    """The inputs that determine the random draws of a batch, so that the same state gives the same answers again.

    T is jax.Array, or jax.ShapeDtypeStruct if the program is only compiled.

    Attributes:
        words: uint32[2], the key data of the run.
        stream: int32, the step in training; evaluations use negative numbers.
        numbers: int32[B], row numbers.
        greedy: bool; take the most likely tokens instead of sampling.
    """

    words: T
    stream: T
    numbers: T
    greedy: T


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _LoopState:
    """The state of the loop over the tokens of the answers.

    Attributes:
        index: int32, number of tokens that are in the answers so far.
        token_B: int32[B], the next token of each row.
        log_prob_B: f32[B], its log-probability.
        running_B: bool[B], whether the row has not ended before this token.
        cache: keys and values of all preceding tokens.
        answers: the answers so far.
    """

    index: jax.Array
    token_B: jax.Array
    log_prob_B: jax.Array
    running_B: jax.Array
    cache: Nested
    answers: SampledAnswers


# Folded into the run's key, to separate these draws from the dropout of the steps.
_ROLLOUTS = 0x726F6C6C


def rollout_jit(program: Program, weights: Nested, answer_tokens: int, stop_ids: tuple[int, ...]) -> jax.stages.Wrapped:
    """Return the jitted function ((weights, buffers), prompts_BS, lengths_B, SamplingInputs) -> SampledAnswers.

    Args:
        program: program of the experiment on its mesh.
        weights: all parameters, as arrays or abstract arrays; only their shardings are read.
        answer_tokens: A, maximum number of tokens of an answer.
        stop_ids: tokens that end an answer.
    """
    forward = InferenceForward(program, weights)
    function = functools.partial(_rollout, forward, answer_tokens, stop_ids)
    return program.jit(function, out_shardings=program.replicated)


def _rollout(
    forward: InferenceForward,
    answer_tokens: int,
    stop_ids: tuple[int, ...],
    arrays: ModelArrays,
    prompts_BS: jax.Array,
    lengths_B: jax.Array,
    sampling_inputs: SamplingInputs[jax.Array],
) -> SampledAnswers:
    """Continue prompts that start in the first column. A row of length 0 has no prompt and gets no answer."""
    running_B = lengths_B > 0
    longest_prompt = prompts_BS.shape[1] + 1 - answer_tokens
    num_rows = prompts_BS.shape[0]
    # The model must read at least one token.
    lengths_B = jnp.maximum(lengths_B, 1)
    length = bucket(longest_prompt)
    first_B = length - lengths_B
    # Move the padding to the left: column c of the result is column c - first of the given prompt.
    columns_BP = jnp.arange(length) - first_B[:, None]
    shifted_BP = jnp.take_along_axis(prompts_BS, jnp.maximum(columns_BP, 0), axis=1)
    tokens_BP = jnp.where(columns_BP >= 0, shifted_BP, 0)
    # The key of each row depends only on (run, stream, row number).
    run_key = jax.random.fold_in(jax.random.wrap_key_data(sampling_inputs.words), _ROLLOUTS)
    stream_key = jax.random.fold_in(run_key, sampling_inputs.stream)
    keys_B = jax.vmap(functools.partial(jax.random.fold_in, stream_key))(sampling_inputs.numbers)
    capacity = bucket(length + answer_tokens)
    logits_BV, cache = read_prompts(forward, capacity, arrays, tokens_BP, first_B)
    token_B, log_prob_B = _sample_token(logits_BV, keys_B, jnp.int32(0), sampling_inputs.greedy)
    none_BA = jnp.zeros((num_rows, answer_tokens), jnp.int32)
    answers = SampledAnswers(none_BA, none_BA.astype(jnp.float32), jnp.zeros(num_rows, jnp.int32))

    def should_continue(loop: _LoopState) -> jax.Array:
        return (loop.index < answer_tokens) & jnp.any(loop.running_B)

    def next_token(loop: _LoopState) -> _LoopState:
        # Write the token of each row that is still running into column `index`.
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=loop.index, axis=1)
        tokens_B1 = jnp.where(loop.running_B, loop.token_B, 0)[:, None]
        log_probs_B1 = jnp.where(loop.running_B, loop.log_prob_B, 0.0)[:, None]
        answers = SampledAnswers(
            write(loop.answers.tokens, tokens_B1),
            write(loop.answers.log_probs, log_probs_B1),
            loop.answers.counts + loop.running_B.astype(jnp.int32),
        )
        running_B = loop.running_B & ~jnp.isin(loop.token_B, jnp.asarray(stop_ids, jnp.int32))
        # The last iteration also reads its token. This costs one token's time and keeps the loop simple.
        position = CachePosition(None, first_B, None, length + loop.index)
        logits_BV, cache = read_tokens(forward, arrays, loop.cache, loop.token_B[:, None], position)
        token_B, log_prob_B = _sample_token(logits_BV, keys_B, loop.index + 1, sampling_inputs.greedy)
        return _LoopState(loop.index + 1, token_B, log_prob_B, running_B, cache, answers)

    loop = _LoopState(jnp.int32(0), token_B, log_prob_B, running_B, cache, answers)
    return jax.lax.while_loop(should_continue, next_token, loop).answers


def _sample_token(
    logits_BV: jax.Array, keys_B: jax.Array, index: jax.Array, greedy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Choose the token at position `index` of each row; returns tokens int32[B] and their log-probabilities f32[B]."""
    position_keys_B = jax.vmap(lambda key: jax.random.fold_in(key, index))(keys_B)
    sampled_B = jax.vmap(jax.random.categorical)(position_keys_B, logits_BV)
    likeliest_B = jnp.argmax(logits_BV, axis=-1)
    token_B = jnp.where(greedy, likeliest_B, sampled_B).astype(jnp.int32)
    log_probs_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32), axis=-1)
    log_prob_B1 = jnp.take_along_axis(log_probs_BV, token_B[:, None], axis=-1)
    return token_B, log_prob_B1[:, 0]
