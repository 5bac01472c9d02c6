"""A hand-written Llama in plain JAX, for the benchmarks of `pl.eager`, `pl.stream` and `pl.with_lora`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class JaxLlama:
    """The sizes of a model, and functions for its parts. Activations are [tokens, dim], from one row of a batch."""

    layers: int
    dim: int
    heads: int
    hidden: int
    vocab: int
    dtype: Any

    def layer(self, weights: Any, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Apply one layer to [tokens, dim]; return the same shape, and None, as `jax.lax.scan` requires."""
        tokens = x.shape[0]
        normed = norm(x, weights["norm1"])
        queries, keys, values = ((normed @ weights[name]).reshape(tokens, self.heads, -1) for name in ("q", "k", "v"))
        mixed = jax.nn.dot_product_attention(rotate(queries), rotate(keys), values, is_causal=True)
        x = x + mixed.reshape(tokens, self.dim) @ weights["out"]
        normed = norm(x, weights["norm2"])
        return x + (jax.nn.silu(normed @ weights["gate"]) * (normed @ weights["up"])) @ weights["down"], None

    def head_loss(self, weights: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        """Return the mean cross-entropy of activations [tokens, dim] and targets [tokens]."""
        logits = norm(x, weights["norm"]) @ weights["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
        return losses.mean()

    def table_shape(self) -> jax.ShapeDtypeStruct:
        """Return the shape of the embedding, [vocab, dim]."""
        return self._shape(self.vocab, self.dim)

    def layer_shapes(self) -> Shapes:
        """Return the shapes of one layer's weights."""
        shapes = {name: self._shape(self.dim, self.dim) for name in ("q", "k", "v", "out")}
        shapes |= {name: self._shape(self.dim, self.hidden) for name in ("gate", "up")}
        shapes |= {name: self._shape(self.dim) for name in ("norm1", "norm2")}
        return shapes | {"down": self._shape(self.hidden, self.dim)}

    def stack_shapes(self) -> Shapes:
        """Return the shapes of all layers' weights, [layers, ...]."""
        return {name: self._shape(self.layers, *shape.shape) for name, shape in self.layer_shapes().items()}

    def head_shapes(self) -> Shapes:
        """Return the shapes of the last norm's and the head's weights."""
        return {"norm": self._shape(self.dim), "head": self._shape(self.dim, self.vocab)}

    def _shape(self, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, self.dtype)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Apply RMSNorm over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-5)
    return (wide * root).astype(x.dtype) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Apply rotary position embeddings to [tokens, heads, size]."""
    half = x.shape[-1] // 2
    rates = 1e4 ** (-jnp.arange(half) / half)
    angles = (jnp.arange(x.shape[0])[:, None] * rates)[:, None, :]
    left, right = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
