"""A hand-written transformer without a library: a scan over stacked layers, remat, a tied embedding."""

from typing import Any

import jax
import jax.numpy as jnp

# All of these, and the products below, differ, so that a buffer can be identified by its size.
LAYERS, DIM, WIDE, VOCABULARY = 5, 64, 128, 352
HEADS = 4
BATCH, LENGTH = 2, 7
MATRICES = "embed|qkv|out|up|down"

Params = dict[str, Any]


def init(dtype: Any) -> Params:
    """Return the parameters in `dtype`: embed [VOCABULARY, DIM], and stacked layers."""
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape: int) -> jax.Array:
        return 0.2 * jax.random.normal(next(keys), shape, dtype)

    layers = {
        "qkv": normal(LAYERS, DIM, 3 * DIM),
        "out": normal(LAYERS, DIM, DIM),
        "up": normal(LAYERS, DIM, WIDE),
        "down": normal(LAYERS, WIDE, DIM),
        "norm": jnp.ones((LAYERS, DIM), dtype),
    }
    return {"embed": normal(VOCABULARY, DIM), "layers": layers}


def tokens() -> jax.Array:
    """Return random tokens, int32 [BATCH, LENGTH]."""
    return jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, VOCABULARY)


def _layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
    batch, length, _ = x.shape
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    normed = x * jax.lax.rsqrt(mean_square + 1e-6) * weights["norm"]
    heads = (normed @ weights["qkv"]).reshape(batch, length, 3, HEADS, DIM // HEADS)
    query, key, value = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, value)
    # Separate axes for heads and for the features of a head, as in much handwritten code.
    out = weights["out"].reshape(HEADS, DIM // HEADS, DIM)
    x = x + jnp.einsum("bqhd,hdm->bqm", mixed, out)
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None


def loss(params: Params, tokens: jax.Array) -> jax.Array:
    """Return the mean negative log-likelihood of each token at its own position.

    The model sees the token that it predicts. This is not a useful task, but it has all parts of one.
    """
    x = params["embed"][tokens]
    x, _ = jax.lax.scan(jax.checkpoint(_layer), x, params["layers"])
    logits = jnp.einsum("bsd,vd->bsv", x, params["embed"])
    likelihoods = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)
    return -jnp.mean(likelihoods)
