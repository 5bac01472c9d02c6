"""GPT-2 in plain JAX and optax, one file, as a person would write it by hand: the step that ours is measured against.

A list of layers and a Python loop, one jit, the state donated. Follows Radford et al. 2019 and nanoGPT; nothing of
Plimsoll is used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tools.bench.sizes import B1, B2, CLIP, LEARNING_RATE, WEIGHT_DECAY, Size

Params = dict[str, Any]


def init(size: Size, seed: int = 0) -> Params:
    """GPT-2's initialization: normal(0.02), projections into the residual stream by 1/sqrt(2L) smaller."""
    rng = np.random.default_rng(seed)
    D, L = size.dim, size.layers

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * np.float32(0.02 * scale))

    def linear(inputs: int, outputs: int, scale: float = 1.0) -> Params:
        return {"w": normal(inputs, outputs, scale=scale), "b": jnp.zeros(outputs)}

    def norm() -> Params:
        return {"g": jnp.ones(D), "b": jnp.zeros(D)}

    small = 1.0 / np.sqrt(2 * L)
    layers = [
        {
            "ln1": norm(),
            "qkv": linear(D, 3 * D),
            "out": linear(D, D, small),
            "ln2": norm(),
            "up": linear(D, 4 * D),
            "down": linear(4 * D, D, small),
        }
        for _ in range(L)
    ]
    return {"wte": normal(size.vocab, D), "wpe": normal(size.positions, D), "layers": layers, "lnf": norm()}


def _norm(p: Params, x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["g"] + p["b"]


def _linear(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def _attention(p: Params, x: jax.Array, heads: int) -> jax.Array:
    B, S, D = x.shape
    q, k, v = (t.reshape(B, S, heads, D // heads) for t in jnp.split(_linear(p["qkv"], x), 3, axis=-1))
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) / np.sqrt(D // heads)
    scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -1e30)
    y = jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores, axis=-1), v)
    return _linear(p["out"], y.reshape(B, S, D))


def logits_of(params: Params, tokens: jax.Array, heads: int) -> jax.Array:
    """tokens int32[B, S] -> float32 logits [B, S, V]."""
    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
    for p in params["layers"]:
        x = x + _attention(p, _norm(p["ln1"], x), heads)
        h = jax.nn.gelu(_linear(p["up"], _norm(p["ln2"], x)), approximate=True)
        x = x + _linear(p["down"], h)
    return _norm(params["lnf"], x) @ params["wte"].T


def loss_of(params: Params, tokens: jax.Array, targets: jax.Array, heads: int) -> jax.Array:
    """Mean cross-entropy."""
    logits = logits_of(params, tokens, heads)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def decays(params: Params) -> Any:
    """Weight decay for matrices; none for norms, biases and positions."""
    mask = jax.tree.map(lambda p: p.ndim == 2, params)
    return {**mask, "wpe": False}


OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(CLIP),
    optax.adamw(LEARNING_RATE, b1=B1, b2=B2, weight_decay=WEIGHT_DECAY, mask=decays),
)


@partial(jax.jit, static_argnames="heads", donate_argnums=(0, 1))
def step(
    params: Params, state: optax.OptState, tokens: jax.Array, targets: jax.Array, *, heads: int
) -> tuple[Params, optax.OptState, jax.Array]:
    """One training step: (params, optimizer state, loss before it)."""
    loss, grads = jax.value_and_grad(loss_of)(params, tokens, targets, heads)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss  # pyright: ignore[reportReturnType]
