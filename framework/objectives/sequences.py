"""Sums over the sequences of a row, and pairs of sequences.

A row holds several sequences one after the other, masked from each other: position s belongs to number segments_BS[s],
1, 2, ... in each row; 0 is padding. In a row of pairs, the odd numbers are the sequences that were chosen, and each is
followed by the one that was rejected. A sequence of n tokens takes n - 1 positions, each with the next token as target.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Pairs(NamedTuple):
    """Values of the sequences of pairs, each [B, P]; those of pairs that are not there are zeros."""

    chosen: jax.Array
    rejected: jax.Array


class Answers(NamedTuple):
    """What a loss over pairs is a function of.

    Attributes:
        log_probs: the log-probability of each answer, summed over its tokens.
        log_ratios: that less the reference's; zeros where there is no reference.
        lengths: tokens of each answer.
    """

    log_probs: Pairs
    log_ratios: Pairs
    lengths: Pairs

    @property
    def mean_log_probs(self) -> Pairs:
        """The log-probabilities per token of each answer."""
        return per_token(self.log_probs, self.lengths)


def sequence_sums(values_BS: jax.Array, segments_BS: jax.Array) -> jax.Array:
    """The sums of values over each sequence, [B, N]; entry n is of segment n + 1, and N is even and at least S."""
    length = values_BS.shape[1]
    num_sequences = length + length % 2
    # Padding has the number 0, whose sum is dropped.
    row_sums = partial(jax.ops.segment_sum, num_segments=num_sequences + 1)
    sums_BN = jax.vmap(row_sums)(values_BS, segments_BS)
    return sums_BN[:, 1:]


def pairs_of(values_BN: jax.Array) -> Pairs:
    """The values of chosen and rejected sequences, from those of all sequences."""
    return Pairs(chosen=values_BN[:, 0::2], rejected=values_BN[:, 1::2])


def per_token(sums: Pairs, lengths: Pairs) -> Pairs:
    """Sums over the tokens of answers, divided by their numbers; a sequence without an answer keeps its zero."""
    return Pairs(*(values / jnp.maximum(lengths, 1.0) for values, lengths in zip(sums, lengths, strict=True)))
