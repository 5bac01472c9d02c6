"""Selection of the next token: greedy, or sampled with temperature, top-k and top-p."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingArrays:
    """Sampling settings as arrays, so that no value is compiled into a program.

    Attributes:
        keys: uint32[B, 2], the key data of each row.
        temperature, top_p: float32, as in `Sampling`.
        top_k: int32, at most the size of the vocabulary.
    """

    keys: jax.Array
    temperature: jax.Array | np.ndarray
    top_k: jax.Array | np.ndarray
    top_p: jax.Array | np.ndarray


@dataclass(frozen=True)
class Sampling:
    """Sampling settings.

    Args:
        max_new_tokens: maximum number of new tokens per row.
        temperature: divisor of the logits; 0 selects the most likely token.
        top_k: sample only from the k most likely tokens; None for all.
        top_p: of these, sample only from the smallest set of most likely tokens whose probabilities add up to p
            (arXiv 1904.09751).
        stop_ids: tokens that end a row; they are not part of the output.
        seed: random seed. Row i is sampled with (seed, i), independent of the rest of the batch.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self):
        # Comparisons with NaN are false, so NaN is refused as well.
        checks = [
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", 0.0 < self.top_p <= 1.0, "over 0, and at most 1"),
            ("seed", 0 <= self.seed < 1 << 32, "0 to 2^32 - 1"),
        ]
        for name, is_good, expected in checks:
            if not is_good:
                raise ValueError(f"{name}: expected {expected}, given {getattr(self, name)}")

    @property
    def kind(self) -> str:
        """The `kind` for `choose`. It is static, so only filtered sampling pays for sorting the vocabulary."""
        if self.temperature == 0.0:
            return "greedy"
        if self.top_k is not None or self.top_p < 1.0:
            return "filtered"
        return "all"

    def to_arrays(self, vocab_size: int, num_rows: int) -> SamplingArrays:
        """Return the settings for a batch of `num_rows` rows."""
        fold = functools.partial(jax.random.fold_in, jax.random.key(self.seed))
        return SamplingArrays(
            keys=jax.random.key_data(jax.vmap(fold)(jnp.arange(num_rows))),
            temperature=np.asarray(self.temperature, np.float32),
            top_k=np.asarray(min(self.top_k or vocab_size, vocab_size), np.int32),
            top_p=np.asarray(self.top_p, np.float32),
        )


def choose(kind: str, logits_BV: jax.Array, settings: SamplingArrays, index: jax.Array | np.ndarray) -> jax.Array:
    """Choose the next token of each row: int32 [B].

    Args:
        kind: "greedy"; "all", to sample from all tokens; "filtered", to sample with top_k and top_p.
        logits_BV: logits of the model.
        settings: sampling settings; not read if greedy.
        index: number of the decoding step, which gives each step of a row a different key.
    """
    if kind == "greedy":
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    # One key per row and step, so that a row's samples do not depend on the other rows of the batch.
    fold = jax.vmap(lambda data: jax.random.fold_in(jax.random.wrap_key_data(data), index))
    keys = fold(settings.keys)
    sample = jax.vmap(jax.random.categorical)
    logits_BV = logits_BV / settings.temperature
    if kind == "all":
        return sample(keys, logits_BV).astype(jnp.int32)
    order_BV = jnp.argsort(logits_BV, axis=-1, descending=True)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    # A mask instead of lax.top_k: k is an array, so one program serves all settings.
    ranks_V = jnp.arange(sorted_BV.shape[-1])
    in_top_k_V = ranks_V < settings.top_k
    sorted_BV = jnp.where(in_top_k_V, sorted_BV, -jnp.inf)
    p_BV = jax.nn.softmax(sorted_BV, axis=-1)
    # The total probability of all more likely tokens: 0 for the first, so at least one token remains.
    before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
    in_top_p_BV = before_BV < settings.top_p
    candidates_BV = jnp.where(in_top_p_BV, sorted_BV, -jnp.inf)
    # A rank in the sorted row, which maps back to the token.
    sampled_B = sample(keys, candidates_BV)
    tokens_B1 = jnp.take_along_axis(order_BV, sampled_B[:, None], axis=-1)
    return tokens_B1[:, 0].astype(jnp.int32)
