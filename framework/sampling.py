"""Sampling: continues a prompt with the model.

One compiled function runs the whole model on a window of fixed length for every new token: nothing but the layout's
weights and the window is on the device. May import: framework.program.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from framework.program import Program


def sample(
    program: Program,
    state: dict[str, Any],
    prompt: list[int],
    *,
    num_tokens: int,
    temperature: float,
    seed: int = 0,
) -> list[int]:
    """`num_tokens` tokens that follow the prompt.

    Args:
        program: the compiled experiment; its seq_len is the window.
        state: the training state; averaged weights are used where there are some.
        prompt: token ids, at least one; what does not fit the window is cut off at its start.
        num_tokens: how many to draw.
        temperature: divides the logits; 0 takes the most likely token.
        seed: of the draws.

    Raises:
        ValueError: the prompt is empty.
    """
    if not prompt:
        raise ValueError("sampling needs a prompt of at least one token")
    length = program.experiment.data.seq_len
    window = np.zeros((1, length), np.int32)
    kept = prompt[-length:]
    window[0, : len(kept)] = kept
    params = program.weights(state, averaged=bool(state["ema"]))
    draw = jax.jit(_draw, static_argnums=(0, 1, 2))
    tokens, filled = jnp.asarray(window), jnp.int32(len(kept))
    out = []
    for index in range(num_tokens):
        key = jax.random.fold_in(jax.random.key(seed), index)
        tokens, filled, token = draw(program, temperature, length, params, state["buffer"], tokens, filled, key)
        out.append(token)
    return [int(token) for token in jax.device_get(out)]


def _draw(
    program: Program,
    temperature: float,
    length: int,
    params: Any,
    buffers: Any,
    tokens: jax.Array,
    filled: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One more token: (window, how many of its positions are filled, the token)."""
    ctx = program.evaluation_context({"tokens": tokens})
    model = program.experiment.model
    x_BSD, _ = model.hidden(params, ctx, buffers)
    last = jax.lax.dynamic_slice_in_dim(x_BSD, filled - 1, 1, axis=1)
    weights = model.head.prepare(model.stage_params(params, "head"), ctx)
    logits = model.head.logits(weights, last, ctx)[0, 0]
    if temperature == 0.0:
        token = jnp.argmax(logits)
    else:
        token = jax.random.categorical(key, logits / temperature)
    full = filled == length
    tokens = jnp.where(full, jnp.roll(tokens, -1, axis=1), tokens)
    position = jnp.where(full, length - 1, filled)
    tokens = jax.lax.dynamic_update_slice(tokens, token.astype(tokens.dtype)[None, None], (0, position))
    return tokens, position + 1, token
