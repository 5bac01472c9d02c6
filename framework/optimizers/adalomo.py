"""AdaLomo: Adafactor's second moments without a first one, steps in proportion to the weights (Lv et al. 2023, arXiv
2310.10195, algorithm 1), made of optax's parts. Its state is a row and a column per matrix: next to nothing.
"""

from __future__ import annotations

import optax

from framework.config import FiniteNonNegative, PositiveFloat, component


@component
def adalomo(
    *,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: FiniteNonNegative = 0.0,
    decay_rate: PositiveFloat = 0.8,
    clip_threshold: PositiveFloat = 1.0,
    eps: FiniteNonNegative = 1e-30,
    min_scale: FiniteNonNegative = 1e-3,
) -> optax.GradientTransformation:
    """For each tensor p with gradient g at step t:

        beta = 1 - t^-decay_rate
        r = beta r + (1 - beta) mean over columns of (g^2 + eps),  c likewise over rows;  v = r c / mean(r)
        u = g / sqrt(v),  u = u / max(1, RMS(u) / clip_threshold)
        p = p - learning_rate max(min_scale, RMS(p)) (u + weight_decay p)

    Vectors keep all of v; of tensors with more dimensions, the two largest are factored.

    Args:
        learning_rate: of an update of RMS 1, relative to the RMS of the weights.
        weight_decay: decoupled.
        decay_rate: of the second moment's memory.
        clip_threshold: the largest RMS of an update before it is scaled.
        eps: keeps the second moment from zero.
        min_scale: what tensors of zeros are moved by.
    """
    return optax.chain(
        # optax's default would keep all of v for matrices with a side under 128.
        optax.scale_by_factored_rms(decay_rate=decay_rate, min_dim_size_to_factor=1, epsilon=eps),
        optax.clip_by_block_rms(clip_threshold),
        optax.add_decayed_weights(weight_decay),
        # After the weight decay: the algorithm scales both by RMS(p).
        optax.scale_by_param_block_rms(min_scale),
        optax.scale_by_learning_rate(learning_rate),
    )
