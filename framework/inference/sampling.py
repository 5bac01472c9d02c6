"""How the next token is chosen: greedy, by temperature, top-k, top-p."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and how many.

    Args:
        max_new_tokens: at most this many per row.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: only the k most likely tokens; None for all.
        top_p: of these only the fewest most likely whose probabilities add up to p (arXiv 1904.09751).
        stop_ids: tokens that end a row; they are not given out.
        seed: of the draws. Row i draws by (seed, i), whatever else is in the batch.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self):
        for name, good, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", 0.0 < self.top_p <= 1.0, "over 0, and at most 1"),
            ("seed", 0 <= self.seed < 1 << 32, "0 to 2^32 - 1"),
        ):
            if not good:
                raise ValueError(f"{name}: expected {expected}, given {getattr(self, name)}")


def row_keys(seed: int, rows: int) -> jax.Array:
    """uint32[rows, 2]: the key data of each row."""
    fold = functools.partial(jax.random.fold_in, jax.random.key(seed))
    return jax.random.key_data(jax.vmap(fold)(jnp.arange(rows)))


def choose(kind: str, logits_BV: jax.Array, chosen: dict[str, jax.Array], index: jax.Array) -> jax.Array:
    """int32[B]: a token of each row, drawn by its key and the index of the step; see `Sampling` for top_k and top_p."""
    if kind == "greedy":
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    keys = jax.vmap(lambda data: jax.random.fold_in(jax.random.wrap_key_data(data), index))(chosen["keys"])
    logits_BV = logits_BV / chosen["temperature"]
    if kind == "all":
        return jax.vmap(jax.random.categorical)(keys, logits_BV).astype(jnp.int32)
    order_BV = jnp.argsort(logits_BV, axis=-1, descending=True)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    sorted_BV = jnp.where(jnp.arange(sorted_BV.shape[-1]) < chosen["top_k"], sorted_BV, -jnp.inf)
    p_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV  # 0 for the first: one token always stays
    drawn_B = jax.vmap(jax.random.categorical)(keys, jnp.where(before_BV < chosen["top_p"], sorted_BV, -jnp.inf))
    return jnp.take_along_axis(order_BV, drawn_B[:, None], axis=-1)[:, 0].astype(jnp.int32)
