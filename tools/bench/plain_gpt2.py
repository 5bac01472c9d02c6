"""Hand-written GPT-2 in plain JAX and optax, in one file: the step that ours is measured against.

The model is a list of layers and a Python loop in one jit with donated state. Follows Radford et al. 2019 and nanoGPT;
uses nothing of Plimsoll.
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
    """Initialize as GPT-2 does: normal(0.02), with projections into the residual stream scaled by 1/sqrt(2L)."""
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


def compute_logits(params: Params, tokens: jax.Array, heads: int) -> jax.Array:
    """Return float32 logits [B, S, V] of tokens int32[B, S]."""
    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
    for p in params["layers"]:
        x = x + _attention(p, _norm(p["ln1"], x), heads)
        h = jax.nn.gelu(_linear(p["up"], _norm(p["ln2"], x)), approximate=True)
        x = x + _linear(p["down"], h)
    return _norm(params["lnf"], x) @ params["wte"].T


def compute_loss(params: Params, tokens: jax.Array, targets: jax.Array, heads: int) -> jax.Array:
    """Return the mean cross-entropy."""
    logits = compute_logits(params, tokens, heads)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def decays(params: Params) -> Any:
    """Return the weight decay mask: matrices decay; norms, biases and positions do not."""
    mask = jax.tree.map(lambda p: p.ndim == 2, params)
    return {**mask, "wpe": False}


OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(CLIP), optax.adamw(LEARNING_RATE, b1=B1, b2=B2, weight_decay=WEIGHT_DECAY, mask=decays)
)


@partial(jax.jit, static_argnames="heads", donate_argnums=(0, 1))
def step(
    params: Params, state: optax.OptState, tokens: jax.Array, targets: jax.Array, *, heads: int
) -> tuple[Params, optax.OptState, jax.Array]:
    """Take one training step; return (params, optimizer state, loss before the update)."""
    loss, grads = jax.value_and_grad(compute_loss)(params, tokens, targets, heads)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss  # pyright: ignore[reportReturnType]
