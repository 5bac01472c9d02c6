"""Rollout: one compiled program samples answers to a batch of prompts, with the log-probability of each token.

`framework.inference.generation` copies every token to the host to show it. Training does not need that, so here the
loop over tokens runs on the device. It ends when all answers have ended.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from plimsoll.framework.inference.generation import InferenceForward, bucket, read_prompts, read_token
from plimsoll.framework.layout import Nested
from plimsoll.framework.program.program import Program


class SampledAnswers(NamedTuple):
    """Answers to the prompts of a batch.

    Attributes:
        tokens: int32[B, A]; 0 after the end.
        log_probs: f32[B, A], the log-probability of each token under the model that sampled it; 0 after the end.
        counts: int32[B], number of tokens of each answer, including the stop token.
    """

    # Device arrays or host arrays.
    tokens: Any
    log_probs: Any
    counts: Any


class SamplingInputs(NamedTuple):
    """The inputs that determine the random draws of a batch, so that the same state gives the same answers again.

    Attributes:
        words: uint32[2], the key data of the run.
        stream: int32, the step in training; evaluations use negative numbers.
        numbers: int32[B], row numbers.
        greedy: bool; take the most likely tokens instead of sampling.
    """

    # Arrays, or abstract arrays if the program is only compiled.
    words: Any
    stream: Any
    numbers: Any
    greedy: Any


# Folded into the run's key, to separate these draws from the dropout of the steps.
_ROLLOUTS = 0x726F6C6C


def rollout_jit(program: Program, weights: Nested, answer_tokens: int, stop_ids: tuple[int, ...]) -> Any:
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
    arrays: tuple[Nested, Nested],
    prompts_BS: jax.Array,
    lengths_B: jax.Array,
    sampling_inputs: SamplingInputs,
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
    keys_B = _row_keys(sampling_inputs)
    capacity = bucket(length + answer_tokens)
    logits_BV, cache = read_prompts(forward, capacity, arrays, tokens_BP, first_B)
    token_B, log_prob_B = _sample_token(logits_BV, keys_B, jnp.int32(0), sampling_inputs.greedy)
    none_BA = jnp.zeros((num_rows, answer_tokens), jnp.int32)
    answers = SampledAnswers(none_BA, none_BA.astype(jnp.float32), jnp.zeros(num_rows, jnp.int32))

    def should_continue(carry: Any) -> jax.Array:
        index, _, _, running_B, _, _ = carry
        return (index < answer_tokens) & jnp.any(running_B)

    def next_token(carry: Any) -> Any:
        index, token_B, log_prob_B, running_B, cache, answers = carry
        answers = _with_column(answers, index, token_B, log_prob_B, running_B)
        running_B = running_B & ~jnp.isin(token_B, jnp.asarray(stop_ids, jnp.int32))
        # The last iteration also reads its token. This costs one token's time and keeps the loop simple.
        logits_BV, cache = read_token(forward, arrays, cache, token_B, first_B, length + index)
        token_B, log_prob_B = _sample_token(logits_BV, keys_B, index + 1, sampling_inputs.greedy)
        return index + 1, token_B, log_prob_B, running_B, cache, answers

    carry = (jnp.int32(0), token_B, log_prob_B, running_B, cache, answers)
    *_, answers = jax.lax.while_loop(should_continue, next_token, carry)
    return answers


def _with_column(
    answers: SampledAnswers, index: jax.Array, token_B: jax.Array, log_prob_B: jax.Array, running_B: jax.Array
) -> SampledAnswers:
    """Write the tokens of column `index` into the answers that are still running."""
    column = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=index, axis=1)
    tokens_B1 = jnp.where(running_B, token_B, 0)[:, None]
    log_probs_B1 = jnp.where(running_B, log_prob_B, 0.0)[:, None]
    return SampledAnswers(
        column(answers.tokens, tokens_B1),
        column(answers.log_probs, log_probs_B1),
        answers.counts + running_B.astype(jnp.int32),
    )


def _row_keys(sampling_inputs: SamplingInputs) -> jax.Array:
    """Return the key of each row, [B], which depends only on (run, stream, row number)."""
    run_key = jax.random.fold_in(jax.random.wrap_key_data(sampling_inputs.words), _ROLLOUTS)
    stream_key = jax.random.fold_in(run_key, sampling_inputs.stream)
    return jax.vmap(functools.partial(jax.random.fold_in, stream_key))(sampling_inputs.numbers)


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
