"""Sums over the sequences of a row, and pairs of sequences.

A row holds several sequences one after the other, masked from each other: position s belongs to sequence number
segments_BS[s], 1, 2, ... in each row; 0 is padding. In a row of pairs, the odd numbers are the chosen sequences, each
followed by the rejected one. A sequence of n tokens takes n - 1 positions, each with the next token as its target.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pairs:
    """Values of the sequences of pairs.

    Attributes:
        chosen: those of the chosen sequences, [B, P]; zeros for missing pairs.
        rejected: those of the rejected sequences, [B, P]; zeros for missing pairs.
    """

    chosen: jax.Array
    rejected: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AnswerPairs:
    """Inputs of a loss over pairs.

    Attributes:
        log_probs: the log-probability of each answer, summed over its tokens.
        log_ratios: log_probs minus those of the reference; zeros without a reference.
        lengths: number of tokens of each answer.
    """

    log_probs: Pairs
    log_ratios: Pairs
    lengths: Pairs

    @property
    def mean_log_probs(self) -> Pairs:
        """The log-probabilities per token of each answer."""
        return per_token(self.log_probs, self.lengths)


def sum_sequences(values_BS: jax.Array, segments_BS: jax.Array) -> jax.Array:
    """Sum values over each sequence, [B, N]; entry n is that of segment n + 1, and N is even and at least S."""
    length = values_BS.shape[1]
    num_sequences = length + length % 2
    # The sum of padding, which has the number 0, is dropped.
    row_sums = partial(jax.ops.segment_sum, num_segments=num_sequences + 1)
    sums_BN = jax.vmap(row_sums)(values_BS, segments_BS)
    return sums_BN[:, 1:]


def split_pairs(values_BN: jax.Array) -> Pairs:
    """Split the values of all sequences into those of chosen and of rejected sequences."""
    return Pairs(chosen=values_BN[:, 0::2], rejected=values_BN[:, 1::2])


def per_token(sums: Pairs, lengths: Pairs) -> Pairs:
    """Divide sums over the tokens of answers by the numbers of tokens; a sequence without an answer stays at zero."""
    return jax.tree.map(lambda values, lengths: values / jnp.maximum(lengths, 1.0), sums, lengths)
